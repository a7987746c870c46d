"""The five stages of a layer, and the messages that travel between them.

    attend     Carry [B, S, D]        -> Routed     compute
    dispatch   Routed                 -> Received   communication
    experts    Received               -> partial    compute: one weighted sum per (token, rank)
    combine    partial [R, D]         -> summed     communication: partial sums back on their rank
    aggregate  summed [T, D], residual -> Carry     compute

A layer is cut where expert communication starts and ends. `Layer.forward` is the plain
composition of the five and the reference for the engine; only the engine decides when each runs.

Shape letters: B batch, S local sequence, T = B * S tokens, D hidden, H heads, K top-k, E experts,
e local experts, R received rows, F expert width, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor, nn

from pith.comm.exchange import Exchange, Pending, Route
from pith.comm.stopwatch import Stopwatch
from pith.ops import Operators
from pith.ops.sink import GradSink


@dataclass(frozen=True, slots=True)
class Carry:
    """What travels from layer to layer, and from stage to stage through the pipeline.

    A family with extras names their shapes in `carry_shapes` of its architecture, makes the first
    ones in `embed`, and passes them on in every layer, read or not.
    """

    hidden_BSD: Tensor  # [B, S, D] compute dtype
    extras: tuple[Tensor, ...] = ()  # float32 or wider; static shapes that the family declares

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.hidden_BSD, *self.extras)

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...]) -> "Carry":
        return cls(tensors[0], tuple(tensors[1:]))


@dataclass(frozen=True, slots=True)
class Routed:
    """The outcome of attend. A dense layer leaves `ids_TK` and `weights_TK` out."""

    tokens_TD: Tensor  # [T, D] the normed hidden states that experts read
    residual: Carry  # joins again in aggregate
    ids_TK: Tensor | None = None  # [T, K] int64, global expert ids
    weights_TK: Tensor | None = None  # [T, K] float32 or wider


@dataclass(frozen=True, slots=True)
class Received:
    """What a rank's experts work on. All but the tokens is None in a dense layer."""

    tokens_RD: Tensor  # [R, D]
    ids_RK: Tensor | None = None  # [R, K] int64, global expert ids; foreign experts are skipped
    weights_RK: Tensor | None = None  # [R, K] float32 or wider
    counts_e: Tensor | None = None  # [e] int64, (token, slot) pairs per local expert
    route: Route | None = None  # the way back


class Meter(Protocol):
    """Counts what routers did. Recompute and evaluation pass a meter that forgets."""

    def record(self, layer: int, load_E: Tensor, balance_loss: Tensor, z_loss: Tensor) -> None:
        """Add `load_E` [E] int64 (token, slot) pairs, and two scalars without coefficients."""
        ...


class Routing(Protocol):
    """Replaces what routers choose: recorded choices, or evenly spread ones for benchmarks."""

    def choose(self, layer: int, ids_TK: Tensor) -> Tensor:
        """The experts [T, K] int64 that the tokens go to, where the router chose `ids_TK`."""
        ...


class GlobalLoad(Protocol):
    """Pairs per expert in the global batch: over all data ranks, and the micro-batches so far."""

    def add(self, layer: int, counts_E: Tensor) -> Tensor:
        """Add this rank's micro-batch [E] int64; the counts so far [E]. All data ranks call it."""
        ...


BalanceScope = Literal["sequence", "micro-batch", "global-batch"]


@dataclass(frozen=True, slots=True)
class RouterLosses:
    """The auxiliary losses of routers. A scale is coefficient * tokens of this micro-batch *
    counted labels / all tokens; 0 leaves the loss out of the backward pass."""

    scope: BalanceScope = "sequence"
    balance_scale: float = 0.0
    z_scale: float = 0.0
    load: GlobalLoad | None = None  # where the scope is global-batch


@dataclass(frozen=True, slots=True)
class Context:
    """What a layer needs to know of a micro-batch besides its hidden states."""

    cos_BSd: Tensor  # [B or 1, S, d] rotary cosines in float32 or wider
    sin_BSd: Tensor  # [B or 1, S, d]
    meter: Meter
    losses: RouterLosses = RouterLosses()
    routing: Routing | None = None  # None: tokens go where the router says


@dataclass(frozen=True, slots=True)
class Parts:
    """What a layer is built from besides its weights."""

    operators: Operators
    exchange: Exchange
    sink: GradSink | None  # None: plain autograd
    num_local_experts: int
    first_expert: int  # global id of the first local expert
    stopwatch: Stopwatch = field(default_factory=Stopwatch)


class Layer(Protocol):
    """One decoder layer. `communicates` says whether dispatch and combine move anything."""

    communicates: bool

    def attend(self, carry: Carry, context: Context) -> Routed: ...

    def dispatch(self, routed: Routed) -> Pending[Received]: ...

    def dispatch_backward(
        self, tokens_RD: Tensor, weights_RK: Tensor | None, route: Route | None
    ) -> Pending[tuple[Tensor, Tensor | None]]:
        """Gradients of `Received` -> gradients of `Routed`'s tokens and weights."""
        ...

    def experts(self, received: Received) -> Tensor: ...

    def combine(self, partial_RD: Tensor, route: Route | None) -> Pending[Tensor]:
        """`route` is that of `Received`, here and in both backwards."""
        ...

    def combine_backward(self, summed_TD: Tensor, route: Route | None) -> Pending[Tensor]: ...

    def aggregate(self, summed_TD: Tensor, residual: Carry) -> Carry: ...

    def forward(self, carry: Carry, context: Context) -> Carry: ...


class Stage(Protocol):
    """The layers of one pipeline stage, with embedding and head where they belong.

    An nn.Module whose parameters go by their canonical names.
    """

    is_first: bool
    is_last: bool
    layers: nn.ModuleDict  # keyed by global layer number, in order

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def get_parameter(self, target: str) -> nn.Parameter: ...

    def expert_modules(self) -> Iterator[nn.Module]:
        """The modules that hold nothing but stacked experts."""
        ...

    def tie_to(self, embedding: nn.Parameter) -> None:
        """Let the head share the storage of `embedding`, staying a parameter of its own."""
        ...

    def embed(self, tokens_BS: Tensor) -> Carry:
        """Token ids [B, S] -> hidden states. First stage only."""
        ...

    def loss(self, carry: Carry, labels_BS: Tensor) -> Tensor:
        """Scalar **sum** of the token losses in float32 or wider; -100 is not counted."""
        ...

    def logits(self, carry: Carry) -> Tensor:
        """[B, S, V]. Last stage only."""
        ...

    def rotary(self, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B or 1, S, d] for these positions."""
        ...
