"""metrics.jsonl is one valid JSON object a line, there as soon as it is written."""

import json
import math
import random
import tracemalloc

import pytest

from pith.errors import RequestError, RunFailedError
from pith.run.metrics import MetricsLog, StepMetrics, read_steps, rewind

KEYS = (
    "step, loss, balance_loss, grad_norm, lr, tokens, step_seconds, tokens_per_second, "
    "mfu_causal, mfu_full, memory_bytes, z_loss, communication_seconds, samples, sample_digest, "
    "expert_load"
)


def metrics(**changes):
    fields = {
        "step": 1,
        "loss": 5.5,
        "balance_loss": 1.0,
        "grad_norm": 2.0,
        "lr": 1e-3,
        "tokens": 64,
        "step_seconds": 0.5,
        "tokens_per_second": 128.0,
    }
    return StepMetrics(**(fields | changes))


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def lines(path):
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_step_has_the_promised_keys(tmp_path):
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.step(metrics())
        seconds = {"dispatch": 0.25, "reduce": math.nan}
        loads = {"3": (5, 7)}
        log.step(metrics(z_loss=4.5, communication_seconds=seconds, expert_load=loads))
    bare, full = lines(tmp_path / "m.jsonl")
    assert ", ".join(bare) == ", ".join(full) == KEYS
    unknown = ("mfu_causal", "mfu_full", "memory_bytes", "z_loss", "communication_seconds")
    assert [bare[key] for key in (*unknown, "samples", "sample_digest")] == [None] * 7
    assert full["z_loss"] == 4.5
    assert full["communication_seconds"] == {"dispatch": 0.25, "reduce": None}
    assert full["expert_load"] == {"3": [5, 7]}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_null(tmp_path, value):
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.step(metrics(loss=value))
        log.event("non_finite", step=1, rank=2, grad_norm=value)
    step, event = lines(tmp_path / "m.jsonl")
    assert step["loss"] is None
    assert event == {"event": "non_finite", "step": 1, "rank": 2, "grad_norm": None}


