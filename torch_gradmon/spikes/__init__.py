"""Spike detection: rules that score one number after the other, and the detector that turns scores into verdicts."""

from typing import TYPE_CHECKING

from ..core.lazy_import import importing

if TYPE_CHECKING:
    from .detector import SpikeDetector, Verdict
    from .hampel import Hampel
    from .rules import Cusum, EmaZScore, MeanStd, MedianMad, Ratio, RollingZScore, Rule, Threshold

__all__ = [
    "Cusum",
    "EmaZScore",
    "Hampel",
    "MeanStd",
    "MedianMad",
    "Ratio",
    "RollingZScore",
    "Rule",
    "SpikeDetector",
    "Threshold",
    "Verdict",
]

#: The modules of these names.
_HOMES = {"Hampel": "hampel", "SpikeDetector": "detector", "Verdict": "detector"}

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, {**dict.fromkeys(__all__, "rules"), **_HOMES})
