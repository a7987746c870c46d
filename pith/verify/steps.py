"""What a step of metrics.jsonl has to tell, and what is wrong with what one tells."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

NUMBERS = ("lr", "loss", "z_loss", "balance_loss", "grad_norm")
OF_EXPERTS = ("z_loss", "balance_loss", "expert_load")  # null where no layer has experts
COUNTS = ("samples", "tokens", "tokens_per_second", "step_seconds", "memory_bytes")  # above 0


def step_faults(steps: Sequence[Mapping[str, Any]], *, num_steps: int) -> Iterator[str]:
    """Why these are not the steps from 1 to `num_steps`, each there once and in order."""
    numbers = [number_of(step) for step in steps]
    for step, number in zip(steps, numbers, strict=True):
        if number is None:
            yield f"a step is numbered {said(step, 'step')}"
    known = [number for number in numbers if number is not None]
    counted = Counter(known)
    there = sorted(number for number in counted if 1 <= number <= num_steps)
    for before, number in pairwise([0, *there]):
        if number - before == 2:
            yield f"step {number - 1} is missing"
        elif number - before > 2:
            yield f"steps {before + 1} to {number - 1} are missing"
    if not there:
        yield "no step at all"
    elif there[-1] < num_steps:
        yield f"it ends after step {there[-1]}"
    yield from (f"step {number} is there {n} times" for number, n in counted.items() if n > 1)
    for number in sorted(counted.keys() - set(there)):
        yield f"step {number!s:.20} is none of the run"
    for before, number in pairwise(known):
        if number < before:
            yield f"step {number} comes after step {before}"
    read = [finite_number(step.get("samples")) for step in steps]
    for earlier, now, step in zip(read, read[1:], steps[1:], strict=False):
        if earlier is not None and now is not None and now <= earlier:
            yield f"step {said(step, 'step')} has read no more samples than the step before"


def value_faults(
    step: Mapping[str, Any], widths: Mapping[str, int], *, top_k: int
) -> Iterator[str]:
    """What a step does not tell, or what cannot be; `widths` are the experts by layer."""
    faulty = dict.fromkeys(_faulty(step, widths))
    for name in faulty:
        yield f"step {said(step, 'step')}: {name} is {said(step, name)}"
    if not faulty:
        yield from (f"step {said(step, 'step')}: {text}" for text in _at_odds(step, top_k))


def _at_odds(step: Mapping[str, Any], top_k: int) -> Iterator[str]:
    """Where the values of a step contradict each other."""
    pairs = step["tokens"] * top_k
    for layer, row in step["expert_load"].items():
        if sum(row) != pairs:
            yield f"layer {layer} has {sum(row)} pairs, not {pairs}"
    tokens = step["tokens_per_second"] * step["step_seconds"]
    if not math.isclose(tokens, step["tokens"], rel_tol=1e-6):
        yield f"tokens_per_second is {said(step, 'tokens_per_second')}"


def _faulty(step: Mapping[str, Any], widths: Mapping[str, int]) -> Iterator[str]:
    for name in NUMBERS:
        may_be_null = name in OF_EXPERTS and not widths
        value = finite_number(step.get(name))
        is_told = value is not None and value >= 0
        if not is_told and not (may_be_null and step.get(name) is None):
            yield name
    for name in COUNTS:
        number = finite_number(step.get(name))
        if number is None or number <= 0:
            yield name
    if not is_text(step.get("sample_digest")):
        yield "sample_digest"
    load = expert_load(step.get("expert_load"))
    if load is None or {layer: len(row) for layer, row in load.items()} != widths:
        yield "expert_load"


def finite_number(value: object) -> float | None:
    """`value` where it is a number that a float holds; None for anything else, booleans too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def expert_load(value: object) -> dict[str, list[int]] | None:
    """Pairs per expert by layer, where `value` is that; None for anything else."""
    if not isinstance(value, Mapping):
        return None
    rows = {str(layer): row for layer, row in value.items()}
    are_counts = (
        isinstance(row, list) and all(type(n) is int and 0 <= n < 1 << 53 for n in row)
        for row in rows.values()
    )
    return rows if all(are_counts) else None


def number_of(step: Mapping[str, Any]) -> int | None:
    """Which step this is; None where it does not say so by a whole number."""
    number = step.get("step")
    return number if type(number) is int else None


def is_text(value: object) -> bool:
    """Whether `value` is a text that says something."""
    return isinstance(value, str) and value != ""


def is_count(value: object) -> bool:
    """Whether `value` is a whole number from 1."""
    return type(value) is int and value >= 1


def first_few(faults: Sequence[str]) -> str:
    """The first three of several faults, and how many more there are; "" without any."""
    more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
    return "; ".join(faults[:3]) + more


def said(values: Mapping[str, Any], key: str) -> str:
    """A value as a report tells it: in JSON, or that it is missing."""
    return f"{json.dumps(values[key]):.40}" if key in values else "missing"
