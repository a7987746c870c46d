"""Relations between the values of a request that no single value can show to be wrong.

Each function takes plain values and yields a fault, named as the recipe names the value, for each
relation that does not hold.
"""

from collections.abc import Iterator, Sequence

from pith.arch.fields import nearest_divisors
from pith.errors import Fault, RequestError
from pith.plan.batch import Batch
from pith.plan.placement import split_layers
from pith.schedule import build

# A byte-level tokenizer has one token per byte and one that ends a document.
BYTE_VOCABULARY = 257
# Embedding and head may stand alone on a stage; any other stage without a layer is idle.
MAX_EMPTY_STAGES = 2
# A table of stages x (micro-batches + stages) cells is built and drawn within seconds up to here;
# the second part counts the slots that fill and drain the pipeline.
MAX_CELLS = 10_000


def experts(num_experts: int, *, ep: int) -> Iterator[Fault]:
    """Every ep rank holds the same number of experts; a dense model has none to share out."""
    if num_experts == 0 and ep > 1:
        yield Fault("parallel.ep", str(ep), "1: the model has no experts", ("1",))
    elif num_experts % ep:
        wanted = f"a divisor of num_experts = {num_experts}"
        yield Fault("parallel.ep", str(ep), wanted, nearest_divisors(num_experts, near=ep))


def sequence(length: int, *, cp: int, max_length: int) -> Iterator[Fault]:
    """Positions stay inside the model's range, and context parallelism cuts 2 cp equal blocks."""
    blocks = 2 * cp if cp > 1 else 1
    where = "training.sequence_length"
    longest = max_length // blocks * blocks
    if length > max_length:
        wanted = f"at most max_position_embeddings = {max_length}"
        yield Fault(where, str(length), wanted, (str(longest),) if longest else ())
    if length % blocks:
        around = (length // blocks * blocks, (length // blocks + 1) * blocks)
        nearest = tuple(str(n) for n in around if 0 < n <= max_length)
        yield Fault(where, str(length), f"a multiple of 2 * cp = {blocks}", nearest)


def most_stages(num_layers: int) -> int:
    """The most stages of which none is idle."""
    return num_layers + MAX_EMPTY_STAGES


def stages(
    schedule: str | None,
    *,
    pp: int,
    num_layers: int,
    num_stages: int | None,
    layers_per_stage: Sequence[int] | None,
) -> Iterator[Fault]:
    """No stage is idle, and explicit numbers agree with the schedule (None: it is not known)."""
    most, counts = most_stages(num_layers), _stage_counts(schedule, pp=pp, asked=num_stages)
    if min(counts) > most:
        where = "parallel.pp" if num_stages not in counts else "parallel.num_stages"
        found = f"{pp} ({min(counts)} stages)" if where == "parallel.pp" else str(num_stages)
        wanted = f"at most {most} stages for {num_layers} layers"
        nearest = max(1, most // (min(counts) // pp)) if where == "parallel.pp" else most // pp * pp
        yield Fault(where, found, wanted, (str(nearest),) if nearest else ())
    if schedule is None:
        return
    if num_stages is not None and num_stages not in counts:
        shown = " or ".join(map(str, counts))
        wanted = f"{shown}: what {schedule} has on {pp} ranks"
        if build.varies(schedule):
            wanted = f"a multiple of pp = {pp}"
        yield Fault("parallel.num_stages", str(num_stages), wanted, tuple(map(str, counts)))
    if layers_per_stage is not None and min(counts) <= most:
        count = len(layers_per_stage) if len(layers_per_stage) in counts else max(counts)
        try:
            split_layers([0.0] * num_layers, num_stages=count, explicit=layers_per_stage)
        except RequestError as error:
            yield from error.faults


def _stage_counts(schedule: str | None, *, pp: int, asked: int | None) -> tuple[int, ...]:
    """How many stages a schedule may cut the model into on `pp` ranks, `asked` where it can."""
    if schedule is None:
        return (pp,)
    if schedule == "auto":
        counts = (pp, 2 * pp)
        return (asked,) if asked in counts else counts
    if build.varies(schedule) and asked is not None:
        near = max(1, round(asked / pp)) * pp
        return (near,)
    return (build.num_stages(schedule, pp=1) * pp,)


def table_size(schedule: str, *, pp: int, num_stages: int | None, batch: Batch) -> Iterator[Fault]:
    """The schedule's table is small enough to be built and drawn within seconds."""
    per_rank = max(_stage_counts(schedule, pp=pp, asked=num_stages)) // pp
    most = _most_micro_batches(pp * per_rank)
    if most < 1:
        fitting = (n for n in range(pp, 0, -1) if _most_micro_batches(n * per_rank) >= 1)
        largest = next(fitting, 0)
        if largest:
            wanted = f"at most {largest} with schedule {schedule}: the table would be too large"
            yield Fault("parallel.pp", f"{pp} ({pp * per_rank} stages)", wanted, (str(largest),))
        else:
            wanted = "fewer: the table would be too large"
            yield Fault("parallel.num_stages", str(num_stages), wanted, (str(2 * pp),))
    elif batch.num_micro_batches > most:
        found = f"{batch.global_batch_size} ({batch.num_micro_batches} micro-batches)"
        wanted = (
            f"at most {most} micro-batches on {pp * per_rank} stages: else the table is too large"
        )
        nearest = str(most * batch.micro_batch_size * batch.data_ranks)
        yield Fault("training.global_batch_size", found, wanted, (nearest,))


def _most_micro_batches(num_stages: int) -> int:
    return MAX_CELLS // num_stages - num_stages


def learning_rate(
    schedule: str,
    *,
    steps: int,
    warmup_steps: int,
    decay_steps: int,
    decay_shape: str,
    min_lr_ratio: float,
) -> Iterator[Fault]:
    """Warm-up and decay fit into the run, and nothing is set that the schedule does not read."""
    if warmup_steps > steps:
        wanted = f"at most training.steps = {steps}"
        yield Fault("optimizer.warmup_steps", str(warmup_steps), wanted, (str(steps),))
    elif warmup_steps + decay_steps > steps:
        wanted = f"at most training.steps - warmup_steps = {steps - warmup_steps}"
        nearest = (str(steps - warmup_steps),)
        yield Fault("optimizer.decay_steps", str(decay_steps), wanted, nearest)
    if schedule == "wsd" and decay_steps == 0:
        yield Fault("optimizer.decay_steps", "0", "at least 1 for schedule wsd", ("1",))
    if schedule != "wsd" and decay_steps:
        wanted = f"0: only schedule wsd reads it, not {schedule}"
        yield Fault("optimizer.decay_steps", str(decay_steps), wanted, ("0",))
    if schedule != "wsd" and decay_shape != "linear":
        wanted = f"linear, its default: only schedule wsd reads it, not {schedule}"
        yield Fault("optimizer.decay_shape", decay_shape, wanted, ("linear",))
    if schedule == "constant" and min_lr_ratio:
        wanted = "0: schedule constant does not read it"
        yield Fault("optimizer.min_lr_ratio", str(min_lr_ratio), wanted, ("0.0",))


def vocabulary(size: int, *, corpus: str) -> Iterator[Fault]:
    """The embedded corpus is read byte by byte."""
    if corpus == "embedded" and size < BYTE_VOCABULARY:
        wanted = f"at least {BYTE_VOCABULARY} for the embedded corpus"
        yield Fault("model.fields.vocab_size", str(size), wanted, (str(BYTE_VOCABULARY),))
