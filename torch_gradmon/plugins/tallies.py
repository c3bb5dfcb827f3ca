"""The number of times each mistake was seen, and when it becomes a fact."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..step.plugin import Plugin

if TYPE_CHECKING:  # loaded with the first mistake: most programs make none
    from ..core.loop_mistakes import LoopFinding, Mistake

#: Counts at which a fact is written to the run directory again.
_WRITTEN = frozenset(factor * 10**power for power in range(9) for factor in (1, 3))

#: Numbers by what they are.
Evidence = Mapping[str, float]
_NOTHING: Evidence = MappingProxyType({})


@dataclass(slots=True)
class Tally:
    """One mistake of one optimizer. It becomes a fact when it repeats without interruption."""

    first: int
    last: int = 0
    count: int = 0  # of consecutive occurrences; of all once it is a fact
    is_fact: bool = False
    where: tuple[str, ...] = ()
    evidence: Evidence = field(default_factory=dict)
    repeats: float = math.inf  # the count from which it is a fact

    @property
    def is_suspected(self) -> bool:
        """Whether it was seen the last time, and is no fact yet."""
        return self.count > 0 and not self.is_fact


#: That of a mistake that was never seen.
_NEVER = Tally(0)


class Tallies:
    """All mistakes of one training that ``check`` has found."""

    def __init__(self, check: Check) -> None:
        self._check, self._part = check, check.part
        self._tallies: dict[tuple[str, object], Tally] = {}
        self._written: list[dict[str, Any]] = []
        self.is_empty = True  # no mistake was ever seen, or those that were are retracted

    def seen(
        self,
        rule: str,
        key: object = None,
        where: tuple[str, ...] = (),
        evidence: Evidence = _NOTHING,
        warns: bool = True,
        step: int | None = None,
    ) -> None:
        """Count the mistake ``rule``, for an optimizer or other ``key``. ``warns``: False if the caller warns itself."""
        step, mistake = (self._check.context.step or 0) if step is None else step, _mistake(rule)
        tally = self._tallies.setdefault((rule, key), Tally(step, repeats=mistake.repeats))
        self.is_empty = False
        if not tally.count:
            tally.first = step
        tally.count += 1
        tally.last, tally.where, tally.evidence = step, where, evidence
        became = not tally.is_fact and tally.count >= tally.repeats
        tally.is_fact |= became
        if became or (tally.is_fact and tally.count in _WRITTEN):
            self.write_facts()
        if became and warns and mistake.warns:
            self._warn(rule, key, tally)

    def check(
        self, rule: str, is_so: bool, key: object = None, where: str | tuple[str, ...] = (), evidence: Evidence = _NOTHING
    ) -> None:
        """Count the mistake if ``is_so``, and otherwise record that it did not occur."""
        if is_so:
            places = (where,) if where and isinstance(where, str) else tuple(where)
            self.seen(rule, key, places, {name: float(value) for name, value in evidence.items()})
        else:
            self.missed(rule, key)

    def missed(self, rule: str, key: object = None) -> None:
        if not (tally := self.of(rule, key)).is_fact:
            tally.count = 0

    def retract(self, rule: str, key: object = None) -> None:
        """Drop the mistake, of one optimizer or of all: it has turned out to be none."""
        for known in [known for known in self._tallies if known[0] == rule and key in (None, known[1])]:
            del self._tallies[known]
        self.is_empty = not self._tallies

    def of(self, rule: str, key: object = None) -> Tally:
        return self._tallies.get((rule, key), _NEVER)

    def facts(self) -> list[LoopFinding]:
        found: dict[str, LoopFinding] = {}
        for (rule, _), tally in self._tallies.items():
            if tally.is_fact:
                from ..core.loop_mistakes import LoopFinding

                fact = LoopFinding(rule, tally.first, tally.last, tally.count, tally.where, dict(tally.evidence))
                found[rule] = _merged(found[rule], fact) if rule in found else fact
        return list(found.values())

    def write_facts(self, begins: bool = False) -> None:
        """Write the facts to the run directory if they have changed. ``begins``: in any case, since old ones may be there."""
        facts = [fact.to_dict() for fact in self.facts()]
        if facts != self._written or begins:
            self._written = facts
            self._check.context.annotate_run(**{self._part: facts})

    def _warn(self, rule: str, key: object, tally: Tally) -> None:
        mistake, of_key = _mistake(rule), ""
        of = f", {tally.where[0]}" if any(tally.where[:1]) else ""  # the root module has no name
        if mistake.warns_for_each:
            of_key, of = f":{key}", of + "".join(f", {name} {value:g}" for name, value in tally.evidence.items())
        seen = f"seen {tally.count} times by step" if tally.count > 1 else "seen in step"
        message = f"{mistake.cause} ({seen} {tally.last}{of}). {mistake.advice}"
        self._check.context.warn(f"{self._part}:{rule}{of_key}", message)


def _mistake(rule: str) -> Mistake:
    from ..core.loop_mistakes import MISTAKES, SETUP_MISTAKES

    return MISTAKES.get(rule) or SETUP_MISTAKES[rule]


def _merged(one: LoopFinding, other: LoopFinding) -> LoopFinding:
    where = tuple(dict.fromkeys((*one.where, *other.where)))
    evidence, count = {**other.evidence, **one.evidence}, max(one.count, other.count)
    return replace(
        one, first=min(one.first, other.first), last=max(one.last, other.last), count=count, where=where, evidence=evidence
    )


class Check(Plugin):
    """A plugin that finds mistakes, and writes those that are facts to the run directory, under the name ``part``."""

    stops_on_failure = True
    part: str

    def __init__(self) -> None:
        self.tallies = Tallies(self)

    def facts(self) -> list[LoopFinding]:
        return self.tallies.facts()

    def end_run(self) -> None:
        self.tallies.write_facts()

    def on_detach(self) -> None:
        self.end_run()
        self._end()

    def _end(self) -> None:
        """Hold nothing of the model."""
