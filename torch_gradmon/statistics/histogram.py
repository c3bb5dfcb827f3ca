"""Histograms of magnitudes: elements per power of two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..core.errors import NotMeasurable
from ..core.moments import ALWAYS, Column, identity
from ..core.torch_modes import copied_to_device
from .dispatch import Statistics
from .request import accumulator_dtype, flat_values

#: Elements per block, which bounds the scratch memory; on CPU a block also fits a cache.
_CPU_BLOCK, _DEVICE_BLOCK = 1 << 17, 1 << 24
_FIELDS = 5


def central_sums(tensor: Tensor) -> Tensor:
    """Count, mean, and sums of the second, third and fourth powers of ``x - mean``: ``[5]``, float64 if the device has it.

    Two passes. Does not synchronise. Complex tensors count as twice as many real numbers; without elements all are zero.
    """
    values, implied = flat_values(tensor)
    dtype = accumulator_dtype(values.device)
    count = values.numel() + implied
    blocks = torch.split(values, _CPU_BLOCK if values.device.type == "cpu" else _DEVICE_BLOCK)
    mean = torch.zeros((), dtype=dtype, device=values.device)
    for block in blocks:
        mean += block.to(dtype).sum() / max(count, 1)
    powers = implied * torch.stack([mean**2, -(mean**3), mean**4])
    for block in blocks:
        distance = block.to(dtype) - mean
        square = distance * distance
        powers += torch.stack([square.sum(), torch.dot(square, distance), torch.dot(square, square)])
    return torch.cat([torch.full_like(powers[:1], count), mean.reshape(1), powers])


def kurtosis(parts: Tensor) -> Tensor:
    """Pearson's kurtosis, ``n * sum (x - mean)^4 / (sum (x - mean)^2)^2``, 3 for a normal distribution, of all ``parts`` together:
    ``[n * 5]``, the results of :func:`central_sums` for the micro-batches.

    The sums are moved to the common mean by the formulas of Pebay (2008, Sandia report SAND2008-6212). Infinite if there are no elements
    or all are equal up to rounding: then it is undefined.
    """
    counts, means, second, third, fourth = parts.reshape(-1, _FIELDS).unbind(1)
    total = counts.sum()
    mean = (counts * means).sum() / total
    shift = means - mean
    squares = (second + counts * shift**2).sum()
    fourths = (fourth + 4 * shift * third + 6 * shift**2 * second + counts * shift**4).sum()
    rounding = total * (8 * torch.finfo(parts.dtype).eps * mean).square()
    return torch.where((squares <= rounding) | (total == 0), torch.inf, total * fourths / squares**2)


# --- Singular values ---

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


# --- The exact norm of many tensors together, and the exact inner product of two ---

#: The columns of a norm of each order, and those that decide whether float32 is accurate enough: with all of them a norm is the same to the
#: last bit, whatever else is measured.
NORM_COLUMNS = {
    1.0: ALWAYS | {Column.ABS_SUM, Column.SUM, Column.SQUARE_SUM},
    2.0: ALWAYS | {Column.SUM, Column.SQUARE_SUM},
    torch.inf: ALWAYS | {Column.ABS_SUM, Column.MIN, Column.MAX},
}


def rows_of(gradients: Sequence[Tensor], norm_type: float, statistics: Statistics) -> Tensor:
    """Rows with the ``NORM_COLUMNS`` of this order, on the first gradient's device; ValueError if one cannot be measured. Does not
    synchronise.
    """
    devices = list(dict.fromkeys(gradient.device for gradient in gradients))
    try:
        found = [statistics.measure([g for g in gradients if g.device == device], NORM_COLUMNS[norm_type]) for device in devices]
    except NotMeasurable as error:
        raise ValueError(
            f"the exact norm of these gradients cannot be measured, because one is {error}; use a number for max_norm and exact=False"
        ) from error
    if len(found) <= 1:
        return found[0] if found else identity(0)
    rows = {device: iter(some.to(devices[0])) for device, some in zip(devices, found, strict=True)}
    return torch.stack([next(rows[gradient.device]) for gradient in gradients])


def norm_of_rows(rows: Tensor, norm_type: float, wide: bool) -> Tensor:
    """Total norm of order 1, 2 or inf from rows ``[n, 8]`` with the ``NORM_COLUMNS`` of this order: 0-d, float32, or float64 if ``wide``.

    Accumulated in float64; NaN or Inf if any element is. Does not synchronise.
    """
    if norm_type == 1.0:
        total = rows[:, Column.ABS_SUM].sum()
    elif norm_type == 2.0:
        total = rows[:, Column.SQUARE_SUM].sum().sqrt()
    else:
        largest = torch.maximum(rows[:, Column.MAX].amax(), -rows[:, Column.MIN].amin()).clamp(min=0)
        # the extremes are of the finite part; the sum of magnitudes distinguishes NaN from Inf
        total = torch.where(rows[:, Column.NONFINITE].sum() > 0, rows[:, Column.ABS_SUM].sum(), largest)
    return total.to(torch.float64 if wide else torch.float32)


# --- Histograms of magnitudes: elements per power of two ---

#: ``floor(log2 |x|)`` of the first and the last class, which include everything beyond.
LOWEST, HIGHEST = -40, 23
ZERO = "zero"


def log2_counts(tensor: Tensor) -> Tensor:
    """Number of zeros, and of elements in each class: ``[65]``, on the tensor's device. Does not synchronise.

    NaN and infinite elements are in no class. Complex tensors count as twice as many real numbers.
    """
    values, implied = flat_values(tensor)
    on_cpu = values.device.type == "cpu"
    # biased exponents: 0 for subnormal numbers and zero, all ones for NaN and Inf
    bias, mantissa, ones, integer = (
        (1023, 52, 2047, torch.int64) if values.dtype == torch.float64 else (127, 23, 255, torch.int32)
    )
    by_exponent = torch.zeros(ones + 1, dtype=accumulator_dtype(values.device), device=values.device)
    zeros = torch.zeros_like(by_exponent[0])
    for block in torch.split(values, _CPU_BLOCK if on_cpu else _DEVICE_BLOCK):
        zeros += (block == 0).sum()
        exact = block if block.dtype == torch.float64 else block.float()
        exponents = (exact.view(integer) >> mantissa) & ones
        if on_cpu:
            by_exponent += torch.bincount(exponents, minlength=ones + 1)
        else:  # bincount would wait for the device
            by_exponent.index_add_(0, exponents, torch.ones_like(by_exponent[:1]).expand(len(exponents)))
    low, high = LOWEST + bias, HIGHEST + bias
    inner = by_exponent[low : high + 1].clone()
    inner[0] += by_exponent[:low].sum() - zeros
    inner[-1] += by_exponent[high + 1 : ones].sum()
    return torch.cat([(zeros + implied).reshape(1), inner])


def as_metrics(counts: Tensor) -> Mapping[str, Tensor]:
    """The counts of all micro-batches, ``[n * 65]``, as one value per class, named by its power of two."""
    names = [ZERO, *map(str, range(LOWEST, HIGHEST + 1))]
    return dict(zip(names, counts.reshape(-1, len(names)).sum(dim=0).unbind(), strict=True))
