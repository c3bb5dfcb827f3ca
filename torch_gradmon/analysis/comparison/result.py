"""The result of comparing two runs, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...core.formatting import strict


@dataclass(frozen=True)
class Divergence:
    """A value that differs between the runs.

    Attributes:
        step: number of the step.
        key: of the value in the first run.
        other: its key in the second run.
        stage: of the step, such as ``parameters``, ``activations`` or ``updates``.
        a, b: the value in the first and in the second run.
        relative: the difference relative to the larger value; that of a mean relative to the root mean square, and so on.
        rtol: the tolerated difference.
        metrics: how many metrics of the same tensor diverge.
    """

    step: int
    key: str
    other: str
    stage: str
    a: float
    b: float
    relative: float
    rtol: float
    metrics: int = 1


@dataclass(frozen=True)
class StageCounts:
    """How many tensors and other values of a stage diverge in one step.

    Attributes:
        tensors, values: how many were compared.
        tensors_part, values_part: how many of them diverge.
        largest: the largest relative difference.
    """

    tensors: int
    tensors_part: int
    values: int
    values_part: int
    largest: float


@dataclass(frozen=True)
class Unmatched:
    """What only one of the runs has.

    Attributes:
        steps: numbers of steps.
        keys: whole-model and logged values by key, and tensors as ``source/name``.
        gaps: by key or tensor that both runs have in other steps, in how many compared steps only this run has it, and the first.
    """

    steps: tuple[int, ...] = ()
    keys: tuple[str, ...] = ()
    gaps: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.steps or self.keys or self.gaps)


@dataclass(frozen=True)
class ComparisonResult:
    """Where two runs diverge.

    Attributes:
        runs: their names.
        steps: the common steps that were compared, in this order, up to the first divergence.
        first: of the first step that diverges, the value that is computed first; None without a divergence.
        divergences: all divergent values of that step, one for each tensor, in the order of computation.
        stages: what was compared in that step, or in the last one without a divergence.
        onset: the first difference of any size in the compared steps; None without any.
        interpretation: what the onset points to; empty without a difference.
        largest: the largest relative difference within the tolerance before the runs diverge.
        growth: by key of a whole-model value, the difference in some steps from the onset on.
        unmatched: what only the first run has, and what only the second.
        not_compared: values left out: those of clocks, and, if the runs have different steps, those that follow from earlier steps.
        settings: by name, what the first and the second run were made with and do not share, as text.
        tags: tags of the onset's step that differ.
        strict: whether unmatched values count as a divergence.
    """

    runs: tuple[str, str]
    steps: tuple[int, ...]
    first: Divergence | None
    divergences: tuple[Divergence, ...]
    stages: Mapping[str, StageCounts]
    onset: Divergence | None
    interpretation: str
    largest: Divergence | None
    growth: Mapping[str, Mapping[int, float]]
    unmatched: tuple[Unmatched, Unmatched]
    not_compared: tuple[str, ...] = ()
    settings: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    tags: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    strict: bool = False

    @property
    def diverges(self) -> bool:
        """Whether the runs diverge; if ``strict``, also whether one of them has unmatched values."""
        return self.first is not None or (self.strict and any(self.unmatched))

    @property
    def exit_code(self) -> int:
        """For CI: 0 if the runs are equal within the tolerance, 1 otherwise."""
        return int(self.diverges)

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON; numbers that are not finite are strings, as in a :class:`JsonlSink`."""
        found = {
            "runs": list(self.runs),
            "parts": self.diverges,
            "strict": self.strict,
            "steps": {"compared": len(self.steps), "first": self.steps[0], "last": self.steps[-1]},
            "first": self.first and asdict(self.first),
            "partings": [asdict(divergence) for divergence in self.divergences],
            "stages": {name: asdict(stage) for name, stage in self.stages.items()},
            "onset": self.onset and asdict(self.onset),
            "reading": self.interpretation,
            "largest_within_tolerance": self.largest and asdict(self.largest),
            "growth": {key: {str(step): v for step, v in values.items()} for key, values in self.growth.items()},
            "alone": [
                {"steps": list(own.steps), "keys": list(own.keys), "gaps": {k: list(v) for k, v in own.gaps.items()}}
                for own in self.unmatched
            ],
            "not_compared": list(self.not_compared),
            "settings": {name: list(values) for name, values in self.settings.items()},
            "tags": {name: list(values) for name, values in self.tags.items()},
        }
        return {name: strict(value) for name, value in found.items()}

    def to_json(self) -> str:
        """The result as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False, default=str)
