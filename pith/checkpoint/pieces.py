"""This rank's rows of whole tensors, and how torch.distributed.checkpoint is told what they are.

Pieces are plain row shards: no DTensor and no DeviceMesh, which torch caches and tells apart by
their ranks alone.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from pith.errors import Fault, RunFailedError, first_of


@dataclass(frozen=True, slots=True)
class Piece:
    """`rows` [R, ...] of a whole tensor of `shape`, from `first_row` on.

    `owned`: whether this rank saves them; a second copy is loaded but not saved.
    """

    rows: Tensor
    first_row: int
    shape: tuple[int, ...]
    owned: bool = True

    def __post_init__(self) -> None:
        assert tuple(self.rows.shape[1:]) == self.shape[1:], (self.rows.shape, self.shape)
        assert 0 <= self.first_row <= self.end_row <= num_rows(self.shape), self.first_row

    @property
    def end_row(self) -> int:
        return self.first_row + num_rows(tuple(self.rows.shape))


def num_rows(shape: tuple[int, ...]) -> int:
    """Length of the first axis; a scalar is one row."""
    return shape[0] if shape else 1


def uncovered(spans: Iterable[tuple[int, int]], rows: int) -> str:
    """Which of `rows` rows the spans (first, end) miss or hold twice; empty when they fit."""
    at = 0
    for first, end in sorted(spans):
        if first != at:
            return f"rows {first} to {at} twice" if first < at else f"no rows {at} to {first}"
        at = end
    return "" if at == rows else f"no rows {at} to {rows}"


class PiecesSavePlanner(SavePlanner):
    """Saves the owned pieces. The coordinator checks that they are each tensor exactly once."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        self._pieces = pieces

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """The pieces are known already."""

    def create_local_plan(self) -> SavePlan:
        """One item for each owned piece that has rows; and what every piece is a part of."""
        items = [
            _write_item(name, piece)
            for name, piece in self._pieces.items()
            if piece.owned and piece.end_row > piece.first_row
        ]
        told = {name: (piece.shape, piece.rows.dtype) for name, piece in self._pieces.items()}
        return SavePlan(items, planner_data=told)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Raises RunFailedError naming every tensor whose rows are missing or there twice."""
        faults: list[Fault] = []
        tensors: dict[str, TensorStorageMetadata] = {}
        for name, (shape, dtype) in _agreed(all_plans, faults).items():
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), [])
        for plan in all_plans:
            for item in plan.items:
                assert item.tensor_data is not None
                tensors[item.index.fqn].chunks.append(item.tensor_data.chunk)
        for name, entry in tensors.items():
            if wrong := uncovered(map(span_of, entry.chunks), num_rows(tuple(entry.size))):
                faults.append(Fault(name, wrong, f"each of {num_rows(tuple(entry.size))} once"))
        if faults:
            raise _unfit(faults)
        return [replace(plan, planner_data=None) for plan in all_plans], Metadata(dict(tensors))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The coordinator changes nothing."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The rows, dense."""
        return self._pieces[write_item.index.fqn].rows.detach().contiguous()


def span_of(chunk: ChunkStorageMetadata) -> tuple[int, int]:
    """First and end row of a chunk."""
    first = chunk.offsets[0] if chunk.offsets else 0
    return first, first + num_rows(tuple(chunk.sizes))


def _write_item(name: str, piece: Piece) -> WriteItem:
    offsets = torch.Size((piece.first_row, *[0] * len(piece.shape))[: len(piece.shape)])
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets, piece.rows.shape),
        properties=TensorProperties(piece.rows.dtype),
        size=torch.Size(piece.shape),
    )
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def _agreed(
    plans: Sequence[SavePlan], faults: list[Fault]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    agreed: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for rank, plan in enumerate(plans):
        for name, told in plan.planner_data.items():
            if agreed.setdefault(name, told) != told:
                faults.append(Fault(name, f"{told} on rank {rank}", str(agreed[name])))
    return agreed


def _unfit(faults: list[Fault]) -> RunFailedError:
    return RunFailedError(
        "checkpoint.rows",
        what="the pieces of the ranks are not the whole tensors; nothing was saved",
        found=first_of(faults),
        faults=tuple(faults),
    )
