"""What a monitor is asked for, in groups that programs draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..oracle import BUILT_INS
from .program import Program

#: Whole-model values as the README lists them; ``minimal`` has those of gradients only.
STANDARD = (
    *(
        "grad_norm",
        "grad_norm_after_clip",
        "clip_fraction",
        "grad_max",
        "grad_nonfinite_count",
        "grad_top_fraction",
        "param_norm",
    ),
    *(
        "update_norm",
        "update_ratio",
        "update_ratio_p10",
        "update_ratio_p90",
        "spike_score",
        "steps_not_applied",
        "overhead_fraction",
    ),
)
MINIMAL = tuple(name for name in STANDARD if not name.startswith(("param_", "update_")))
PRESETS = {"none": (), "minimal": MINIMAL, "standard": STANDARD, "full": STANDARD}


def middle(tensor: Tensor) -> Tensor:
    """A function of a tensor that is no view of its sums; of no elements it is zero."""
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return dense.abs().double().flatten().median() if dense.numel() else torch.zeros(())


def weighted(tensor: Tensor) -> Tensor:
    """One that calls a matrix product, which autocast casts."""
    flat = (tensor.to_dense() if tensor.layout != torch.strided else tensor).abs().flatten()
    return (flat @ torch.ones_like(flat)).double() if flat.numel() else torch.zeros(())


def random(tensor: Tensor) -> Tensor:
    """One that draws random numbers, which training must not see. Its value is known all the same."""
    return 0 * torch.rand(()) + tensor.numel()


@dataclass(frozen=True)
class Ask:
    """One call of ``add_*_metric``."""

    adder: str
    metric: str
    pattern: str = ".*"
    function: Callable[..., Any] | None = None
    every: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def sources(self) -> tuple[str, ...]:
        """First parts of the keys."""
        if self.adder == "gradient":
            return tuple(_STAGES[stage] for stage in self.options.get("stages", ("before_clip", "after_clip")))
        return (_OF.get(self.options.get("of", ""), self.adder),)


_STAGES = {"before_clip": "gradient_before_clip", "after_clip": "gradient", "local": "gradient_local"}
_OF = {"output_gradient": "activation_gradient", "input": "input", "input_gradient": "input_gradient"}


def _asks(adder: str, metrics: tuple[str, ...], *, pattern: str = ".*", every: int = 1, **options: Any) -> list[Ask]:
    return [Ask(adder, metric, pattern, None, every, options) for metric in metrics]


def _functions(adder: str, *, pattern: str = ".*", **options: Any) -> list[Ask]:
    return [Ask(adder, f.__name__, pattern, f, 1, options) for f in (middle, weighted, random)]


GROUPS: dict[str, list[Ask]] = {
    "gradient": _asks("gradient", BUILT_INS),
    "gradient_some": _asks("gradient", ("norm", "max", "sparsity"), pattern="weight", every=2),
    "gradient_function": _functions("gradient"),
    "local": _asks("gradient", ("norm", "std"), stages=("local",)),
    "parameter": _asks("parameter", BUILT_INS),
    "parameter_function": _functions("parameter", pattern="weight"),
    "update": _asks("update", (*BUILT_INS, "ratio")),
    "update_function": _functions("update"),
    "optimizer": _asks("optimizer", ("exp_avg_norm", "exp_avg_sq_norm", "grad_momentum_cosine")),
    "activation": _asks("activation", BUILT_INS),
    "activation_some": _asks("activation", ("mean", "max_value"), pattern="body", every=3),
    "activation_function": _functions("activation"),
    "kurtosis": _asks("activation", ("kurtosis",)),
    "dead": _asks("activation", ("dead",)),
    "saturation": _asks("activation", ("saturation",)),
    "split": _asks("activation", ("norm", "zero_count"), split_calls=True),
    "histogram": _asks("gradient", ("log2_histogram",), pattern="weight", every=2),
    "input": _asks("activation", ("norm", "std"), of="input"),
    "output_gradient": _asks("activation", ("norm", "max"), of="output_gradient"),
    "attention": [
        Ask("attention", metric, options={"heads": True})
        for metric in ("entropy", "entropy_normalized", "max_logit", "first_key")
    ],
    "coordinates": [],  # of RefinedCoordinateCheck, for the bits; its numbers have tests of their own
    "difference": [*_asks("activation_difference", ("norm", "mean")), *_asks("parameter_difference", ("norm", "max"))],
}


def asked(p: Program) -> list[Ask]:
    """All that is asked for by name."""
    return [ask for group in p.metrics for ask in GROUPS[group]]
