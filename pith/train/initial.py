"""Initial weights: the same values for one seed on every layout and device.

Element i of a parameter is a function of (run seed, canonical name, i), and for stacked experts of
the expert's global number too, so a shard draws only itself. The source of bits is Philox4x32-10
(Salmon et al., SC 2011), the normal values are Box-Muller pairs.
"""

import hashlib
import math

import torch
from torch import Tensor

from pith.arch.parameter import ParameterSpec, Role

LOW_32 = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
LANES = 4  # values that one Philox block gives
CHUNK = 1 << 20  # elements drawn at once: the scratch buffers stay in cache

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def fill(tensor: Tensor, spec: ParameterSpec, *, seed: int, first_row: int = 0) -> None:
    """Write the initial values of `spec` into `tensor`, in place, rounded from float32.

    `tensor` holds the rows [first_row, first_row + len) of the first axis of `spec`, maybe none.
    It may be a strided view and of any floating dtype.
    """
    assert tensor.shape[1:] == spec.shape[1:], (spec.name, tensor.shape)
    assert 0 <= first_row <= spec.shape[0] - len(tensor), (spec.name, first_row, len(tensor))
    with torch.no_grad():
        if spec.std == 0:
            tensor.fill_(spec.fill)
        elif spec.role is Role.EXPERTS:
            for expert, matrix in enumerate(tensor, start=first_row):
                _fill_rows(matrix, spec, seed=seed, first_row=0, expert=expert)
        else:
            _fill_rows(tensor, spec, seed=seed, first_row=first_row, expert=0)


def values(
    spec: ParameterSpec,
    start: int,
    stop: int,
    *,
    seed: int,
    expert: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Elements [start, stop) of the flattened parameter (of one expert): float32 `[stop - start]`.

    Memory is about 20 bytes an element; `fill` draws in chunks.
    """
    if spec.std == 0:
        return torch.full((stop - start,), spec.fill, dtype=torch.float32, device=device)
    first = start // LANES
    block = torch.arange(first, -(-stop // LANES), device=device)
    words = philox4x32(
        (block & LOW_32, block >> 32, torch.full_like(block, expert), torch.zeros_like(block)),
        key=parameter_key(seed, spec.name),
    )
    normal = (*_box_muller(*words[:2], std=spec.std), *_box_muller(*words[2:], std=spec.std))
    return torch.stack(normal, dim=-1).view(-1)[start - LANES * first : stop - LANES * first]


def parameter_key(seed: int, name: str) -> tuple[int, int]:
    """The Philox key of a parameter: two 32-bit words."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def philox4x32(counter: Words, *, key: tuple[int, int]) -> Words:
    """Ten rounds of Philox4x32 on int64 tensors that hold 32-bit words; overwrites `counter`.

    A product of two words wraps at 64 bits, which keeps both of its halves. Only words 0 and 2 are
    multiplied, so words 1 and 3 drop their upper half at the end alone.
    """
    c0, c1, c2, c3 = counter
    product_0, product_2 = torch.empty_like(c0), torch.empty_like(c2)
    for turn in range(NUM_ROUNDS):
        k0, k1 = ((word + turn * step) & LOW_32 for word, step in zip(key, KEY_STEPS, strict=True))
        torch.mul(c0, MULTIPLIERS[0], out=product_0)
        torch.mul(c2, MULTIPLIERS[1], out=product_2)
        torch.bitwise_right_shift(product_2, 32, out=c0)
        torch.bitwise_right_shift(product_0, 32, out=c2)
        c0.bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(LOW_32)
        c2.bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(LOW_32)
        c1, product_2 = product_2, c1
        c3, product_0 = product_0, c3
    return c0, c1.bitwise_and_(LOW_32), c2, c3.bitwise_and_(LOW_32)


def _fill_rows(
    tensor: Tensor, spec: ParameterSpec, *, seed: int, first_row: int, expert: int
) -> None:
    """Fill rows of one parameter, or of one expert's, a few at a time."""
    row_elements = math.prod(tensor.shape[1:])
    step = max(1, CHUNK // row_elements)
    for row in range(0, len(tensor), step):
        rows = tensor[row : row + step]
        start = (first_row + row) * row_elements
        stop = start + rows.numel()
        drawn = values(spec, start, stop, seed=seed, expert=expert, device=tensor.device)
        rows.copy_(drawn.view(rows.shape))


def _box_muller(radius_word: Tensor, angle_word: Tensor, *, std: float) -> tuple[Tensor, Tensor]:
    """Two float32 normal values from two 32-bit words, computed in float64; at most 6.8 std."""
    radius = radius_word.double().add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_().mul_(std)
    angle = angle_word.double().mul_(2.0 * math.pi / 2**32)
    return (radius * angle.cos()).float(), (radius * angle.sin_()).float()
