"""The largest singular value of a matrix, and its stable rank, from a few products with vectors."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .tensor_access import accumulator_dtype

SPECTRAL_NORM, STABLE_RANK = "spectral_norm", "stable_rank"
#: Steps of the bidiagonalisation, two products each, and squarings of its small matrix: 2^10 powers leave its largest eigenvalue.
_STEPS, _SQUARINGS = 16, 10
_TINY = 1e-300
#: A vector this many rounding errors long, relative to the longest one, is one.
_ROUNDING = 64


def spectral_norm(tensor: Tensor) -> Tensor | None:
    """The largest singular value of a matrix, or of a tensor of more dimensions as ``[first, all others]``: 0-d, and None below two.

    By 16 steps of Golub and Kahan's bidiagonalisation (1965, SIAM J. Numer. Anal. B 2, 205-224) with full reorthogonalisation, from the
    same start in each call: never too large, and too small by less than 2 % for matrices of random numbers, the hardest case. In float32
    for narrower types. Does not synchronise.
    """
    found = _largest_square(tensor)
    return None if found is None else found[0].sqrt() * found[1]


def stable_rank(tensor: Tensor) -> Tensor | None:
    """The square of the Frobenius norm over that of the spectral norm, 1 for a matrix of rank 1 and the rank at most: 0-d. None below two
    dimensions; infinite for zeros: that marks an undefined value on the device. See :func:`spectral_norm`.
    """
    found = _largest_square(tensor)
    if found is None:
        return None
    matrix, _ = _scaled(tensor)
    whole = matrix.square().sum(dtype=found[0].dtype)
    return torch.where(whole == 0, torch.inf, whole / found[0])


def _scaled(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """As a matrix whose largest element is 1, so that squares are in range, and that element."""
    matrix = tensor.detach().reshape(len(tensor), -1).to(torch.promote_types(tensor.dtype, torch.float32))
    largest = matrix.abs().amax()
    return matrix / torch.where(largest == 0, 1.0, largest), largest


def _largest_square(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Of the scaled matrix, and the scale."""
    if tensor.ndim < 2 or not tensor.numel() or tensor.is_complex():
        return None
    with torch.no_grad():
        matrix, scale = _scaled(tensor)
        steps = min(_STEPS, *matrix.shape)
        small = _bidiagonal(matrix, steps).to(accumulator_dtype(tensor.device))
        square = small @ small.mT
        power = square
        for _ in range(_SQUARINGS):
            power = power / power.diagonal().sum().clamp(min=_TINY)
            power = power @ power
        return (power * square).sum() / power.diagonal().sum().clamp(min=_TINY), scale


def _bidiagonal(matrix: Tensor, steps: int) -> Tensor:
    """The matrix seen from the vectors that its products with a start give: lower bidiagonal, ``[steps + 1, steps]``."""
    rows, columns = matrix.shape
    lefts, rights = matrix.new_zeros(steps + 1, rows), matrix.new_zeros(steps, columns)
    found = matrix.new_zeros(steps + 1, steps)
    left = _start(rows).to(matrix.device, matrix.dtype)
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
