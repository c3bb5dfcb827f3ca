"""Selections of metrics that make sense together."""

from __future__ import annotations

from dataclasses import dataclass

from . import names as n
from .summary import CHEAP, STANDARD


@dataclass(frozen=True)
class Preset:
    """Whole-model keys, and per-layer metrics that go to the run directory only."""

    keys: tuple[str, ...]
    layer_metrics: tuple[tuple[str, str], ...] = ()


_LAYER_VIEWS = ("norm", "mean", "std", "max", "sparsity", "nonfinite")

PRESETS = {
    "cheap": Preset(CHEAP),
    "standard": Preset(STANDARD),
    "full": Preset(
        STANDARD,
        (
            *((n.GRADIENT, name) for name in _LAYER_VIEWS),
            *((n.ACTIVATION, name) for name in _LAYER_VIEWS),
            *((n.OPTIMIZER, name) for name in ("exp_avg_norm", "exp_avg_sq_norm", "grad_momentum_cosine")),
        ),
    ),
}
