"""Which ranks differ, in what, and since when: pure functions of the messages of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .items import BUFFER, GRADIENT, NUMBER, PARAMETER, STATE

#: The largest number of differing ranks that are asked for details.
ASKED = 3
#: Fingerprints by kind and name.
Found = Mapping[tuple[str, str], int]
#: By step, in the order in which things were measured: kind, name, and a hash of the statistics.
Trace = Mapping[int, Sequence[Sequence[str]]]


class Suspects(NamedTuple):
    """Ranks that should be equal and are not.

    Attributes:
        reference: one of the majority, or the first of as many.
        odd: those that differ from it.
        usual: number of ranks that are equal to the reference. Where there are not more of them, it may be they that are odd.
        share: what all should have in common.
    """

    reference: int
    odd: tuple[int, ...]
    usual: int
    share: str


class Difference(NamedTuple):
    """What differs between the reference and one rank.

    Attributes:
        rule: slug of the finding.
        kind: of the item that differed first, as far as is known.
        name: of the first tensor or number in the order of the model.
        first: the first step that is known to differ; None if only the check shows it.
        differing: number of items of this kind that differ.
        of: number of all items of this kind.
    """

    rule: str
    kind: str
    name: str
    first: int | None
    differing: int
    of: int


def suspects(digests: Mapping[int, Mapping[str, str]]) -> list[Suspects]:
    """The ranks that differ, by what they should have in common; ``digests`` by rank and share."""
    found = []
    for share in dict.fromkeys(share for of in digests.values() for share in of):
        ranks = [rank for rank in sorted(digests) if share in digests[rank]]
        counts = Counter(digests[rank][share] for rank in ranks)
        if len(counts) < 2:
            continue
        usual, most = counts.most_common(1)[0]
        odd = tuple(rank for rank in ranks if digests[rank][share] != usual)
        reference = next(rank for rank in ranks if digests[rank][share] == usual)
        found.append(Suspects(reference, odd, most, share))
    return found


def difference(reference: Found, other: Found, traces: Sequence[Trace] = ()) -> Difference | None:
    """What differs between two ranks; ``traces`` of both, if they are known. None if nothing does."""
    kinds: dict[str, list[str]] = {}
    for kind, name in dict.fromkeys((*reference, *other)):
        if reference.get((kind, name)) != other.get((kind, name)):
            kinds.setdefault(kind, []).append(name)
    if not kinds:
        return None
    since = _since(*traces) if len(traces) == 2 else None
    kind = _cause(kinds)
    name, first = kinds[kind][0], None
    if since is not None:
        first, earlier, name_then = since
        if earlier != PARAMETER or kind == PARAMETER:  # state is in no statistics, so it may have been earlier
            kind, name = earlier, name_then
    rule = "ranks-not-synchronised" if kind == GRADIENT else "ranks-diverged"
    of = sum(each == kind for each, _ in {*reference, *other})
    return Difference(rule, kind, name, first, len(kinds.get(kind, [name])), of)


def _cause(kinds: Mapping[str, Sequence[str]]) -> str:
    """What came first. Ranks that exchange gradients have equal ones even where their parameters differ, and state follows gradients."""
    return next(kind for kind in (NUMBER, GRADIENT, STATE, PARAMETER, BUFFER) if kind in kinds)


def _since(one: Trace, other: Trace) -> tuple[int, str, str] | None:
    """The first step in which something differs, its kind and its name. Statistics of parameters are from before the step."""
    for step in sorted(one.keys() & other.keys()):
        for (kind, name, ours), (its_kind, its_name, theirs) in zip(one[step], other[step], strict=False):
            if (kind, name) == (its_kind, its_name) and ours != theirs:
                return step, kind, name
    return None


def parameter_of(kind: str, name: str) -> str:
    """The parameter that an item belongs to: state has a key behind its name."""
    return name.rpartition("/")[0] if kind == STATE else name


def to_json(found: Found) -> list[list[Any]]:
    """Fingerprints as a list."""
    return [[kind, name, value] for (kind, name), value in found.items()]


def of_json(items: Sequence[Sequence[Any]]) -> dict[tuple[str, str], int]:
    """The inverse of :func:`to_json`."""
    return {(kind, name): value for kind, name, value in items}
