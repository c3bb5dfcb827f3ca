"""The messages of ranks about one check, over a few steps.

Each rank leaves digests. The first one compares them, and names the ranks that it has a question to; none if all are equal, which ends it.
Those leave their fingerprints. The first rank names the tensors that differ, the others leave their statistics of the last steps, and the
first rank gives the verdict, which all take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...core import keys
from ...core.loop_mistakes import LoopFinding
from ...core.moments import Column
from ...core.records import StepRecord
from ...step.ranks import digest_of
from . import comparison
from .board import Board
from .comparison import Suspects, compared, of_json, suspects, to_json
from .items import GRADIENT, NUMBER, PARAMETER, SCALE, rate_name
from .local_values import FEWEST, LOCAL, Range, Streak, local_values, range_of, ranks_apart, same_batches
from .snapshot import Snapshot

#: The first step is looked for in the statistics of this number of steps and of parameters.
TRACED_STEPS, TRACED_NAMES = 200, 20
#: Kinds by source, in the order in which a step measures them.
_SOURCES = {keys.PARAMETER: PARAMETER, keys.GRADIENT_BEFORE_CLIP: GRADIENT, keys.GRADIENT: GRADIENT}


@dataclass
class Memory:
    """What one rank knows from checks before.

    Attributes:
        last_good: the last step in which nothing differed; None before the first.
        batch: a digest of its batch in the last check.
        seen: the last step whose values of this kind are in a range, by kind.
        streaks: by kind, the checks in a row in which one rank was apart.
    """

    last_good: int | None = None
    batch: str | None = None
    seen: dict[str, int] = field(default_factory=dict)
    streaks: dict[str, Streak] = field(default_factory=dict)

    def was_good(self, step: int) -> None:
        """Nothing differed in ``step``."""
        self.last_good = step

    def next_batch(self, batch: str | None) -> str | None:
        """The batch before this one."""
        before, self.batch = self.batch, batch
        return before

    def next_ranges(self, records: Sequence[StepRecord], rank: int, step: int) -> dict[str, Range]:
        """The ranges of this rank's own values since the ranges before, where there are enough of them."""
        found: dict[str, Range] = {}
        for kind in LOCAL:
            values = local_values(kind, records, self.seen.get(kind, -1), rank)
            if (each := range_of(values)) is not None:
                found[kind] = each
            if len(values) >= FEWEST:
                self.seen[kind] = step
        return found


