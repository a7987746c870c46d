"""Built rows are the published ones."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from pith.errors import RequestError
from pith.schedule.build import SCHEDULES, build, num_stages, placement
from pith.schedule.table import parse_rows, parse_slot

PUBLISHED = json.loads((Path(__file__).parent / "data" / "dualpipev_orders.json").read_text())


@pytest.mark.parametrize("case", PUBLISHED["orders"])
def test_dualpipev_is_the_published_order(case):
    pp, num_micro_batches = (int(part.strip("pm")) for part in case.split("_"))
    table = build("dualpipev", pp=pp, num_micro_batches=num_micro_batches)
    for rank, (row, text) in enumerate(zip(table.rows, PUBLISHED["orders"][case], strict=True)):
        stage_of_chunk = {0: rank, 1: 2 * pp - 1 - rank}
        published = [
            [(op.kind, stage_of_chunk[op.stage], op.micro) for op in parse_slot(cell)]
            for cell in text.split()
        ]
        assert [[(op.kind, op.stage, op.micro) for op in slot] for slot in row] == published


def torch_row(schedule: type, *, pp: int, rank: int, num_micro_batches: int) -> str:
    """The row that torch computes, without its idle slots."""
    light = SimpleNamespace(
        pp_group_size=pp, _n_microbatches=num_micro_batches, num_stages=2 * pp, rank=rank
    )
    actions = schedule._calculate_single_rank_operations(light, rank)
    return " ".join(
        "|".join(
            f"{part.computation_type.value}{part.stage_index}.{part.microbatch_index}"
            for part in action.sub_actions or (action,)
        )
        for action in actions
        if action is not None
    )


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 5, 8, 16])
def test_zbv_is_the_order_of_torch(pp):
    for num_micro_batches in (1, 2, 3, pp, 2 * pp - 1, 2 * pp, 3 * pp + 1):
        size = {"pp": pp, "num_micro_batches": num_micro_batches}
        theirs = [
            torch_row(torch_schedules.ScheduleZBVZeroBubble, rank=rank, **size)
            for rank in range(pp)
        ]
        assert list(build("zbv", **size).row_texts()) == theirs


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 5, 8, 16])
def test_dualpipev_is_the_order_of_torch(pp):
    for num_micro_batches in (2 * pp, 2 * pp + 1, 4 * pp + 3):
        size = {"pp": pp, "num_micro_batches": num_micro_batches}
        theirs = [
            torch_row(torch_schedules.ScheduleDualPipeV, rank=rank, **size) for rank in range(pp)
        ]
        assert list(build("dualpipev", **size).row_texts()) == theirs


ROWS_BY_HAND = {
    ("gpipe", 2, 3): (
        "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2",
        "F1.0 F1.1 F1.2 B1.0 B1.1 B1.2",
    ),
    ("1f1b", 3, 4): (
        "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3",
        "F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3",
        "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3",
    ),
    ("1f1b", 3, 1): ("F0.0 B0.0", "F1.0 B1.0", "F2.0 B2.0"),
    ("1f1b-pair", 1, 1): ("F0.0 B0.0",),
    ("1f1b-pair", 1, 3): ("F0.0 F0.1|B0.0 F0.2|B0.1 B0.2",),
    ("1f1b-pair", 2, 4): (
        "F0.0 F0.1 F0.2 F0.3|B0.0 B0.1 B0.2 B0.3",
        "F1.0 F1.1|B1.0 F1.2|B1.1 F1.3|B1.2 B1.3",
    ),
    ("zbv", 1, 1): ("F0.0 F1.0 I1.0 W1.0 I0.0 W0.0",),
    ("dualpipev", 1, 1): ("F0.0 F1.0 B1.0 I0.0 W0.0",),
}


@pytest.mark.parametrize("case", ROWS_BY_HAND, ids=str)
def test_small_tables_are_as_written_by_hand(case):
    name, pp, num_micro_batches = case
    table = build(name, pp=pp, num_micro_batches=num_micro_batches)
    assert table.row_texts() == ROWS_BY_HAND[case]
    assert parse_rows(table.row_texts()) == table.rows


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_are_placed_as_the_name_says(name):
    place = placement(name, pp=3)
    assert num_stages(name, pp=3) == place.num_stages
    v = name in ("zbv", "dualpipev")
    owned = [(0, 5), (1, 4), (2, 3)] if v else [(0,), (1,), (2,)]
    assert [place.stages(rank) for rank in range(3)] == owned
    table = build(name, pp=3, num_micro_batches=7)
    assert (table.name, table.num_micro_batches, table.placement) == (name, 7, place)


def test_the_digest_is_equal_for_equal_requests_and_differs_otherwise():
    requests = [(name, pp, m) for name in SCHEDULES for pp in (2, 3) for m in (4, 5)]
    digests = [build(n, pp=pp, num_micro_batches=m).digest() for n, pp, m in requests]
    again = [build(n, pp=pp, num_micro_batches=m).digest() for n, pp, m in requests]
    assert digests == again
    assert len(set(digests)) == len(requests)


@pytest.mark.parametrize(
    ("name", "nearest"), [("dualpipe", "dualpipev"), ("1F1B", "1f1b"), ("zb-v", "zbv")]
)
def test_an_unknown_name_is_refused_with_the_nearest(name, nearest):
    with pytest.raises(RequestError, match=nearest) as caught:
        build(name, pp=2, num_micro_batches=4)
    assert caught.value.faults[0].nearest[0] == nearest
    with pytest.raises(RequestError, match=nearest):
        num_stages(name, pp=2)


@pytest.mark.parametrize(("pp", "num_micro_batches"), [(0, 4), (2, 0), (-1, -1)])
def test_counts_below_one_are_refused_together(pp, num_micro_batches):
    with pytest.raises(RequestError) as caught:
        build("1f1b", pp=pp, num_micro_batches=num_micro_batches)
    assert len(caught.value.faults) == (pp < 1) + (num_micro_batches < 1)
