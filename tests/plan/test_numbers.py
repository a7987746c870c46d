"""Batch arithmetic, utilisation and the phases of the learning rate."""

import pytest

from pith.errors import RequestError
from pith.plan.batch import plan_batch
from pith.plan.dry_run import rate_phases
from pith.plan.flops import mfu, peak_bf16_flops


def batch(global_batch_size, micro_batch_size, data_ranks):
    return plan_batch(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        data_ranks=data_ranks,
        sequence_length=256,
    )


def test_a_batch_is_micro_batch_times_count_times_ranks():
    plan = batch(48, 2, 4)
    assert plan.num_micro_batches == 6
    assert plan.tokens_per_step == 48 * 256
    assert plan.tokens_per_micro_batch == 512


@pytest.mark.parametrize(
    ("sizes", "nearest"), [((15, 2, 1), ("14", "16")), ((7, 2, 4), ("8",)), ((0, 1, 1), ("1",))]
)
def test_a_batch_that_is_not_whole_is_refused(sizes, nearest):
    with pytest.raises(RequestError) as caught:
        batch(*sizes)
    assert caught.value.faults[0].nearest == nearest
    assert all(batch(int(value), *sizes[1:]).num_micro_batches >= 1 for value in nearest)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("cpu", None),
    ],
)
def test_the_peak_is_known_by_device_name(device, peak):
    assert peak_bf16_flops(device) == peak


def test_utilisation_is_the_share_of_all_devices():
    share = mfu(1000.0, flops_per_token=2e9, peak_flops=1e12, num_devices=4)
    assert share == pytest.approx(0.5)
    assert mfu(1000.0, flops_per_token=2e9, peak_flops=None, num_devices=4) is None


@pytest.mark.parametrize(
    ("schedule", "warmup", "decay", "expected"),
    [
        ("wsd", 5, 20, [("warm-up", 1, 5), ("stable", 6, 40), ("decay", 41, 60)]),
        ("wsd", 40, 20, [("warm-up", 1, 40), ("decay", 41, 60)]),
        ("cosine", 5, 0, [("warm-up", 1, 5), ("decay", 6, 60)]),
        ("constant", 0, 0, [("stable", 1, 60)]),
    ],
)
def test_the_phases_of_the_rate_cover_every_step_once(schedule, warmup, decay, expected):
    phases = rate_phases(
        schedule, peak=0.1, steps=60, warmup_steps=warmup, decay_steps=decay, min_lr_ratio=0.1
    )
    assert [(phase.name, phase.first, phase.last) for phase in phases] == expected
    steps = [step for phase in phases for step in range(phase.first, phase.last + 1)]
    assert steps == list(range(1, 61))
