"""The steps of one process that layouts are compared with, each computed once."""

from collections.abc import Iterator
from dataclasses import dataclass

from pith.config import Recipe
from pith.data.loader import Batch
from pith.verify.one_piece import (
    Descent,
    Weights,
    Whole,
    clipped,
    initial,
    random_batch,
    whole_batch,
)
from pith.verify.probe import Probe

NUM_STEPS = 2
BITES = 0.5  # of the norm of the first step, so that clipping does something


@dataclass(frozen=True, slots=True)
class PlainStep:
    """A step of one process."""

    batch: Batch
    whole: Whole
    lr: float
    given: Weights  # gradients after clipping
    weights: Weights  # after the step


class PlainSteps:
    """The steps of one process, computed once for each way in which the batch is cut."""

    def __init__(self, recipe: Recipe, num_sequences: int) -> None:
        arch, training = recipe.architecture, recipe.training
        self.batches = tuple(
            random_batch(
                num_sequences,
                length=training.sequence_length,
                vocab_size=arch.vocab_size,
                seed=training.seed + step,
            )
            for step in range(NUM_STEPS)
        )
        self.start = initial(recipe)
        self._known: dict[tuple[int, ...], list[PlainStep]] = {}
        first = whole_batch(recipe, self.start, self.batches[0])
        self._clip = BITES * first.norm

    def clipping(self, recipe: Recipe) -> Recipe:
        """`recipe` with a clip below the norm, unless it has none or a lower one."""
        clip = recipe.training.clip
        if clip is None or clip <= self._clip:
            return recipe
        training = recipe.training.model_copy(update={"clip": self._clip})
        return recipe.model_copy(update={"training": training})

    def steps(self, recipe: Recipe, world_size: int) -> list[PlainStep]:
        """What the steps of `recipe` find; only some router losses depend on the cut."""
        plan = recipe.batch(world_size)
        depends = recipe.balance.scope in ("micro-batch", "global-batch")
        key = (plan.data_ranks, plan.micro_batch_size) if depends else ()
        if key not in self._known:
            self._known[key] = list(self._take(recipe, world_size))
        return self._known[key]

    def _take(self, recipe: Recipe, world_size: int) -> Iterator[PlainStep]:
        descent, weights = Descent(recipe, self.start), self.start
        for step, batch in enumerate(self.batches):
            whole = whole_batch(recipe, weights, batch, world_size=world_size)
            given = clipped(whole.grads, recipe.training.clip)
            lr = recipe.optimizer.lr * (step + 1) / NUM_STEPS
            weights = descent.step(given, lr=lr)
            yield PlainStep(batch, whole, lr, given, weights)

    def probed(self, recipe: Recipe, world_size: int, *, step: int) -> Probe:
        """What passes between the stages of layers in a step."""
        weights = self.steps(recipe, world_size)[step - 1].weights if step else self.start
        batch = self.batches[step]
        probe = Probe(range(len(batch.tokens_NS)))
        whole_batch(recipe, weights, batch, world_size=world_size, probe=probe)
        return probe
