"""The family to be made, and the one whose layers it begins with."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pith.arch import SUPPORTED, examine
from pith.errors import Fault, RequestError
from pith.scaffold.given import Given
from pith.scaffold.names import class_of

PLAIN = "plain"
NORMED_HEADS = "qwen3"  # whose attention norms each query and key head
# Keys that say whether query and key heads are normed.
NORM_KEYS = ("use_qk_norm", "qk_norm", "qk_layernorm", "use_qk_layernorm")


@dataclass(frozen=True, slots=True)
class Start:
    """The layers that a family begins with: the plain ones, or those of another family."""

    family: str  # PLAIN, or the name of its files
    arch: str  # the class of its facts
    stage: str  # the class of its stages
    why: str


@dataclass(frozen=True, slots=True)
class Family:
    """A family to be made from one config."""

    name: str
    given: Given
    start: Start

    @property
    def class_name(self) -> str:
        return class_of(self.name)


def served() -> dict[str, str]:
    """The families that there are: the name of its files -> its class."""
    architectures = (examine({"model_type": model_type})[0] for model_type in SUPPORTED)
    kinds = (type(architecture) for architecture in architectures)
    return {kind.__module__.rpartition(".")[2]: kind.__name__ for kind in kinds}


def family_of(model_type: str) -> str | None:
    """The family that serves `model_type`, where one does."""
    architecture, _ = examine({"model_type": model_type})
    return None if architecture is None else type(architecture).__module__.rpartition(".")[2]


def start_of(config: Mapping[str, Any], *, like: str | None) -> Start:
    """What a family begins with: `like`, or what the config says. Raises RequestError where there
    is no family of that name."""
    if like is not None:
        return _start(like, "--like asks for it")
    for key in NORM_KEYS:
        if config.get(key) is True:
            return _start(NORMED_HEADS, f"{key} is true, and its attention norms each head")
    return _start(PLAIN, "the config names no norms of queries and keys")


def _start(family: str, why: str) -> Start:
    if family == PLAIN:
        return Start(PLAIN, "Decoder", "DecoderStage", why)
    known = served()
    if family not in known:
        names = (PLAIN, *known)
        nearest = tuple(get_close_matches(family, names, cutoff=0.4)) or names
        fault = Fault("--like", repr(family), f"one of {', '.join(names)}", nearest)
        raise RequestError(
            "scaffold.like", what=str(fault), next_step="pith add-model --help", faults=(fault,)
        )
    return Start(family, known[family], f"{known[family]}Stage", why)
