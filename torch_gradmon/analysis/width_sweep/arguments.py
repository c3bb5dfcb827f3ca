"""Checks of a sweep's arguments, before anything is built."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import nn

from ...core.errors import display, nearest
from .expected import KEYWORDS
from .recipe import OPTIMIZERS, Recipe

#: A line through fewer widths has hardly any scatter.
FEWEST = 3


def whole_numbers(name: str, values: Any) -> list[Any]:
    """The items of ``values``, with the integers of other packages as int.

    Raises:
        TypeError: ``values`` is not iterable.
    """
    try:
        items = list(values)
    except TypeError:
        raise TypeError(f"{name}={values!r} must be a list of whole numbers, got {display(values)}") from None
    return [_as_int(item) for item in items]


def _as_int(value: Any) -> Any:
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def check_arguments(widths: Sequence[int], seeds: Sequence[int], steps: int, tolerance: float, confidence: float) -> None:
    """Check the numbers of a sweep.

    Raises:
        ValueError: with the argument, its value and the remedy.
        TypeError: the tolerance or the confidence is not a number.
    """
    for name, values, least in (("widths", widths, 1), ("seeds", seeds, 0)):
        if not all(isinstance(value, int) and not isinstance(value, bool) and value >= least for value in values):
            raise ValueError(f"{name}={list(values)!r} must be whole numbers of at least {least}")
        if len(set(values)) < len(values):
            raise ValueError(f"{name}={list(values)!r} names one twice")
    if len(widths) < FEWEST:
        raise ValueError(
            f"widths={list(widths)!r}: an exponent with an interval needs {FEWEST} widths or more, such as 64, 128, 256"
        )
    if not seeds:
        raise ValueError("seeds=[] runs nothing; give at least one")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"steps={steps!r} must be a positive int")
    _check_real(tolerance=tolerance, confidence=confidence)
    if not 0 < tolerance < math.inf:
        raise ValueError(
            f"tolerance={tolerance!r} must be a positive number; theoretical exponents are halves, which 0.25 distinguishes"
        )
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence!r} must be a share between 0 and 1, such as 0.95")


def _check_real(**values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, got {display(value)}")


def check_recipe(recipe: Recipe, named: Any, dtype: Any) -> None:
    """Check functions, keywords and the dtype.

    Raises:
        TypeError: the factory, the optimizer or the loss is not callable, the learning rate is not a number, or the dtype not one
            of floats.
        ValueError: the optimizer or the expectation is unknown, or the learning rate is not positive.
    """
    for name, value in (("factory", recipe.factory), ("loss", recipe.loss)):
        if not callable(value) or isinstance(value, nn.Module):
            raise TypeError(f"{name} must be a function{' of the width' if name == 'factory' else ''}, got {display(value)}")
    if isinstance(recipe.optimizer, str):
        if recipe.optimizer not in OPTIMIZERS:
            raise ValueError(
                f"optimizer={recipe.optimizer!r} is not known{nearest(recipe.optimizer, OPTIMIZERS)}; or give a function"
            )
        _check_real(lr=recipe.lr, lr_exponent=recipe.lr_exponent)
        if not 0 < recipe.lr < math.inf or not math.isfinite(recipe.lr_exponent):
            raise ValueError(f"lr={recipe.lr!r} must be positive, and lr_exponent={recipe.lr_exponent!r} a number")
    elif not callable(recipe.optimizer):
        raise TypeError(f"optimizer must be a name or a function of the model and the width, got {display(recipe.optimizer)}")
    if isinstance(named, str) and named not in KEYWORDS:
        raise ValueError(f"expected={named!r} is not known{nearest(named, KEYWORDS)}; or give a dict of patterns and exponents")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"probe_dtype must be torch.float64 or another floating-point dtype, got {display(dtype)}")
