"""The refined coordinate check over widths: does each layer move as much in wide models as in narrow ones?

The entry point is :func:`width_sweep`, which returns a :class:`WidthSweep`.
"""

from .expected import Expected, Layer
from .power_law import Slope, fit_slope
from .result import WidthSweep
from .sweep import width_sweep
from .terms import LayerTerms, terms
from .verdicts import LayerVerdict

__all__ = ["Expected", "Layer", "LayerTerms", "LayerVerdict", "Slope", "WidthSweep", "fit_slope", "terms", "width_sweep"]
