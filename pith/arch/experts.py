"""What a config says about its experts."""

from typing import Any

from pith.arch.fields import FieldReader

MAX_EXPERTS = 65536
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_experts(fields: FieldReader, *, width: str) -> dict[str, Any]:
    """`num_experts`, `top_k` and `moe_intermediate_size` of a config, in which the width of an
    expert goes by the name `width`."""
    values = {key: fields.get(key) for key in COUNTS}
    key = next((key for key in COUNTS if values[key] is not None), COUNTS[0])
    num_experts, top_k = fields.size(key, maximum=MAX_EXPERTS), fields.size("num_experts_per_tok")
    if fields.holds(key, "num_experts_per_tok") and top_k > num_experts:
        wanted = f"at most num_experts ({num_experts})"
        fields.fault("num_experts_per_tok", wanted, nearest=(str(num_experts),))
    return {"num_experts": num_experts, "top_k": top_k, "moe_intermediate_size": fields.size(width)}
