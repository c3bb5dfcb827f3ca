"""What only one of two runs has, and whether they have anything in common."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from ...analysis.run import Run
from ...core import keys as n
from ...core.keys import Key, format_key
from ...core.moments import VIEWS
from ...runs.window import COUNT
from .causal_order import FACTS
from .result import Lone
from .rules import Rules

#: By key or tensor, in how many steps a run has it alone, and the first of them.
Gaps = dict[Key, tuple[int, int]]
#: Steps that are read at once.
_TOGETHER = 128


def check_use(left: Run, right: Run, rules: Rules) -> None:
    """Every pattern has to be found somewhere, the runs must have something in common, and no two names may become one.

    Raises:
        ValueError: one of these is not so.
    """
    rules.check_use(
        (*left.keys(), *right.keys(), *map(format_key, FACTS)),
        dict.fromkeys(key.name for key in things(left) if key.source and key.name),
    )
    own, others = list(things(left)), set(things(right))
    taken: dict[Key, Key] = {}
    for key in own:
        first = taken.setdefault(rules.renamed(key), key)
        if first.name != key.name:
            new = rules.renamed(key).name
            raise ValueError(f"rename: {first.name!r} and {key.name!r} would both be called {new!r}; give a narrower pattern")
    common = {other: key for other, key in taken.items() if other in others}
    if not common:
        hint = "" if rules.rename else "; rename= (--rename) tells which names are not the same"
        raise ValueError(f"the runs have no tensor and no value in common{hint}")
    if not any(_is_compared(key, other, rules) for other, key in (*common.items(), *((fact, fact) for fact in FACTS))):
        raise ValueError("of what the runs have in common nothing is to be compared")


def alone(
    left: Run, right: Run, rules: Rules, steps: tuple[Sequence[int], Sequence[int]], gaps: tuple[Gaps, Gaps]
) -> tuple[Lone, Lone]:
    """For each run the steps, tensors and values that the other one lacks."""
    own = {rules.renamed(key): key for key in things(left)}
    others = {key: key for key in things(right)}
    by_name = [{format_key(key): value for key, value in found.items()} for found in gaps]
    return (
        Lone(_less(steps[0], steps[1]), tuple(_lacking(own, others, rules, _present(left, steps[0]))), by_name[0]),
        Lone(_less(steps[1], steps[0]), tuple(_lacking(others, own, rules, _present(right, steps[1]))), by_name[1]),
    )


def _lacking(own: Mapping[Key, Key], others: Mapping[Key, Key], rules: Rules, present: Container[Key | None]) -> Iterator[str]:
    for other, key in own.items():
        if other not in others and key in present and _is_compared(key, other, rules):
            yield format_key(key)


def _present(run: Run, steps: Sequence[int]) -> Container[Key | None]:
    """Which of :func:`things` a run has in these steps."""
    if len(steps) == len(run.steps):
        return set(things(run))
    found: set[Key | None] = set()
    for at in range(0, len(steps), _TOGETHER):
        window = run.window(steps[at : at + _TOGETHER])
        for sheet in (*map(window.sheet, window.sources), window.others):
            is_there = sheet.there.any(0).tolist()
            found |= {thing_of(key) for key, there in zip(sheet.keys, is_there, strict=True) if there}
    return found


def _less(steps: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(steps).difference(others)))


def things(run: Run) -> Iterator[Key]:
    """Tensors, without a metric, and the keys of all that is no built-in statistic of them."""
    for source in run.sources:
        yield from (Key(source, name, "") for name in run.tensors(source))
    yield from run.scalars


def thing_of(key: Key) -> Key | None:
    """What of :func:`things` a value is of. None for a built-in statistic of a tensor, of which the count stands for all: some may be
    measured less often than others.
    """
    if key.source not in n.TENSOR_SOURCES or key.metric not in (*VIEWS, COUNT):
        return key
    return key._replace(metric="") if key.metric == COUNT else None


def _is_compared(key: Key, other: Key, rules: Rules) -> bool:
    is_tensor = key.source in n.TENSOR_SOURCES and not key.metric
    metrics = tuple(VIEWS) if is_tensor else (key.metric,)
    return any(rules.tolerance(key._replace(metric=m), other._replace(metric=m)) is not None for m in metrics)
