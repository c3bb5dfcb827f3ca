"""Spike detection: rules that score one number after the other, and the detector that turns scores into verdicts."""

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
