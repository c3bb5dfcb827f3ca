"""Histograms by magnitude: how many elements lie between one power of two and the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .reading import accumulator_dtype, flat_values

NAME = "log2_histogram"
#: ``floor(log2 |x|)`` of the first and the last class, which hold whatever lies beyond as well.
LOWEST, HIGHEST = -40, 23
ZERO = "zero"
#: Elements at once, which bounds the scratch memory.
_BLOCK = 1 << 16
_BIAS, _MANTISSA, _NONFINITE = 127, 23, 255


def log2_counts(tensor: Tensor) -> Tensor:
    """Number of elements that are zero, and of those in each class: ``[65]``, on the tensor's device. Does not synchronise.

    NaN and infinite elements are in no class. Complex tensors count as twice as many real numbers.
    """
    values, implied = flat_values(tensor)
    by_exponent = torch.zeros(_NONFINITE + 1, dtype=accumulator_dtype(values.device), device=values.device)
    zeros = torch.zeros_like(by_exponent[0])
    for block in torch.split(values, _BLOCK if values.device.type == "cpu" else max(1, values.numel())):
        zeros += (block == 0).sum()
        exponents = _exponents(block)
        if values.device.type == "cpu":
            by_exponent += torch.bincount(exponents, minlength=len(by_exponent))
        else:  # where bincount would wait for the device
            by_exponent.index_add_(0, exponents, torch.ones_like(by_exponent[:1]).expand(len(exponents)))
    low, high = LOWEST + _BIAS, HIGHEST + _BIAS
    inner = by_exponent[low : high + 1].clone()
    # zero has the exponent of what is too small for a normal number
    inner[0] += by_exponent[:low].sum() - zeros
    inner[-1] += by_exponent[high + 1 : _NONFINITE].sum()
    return torch.cat([(zeros + implied).reshape(1), inner])


def as_metrics(counts: Tensor) -> Mapping[str, Tensor]:
    """The counts of all micro-batches, ``[n * 65]``, as one value for each class; its name is the power of two."""
    names = [ZERO, *map(str, range(LOWEST, HIGHEST + 1))]
    return dict(zip(names, counts.reshape(-1, len(names)).sum(dim=0).unbind(), strict=True))


def _exponents(block: Tensor) -> Tensor:
    """The exponents as they stand in float32: 127 for 1, 0 for zero and the smallest, 255 for NaN and Inf."""
    if block.dtype == torch.float64:
        most = torch.finfo(torch.float32).max
        block = torch.where(block.isfinite(), block.clamp(-most, most), block)
    return (block.float().view(torch.int32) >> _MANTISSA) & _NONFINITE
