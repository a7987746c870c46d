"""The definition of every operator by name."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from pith.verify.operators import attention, criterion, pointwise, products, routing, travel
from pith.verify.operators.case import Definition

DEFINITIONS: Mapping[str, Definition] = MappingProxyType(
    {
        "rms_norm": Definition(pointwise.rms_norm, pointwise.rms_norm_cases),
        "rope": Definition(pointwise.rope, pointwise.rope_cases),
        "attention": Definition(attention.attention, attention.attention_cases),
        "linear": Definition(products.linear, products.linear_cases),
        "embedding": Definition(products.embedding, products.embedding_cases),
        "grouped_linear": Definition(products.grouped_linear, products.grouped_linear_cases),
        "topk_route": Definition(
            routing.topk_route,
            routing.topk_route_cases,
            outputs=("probs", "weights", "ids"),
            wide=True,
        ),
        "sort_pairs": Definition(
            travel.sort_pairs,
            travel.sort_pairs_cases,
            outputs=("row_P", "pair_P", "position_RK", "counts_e"),
            dtypes=(torch.int64,),
        ),
        "gather_rows": Definition(travel.gather_rows, travel.gather_rows_cases),
        "swiglu": Definition(pointwise.swiglu, pointwise.swiglu_cases),
        "weighted_sum": Definition(travel.weighted_sum, travel.weighted_sum_cases),
        "cross_entropy": Definition(
            criterion.cross_entropy, criterion.cross_entropy_cases, outputs=("loss",), wide=True
        ),
    }
)
