"""Main gradients, and the weight gradients that wait to be added to them."""

from collections.abc import Callable

import torch
from torch import Tensor

Deferred = tuple[Tensor, Callable[[Tensor], None]]


class WeightGrads:
    """The engine's gradient sink.

    Every parameter has a main gradient in float32, or wider where the parameter is. Backward
    passes leave closures behind; the schedule says when they run. They run in the order in which
    they were left, so that every schedule accumulates the same bits.
    """

    def __init__(self) -> None:
        self._main: dict[int, tuple[Tensor, Tensor]] = {}  # id -> (parameter, main gradient)
        self._fresh: list[Deferred] = []
        self._stored: dict[tuple[int, int], list[Deferred]] = {}

    def main_grad(self, parameter: Tensor) -> Tensor:
        """The main gradient of `parameter`, zeros when nothing was added yet."""
        if id(parameter) not in self._main:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            self._main[id(parameter)] = (parameter, torch.zeros_like(parameter, dtype=dtype))
        return self._main[id(parameter)][1]

    def zero(self) -> None:
        """Forget what was accumulated, keeping the buffers."""
        self.assert_all_ran()
        if self._main:
            torch._foreach_zero_([main for _, main in self._main.values()])

    def assert_all_ran(self) -> None:
        """Nothing that a backward left behind still waits."""
        assert not self._fresh, "a backward left weight gradients that were neither run nor kept"
        assert not self._stored, f"weight gradients kept and never run: {sorted(self._stored)}"

    def add(self, parameter: Tensor, grad: Tensor) -> None:
        with torch.no_grad():
            self.main_grad(parameter).add_(grad)

    def defer(self, parameter: Tensor, accumulate: Callable[[Tensor], None]) -> None:
        self._fresh.append((parameter, accumulate))

    def run_fresh(self) -> None:
        """Run what the last backward left behind."""
        fresh, self._fresh = self._fresh, []
        self._run(fresh)

    def store_fresh(self, stage: int, micro: int) -> None:
        """Keep what was left behind for the weight-gradient slot of (stage, micro)."""
        fresh, self._fresh = self._fresh, []
        self._stored.setdefault((stage, micro), []).extend(fresh)

    def run_stored(self, stage: int, micro: int) -> None:
        """Run the weight-gradient slot of (stage, micro)."""
        self._run(self._stored.pop((stage, micro)))

    def _run(self, deferred: list[Deferred]) -> None:
        with torch.no_grad():
            for parameter, accumulate in deferred:
                accumulate(self.main_grad(parameter))
