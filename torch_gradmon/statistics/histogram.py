"""Histograms of magnitudes: elements per power of two."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .tensor_access import accumulator_dtype, flat_values

NAME = "log2_histogram"
#: ``floor(log2 |x|)`` of the first and the last class, which include everything beyond.
LOWEST, HIGHEST = -40, 23
ZERO = "zero"
#: Elements per block, which bounds the scratch memory; on CPU a block also fits a cache.
_CPU_BLOCK, _DEVICE_BLOCK = 1 << 16, 1 << 24


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
