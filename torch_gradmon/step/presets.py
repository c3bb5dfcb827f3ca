"""Predefined selections of metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..core import keys as n
from .summary_keys import CHEAP, STANDARD

PresetName = Literal["cheap", "standard", "full"]


@dataclass(frozen=True)
class Preset:
    """Whole-model keys, and per-layer metrics for the run directory: source, name, and interval in steps."""

    keys: tuple[str, ...]
    layer_metrics: tuple[tuple[str, str, int], ...] = ()


#: The entropy needs the attention weights, which fused kernels never store; it costs as much as attention itself.
_ATTENTION_EVERY = 10
_LAYER_VIEWS = ("norm", "mean", "std", "max", "sparsity", "nonfinite")

PRESETS: dict[str, Preset] = {
    "cheap": Preset(CHEAP),
    "standard": Preset(STANDARD),
    "full": Preset(
        STANDARD,
        (
            *((n.GRADIENT, name, 1) for name in _LAYER_VIEWS),
            *((n.ACTIVATION, name, 1) for name in _LAYER_VIEWS),
            *((n.OPTIMIZER, name, 1) for name in ("exp_avg_norm", "exp_avg_sq_norm", "grad_momentum_cosine")),
            *((n.ATTENTION_SOURCES[name], name, _ATTENTION_EVERY) for name in ("entropy_normalized", "max_logit")),
        ),
    ),
}