class Conversation:
    """One check, from the side of one rank.

    Args:
        board: where messages are left.
        snapshot: what this rank has found.
        records: the last records of this rank.
        recorded: those of steps that were not monitored, which waits for the device.
        memory: what is known from checks before.
        global_ranks: the ranks on the board by their number among all processes.
        has_traces: the statistics of the last steps are those of equal ranks.
        compares_losses: each rank has batches of its own, which are of one kind.
    """

    def __init__(
        self,
        board: Board,
        snapshot: Snapshot,
        records: Callable[[], Sequence[StepRecord]],
        recorded: Callable[[], Sequence[StepRecord]],
        memory: Memory,
        global_ranks: Sequence[int],
        has_traces: bool,
        compares_losses: bool,
    ) -> None:
        self._board, self._snapshot, self._memory = board, snapshot, memory
        self._records, self._recorded = records, recorded
        self._global_ranks, self._has_traces, self._compares_losses = global_ranks, has_traces, compares_losses
        self._left: set[str] = set()
        self._suspects: list[Suspects] = []
        self._asked: list[int] = []
        self._answers: Mapping[int, Any] = {}

    def go_on(self) -> list[LoopFinding] | None:
        """Leave the messages that are due. Returns the verdict once it is known; waits for nothing."""
        if not self._snapshot.is_ready():
            return None
        if self._board.has_changed():
            self._left.clear()
        self._leave("digests", self._digests)
        if self._board.rank == 0:
            self._judge()
        question = self._read("question", [0])
        if question is None:
            return None
        facts = [LoopFinding.of_dict(fact) for fact in question[0]["facts"]]
        if not question[0]["ranks"]:
            if question[0]["compared"]:
                self._memory.was_good(self._snapshot.step)
            return facts
        if self._board.rank in question[0]["ranks"]:
            self._answer()
        verdict = self._read("verdict", [0])
        if verdict is None:
            return None
        if not verdict[0]["facts"]:  # what differs does so on purpose
            self._memory.was_good(self._snapshot.step)
        return [*facts, *map(LoopFinding.of_dict, verdict[0]["facts"])]

    def silent(self) -> tuple[int, int]:
        """How many ranks have left no digest in this training, and the first of them, by its number among all processes."""
        count, first = self._board.silent("digests")
        return count, self._global_ranks[first]

    def _digests(self) -> dict[str, Any]:
        return self._own

    @cached_property
    def _own(self) -> dict[str, Any]:
        """The first message of this rank; the same if it has to be left again."""
        snapshot = self._snapshot
        records = self._records() if self._compares_losses else []
        ranges = self._memory.next_ranges(records, self._board.rank, snapshot.step)
        rounded = {kind: [float(f"{value:.6g}") for value in each] for kind, each in ranges.items()}
        before = self._memory.next_batch(snapshot.batch)
        return {
            "shares": snapshot.digests(),
            "batch": snapshot.batch,
            "batch before": before,
            **({"local": rounded} if rounded else {}),
        }

    def _answer(self) -> None:
        self._leave("answer", lambda: {"shares": {share: to_json(found) for share, found in self._snapshot.by_share.items()}})
        names = self._read("names", [0])
        if names is not None:
            self._leave("trace", lambda: self._trace(names[0]["names"]))

    def _judge(self) -> None:
        """What the first rank does with the messages of the others."""
        if "question" not in self._left:
            found = self._read("digests", range(self._board.count))
            if found is None:
                return
            digests = {rank: message["shares"] for rank, message in found.items()}
            self._suspects = suspects(digests)
            self._asked = sorted({rank for each in self._suspects for rank in (each.reference, each.odd)})
            local = {rank: message.get("local", {}) for rank, message in found.items()}
            facts = [
                *same_batches(self._snapshot.step, found),
                *ranks_apart(self._snapshot.step, local, self._memory.streaks, self._global_ranks),
            ]
            said = [fact.to_dict() for fact in facts]
            self._leave("question", lambda: {"ranks": self._asked, "facts": said, "compared": compared(digests)})
        answers = self._read("answer", self._asked) if self._asked else None
        if answers is None:
            return
        self._answers = answers
        self._leave("names", lambda: {"names": self._differing()[:TRACED_NAMES]})
        traces = self._read("trace", self._asked)
        if traces is not None:
            self._leave("verdict", lambda: {"facts": [fact.to_dict() for fact in self._verdicts(traces)]})

    def _found(self, rank: int, share: str) -> dict[tuple[str, str], int]:
        return of_json(self._answers[rank]["shares"].get(share, []))

    def _differing(self) -> list[str]:
        names: dict[str, None] = {}
        for each in self._suspects:
            reference, other = (self._found(rank, each.share) for rank in (each.reference, each.odd))
            differing = [key for key in dict.fromkeys((*reference, *other)) if reference.get(key) != other.get(key)]
            names.update(dict.fromkeys(comparison.parameter_of(*key) for key in differing))
        return list(names)

    def _verdicts(self, traces: Mapping[int, Any]) -> list[LoopFinding]:
        found: dict[str, LoopFinding] = {}
        for who in self._suspects:
            pair = who.reference, who.odd
            steps = [{int(step): of for step, of in traces[rank]["steps"].items()} for rank in pair] if self._has_traces else []
            reference, other = (self._found(rank, who.share) for rank in pair)
            what = comparison.difference(reference, other, steps, self._memory.last_good)
            if what is not None:  # one finding for each rule, that of the first share
                found.setdefault(what.rule, self._fact(who, what, [traces[rank]["norms"] for rank in pair]))
        return list(found.values())

    def _fact(self, who: Suspects, what: comparison.Difference, norms: Sequence[Mapping[str, float]]) -> LoopFinding:
        step = self._snapshot.step
        evidence: dict[str, float] = {"rank": self._global_ranks[who.odd], "unlike rank": self._global_ranks[who.reference]}
        evidence["ranks like it"], evidence["ranks like the other"] = who.alike, who.usual
        if what.differing:
            evidence[f"{what.kind}s that differ"], evidence[f"{what.kind}s"] = what.differing, what.of
        ours, theirs = (each.get(comparison.parameter_of(what.kind, what.name)) for each in norms)
        if ours and theirs:
            evidence["norm of the parameter there"], evidence["and elsewhere"] = theirs, ours
        if what.first is None and self._memory.last_good is not None:
            evidence["equal until step"] = self._memory.last_good
        first = step if what.first is None else what.first
        return LoopFinding(what.rule, first, step, 1, (what.name,), {name: float(value) for name, value in evidence.items()})

    def _trace(self, names: Sequence[str]) -> dict[str, Any]:
        """Hashes of the statistics of these parameters in the last steps, and the last norms."""
        steps: dict[int, list[tuple[str, str, str]]] = {}
        norms: dict[str, float] = {}
        known = {record.step: record for record in (*self._recorded(), *self._records())}
        for _, record in sorted(known.items())[-TRACED_STEPS:]:
            rates = record.context.get("lr", [])
            found = steps[record.step] = [(NUMBER, rate_name(number), repr(rate)) for number, rate in enumerate(rates)]
            if "amp_scale" in record.context:
                found.append((NUMBER, SCALE, repr(record.context["amp_scale"])))
            for source, kind in _SOURCES.items():
                table = record.tables.get(source)
                if table is None:
                    continue
                place = {name: row for row, name in enumerate(table.names)}
                there = [name for name in names if name in place]
                found += [(kind, name, digest_of(table.rows[place[name]].tolist())) for name in there]
                if kind == PARAMETER:
                    norms.update((name, float(table.rows[place[name], Column.SQUARE_SUM]) ** 0.5) for name in there)
        return {"steps": steps, "norms": norms}

    def _leave(self, name: str, message: Callable[[], dict[str, Any]]) -> None:
        if name not in self._left:
            self._left.add(name)
            self._board.put(name, {"step": self._snapshot.step, **message()})

    def _read(self, name: str, ranks: Sequence[int]) -> dict[int, Any] | None:
        return self._board.read(name, ranks, self._snapshot.step)
