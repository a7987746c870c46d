"""What is in the time of a slot and what is not, on the host, on a device and between ranks."""

import time
from typing import Any

import pytest
import torch

from pith.comm.stopwatch import Stopwatch
from pith.engine.clock import Clock, DeviceClock, HostClock, clock_of
from pith.engine.executor import Executor
from pith.engine.weight_grads import WeightGrads
from pith.schedule.simulate import Span
from pith.schedule.table import Kind, Op, Placement, Table, parse_rows, parse_slot, slot_text
from tests.engine.test_overlap import batches
from tests.train.parity import random_batch, recipe, trainer_of

CPU = torch.device("cpu")
ROWS = (
    "F0.0 F0.1 B0.0 I0.1 W0.1",
    "F1.0 F1.1|B1.0 I1.1 W1.1",
    "F2.0 B2.0 F2.1 I2.1 W2.1",
)


class Noting:
    """A transport that notes what it is asked for, and hands out tensors of the right shape."""

    def __init__(self, journal: Any) -> None:
        self.journal = journal

    def post(self, messages: Any) -> None:
        self.journal.note("post")

    def take(self, message: Any) -> Any:
        self.journal.note("take", str(message))
        return (torch.ones(2, 4, 3, dtype=torch.float64),)

    def send(self, message: Any, tensors: Any) -> None:
        self.journal.note("send", str(message))

    def flush(self) -> None:
        self.journal.note("flush")


@pytest.fixture
def timed(journal: Any, make_stages: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What the middle rank of three did in each span: time is the number of things noted."""
    monkeypatch.setattr(time, "perf_counter", lambda: float(len(journal.entries)))
    sink, clock = WeightGrads(), HostClock()
    executor = Executor(
        Table("test", Placement("loop", 3, 3), 2, parse_rows(ROWS)),
        rank=1,
        stages={1: make_stages("M/M/M", journal, sink)[1]},
        transport=Noting(journal),
        weights=sink,
        stopwatch=Stopwatch(),
    )
    journal.note("before")
    clock.zero()
    executor.run(batches(2), clock=clock)
    inside: dict[str, list[str]] = {}
    for span in clock.spans():
        start, end = 1 + int(span.start), 1 + int(span.end)
        inside[slot_text(span.slot)] = journal.entries[start:end]
    return inside


def test_waiting_for_a_message_is_in_no_span_but_for_the_forward_of_a_pair(
    timed: dict[str, list[str]],
) -> None:
    moving = {
        text: [entry for entry in entries if entry.split()[0] in ("post", "take", "send", "flush")]
        for text, entries in timed.items()
    }
    assert moving == {
        "F1.0": [],
        "F1.1|B1.0": ["take activation 1.1 from rank 0 to 1"],
        "I1.1": [],
        "W1.1": [],
    }


def test_all_work_and_the_exchange_with_experts_is_in_the_span_of_its_slot(
    timed: dict[str, list[str]], journal: Any
) -> None:
    work = [entry for entry in journal.entries if entry.split()[0] in "FIW launch wait"]
    forward = ["F attend.1", "launch F dispatch.1", "wait F dispatch.1", "F experts.1"]
    assert timed["F1.0"][:4] == forward
    assert {entry[0] for entry in timed["W1.1"]} == {"W"}
    assert sum(map(len, timed.values())) == len(work) + 1, "the pair's own wait is in it"


def test_a_step_without_a_clock_notes_nothing() -> None:
    clock = Clock()
    clock.zero()
    clock.begin()
    clock.end(parse_slot("F0.0"))
    assert clock.spans() == ()


def test_slots_run_on_the_host_of_a_cpu() -> None:
    assert isinstance(clock_of(CPU), HostClock)


class Device:
    """Stands for CUDA: a stream does what was asked of it only once somebody waits."""

    def __init__(self) -> None:
        self.num_waits, self.now_ms = 0, 0.0
        self.queue: list[Any] = []

    def work(self, ms: float) -> None:
        self.queue.append(ms)

    def synchronize(self, device: torch.device) -> None:
        self.num_waits += 1
        for entry in self.queue:
            if isinstance(entry, Event):
                entry.ms = self.now_ms
            else:
                self.now_ms += entry
        self.queue.clear()


class Event:
    """As torch's: it has a time once the stream came by, if it was asked to take one."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.ms, self.enable_timing = None, enable_timing

    def record(self, stream: Device) -> None:
        stream.queue.append(self)

    def elapsed_time(self, end: "Event") -> float:
        if not self.enable_timing or self.ms is None or end.ms is None:
            raise RuntimeError("not ready")
        return end.ms - self.ms


def test_a_device_clock_asks_the_stream_and_waits_only_before_zero_and_after_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = {torch.device("cuda", index): Device() for index in range(2)}
    place, device = list(devices.items())[1]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of=None: devices[of])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda of=None: devices[of].synchronize(of))
    device.work(ms=1000)  # left over from the step before
    clock = clock_of(place)
    assert device.queue == [], "zero would come late"
    clock.zero()
    for text in ("F0.0", "F0.1|B0.0"):
        device.work(ms=5)
        clock.begin()
        device.work(ms=20)
        clock.begin()  # the second operation has its input
        device.work(ms=10)
        clock.end(parse_slot(text))
    device.work(ms=500)
    assert device.num_waits == 1
    spans = clock.spans()
    assert device.num_waits == 2
    assert [slot_text(span.slot) for span in spans] == ["F0.0", "F0.1|B0.0"]
    times = [time for span in spans for time in (span.start, span.end)]
    assert times == pytest.approx([0.005, 0.035, 0.040, 0.070])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_a_span_is_the_time_of_its_kernels_and_the_host_goes_on() -> None:
    torch.cuda._sleep(100_000_000)  # clock cycles: some 50 ms
    clock = DeviceClock(torch.device("cuda", torch.cuda.current_device()))
    clock.zero()
    for text in ("F0.0", "B0.0"):
        torch.cuda._sleep(50_000_000)
        clock.begin()
        torch.cuda._sleep(100_000_000)
        clock.end(parse_slot(text))
    assert not torch.cuda.current_stream().query(), "the host has waited"
    first, second = clock.spans()
    assert first.start > 0.01
    for found in (first.end - first.start, second.end - second.start, 2 * first.start):
        assert found == pytest.approx(2 * (second.start - first.end), rel=0.3)


