"""The largest singular value of a matrix, and its stable rank, from a few products with vectors."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..core.accelerator import copied_to_device
from .tensor_access import accumulator_dtype

SPECTRAL_NORM, STABLE_RANK = "spectral_norm", "stable_rank"
#: Steps of the bidiagonalisation, two products each, and squarings of its small matrix: 2^10 powers leave its largest eigenvalue.
_STEPS, _SQUARINGS = 16, 10
#: A vector this many rounding errors long, relative to the longest one, is one.
_ROUNDING = 64


@torch.no_grad()
def spectral_norm(tensor: Tensor) -> Tensor | None:
    """The largest singular value of a matrix, or of a tensor of more dimensions as ``[first, all others]``: 0-d, and None below two.

    By 16 steps of Golub and Kahan's bidiagonalisation (1965, SIAM J. Numer. Anal. B 2, 205-224) with full reorthogonalisation, from the
    same start in each call: never too large, and too small by less than 2 % for matrices of random numbers, the hardest case. In float32
    for narrower types. Does not synchronise.
    """
    if (scaled := _scaled(tensor)) is None:
        return None
    matrix, scale = scaled
    return _largest_square(matrix).sqrt() * scale


@torch.no_grad()
def stable_rank(tensor: Tensor) -> Tensor | None:
    """The square of the Frobenius norm over that of the spectral norm, 1 for a matrix of rank 1 and the rank at most: 0-d. None below two
    dimensions; infinite for zeros: that marks an undefined value on the device. See :func:`spectral_norm`.
    """
    if (scaled := _scaled(tensor)) is None:
        return None
    largest = _largest_square(scaled[0])
    whole = scaled[0].square().sum(dtype=largest.dtype)
    return torch.where(whole == 0, torch.inf, whole / largest)


def _scaled(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """As a matrix whose largest element is 1, so that squares are in range, and that element; None if it has no spectrum."""
    if tensor.ndim < 2 or not tensor.numel() or tensor.is_complex():
        return None
    matrix = tensor.detach().reshape(len(tensor), -1).to(torch.promote_types(tensor.dtype, torch.float32))
    largest = matrix.abs().amax()
    return matrix / torch.where(largest == 0, 1.0, largest), largest


def _largest_square(matrix: Tensor) -> Tensor:
    """The square of the largest singular value."""
    small = _bidiagonal(matrix, min(_STEPS, *matrix.shape)).to(accumulator_dtype(matrix.device))
    square = small @ small.mT
    power, least = square, torch.finfo(small.dtype).tiny
    for _ in range(_SQUARINGS):
        power = power / power.diagonal().sum().clamp(min=least)
        power = power @ power
    return (power * square).sum() / power.diagonal().sum().clamp(min=least)


def _bidiagonal(matrix: Tensor, steps: int) -> Tensor:
    """The matrix seen from the vectors that its products with a start give: lower bidiagonal, ``[steps + 1, steps]``."""
    rows, columns = matrix.shape
    lefts, rights = matrix.new_zeros(steps + 1, rows), matrix.new_zeros(steps, columns)
    found = matrix.new_zeros(steps + 1, steps)
    left = copied_to_device(_start(rows), matrix.device).to(matrix.dtype)
    lefts[0] = left / left.norm()
    longest = matrix.new_zeros(())
    for step in range(steps):
        right = lefts[step] @ matrix
        for _ in range(2):  # once leaves rounding errors
            right = right - (rights[:step] @ right) @ rights[:step]
        rights[step], found[step, step], longest = _unit(right, longest)
        left = matrix @ rights[step]
        for _ in range(2):
            left = left - (lefts[: step + 1] @ left) @ lefts[: step + 1]
        lefts[step + 1], found[step + 1, step], longest = _unit(left, longest)
    return found


def _unit(vector: Tensor, longest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A vector with length 1, its length, and the longest one so far; zeros if nothing but rounding is left of it: the space is used up."""
    length = vector.norm()
    longest = torch.maximum(length, longest)
    length = torch.where(length > _ROUNDING * torch.finfo(vector.dtype).eps * longest, length, 0.0)
    return vector / torch.where(length == 0, torch.inf, length), length, longest


@lru_cache(maxsize=64)
def _start(rows: int) -> Tensor:
    return torch.randn(rows, generator=torch.Generator().manual_seed(0))
