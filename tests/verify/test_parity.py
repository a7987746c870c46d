"""Layout parity holds for what is sound, and finds and names what is not, on real processes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pith.arch.parameter import Role
from pith.config import Recipe
from pith.config.scaled import scaled_down
from pith.engine import chunk
from pith.engine.shard import Parameters, Spread
from pith.engine.weight_grads import WeightGrads
from pith.errors import UnavailableError
from pith.layer.five_stages import DecoderLayer
from pith.models.qwen3 import Qwen3Stage
from pith.train import build, step
from pith.train.step import Trainer
from pith.verify import parity
from pith.verify.parity import Layout, Parity, check_layouts, parse_layouts

SMALL = (
    "training.sequence_length=8",
    "training.micro_batch_size=1",
    "balance.coefficient=0.05",
    "balance.z_loss=0.01",
    "model.fields.num_experts=4",
    "model.fields.hidden_size=16",
    "model.fields.num_hidden_layers=3",
    "model.fields.mlp_only_layers=[1]",
)
Patch = pytest.MonkeyPatch


def small(*changes: str, name: str = "tiny-moe") -> Recipe:
    return scaled_down(Recipe.load(name, [*SMALL, *changes] if name == "tiny-moe" else changes))


def checked(*texts: str, recipe: Recipe | None = None) -> Parity:
    said: list[str] = []
    layouts = parse_layouts(texts)
    found = check_layouts(recipe or small(), layouts, device="cpu", say=said.append)
    assert len(said) == len(texts)
    return found


def failing(found: Parity) -> dict[str, str]:
    """Quantity -> what was found, of the checks that failed."""
    return {check.name.partition(": ")[2]: check.found for check in found.checks if not check.ok}


# What is sound


def test_sound_layouts_hold_in_every_quantity_also_where_losses_depend_on_the_cut() -> None:
    found = checked(
        "pp=2,ep=2,schedule=zbv,exchange=splits",
        "dp=2,dp_shard=1,micro_batch_size=2",
        recipe=small("balance.scope=global-batch"),
    )
    assert failing(found) == {}
    quantities = {check.name.partition(": ")[2] for check in found.checks}
    assert quantities == {
        *("ran", "ranks agree", "executed order", "counted labels", "loss", "balance loss"),
        *("z loss", "expert load", "gradients", "gradient norm", "clipped gradients"),
        *("updated", "learning rate", "weights"),
    }
    assert found.data["first_difference"] is None
    assert found.data["steps_compared"] == 2
    assert found.data["max_relative"]["loss"] < 1e-13
    assert set(found.data["layouts"]) == {
        "pp=2,ep=2,schedule=zbv,exchange=splits",
        "dp=2,dp_shard=1,micro_batch_size=2",
    }
    for figures in found.data["layouts"].values():
        assert 0 <= figures["worst_relative"] < 1e-12
        assert figures["loss"][0] > figures["loss"][1] > 4
        assert figures["ranks"] == (4 if figures["schedule"] == "zbv" else 2)


def test_a_dense_model_with_a_tied_head_holds_whatever_its_precision_and_operators() -> None:
    recipe = small("training.precision=bfloat16", "training.clip=none", name="qwen3-0.6b")
    recipe = recipe.model_copy(update={"operators": {"linear": "library"}})
    found = checked("pp=2,schedule=zb-h1", recipe=recipe)
    assert failing(found) == {}
    assert recipe.architecture.tie_word_embeddings


# What is not: a fault, where it is put in, and what must be said of it


def rank() -> int:
    """Of a layout's process; -1 in the one that computes the reference."""
    return dist.get_rank() if dist.is_initialized() else -1


