"""Where two runs part: the first step, and in it the value that comes about first."""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...analysis.run import Run, load_run
from ...core import validation as check
from ...core.keys import format_key
from ...core.progress import ProgressBar
from ...runs.window import between, single_threaded
from .comparison import Comparison
from .result import Difference
from .rules import Patterns, Rules
from .unmatched import alone, check_use

#: After so many common steps the growth of a difference is told, and in the last one.
_LATER = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
#: So many steps at most.
_MOST = 8


def diff(
    a: Run | str | os.PathLike[str],
    b: Run | str | os.PathLike[str],
    rtol: float = 1e-5,
    atol: float = 0.0,
    *,
    tolerances: Mapping[str, float] | None = None,
    only: Patterns | None = None,
    ignore: Patterns | None = None,
    rename: Mapping[str, str] | None = None,
    first: int | None = None,
    last: int | None = None,
    strict: bool = False,
    progress: bool | None = None,
) -> Difference:
    """Compare two runs, such as of one seed before and after a change of the code, and find where they part.

    All that was recorded of the steps that both runs have is compared, up to the first step in which they part: the built-in statistics
    of all tensors, other metrics, what was logged by hand, learning rates, the loss scale, and whether the step was applied. NaN is equal
    to NaN. What tells of time, speed or memory is not compared, nor, where one run has steps that the other has not, what follows from
    the steps before, such as spike scores.

    Two values are the same if they are no further apart than ``atol + rtol * scale``. The scale is the larger absolute value; at least the
    rms for a mean, a hundredth of it for a standard deviation, and 1 for shares, cosines, scores, entropies and logits, which may be
    close to zero. Unless ``rtol`` is 0, two elements may lie on the other side of what counts as zero.

    Statistics of tensors are kept as float32, so that ``rtol=0`` asks for the same bits of the statistics; it does not show that the
    tensors have the same. While it works it sets torch to one thread, which is faster here.

    Args:
        a, b: run directories, or runs.
        rtol: how far two values may be apart, relative to the larger one.
        atol: how far they may be apart besides.
        tolerances: an ``rtol`` by pattern; the first pattern that is found in a key decides.
        only: a pattern, or several, of which one has to be found in a key; what is not compared by itself is then compared too.
        ignore: a pattern, or several, of which none may be found in it.
        rename: by pattern in the names of modules and parameters of ``a``, what stands in its place in ``b``, as for ``re.sub``.
        first, last: compare the steps from and to these only.
        strict: what only one of the runs has, be it a step, a tensor or a value, counts too.
        progress: whether to show a bar (if tqdm is installed); by default if stderr is a terminal.

    Raises:
        FileNotFoundError: there is no run.
        ValueError, TypeError: an argument is wrong, a pattern matches nothing, or the runs have nothing in common.
    """
    rules = Rules.of(rtol, atol, tolerances, only, ignore, rename)
    check.flag(strict=strict)
    with single_threaded(), _opened(a) as left, _opened(b) as right:
        names = ("a" if isinstance(a, Run) else os.fspath(a), "b" if isinstance(b, Run) else os.fspath(b))
        return _diff(left, right, names, rules, (first, last), strict, progress)


def _diff(
    left: Run,
    right: Run,
    names: tuple[str, str],
    rules: Rules,
    bounds: tuple[int | None, int | None],
    strict: bool,
    progress: bool | None,
) -> Difference:
    check_use(left, right, rules)
    steps = between(left.steps, *bounds), between(right.steps, *bounds)
    common = sorted(set(steps[0]) & set(steps[1]))
    if not common:
        raise ValueError(f"the runs have no step in common: the first has {_span(steps[0])}, the second {_span(steps[1])}")
    before = [between(run.steps, None, common[-1]) for run in (left, right)]
    rules = replace(rules, with_memory=before[0] == before[1])
    comparison = Comparison(left, right, rules)
    with ProgressBar(len(common), "diff", "step", progress) as bar:
        scan = comparison.scan(common, bar.advance)
    began, last = scan.onset, scan.steps[-1]
    onset, words = (None, "") if began is None else comparison.onset(began, scan.steps)
    if onset is not None:
        missing, comes_first = comparison.missing(onset, scan.gaps)
        words = (
            f"{missing} What differs follows from that, or has the same cause." if comes_first else f"{words} {missing}".strip()
        )
    partings, remark = ([], "") if scan.first is None else comparison.partings(scan.first)
    return Difference(
        runs=names,
        steps=tuple(scan.steps),
        first=partings[0] if partings else None,
        partings=tuple(partings),
        stages=comparison.stages(last),
        onset=onset,
        reading=" ".join(filter(None, (words, remark))),
        largest=comparison.largest(scan.largest[1]) if scan.largest[0] else None,
        growth={} if began is None else comparison.growth(_told(common, began, last)),
        alone=alone(left, right, rules, steps, scan.gaps),
        skipped=() if rules.only else tuple(format_key(key) for key in left.scalars if rules.leaves_out(key)),
        tags={} if began is None else _tags(left, right, began),
        strict=strict,
    )


@contextlib.contextmanager
def _opened(run: Run | str | os.PathLike[str]) -> Iterator[Run]:
    if isinstance(run, Run):
        yield run
    else:
        with contextlib.closing(load_run(run)) as opened:
            yield opened


def _span(steps: Sequence[int]) -> str:
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}" if steps else "none that was asked for"


def _told(common: Sequence[int], onset: int, last: int) -> list[int]:
    """Some steps from the onset of a difference on: those that come so many steps later, the first too far apart, and the last one."""
    begin = bisect_left(common, onset)
    later = [common[begin + number] for number in _LATER if begin + number < len(common)]
    chosen = {onset, last, common[-1]}
    room = _MOST - len(chosen)
    evenly = range(room) if len(later) > room else range(len(later))
    return sorted(chosen.union(later[number * len(later) // len(evenly)] for number in evenly))


def _alike(a: Any, b: Any) -> bool:
    return bool(a == b) or (a != a and b != b)  # NaN is NaN


def _tags(left: Run, right: Run, step: int) -> dict[str, tuple[Any, Any]]:
    own, others = (run.context(step).get("tags", {}) for run in (left, right))
    return {name: (own[name], others[name]) for name in own if name in others and not _alike(own[name], others[name])}
