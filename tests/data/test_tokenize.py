"""R28 and P05: every document is accounted for, whatever the workers and the interruptions."""

import json
import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pith.data.corpus import TokenCorpus
from pith.data.loader import prepare
from pith.data.tokenize import Progress, tokenize
from pith.errors import RequestError, RunFailedError

END = 256
WORDS = ["alpha", "beta", "gamma", "delta"]


def texts(count: int) -> list[str]:
    return [" " if k % 50 == 7 else " ".join(WORDS[: k % 5]) + f" {k}" for k in range(count)]


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def documents(folder: Path) -> list[str]:
    corpus = TokenCorpus.open(folder)
    found = [corpus.document(k).tolist() for k in range(corpus.num_documents)]
    assert all(tokens[-1] == END and END not in tokens[:-1] for tokens in found)
    return [bytes(tokens[:-1]).decode() for tokens in found]


@pytest.mark.parametrize("empty", ["", " ", "\n", "\t\r\n \u3000"])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_p05_empty_documents_are_left_out_and_counted(tmp_path, write_texts, empty, place) -> None:
    source = write_texts([*"abc"[:place], empty, *"abc"[place:]])
    done = tokenize([str(source)], out=tmp_path / "out", workers=1)
    assert documents(done.path) == ["a", "b", "c"]
    assert (done.documents_in, done.documents_out, done.num_empty, done.num_bad) == (4, 3, 1, 0)
    assert done.rejected == ({"where": f"{source}:{place + 1}", "reason": "empty"},)


@pytest.mark.parametrize("kept", [[], ["", " ", "\n"]])
def test_p05_a_run_without_documents_is_an_error(tmp_path, write_texts, kept) -> None:
    with pytest.raises(RequestError, match=f"found {len(kept)} empty and 0 bad of {len(kept)}"):
        tokenize([str(write_texts(kept))], out=tmp_path / "out", workers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]


def test_r28_documents_in_are_documents_out_and_rejected(tmp_path, write_texts) -> None:
    source = write_texts(texts(3000))
    lines = source.read_text().splitlines()
    lines[100], lines[2999] = "{", "7"
    source.write_text("\n".join(lines))
    done = tokenize([str(source)], out=tmp_path / "out", workers=1, max_bad_lines=2)
    bad, empty = {100, 2999}, {k for k in range(3000) if k % 50 == 7}
    kept = [text for k, text in enumerate(texts(3000)) if k not in bad | empty]
    assert documents(done.path) == kept
    assert done.documents_in == 3000 == done.documents_out + done.num_empty + done.num_bad
    assert (done.num_empty, done.num_bad) == (60, 2)
    assert done.num_tokens == sum(len(text.encode()) + 1 for text in kept)
    listed = [json.loads(line) for line in (done.path / "rejected.jsonl").open()]
    places = sorted(int(entry["where"].removeprefix(f"{source}:")) - 1 for entry in listed)
    assert places == sorted(bad | empty)
    assert TokenCorpus.open(done.path).manifest.num_rejected == 62
    assert set(done.files) == {file.name for file in done.path.iterdir()}


def test_r28_the_bytes_do_not_depend_on_the_workers(tmp_path, write_texts) -> None:
    source = str(write_texts(texts(5000)))
    for workers in (1, 3):
        tokenize([source], out=tmp_path / f"{workers}", workers=workers, tokens_per_file=9999)
    one, three = content(tmp_path / "1"), content(tmp_path / "3")
    assert one == three
    assert sum(name.startswith("tokens-") for name in one) > 5
    assert documents(tmp_path / "3") == [text for text in texts(5000) if text.strip()]


KILLED = """
import os, signal, sys
from pathlib import Path
from pith.data.tokenize import tokenize

def killed(progress):
    if progress.records > int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    out = Path(sys.argv[2])
    tokenize([sys.argv[1]], out=out, workers=int(sys.argv[3]), on_progress=killed,
             tokens_per_file=99999)
"""


