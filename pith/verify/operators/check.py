"""Every implementation of an operator against its definition, case by case."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from pith.engine.weight_grads import WeightGrads
from pith.ops import Sizes, examine, implementations
from pith.ops.precision import wide
from pith.report import Check
from pith.verify.operators.case import Case, Definition, with_rubbish
from pith.verify.operators.definitions import DEFINITIONS
from pith.verify.operators.tolerance import error, tolerance

ROUNDS = (1, 2)  # the second, with twice the gradient, finds what the first one left behind
SEED = 1


@dataclass(frozen=True, slots=True)
class Subject:
    """One implementation of an operator, and how it is called."""

    operator: str
    implementation: str
    dtype: torch.dtype
    deferred: bool  # the gradient of the weight goes to a sink
    device: str

    def __str__(self) -> str:
        name = f"{self.operator} {self.implementation} {str(self.dtype).removeprefix('torch.')}"
        return f"{name} deferred" if self.deferred else name

    def serves(self, case: Case) -> bool:
        """Whether the implementation takes this type and these widths at all."""
        sizes = Sizes(self.dtype.itemsize, case.widths)
        return not examine({self.operator: self.implementation}, sizes)

    @property
    def function(self) -> Callable[..., Any]:
        module = import_module(f"pith.ops.{self.operator}.{self.implementation}")
        function: Callable[..., Any] = getattr(module, self.operator)
        return function


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a case must give in float64: outputs, and the gradients for `incoming`."""

    outputs: tuple[Tensor, ...]
    incoming: tuple[Tensor | None, ...]  # in the type of the outputs; None: whole numbers
    grads: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Finding:
    """The worst of one case: how far off it is, and that in words."""

    error: float
    told: str
    case: Case


def check_operator(operator: str, *, device: str) -> Iterator[Check]:
    """One check for each implementation, type and way of calling; `device` is "cpu" or "cuda"."""
    what = DEFINITIONS.get(operator)
    if what is None:
        yield Check(operator, False, "no definition", "one to check it against")
        return
    idle = set(implementations(operator))
    for dtype in what.dtypes:
        subjects = _subjects(operator, what, dtype, device)
        findings: dict[Subject, list[Finding]] = {subject: [] for subject in subjects}
        for case in what.cases():
            wanted = _wanted(what, case, dtype)
            for subject in subjects:
                if subject.serves(case):
                    findings[subject].append(_try(subject, what, case, wanted))
                    idle.discard(subject.implementation)
        yield from (_check(*item) for item in findings.items() if item[1])
    for implementation in sorted(idle):
        yield Check(f"{operator} {implementation}", False, "no case that it serves", "one or more")


def not_served(operator: str, *, device: str) -> list[str]:
    """Implementations with a type that they do not take: nothing there was checked."""
    what = DEFINITIONS[operator]
    return [
        str(subject)
        for dtype in what.dtypes
        for subject in _subjects(operator, what, dtype, device)
        if not any(map(subject.serves, what.cases()))
    ]


def _subjects(
    operator: str, what: Definition, dtype: torch.dtype, device: str
) -> tuple[Subject, ...]:
    ways = (False, True) if any(case.weight for case in what.cases()) else (False,)
    return tuple(
        Subject(operator, implementation, dtype, deferred, device)
        for implementation in implementations(operator)
        for deferred in ways
    )


def _wanted(what: Definition, case: Case, dtype: torch.dtype) -> Wanted:
    values = case.exact_inputs(dtype)
    outputs = what.oracle(*values, **case.keywords)
    random = torch.Generator().manual_seed(SEED)
    incoming = tuple(_incoming(out, what.dtype(dtype), case, random) for out in outputs)
    _backward(outputs, [None if dy is None else dy.double() for dy in incoming])
    leaves = case.with_gradient(values)
    grads = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in leaves.items()
    }
    return Wanted(tuple(out.detach() for out in outputs), incoming, grads)


def _incoming(
    output: Tensor, dtype: torch.dtype, case: Case, random: torch.Generator
) -> Tensor | None:
    if not output.is_floating_point():
        return None
    drawn = torch.randn(output.shape, generator=random, dtype=torch.float64).to(dtype)
    if case.expanded_grad and drawn.numel():
        return drawn.flatten()[0].expand(output.shape)
    return drawn


def _try(subject: Subject, what: Definition, case: Case, wanted: Wanted) -> Finding:
    """The finding of one case; an operator that raises has failed it."""
    try:
        found = max(_run(subject, what, case, wanted), key=lambda item: item[0])
    except Exception as raised:
        return Finding(inf, f"{type(raised).__name__}: {' '.join(str(raised).split())}", case)
    return Finding(*found, case)


