"""What a sweep found, with everything that can be made of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from . import plots as drawing
from . import text as wording
from .expected import Expected, Layer
from .training import Run
from .verdicts import Verdict, judge, outcome


@dataclass(frozen=True)
class WidthSweep:
    """The runs of a sweep and the verdicts on them.

    Attributes:
        runs: one for each width and seed.
        layers: what is known of the modules with parameters of their own, in the order in which they run.
        expected: the exponents that they should have.
        tolerance: how far an exponent may be from that.
        confidence: of the intervals.
        settings: what the sweep was asked for, for the records.
        unmeasured: the names of parameters that are trained, but in no module that has them and gives a tensor; no verdict is on them.
    """

    runs: Sequence[Run]
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
    def verdicts(self) -> list[Verdict]:
        """The verdicts after the last step."""
        return self.verdicts_at(self.steps)

    def verdicts_at(self, step: int) -> list[Verdict]:
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
        """Whether every term that is judged was shown to be as expected."""
        return self.outcome == "passes"

    def of_seeds(self, *seeds: int) -> WidthSweep:
        """The sweep as if it had had these seeds alone.

        Raises:
            ValueError: none is given, or one that it has not.
        """
        strange = [seed for seed in seeds if seed not in self.seeds]
        if strange or not seeds:
            raise ValueError(f"seeds={strange or []!r} are not among {self.seeds}; name one of these or more")
        return replace(self, runs=[run for run in self.runs if run.seed in seeds])

    def words(self) -> str:
        """The verdict in a few sentences, with what to do."""
        return wording.words(self.verdicts, self.widths[0], self.widths[-1], self.unmeasured)

    def table(self) -> str:
        """A line for each term of each layer, as plain text."""
        return wording.table(self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON: numbers that are not finite are None."""
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
        """The same as text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_json` to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    def plot(self, path: str | Path) -> None:
        """Draw the terms over the width to a PNG, or what else the name of the file says; needs matplotlib.

        Raises:
            ImportError: there is no matplotlib.
        """
        drawing.draw(self.panels(), path)

    def figure(self) -> Any:
        """The same as a plotly figure; needs plotly.

        Raises:
            ImportError: there is no plotly.
        """
        return drawing.interactive(self.panels())

    def panels(self) -> list[drawing.Panel]:
        """What is drawn: both terms and the mean of |output| over the width, after the last step."""
        return drawing.panels(self.runs, self.layers, self.verdicts, self.steps)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
