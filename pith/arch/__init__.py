"""Model families as facts: a match on model_type chooses the file that knows the family."""

from collections.abc import Mapping
from typing import Any

from pith.arch import qwen3
from pith.arch.fields import FieldReader, refuse
from pith.arch.qwen3 import Qwen3
from pith.errors import Fault

SUPPORTED = (*qwen3.MODEL_TYPES,)

Architecture = Qwen3


def from_config(config: Mapping[str, Any]) -> Architecture:
    """The architecture that config.json fields describe. Raises RequestError with all faults."""
    arch, faults = examine(config)
    refuse(faults)
    assert arch is not None, "an unknown family is a fault"
    return arch


def examine(config: Mapping[str, Any]) -> tuple[Architecture | None, tuple[Fault, ...]]:
    """The architecture and its faults; faulty fields hold stand-ins. None: an unknown family."""
    fields = FieldReader(config)
    arch: Architecture
    match fields.get("model_type"):
        case "qwen3_moe" | "qwen3":
            arch = Qwen3.examine(fields)
        case _:
            fields.fault("model_type", "one of " + ", ".join(SUPPORTED), nearest=SUPPORTED)
            return None, tuple(fields.faults)
    return arch, tuple(fields.faults)
