"""What a config says about rotary positions."""

from collections.abc import Mapping
from typing import Any

from pith.arch.fields import FieldReader, is_positive
from pith.errors import shown


def read_rope_base(fields: FieldReader, *, leaves_scaling: bool = False) -> float:
    """The rope base, from either spelling; any scaling of it is refused by name.

    With `leaves_scaling` a table that scales counts as not read: a family that has yet to implement
    it is told so by its checks.
    """
    bases = {} if fields.get("rope_theta") is None else {"rope_theta": fields.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        table = fields.get(key)
        if table is None:
            continue
        kind = rope_kind(table)
        if kind != "default" and leaves_scaling:
            fields.leave(key)
        elif kind != "default":
            fields.fault(key, f"rope of type default; {kind} is not implemented for this family")
        if isinstance(table, Mapping) and table.get("rope_theta") is not None:
            bases[key] = table["rope_theta"]
    where = next(iter(bases), "rope_theta")
    if not bases or not all(is_positive(base) for base in bases.values()):
        fields.fault(where, "a rope base: a finite number above 0")
        return 1.0
    if len(set(bases.values())) > 1:
        fields.fault(where, f"one rope base, not {bases}")
    return float(bases[where])


def rope_kind(table: Any) -> str:
    """What a rope table asks for: "default", or the name of what goes beyond it."""
    if not isinstance(table, Mapping):
        return shown(table)
    names = {str(table[key]) for key in ("type", "rope_type") if table.get(key) is not None}
    more = {key for key in table if table[key] is not None} - {"type", "rope_type", "rope_theta"}
    extra = sorted(key for key in more if not (key == "partial_rotary_factor" and table[key] == 1))
    kind = "/".join(sorted(names or {"default"}))
    return f"{kind} with {', '.join(extra)}" if extra else kind
