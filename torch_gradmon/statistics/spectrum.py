"""The largest singular value and vector of a matrix, its stable rank and participation ratio, from a few products."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..core.accelerator import copied_to_device
from .tensor_access import accumulator_dtype

SPECTRAL_NORM, STABLE_RANK, PARTICIPATION_RATIO = "spectral_norm", "stable_rank", "participation_ratio"
#: Steps of the bidiagonalisation, two products each, and squarings of its small matrix: 2^10 powers leave its largest eigenvalue.
_STEPS, _SQUARINGS = 16, 10
#: A vector this many rounding errors long, relative to the longest one, is one.
_ROUNDING = 64


@torch.no_grad()
def spectral_norm(tensor: Tensor) -> Tensor | None:
    """The largest singular value of a matrix, or of any in a stack of them, ``[matrices, rows, columns]``: 0-d, and None below two
    dimensions. Those of more than three are a matrix ``[first, all others]``, as kernels of convolutions are.

    By 16 steps of Golub and Kahan's bidiagonalisation (1965, SIAM J. Numer. Anal. B 2, 205-224) with full reorthogonalisation, from the
    same start in each call: never too large, and too small by less than 2 % for matrices of random numbers, the hardest case. In float32
    for narrower types. Does not synchronise.
    """
    if (scaled := _scaled(tensor)) is None:
        return None
    matrix, scale = scaled
    return (_largest_square(matrix).sqrt() * scale).amax()


@torch.no_grad()
def stable_rank(tensor: Tensor) -> Tensor | None:
    """The square of the Frobenius norm over that of the spectral norm, 1 for a matrix of rank 1 and the rank at most: 0-d. Of a stack of
    matrices the smallest, without those of zeros. None below two dimensions; infinite for zeros: that marks an undefined value on the
    device. See :func:`spectral_norm`.
    """
    if (scaled := _scaled(tensor)) is None:
        return None
    largest = _largest_square(scaled[0])
    whole = scaled[0].square().sum(dim=(-2, -1), dtype=largest.dtype)
    return torch.where(whole == 0, torch.inf, whole / largest).amin()


#: Functions of matrices, which take the kernels of convolutions as ``[first, all others]``, also those of three dimensions.
OF_MATRICES = (spectral_norm, stable_rank)


@torch.no_grad()
def participation_ratio(tensor: Tensor) -> Tensor | None:
    """How many directions the rows of features ``[..., units]`` fill: the square of the sum of squared singular values over the sum of
    their fourth powers, an effective rank from 1 to the rank, 0 for zeros: 0-d. None below two dimensions.

    It is ``exp(H2)`` of Renyi's entropy of order 2 where Roy and Vetterli (2007, EUSIPCO, definition 1) take Shannon's of the singular
    values, and needs one product of the features with themselves instead of a decomposition. In float32 for narrower types. Does not
    synchronise.
    """
    if tensor.ndim < 2 or (scaled := _scaled(tensor.flatten(0, -2))) is None:
        return None
    rows = scaled[0]
    gram = rows @ rows.mT if len(rows) < rows.shape[1] else rows.mT @ rows
    wide = accumulator_dtype(rows.device)
    whole, squares = gram.diagonal().sum(dtype=wide), gram.square().sum(dtype=wide)
    return torch.where(squares == 0, 0.0, whole.square() / squares)


@torch.no_grad()
def first_left_vector(matrix: Tensor) -> Tensor | None:
    """The left singular vector of the largest singular value, ``[rows]``, of length 1, its largest element positive; zeros for zeros.

    See :func:`spectral_norm` for its accuracy: where singular values lie close together, as at the first step of most models, it is a
    mixture of the vectors of the largest ones.
    """
    if (scaled := _scaled(matrix)) is None:
        return None
    lefts, small = _bidiagonal(scaled[0], min(_STEPS, *scaled[0].shape))
    power, _ = _powers(small)
    vector = power[:, power.diagonal().argmax()].to(lefts.dtype) @ lefts
    unit: Tensor = vector / vector.norm().clamp(min=torch.finfo(vector.dtype).tiny)
    return unit * unit[unit.abs().argmax()].sign()


def _scaled(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """As a matrix, or a stack of matrices, whose largest elements are 1, so that squares are in range, and these elements ``[...]``; None
    if it has no spectrum.
    """
    if tensor.ndim < 2 or not tensor.numel() or tensor.is_complex():
        return None
    matrix = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
    matrix = matrix if matrix.ndim <= 3 else matrix.reshape(len(matrix), -1)
    largest = matrix.abs().amax(dim=(-2, -1))
    return matrix / torch.where(largest == 0, 1.0, largest)[..., None, None], largest


def _largest_square(matrix: Tensor) -> Tensor:
    """The square of the largest singular value of each matrix ``[...]``."""
    _, small = _bidiagonal(matrix, min(_STEPS, *matrix.shape[-2:]))
    power, square = _powers(small)
    return (power * square).sum(dim=(-2, -1)) / _trace(power).clamp(min=torch.finfo(square.dtype).tiny)


def _powers(small: Tensor) -> tuple[Tensor, Tensor]:
    """A high power of ``small @ small.mT``, in which its first eigenvector alone is left, and that product itself."""
    small = small.to(accumulator_dtype(small.device))
    square = small @ small.mT
    power, least = square, torch.finfo(small.dtype).tiny
    for _ in range(_SQUARINGS):
        power = power / _trace(power).clamp(min=least)[..., None, None]
        power = power @ power
    return power, square


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)


def _bidiagonal(matrix: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Orthonormal vectors ``[..., steps + 1, rows]``, and each matrix ``[..., rows, columns]`` as seen from them: lower bidiagonal,
    ``[..., steps + 1, steps]``.
    """
    *stack, rows, columns = matrix.shape
    lefts, rights = matrix.new_zeros(*stack, steps + 1, rows), matrix.new_zeros(*stack, steps, columns)
    found = matrix.new_zeros(*stack, steps + 1, steps)
    left = copied_to_device(_start(rows), matrix.device).to(matrix.dtype)
    lefts[..., 0, :] = left / left.norm()
    longest = matrix.new_zeros(stack)
    for step in range(steps):
        right = _product(lefts[..., step, :], matrix)
        for _ in range(2):  # once leaves rounding errors
            right = right - _within(rights[..., :step, :], right)
        rights[..., step, :], found[..., step, step], longest = _unit(right, longest)
        left = _product(rights[..., step, :], matrix.mT)
        for _ in range(2):
            left = left - _within(lefts[..., : step + 1, :], left)
        lefts[..., step + 1, :], found[..., step + 1, step], longest = _unit(left, longest)
    return lefts, found


def _product(vector: Tensor, matrix: Tensor) -> Tensor:
    """Of each vector, as a row, with its matrix."""
    return (vector.unsqueeze(-2) @ matrix).squeeze(-2)


def _within(basis: Tensor, vector: Tensor) -> Tensor:
    """The part of each vector in the space that the rows of its ``basis`` span."""
    return _product(_product(vector, basis.mT), basis)


def _unit(vector: Tensor, longest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A vector with length 1, its length, and the longest one so far; zeros if nothing but rounding is left of it: the space is used up."""
    length = vector.norm(dim=-1)
    longest = torch.maximum(length, longest)
    length = torch.where(length > _ROUNDING * torch.finfo(vector.dtype).eps * longest, length, 0.0)
    return vector / torch.where(length == 0, torch.inf, length).unsqueeze(-1), length, longest


@lru_cache(maxsize=64)
def _start(rows: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(rows, generator=generator, device="cpu")  # and not on the default device