def kill(script: Path, *arguments: object) -> None:
    """Runs until killed, and until every process that holds its output is gone."""
    command = [sys.executable, str(script), *map(str, arguments)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL


def test_r28_a_killed_run_leaves_no_process_and_continues_to_the_same_bytes(
    tmp_path, write_texts
) -> None:
    source, script = write_texts(texts(20_000)), tmp_path / "killed.py"
    script.write_text(KILLED)
    tokenize([str(source)], out=tmp_path / "whole", workers=1, tokens_per_file=99999)
    out = tmp_path / "out"
    kill(script, source, out, 2, 10_000)
    kill(script, source, out, 1, 18_000)
    assert not out.exists()
    seen: list[int] = []

    def note(progress: Progress) -> None:
        seen.append(progress.records)

    done = tokenize([str(source)], out=out, workers=1, tokens_per_file=99999, on_progress=note)
    assert content(out) == content(tmp_path / "whole")
    assert done.records_reused == 2 * 16 * 512  # one save in each run that was killed
    assert min(seen) > done.records_reused
    assert not out.with_name("out.partial").exists()


def test_what_was_written_for_other_inputs_or_is_damaged_is_not_reused(
    tmp_path, write_texts
) -> None:
    source = write_texts(texts(600))  # the first 512 are written before the bad line is met
    source.write_text(source.read_text() + "bad\n")
    out, draft = tmp_path / "out", tmp_path / "out.partial"
    for damage in (
        lambda: source.write_text(source.read_text().replace("alpha", "omega")),
        lambda: (draft / "progress.json").write_text("{"),
        lambda: (draft / "progress.json").write_text("[]"),
        lambda: (draft / "offsets.bin").write_bytes(b""),
        (draft / "tokens-00000.bin").unlink,
        (draft / "progress.json").unlink,
    ):
        with pytest.raises(RequestError):
            tokenize([str(source)], out=out, workers=1)
        assert json.loads((draft / "progress.json").read_text())["records"] == 512
        damage()
        (draft / "tokens-00007.bin").write_bytes(b"stray")
        done = tokenize([str(source)], out=out, workers=1, max_bad_lines=1)
        assert done.records_reused == 0
        again = tokenize([str(source)], out=tmp_path / "again", workers=1, max_bad_lines=1)
        assert content(done.path) == content(again.path)
        for folder in (out, again.path):
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()


def test_a_run_stopped_by_a_bad_line_continues_after_it_when_told_to_skip(
    tmp_path, write_texts
) -> None:
    source, out = write_texts(texts(600)), tmp_path / "out"
    source.write_text(source.read_text() + "bad\n")
    with pytest.raises(RequestError, match=f"{source}:601: "):
        tokenize([str(source)], out=out, workers=1)
    done = tokenize([str(source)], out=out, workers=1, max_bad_lines=1)
    assert (done.records_reused, done.documents_in, done.num_bad) == (512, 601, 1)


def test_an_existing_output_is_left_alone(tmp_path, write_texts) -> None:
    source, out = str(write_texts(["a"])), tmp_path / "out"
    tokenize([source], out=out, workers=1)
    before = content(out)
    with pytest.raises(RequestError, match="exists already"):
        tokenize([source], out=out, workers=1)
    assert content(out) == before


@pytest.mark.parametrize("name", [".", "/", "..", "", "file/x", "file/x/y", "A" * 300, "a\0b"])
def test_an_output_that_can_be_no_folder_is_refused(tmp_path, write_texts, monkeypatch, name):
    source = str(write_texts(["a"]))
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RequestError) as caught:
        tokenize([source], out=Path(name), workers=1)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def test_two_processes_do_not_write_to_one_place(tmp_path, write_texts) -> None:
    source, out = str(write_texts(["a"])), tmp_path / "out"

    def meanwhile(_: Progress) -> None:
        with pytest.raises(RequestError, match="another process is writing"):
            tokenize([source], out=out, workers=1)

    tokenize([source], out=out, workers=1, on_progress=meanwhile)
    assert documents(out) == ["a"]


def test_an_error_in_a_worker_is_the_error_of_the_run(tmp_path, write_texts) -> None:
    source = write_texts(texts(2000))
    source.write_text(source.read_text() + "bad\n")
    with pytest.raises(RequestError, match=f"{source}:2001: not JSON"):
        tokenize([str(source)], out=tmp_path / "out", workers=2)


def test_a_worker_that_is_killed_ends_the_run_with_one_line(tmp_path, write_texts) -> None:
    killed = []

    def kill_one(_: Progress) -> None:
        # Results that were ready before the kill are still reported after it.
        for child in multiprocessing.active_children()[:1]:
            child.kill()
            killed.append(child)

    source = str(write_texts(texts(20_000)))
    with pytest.raises(RunFailedError, match="a tokenizing process was killed"):
        tokenize([source], out=tmp_path / "out", workers=2, on_progress=kill_one)
    assert killed
    assert not multiprocessing.active_children()
    assert not (tmp_path / "out").exists()


