"""Families made from a config alone: they run, fail what is still to be met, and reach parity.

One copy of the checkout gets four families; each command runs there in a process of its own.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest

from pith.scaffold.changes import write
from pith.scaffold.given import read
from pith.scaffold.plan import plan

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "add-olmoe"
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 32768,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "max_position_embeddings": 32768,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
MIXTRAL = MISTRAL | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 32000,
    "head_dim": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02,
    "output_router_logits": False,
}
NORMED = MISTRAL | {"model_type": "normed", "use_qk_norm": True, "moe_intermediate_size": 1024}
NORMED |= {"n_routed_experts": 16, "num_experts_per_tok": 4, "rope_theta": None}
NORMED |= {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 5e5}}

MEANING = """
import json, sys, torch
from pith.arch import from_config
from pith.comm.exchange import LocalExchange
from pith.layer.protocol import Parts
from pith.ops import choose
from pith.train.build import build_stage

arch = from_config(json.load(open(sys.argv[1])))
parts = Parts(choose("cpu"), LocalExchange(), None, arch.num_experts, 0)
stage = build_stage(
    arch, range(arch.num_layers), is_first=True, is_last=True, parts=parts, dtype=torch.float32
)
print(json.dumps({
    "stage": [kind.__name__ for kind in type(stage).mro()],
    "held": {name: list(p.shape) for name, p in stage.named_parameters()},
    "said": {spec.name: list(spec.shape) for spec in arch.parameters()},
    "sizes": [arch.num_experts, arch.top_k, arch.moe_intermediate_size, arch.rope_theta],
    "ignored": arch.ignored,
}))
"""


# What Mixtral needs beyond its scaffold.
NAMES = """
    def hf_name(self, name: str) -> tuple[str, ...]:
        new = {"mlp": "block_sparse_moe", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
        names = super().hf_name(name)
        return tuple(".".join(new.get(part, part) for part in name.split(".")) for name in names)
"""


@dataclass(frozen=True)
class Done:
    """How one command ended."""

    status: int
    said: str
    report: dict[str, Any]

    def failed(self, name: str) -> dict[str, dict[str, Any]]:
        """The checks of a family that failed, by what they promise."""
        parts = ((c["name"].partition(": "), c) for c in self.report["checks"] if not c["ok"])
        return {promise: check for (of, _, promise), check in parts if of == f"{name}/tiny"}


@dataclass(frozen=True)
class Made:
    """A checkout with four families, and what was said on the way."""

    root: Path
    added: Done  # olmoe
    checked: Done  # olmoe, mistral and mixtral


def run(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the package of the copy."""
    env = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.run(
        [sys.executable, *words], cwd=root, env=env, capture_output=True, text=True, check=False
    )


def pith(root: Path, *words: str) -> Done:
    done = run(root, "-m", "pith.cli", *words, "--json")
    return Done(done.returncode, done.stderr, json.loads(done.stdout))


def add_here(root: Path, name: str, config: dict[str, Any]) -> None:
    """Write the files of a family, and prove nothing."""
    path = root.parent / f"{root.name}-{name}.json"
    path.write_text(json.dumps(config))
    _, changes = plan(name, read(path), like=None, root=root)
    write(root, changes)


@pytest.fixture(scope="module")
def made(copied: Path) -> Made:
    added = pith(copied, "add-model", "olmoe", "--config", "examples/add-olmoe/config.json")
    add_here(copied, "normed", NORMED)
    add_here(copied, "mixtral", MIXTRAL)
    add_here(copied, "mistral", MISTRAL)
    checked = pith(copied, "check", "model", "olmoe", "mistral", "mixtral")
    return Made(copied, added, checked)


def test_a_family_is_added_reads_its_config_and_trains(made: Made) -> None:
    report = made.added.report
    assert made.added.status == report["exit"] == 0, made.added.said
    assert [check["ok"] for check in report["checks"]] == [True] * 4
    assert {file["state"] for file in report["data"]["files"]} == {"new", "changed"}
    assert report["data"]["like"] == "plain"
    assert report["data"]["unread"] == ["clip_qkv"]
    assert report["next"][:4] == [
        "pith check model olmoe",
        "pith validate olmoe --scale-down --layouts pp=2,ep=2",
        "pith train olmoe --dry-run",
        "pith train olmoe --set data.corpus=PATH, with a PATH made by pith tokenize",
    ]
    assert report["next"][4:] == [
        "pith/arch/olmoe.py examine: read clip_qkv (None in this config), or refuse it by name"
    ]
    recipe = (made.root / "pith" / "recipes" / "olmoe" / "recipe.toml").read_text()
    assert recipe.endswith("[balance]\ncoefficient = 0.01\n")


def test_what_is_written_is_in_the_style_of_the_house_and_typed(made: Made) -> None:
    ruff = [str(Path(sys.executable).with_name("ruff"))]
    for words in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [*ruff, *words, "pith/arch", "pith/models", "pith/train", "tests/models"],
            cwd=made.root,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
    done = run(made.root, "-m", "mypy", "pith/arch", "pith/models", "pith/train/build.py")
    assert done.returncode == 0, done.stdout


def test_a_family_fails_exactly_the_checks_that_are_still_to_be_met(made: Made) -> None:
    assert made.checked.status == 1
    olmoe = made.checked.failed("olmoe")
    assert set(olmoe) == {
        "fields of the config",
        "names and shapes on the Hub",
        "number of parameters",
        "parity with transformers",
    }
    assert olmoe["fields of the config"]["found"] == "not read: clip_qkv"
    assert "q_norm.weight" in olmoe["names and shapes on the Hub"]["found"]
    assert all("pith/arch/olmoe.py" in check["where"] for check in olmoe.values())
    told = [c["ok"] for c in made.checked.report["checks"] if c["name"].startswith("olmoe/")]
    assert f"{sum(told)} of {len(told)} checks held" in (EXAMPLE / "README.md").read_text()
    mixtral = made.checked.failed("mixtral")
    assert set(mixtral) == {"names and shapes on the Hub", "parity with transformers"}
    names = mixtral["names and shapes on the Hub"]["found"]
    assert "model.layers.*.block_sparse_moe.experts.*.w1.weight (x 32)" in names
    assert "only in pith model.layers.*.mlp.gate.weight (x 4)" in names


def test_a_family_of_plain_parts_needs_no_work(made: Made) -> None:
    assert made.checked.failed("mistral") == {}
    held = [c["name"] for c in made.checked.report["checks"] if c["name"].startswith("mistral/")]
    assert "mistral/tiny: every gradient, float64" in held


def test_a_family_that_is_spelled_otherwise_needs_its_names_alone(made: Made) -> None:
    facts = made.root / "pith" / "arch" / "mixtral.py"
    facts.write_text(facts.read_text() + NAMES)
    checked = pith(made.root, "check", "model", "mixtral")
    assert checked.status == 0, checked.said
    names = [check["name"] for check in checked.report["checks"]]
    assert "mixtral/tiny: every gradient, float32" in names


def test_a_family_like_another_has_its_tensors_and_keeps_the_rest_plain(made: Made) -> None:
    done = run(made.root, "-c", MEANING, "pith/verify/configs/normed/tiny.json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["stage"][:3] == ["NormedStage", "Qwen3Stage", "DecoderStage"]
    assert told["held"] == told["said"]
    assert told["said"]["layers.0.self_attn.q_norm.weight"] == [16]
    assert told["sizes"] == [8, 2, 24, 5e5]
    assert told["ignored"] == ["rope_parameters"]


def test_the_worked_example_reaches_parity_and_is_kept_from_then_on(made: Made) -> None:
    patch = EXAMPLE / "olmoe.patch"
    subprocess.run(["git", "apply", str(patch)], cwd=made.root, check=True)
    checked = pith(made.root, "check", "model", "olmoe")
    assert checked.status == 0, checked.said
    names = [check["name"] for check in checked.report["checks"]]
    assert "olmoe/tiny: every gradient, float64" in names
    assert f"{len(names)} of {len(names)} checks held" in (EXAMPLE / "README.md").read_text()
    again = pith(
        made.root, "add-model", "olmoe", "--config", str(EXAMPLE / "config.json"), "--dry-run"
    )
    assert again.status == 0
    assert "everything is there: nothing to write" in again.said
    states = {file["path"]: file["state"] for file in again.report["data"]["files"]}
    kept = [path for path, state in states.items() if state == "kept"]
    assert kept == ["pith/arch/olmoe.py", "pith/models/olmoe.py"]
    assert set(states.values()) == {"kept", "unchanged"}


def test_the_worked_example_states_the_size_of_the_whole_family(made: Made) -> None:
    _, changes = plan("olmoe", read(EXAMPLE / "config.json"), like=None, root=ROOT)
    diff: list[str] = []
    for change in changes:  # the shared files of the copy have other families in them too
        after = change.after if change.is_shared else (made.root / change.path).read_bytes()
        texts = [content.decode().splitlines() for content in (change.before or b"", after)]
        diff += [*unified_diff(*texts, n=0)][2:]
    added, removed = (sum(line.startswith(sign) for line in diff) for sign in "+-")
    told = re.findall(
        r"(\d+) lines added and (\d+)\s+removed in (\d+) files", (EXAMPLE / "README.md").read_text()
    )
    assert told == [(str(added), str(removed), str(len(changes)))]


def test_the_worked_example_states_the_size_of_its_diff() -> None:
    lines = (EXAMPLE / "olmoe.patch").read_text().splitlines()
    body = [line for line in lines if not line.startswith(("---", "+++"))]
    added, removed = (sum(line.startswith(sign) for line in body) for sign in "+-")
    page = (EXAMPLE / "README.md").read_text()
    assert re.findall(r"(\d+) lines added, (\d+) removed", page) == [(str(added), str(removed))]


def test_a_config_of_other_keys_is_added_and_told_to_fail(made: Made) -> None:
    odd = {"model_type": "odd", "n_embd": 768, "hidden_act": "gelu_new", "num_experts": 8}
    path = made.root / "odd.json"
    path.write_text(json.dumps(odd))
    done = pith(made.root, "add-model", "odd", "--config", str(path))
    assert done.status == 1
    checks = {check["name"]: check for check in done.report["checks"]}
    assert [name for name, check in checks.items() if check["ok"]] == ["the files compile"]
    assert checks["the facts read the config"]["where"] == "pith/arch/odd.py"
    found = checks["the facts read the config"]["found"]
    assert "hidden_size: found nothing" in found
    assert "num_experts_per_tok: found nothing" in found
    assert done.report["data"]["unread"] == ["hidden_act", "n_embd"]
    assert any("read n_embd (768 in this config)" in step for step in done.report["next"])
