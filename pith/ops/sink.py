"""Where weight gradients go. The engine owns them; an operator only hands them over."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class GradSink(Protocol):
    """Takes the gradients of parameters, each into a float32 (or wider) main gradient.

    A parameter is known by the object that the module holds.
    """

    def add(self, parameter: Tensor, grad: Tensor) -> None:
        """Accumulate `grad` now. For norms, biases, the router: cheap, no use in waiting."""
        ...

    def defer(self, parameter: Tensor, accumulate: Callable[[Tensor], None]) -> None:
        """Keep `accumulate` until the weight-gradient slot.

        It is called once, without grad mode, with the main gradient to add to in place.
        """
        ...
