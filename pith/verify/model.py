"""A model family, or the model of one recipe, against transformers.

A family has its tiny configs, one for each variant that it knows, in configs/FAMILY/VARIANT.json
beside this file. FAMILY is the name of its files in pith/arch and pith/models.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pith.arch import from_config
from pith.arch.scale import scale_down
from pith.config import Recipe, shipped
from pith.config.source import UNREADABLE, without_nulls
from pith.disk import require_regular
from pith.errors import Fault, RequestError
from pith.report import Check
from pith.verify import transformers_model
from pith.verify.model_facts import HUB_NAMES, check_constants, check_facts
from pith.verify.model_parity import check_parity
from pith.verify.model_stages import check_sink, check_stages
from pith.verify.subject import Subject

Config = Mapping[str, Any]

PARITY = "parity with transformers"


@dataclass(frozen=True, slots=True)
class Request:
    """The configs that a name stands for, by the name that their checks go by."""

    whole: Mapping[str, Config]  # only facts are checked: they may be large
    tiny: Mapping[str, Config]  # these are run


def check_model(names: list[str]) -> Iterator[Check]:
    """Every check of the families, recipes and configs called `names`.

    Raises RequestError for a name that stands for nothing, or a config that pith refuses, before
    anything is checked; UnavailableError where transformers is missing or lacks the model.
    """
    requests = [find(name) for name in dict.fromkeys(names)]
    subjects = [(_subjects(request.whole), _subjects(request.tiny)) for request in requests]
    for whole, tiny in subjects:
        for subject in (*whole, *tiny):
            transformers_model.require(subject.architecture.model_type)
    for whole, tiny in subjects:
        for subject in whole:
            yield from subject.run("facts", check_facts)
        for subject in tiny:
            yield from check_tiny(subject)


def check_tiny(subject: Subject) -> Iterator[Check]:
    """Every check of a model small enough to be run."""
    facts = list(subject.run("facts", check_facts))
    yield from facts
    yield from subject.run("first values", check_constants)
    yield from subject.run("five stages", check_stages)
    yield from subject.run("gradients in the sink", check_sink)
    if any(check.ok and check.name.endswith(HUB_NAMES) for check in facts):
        yield from subject.run(PARITY, check_parity)
        return
    wanted = f"{HUB_NAMES} first: transformers is given the weights by them"
    where = f"{subject.facts_file} hf_name"
    yield subject.check(PARITY, False, found="not compared", wanted=wanted, where=where)


def families() -> tuple[str, ...]:
    """The families that have configs to be checked with."""
    return tuple(sorted(folder.name for folder in _configs().iterdir() if folder.is_dir()))


def variants(family: str) -> dict[str, Config]:
    """The tiny configs of a family by variant."""
    found = sorted((_configs() / family).iterdir(), key=lambda file: file.name)
    return {
        file.name.removesuffix(".json"): json.loads(file.read_text(encoding="utf-8"))
        for file in found
        if file.name.endswith(".json")
    }


def find(name: str) -> Request:
    """What `name` stands for: a family, a shipped recipe, or the path of a recipe or config.json.

    Raises RequestError with the nearest names where it is none of them.
    """
    if name in families():
        tiny = {f"{name}/{variant}": config for variant, config in variants(name).items()}
        return Request({}, tiny)
    if name.endswith(".json"):
        config = _read(Path(name))
    elif name in shipped() or _is_there(name):
        config = Recipe.load(name).model.fields or {}
    else:
        raise _unknown(name)
    return Request({name: config}, {f"{name} scaled down": scale_down(config)})


def _is_there(name: str) -> bool:
    try:
        return Path(name).exists()
    except OSError:  # a name that no file system takes
        return False


def _configs() -> Traversable:
    return files("pith") / "verify" / "configs"


def _subjects(configs: Mapping[str, Config]) -> list[Subject]:
    return [Subject(name, config, from_config(config)) for name, config in configs.items()]


def _read(path: Path) -> dict[str, Any]:
    try:
        require_regular(path)
        config = without_nulls(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, *UNREADABLE) as error:
        cause = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise _no_config(path, cause) from error
    if not isinstance(config, dict):
        raise _no_config(path, "no object")
    return config


def _no_config(path: Path, found: str) -> RequestError:
    return RequestError(
        "model.unreadable",
        what="no model config can be read there",
        found=found,
        wanted="a Hugging Face config.json",
        where=str(path),
        next_step="name another file",
    )


def _unknown(name: str) -> RequestError:
    known = (*families(), *shipped())
    nearest = tuple(get_close_matches(name, known, cutoff=0.4)) or known
    wanted = "a family, a shipped recipe, or the path of a recipe or a config.json"
    fault = Fault("model", repr(name), wanted, nearest)
    return RequestError(
        "model.not_found",
        what=str(fault),
        next_step=f"pith check model {nearest[0]}; a family that pith does not have yet is made by "
        "pith add-model NAME --config config.json",
        faults=(fault,),
    )
