"""What a config says about the heads of grouped-query attention."""

from typing import Any

from pith.arch.fields import FieldReader, nearest_divisors


def read_heads(fields: FieldReader, *, may_derive_width: bool) -> dict[str, Any]:
    """`num_heads`, `num_kv_heads` and `head_dim` of a config.

    With `may_derive_width` a config may leave `head_dim` to hidden_size over the heads.
    """
    width = _read_head_dim(fields, may_derive=may_derive_width)
    heads, kv_heads = fields.size("num_attention_heads"), fields.size("num_key_value_heads")
    if fields.holds("num_attention_heads", "num_key_value_heads") and heads % kv_heads:
        wanted = f"a divisor of num_attention_heads ({heads})"
        nearest = nearest_divisors(heads, near=kv_heads)
        fields.fault("num_key_value_heads", wanted, nearest=nearest)
    return {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": width}


def _read_head_dim(fields: FieldReader, *, may_derive: bool) -> int:
    if may_derive and fields.get("head_dim") is None:
        return _derived_head_dim(fields)
    head_dim = fields.size("head_dim")
    if fields.holds("head_dim") and head_dim % 2:
        nearest = (str(head_dim - 1), str(head_dim + 1))
        fields.fault("head_dim", "an even number: rope rotates pairs", nearest=nearest)
    return head_dim


def _derived_head_dim(fields: FieldReader) -> int:
    """hidden_size over the heads; where one of them is no size, that alone is the fault."""
    hidden, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    if type(hidden) is not int or type(heads) is not int or min(hidden, heads) < 1:
        return 2
    head_dim = hidden // heads
    if head_dim % 2 or not head_dim:
        wanted = f"{heads} attention heads of an even width: rope rotates pairs"
        fields.fault("hidden_size", wanted)
        return 2
    return head_dim