SCHEDULES = ("1f1b", "zbv", "dualpipev")
LATE_S = 0.05
Timed = tuple[float, tuple[Span, ...]]  # zero by the machine's clock, and the spans since


def timed_steps(num_steps: int) -> dict[str, list[Timed]]:
    """Steps of the real trainer on two ranks, of which one comes late to each."""
    found: dict[str, list[Timed]] = {}
    for schedule in SCHEDULES:
        with trainer_of(recipe(pp=2, schedule=schedule, micro_batches=5)) as trainer:
            batch, found[schedule] = random_batch(10).take(trainer.rows), []
            for index in range(num_steps):
                time.sleep(LATE_S * trainer.world.rank)
                clock = HostClock()
                result = trainer.step(index, batch, clock=clock)
                found[schedule].append((clock._zero, result.spans))
            assert trainer.step(num_steps, batch).spans == ()
    return found


def source(op: Op) -> tuple[bool, int, int] | None:
    """Whose result an operation needs: whether a forward's, the stage and the micro-batch."""
    if op.kind is Kind.W:
        return None
    is_forward = op.kind is Kind.F
    return is_forward, op.stage - 1 if is_forward else op.stage + 1, op.micro


def assert_causal(ranks: list[Timed]) -> int:
    """No slot starts before what it needs was sent by the other rank. Returns how many needed."""
    ends = {
        (op.kind is Kind.F, op.stage, op.micro): (rank, zero + span.end)
        for rank, (zero, spans) in enumerate(ranks)
        for span in spans
        for op in span.slot
        if op.kind is not Kind.W
    }
    num_messages = 0
    for rank, (zero, spans) in enumerate(ranks):
        for span in spans:
            for op in span.slot:
                sender, sent = ends.get(source(op), (rank, 0.0))
                is_awaited_inside = len(span.slot) == 2 and op.kind is Kind.F
                taken = zero + (span.end if is_awaited_inside else span.start)
                if sender != rank:
                    assert taken > sent, f"{op} runs {sent - taken} s before it can"
                    num_messages += 1
    return num_messages


def test_between_ranks_a_slot_starts_after_the_slot_that_sent_its_input_has_ended(
    run_ranks: Any,
) -> None:
    outcomes = run_ranks(2, timed_steps, 3)
    apart = []
    for schedule in SCHEDULES:
        for ranks in zip(*(outcome[schedule] for outcome in outcomes), strict=True):
            # Each of 5 micro-batches passes the cut once each way on a loop, twice on a V.
            assert assert_causal(list(ranks)) == (10 if schedule == "1f1b" else 20)
            (one, _), (other, _) = ranks
            apart.append(abs(one - other))
    assert min(apart) < LATE_S / 10, "the ranks do not share zero"
