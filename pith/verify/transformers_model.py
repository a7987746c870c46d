"""The oracle of a family: transformers' model of the same config and weights.

Weights go in under the names of checkpoints on the Hub, and gradients come out under them:
transformers itself turns those names into its modules' and back, so no map of ours is in between.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from pith.arch.scale import TOKEN_IDS
from pith.errors import UnavailableError

Tensors = dict[str, Tensor]
INSTALL = "pip install -e '.[dev]'"


class Float64Oracle(TorchFunctionMode):
    """Runs foreign code that asks for float32 by name in float64 instead."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        named = {key: wide(value) for key, value in (kwargs or {}).items()}
        return func(*(wide(value) for value in args), **named)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a model makes of one batch."""

    logits_BSV: Tensor
    loss: Tensor  # the sum over counted labels
    grads: Tensors  # transformers': by checkpoint name
    states: Tensors  # what to compare on the way, in the order of the data flow
    flops: int | None  # of all matrix products, forward and backward; None: not counted


def require(model_type: str) -> ModuleType:
    """transformers. Raises UnavailableError where it is missing or has no such `model_type`."""
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise UnavailableError(
            "check.no_transformers",
            what="a model is checked against transformers, which is not installed",
            found=str(error),
            wanted="transformers",
            next_step=INSTALL,
        ) from error
    known = transformers.CONFIG_MAPPING
    if model_type not in known or known[model_type] not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnavailableError(
            "check.no_oracle",
            what="the installed transformers has no model to check against",
            found=f"version {transformers.__version__}",
            wanted=f"one that knows the model_type {model_type!r}",
            next_step=f"pip install --upgrade transformers, or {INSTALL}",
        )
    return transformers


def outline(config: Mapping[str, Any]) -> tuple[int, Tensors]:
    """The number of parameters, a tied one once, and the tensors of a checkpoint, on meta."""
    with _quiet(config), torch.device("meta"):
        model = _fresh(config)
        return sum(p.numel() for p in model.parameters()), _as_saved(model, _own_tensors(model))


def initial(config: Mapping[str, Any]) -> Tensors:
    """A model as it is before training: its tensors by checkpoint name."""
    with _quiet(config):
        model = _fresh(config)
        return _as_saved(model, _own_tensors(model))


def run(
    config: Mapping[str, Any],
    weights: Tensors,
    tokens_BS: Tensor,
    labels_BS: Tensor,
    *,
    counts_flops: bool,
) -> Outcome:
    """Forward and backward of the model of `config` with `weights` (by checkpoint name)."""
    dtype = next(iter(weights.values())).dtype
    with _quiet(config), Float64Oracle() if dtype is torch.float64 else nullcontext():
        model = _load(config, weights, dtype)
        states = _watch(model)
        counter = FlopCounterMode(display=False) if counts_flops else None
        with counter or nullcontext():
            logits_BSV = model(tokens_BS, use_cache=False).logits
            loss = cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="sum")
            loss.backward()  # type: ignore[no-untyped-call]
        grads = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in model.named_parameters()
        }
        saved = _as_saved(model, grads)
    flops = None if counter is None else _count(counter)
    return Outcome(logits_BSV.detach(), loss.detach(), saved, states, flops)


def _fresh(config: Mapping[str, Any]) -> Any:
    transformers = require(config["model_type"])
    fields = {key: value for key, value in _readable(config).items() if key != "model_type"}
    foreign = transformers.AutoConfig.for_model(config["model_type"], **fields)
    return transformers.AutoModelForCausalLM.from_config(foreign, dtype=torch.float32)


def _load(config: Mapping[str, Any], weights: Tensors, dtype: torch.dtype) -> Any:
    transformers = require(config["model_type"])
    eager = {"attn_implementation": "eager"}
    if int(transformers.__version__.partition(".")[0]) >= 5:
        eager["experts_implementation"] = "eager"  # before, experts were a loop anyway
    with TemporaryDirectory(prefix="pith-check-model-") as folder:
        save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        (Path(folder) / "config.json").write_text(json.dumps(_readable(config)))
        model, outcome = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            **eager,
        )
    faults = {kind: sorted(names) for kind, names in outcome.items() if names}
    assert not faults, f"transformers did not take all weights: {faults}"
    return model


def _readable(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config less the token ids: transformers gives the embedding of padding no gradient, and
    some of its families have padding unless a config says that there is none."""
    rest = {key: value for key, value in config.items() if key not in TOKEN_IDS}
    return rest | {"pad_token_id": None}


def _own_tensors(model: Any) -> Tensors:
    """All that a checkpoint holds, by the names of the modules; what is tied once."""
    own: Tensors = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            own[name] = tensor
        seen.add(id(tensor))
    return own


def _as_saved(model: Any, tensors: Tensors) -> Tensors:
    """`tensors` by the names, and cut into the shapes, that transformers saves them in."""
    try:
        loading = import_module("transformers.core_model_loading")
    except ImportError:  # before version 5 a model is saved as it is
        return dict(tensors)
    detached = {name: tensor.detach() for name, tensor in tensors.items()}
    return dict(loading.revert_weight_conversion(model, detached))


def _watch(model: Any) -> Tensors:
    """Where the states named as in `whole_model.states` will be found after a forward pass."""
    states: Tensors = {}

    def keep(name: str, value: Any) -> None:
        states[name] = (value[0] if isinstance(value, tuple) else value).detach()

    def keep_output(name: str) -> Any:
        return lambda _module, _args, output: keep(name, output)

    def keep_input(name: str) -> Any:
        return lambda _module, args: keep(name, args) if args else None

    model.get_input_embeddings().register_forward_hook(keep_output("the embedding"))
    for number, layer in enumerate(model.get_decoder().layers):
        if hasattr(layer, "mlp"):
            layer.mlp.register_forward_pre_hook(keep_input(f"what the MLP of layer {number} reads"))
        layer.register_forward_hook(keep_output(f"the output of layer {number}"))
    return states


def _count(counter: FlopCounterMode) -> int:
    """All products but that of the rotary angles, which pith takes as a table."""
    rotary = (
        sum(counts.values())
        for module, counts in counter.get_flop_counts().items()
        if module.endswith(".rotary_emb")
    )
    return counter.get_total_flops() - sum(rotary)


@contextmanager
def _quiet(config: Mapping[str, Any]) -> Iterator[None]:
    """Let nothing that transformers has to say of the model reach the terminal."""
    logging = require(config["model_type"]).logging
    verbosity, sink = logging.get_verbosity(), StringIO()
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sink))
        stack.enter_context(redirect_stderr(sink))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.callback(logging.set_verbosity, verbosity)
        logging.set_verbosity_error()
        yield