LOSING = """
import multiprocessing, os, signal, sys, threading
from pathlib import Path
from pith.data.tokenize import tokenize
from pith.errors import RunFailedError

def main(source, out, first, last, delay_s, stopped):
    timers = []

    def lose(progress):
        if timers:
            if progress.records > 4:
                timers[0].join()  # the run does not end before its workers
            return
        pids = sorted(child.pid for child in multiprocessing.active_children())
        lost = pids[int(first) : int(last)]

        def send(number):
            for pid in lost:
                os.kill(pid, number)

        if stopped == "stopped":
            send(signal.SIGSTOP)
        timers.append(threading.Timer(float(delay_s), send, [signal.SIGKILL]))
        timers[0].start()

    try:
        tokenize([source], out=Path(out), workers=2, on_progress=lose)
    except RunFailedError as error:
        print(error, len(multiprocessing.active_children()))

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.mark.parametrize(
    "loss",  # the first worker lost, the last, the time until then, and what they do meanwhile
    [
        "0 2 0.3 stopped",
        "0 1 0.3 stopped",
        "0 2 0 running",
        "0 1 0 running",
        "1 2 0.003 running",
        "0 1 0.01 running",
        "1 2 0.03 running",
    ],
)
def test_workers_killed_in_the_middle_of_large_bundles_end_the_run_in_time(
    tmp_path, write_texts, loss
) -> None:
    source, script = write_texts(["x" * 1_000_000] * 16), tmp_path / "losing.py"
    script.write_text(LOSING)
    command = [sys.executable, script, source, tmp_path / "out", *loss.split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout.startswith("a tokenizing process was killed")
    assert ended.stdout.endswith(" 0\n")
    assert ended.stderr == ""


def test_a_full_disk_is_one_line_and_the_next_run_continues(
    tmp_path, write_texts, monkeypatch
) -> None:
    source, out = str(write_texts(texts(100))), tmp_path / "out"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(RunFailedError, match="No space left on device"):
            tokenize([source], out=out, workers=1)
    assert not out.exists()
    tokenize([source], out=out, workers=1)
    assert documents(out) == [text for text in texts(100) if text.strip()]


def test_the_embedded_corpus_is_english_and_made_once(tmp_path) -> None:
    corpus = prepare("embedded", work_dir=tmp_path / "run")
    assert 500_000 < corpus.num_tokens < 1_500_000
    assert corpus.num_documents > 40
    text = " ".join(
        bytes(corpus.document(k)[:-1].tolist()).decode() for k in range(corpus.num_documents)
    )
    words = text.lower().split()
    assert 0.04 < words.count("the") / len(words) < 0.08
    made = {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*")}
    assert prepare("embedded", work_dir=tmp_path / "run").fingerprint == corpus.fingerprint
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*")} == made


def test_a_corpus_is_a_folder_or_a_file_or_refused(tmp_path, make_corpus, write_texts) -> None:
    made = make_corpus(["a", "b"])
    assert prepare(str(made.path), work_dir=tmp_path / "run").fingerprint == made.fingerprint
    assert not (tmp_path / "run").exists()
    source = write_texts(["a", "b"])
    from_file = prepare(str(source), work_dir=tmp_path / "run")
    assert from_file.fingerprint == made.fingerprint
    source.write_text('{"text": "changed"}')
    assert prepare(str(source), work_dir=tmp_path / "run").num_documents == 1
    for absent in ("nowhere", str(tmp_path), "a\0b"):
        with pytest.raises(RequestError, match=r"no such corpus folder|manifest is missing"):
            prepare(absent, work_dir=tmp_path / "run")
    with pytest.raises(RequestError, match="name too long"):
        prepare("A" * 300, work_dir=tmp_path / "run")
    source.write_text("bad")
    with pytest.raises(RequestError, match="not JSON"):
        prepare(str(source), work_dir=tmp_path / "run")
    assert len(list((tmp_path / "run").iterdir())) == 2


PREPARED = """
import sys
from pathlib import Path
from pith.data.loader import prepare
print(prepare("embedded", work_dir=Path(sys.argv[1])).fingerprint)
"""


def test_processes_may_prepare_the_same_corpus_at_the_same_time(tmp_path) -> None:
    command = [sys.executable, "-c", PREPARED, str(tmp_path / "run")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = {process.communicate(timeout=60)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(printed) == 1
    assert len(list((tmp_path / "run").iterdir())) == 1


def test_reading_does_not_need_memory_for_the_whole_file(tmp_path) -> None:
    source = tmp_path / "big.jsonl"
    with source.open("w") as file:
        for k in range(40):
            file.write(json.dumps({"text": f"{k} " + "x" * 1_000_000}) + "\n")
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from pith.data.tokenize import tokenize\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "tokenize([sys.argv[1]], out=Path(sys.argv[2]), workers=1)\n"
        "print((peak() - before) * (1 if sys.platform == 'darwin' else 1024))\n"
    )
    command = [sys.executable, "-c", script, str(source), str(tmp_path / "out")]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert int(printed.stdout) < 70e6  # the tokens alone would be 320 MB as 64-bit numbers
