"""Sharded parameters against one process that holds everything."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook

from pith.arch.qwen3 import Qwen3
from pith.comm.exchange import LocalExchange
from pith.comm.groups import Groups
from pith.comm.world import World
from pith.engine import shard
from pith.engine.chunk import MicroBatch, backward_chunk, drain, forward_chunk
from pith.engine.segment import Tape
from pith.engine.shard import EMBEDDING, HEAD, Parameters, Spread, Tied
from pith.engine.weight_grads import WeightGrads
from pith.layer.protocol import Context, Parts
from pith.models.qwen3 import Qwen3Stage
from pith.ops import choose
from pith.plan.mesh import Mesh

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 5,
    "hidden_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "intermediate_size": 7,
    "moe_intermediate_size": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "mlp_only_layers": [0],
    "tie_word_embeddings": False,
}
WHOLE = ((range(2),),)  # pipeline rank -> layers of each of its stages
V = ((range(1), range(1, 2)),)  # both ends of the model on one rank
LOOP = ((range(1),), (range(1, 2),))
HOLLOW = (
    (range(2),),
    (range(2, 2),),
    (range(2, 2),),
)  # a rank without parameters, one without layers
Named = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    mesh: Mesh
    placed: tuple[tuple[range, ...], ...] = WHOLE
    tied: bool = False
    master: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32

    @property
    def arch(self) -> Qwen3:
        return Qwen3.from_config(CONFIG | {"tie_word_embeddings": self.tied})

    def whole(self) -> Named:
        """Every canonical tensor, drawn from its name."""
        return {
            spec.name: drawn(spec.shape, sum(spec.name.encode())).to(self.master)
            for spec in self.arch.parameters()
        }


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Silent:
    def record(self, *noted: Any) -> None:
        pass


class Rank:
    """One rank's stages and parameters, with the groups of its mesh."""

    def __init__(self, case: Case) -> None:
        self.case, self.rank = case, dist.get_rank()
        self.mesh = mesh = case.mesh
        self.groups = Groups(mesh, World.joined(CPU))
        self.weights = WeightGrads()
        place = mesh.coordinates(self.rank)
        num_local = case.arch.num_experts // mesh.ep
        self.experts = slice(num_local * place.ep, num_local * (place.ep + 1))
        parts = Parts(choose("cpu"), LocalExchange(), self.weights, num_local, self.experts.start)
        self.stages = {}
        for rank, stages in enumerate(case.placed):
            for index, layers in enumerate(stages):
                ends = {"is_first": rank + index == 0}
                ends["is_last"] = rank == len(case.placed) - 1 and index == len(stages) - 1
                if rank == place.pp:
                    stage = Qwen3Stage(case.arch, layers, **ends, parts=parts, dtype=case.master)
                    self.stages[2 * rank + index] = stage
        self.parameters = Parameters(
            self.stages,
            dense=Spread.over(self.groups, "shard", "cp", "ep"),
            experts=Spread.over(self.groups, "shard", "cp"),
            first_expert=self.experts.start,
            compute_dtype=case.compute,
            device=CPU,
            weights=self.weights,
            tied=self._tied() if case.tied else None,
        )

    def _tied(self) -> Tied:
        first = next((stage for stage in self.stages.values() if stage.is_first), None)
        last = next((stage for stage in self.stages.values() if stage.is_last), None)
        apart = len(self.case.placed) > 1
        return Tied(first, last, self.groups.pair_up(0, self.mesh.pp - 1) if apart else None)

    def fill(self, whole: Named) -> None:
        for name, master in self.parameters.masters.items():
            start = self.parameters.first_rows[name]
            master.copy_(whole[name][start : start + len(master)])

    def held(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Canonical name, own name and what the module holds now."""
        for stage in self.stages.values():
            for own, parameter in stage.named_parameters():
                yield (EMBEDDING if self.case.tied and own == HEAD else own), own, parameter

    def mine(self, name: str, tensor: Tensor) -> Tensor:
        """The part of a canonical tensor that modules of this rank hold."""
        return tensor[self.experts] if ".experts." in name else tensor


def on_cases(check: Callable[[Case], None], *cases: Case) -> None:
    """In a rank: memory that nobody wrote holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    for case in cases:
        try:
            check(case)
        except Exception as error:
            raise AssertionError(f"{case}") from error


def mesh(**sizes: int) -> Mesh:
    return Mesh(**({"pp": 1, "dp": 1, "cp": 1, "ep": 1} | sizes))


BFLOAT16 = {"compute": torch.bfloat16}
FLOAT64 = {"master": torch.float64, "compute": torch.float64}
CASES = {
    1: [Case(mesh()), Case(mesh(), V, tied=True), Case(mesh(), **BFLOAT16)],
    2: [
        Case(mesh(dp=2)),
        Case(mesh(dp=2), V, tied=True, **BFLOAT16),
        Case(mesh(dp=2, dp_shard=1), WHOLE, tied=True),
        Case(mesh(ep=2), **FLOAT64),
        Case(mesh(pp=2), LOOP, tied=True),
        Case(mesh(cp=2), V, **BFLOAT16),
    ],
    3: [
        Case(mesh(dp=3), tied=True),
        Case(mesh(dp=3), **BFLOAT16),
        Case(mesh(pp=3), HOLLOW, tied=True),
    ],
    4: [
        Case(mesh(dp=2, ep=2)),
        Case(mesh(dp=2, ep=2, dp_shard=1), tied=True, **BFLOAT16),
        Case(mesh(dp=4, dp_shard=2), **FLOAT64),
        Case(mesh(pp=2, dp=2), LOOP, tied=True),
        Case(mesh(pp=2, ep=2), LOOP, tied=True, **BFLOAT16),
        Case(mesh(pp=2, dp=2, dp_shard=1), LOOP, tied=True),
        Case(mesh(cp=2, ep=2)),
    ],
}


def check_two_steps(case: Case) -> None:
    rank, whole = Rank(case), case.whole()
    parameters = rank.parameters
    rank.fill(whole)
    objects = None
    for step in range(2):
        parameters.gather()
        assert_holds(rank, whole)
        now = [id(parameter) for _, _, parameter in rank.held()]
        assert objects in (None, now), "the sink knows parameters by their objects"
        objects = now
        add_to_main_gradients(rank, step)
        with (
            spied(shard, "reduce_scatter_rows") as scatter,
            spied(dist, "all_reduce") as all_reduce,
        ):
            grads = parameters.reduce(scale=0.25)
        assert scatter.call_count + all_reduce.call_count == num_collectives(rank)
        total = whole_gradients(case, step)
        assert_shards(rank, grads, total)
        assert_counted_once(rank, grads, total)
        descend(parameters.masters, lambda masters: torch.optim.SGD(masters, lr=0.5))
        whole = {name: tensor - 0.5 * total[name].to(case.master) for name, tensor in whole.items()}
        parameters.release()
        assert all(master.grad is None for master in parameters.masters.values())
    for name, master in parameters.masters.items():
        start = parameters.first_rows[name]
        assert torch.equal(master, whole[name][start : start + len(master)]), name
    rank.groups.close()


def spied(where: Any, name: str) -> Any:
    return mock.patch.object(where, name, wraps=getattr(where, name))


def num_collectives(rank: Rank) -> int:
    """One per unit and kind of group, and one for a tied weight on two ranks."""
    mesh, case = rank.mesh, rank.case
    sizes = mesh.sizes()
    dense = (sizes["shard"] * sizes["cp"] * sizes["ep"] > 1) + (sizes["replica"] > 1)
    experts = (sizes["shard"] * sizes["cp"] > 1) + (sizes["replica"] > 1)
    total = int(case.tied and mesh.pp > 1 and any(rank.parameters.masters))
    for stage in rank.stages.values():
        total += dense * (len(stage.layers) + (stage.is_first or stage.is_last))
        total += experts * len(list(stage.expert_modules()))
    return total


def assert_holds(rank: Rank, whole: Named) -> None:
    for name, own, parameter in rank.held():
        assert type(parameter) is nn.Parameter, own
        assert parameter.requires_grad, own
        wanted = rank.mine(name, whole[name]).to(rank.case.compute)
        assert parameter.dtype == wanted.dtype, own
        assert torch.equal(parameter, wanted), own


def small_integers(shape: tuple[int, ...], *key: Any) -> Tensor:
    """Their sums are exact in every order."""
    return (4 * drawn(shape, sum(str(key).encode()))).round()


def add_to_main_gradients(rank: Rank, step: int) -> None:
    for _, own, parameter in rank.held():
        grad = small_integers(parameter.shape, own, rank.rank, step)
        rank.weights.add(parameter, grad.to(parameter.dtype))


def whole_gradients(case: Case, step: int) -> Named:
    """The float64 sums over the ranks of what `add_to_main_gradients` adds there, times 0.25."""
    mesh, arch = case.mesh, case.arch
    total = {spec.name: torch.zeros(spec.shape, dtype=torch.float64) for spec in arch.parameters()}
    num_local = arch.num_experts // mesh.ep
    for rank in range(mesh.world_size):
        place = mesh.coordinates(rank)
        for name, tensor in total.items():
            part = tensor.split(num_local)[place.ep] if ".experts." in name else tensor
            for own in [name, HEAD] if case.tied and name == EMBEDDING else [name]:
                if place.pp == pipeline_rank_of(own, case):
                    part += 0.25 * small_integers(part.shape, own, rank, step)
    return total


def pipeline_rank_of(own: str, case: Case) -> int:
    if own.startswith("layers."):
        number = int(own.split(".")[1])
        return next(i for i, held in enumerate(case.placed) for run in held if number in run)
    return 0 if own == EMBEDDING else len(case.placed) - 1


def assert_shards(rank: Rank, grads: Named, total: Named) -> None:
    parameters = rank.parameters
    assert grads.keys() == parameters.masters.keys() == parameters.first_rows.keys()
    for name, grad in grads.items():
        start, master = parameters.first_rows[name], parameters.masters[name]
        assert (type(master), master.dtype) == (Tensor, rank.case.master)
        assert master.grad is grad, name
        assert torch.equal(grad, total[name][start : start + len(grad)].to(grad.dtype)), name


def assert_counted_once(rank: Rank, grads: Named, total: Named) -> None:
    squares = {name: torch.zeros((), dtype=torch.float64) for name in total}
    for name in rank.parameters.counted:
        squares[name] += grads[name].double().square().sum()
    found = torch.stack(list(squares.values()))
    dist.all_reduce(found)
    wanted = torch.stack([grad.square().sum() for grad in total.values()])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def descend(masters: Named, optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]) -> None:
    if masters:
        optimizer(list(masters.values())).step()


