"""Batch arithmetic: global batch = micro-batch * micro-batches * dp * ep, in sequences."""

from dataclasses import dataclass

from pith.errors import Fault, RequestError


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's sequences. `data_ranks` = dp * ep read different sequences each."""

    global_batch_size: int
    micro_batch_size: int
    num_micro_batches: int
    data_ranks: int
    sequence_length: int

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length

    @property
    def tokens_per_micro_batch(self) -> int:
        return self.micro_batch_size * self.sequence_length


def plan_batch(
    *, global_batch_size: int, micro_batch_size: int, data_ranks: int, sequence_length: int
) -> Batch:
    """The batch of one step. Raises RequestError where it does not come out whole."""
    round_size = micro_batch_size * data_ranks
    num_micro_batches, rest = divmod(global_batch_size, round_size)
    if rest or num_micro_batches == 0:
        nearest = tuple(
            str(round_size * n) for n in (num_micro_batches, num_micro_batches + 1) if n
        )
        wanted = f"a multiple of micro_batch_size * dp * ep = {micro_batch_size} * {data_ranks}"
        fault = Fault("training.global_batch_size", str(global_batch_size), wanted, nearest)
        raise RequestError("batch.invalid", what=str(fault), faults=(fault,))
    return Batch(
        global_batch_size, micro_batch_size, num_micro_batches, data_ranks, sequence_length
    )
