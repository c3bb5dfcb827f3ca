"""Spike detection: rules that score one number after the other, and the detector that turns scores into verdicts."""

from .detector import SpikeDetector
from .hampel import Hampel
from .rules import Cusum, Ratio, Rule, Threshold
from .verdicts import Verdict
from .zscores import EmaZScore, MeanStd, MedianMad, RollingZScore

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