@pytest.mark.parametrize("num_ranks", sorted(CASES))
def test_two_steps_equal_those_of_one_process(run_ranks: Any, num_ranks: int) -> None:
    run_ranks(num_ranks, on_cases, check_two_steps, *CASES[num_ranks])


def check_adamw(case: Case) -> None:
    """Moments of shards, some of them empty, are those of the whole."""
    rank, whole = Rank(case), case.whole()
    rank.fill(whole)

    def adamw(tensors: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(tensors, lr=0.1, weight_decay=0.1, fused=True)

    sharded, single = adamw(list(rank.parameters.masters.values())), adamw(list(whole.values()))
    assert any(len(master) == 0 for master in rank.parameters.masters.values()) == (rank.rank == 2)
    for step in range(3):
        rank.parameters.gather()
        add_to_main_gradients(rank, step)
        rank.parameters.reduce(scale=0.25)
        for name, grad in whole_gradients(case, step).items():
            whole[name].grad = grad.to(case.master)
        sharded.step()
        single.step()
        rank.parameters.release()
    rank.parameters.gather()
    for name, _, parameter in rank.held():
        torch.testing.assert_close(parameter.detach(), whole[name], rtol=1e-6, atol=1e-7)
    rank.groups.close()


def check_backward(case: Case) -> None:
    """A real pass: its weight gradients reach the masters, and neither autograd nor FSDP acts."""
    rank, whole = Rank(case), case.whole()
    rank.fill(whole)
    rank.parameters.gather()
    called: list[nn.Module] = []
    hook = register_module_forward_pre_hook(lambda module, inputs: called.append(module))
    run_engine(rank)
    hook.remove()
    assert called, "modules inside those that FSDP shards"
    assert not any(isinstance(module, FSDPModule) for module in called)
    for _, own, parameter in rank.held():
        assert parameter.grad is None, own
        assert type(parameter) is nn.Parameter, f"{own} was resharded"
    grads = rank.parameters.reduce(scale=0.5)
    for name, total in autograd(case, whole).items():
        start = rank.parameters.first_rows[name]
        wanted = 0.5 * total[start : start + len(grads[name])]
        torch.testing.assert_close(grads[name], wanted, rtol=1e-12, atol=1e-12)
    rank.groups.close()


def tokens_of(rank: int) -> tuple[Tensor, Tensor]:
    tokens_BS = torch.arange(8).view(2, 4).add(rank).remainder(5)
    return tokens_BS, tokens_BS.roll(1, 1)


def context_of(stage: Qwen3Stage) -> Context:
    return Context(*stage.rotary(torch.arange(4)[None]), Silent())


def run_engine(rank: Rank) -> None:
    """Forward and backward of a rank's tokens through its stages, one after another."""
    stages = list(rank.stages.values())
    batch = MicroBatch(*tokens_of(rank.rank), context_of(stages[0]))
    tapes = [Tape(recording=True) for _ in stages]
    flowing: tuple[Tensor, ...] = ()
    for stage, tape in zip(stages, tapes, strict=True):
        flowing = drain(forward_chunk(stage, batch, flowing, tape))
    flowing = tuple(torch.ones_like(loss) for loss in flowing)
    for stage, tape in reversed(list(zip(stages, tapes, strict=True))):
        work = backward_chunk(stage, tape, flowing, weights=rank.weights, split=None)
        flowing = drain(work)


def autograd(case: Case, whole: Named) -> Named:
    """Gradients of both ranks' losses by plain autograd on one plain model."""
    parts = Parts(choose("cpu"), LocalExchange(), None, case.arch.num_experts, 0)
    ends = {"is_first": True, "is_last": True}
    plain = Qwen3Stage(case.arch, range(2), **ends, parts=parts, dtype=case.master, device="cpu")
    plain.load_state_dict(whole, strict=not case.tied)
    if case.tied:
        plain.lm_head.weight = plain.embed_tokens.weight
    for rank in range(2):
        tokens_BS, labels_BS = tokens_of(rank)
        logits_BSV = plain(tokens_BS, context_of(plain))
        functional.cross_entropy(
            logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="sum"
        ).backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters()}


