"""Joining an outer job: torchrun's variables as they are, SLURM's translated."""

import pytest

from pith.errors import RequestError, UnavailableError
from pith.launch import environment

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODELIST": "gpu[03-04],gpu09",
    "SLURM_JOB_ID": "123456",
}


@pytest.fixture(autouse=True)
def without_scontrol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


def test_alone_pith_starts_its_own_workers() -> None:
    assert not environment.joined({})
    assert environment.world_size({}) is None
    assert not environment.joined(SLURM | {"SLURM_NTASKS": "1"})


def test_variables_of_torchrun_are_taken_as_they_are() -> None:
    assert environment.joined(TORCHRUN)
    assert environment.world_size(TORCHRUN) == 4
    assert environment.rank_variables(TORCHRUN | SLURM) == TORCHRUN


def test_a_slurm_step_becomes_the_variables_of_torchrun() -> None:
    assert environment.joined(SLURM)
    assert environment.rank_variables(SLURM) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": str(20000 + 123456 % 20000),
    }


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("login1", "login1"),
        ("a1,a2", "a1"),
        ("gpu[03-05,9],x", "gpu03"),
        ("n[1,7]", "n1"),
        ("rack-b[012-016]-ib", "rack-b012-ib"),
    ],
)
def test_the_first_host_of_a_node_list(nodelist: str, first: str) -> None:
    assert environment.first_host(nodelist) == first


@pytest.mark.parametrize("missing", ["LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_left_out_by_the_launcher_is_named(missing: str) -> None:
    variables = {name: value for name, value in TORCHRUN.items() if name != missing}

    with pytest.raises(UnavailableError, match=missing):
        environment.rank_variables(variables)


def test_an_empty_node_list_is_refused() -> None:
    with pytest.raises(UnavailableError, match="NODELIST"):
        environment.rank_variables(SLURM | {"SLURM_NODELIST": ""})


@pytest.mark.parametrize(
    ("variables", "name", "value"),
    [
        *(
            (TORCHRUN, name, bad)
            for name in ("RANK", "WORLD_SIZE")
            for bad in ("", "x", "-1", "1.5")
        ),
        (TORCHRUN, "WORLD_SIZE", "0"),
        (TORCHRUN, "RANK", "4"),
        (TORCHRUN, "LOCAL_RANK", "9"),
        (TORCHRUN, "MASTER_PORT", "70000"),
        (TORCHRUN, "MASTER_PORT", ""),
        (TORCHRUN, "MASTER_ADDR", ""),
        *((SLURM, name, "x") for name in SLURM if name != "SLURM_NODELIST"),
        (SLURM, "SLURM_NTASKS", ""),
        (SLURM, "SLURM_NTASKS", "0"),
        (SLURM, "SLURM_PROCID", "8"),
    ],
)
def test_a_value_that_cannot_be_is_refused_and_named(
    variables: dict[str, str], name: str, value: str
) -> None:
    assert environment.joined(variables | {name: value})
    with pytest.raises(RequestError, match=name):
        environment.world_size(variables | {name: value})
