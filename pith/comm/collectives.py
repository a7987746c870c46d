"""Every token to every rank: static shapes, no counts. The reference, best up to four ranks."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pith.comm.exchange import Pending, Route, Rows
from pith.comm.packing import Flying, pack
from pith.comm.renamed import all_gather_rows
from pith.ops.precision import wide


@dataclass(frozen=True, slots=True)
class CollectiveExchange:
    """All ranks of `group` hold equally many tokens T, and each receives R = ranks * T rows."""

    group: dist.ProcessGroup

    def route(self, ids_TK: Tensor) -> Route:
        return _Everywhere(self.group)


@dataclass(frozen=True, slots=True)
class _Everywhere:
    group: dist.ProcessGroup

    def gather_tokens(self, *rows: Tensor) -> Pending[Rows]:
        """[T, ...] on each rank -> [R, ...] in the order of the ranks."""
        sent = pack(rows)
        landing = sent.new_empty(self.group.size() * len(sent), *sent.shape[1:])
        work = all_gather_rows(landing, sent, group=self.group, async_op=True)
        return Flying(work, sent, landing, rows)

    def reduce_tokens(self, *rows: Tensor) -> Pending[Rows]:
        """[R, ...] on each rank -> [T, ...]; R must be a multiple of the ranks."""
        sent = pack(rows)
        landing = torch.empty_like(sent)
        work = dist.all_to_all_single(landing, sent, group=self.group, async_op=True)
        return Flying(work, sent, landing, rows, self._sum_ranks)

    def _sum_ranks(self, landed: Tensor) -> Tensor:
        num_ranks = self.group.size()
        parts = landed.view(num_ranks, len(landed) // num_ranks, *landed.shape[1:])
        total = torch.zeros_like(parts[0], dtype=wide(landed.dtype))
        for part in parts:
            total += part
        return total.to(landed.dtype)
