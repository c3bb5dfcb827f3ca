"""The whole-model keys, and the facts about a step that their values need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ..core import keys as n
from ..core.keys import Key
from .gradient_summary import DISTRIBUTION

#: The meaning of each key, in the order of display.
DOCUMENTATION = {
    "grad_norm": "L2 norm of all gradients before clipping",
    "grad_norm_clipped": "L2 norm of the gradients that the optimizer uses; absent where nothing clips or edits what backward brought",
    "clipped_share": "share of the last 100 steps in which the gradient norm was reduced after backward, as by a clip; absent where the "
    "loop does not edit gradients, or only scales them by one factor",
    "grad_max": "largest |x| of the finite gradient elements before clipping",
    "grad_nonfinite": "number of NaN and infinite gradient elements before clipping",
    "grad_top_share": "largest share of the squared gradient norm that one parameter holds",
    "param_norm": "L2 norm of all trainable parameters, before the update",
    "update_norm": "L2 norm of the change that the optimizer made",
    "update_ratio": "update_norm over the norm of the same parameters before the update",
    "update_ratio_p10": "10th percentile of the update ratio over parameters of two or more dimensions",
    "update_ratio_p90": "90th percentile of the update ratio over parameters of two or more dimensions",
    "spike_score": "how far grad_norm lies above normal, in robust standard deviations of its logarithm",
    "steps_not_applied": "steps so far that were not applied (infinite gradients under a GradScaler, skipped after a spike, or "
    "left by an error)",
    "grad_mean": "mean of all gradient elements before clipping",
    "grad_std": "population standard deviation of all gradient elements before clipping",
    "grad_sparsity": "share of the finite gradient elements before clipping with |x| <= eps",
    "overhead_pct": "time spent in the monitor's own code, in percent of the time since the last monitored step",
}
#: Keys of features that are not part of a preset; present if in use.
ON_REQUEST = {
    "steps_skipped": "steps so far that were skipped because of a spike",
    "lr_over_critical": "learning rate over the smallest one at which this step would raise the loss of its batch",
    "clip_limit": "norm above which an adaptive clip of the total norm clips this step; absent in its warm-up",
    "clipped_parameters": "parameters whose gradients an adaptive clip has scaled down in this step",
}
STANDARD = tuple(k for k in DOCUMENTATION if k not in DISTRIBUTION)
CHEAP = tuple(k for k in STANDARD if not k.startswith(("param_", "update_")))
#: The update keys need a copy of the parameters, so they are measured on every tenth step.
UPDATE_EVERY = 10
OF_GRADIENTS = ("grad_norm", "grad_max", "grad_nonfinite", "grad_top_share", "spike_score", *DISTRIBUTION)
UPDATE_KEYS = tuple(k for k in DOCUMENTATION if k.startswith("update_"))


@cache
def key(name: str) -> Key:
    """The key of a whole-model value."""
    return Key(n.SUMMARY, "", name)


@dataclass
class StepFacts:
    """Facts about a step, without its values.

    Attributes:
        step: its number.
        applied: the optimizer applied it.
        updates_void: updates of zero were measured, because a fused optimizer found infinite gradients.
        edited: the gradients were written to between backward and the optimizer; if not, their values can show it.
        rounding: relative rounding of the gradients that the optimizer uses, if larger than in float32.
        rounds: they were rounded once more in between, as a GradScaler does when it unscales them.
        used: names of the parameters whose gradients an optimizer has used, or would have if they had existed.
        trainable: names of the trainable parameters.
        matrices: names of the parameters of two or more dimensions.
        groups: names of the parameters of each of the optimizers' groups.
        refused: a reason by source if some of its tensors could not be measured.
        context: learning rates and the like, for the record.
        ranks: number of ranks over which values of batches are merged.
        refusal: a GradScaler did not let the optimizer apply it.
        is_interrupted: the loop left it by an error before it was applied.
        nonfinite: a gradient holds NaN or Inf, before clipping or as the optimizer uses it.
        attached: hooks on optimizers took part.
    """

    step: int
    applied: bool
    edited: bool
    used: Set[str]
    trainable: Set[str]
    matrices: Set[str]
    groups: Sequence[tuple[str, frozenset[str]]] = ()
    updates_void: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    context: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    refusal: bool = False
    is_interrupted: bool = False
    nonfinite: bool = False
    attached: bool = False
    rounding: float = 0.0
    rounds: bool = False
