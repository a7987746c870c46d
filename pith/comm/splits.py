"""Only the rows that a rank needs, each once: fewer bytes than all of them from five ranks on.

Shape letters besides those of exchange: G ranks of the group, M rows that this rank sends.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pith.comm.exchange import Pending, Route, Rows
from pith.comm.packing import Flying, pack, row_size
from pith.ops.weighted_sum.reference import sum_slots


@dataclass(frozen=True, slots=True)
class SplitExchange:
    """The ranks of `group` hold the `num_experts` in equal blocks; tokens may differ in number."""

    group: dist.ProcessGroup
    num_experts: int  # of all ranks

    def __post_init__(self) -> None:
        assert self.num_experts % self.group.size() == 0, "blocks of experts must be equal"

    def route(self, ids_TK: Tensor) -> Route:
        """Exchanges the counts of rows and waits for them on the host."""
        num_ranks = self.group.size()
        ranks_G = torch.arange(num_ranks, device=ids_TK.device)
        owners_TK = ids_TK // (self.num_experts // num_ranks)
        needed_GT = (owners_TK == ranks_G[:, None, None]).any(dim=-1)
        counts_2G = self._counts(needed_GT.sum(dim=1))
        sent, received = counts_2G
        position_GT = (needed_GT.flatten().cumsum(0) - 1).view_as(needed_GT)
        return _Needed(
            self.group,
            # With its size known, nonzero waits for nothing more.
            token_M=torch.nonzero_static(needed_GT, size=sum(sent))[:, 1],
            position_TG=position_GT.masked_fill(~needed_GT, sum(sent)).T,
            sent=sent,
            received=received,
        )

    def _counts(self, sent_G: Tensor) -> list[list[int]]:
        """Rows to each rank, and rows from each rank."""
        received_G = torch.empty_like(sent_G)
        dist.all_to_all_single(received_G, sent_G, group=self.group)
        counts_2G: list[list[int]] = torch.stack((sent_G, received_G)).tolist()
        return counts_2G


@dataclass(frozen=True, slots=True)
class _Needed:
    group: dist.ProcessGroup
    token_M: Tensor  # [M] int64, the token of each row sent, by target rank, then by token
    position_TG: Tensor  # [T, G] int64, where among those rows a token's row to a rank is, or M
    sent: list[int]  # [G] rows to each rank; M in all
    received: list[int]  # [G] rows from each rank; R in all

    def gather_tokens(self, *rows: Tensor) -> Pending[Rows]:
        """[T, ...] on each rank -> [R, ...] by source rank, then by token."""
        sent = pack(rows).index_select(0, self.token_M)
        landing = sent.new_empty(sum(self.received), *sent.shape[1:])
        work = dist.all_to_all_single(
            landing, sent, self.received, self.sent, group=self.group, async_op=True
        )
        return Flying(work, sent, landing, rows)

    def reduce_tokens(self, *rows: Tensor) -> Pending[Rows]:
        """[R, ...] on each rank -> [T, ...]; zero where no rank needed a token."""
        sent = pack(rows)
        landing = sent.new_empty(sum(self.sent), *sent.shape[1:])
        work = dist.all_to_all_single(
            landing, sent, self.sent, self.received, group=self.group, async_op=True
        )
        return Flying(work, sent, landing, rows, self._sum_ranks)

    def _sum_ranks(self, landed: Tensor) -> Tensor:
        landed_MD = landed.view(len(landed), row_size(landed))
        return sum_slots(landed_MD, None, self.position_TG).view(-1, *landed.shape[1:])
