"""What runs when: alone, in a pair, and with weight gradients put off."""

from itertools import chain, zip_longest
from typing import Any

import pytest
import torch
from torch import Tensor

from pith.comm.channels import Transport, Wire
from pith.comm.stopwatch import Stopwatch
from pith.engine.chunk import MicroBatch, backward_chunk, drain, forward_chunk
from pith.engine.executor import Executor
from pith.engine.segment import Tape
from pith.engine.weight_grads import WeightGrads
from pith.schedule.table import Placement, Table, parse_rows

# One line a turn, the backward first: AF EI EW EF AI AW, communication CB DF DB CF.
PAIR_OF_TWO_LAYERS = """
I leave, I aggregate.1, launch B combine.1, W leave, W aggregate.1
F enter, F attend.0, launch F dispatch.0
wait B combine.1, I experts.1, launch B dispatch.1, W experts.1
wait F dispatch.0, F experts.0, launch F combine.0
wait B dispatch.1, I attend.1, I aggregate.0, launch B combine.0, W attend.1, W aggregate.0
wait F combine.0, F aggregate.0, F attend.1, launch F dispatch.1
wait B combine.0, I experts.0, launch B dispatch.0, W experts.0
wait F dispatch.1, F experts.1, launch F combine.1
wait B dispatch.0, I attend.0, I enter, W attend.0, W enter
wait F combine.1, F aggregate.1, F leave
"""
PAIR = "F0.0 F0.1|B0.0 B0.1"
FORWARD_LEADS_THE_V = "F0.0 F1.0 F0.1|B1.0 B0.0 F1.1 B1.1 B0.1"
BACKWARD_LEADS_THE_V = "F0.0 F1.0 B1.0 F0.1 F1.1|B0.0 B1.1 B0.1"
SPLIT = "F0.0 F0.1 I0.0 I0.1 W0.0 W0.1"


class Run:
    """The stages `kinds` on one rank, driven through `row` by the executor."""

    def __init__(self, kinds: str, row: str, journal: Any, make_stages: Any) -> None:
        self.kinds, self.sink, self.journal = kinds, WeightGrads(), journal
        self.stages = make_stages(kinds, journal, self.sink)
        self.batches = batches(2 if ".1" in row else 1)
        placement = Placement("loop", 1, len(self.stages))
        table = Table("test", placement, len(self.batches), parse_rows((row,)))
        wire = Wire((), torch.float64, torch.device("cpu"), staged=False, headers=True)
        executor = Executor(
            table,
            rank=0,
            stages=dict(enumerate(self.stages)),
            transport=Transport(wire, rank=0, pipeline=(0,), groups={}),
            weights=self.sink,
            stopwatch=Stopwatch(),
        )
        self.execution = executor.run(self.batches, watch=lambda text: journal.note("slot", text))

    def slots(self) -> dict[str, list[str]]:
        """What was noted in each slot."""
        found: dict[str, list[str]] = {}
        for entry in self.journal.entries:
            if entry.startswith("slot "):
                found[entry.removeprefix("slot ")] = current = []
            else:
                current.append(entry)
        return found

    def main_grads(self) -> dict[str, Tensor]:
        return {
            name: self.sink.main_grad(weight)
            for stage in self.stages
            for name, weight in stage.weights().items()
        }


def batches(num_micro_batches: int) -> list[MicroBatch]:
    draw = torch.Generator().manual_seed(1)
    return [
        MicroBatch(*torch.randint(1, 5, (2, 2, 4), generator=draw), context=None)
        for _ in range(num_micro_batches)
    ]


def forward_turns(stage: Any) -> list[list[str]]:
    """What a forward does between the points where it gives way, from the design."""
    turns, turn = [], ["F enter"] if stage.is_first else []
    for number, layer in stage.layers.items():
        turn.append(f"F attend.{number}")
        for what, piece in (("dispatch", "experts"), ("combine", "aggregate")):
            if layer.communicates:
                turns.append([*turn, f"launch F {what}.{number}"])
                turn = [f"wait F {what}.{number}"]
            turn.append(f"F {piece}.{number}")
    return [*turns, turn + (["F leave"] if stage.is_last else [])]


def backward_turns(stage: Any) -> list[list[str]]:
    """The same for a full backward: input gradients, the launch, then weight gradients."""
    turns: list[list[str]] = []
    turn, fresh = [], ["leave"] if stage.is_last else []

    def end_segment(name: str, communicates: bool) -> None:
        nonlocal turn, fresh
        turn += [f"I {piece}" for piece in fresh]
        turn += [f"launch B {name}"] * communicates + [f"W {piece}" for piece in fresh]
        fresh = []
        if communicates:
            turns.append(turn)
            turn = [f"wait B {name}"]

    for number, layer in reversed(stage.layers.items()):
        fresh.append(f"aggregate.{number}")
        end_segment(f"combine.{number}", layer.communicates)
        fresh.append(f"experts.{number}")
        end_segment(f"dispatch.{number}", layer.communicates)
        fresh.append(f"attend.{number}")
    fresh += ["enter"] if stage.is_first else []
    end_segment("", False)
    return [*turns, turn]


def in_turn(leading: list[list[str]], following: list[list[str]]) -> list[str]:
    pairs = zip_longest(leading, following, fillvalue=[])
    return list(chain.from_iterable(chain.from_iterable(pairs)))


