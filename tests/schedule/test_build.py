"""Built rows are the published ones."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from pith.errors import RequestError
from pith.schedule.build import SCHEDULES, SIMULATION_ONLY, build, num_stages, placement
from pith.schedule.table import parse_rows, parse_slot
from pith.schedule.verify import verify

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


def torch_rows(
    schedule: type, *, pp: int, num_micro_batches: int, virtual: int = 2
) -> tuple[str, ...]:
    """The rows that torch computes, without their idle slots."""
    num_rounds = max(1, num_micro_batches // pp)
    light = SimpleNamespace(
        pp_group_size=pp,
        _n_microbatches=num_micro_batches,
        num_stages=virtual * pp,
        n_local_stages=virtual,
        microbatches_per_round=num_micro_batches // num_rounds,
    )

    def row(rank: int) -> str:
        light.rank = rank
        return " ".join(
            "|".join(
                f"{part.computation_type.value}{part.stage_index}.{part.microbatch_index}"
                for part in action.sub_actions or (action,)
            )
            for action in schedule._calculate_single_rank_operations(light, rank)
            if action is not None
        )

    return tuple(row(rank) for rank in range(pp))


RANKS = (1, 2, 3, 4, 5, 8, 16)


def even_rounds(pp: int) -> list[int]:
    """Numbers of micro-batches that torch accepts: whole rounds, none of them short."""
    candidates = (1, 2, 3, pp - 1, pp, pp + 1, 2 * pp - 1, 2 * pp, 2 * pp + 2, 4 * pp)
    return sorted({m for m in candidates if m > 0 and m % max(1, m // pp) == 0})


@pytest.mark.parametrize("pp", RANKS)
def test_zbv_is_the_order_of_torch(pp):
    for num_micro_batches in (1, 2, 3, pp, 2 * pp - 1, 2 * pp, 3 * pp + 1):
        size = {"pp": pp, "num_micro_batches": num_micro_batches}
        theirs = torch_rows(torch_schedules.ScheduleZBVZeroBubble, **size)
        assert build("zbv", **size).row_texts() == theirs


@pytest.mark.parametrize("pp", RANKS)
def test_dualpipev_is_the_order_of_torch(pp):
    for num_micro_batches in (2 * pp, 2 * pp + 1, 4 * pp + 3):
        size = {"pp": pp, "num_micro_batches": num_micro_batches}
        theirs = torch_rows(torch_schedules.ScheduleDualPipeV, **size)
        assert build("dualpipev", **size).row_texts() == theirs


@pytest.mark.parametrize("pp", RANKS)
@pytest.mark.parametrize("virtual", [1, 2, 3, 4])
def test_interleaved_is_the_order_of_torch(pp, virtual):
    for num_micro_batches in even_rounds(pp):
        size = {"pp": pp, "num_micro_batches": num_micro_batches, "virtual": virtual}
        theirs = torch_rows(torch_schedules.ScheduleInterleaved1F1B, **size)
        assert build("interleaved", **size).row_texts() == theirs


@pytest.mark.parametrize("pp", RANKS)
def test_zb_h1_is_the_order_of_torch(pp):
    for num_micro_batches in even_rounds(pp):
        size = {"pp": pp, "num_micro_batches": num_micro_batches}
        theirs = torch_rows(torch_schedules.ScheduleInterleavedZeroBubble, virtual=1, **size)
        assert build("zb-h1", **size).row_texts() == theirs


@pytest.mark.parametrize("virtual", [1, 2, 3, 11])
def test_interleaved_holds_for_rounds_that_torch_refuses(virtual):
    for pp, num_micro_batches in [(2, 5), (3, 7), (3, 11), (4, 11), (5, 17), (7, 15)]:
        size = {"pp": pp, "num_micro_batches": num_micro_batches}
        assert num_micro_batches % (num_micro_batches // pp)
        assert verify(build("interleaved", virtual=virtual, **size)) == ()


@pytest.mark.parametrize("name", SIMULATION_ONLY)
@pytest.mark.parametrize("pp", [2, 4, 6, 8, 16])
def test_bidirectional_tables_hold_and_mirror_each_other(name, pp):
    for num_micro_batches in (2, pp, 2 * pp - 2, 2 * pp, 4 * pp + 2):
        table = build(name, pp=pp, num_micro_batches=num_micro_batches)
        assert verify(table) == ()
        half = num_micro_batches // 2
        for row, opposite in zip(table.rows, reversed(table.rows), strict=True):
            assert row == tuple(
                tuple(replace(op, micro=(op.micro + half) % num_micro_batches) for op in slot)
                for slot in opposite
            )


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
    ("interleaved", 2, 3): (  # one round of three
        "F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 B2.0 B2.1 B2.2 B0.0 B0.1 B0.2",
        "F1.0 F1.1 F1.2 F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 B1.0 B1.1 B1.2",
    ),
    ("interleaved", 2, 5): (  # a round of three, then one of two
        "F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 B2.0 F0.3 B2.1 F0.4 B2.2 F2.3 B0.0 F2.4 B0.1 "
        "B0.2 B2.3 B2.4 B0.3 B0.4",
        "F1.0 F1.1 F1.2 F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F1.3 B1.0 F1.4 B1.1 F3.3 B1.2 "
        "F3.4 B3.3 B3.4 B1.3 B1.4",
    ),
    ("zb-h1", 3, 4): (
        "F0.0 F0.1 F0.2 I0.0 W0.0 F0.3 I0.1 W0.1 I0.2 W0.2 I0.3 W0.3",
        "F1.0 F1.1 I1.0 F1.2 I1.1 W1.0 F1.3 I1.2 W1.1 I1.3 W1.2 W1.3",
        "F2.0 I2.0 F2.1 I2.1 F2.2 I2.2 W2.0 F2.3 I2.3 W2.1 W2.2 W2.3",
    ),
    ("zb-h1", 3, 1): ("F0.0 I0.0 W0.0", "F1.0 I1.0 W1.0", "F2.0 I2.0 W2.0"),
    ("dualpipe", 2, 4): (
        "F0.0 F1.2 F0.1 B1.2 F1.3|B0.0 B1.3 I0.1 W0.1",
        "F0.2 F1.0 F0.3 B1.0 F1.1|B0.2 B1.1 I0.3 W0.3",
    ),
    ("chimera", 2, 2): ("F0.0 F1.1 B1.1 B0.0", "F0.1 F1.0 B1.0 B0.1"),
    ("chimera", 4, 4): (
        "F0.0 F0.1 F3.2 B3.2 F3.3 B3.3 B0.0 B0.1",
        "F1.0 F2.2 F1.1 F2.3 B2.2 B1.0 B2.3 B1.1",
        "F1.2 F2.0 F1.3 F2.1 B2.0 B1.2 B2.1 B1.3",
        "F0.2 F0.3 F3.0 B3.0 F3.1 B3.1 B0.2 B0.3",
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
    two = [(0, 3), (1, 4), (2, 5)] if name == "interleaved" else [(0, 5), (1, 4), (2, 3)]
    owned = two if name in TWO_STAGES_A_RANK else [(0,), (1,), (2,)]
    assert [place.stages(rank) for rank in range(3)] == owned
    table = build(name, pp=3, num_micro_batches=7)
    assert (table.name, table.num_micro_batches, table.placement) == (name, 7, place)


TWO_STAGES_A_RANK = ("interleaved", "zbv", "dualpipev", "list")


@pytest.mark.parametrize("name", SIMULATION_ONLY)
def test_bidirectional_stages_are_on_two_ranks(name):
    place = build(name, pp=4, num_micro_batches=6).placement
    assert [place.rank(1, micro) for micro in range(6)] == [1, 1, 1, 2, 2, 2]
    assert [placement(name, pp=4).stages(r) for r in range(4)] == [(0, 3), (1, 2), (1, 2), (0, 3)]


def test_the_number_of_stages_a_rank_varies_where_it_can():
    for virtual in (1, 3, 4):
        assert num_stages("interleaved", pp=3, virtual=virtual) == 3 * virtual
        table = build("interleaved", pp=3, num_micro_batches=5, virtual=virtual)
        assert table.placement == placement("interleaved", pp=3, virtual=virtual)
    same = build("zbv", pp=3, num_micro_batches=5, virtual=2)
    assert same == build("zbv", pp=3, num_micro_batches=5)


@pytest.mark.parametrize(("name", "virtual", "has"), [("1f1b", 2, 1), ("zbv", 1, 2)])
def test_other_numbers_of_stages_are_refused_with_those_that_vary(name, virtual, has):
    with pytest.raises(RequestError, match="only interleaved and list can vary it") as caught:
        build(name, pp=2, num_micro_batches=4, virtual=virtual)
    assert caught.value.faults[0].nearest == (str(has),)


def test_the_digest_is_equal_for_equal_requests_and_differs_otherwise():
    requests = [(name, pp, m) for name in SCHEDULES for pp in (2, 3) for m in (4, 5)]
    digests = [build(n, pp=pp, num_micro_batches=m).digest() for n, pp, m in requests]
    again = [build(n, pp=pp, num_micro_batches=m).digest() for n, pp, m in requests]
    assert digests == again
    assert len(set(digests)) == len(requests)


@pytest.mark.parametrize(
    ("name", "nearest"), [("dualpip", "dualpipe"), ("1F1B", "1f1b"), ("zb-v", "zbv")]
)
def test_an_unknown_name_is_refused_with_the_nearest(name, nearest):
    with pytest.raises(RequestError, match=nearest) as caught:
        build(name, pp=2, num_micro_batches=4, virtual=3)
    assert [fault.nearest[0] for fault in caught.value.faults] == [nearest]
    with pytest.raises(RequestError, match=nearest):
        num_stages(name, pp=2)


def test_auto_is_no_builder_and_the_error_says_who_chooses():
    with pytest.raises(RequestError, match=r"pith\.schedule\.auto chooses"):
        build("auto", pp=2, num_micro_batches=4)


@pytest.mark.parametrize(
    ("name", "sizes", "where"),
    [
        ("1f1b", {"pp": 0, "num_micro_batches": 4}, ["schedule pp"]),
        ("1f1b", {"pp": 2, "num_micro_batches": 0}, ["schedule num_micro_batches"]),
        (
            "interleaved",
            {"pp": -1, "num_micro_batches": -1, "virtual": 0},
            ["schedule pp", "schedule num_micro_batches", "schedule virtual"],
        ),
        ("nothing", {"pp": 0, "num_micro_batches": 1}, ["schedule", "schedule pp"]),
        ("dualpipe", {"pp": 3, "num_micro_batches": 4}, ["schedule pp"]),
        (
            "chimera",
            {"pp": 1, "num_micro_batches": 3, "virtual": 4},
            ["schedule pp", "schedule num_micro_batches", "schedule virtual"],
        ),
    ],
)
def test_all_faults_of_a_request_are_named_at_once(name, sizes, where):
    with pytest.raises(RequestError) as caught:
        build(name, **sizes)
    assert [fault.where for fault in caught.value.faults] == where
    assert str(caught.value.faults[0]) in caught.value.what


def test_the_nearest_even_numbers_are_named_where_both_ends_are_fed():
    with pytest.raises(RequestError, match="an even number") as caught:
        build("chimera", pp=1, num_micro_batches=7)
    assert [fault.nearest for fault in caught.value.faults] == [("2",), ("6", "8")]
