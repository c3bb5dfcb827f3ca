"""The values of layers that can be drawn, and one of them over the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ...core import keys as n
from .gaps import Gap


@dataclass(frozen=True)
class PlotView:
    """A value of each layer that can be drawn.

    Attributes:
        title: for people.
        sources: of the value; the first one that was measured is drawn.
        metric: a built-in metric.
        base: source by which the value is divided; empty for none.
        is_log: whether the scale is logarithmic.
        adds_up: whether a block has the root of the sum of the squares of its layers; otherwise it has the largest value.
        fallback_title: the title if the value is not from the first source; empty for ``title``.
        is_difference: whether it is the difference between two runs; only the largest difference matters.
    """

    title: str
    sources: tuple[str, ...]
    metric: str
    base: str = ""
    is_log: bool = True
    adds_up: bool = False
    fallback_title: str = ""
    is_difference: bool = False


#: By name, in the order in which they are offered.
LAYER_VIEWS: Mapping[str, PlotView] = {
    "gradient": PlotView(
        "gradient norm before clipping",
        (n.GRADIENT_BEFORE_CLIP, n.GRADIENT),
        "norm",
        adds_up=True,
        fallback_title="gradient norm at the step",
    ),
    "clipped": PlotView("gradient norm after clipping", (n.GRADIENT,), "norm", adds_up=True),
    "update": PlotView("update norm / parameter norm", (n.UPDATE,), "norm", base=n.PARAMETER),
    "sparsity": PlotView("share of gradients near zero", (n.GRADIENT_BEFORE_CLIP, n.GRADIENT), "sparsity", is_log=False),
    "activation": PlotView("output root mean square", (n.ACTIVATION,), "rms"),
    "parameter": PlotView("parameter norm", (n.PARAMETER,), "norm", adds_up=True),
}


@dataclass(frozen=True)
class Panel:
    """A view of all layers over the steps.

    Attributes:
        view: what it shows.
        steps: ascending.
        names: of the layers, in model order.
        values: float64 ``[steps, layers]``; NaN where a layer has no value, infinity where it has NaN or infinite elements.
        source: of the values.
        gaps: where the value was not measured.
        span: first and last step of the run, if the run has more steps than the panel.
        due: the layers of which a missing value means that they had no gradient, not that nobody looked.
    """

    view: PlotView
    steps: tuple[int, ...]
    names: tuple[str, ...]
    values: Tensor
    source: str = ""
    gaps: tuple[Gap, ...] = ()
    span: tuple[int, int] | None = None
    due: frozenset[str] = frozenset()

    @property
    def axis(self) -> tuple[int, int]:
        """The first and the last step of the drawn axis."""
        return self.span or (self.steps[0], self.steps[-1])
