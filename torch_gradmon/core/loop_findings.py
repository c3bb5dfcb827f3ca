"""Findings about the training loop that need no statistics, such as that gradients are never cleared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

#: The rule of signs of a divergence that the loss does not show yet, and what to do.
ABOUT_TO_DIVERGE = "about-to-diverge"
DIVERGENCE_ADVICE = "Lower the learning rate by half, clip gradients to their usual norm, or look at what has changed in the data"


@dataclass(frozen=True)
class LoopFinding:
    """One mistake of the loop.

    Attributes:
        rule: the slug of the finding, such as ``missing-zero-grad``.
        first: the first step in which it occurred.
        last: the last one.
        count: number of such steps.
        where: affected parameters or modules, if any; messages name the first.
        evidence: numbers by description.
    """

    rule: str
    first: int
    last: int
    count: int
    where: tuple[str, ...] = ()
    evidence: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "where": list(self.where)}

    @classmethod
    def of_dict(cls, fact: Mapping[str, Any]) -> LoopFinding:
        """The inverse of :meth:`to_dict`."""
        known = {each.name: fact[each.name] for each in fields(cls) if each.name in fact}  # a later version may know more
        return cls(**{**known, "where": tuple(fact.get("where", ()))})
