"""metrics.jsonl is one valid JSON object a line, there as soon as it is written."""

import json
import math

import pytest

from pith.errors import RunFailedError
from pith.run.metrics import MetricsLog, StepMetrics

KEYS = (
    "step, loss, balance_loss, grad_norm, lr, tokens, step_seconds, tokens_per_second, "
    "mfu_causal, mfu_full, memory_bytes, z_loss, communication_seconds, expert_load"
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
    assert [bare[key] for key in unknown] == [None] * 5
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
