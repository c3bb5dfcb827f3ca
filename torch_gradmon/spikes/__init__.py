"""Spike detection: rules that score one number after the other, and the detector that turns scores into verdicts."""

from .detector import SpikeDetector, Verdict
from .rules import MedianMad

__all__ = ["MedianMad", "SpikeDetector", "Verdict"]
