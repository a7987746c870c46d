"""A recipe scaled down: the same run in everything but size."""

from math import ceil

from pith.arch.scale import LAYERS, scale_down
from pith.config.recipe import Recipe
from pith.plan.limits import BYTE_VOCABULARY
from pith.schedule import build

SEQUENCE_LENGTH = 32
MICRO_BATCH_SIZE = 2
MICRO_BATCHES = 4
STEPS = 20
VALIDATION_SEQUENCES = 4


def scaled_down(recipe: Recipe, *, world_size: int | None = None, steps: int = STEPS) -> Recipe:
    """`recipe` with a tiny model of the same structure, short sequences and a small batch.

    It reads the embedded corpus and takes at most `steps` steps, warm-up and decay in proportion.
    Axes, schedule, balance, precision, clipping and the rest of the optimizer stay. A seed of 0
    becomes 1, so that code that ignores it stands out. `world_size` says of how many ranks the
    batch is, as in `Recipe.load`. Raises RequestError as `load` does.
    """
    axes, training = recipe.parallel, recipe.training
    stages = _num_stages(recipe)
    raw = recipe.model_dump(mode="json")
    raw["name"] = f"{recipe.name}-small"
    fields = scale_down(
        recipe.model.fields or {}, least_layers=max(LAYERS, stages), expert_ranks=axes.ep
    )
    fields["vocab_size"] = max(fields["vocab_size"], BYTE_VOCABULARY)
    raw["model"] = {"fields": fields}
    raw["data"] |= {"corpus": "embedded", "epochs": None, "seed": recipe.data.seed or 1}
    if axes.layers_per_stage and sum(axes.layers_per_stage) != fields["num_hidden_layers"]:
        raw["parallel"] |= {"layers_per_stage": None, "num_stages": stages}
    blocks = 2 * axes.cp
    batch = recipe.batch(world_size)
    micro_batch_size = min(training.micro_batch_size, MICRO_BATCH_SIZE)
    micro_batches = min(batch.num_micro_batches, max(MICRO_BATCHES, 2 * axes.pp))
    raw["training"] |= {
        "sequence_length": min(
            training.sequence_length, max(1, SEQUENCE_LENGTH // blocks) * blocks
        ),
        "micro_batch_size": micro_batch_size,
        "global_batch_size": micro_batch_size * micro_batches * batch.data_ranks,
        "steps": min(training.steps, steps),
        "seed": training.seed or 1,
    }
    raw["optimizer"] |= shortened(recipe, steps=min(training.steps, steps))
    num_sequences = min(recipe.validation.num_sequences, VALIDATION_SEQUENCES)
    raw["validation"] |= {"num_sequences": num_sequences}
    return Recipe.model_validate(raw, context={"world_size": world_size})


def _num_stages(recipe: Recipe) -> int:
    axes = recipe.parallel
    explicit = axes.num_stages or len(axes.layers_per_stage or ())
    if explicit:
        return explicit
    return 2 * axes.pp if axes.schedule == "auto" else build.num_stages(axes.schedule, pp=axes.pp)


def shortened(recipe: Recipe, *, steps: int) -> dict[str, int]:
    """Warm-up and decay of a run of so many steps, in proportion to those of `recipe` where that
    is longer; none of them is lost."""
    optimizer, before = recipe.optimizer, max(recipe.training.steps, steps)
    warmup = min(ceil(optimizer.warmup_steps * steps / before), max(steps - 1, 0))
    decay = min(ceil(optimizer.decay_steps * steps / before), steps - warmup)
    return {"warmup_steps": warmup, "decay_steps": decay}
