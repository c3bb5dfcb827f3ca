"""Pictures of the gallery: small enough for a page, drawn by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch_gradmon as gradmon

#: Title, key and whether the axis is logarithmic.
_SIGNALS = (
    ("loss", "loss", True),
    ("gradient norm", "gradmon/grad_norm", True),
    ("update ratio", "gradmon/update_ratio", True),
)
_COLOURS = {"faulty": "#c44e52", "cured": "#4c72b0", "healthy": "#4c72b0"}


def series(run: gradmon.Run, key: str) -> dict[int, float]:
    """The values of a key by step; none where the run does not have it."""
    return run.series(key) if key in run.keys() else {}  # noqa: SIM118 (a method of the run)


def signals(path: Path, runs: Mapping[str, gradmon.Run]) -> None:
    """Draw loss, gradient norm and update ratio of some runs over each other into ``path``; NaN and infinity are marked at the top."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    figure = Figure(figsize=(9, 2.4), dpi=90, layout="constrained")
    for axis, (title, key, is_log) in zip(figure.subplots(1, len(_SIGNALS)), _SIGNALS, strict=True):
        for name, run in runs.items():
            colour = _COLOURS[name]
            values = series(run, key)
            finite = {step: value for step, value in values.items() if math.isfinite(value)}
            axis.plot(
                list(finite),
                list(finite.values()),
                color=colour,
                label=name,
                linewidth=1.2,
                marker="." if len(finite) < 30 else "",
            )
            if bad := [step for step in values if step not in finite]:
                axis.plot(
                    bad, [1.0] * len(bad), "x", color=colour, transform=axis.get_xaxis_transform(), clip_on=False, markersize=4
                )
        if is_log and any(value > 0 for run in runs.values() for value in series(run, key).values()):
            axis.set_yscale("log")
            axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7)
    figure.savefig(path)


def layers(path: Path, run: gradmon.Run) -> None:
    """Draw the heat map of a run's layers over its steps into ``path``: the norms themselves, which differ over the depth."""
    figure = run.plot("heatmap", engine="matplotlib", rows=16, relative=False)
    figure.set_dpi(80)
    figure.savefig(path, dpi=80)
