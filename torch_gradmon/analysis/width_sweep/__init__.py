"""The refined coordinate check over widths: does each layer move as much in wide models as in narrow ones?

The entry point is :func:`width_sweep`, which returns a :class:`WidthSweep`.
"""

from .result import Expected, Layer, LayerTerms, LayerVerdict, Slope, WidthSweep, fit_slope
from .sweep import terms, width_sweep

__all__ = ["Expected", "Layer", "LayerTerms", "LayerVerdict", "Slope", "WidthSweep", "fit_slope", "terms", "width_sweep"]