def check_stale(case: Case) -> None:
    """Masters that change under gathered weights show at the next gather."""
    rank, whole = Rank(case), case.whole()
    rank.fill(whole)
    rank.parameters.gather()
    doubled = {name: 2 * tensor for name, tensor in whole.items()}
    rank.fill(doubled)
    rank.parameters.gather()
    assert_holds(rank, doubled)
    rank.groups.close()


def check_moved(case: Case) -> None:
    """Storage that FSDP no longer uses is noticed, before any rank waits for another."""
    rank = Rank(case)
    rank.fill(case.whole())
    next(iter(rank.stages.values())).to_empty(device="cpu")
    with pytest.raises(AssertionError, match="stored elsewhere"):
        rank.parameters.gather()
    rank.groups.close()


def check_replaced(case: Case) -> None:
    """A module that holds another object than before is noticed."""
    rank = Rank(case)
    rank.fill(case.whole())
    stage = next(iter(rank.stages.values()))
    stage.norm.weight = nn.Parameter(stage.norm.weight.detach())
    with pytest.raises(AssertionError, match="stored elsewhere"):
        rank.parameters.gather()
    rank.groups.close()


def check_rest(rank_case: Case) -> None:
    for case in (Case(mesh(dp=2), **FLOAT64), Case(mesh(dp=2), V, tied=True, **FLOAT64)):
        check_backward(case)
    for check in (check_stale, check_moved, check_replaced):
        check(rank_case)
    check_stale(replace(rank_case, placed=V, tied=True))


def test_a_real_backward_pass_a_stale_gather_and_moved_storage(run_ranks: Any) -> None:
    run_ranks(2, on_cases, check_rest, Case(mesh(dp=2)))


def test_adamw_steps_on_uneven_and_empty_shards(run_ranks: Any) -> None:
    run_ranks(3, on_cases, check_adamw, Case(mesh(dp=3)), Case(mesh(dp=3), V, tied=True))
