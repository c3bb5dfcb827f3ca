"""The possible consequences of each finding, so that the text can show the cause first."""

from __future__ import annotations

from collections.abc import Mapping

_STANDSTILL = frozenset({"loss-plateau", "loss-at-chance"})
_DISORDER = frozenset({"loss-plateau", "loss-at-chance", "loss-divergence", "weight-growth"})
_UNITS = frozenset({"dead-units", "saturated-units"})
_ATTENTION = frozenset({"attention-entropy-collapse", "attention-logit-growth"})
_DEPTH = frozenset({"vanishing-gradients", "exploding-gradients"})
_RATES = frozenset({"learning-rate-high", "update-ratio-high"})

#: By rule, the rules whose findings may be its consequences. Only findings that rank below their cause are shown as such.
CONSEQUENCES: Mapping[str, frozenset[str]] = {
    "softmax-before-loss": _STANDSTILL | _UNITS | _DEPTH | {"learning-rate-low", "always-clipped"},
    "relu-before-loss": _STANDSTILL | _UNITS | {"gradient-dropped-to-zero", "no-gradient"},
    "attention-mask": _STANDSTILL | _DEPTH | {"no-gradient"},
    "labels-ignored": _STANDSTILL | {"no-gradient", "non-finite-activation", "non-finite-loss", "non-finite-gradient"},
    "non-finite-input": _DISORDER | {"spike", "steps-skipped"},
    "labels-not-mixed": _DISORDER | {"spike"},
    "labels-constant": frozenset({"loss-at-chance"}),
    "another-model-trained": _STANDSTILL,
    "betas-swapped": _DISORDER | _RATES | {"spike"},
    "unregistered-parameters": _STANDSTILL | {"not-in-optimizer"},
    "players-agree": _STANDSTILL | _DISORDER | {"weight-growth", "spike"},
    "parameter-in-two-optimizers": _DISORDER | {"spike"},
    "dropout-high": _STANDSTILL,
    "weight-decay-high": _STANDSTILL | _UNITS | _DEPTH,
    "equal-units": _STANDSTILL | _DEPTH | {"no-gradient", "initialisation-scale"},
    "epsilon-dominates": _STANDSTILL | {"learning-rate-low"},
    "gradients-cleared": _STANDSTILL | {"zero-update", "gradient-dropped-to-zero"},
    "zero-update": _STANDSTILL | {"learning-rate-low", "update-ratio-low"},
    "constant-input": _STANDSTILL,
    "inputs-not-normalised": _DISORDER | _UNITS | _DEPTH | _RATES | {"always-clipped", "spike"},
    "targets-not-normalised": _DISORDER | {"learning-rate-low", "always-clipped"},
    "missing-zero-grad": _DISORDER | _UNITS | _ATTENTION | _RATES | {"always-clipped"},
    "backward-twice": _DISORDER | _UNITS | _ATTENTION | _RATES,
    "stepped-twice": _DISORDER | _UNITS | _ATTENTION | _RATES,
    "never-stepped": _STANDSTILL,
    "frozen": _STANDSTILL,
    "unattached-optimizer": frozenset({"not-in-optimizer"}),
    "step-without-gradients": _STANDSTILL | {"no-gradient"},
    "not-in-optimizer": _STANDSTILL,
    "optimizer-never-steps": _STANDSTILL,
    "optimizer-before-sharding": _STANDSTILL | {"not-in-optimizer"},
    "clipped-while-scaled": _STANDSTILL | {"always-clipped", "learning-rate-low", "update-ratio-low"},
    "initialisation-scale": _DISORDER | _UNITS | _ATTENTION | _DEPTH | _RATES | {"always-clipped", "learning-rate-low"},
    "learning-rate-high": _DISORDER
    | _UNITS
    | _ATTENTION
    | _DEPTH
    | {"update-ratio-high", "gradient-dropped-to-zero", "always-clipped", "spike"},
    "exploding-gradients": _DISORDER | _ATTENTION | _RATES | {"always-clipped", "spike"},
    "spike": _DISORDER,
    "weights-at-bound": _STANDSTILL | _DEPTH | {"no-gradient", "spike", "learning-rate-low"},
    "weight-growth": _STANDSTILL | _UNITS | _ATTENTION | {"loss-divergence"},
    "never-clipped": _DISORDER | _UNITS,
    "always-clipped": _STANDSTILL | {"learning-rate-low"},
    "dead-units": _STANDSTILL | {"gradient-dropped-to-zero", "no-gradient", "vanishing-gradients", "learning-rate-low"},
    "saturated-units": _STANDSTILL | {"vanishing-gradients"},
    "vanishing-gradients": _STANDSTILL | {"learning-rate-low", "update-ratio-low"},
    "no-gradient": _STANDSTILL | {"learning-rate-low"},
    "gradient-dropped-to-zero": _STANDSTILL,
    "low-precision-underflow": _STANDSTILL
    | {"zero-update", "gradient-dropped-to-zero", "learning-rate-low", "update-ratio-low", "vanishing-gradients"},
    "learning-rate-low": _STANDSTILL | {"update-ratio-low"},
    "update-ratio-high": _DISORDER | _ATTENTION,
    "update-ratio-low": _STANDSTILL,
    "attention-logit-growth": _STANDSTILL | {"attention-entropy-collapse"},
    "attention-entropy-collapse": _STANDSTILL,
}