def changed(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Put change(original, ...) in the place of a function of `owner`."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def experts_times_ep(patch: Patch) -> None:
    def twice(reduce: Any, self: Any, *, scale: float) -> dict[str, Tensor]:
        grads: dict[str, Tensor] = reduce(self, scale=scale)
        for name, grad in grads.items():
            grad.mul_(2 if ".experts." in name else 1)
        return grads

    changed(patch, Parameters, "reduce", twice)


def scale_off(patch: Patch) -> None:
    changed(patch, Parameters, "reduce", lambda reduce, self, scale: reduce(self, scale=scale / 4))


def not_finite(patch: Patch) -> None:
    changed(patch, Parameters, "reduce", lambda reduce, self, scale: reduce(self, scale=math.nan))


def w_dropped(patch: Patch) -> None:
    def run(run_stored: Any, self: Any, stage: int, micro: int) -> None:
        if (stage, micro) == (1, 1):
            self._stored.pop((stage, micro))
        else:
            run_stored(self, stage, micro)

    changed(patch, WeightGrads, "run_stored", run)


def gradients_kept(patch: Patch) -> None:
    patch.setattr(WeightGrads, "zero", lambda self: None)


def w_never_run(patch: Patch) -> None:
    patch.setattr(WeightGrads, "run_stored", lambda self, stage, micro: None)


def layer_skipped(patch: Patch) -> None:
    changed(
        patch, chunk, "_layers", lambda layers, stage: [x for x in layers(stage) if not is_(x, 2)]
    )


def is_(layer: Any, number: int) -> bool:
    return bool(getattr(getattr(layer.mlp, "gate", None), "layer", None) == number)


def rope_off_by_one(patch: Patch) -> None:
    def late(rotary: Any, self: Any, positions_BS: Tensor) -> Any:
        angles = rotary(self, positions_BS + 1)
        if rank() != 1:
            return rotary(self, positions_BS)
        cos, sin = rotary(self, positions_BS)
        return torch.cat([angles[0][:, :1], cos[:, 1:]], 1), sin

    changed(patch, Qwen3Stage, "rotary", late)


def norm_counted_twice(patch: Patch) -> None:
    patch.setattr(Spread, "is_first_copy", property(lambda self: True))


def squares_of_one_rank_lost(patch: Patch) -> None:
    changed(patch, step, "sum_of_squares", lambda s, grads: 0.0 if rank() == 1 else s(grads))


def experts_swapped(patch: Patch) -> None:
    def fill(fill: Any, tensor: Tensor, spec: Any, *, seed: int, first_row: int = 0) -> None:
        if spec.role is Role.EXPERTS:
            first_row = (first_row + len(tensor)) % spec.shape[0]
        fill(tensor, spec, seed=seed, first_row=first_row)

    changed(patch, build, "fill", fill)


def backward_scaled(patch: Patch) -> None:
    def more(combine_backward: Any, self: Any, summed_TD: Tensor, route: Any) -> Any:
        return combine_backward(self, summed_TD * (1.5 if is_(self, 2) else 1.0), route)

    changed(patch, DecoderLayer, "combine_backward", more)


def label_shifted(patch: Patch) -> None:
    def shifted(loss: Any, self: Any, carry: Any, labels_BS: Tensor) -> Tensor:
        total: Tensor = loss(self, carry, labels_BS.roll(1, 1))
        return total

    changed(patch, Qwen3Stage, "loss", shifted)


def not_clipped(patch: Patch) -> None:
    patch.setattr(step, "clip_coefficient", lambda norm, clip: 1.0)


def rate_late(patch: Patch) -> None:
    changed(patch, Trainer, "_learning_rate", lambda rate, self, index: rate(self, 0))


def another_order(patch: Patch) -> None:
    def swapped(run: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        execution = run(self, *args, **kwargs)
        execution.slots[0], execution.slots[1] = execution.slots[1], execution.slots[0]
        return execution

    changed(patch, build.Executor, "run", swapped)


EXPERTS = "layers.0.mlp.experts.gate_proj.weight"


@dataclass(frozen=True)
class Broken:
    """A fault, the layout that has it, what is said of it and which checks fail."""

    fault: Callable[[Patch], None]
    layout: str
    said: tuple[str, ...]
    fails: frozenset[str]


def broken(fault: Callable[[Patch], None], layout: str, *said: str, fails: str) -> Broken:
    return Broken(fault, layout, said, frozenset(fails.split(", ")))


EQUAL = "activations and their gradients equal; "
FAULTS = (
    broken(
        experts_times_ep,
        "ep=2",
        f"{EQUAL}gradients: {EXPERTS}: 2 times what one process finds, which is ep",
        "(and 5 more tensors)",
        fails="gradients, gradient norm, clipped gradients, weights",
    ),
    broken(
        scale_off,
        "pp=1",
        f"{EQUAL}gradients: embed_tokens.weight: 0.25 times what one process finds",
        "(and 37 more tensors)",
        fails="gradients, gradient norm",
    ),
    broken(
        not_finite,
        "pp=1",
        f"{EQUAL}gradients: embed_tokens.weight: not finite",
        fails="gradients, gradient norm, updated",
    ),
    broken(
        w_dropped,
        "pp=1,schedule=zbv",
        f"{EQUAL}gradients: layers.2.self_attn.q_proj.weight: relative",
        fails="gradients, gradient norm, clipped gradients, weights",
    ),
    broken(
        gradients_kept,
        "pp=1",
        f"step 2, {EQUAL}gradients: embed_tokens.weight: relative",
        fails="gradients, gradient norm, weights",
    ),
    broken(w_never_run, "pp=1,schedule=zb-h1", "did not run: rank 0", "never run", fails="ran"),
    broken(
        layer_skipped,
        "pp=2,schedule=1f1b",
        "step 1, forward: layer 2, hidden states that enter, sequence 0, not computed",
        fails="loss, gradients, expert load, balance loss",
    ),
    broken(
        rope_off_by_one,
        "dp=2",
        "step 1, forward: layer 0, attend: residual, sequence 2 (rank 1), relative",
        fails="loss, gradients",
    ),
    broken(
        norm_counted_twice,
        "dp=2,dp_shard=1",
        "row 0 counted twice",
        fails="gradients, gradient norm, weights",
    ),
    broken(
        squares_of_one_rank_lost,
        "dp=2",
        f"{EQUAL}gradient norm",
        "times that",
        fails="gradient norm, clipped gradients",
    ),
    broken(
        experts_swapped,
        "ep=2,exchange=splits",
        "step 1, forward: layer 0, combine: sums of the experts, sequence 0 (rank 0), relative",
        fails="loss, gradients, weights",
    ),
    broken(
        backward_scaled,
        "pp=1,schedule=1f1b-pair",
        "forward equal; backward (experts and their exchange): gradient of layer 2, attend:",
        "then gradients: embed_tokens.weight",
        fails="gradients, gradient norm",
    ),
    broken(
        label_shifted,
        "pp=1,schedule=gpipe",
        "step 1, forward: loss of sequences",
        "(rank 0)",
        fails="loss, gradients",
    ),
    broken(
        not_clipped,
        "pp=1",
        "step 1, clipped gradients: embed_tokens.weight",
        "times what one process finds",
        fails="clipped gradients, weights",
    ),
    broken(rate_late, "pp=1", "step 2, learning rate", fails="learning rate, weights"),
    broken(another_order, "pp=1", "step 1, executed order: rank 0", fails="executed order"),
)


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case.fault.__name__)
def test_a_broken_layout_fails_and_the_place_is_named(monkeypatch: Patch, case: Broken) -> None:
    case.fault(monkeypatch)
    found = checked(case.layout)
    first = found.data["first_difference"]
    assert [text for text in case.said if text not in first] == [], first
    assert case.fails <= failing(found).keys()
    (figures,) = found.data["layouts"].values()
    assert figures["first_difference"] == first
    if "ran" not in case.fails:
        assert failing(found)["first difference"] == first


def test_a_layout_for_gpus_that_are_not_there_cannot_be_checked() -> None:
    if torch.cuda.device_count() >= 2:
        pytest.skip("this machine has them")
    with pytest.raises(UnavailableError):
        parity.check_layouts(small(), [Layout(pp=2)], device="cuda", say=print)
