"""Which ranks differ, in what, and since when: pure functions of the messages of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .items import BUFFER, GRADIENT, NUMBER, PARAMETER, STATE

#: The largest number of ranks, of those that differ, that are asked for details in one check.
ASKED = 6
#: Fingerprints by kind and name.
Found = Mapping[tuple[str, str], int]
#: By step, in the order in which things were measured: kind, name, and a hash of the statistics.
Trace = Mapping[int, Sequence[Sequence[str]]]


class Suspects(NamedTuple):
    """Ranks that should be equal and are not.

    Attributes:
        reference: one of the largest number of equal ranks.
        usual: their number. Where as many ranks are equal to ``odd``, it may be they that are wrong.
        odd: a rank that differs from them.
        alike: number of ranks that are equal to it.
        share: what all should have in common.
    """

    reference: int
    usual: int
    odd: int
    alike: int
    share: str


class Difference(NamedTuple):
    """What differs between two ranks.

    Attributes:
        rule: slug of the finding.
        kind: of the item that differed first, as far as is known.
        name: of the first tensor or number in the order of the model.
        first: the first step that is known to differ; None if only the check shows it.
        differing: number of items of this kind that differ now; 0 if they are equal again.
        of: number of all items of this kind.
    """

    rule: str
    kind: str
    name: str
    first: int | None
    differing: int
    of: int


def compared(digests: Mapping[int, Mapping[str, str]]) -> bool:
    """Whether every rank has something in common with another one. ``digests`` by rank and share."""
    counts = Counter(share for of in digests.values() for share in of)
    return all(any(counts[share] > 1 for share in of) for of in digests.values())


def suspects(digests: Mapping[int, Mapping[str, str]]) -> list[Suspects]:
    """The ranks that differ, one for each share in which some do."""
    found = []
    for share in dict.fromkeys(share for of in digests.values() for share in of):
        ranks = [rank for rank in sorted(digests) if share in digests[rank]]
        counts = Counter(digests[rank][share] for rank in ranks)
        if len(counts) < 2:
            continue
        usual, most = counts.most_common(1)[0]
        odd = next(rank for rank in ranks if digests[rank][share] != usual)
        reference = next(rank for rank in ranks if digests[rank][share] == usual)
        found.append(Suspects(reference, most, odd, counts[digests[odd][share]], share))
    return found[: ASKED // 2]


def difference(reference: Found, other: Found, traces: Sequence[Trace] = (), equal_in: int | None = None) -> Difference | None:
    """What differs between two ranks; None if nothing does that should not.

    Args:
        reference: fingerprints of one rank.
        other: of the other one.
        traces: statistics of their last steps.
        equal_in: the last step in which nothing differed.
    """
    kinds = _differing(reference, other)
    if not kinds:
        return None
    kind = next(kind for kind in (NUMBER, BUFFER, GRADIENT, STATE, PARAMETER) if kind in kinds)
    name, first = kinds[kind][0], None
    # before the first check it is unknown whether gradients are equal when they are measured
    kinds_of_use = {NUMBER, PARAMETER, *([GRADIENT] if equal_in is not None or GRADIENT in kinds else [])}
    since = _since(traces[0], traces[1], equal_in, kinds_of_use) if len(traces) == 2 else None
    if since is not None:
        first, earlier, name_then = since
        if earlier != PARAMETER or kind == PARAMETER:  # state is in no statistics, so it may have been earlier
            kind, name = earlier, name_then
    rule = "ranks-not-synchronised" if kind == GRADIENT else "ranks-diverged"
    of = sum(each == kind for each, _ in {*reference, *other})
    return Difference(rule, kind, name, first, len(kinds.get(kind, ())), of)


def _differing(one: Found, other: Found) -> dict[str, list[str]]:
    """Names by kind.

    Where all parameters are equal after the step, most gradients, or most of the state under one key, differ on purpose: the optimizer
    exchanges gradients itself, or each rank keeps the state of its own parameters. State that only one rank has is of that kind too.
    """
    kinds: dict[str, list[str]] = {}
    for kind, name in one:
        if (kind, name) in other and one[kind, name] != other[kind, name]:
            kinds.setdefault(kind, []).append(name)
    for kind, name in {*one} ^ {*other}:
        if kind == GRADIENT:
            kinds.setdefault(kind, []).append(name)
    if PARAMETER in kinds:
        return kinds
    sizes = Counter(_sort_of(*key) for key in one)
    apart = Counter(_sort_of(kind, name) for kind, names in kinds.items() for name in names)
    on_purpose = {sort for sort, count in apart.items() if sort[0] in (GRADIENT, STATE) and 2 * count > sizes[sort]}
    found = {kind: [name for name in names if _sort_of(kind, name) not in on_purpose] for kind, names in kinds.items()}
    return {kind: names for kind, names in found.items() if names}


def _sort_of(kind: str, name: str) -> tuple[str, str]:
    """The kind, and for state its key."""
    return kind, name.rpartition("/")[2] if kind == STATE else ""


def _since(one: Trace, other: Trace, equal_in: int | None, kinds: set[str]) -> tuple[int, str, str] | None:
    """The first step after ``equal_in`` in which something of these kinds differs, its kind and its name.

    Statistics of parameters are from before the step. Those that differed although all was equal are of no use: gradients before ranks
    exchange them, or of another implementation.
    """
    steps = sorted(one.keys() & other.keys())
    useless: set[tuple[int, str, str]] = set()
    if equal_in is not None:
        known = [step for step in steps if step <= equal_in]
        if not known:
            return None
        useless = set(_apart(one[known[-1]], other[known[-1]]))
    for step in steps:
        if equal_in is None or step > equal_in:
            for place, kind, name in _apart(one[step], other[step]):
                if kind in kinds and (place, kind, name) not in useless:
                    return step, kind, name
    return None


def _apart(one: Sequence[Sequence[str]], other: Sequence[Sequence[str]]) -> list[tuple[int, str, str]]:
    """What differs between the statistics of one step, each with its place among those of its kind and name."""
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for (kind, name, ours), (its_kind, its_name, theirs) in zip(one, other, strict=False):
        seen[kind, name] += 1
        if (kind, name) == (its_kind, its_name) and ours != theirs:
            found.append((seen[kind, name], kind, name))
    return found


def parameter_of(kind: str, name: str) -> str:
    """The parameter that an item belongs to: state has a key behind its name."""
    return name.rpartition("/")[0] if kind == STATE else name


def to_json(found: Found) -> list[list[Any]]:
    """Fingerprints as a list."""
    return [[kind, name, value] for (kind, name), value in found.items()]


def of_json(items: Sequence[Sequence[Any]]) -> dict[tuple[str, str], int]:
    """The inverse of :func:`to_json`."""
    return {(kind, name): value for kind, name, value in items}
