"""The result of a sweep."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from . import plots, text
from .expected import Expected, Layer
from .training import SweepRun
from .verdicts import LayerVerdict, judge, outcome


@dataclass(frozen=True)
class WidthSweep:
    """The runs of a sweep and their verdicts.

    Attributes:
        runs: one for each width and seed.
        layers: the modules with their own parameters, in execution order.
        expected: their expected exponents.
        tolerance: of exponents.
        confidence: of the intervals.
        settings: arguments of the sweep, for the records.
        unmeasured: names of trained parameters in no module that is measured; the verdict does not cover them.
    """

    runs: Sequence[SweepRun]
    layers: Mapping[str, Layer]
    expected: Mapping[str, Expected]
    tolerance: float
    confidence: float
    settings: Mapping[str, Any]
    unmeasured: Sequence[str] = ()

    @property
    def widths(self) -> list[int]:
        """The widths, from the smallest."""
        return sorted({run.width for run in self.runs})

    @property
    def seeds(self) -> list[int]:
        """The seeds."""
        return sorted({run.seed for run in self.runs})

    @property
    def steps(self) -> int:
        """How many steps each run has."""
        return len(self.runs[0].steps)

    @cached_property
    def verdicts(self) -> list[LayerVerdict]:
        """The verdicts after the last step."""
        return self.verdicts_at(self.steps)

    def verdicts_at(self, step: int) -> list[LayerVerdict]:
        """The verdicts after ``step`` steps.

        Raises:
            ValueError: there is no such step.
        """
        if not 1 <= step <= self.steps:
            raise ValueError(f"step={step!r} is not one of 1 to {self.steps}")
        return judge(self.runs, self.layers, self.expected, step, self.tolerance, self.confidence)

    @property
    def outcome(self) -> str:
        """``passes``, ``fails`` or ``undecided``."""
        return outcome(self.verdicts)

    @property
    def passed(self) -> bool:
        """Whether every judged term was shown to be as expected."""
        return self.outcome == "passes"

    def of_seeds(self, *seeds: int) -> WidthSweep:
        """The sweep with these seeds only.

        Raises:
            ValueError: no seed is given, or one is not in the sweep.
        """
        strange = [seed for seed in seeds if seed not in self.seeds]
        if strange or not seeds:
            raise ValueError(f"seeds={strange or []!r} are not among {self.seeds}; name one of these or more")
        return replace(self, runs=[run for run in self.runs if run.seed in seeds])

    def words(self) -> str:
        """The verdict in a few sentences, with the remedies."""
        return text.words(self.verdicts, self.widths[0], self.widths[-1], self.unmeasured)

    def table(self) -> str:
        """A line for each term of each layer, as plain text."""
        return text.table(self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON; numbers that are not finite are None."""
        return {
            "outcome": self.outcome,
            "words": self.words(),
            "settings": dict(self.settings),
            "tolerance": self.tolerance,
            "confidence": self.confidence,
            "unmeasured": list(self.unmeasured),
            "layers": {name: asdict(layer) for name, layer in self.layers.items()},
            "verdicts": [_finite(asdict(verdict)) for verdict in self.verdicts],
            "runs": [_finite(asdict(run)) for run in self.runs],
        }

    def to_json(self) -> str:
        """The result as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_json` to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    def plot(self, path: str | Path) -> None:
        """Draw the terms over the width into a PNG, or another format by the file name; needs matplotlib.

        Raises:
            ImportError: matplotlib is missing.
        """
        plots.draw(self.panels(), path)

    def figure(self) -> Any:
        """The same as a plotly figure; needs plotly.

        Raises:
            ImportError: plotly is missing.
        """
        return plots.interactive(self.panels())

    def panels(self) -> list[plots.TermPanel]:
        """The plotted panels: both terms and the mean of |output| over the width, after the last step."""
        return plots.panels(self.runs, self.layers, self.verdicts, self.steps)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
