"""What only one of two runs has, and whether they have anything in common."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from ...core import keys as n
from ...core.keys import Key, format_key
from ...core.moments import VIEWS
from ...runs.reader import COUNT
from ..run import Run
from .causal_order import FACTS
from .result import Unmatched
from .rules import Rules

#: By key or tensor, in how many steps only this run has it, and the first of them.
Gaps = dict[Key, tuple[int, int]]


def check_use(left: Run, right: Run, rules: Rules) -> None:
    """Refuse rules with a part that has no effect.

    Raises:
        ValueError: a pattern matches nothing, two names become one, or nothing in common is compared.
    """
    rules.check_use(
        (*left.keys(), *right.keys(), *map(format_key, FACTS)),
        dict.fromkeys(key.name for key in compared_items(left) if key.source and key.name),
    )
    own, others = list(compared_items(left)), set(compared_items(right))
    taken: dict[Key, Key] = {}
    for key in own:
        first = taken.setdefault(rules.renamed(key), key)
        if first.name != key.name:
            new = rules.renamed(key).name
            raise ValueError(f"rename: {first.name!r} and {key.name!r} would both be called {new!r}; give a narrower pattern")
    common = {other: key for other, key in taken.items() if other in others}
    if not common:
        hint = "" if rules.rename else "; rename= (--rename) maps the names that differ"
        raise ValueError(f"the runs have no tensor and no value in common{hint}")
    if not any(_is_compared(key, other, rules) for other, key in (*common.items(), *((fact, fact) for fact in FACTS))):
        raise ValueError("only= and ignore= leave out all that the runs have in common")


def find_unmatched(
    left: Run, right: Run, rules: Rules, steps: tuple[Sequence[int], Sequence[int]], gaps: tuple[Gaps, Gaps]
) -> tuple[Unmatched, Unmatched]:
    """For each run the steps, tensors and values that the other one lacks."""
    own = {rules.renamed(key): key for key in compared_items(left)}
    others = {key: key for key in compared_items(right)}
    by_name = [{format_key(key): value for key, value in found.items()} for found in gaps]
    return (
        Unmatched(_less(steps[0], steps[1]), tuple(_lacking(own, others, rules, left.present(steps[0]))), by_name[0]),
        Unmatched(_less(steps[1], steps[0]), tuple(_lacking(others, own, rules, right.present(steps[1]))), by_name[1]),
    )


def _lacking(own: Mapping[Key, Key], others: Mapping[Key, Key], rules: Rules, present: Container[Key | None]) -> Iterator[str]:
    for other, key in own.items():
        if other not in others and key in present and _is_compared(key, other, rules):
            yield format_key(key)


def _less(steps: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(steps).difference(others)))


def compared_items(run: Run) -> Iterator[Key]:
    """Tensors, without a metric, and the keys of all other values."""
    for source in run.sources:
        yield from (Key(source, name, "") for name in run.tensors(source))
    yield from run.scalars


def item_of(key: Key) -> Key | None:
    """The item of :func:`compared_items` that a value belongs to; None for a built-in statistic of a tensor other than its count.

    The count stands for all statistics, because others may be measured less often.
    """
    if key.source not in n.TENSOR_SOURCES or key.metric not in (*VIEWS, COUNT):
        return key
    return key._replace(metric="") if key.metric == COUNT else None


def _is_compared(key: Key, other: Key, rules: Rules) -> bool:
    is_tensor = key.source in n.TENSOR_SOURCES and not key.metric
    metrics = tuple(VIEWS) if is_tensor else (key.metric,)
    return any(rules.tolerance(key._replace(metric=m), other._replace(metric=m)) is not None for m in metrics)
