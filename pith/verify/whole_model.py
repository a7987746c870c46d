"""A whole model of pith in one stage: built, filled, run, its tensors by canonical name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from pith.arch import Architecture
from pith.arch.parameter import ParameterSpec, Role
from pith.comm.exchange import LocalExchange
from pith.layer.protocol import Carry, Context, Layer, Parts, RouterLosses, Stage
from pith.ops import choose
from pith.ops.sink import GradSink
from pith.train.build import build_stage

Tensors = dict[str, Tensor]

BATCH, LENGTH = 2, 17
IGNORED = -100
# All parts of the gradient count in the checks that compare pith with itself.
LOSSES = RouterLosses(balance_scale=0.7, z_scale=0.3)
WEIGHT_GAIN, NORM_SPREAD = 1.7, 0.3  # large enough that no part is lost in rounding


@dataclass(frozen=True, slots=True)
class SilentMeter:
    """Forgets what routers did."""

    def record(self, layer: int, load_E: Tensor, balance_loss: Tensor, z_loss: Tensor) -> None:
        """Forget it."""


def build_whole(
    architecture: Architecture, dtype: torch.dtype, *, sink: GradSink | None = None
) -> Stage:
    """The model in one stage, its values drawn from one seed: the same in float32 and float64."""
    (stage,) = build_cut(architecture, 1, dtype=dtype, sink=sink)
    as_module(stage).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for spec in architecture.parameters():
            values = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
            values = (spec.fill + _spread(spec) * values).float()
            stage.get_parameter(spec.name).copy_(values)
    if architecture.tie_word_embeddings:
        stage.tie_to(stage.get_parameter(embedding_name(architecture)))
    return stage


def build_cut(
    architecture: Architecture,
    num_stages: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    sink: GradSink | None = None,
) -> list[Stage]:
    """The model in so many stages, empty, on the meta device; some may hold no layer."""
    parts = Parts(choose("cpu"), LocalExchange(), sink, architecture.num_experts, 0)
    bounds = [architecture.num_layers * s // num_stages for s in range(num_stages + 1)]
    return [
        build_stage(
            architecture,
            range(start, stop),
            is_first=number == 0,
            is_last=number == num_stages - 1,
            parts=parts,
            dtype=dtype,
        )
        for number, (start, stop) in enumerate(pairwise(bounds))
    ]


def _spread(spec: ParameterSpec) -> float:
    """The standard deviation of a parameter's values."""
    return NORM_SPREAD if len(spec.shape) == 1 else WEIGHT_GAIN / spec.shape[-1] ** 0.5


def as_module(stage: Stage | Layer) -> nn.Module:
    """The stage or layer as the module that it is."""
    assert isinstance(stage, nn.Module)
    return stage


def layers_of(stage: Stage) -> Iterator[tuple[int, Layer]]:
    """The layers with their global numbers, in order."""
    for number, module in stage.layers.items():
        yield int(number), cast(Layer, module)


def embedding_name(architecture: Architecture) -> str:
    """The canonical name of the token embedding."""
    (name,) = (spec.name for spec in architecture.parameters() if spec.role is Role.EMBEDDING)
    return name


def make_batch(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [B, S], with more labels left out of one sequence than of the other."""
    generator = torch.Generator().manual_seed(1)
    tokens_BS = torch.randint(vocab_size, (BATCH, LENGTH), generator=generator)
    labels_BS = tokens_BS.roll(-1, 1)
    labels_BS[0, 3:7] = IGNORED
    labels_BS[1, -1] = IGNORED
    return tokens_BS, labels_BS


def make_context(stage: Stage, losses: RouterLosses | None = None) -> Context:
    """The context of a batch of sequences that start at position 0."""
    cos_BSd, sin_BSd = stage.rotary(torch.arange(LENGTH).unsqueeze(0))
    return Context(cos_BSd, sin_BSd, SilentMeter(), losses or RouterLosses())


def run_layers(stage: Stage, tokens_BS: Tensor, context: Context) -> Carry:
    """What leaves the last layer."""
    carry = stage.embed(tokens_BS)
    for _, layer in layers_of(stage):
        carry = layer.forward(carry, context)
    return carry


def backward(
    stage: Stage, batch: tuple[Tensor, Tensor], losses: RouterLosses | None = None
) -> tuple[Tensor, Tensor]:
    """One forward and backward pass: (logits [B, S, V], loss)."""
    tokens_BS, labels_BS = batch
    carry = run_layers(stage, tokens_BS, make_context(stage, losses))
    loss = stage.loss(carry, labels_BS)
    loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return stage.logits(carry), loss.detach()


def states(stage: Stage, tokens_BS: Tensor) -> Tensors:
    """What can be compared on the way through the layers, in the order of the data flow."""
    with torch.no_grad():
        context, carry = make_context(stage), stage.embed(tokens_BS)
        found = {"the embedding": carry.hidden_BSD}
        for number, layer in layers_of(stage):
            routed = layer.attend(carry, context)
            tokens_BSD = routed.tokens_TD.view_as(carry.hidden_BSD)
            found[f"what the MLP of layer {number} reads"] = tokens_BSD
            carry = layer.forward(carry, context)
            found[f"the output of layer {number}"] = carry.hidden_BSD
    return found


def weights(stage: Stage, architecture: Architecture) -> Tensors:
    """The values of every canonical tensor."""
    names = (spec.name for spec in architecture.parameters())
    return {name: stage.get_parameter(name).detach() for name in names}


def gradients(stage: Stage, architecture: Architecture) -> Tensors:
    """Plain autograd's gradients by canonical name; a tied head's joins the embedding's."""
    found = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in stage.named_parameters()
    }
    tied = found.keys() - {spec.name for spec in architecture.parameters()}
    for name in tied:
        embedding = embedding_name(architecture)
        found[embedding] = found[embedding] + found.pop(name)
    return found


def to_hub(architecture: Architecture, tensors: Mapping[str, Tensor]) -> Tensors:
    """Canonical tensors by their names on the Hub, where experts may stand one by one."""
    return {
        name: part.contiguous()
        for canonical, tensor in tensors.items()
        for name, part in _parts(architecture.hf_name(canonical), tensor)
    }


def _parts(names: tuple[str, ...], tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if not numbers_experts(names):
        return iter([(names[0], tensor)])
    return zip(names, tensor.unbind(), strict=True)


def numbers_experts(names: tuple[str, ...]) -> bool:
    """Whether these names on the Hub are of single experts."""
    return ".experts.0." in names[0]
