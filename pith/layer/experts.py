"""What turns normed tokens into their MLP output: one SwiGLU for all, or one per expert."""

import torch
from torch import Tensor, nn

from pith.layer.protocol import Parts, Received
from pith.layer.weights import GroupedLinear, Linear


class DenseMlp(nn.Module):
    """down(silu(gate(x)) * up(x)) for every token, D -> F -> D."""

    def __init__(
        self,
        hidden_size: int,
        *,
        intermediate_size: int,
        parts: Parts,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()

        def linear(num_out: int, num_in: int) -> Linear:
            return Linear((num_out, num_in), parts=parts, dtype=dtype)

        self.operators = parts.operators
        self.gate_proj = linear(intermediate_size, hidden_size)
        self.up_proj = linear(intermediate_size, hidden_size)
        self.down_proj = linear(hidden_size, intermediate_size)

    def forward(self, received: Received) -> Tensor:
        """[R, D] -> [R, D]."""
        x_RD = received.tokens_RD
        out_RD: Tensor = self.down_proj(
            self.operators.swiglu(self.gate_proj(x_RD), self.up_proj(x_RD))
        )
        return out_RD


class Experts(nn.Module):
    """The local experts, each a SwiGLU of its own; weights are stacked [e, out, in]."""

    def __init__(
        self,
        hidden_size: int,
        *,
        intermediate_size: int,
        num_experts: int,
        parts: Parts,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()

        def stack(num_out: int, num_in: int) -> GroupedLinear:
            shape = (parts.num_local_experts, num_out, num_in)
            return GroupedLinear(shape, parts=parts, dtype=dtype)

        self.parts, self.num_experts = parts, num_experts
        self.gate_proj = stack(intermediate_size, hidden_size)
        self.up_proj = stack(intermediate_size, hidden_size)
        self.down_proj = stack(hidden_size, intermediate_size)

    def sum_weighted(self, received: Received) -> Tensor:
        """One weighted sum over the local experts per received row [R, D].

        Not named forward: calling a module that FSDP shards would run FSDP's hooks.
        """
        operators, counts_e = self.parts.operators, received.counts_e
        pairs = operators.sort_pairs(
            received.ids_RK,
            counts_e,
            first_expert=self.parts.first_expert,
            num_experts=self.num_experts,
        )
        x_PD = operators.gather_rows(received.tokens_RD, pairs)
        inner_PF = operators.swiglu(self.gate_proj(x_PD, counts_e), self.up_proj(x_PD, counts_e))
        return operators.weighted_sum(
            self.down_proj(inner_PF, counts_e), received.weights_RK, pairs
        )


class MixtureOfExperts(nn.Module):
    """A router and this rank's experts, as modules: the layer runs them in stages of its own."""

    def __init__(self, gate: nn.Module, experts: Experts) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
