"""Spikes that a detector has found: when, and which layer left its own normal farthest."""

from __future__ import annotations

import math

from ..record import Event
from .findings import Finding, also
from .history import History
from .series import Matrix, lower_median

#: A layer that holds less of the squared norm of a spike has not made it.
_SHARE = 0.05
#: and those that left their normal nearly as far are told with it.
_NEARLY = 0.5
#: Fewer steps tell no normal.
_FEWEST = 8


def spikes(history: History) -> list[Finding]:
    """One finding, about the largest: a single bad batch is no fault of the training, but worth knowing."""
    steps = set(history.steps)
    found: dict[int, Event] = {}
    for event in history.events:
        # what is NaN or infinite is told with where it began
        if (
            event.step in steps
            and math.isfinite(event.value)
            and (event.step not in found or event.score > found[event.step].score)
        ):
            found[event.step] = event
    if not found:
        return []
    gradients = history.gradients("norm")
    worst = max(found.values(), key=lambda event: event.score)
    layers = [] if gradients is None or worst.step not in gradients.steps else _moved(gradients, worst.step)
    others = sorted(step for step in found if step != worst.step)
    times = "" if not worst.usual else f", {_times(worst.value / worst.usual)} times what was usual"
    more = "" if not others else f" There were {len(found)} steps with spikes."
    moved = "" if not layers else f" {layers[0][0]} left its own normal farthest: {_times(layers[0][1])} times its usual norm."
    return [
        Finding(
            "spike",
            "info",
            layers[0][0] if layers else "",
            (worst.step, worst.step),
            {worst.signal: worst.value, "usual": math.nan if worst.usual is None else worst.usual, "score": worst.score},
            f"{worst.signal} was {worst.value:.4g}{times}.{moved}{also([name for name, _ in layers])}{more}",
            f"Look at the batch of this step, and at 'gradmon why {history.place} --step {worst.step}'; on_spike='skip' leaves such "
            "steps out, and clip_grad_norm_ bounds them.",
            15.0,  # before what is hardly worth a word, behind whatever else is known
        )
    ]


def _times(factor: float) -> str:
    return f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}"


def _moved(gradients: Matrix, step: int) -> list[tuple[str, float]]:
    """The layers that made the spike, by how many times their usual norm they had, the farthest first."""
    row = gradients.values[gradients.steps.index(step)].tolist()
    whole = math.sqrt(sum(norm * norm for norm in row if math.isfinite(norm)))
    found = []
    for name, norm in zip(gradients.names, row, strict=True):
        usual = lower_median(value for value in gradients.column(name).values if math.isfinite(value))
        if len(gradients.steps) >= _FEWEST and usual > 0 and norm * norm > _SHARE * whole * whole:
            found.append((name, norm / usual))
    found.sort(key=lambda pair: -pair[1])
    return [pair for pair in found if pair[1] >= _NEARLY * found[0][1] and pair[1] > 1]
