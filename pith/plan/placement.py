"""Which layers each stage holds: the one rule that models, engine and checkpoints read."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import gcd

from pith.errors import Fault, RequestError


def split_layers(
    costs: Sequence[float],
    *,
    num_stages: int,
    first_cost: float = 0.0,
    last_cost: float = 0.0,
    folded: bool = False,
    explicit: Sequence[int] | None = None,
) -> tuple[range, ...]:
    """Cut the layers into `num_stages` contiguous ranges whose largest cost is least.

    Stage 0 carries `first_cost` (embedding) besides its layers, the last one `last_cost` (head). A
    range may be empty. Among equal splits the one whose costs, then whose lengths are most even
    wins, earlier stages taking the longer ranges. `folded`: stages s and num_stages - 1 - s share a
    rank (a V of two stages a rank), so that the ends of the model give way to embedding and head
    together, as far as it makes the largest cost of a rank smaller. `explicit` gives the lengths.
    Raises RequestError where `explicit` does not place each layer exactly once.
    """
    assert num_stages >= 1, "a pipeline has a stage"
    if explicit is None:
        balance = _folded_lengths if folded else _even_lengths
        lengths = balance(*_whole_numbers(costs, num_stages, first_cost, last_cost))
    else:
        lengths = _checked(explicit, num_layers=len(costs), num_stages=num_stages)
    ends = list(accumulate(lengths))
    return tuple(range(end - n, end) for n, end in zip(lengths, ends, strict=True))


def _checked(lengths: Sequence[int], *, num_layers: int, num_stages: int) -> tuple[int, ...]:
    if len(lengths) == num_stages and sum(lengths) == num_layers and min(lengths) >= 0:
        return tuple(lengths)
    even = [num_layers // num_stages + (s < num_layers % num_stages) for s in range(num_stages)]
    found = f"{list(lengths)} ({sum(lengths)} layers on {len(lengths)} stages)"
    wanted = f"{num_stages} numbers, none below 0, with the sum {num_layers}"
    fault = Fault("parallel.layers_per_stage", found, wanted, (str(even),))
    raise RequestError("placement.invalid", what=str(fault), faults=(fault,))


def _whole_numbers(
    costs: Sequence[float], num_stages: int, first_cost: float, last_cost: float
) -> tuple[list[int], list[int]]:
    """Layer costs, and what each stage carries besides, as exact integers of one scale.

    Exact, so that no rounding decides between splits that are equally good.
    """
    exact = [Fraction(cost) for cost in (*costs, first_cost, last_cost)]
    scale = max(value.denominator for value in exact)  # powers of two: floats are dyadic
    numbers = [int(value * scale) for value in exact]
    common = gcd(*numbers) or 1
    *layers, first, last = (number // common for number in numbers)
    carried = [0] * num_stages
    carried[0] += first
    carried[-1] += last
    return layers, carried


def _even_lengths(costs: list[int], carried: list[int]) -> tuple[int, ...]:
    """The most even lengths among those under the least possible largest cost.

    `best[i]` is the least (sum of squared costs, sum of squared lengths) of placing the layers from
    i on the stages looked at so far, last stage first, with the lengths that reach it.
    """
    limit, num_layers = _least_limit(costs, carried), len(costs)
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {num_layers: (0, 0, ())}
    for extra in reversed(carried):
        reached: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for end, (squares, spread, lengths) in best.items():
            cost = extra
            for start in range(end, -1, -1):
                cost += costs[start] if start < end else 0
                if cost > limit:
                    break
                length = end - start
                found = (squares + cost**2, spread + length**2, (-length, *lengths))
                reached[start] = min(reached.get(start, found), found)
        best = reached
    return tuple(-length for length in best[0][2])


def _least_limit(costs: list[int], carried: list[int]) -> int:
    """The least largest stage cost, by bisection over the greedy filling."""
    low, high = max(carried), sum(costs) + sum(carried)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(costs, carried, middle) else (middle + 1, high)
    return low


def _fits(costs: list[int], carried: list[int], limit: int) -> bool:
    layer = 0
    for extra in carried:
        room = limit - extra
        while layer < len(costs) and costs[layer] <= room:
            room -= costs[layer]
            layer += 1
    return layer == len(costs)


def _folded_lengths(costs: list[int], carried: list[int]) -> tuple[int, ...]:
    """The best of three: stages as even as can be; or the rank of both ends takes an even share
    of everything, rounded to layers down or up, and the stages between are as even as can be."""
    splits = [_even_lengths(costs, carried)]
    if len(carried) > 2:
        for first, last in _ends(costs, carried):
            inner = costs[first : len(costs) - last]
            splits.append((first, *_even_lengths(inner, carried[1:-1]), last))
    return min(splits, key=lambda split: _unevenness(split, costs, carried))


def _ends(costs: list[int], carried: list[int]) -> list[tuple[int, int]]:
    """How many layers the first and the last stage take, which share a rank: the most that stay
    within an even share of a rank, and one more; the lighter stage takes the next layer."""
    taken, loads = [(0, 0)], [carried[0], carried[-1]]
    share = Fraction(sum(costs) + sum(carried), len(carried) // 2)
    while sum(loads) <= share and sum(taken[-1]) < len(costs):
        first, last = taken[-1]
        if loads[0] <= loads[1]:
            loads[0] += costs[first]
            taken.append((first + 1, last))
        else:
            loads[1] += costs[-1 - last]
            taken.append((first, last + 1))
    return taken[-2:]


def _unevenness(
    lengths: tuple[int, ...], costs: list[int], carried: list[int]
) -> tuple[int, int, int]:
    """The largest cost of a rank of the V, then how uneven costs and lengths of stages are."""
    ends = list(accumulate(lengths))
    stages = [
        sum(costs[end - length : end]) + extra
        for end, length, extra in zip(ends, lengths, carried, strict=True)
    ]
    ranks = map(sum, zip(stages, reversed(stages), strict=True))
    return max(ranks), sum(cost**2 for cost in stages), sum(length**2 for length in lengths)
