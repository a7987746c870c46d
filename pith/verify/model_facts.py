"""What a family says of a model without running it: fields, names, shapes, counts, initial values.

Everything happens on the meta device, so that the largest model is checked within seconds.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isclose, sqrt

import torch

from pith.arch.parameter import ParameterSpec, Role
from pith.report import Check
from pith.verify import transformers_model, whole_model
from pith.verify.subject import Subject, some, source_of

Shapes = dict[str, tuple[int, ...]]

HUB_NAMES = "names and shapes on the Hub"
CUTS = (1, 2, 4)  # numbers of stages that the model is cut into
# The ends of the names of projections that write to the residual stream.
OUTPUTS = (".o_proj.weight", ".out_proj.weight", ".down_proj.weight")


def check_facts(subject: Subject) -> Iterator[Check]:
    """Every check that needs no values."""
    num_parameters, saved = transformers_model.outline(subject.config)
    yield _fields(subject)
    yield from subject.run("canonical names and shapes", _stages)
    yield _hub_names(subject, {name: tuple(tensor.shape) for name, tensor in saved.items()})
    found = subject.architecture.num_parameters()
    yield subject.check(
        "number of parameters",
        found == num_parameters,
        found=f"{found:,}",
        wanted=f"{num_parameters:,}, as in transformers",
        where=f"{subject.facts_file} parameters",
    )
    yield _spreads(subject)


def check_constants(subject: Subject) -> Iterator[Check]:
    """Norms and biases begin as in transformers."""
    fresh = transformers_model.initial(subject.config)
    architecture = subject.architecture
    specs = [s for s in architecture.parameters() if s.role in (Role.NORM, Role.BIAS)]

    def holds(spec: ParameterSpec) -> bool:
        values = [fresh[name] for name in architecture.hf_name(spec.name) if name in fresh]
        same = all(bool(torch.all(value == spec.fill)) for value in values)
        return bool(values) and same and spec.std == 0

    faults = [f"{spec.name} is {spec.fill:g}" for spec in specs if not holds(spec)]
    yield subject.check(
        "first values of norms and biases",
        not faults,
        found=some(faults) or f"{len(specs)} tensors",
        wanted="those of a new transformers model",
        where=f"{subject.facts_file} parameters",
    )


def _fields(subject: Subject) -> Check:
    ignored = subject.architecture.ignored
    return subject.check(
        "fields of the config",
        not ignored,
        found=f"not read: {some(ignored)}" if ignored else f"{len(subject.config)} fields",
        wanted="each read, refused, or known to change nothing",
        where=f"{subject.facts_file} examine",
    )


def _stages(subject: Subject) -> Iterator[Check]:
    """The stages of every cut hold exactly the canonical tensors; a tied head comes on top."""
    architecture = subject.architecture
    specs = architecture.parameters()
    wanted = {spec.name: spec.shape for spec in specs}
    faults: dict[str, None] = {}
    where = ""
    for num_stages in CUTS:
        stages = whole_model.build_cut(architecture, num_stages)
        named = [(n, tuple(p.shape)) for stage in stages for n, p in stage.named_parameters()]
        found = dict(named)
        if architecture.tie_word_embeddings:
            table = wanted[whole_model.embedding_name(architecture)]
            heads = [name for name, shape in named if name not in wanted and shape == table]
            found = {name: shape for name, shape in found.items() if name not in heads[:1]}
        apart = _apart(found, wanted, sides=("in the stages", "in the facts"))
        faults |= dict.fromkeys(f"{kind} {name}" for kind in apart for name in apart[kind])
        if len(named) != len(dict(named)):
            faults["a name in two stages"] = None
        where = source_of(stages[0])
    yield subject.check(
        "canonical names and shapes",
        not faults,
        found=some(_collapsed([*faults]))
        or f"{len(specs)} tensors in {', '.join(map(str, CUTS))} stages",
        wanted="those of the facts in every cut",
        where=f"{where}, {subject.facts_file}",
    )


def _hub_names(subject: Subject, wanted: Shapes) -> Check:
    """The names of checkpoints are those that transformers writes."""
    found: Shapes = {}
    twice: list[str] = []
    for spec in subject.architecture.parameters():
        names = subject.architecture.hf_name(spec.name)
        shape = spec.shape[1:] if whole_model.numbers_experts(names) else spec.shape
        twice += [f"{name} twice" for name in names if name in found]
        found |= dict.fromkeys(names, shape)
    apart = _apart(found, wanted, sides=("in pith", "on the Hub")) | (
        {"twice": twice} if twice else {}
    )
    told = [f"{kind} {some(_collapsed(names))}" for kind, names in apart.items()]
    check = subject.check(
        HUB_NAMES,
        not apart,
        found="; ".join(told) or f"{len(found)} tensors",
        wanted="those that transformers saves",
        where=f"{subject.facts_file} hf_name",
    )
    return replace(check, details=apart)


def _spreads(subject: Subject) -> Check:
    """Standard deviations: one for all, and 1/sqrt(2 layers) of it at the end of a block."""
    architecture = subject.architecture
    base = float(subject.config.get("initializer_range", architecture.initializer_range))
    scaled = base / sqrt(2 * architecture.num_layers)

    def holds(spec: ParameterSpec) -> bool:
        if spec.role in (Role.NORM, Role.BIAS):
            return spec.std == 0
        is_output = spec.layer is not None and spec.name.endswith(OUTPUTS)
        return isclose(spec.std, scaled if is_output else base)

    faults = [f"{s.name} has {s.std:.3g}" for s in architecture.parameters() if not holds(s)]
    return subject.check(
        "spread of first values",
        not faults,
        found=some(faults) or f"{base:g}, {scaled:.3g} at the end of a block",
        wanted=f"{base:g}; {scaled:.3g} at the end of a block; 0 in norms and biases",
        where=f"{subject.facts_file} parameters",
    )


def _apart(found: Shapes, wanted: Shapes, *, sides: tuple[str, str]) -> dict[str, list[str]]:
    """The names that only one side has, `wanted` first, and those that differ in shape, by kind."""
    in_found, in_wanted = sides
    shapes = [
        f"{name} {shape}, not {wanted[name]}"
        for name, shape in found.items()
        if wanted.get(name, shape) != shape
    ]
    apart = {
        f"only {in_wanted}": [name for name in wanted if name not in found],
        f"only {in_found}": [name for name in found if name not in wanted],
        "of another shape": shapes,
    }
    return {kind: names for kind, names in apart.items() if names}


def _collapsed(names: Sequence[str]) -> list[str]:
    """Names that differ in numbers of layers and experts alone as one, and how many they are."""
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    return [f"{name} (x {count})" if count > 1 else name for name, count in counts.items()]
