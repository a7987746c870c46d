"""Checkpoints of a Qwen3-30B-A3B layer on a GPU: stall, load time, and a resume on other ranks.

Usage: python tools/campaigns/hopper_resume.py OUT_DIR

Trains one layer of real width for eight steps on one GPU in bfloat16, deterministic, with a
checkpoint every four, synchronous and asynchronous; goes on from step 4 in the same layout, and as
two ranks over gloo with experts spread. Checks that asynchronous saves change no loss, that the
same layout goes on to the last bit and the other one within 5e-3. Prints a table; exit 1 when a
check fails.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from hopper_slice import GLOO, LENGTH, SEQUENCES, SLICE

TOLERANCE = 5e-3
STEPS = 8
SETTINGS = SLICE | {
    "model.fields.num_hidden_layers": 1,
    "training.steps": STEPS,
    "optimizer.warmup_steps": 4,
    "checkpoint.every": 4,
    "checkpoint.keep": 0,
}


def main() -> int:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    corpus = out / "text.txt"
    corpus.write_text("The quick brown fox jumps over the lazy dog. " * (SEQUENCES * LENGTH // 8))
    one = ["--device=cuda", "--set=training.deterministic=true"]
    runs = {
        "synchronous": train(out / "sync", corpus, [*one, "--set=checkpoint.asynchronous=false"]),
        "asynchronous": train(out / "async", corpus, one),
        # Steps enough for a save to end before the next one.
        "asynchronous, long": train(
            out / "long",
            corpus,
            [*one, "--set=training.steps=800", "--set=checkpoint.every=400"],
        ),
    }
    shutil.rmtree(out / "long")
    start = f"--resume={out / 'sync' / 'checkpoints' / 'step-00000004'}"
    runs["resumed"] = train(out / "again", corpus, [*one, start])
    spread = [*GLOO, "--set=parallel.ep=2", start]
    runs["resumed, gloo, ep 2"] = train(out / "spread", corpus, spread)
    for name, lines in runs.items():
        stalls = [f"{x['stall_seconds']:.2f}" for x in lines if x.get("event") == "checkpoint"]
        loads = [f"{x['seconds']:.2f}" for x in lines if x.get("event") == "loaded"]
        seconds = sorted(x["step_seconds"] for x in lines if "event" not in x)
        print(
            f"{name:20} stall {' '.join(stalls)} s, load {' '.join(loads) or '-'} s,"
            f" median step {seconds[len(seconds) // 2]:.2f} s, loss {losses(lines)[-1]:.6f}"
        )
    size = sum(f.stat().st_size for f in (out / "sync/checkpoints/step-00000004").iterdir())
    print(f"a checkpoint has {size:,} bytes")
    problems = list(check(runs))
    (out / "hopper_resume.json").write_text(json.dumps({"runs": runs, "failed": problems}))
    print("\n".join(problems) or "every check held")
    return 1 if problems else 0


def train(run_dir: Path, corpus: Path, options: list[str]) -> list[dict]:
    command = [sys.executable, "-m", "pith.cli", "train", "qwen3-30b-a3b", f"--run-dir={run_dir}"]
    settings = SETTINGS | {"data.corpus": corpus}
    command += [f"--set={key}={value}" for key, value in settings.items()] + options
    subprocess.run(command, check=True, timeout=300)
    return list(map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()))


def losses(lines: list[dict]) -> list[float]:
    return [line["loss"] for line in lines if "event" not in line]


def check(runs: dict[str, list[dict]]):
    whole = losses(runs["synchronous"])
    if losses(runs["asynchronous"]) != whole:
        yield f"asynchronous: {losses(runs['asynchronous'])}, synchronous {whole}"
    if losses(runs["resumed"]) != whole[4:]:
        yield f"resumed: {losses(runs['resumed'])}, unbroken {whole[4:]}"
    for one, other in zip(whole[4:], losses(runs["resumed, gloo, ep 2"]), strict=True):
        if not abs(one - other) <= TOLERANCE * one:
            yield f"resumed, gloo, ep 2: loss {other}, unbroken {one}"


if __name__ == "__main__":
    sys.exit(main())
