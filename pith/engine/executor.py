"""The only loop over the schedule: each rank walks its row of the table."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pith.comm.channels import Transport
from pith.comm.stopwatch import Stopwatch
from pith.engine.chunk import MicroBatch, alternate, backward_chunk, drain, forward_chunk
from pith.engine.clock import Clock
from pith.engine.segment import Tape, Tensors
from pith.engine.weight_grads import WeightGrads
from pith.layer.protocol import Stage
from pith.schedule.lower import arrival, departure, lower
from pith.schedule.table import Kind, Op, Slot, Table, slot_text

Watch = Callable[[str], None]


@dataclass(slots=True)
class Execution:
    """What one pass over the row left behind."""

    clock: Clock
    losses: dict[int, Tensor] = field(default_factory=dict)  # micro-batch -> scalar sum
    slots: list[str] = field(default_factory=list)  # what really ran, in the table's text form
    begun: list[Op] = field(default_factory=list)  # operations of the slot that is running


class Executor:
    """Runs one rank's row of a table over its stages.

    A table with backward operations records tapes; one without (evaluation) runs in no-grad mode.
    """

    def __init__(
        self,
        table: Table,
        *,
        rank: int,
        stages: Mapping[int, Stage],
        transport: Transport,
        weights: WeightGrads,
        stopwatch: Stopwatch,
    ) -> None:
        self._table = table
        self._stages = stages
        self._transport = transport
        self._weights = weights
        self._stopwatch = stopwatch
        self._steps = lower(table, rank)
        self._records = any(op.kind is not Kind.F for step in self._steps for op in step.slot)
        self._tapes: dict[tuple[int, int], Tape] = {}
        self._local: dict[Op, Tensors] = {}

    def run(
        self,
        batches: Sequence[MicroBatch],
        *,
        watch: Watch = lambda text: None,
        clock: Clock | None = None,
    ) -> Execution:
        """Execute every slot. `watch` is called with each slot's text before it starts.

        `clock` is told of each slot that really ran.
        """
        execution = Execution(clock or Clock())
        for step in self._steps:
            watch(slot_text(step.slot))
            self._transport.post(step.post)
            results = self._run_slot(step.slot, batches, execution)
            executed = _executed(execution.begun)
            execution.clock.end(executed)
            execution.slots.append(slot_text(executed))
            for op, tensors in zip(step.slot, results, strict=True):
                self._hand_over(op, tensors, execution)
        with self._stopwatch.running("pipeline"):
            self._transport.flush()
        assert not self._tapes, "the row ended with forwards that no backward used"
        self._weights.assert_all_ran()
        assert not self._local, "the row ended with results that nobody took"
        return execution

    def _run_slot(
        self, slot: Slot, batches: Sequence[MicroBatch], execution: Execution
    ) -> tuple[Tensors, ...]:
        works = [self._start(op, batches, execution) for op in slot]
        if len(works) == 1:
            return (drain(works[0]),)
        forward, backward = works
        grads, outputs = alternate(backward, forward)
        return outputs, grads

    def _start(
        self, op: Op, batches: Sequence[MicroBatch], execution: Execution
    ) -> Generator[None, None, Tensors]:
        """The work of one operation. When first advanced it is noted as begun and awaits its input;
        with the input of the first operation the slot's time begins."""
        execution.begun.append(op)
        inputs = self._input(op)
        execution.clock.begin()
        key = (op.stage, op.micro)
        stage = self._stages[op.stage]
        match op.kind:
            case Kind.F:
                tape = Tape(recording=self._records)
                if self._records:
                    self._tapes[key] = tape
                return (yield from forward_chunk(stage, batches[op.micro], inputs, tape))
            case Kind.W:
                self._weights.run_stored(*key)
                return ()
            case Kind.B | Kind.I:
                split = key if op.kind is Kind.I else None
                tape = self._tapes.pop(key)
                return (
                    yield from backward_chunk(
                        stage, tape, inputs, weights=self._weights, split=split
                    )
                )

    def _input(self, op: Op) -> Tensors:
        """What the operation reads: a message, a local hand-over, or nothing (W, first stage)."""
        if op.kind is Kind.W:
            return ()
        message = arrival(self._table, op)
        if message is not None:
            with self._stopwatch.running("pipeline"):
                return self._transport.take(message)
        stage = self._stages[op.stage]
        if op.kind is Kind.F:
            return () if stage.is_first else self._local.pop(op)
        return self._local.pop(Op(Kind.B, op.stage, op.micro))

    def _hand_over(self, op: Op, tensors: Tensors, execution: Execution) -> None:
        """Send or keep what the operation produced."""
        message = departure(self._table, op)
        if message is not None:
            with self._stopwatch.running("pipeline"):
                self._transport.send(message, tensors)
        elif op.kind is Kind.F and self._stages[op.stage].is_last:
            execution.losses[op.micro] = tensors[0]
            if self._records:
                self._local[Op(Kind.B, op.stage, op.micro)] = (torch.ones_like(tensors[0]),)
        elif op.kind is Kind.F:
            self._local[Op(Kind.F, op.stage + 1, op.micro)] = tensors
        elif op.kind is not Kind.W and op.stage > 0:
            self._local[Op(Kind.B, op.stage - 1, op.micro)] = tensors


def _executed(begun: list[Op]) -> Slot:
    """The slot that these operations made up, forward first; empties the list."""
    slot = tuple(sorted(begun, key=lambda op: op.kind is not Kind.F))
    begun.clear()
    return slot