def test_each_line_is_on_disk_before_the_next_step(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl")
    for step in (1, 2, 3):
        log.step(metrics(step=step))
        assert [line["step"] for line in lines(tmp_path / "m.jsonl")] == list(range(1, step + 1))
    log.close()


def test_a_later_log_appends(tmp_path):
    for step in (1, 2):
        with MetricsLog(tmp_path / "m.jsonl") as log:
            log.step(metrics(step=step))
    assert [line["step"] for line in lines(tmp_path / "m.jsonl")] == [1, 2]


def test_text_with_line_ends_stays_one_line(tmp_path):
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.event("note", text="a\nb\u2028c")
    assert lines(tmp_path / "m.jsonl") == [{"event": "note", "text": "a\nb\u2028c"}]


def test_a_full_disk_is_a_failed_run_that_names_the_file_and_the_cause(tmp_path):
    (tmp_path / "m.jsonl").symlink_to("/dev/full")
    log = MetricsLog(tmp_path / "m.jsonl")
    with pytest.raises(RunFailedError, match=r"m\.jsonl.*No space left"):
        log.step(metrics())
    log.close()


def test_a_log_that_cannot_be_opened_is_a_failed_run_that_names_the_file(tmp_path):
    (tmp_path / "m.jsonl").mkdir()
    with pytest.raises(RunFailedError, match=r"m\.jsonl.*Is a directory"):
        MetricsLog(tmp_path / "m.jsonl")


def written(path, *steps):
    """Lines of these steps; an event of each and one without a step stand between them."""
    with MetricsLog(path) as log:
        for step in steps:
            log.step(metrics(step=step))
            log.event("validation", step=step, loss=4.5)
            log.event("started", layout="é")
    return path.read_text().splitlines(keepends=True)


@pytest.mark.parametrize("step", range(6))
def test_rewinding_drops_what_tells_of_later_steps_and_nothing_else(tmp_path, step):
    before = written(tmp_path / "m.jsonl", 1, 2, 3, 4)
    assert rewind(tmp_path / "m.jsonl", step=step) == max(0, 4 - step)
    kept = [line for line in before if json.loads(line).get("step", 0) <= step]
    assert (tmp_path / "m.jsonl").read_text() == "".join(kept)
    assert [line["step"] for line in read_steps(tmp_path / "m.jsonl")] == [1, 2, 3, 4][:step]


def test_a_run_that_goes_on_after_any_cut_writes_the_file_of_one_that_never_stopped(tmp_path):
    path = tmp_path / "m.jsonl"
    whole = "".join(written(path, 1, 2, 3)).encode()
    end_of_step_1 = whole.rindex(b"\n", 0, whole.index(b'"step": 2')) + 1
    choose = random.Random(0)
    for size in sorted(choose.sample(range(end_of_step_1, len(whole)), 200)):
        path.write_bytes(whole[:size])
        rewind(path, step=1)
        written(path, 2, 3)
        # What has no step was written before the cut and stays, so it is there once more.
        steps = [line for line in lines(path) if "step" in line]
        assert steps == [line for line in map(json.loads, whole.splitlines()) if "step" in line]


def test_a_torn_last_line_is_dropped_and_is_no_step(tmp_path):
    path = tmp_path / "m.jsonl"
    before = written(path, 1, 2)
    for torn in (
        '{"step": 3, "loss": 5.',
        '{"step": 1, "loss"',
        "{",
        "\0\0\0",
        '{"event": "\udcc3',
    ):
        path.write_text("".join(before) + torn, errors="surrogateescape")
        assert [line["step"] for line in read_steps(path)] == [1, 2]
        assert rewind(path, step=2) == 0
        assert path.read_text() == "".join(before)


def test_a_whole_last_line_that_lacks_only_its_end_is_kept(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    assert [line["step"] for line in read_steps(path)] == [1, 2]
    assert rewind(path, step=2) == 0
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    path.write_text('{"step": 1}\n{"step": 2}')
    assert rewind(path, step=1) == 1
    assert path.read_text() == '{"step": 1}\n'


def test_a_file_in_which_nothing_changes_is_not_written(tmp_path):
    path = tmp_path / "m.jsonl"
    written(path, 1, 2)
    before = path.stat()
    assert rewind(path, step=2) == 0
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


def test_no_file_and_an_empty_one_have_no_steps(tmp_path):
    path = tmp_path / "m.jsonl"
    assert (rewind(path, step=4), read_steps(path)) == (0, [])
    assert not path.exists()
    path.write_bytes(b"")
    assert (rewind(path, step=4), read_steps(path)) == (0, [])


@pytest.mark.parametrize(
    "broken",
    [
        b'{"step": 2, "lo{"step": 3}',
        b"",
        b"[2]",
        b"\xff",
        b'{"step": "2"}',
        b'{"step": 2.5}',
        pytest.param(b"[" * 100_000, id="deep"),
    ],
)
def test_a_broken_line_in_the_middle_is_refused_by_its_number_and_changes_nothing(tmp_path, broken):
    path = tmp_path / "m.jsonl"
    for after in (b'{"step": 3}\n{"st', b""):
        path.write_bytes(b'{"step": 1}\n' + broken + b"\n" + after)
        before = path.read_bytes()
        for call in (lambda: rewind(path, step=0), lambda: read_steps(path)):
            with pytest.raises(RequestError, match=r"m\.jsonl:2: a line of the metrics is broken"):
                call()
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


def test_rewinding_keeps_the_file_where_it_cannot_write(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    before = written(path, 1, 2)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunFailedError, match=r"m\.jsonl.*No space left"):
        rewind(path, step=1)
    assert path.read_text() == "".join(before)
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


def test_rewinding_a_long_file_takes_little_memory(tmp_path):
    path = tmp_path / "m.jsonl"
    load = "7, " * 3000
    with path.open("w") as file:
        file.writelines(f'{{"step": {step}, "load": [{load}7]}}\n' for step in range(1, 201))
    assert path.stat().st_size > 1.8e6
    tracemalloc.start()
    assert rewind(path, step=100) == 100
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 0.6e6
    assert len(read_steps(path)) == 100
