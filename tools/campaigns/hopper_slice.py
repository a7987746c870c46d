"""Qwen3-30B-A3B widths on a GPU: bf16 against the CPU, one process against two.

Usage: python tools/campaigns/hopper_slice.py OUT_DIR [--steps 20] [--only WORD ...]

Runs `pith train` on a slice of two layers with four sequences of 1024 tokens that every step
repeats: on the CPU in float32 (one step), on the GPU in bfloat16, there again as two ranks over
gloo (pipeline, experts with both exchanges), and over NCCL where there are two GPUs (data parallel
too). Checks that all values are finite, that the loss falls, that the first losses agree to 5e-3
and the bfloat16 curves to 5e-3 a step. `--only` takes the runs whose names hold one of the words,
besides the references. Prints a table; exit 1 when a check fails.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import torch

TOLERANCE = 5e-3
SEQUENCES, LENGTH = 4, 1024
SHORT = ["--set=training.precision=float32", "--set=optimizer.warmup_steps=1"]
REFERENCES = {
    "cpu float32": ["--device=cpu", *SHORT, "--set=training.steps=1"],
    "gpu bfloat16": ["--device=cuda"],
}
PP2, EP2 = "--set=parallel.pp=2", "--set=parallel.ep=2"
SPLITS = "--set=parallel.exchange=splits"
GLOO, NCCL = ["--device=cuda", "--backend=gloo"], ["--device=cuda", "--backend=nccl"]
ONE_GPU = {
    "gpu float32": ["--device=cuda", *SHORT, "--set=training.steps=2"],
    "gpu bfloat16, gloo, pp 2": [*GLOO, PP2],
    "gpu bfloat16, gloo, ep 2": [*GLOO, EP2],
    "gpu bfloat16, gloo, ep 2, splits": [*GLOO, EP2, SPLITS],
}
TWO_GPUS = {
    "2 gpus bfloat16, nccl, pp 2": [*NCCL, PP2],
    "2 gpus bfloat16, nccl, ep 2": [*NCCL, EP2],
    "2 gpus bfloat16, nccl, ep 2, splits": [*NCCL, EP2, SPLITS],
    "2 gpus bfloat16, nccl, dp 2": [*NCCL, "--nproc=2"],
    "2 gpus bfloat16, nccl, dp 2, hsdp": [*NCCL, "--nproc=2", "--set=parallel.dp_shard=1"],
}
SLICE = {
    "model.fields.num_hidden_layers": 2,
    "model.fields.vocab_size": 16384,  # text is read byte by byte; a head that gloo can reduce
    "parallel.pp": 1,
    "parallel.ep": 1,
    "parallel.schedule": "auto",
    "data.validation": 0,
    "data.packing": "none",
    "training.global_batch_size": SEQUENCES,
    "training.sequence_length": LENGTH,
    "optimizer.schedule": "constant",
    "optimizer.lr": 1e-4,  # gentle enough for two curves to be compared step by step
    "optimizer.warmup_steps": 10,
    "optimizer.decay_steps": 0,
    "validation.every": 0,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    corpus = options.out / "repeated.txt"
    source = resources.files("pith.data") / "embedded" / "python-docs.jsonl"
    text = "".join(json.loads(line)["text"] for line in source.read_text().splitlines())
    corpus.write_text(text[: SEQUENCES * LENGTH + 100], encoding="ascii", errors="replace")
    others = ONE_GPU | (TWO_GPUS if torch.cuda.device_count() > 1 else {})
    chosen = {n: place for n, place in others.items() if any(w in n for w in options.only)}
    runs = {n: train(place, options, corpus) for n, place in (REFERENCES | chosen).items()}
    for name, steps in runs.items():
        last, speed = steps[-1], max(step["tokens_per_second"] for step in steps)
        memory = (last["memory_bytes"] or 0) / 1e9
        print(
            f"{name:36} loss {steps[0]['loss']:.5f} -> {last['loss']:.5f} in {len(steps)} steps,"
            f" grad norm {steps[0]['grad_norm']:.4f}, {speed:,.0f} tokens/s, {memory:.1f} GB"
        )
    problems = list(check(runs))
    (options.out / "hopper_slice.json").write_text(json.dumps({"runs": runs, "failed": problems}))
    print("\n".join(problems) or "every check held")
    return 1 if problems else 0


def train(place: list[str], options: argparse.Namespace, corpus: Path) -> list[dict]:
    settings = SLICE | {"data.corpus": corpus, "training.steps": options.steps}
    command = [sys.executable, "-m", "pith.cli", "train", "qwen3-30b-a3b", "--json"]
    command += [f"--run-dir={options.out / 'run'}"]
    command += [f"--set={key}={value}" for key, value in settings.items()] + place
    answer = subprocess.run(command, check=True, timeout=400, stdout=subprocess.PIPE)
    folder = Path(json.loads(answer.stdout)["data"]["run_dir"])
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    shutil.rmtree(folder)  # weights of several gigabytes
    return [step for step in map(json.loads, lines) if "event" not in step]


def check(runs: dict[str, list[dict]]) -> Iterator[str]:
    reference = runs["cpu float32"][0]
    for name, steps in runs.items():
        values = [step[key] for step in steps for key in ("loss", "grad_norm")]
        if not all(value is not None and math.isfinite(value) for value in values):
            yield f"{name}: a value is not finite"
            continue
        if abs(steps[0]["loss"] - reference["loss"]) > TOLERANCE * reference["loss"]:
            yield f"{name}: first loss {steps[0]['loss']}, on the CPU {reference['loss']}"
        if len(steps) > 2 and not steps[-1]["loss"] < 0.7 * steps[0]["loss"]:
            yield f"{name}: loss {steps[0]['loss']} fell to {steps[-1]['loss']} only"
    alone = runs["gpu bfloat16"]
    for name, steps in runs.items():
        if "bfloat16" not in name:
            continue
        if len(alone) != len(steps):
            yield f"{name}: {len(steps)} steps, alone {len(alone)}"
        for one, other in zip(alone, steps, strict=False):
            if not abs(one["loss"] - other["loss"]) <= TOLERANCE * one["loss"]:
                yield f"{name}: step {one['step']} loss {other['loss']}, alone {one['loss']}"


if __name__ == "__main__":
    sys.exit(main())
