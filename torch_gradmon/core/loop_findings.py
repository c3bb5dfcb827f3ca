"""What was seen of a training loop that no statistics tell: such as that gradients are never cleared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class LoopFinding:
    """One mistake of the loop, as often as it was seen.

    Attributes:
        rule: the slug of the finding that it makes, such as ``missing-zero-grad``.
        first: the step in which it was first seen.
        last: and last.
        count: in how many steps.
        where: parameters or modules, as far as it is about some of them; the first is the one that is named.
        evidence: numbers, by what they are.
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
