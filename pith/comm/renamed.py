"""Collectives that torch renamed after 2.11: the new name where there is one."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

Collective = Callable[..., Any]

all_gather_rows: Collective = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""(output [ranks * n, ...], input [n, ...], group=, async_op=): inputs in the order of ranks."""

reduce_scatter_rows: Collective = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""(output [n], input [ranks * n], group=, async_op=): the sum of this rank's part of inputs."""