def wanted(slot: str, stages: list[Any]) -> list[str]:
    forwards = [forward_turns(stages[int(op[1])]) for op in slot.split("|") if op[0] == "F"]
    backwards = [backward_turns(stages[int(op[1])]) for op in slot.split("|") if op[0] == "B"]
    return in_turn(*(backwards or [[]]), *(forwards or [[]]))


def plain_step(kinds: str, make_stages: Any, journal: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weight gradients by plain autograd, layer after layer, of two micro-batches."""
    model, losses = make_stages(kinds, journal, None), []
    for batch in batches(2):
        carry = model[0].embed(batch.tokens_BS)
        for stage in model:
            for layer in stage.layers.values():
                carry = layer.forward(carry, batch.context)
        loss = model[-1].loss(carry, batch.labels_BS)
        loss.backward()
        losses.append(float(loss.detach()))
    weights = {name: w for stage in model for name, w in stage.weights().items()}
    return losses, {name: weight.grad for name, weight in weights.items()}


def test_a_pair_of_two_layers_runs_in_the_order_of_the_design(journal, make_stages):
    slots = Run("MM", PAIR, journal, make_stages).slots()
    turns = [line.split(", ") for line in PAIR_OF_TWO_LAYERS.strip().splitlines()]
    assert slots["F0.1|B0.0"] == list(chain(*turns))
    assert slots["F0.0"] == list(chain(*turns[1::2]))
    assert slots["B0.1"] == list(chain(*turns[0::2]))


@pytest.mark.parametrize("row", [FORWARD_LEADS_THE_V, BACKWARD_LEADS_THE_V])
@pytest.mark.parametrize("kinds", ["M/MMM", "MMM/M", "d/M", "MdM/ddMd", "Md/dM", "M/", "/MM"])
def test_unequal_chunks_and_dense_layers_alternate_for_as_long_as_both_last(
    kinds, row, journal, make_stages
):
    run = Run(kinds, row, journal, make_stages)
    slots = run.slots()
    assert " ".join(slots) == row
    assert {slot: wanted(slot, run.stages) for slot in slots} == slots


@pytest.mark.parametrize("kinds", ["M", "Md"])
def test_every_slot_that_began_is_recorded_as_it_ran(kinds, journal, make_stages):
    assert Run(kinds, PAIR, journal, make_stages).execution.slots == PAIR.split()


@pytest.mark.parametrize("kinds", ["MM", "dMd", "d"])
def test_split_backwards_run_no_weight_gradient_before_its_own_slot(kinds, journal, make_stages):
    run = Run(kinds, SPLIT, journal, make_stages)
    slots, [stage] = run.slots(), run.stages
    full = list(chain(*backward_turns(stage)))
    for micro in range(2):
        assert slots[f"I0.{micro}"] == [entry for entry in full if entry[0] != "W"]
        assert slots[f"W0.{micro}"] == [entry for entry in full if entry[0] == "W"]


@pytest.mark.parametrize(
    ("kinds", "row"),
    [
        ("MdM", PAIR),
        ("MdM", SPLIT),
        ("M/dM", FORWARD_LEADS_THE_V),
        ("MM/d", BACKWARD_LEADS_THE_V),
        ("/M", FORWARD_LEADS_THE_V),
        ("M/", BACKWARD_LEADS_THE_V),
        ("M//d", "F0.0 F1.0 F2.0 F0.1 F1.1 B2.0 B1.0 F2.1|B0.0 B2.1 I1.1 W1.1 I0.1 W0.1"),
        ("/", FORWARD_LEADS_THE_V),
    ],
)
def test_losses_and_gradients_are_those_of_plain_autograd(kinds, row, journal, make_stages):
    run = Run(kinds, row, journal, make_stages)
    losses, grads = plain_step(kinds, make_stages, journal)
    found = [float(run.execution.losses[micro]) for micro in range(2)]
    assert found == pytest.approx(losses, rel=1e-12)
    for name, grad in run.main_grads().items():
        torch.testing.assert_close(grad, grads[name], rtol=1e-12, atol=0, msg=name)


def test_a_stage_without_layers_passes_the_carry_and_its_gradient(journal, make_stages):
    stage, tape = make_stages("M//M", journal, WeightGrads())[1], Tape(recording=True)
    carry, grad = torch.rand(2, 2, 4, 3, dtype=torch.float64)
    (passed,) = drain(forward_chunk(stage, batches(1)[0], (carry,), tape))
    (returned,) = drain(backward_chunk(stage, tape, (grad,), weights=stage.exit.sink, split=None))
    assert torch.equal(passed, carry)
    assert torch.equal(returned, grad)
    assert not passed.requires_grad
    assert journal.entries == []


def test_a_row_without_backwards_keeps_no_graph_and_gives_the_same_losses(journal, make_stages):
    evaluation = Run("Md/M", "F0.0 F1.0 F0.1 F1.1", journal, make_stages)
    assert journal.grad_modes == {False}
    losses, _ = plain_step("Md/M", make_stages, journal)
    found = [evaluation.execution.losses[micro] for micro in range(2)]
    assert [float(loss) for loss in found] == pytest.approx(losses, rel=1e-12)
    assert not any(loss.requires_grad for loss in found)


@pytest.mark.parametrize(
    ("row", "words"),
    [("F0.0 F1.0 B1.0", "forwards that no backward used"), ("F0.0", "results that nobody took")],
)
def test_a_row_that_ends_too_early_is_an_error(row, words, journal, make_stages):
    with pytest.raises(AssertionError, match=words):
        Run("M/M", row, journal, make_stages)
