"""cross_entropy: token by token, over the labels that count."""

from collections.abc import Iterator

import torch
from torch import Tensor

from pith.verify.operators.case import EDGE_ROWS, Arg, Case, Role, generator, normal

NOT_COUNTED = -100


def cross_entropy(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor]:
    """The sum over counted tokens of log(sum of exponentials) - the label's logit."""
    total = 0 * logits_TV.sum()
    for logits_V, label in zip(logits_TV, labels_T.tolist(), strict=True):
        if label != NOT_COUNTED:
            total = total + logits_V.exp().sum().log() - logits_V[label]
    return (total,)


def cross_entropy_cases() -> Iterator[Case]:
    random = generator()

    def case(name: str, rows: int, *, size: int = 33, scale: float = 1.0, ignored: int = 0) -> Case:
        labels = torch.randint(size, (rows,), generator=random)
        labels[torch.randperm(rows, generator=random)[:ignored]] = NOT_COUNTED
        logits = scale * normal(random, rows, size)
        return Case(name, (Arg("logits", logits), Arg("labels", labels, Role.PLAIN)))

    for rows in EDGE_ROWS:
        yield case(f"{rows} tokens", rows, ignored=rows // 4)
    yield case("all labels ignored", 9, ignored=9)
    yield case("one label counted", 64, ignored=63)
    yield case("large logits", 16, scale=30.0)
    yield case("two words", 5, size=2)
    yield from case("views", 9, size=16, ignored=3).laid_out()
