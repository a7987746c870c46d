"""A layout of ranks as text, and the recipe that runs on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from math import lcm
from types import MappingProxyType

from pith.config import Recipe
from pith.config.sections import SCHEDULE_NAMES
from pith.errors import Fault, RequestError, first_of

CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"schedule": SCHEDULE_NAMES, "exchange": ("auto", "collectives", "splits")}
)
AXES = ("pp", "ep", "dp")
MAX_RANKS = 64
OPTION = "--layouts"


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks on each axis, and what may differ besides.

    None: as the recipe has it, but dp_shard and num_stages, which are those of any recipe then.
    """

    pp: int = 1
    ep: int = 1
    dp: int = 1
    dp_shard: int | None = None
    schedule: str | None = None
    num_stages: int | None = None
    exchange: str | None = None
    micro_batch_size: int | None = None

    @property
    def world_size(self) -> int:
        """How many processes it takes."""
        return self.pp * self.ep * self.dp

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read "pp=2,ep=2,schedule=zbv". Raises RequestError with all faults of `text`."""
        return parse_layouts([text])[0]

    def __str__(self) -> str:
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        told = ["pp=1"] if self.world_size == 1 else []
        told += [
            f"{name}={value}"
            for name, value in values
            if value is not None and (name not in AXES or value > 1)
        ]
        return ",".join(told)

    def recipe(self, base: Recipe, *, global_batch_size: int | None = None) -> Recipe:
        """`base` on this layout; without a `global_batch_size` as many sequences as it needs.

        Raises RequestError with all faults, each of which names the layout.
        """
        raw = base.model_dump(mode="json")
        raw["parallel"] |= {
            "pp": self.pp,
            "ep": self.ep,
            "cp": 1,
            "dp_shard": self.dp_shard,
            "schedule": self.schedule or base.parallel.schedule,
            "num_stages": self.num_stages,
            "layers_per_stage": None,
            "exchange": self.exchange or base.parallel.exchange,
        }
        size = self.micro_batch_size or base.training.micro_batch_size
        raw["training"] |= {
            "micro_batch_size": size,
            "global_batch_size": global_batch_size or self.sequences(base),
        }
        try:
            recipe = Recipe.model_validate(raw, context={"world_size": self.world_size})
            recipe.pipeline(self.world_size)
        except RequestError as error:
            raise _refused(
                [
                    Fault(f"{OPTION} {self}: {f.where}", f.found, f.wanted, f.nearest)
                    for f in error.faults
                ]
            ) from None
        return recipe

    def sequences(self, base: Recipe) -> int:
        """The fewest sequences of a step in which this pipeline has a middle, not only ends."""
        size = self.micro_batch_size or base.training.micro_batch_size
        return size * self.dp * self.ep * 2 * self.pp


NAMES = tuple(field.name for field in fields(Layout))


def parse_layouts(texts: Sequence[str]) -> tuple[Layout, ...]:
    """Read several layouts. Raises RequestError with all faults of all of them."""
    read = [_parse(text) for text in texts]
    faults = [fault for _, found in read for fault in found]
    sound = [layout for layout, found in read if not found]
    twice = [layout for layout in dict.fromkeys(sound) if sound.count(layout) > 1]
    faults += [Fault(f"{OPTION} {layout}", "given twice", "given once") for layout in twice]
    if not texts:
        faults = [Fault(OPTION, "nothing", "a layout", ("pp=2,ep=2",))]
    if faults:
        raise _refused(faults)
    return tuple(layout for layout, _ in read)


def default_layouts(recipe: Recipe) -> tuple[Layout, ...]:
    """One rank, then each axis alone, then pairs of them: what `recipe` can run on four ranks."""
    own = recipe.parallel.schedule
    own = own if own != "auto" else "dualpipev"
    wanted = (
        Layout(schedule="1f1b-pair"),
        Layout(pp=2, schedule=own),
        Layout(pp=2, schedule="zbv"),
        Layout(pp=2, schedule="interleaved"),
        Layout(dp=2, schedule="gpipe"),
        Layout(dp=2, dp_shard=1, schedule="1f1b"),
        Layout(ep=2, schedule="1f1b-pair", exchange="collectives"),
        Layout(ep=2, schedule="zb-h1", exchange="splits"),
        Layout(pp=2, ep=2, schedule=own),
        Layout(pp=2, dp=2, dp_shard=1, schedule="1f1b"),
    )
    return tuple(layout for layout in dict.fromkeys(wanted) if _is_possible(layout, recipe))


def runnable(recipe: Recipe, layouts: Sequence[Layout]) -> tuple[Recipe, ...]:
    """`recipe` on each of the layouts, with one global batch for all.

    Raises RequestError with all faults of all layouts.
    """
    size = lcm(*(layout.sequences(recipe) for layout in layouts))
    recipes: list[Recipe] = []
    faults: list[Fault] = []
    for layout in layouts:
        try:
            recipes.append(layout.recipe(recipe, global_batch_size=size))
        except RequestError as error:
            faults += error.faults
    if faults:
        raise _refused(faults)
    return tuple(recipes)


def _is_possible(layout: Layout, recipe: Recipe) -> bool:
    try:
        layout.recipe(recipe)
    except RequestError:
        return False
    return True


def _parse(text: str) -> tuple[Layout, list[Fault]]:
    where = f"{OPTION} {text[:80]!r}"
    values: dict[str, int | str] = {}
    faults: list[Fault] = []
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            faults.append(Fault(where, repr(part), "NAME=VALUE", (f"{part.strip() or 'pp'}=2",)))
        elif name != "cp" and name not in NAMES:
            nearest = tuple(get_close_matches(name, NAMES, n=2, cutoff=0.4)) or NAMES
            faults.append(Fault(where, f"an unknown key {name!r}", "a key of a layout", nearest))
        elif name in values:
            faults.append(Fault(where, f"{name} twice", f"{name} once"))
        else:
            faults += _value_faults(where, name, value)
            is_number = value.isdecimal() and len(value) < 9
            values[name] = value if name in CHOICES else int(value) if is_number else 1
    if not faults:
        values.pop("cp", None)
        layout = Layout(**values)  # type: ignore[arg-type]
        if layout.world_size <= MAX_RANKS:
            return layout, []
        faults.append(Fault(where, f"{layout.world_size} ranks", f"at most {MAX_RANKS}"))
    return Layout(), faults


def _value_faults(where: str, name: str, value: str) -> list[Fault]:
    if name in CHOICES:
        if value in CHOICES[name]:
            return []
        nearest = tuple(get_close_matches(value, CHOICES[name], n=2, cutoff=0.3))
        wanted = f"one of {', '.join(CHOICES[name])}"
        return [Fault(where, f"{name}={value}", wanted, nearest or CHOICES[name])]
    is_count = value.isascii() and value.isdecimal() and 1 <= int(value[:9]) <= MAX_RANKS
    if name == "cp":
        if is_count and int(value) == 1:
            return []
        return [Fault(where, f"cp={value}", "1: this version does not cut sequences", ("1",))]
    if is_count and len(value) < 9:
        return []
    return [Fault(where, f"{name}={value}", f"a whole number from 1 to {MAX_RANKS}", ("1", "2"))]


def _refused(faults: Sequence[Fault]) -> RequestError:
    return RequestError("layouts.invalid", what=first_of(faults), faults=tuple(faults))
