"""What every built-in metric is worth, computed the naive way: all elements at once, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_gradmon.core.moments import ALL_COLUMNS, Column
from torch_gradmon.statistics.eager import EagerStatistics
from torch_gradmon.statistics.request import DEFAULT_EPS, Request

#: All built-in metrics of a tensor.
BUILT_INS = (
    "norm",
    "rms",
    "mean",
    "std",
    "max",
    "min_value",
    "max_value",
    "l1_norm",
    "sparsity",
    "zero_count",
    "nonfinite_count",
)
EPS = 1e-8


def measured(
    backend: EagerStatistics,
    tensors: Sequence[Tensor],
    columns: frozenset[Column] = ALL_COLUMNS,
    *,
    eps: float = DEFAULT_EPS,
    inverse_scale: Tensor | None = None,
    minus: Sequence[Tensor] | None = None,
) -> Tensor:
    """The rows of the package for these tensors."""
    return backend.rows(tensors, Request(columns, eps, inverse_scale), minus)


def measure(tensors: Sequence[Tensor], *arguments: Any, **options: Any) -> Tensor:
    return measured(EagerStatistics(), tensors, *arguments, **options)


def reals(tensors: Tensor | Iterable[Tensor]) -> Tensor:
    """All elements of the tensors, implicit zeros too, as one run of float64 numbers; a complex number is two of them."""
    if not isinstance(tensors, Tensor):
        return torch.cat([reals(tensor) for tensor in tensors])
    if (
        dense := tensors.detach()
    ).layout != torch.strided:  # in float64 first: where it has a place twice, the sum is not rounded
        dense = (dense if dense.is_complex() else dense.double()).to_dense()
    if dense.is_complex():
        dense = torch.stack([dense.real, dense.imag])
    return dense.reshape(-1).double()


def values(tensors: Tensor | Iterable[Tensor], eps: float = EPS) -> dict[str, float]:
    """Every built-in metric of a tensor, or of several taken as one; what is not defined is left out."""
    x = reals(tensors)
    finite = x[x.isfinite()]
    found = {
        "norm": x.square().sum().sqrt(),
        "l1_norm": x.abs().sum(),
        "zero_count": (x.abs() <= eps).sum(),
        "nonfinite_count": (~x.isfinite()).sum(),
    }
    if x.numel():
        found |= {"rms": x.square().mean().sqrt(), "mean": x.mean(), "std": (x - x.mean()).square().mean().sqrt()}
    if finite.numel():
        found |= {"max": finite.abs().max(), "min_value": finite.min(), "max_value": finite.max()}
        found["sparsity"] = (finite.abs() <= eps).sum() / finite.numel()
    return {name: float(value) for name, value in found.items()}


def slack(metric: str, x: Tensor, expected: float) -> float:
    """How far a value may be from ``expected``: what the package promises for the numbers ``x``."""
    if metric in ("zero_count", "nonfinite_count"):
        return 0.0
    if metric == "mean":
        return 1e-6 * float(x.abs().mean())
    return 1e-6 * abs(expected) + (1e-7 * float(x.square().mean().sqrt()) if metric == "std" else 0.0)


def check(found: Mapping[str, float], tensors: Tensor | Iterable[Tensor], where: str = "", eps: float = EPS) -> None:
    """Assert that ``found`` holds exactly the metrics that are defined for the tensors, each within the promised accuracy."""
    x = reals(tensors)
    truth = values(x, eps)
    assert found.keys() == truth.keys(), where
    for metric, expected in truth.items():
        check_value(metric, found[metric], expected, x, where)


def check_value(metric: str, value: float, expected: float, x: Tensor, where: str = "") -> None:
    """Assert that one value of the numbers ``x`` is within the promised accuracy, and a plain float."""
    said = f"{where} {metric} is {value!r}, should be {expected!r}"
    assert type(value) is float, said
    if math.isfinite(expected):
        assert abs(value - expected) <= slack(metric, x, expected), said
    else:
        assert str(value) == str(expected), said
