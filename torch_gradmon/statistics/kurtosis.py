"""Kurtosis: how heavy the tails of a tensor's values are. Merged exactly over micro-batches, from central sums."""

from __future__ import annotations

import torch
from torch import Tensor

from .tensor_access import accumulator_dtype, flat_values

NAME = "kurtosis"
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
    """Pearson's kurtosis, ``n * sum (x - mean)^4 / (sum (x - mean)^2)^2``, 3 for a normal distribution, of all ``parts`` together.

    Args:
        parts: ``[n * 5]``, the results of :func:`central_sums` for the micro-batches.

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
