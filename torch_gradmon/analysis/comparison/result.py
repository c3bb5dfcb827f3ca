"""What a comparison of two runs says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...core.json_numbers import strict
from .text import told


@dataclass(frozen=True)
class Parting:
    """A value that is not the same in both runs.

    Attributes:
        step: when.
        key: which, in the first run.
        other: what it is called in the second.
        stage: what it is in a step, such as ``parameters``, ``activations`` or ``updates``.
        a: its value in the first run.
        b: its value in the second.
        relative: how far they are apart, relative to the larger one; a mean relative to the root mean square, and so on.
        rtol: how far they might have been.
        metrics: so many metrics of the same tensor part.
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

    def to_dict(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)


@dataclass(frozen=True)
class Stage:
    """How many of the tensors and of the other values of a stage part in one step.

    Attributes:
        tensors, values: so many were compared.
        tensors_part, values_part: so many of them part.
        largest: the largest relative difference.
    """

    tensors: int
    tensors_part: int
    values: int
    values_part: int
    largest: float


@dataclass(frozen=True)
class Lone:
    """What one of the runs has alone.

    Attributes:
        steps: numbers of steps.
        keys: whole-model values and values that were logged, and tensors as ``source/name``.
        gaps: by key or tensor that both have in other steps, in how many of the compared steps this run has it alone, and the first.
    """

    steps: tuple[int, ...] = ()
    keys: tuple[str, ...] = ()
    gaps: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.steps or self.keys or self.gaps)


@dataclass(frozen=True)
class Difference:
    """Where two runs part.

    Attributes:
        runs: what they are called.
        steps: those that both have; they were compared in this order, up to the first in which the runs part.
        first: where they part: of the first such step, the value that comes about first; None where they do not.
        partings: all that part in that step, one for each tensor, in the order in which they come about.
        stages: by name, what was compared in that step; in the last one where nothing parts.
        onset: the first difference of any size; None where there is none in the steps that were compared.
        reading: what it points to, in words; empty where nothing differs.
        largest: the largest relative difference that is within the tolerance, before the runs part.
        growth: by key of a whole-model value, how far the runs are apart in some steps from the onset on.
        alone: what only the first run has, and what only the second.
        skipped: values that were not compared: those of clocks, and where the runs have not the same steps, those that follow from the
            steps before.
        tags: those of the step of the onset that are not the same in both runs.
        strict: whether what one of the runs has alone counts.
    """

    runs: tuple[str, str]
    steps: tuple[int, ...]
    first: Parting | None
    partings: tuple[Parting, ...]
    stages: Mapping[str, Stage]
    onset: Parting | None
    reading: str
    largest: Parting | None
    growth: Mapping[str, Mapping[int, float]]
    alone: tuple[Lone, Lone]
    skipped: tuple[str, ...] = ()
    tags: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    strict: bool = False

    @property
    def parts(self) -> bool:
        """Whether the runs part; if ``strict``, also whether one of them has anything alone."""
        return self.first is not None or (self.strict and any(self.alone))

    @property
    def exit_code(self) -> int:
        """For CI: 0 if they are the same within the tolerance, 1 otherwise."""
        return int(self.parts)

    def __str__(self) -> str:
        return told(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON: numbers that are not finite are strings, as a :class:`JsonlSink` writes them."""
        found = {
            "runs": list(self.runs),
            "parts": self.parts,
            "strict": self.strict,
            "steps": {"compared": len(self.steps), "first": self.steps[0], "last": self.steps[-1]},
            "first": self.first and self.first.to_dict(),
            "partings": [parting.to_dict() for parting in self.partings],
            "stages": {name: asdict(stage) for name, stage in self.stages.items()},
            "onset": self.onset and self.onset.to_dict(),
            "reading": self.reading,
            "largest_within_tolerance": self.largest and self.largest.to_dict(),
            "growth": {key: {str(step): v for step, v in values.items()} for key, values in self.growth.items()},
            "alone": [
                {"steps": list(lone.steps), "keys": list(lone.keys), "gaps": {k: list(v) for k, v in lone.gaps.items()}}
                for lone in self.alone
            ],
            "not_compared": list(self.skipped),
            "tags": {name: list(values) for name, values in self.tags.items()},
        }
        return {name: strict(value) for name, value in found.items()}

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False, default=str)