def _run(
    subject: Subject, what: Definition, case: Case, wanted: Wanted
) -> Iterator[tuple[float, str]]:
    """Every error of one case, with what it is an error of."""
    values = case.inputs(subject.dtype, subject.device)
    keywords = {key: _moved(value, subject.device) for key, value in case.keywords.items()}
    leaves = case.with_gradient(values)
    sink = WeightGrads() if subject.deferred else None
    if sink is not None:
        keywords["sink"], weight = sink, leaves.pop(case.weight)
    for factor in ROUNDS:
        for leaf in leaves.values():
            leaf.grad = None
        _poison(wanted, subject)
        outputs = _outputs(subject.function(*values, **keywords))
        yield from _compared(what, case, subject, outputs, wanted)
        _poison(wanted, subject)
        _send_back(outputs, wanted, case, factor)
        if sink is not None:
            yield from _deferred(sink, weight, case, factor, wanted)
        for name, leaf in leaves.items():
            exact = factor * wanted.grads[name]
            yield _error(f"gradient of {name}", leaf.grad, exact, leaf.dtype, case)


def _deferred(
    sink: WeightGrads, weight: Tensor, case: Case, factor: int, wanted: Wanted
) -> Iterator[tuple[float, str]]:
    """What the sink got of the weight: nothing before its slot, then the sum of all rounds."""
    name = f"gradient of {case.weight}"
    if weight.grad is not None:
        yield inf, f"{name}, which autograd got too"
    for times, run in ((sum(ROUNDS[: factor - 1]), False), (sum(ROUNDS[:factor]), True)):
        if run:
            sink.run_fresh()
        when = "after its slot" if run else "before its slot"
        exact = times * wanted.grads[case.weight]
        yield _error(f"{name} {when}", sink.main_grad(weight), exact, wide(weight.dtype), case)


def _outputs(result: Any) -> tuple[Tensor, ...]:
    """What an operator returned, a tensor, a tuple or Pairs, as a tuple."""
    if torch.is_tensor(result):
        return (result,)
    if isinstance(result, tuple):
        return result
    return tuple(getattr(result, name) for name in result.__slots__)


def _compared(
    what: Definition, case: Case, subject: Subject, outputs: Sequence[Tensor], wanted: Wanted
) -> Iterator[tuple[float, str]]:
    for name, found, exact in zip(what.outputs, outputs, wanted.outputs, strict=True):
        dtype = what.dtype(subject.dtype) if exact.is_floating_point() else exact.dtype
        yield _error(name, found, exact, dtype, case)


def _error(
    name: str, found: Tensor | None, exact: Tensor, dtype: torch.dtype, case: Case
) -> tuple[float, str]:
    if found is None:
        return inf, f"no {name}"
    if found.dtype != dtype:
        return inf, f"{name} in {found.dtype}, not {dtype}"
    if found.shape != exact.shape:
        return inf, f"{name} of shape {list(found.shape)}, not {list(exact.shape)}"
    off = error(found, exact, scale=case.scale)
    if isfinite(off):
        return off, f"{off:.1e} in {name}"
    if not found.isfinite().all():
        return off, f"NaN or infinity in {name}"
    return off, f"{name} is not zero" if exact.is_floating_point() else f"other numbers in {name}"


def _send_back(outputs: Sequence[Tensor], wanted: Wanted, case: Case, factor: int) -> None:
    scaled = [
        None if dy is None else _scaled(dy.to(out.device), factor, case)
        for out, dy in zip(outputs, wanted.incoming, strict=True)
    ]
    _backward(outputs, scaled)


def _backward(outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Send `grads` back; outputs with none of their own are whole numbers."""
    pairs = [(out, dy) for out, dy in zip(outputs, grads, strict=True) if dy is not None]
    if pairs:
        torch.autograd.backward([out for out, _ in pairs], [dy for _, dy in pairs])


def _scaled(dy: Tensor, factor: int, case: Case) -> Tensor:
    if case.past:
        dy = with_rubbish(dy, case.past)
    if case.expanded_grad and dy.numel():
        return (factor * dy.flatten()[0]).expand(dy.shape)
    return factor * dy


def _poison(wanted: Wanted, subject: Subject) -> None:
    """Leave NaN in the freed memory that an operator is about to be given."""
    for like in (*wanted.outputs, *wanted.grads.values()):
        for dtype in {subject.dtype, wide(subject.dtype)} if like.is_floating_point() else ():
            blocks = [
                torch.full(like.shape, float("nan"), dtype=dtype, device=subject.device)
                for _ in range(4)
            ]
            del blocks


def _moved(value: Any, device: str) -> Any:
    return value.to(device) if torch.is_tensor(value) else value


def _check(subject: Subject, findings: Sequence[Finding]) -> Check:
    bound = tolerance(subject.implementation, subject.dtype)
    failed = [finding for finding in findings if not finding.error <= bound]
    worst = max(findings, key=lambda finding: finding.error)
    many = f"; {len(failed)} of {len(findings)} cases failed" if failed else ""
    wanted = f"at most {bound:.0e} beyond one rounding" if bound else "equal numbers"
    return Check(str(subject), not failed, f"{worst.told}{many}", wanted, str(worst.case))
