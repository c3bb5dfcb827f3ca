"""Steps that a spike policy has left out."""

from __future__ import annotations

import math

from ....core.formatting import listed
from ..findings import Finding
from ..history import History

#: Steps that are named one by one.
_NAMED = 8


def check_skipped(history: History) -> list[Finding]:
    """Which steps were skipped, whatever for: what such a step would have done is no part of the training, but its batch is lost."""
    skipped = {record.step for record in history.records if record.skipped}
    if not skipped:
        return []
    steps = sorted(skipped)
    bad = {event.step for event in history.events if not math.isfinite(event.value)} & skipped
    what = (
        f"; {'in all of them' if len(bad) == len(steps) else f'in {len(bad)} of them'} a gradient was NaN or infinite"
        if bad
        else ""
    )
    those = "1 step was" if len(steps) == 1 else f"{len(steps)} steps were"
    return history.finding(
        "steps-skipped",
        "",
        {"skipped steps": float(len(steps)), "with NaN or Inf": float(len(bad))},
        f"{those} skipped, {listed([str(step) for step in steps], _NAMED)}{what}: their gradients changed no parameter.",
        "Look for NaN and Inf in the batches of these steps with torch.isfinite, since each epoch brings them again."
        if bad
        else "Nothing has to be done if they are few; otherwise look at their batches, or raise the threshold of the detector.",
        14.0,
        severity="info",
        steps=(steps[0], steps[-1]),
    )
