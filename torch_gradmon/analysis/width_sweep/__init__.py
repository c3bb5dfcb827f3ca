"""The refined coordinate check over widths: does each layer move as much in wide models as in narrow ones?

The entry point is :func:`width_sweep`, which returns a :class:`WidthSweep`.
"""

from .recipe import LayerTerms, terms
from .result import WidthSweep
from .sweep import width_sweep
from .verdicts import Expected, Layer, LayerVerdict, Slope, fit_slope

__all__ = ["Expected", "Layer", "LayerTerms", "LayerVerdict", "Slope", "WidthSweep", "fit_slope", "terms", "width_sweep"]
