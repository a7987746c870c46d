"""Typed reading of a Hugging Face config.json, every fault collected.

A field that is missing or wrong yields a fault and a stand-in value of the right type, so that the
rest of the file is still read and all faults are named in one go.
"""

from collections.abc import Mapping
from math import isqrt
from typing import Any, TypeGuard

from pith.errors import Fault, RequestError, shown

MAX_SIZE = 2**31 - 1

# Known to carry nothing that changes the computation, so not worth a warning.
INERT = frozenset(
    {
        *("architectures", "model_type", "torch_dtype", "dtype", "transformers_version"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "max_window_layers", "_name_or_path"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("router_aux_loss_coef", "use_cache"),
    }
)


class FieldReader:
    """Reads the fields of one config and remembers which keys were asked for."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._asked: set[str] = set()
        self.faults: list[Fault] = []

    def get(self, key: str) -> Any:
        """The raw value, None where it is absent."""
        self._asked.add(key)
        return self._config.get(key)

    def leave(self, key: str) -> None:
        """Count `key` as not read, after all."""
        self._asked.discard(key)

    def fault(self, key: str, wanted: str, *, nearest: tuple[str, ...] = ()) -> None:
        """Record that the value at `key` is not what is wanted."""
        found = shown(self._config[key]) if key in self._config else "nothing"
        self.faults.append(Fault(key, found, wanted, nearest))

    def holds(self, *keys: str) -> bool:
        """Whether none of `keys` is at fault."""
        return not {fault.where for fault in self.faults} & set(keys)

    def size(
        self, key: str, *, default: int | None = None, minimum: int = 1, maximum: int = MAX_SIZE
    ) -> int:
        """A whole number from `minimum` to `maximum`."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            self.fault(key, f"a whole number from {minimum} to {maximum}")
            return minimum
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not is_positive(value):
            self.fault(key, "a finite number above 0")
            return 1.0
        return float(value)

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        """True or false."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            self.fault(key, "true or false")
            return False
        return value

    def only(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Refuse by name any value but `allowed`; an absent value is allowed."""
        value = self.get(key)
        if value is not None and not any(_same(value, choice) for choice in allowed):
            choices = " or ".join(repr(choice) for choice in allowed)
            self.fault(key, f"{choices}; nothing else is implemented for this family")

    def unknown(self) -> tuple[str, ...]:
        """The keys that nobody asked for and that are not known to be inert, sorted."""
        return tuple(sorted(set(self._config) - self._asked - INERT))


def refuse(faults: tuple[Fault, ...]) -> None:
    """Raise RequestError with all `faults`, if there is one."""
    if faults:
        count = f"{len(faults)} faults" if len(faults) > 1 else "1 fault"
        raise RequestError("arch.invalid", what=f"the model config has {count}", faults=faults)


def nearest_divisors(number: int, *, near: int) -> tuple[str, ...]:
    """The divisors of `number` closest to `near`, one on each side where there are two."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    below = [d for d in divisors if d <= near][-1:]
    above = [d for d in divisors if d >= near][:1]
    return tuple(str(d) for d in sorted({*below, *above}))


def is_positive(value: Any) -> TypeGuard[float]:
    """Whether `value` is a finite number above zero (true and false are no numbers)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e300


def _same(value: Any, choice: Any) -> bool:
    return isinstance(value, bool) == isinstance(choice, bool) and bool(value == choice)
