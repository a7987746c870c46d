"""The text of every file that a new family has of its own."""

import json
from collections.abc import Iterator
from importlib.resources import files
from string import Template
from textwrap import dedent, indent

from pith.arch.fields import FieldReader
from pith.arch.scale import scale_down
from pith.scaffold.facts import has_experts, has_rope_base, read_balance, refusals, sizes
from pith.scaffold.family import PLAIN, Family
from pith.scaffold.layout import layout_of

LONGEST_SEQUENCE = 4096


def config_path(name: str) -> str:
    """The file that keeps the config a family was made from, under the root of the checkout."""
    return f"pith/recipes/{name}/config.json"


def facts_path(name: str) -> str:
    """The file of the family's facts."""
    return f"pith/arch/{name}.py"


def tiny_path(name: str) -> str:
    """The config that `pith check model` runs."""
    return f"pith/verify/configs/{name}/tiny.json"


def new_files(family: Family) -> dict[str, bytes]:
    """Path under the root -> content. The config comes first: it tells what the rest is made of."""
    name, fields = family.name, family.given.fields
    texts = {
        f"pith/recipes/{name}/recipe.toml": recipe_text(family),
        facts_path(name): facts_text(family),
        f"pith/models/{name}.py": stage_text(family),
        tiny_path(name): json.dumps(scale_down(fields), indent=1) + "\n",
        f"tests/models/test_{name}.py": _filled("test", name=name, class_name=family.class_name),
    }
    own = {path: text.encode() for path, text in texts.items()}
    return {config_path(name): family.given.content} | own


def facts_text(family: Family) -> str:
    """The module of the family in pith/arch."""
    fields, start = family.given.fields, family.start
    text = _filled(
        "arch",
        class_name=family.class_name,
        summary=_summary(family),
        model_type=family.given.model_type,
        imports="\n".join(_imports(family)),
        parent=start.arch,
        refusals="\n".join(refusals(family)) or None,
        sizes=",\n".join(sizes(fields)),
    )
    if start.family != PLAIN:
        return text
    dense = '*tensors.swiglu("mlp", self.intermediate_size)'
    mlp = '*tensors.experts("mlp")' if has_experts(fields) else dense
    return text + _filled("layer_parameters", mlp=mlp)


def stage_text(family: Family) -> str:
    """The module of the family in pith/models."""
    start, class_name = family.start, family.class_name
    is_plain = start.family == PLAIN
    return _filled(
        "models",
        class_name=class_name,
        summary=_summary(family),
        facts_import=f"from pith.arch.{family.name} import {class_name}" if is_plain else None,
        start_module="stage" if is_plain else start.family,
        start_stage=start.stage,
        base=f"DecoderStage[{class_name}]" if is_plain else start.stage,
    )


def recipe_text(family: Family) -> str:
    """The recipe of the model, at the smallest layout that holds it."""
    fields = family.given.fields
    layout = layout_of(fields)
    longest = fields.get("max_position_embeddings")
    limit = longest if type(longest) is int and longest > 0 else LONGEST_SEQUENCE
    num_gpus = layout.pp * layout.ep
    coefficient = read_balance(FieldReader(fields)) if has_experts(fields) else None
    text = _filled(
        "recipe",
        class_name=family.class_name,
        gpus=f"{num_gpus} GPUs" if num_gpus > 1 else "one GPU",
        pp=layout.pp,
        ep=layout.ep,
        schedule=layout.schedule,
        sequence_length=min(limit, LONGEST_SEQUENCE),
    )
    return text if coefficient is None else f"{text}\n[balance]\ncoefficient = {coefficient}\n"


def _summary(family: Family) -> str:
    if family.start.family != PLAIN:
        return f"the layers of {family.start.arch}"
    mlp = "experts in every layer" if has_experts(family.given.fields) else "one MLP a layer"
    return f"a plain decoder with grouped-query attention and {mlp}"


def _imports(family: Family) -> Iterator[str]:
    """The import lines of the facts, in the order of the house."""
    fields, start = family.given.fields, family.start
    is_plain = start.family == PLAIN
    yield from ("from dataclasses import dataclass", "from typing import Self", "")
    lines = ["from pith.arch.attention import read_heads"]
    decoder = "MAX_LAYERS, Decoder, LayerTensors" if is_plain else "MAX_LAYERS"
    lines.append(f"from pith.arch.decoder import {decoder}")
    if has_experts(fields):
        lines.append("from pith.arch.experts import read_experts")
    lines.append("from pith.arch.fields import FieldReader")
    if is_plain:
        lines.append("from pith.arch.parameter import ParameterSpec")
    else:
        lines.append(f"from pith.arch.{start.family} import {start.arch}")
    if has_rope_base(fields):
        lines.append("from pith.arch.rope import read_rope_base")
    yield from sorted(lines)


def _filled(template: str, **values: object) -> str:
    """The template with every `$name` filled in; a value of several lines keeps the indentation
    of the first, and a line whose value is None goes."""
    lines = []
    source = files("pith") / "scaffold" / "templates" / f"{template}.txt"
    for line in source.read_text(encoding="utf-8").splitlines():
        margin = line[: len(line) - len(line.lstrip())]
        name = line.strip().removeprefix("$").rstrip(",")
        if name in values and values[name] is None:
            continue
        filled = Template(dedent(line)).substitute(values)
        lines.append(indent(filled, margin) if filled else "")
    return "\n".join(lines) + "\n"
