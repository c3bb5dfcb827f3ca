"""The refined coordinate check over widths: does each layer move as much in wide models as in narrow ones?

The way in is :func:`width_sweep`, which gives a :class:`WidthSweep`.
"""

from .expected import Expected, Layer
from .power_law import Slope, fit_slope
from .result import WidthSweep
from .sweep import width_sweep
from .terms import Terms, terms
from .verdicts import Verdict

__all__ = ["Expected", "Layer", "Slope", "Terms", "Verdict", "WidthSweep", "fit_slope", "terms", "width_sweep"]
