"""Where two runs diverge: the first step, and in it the value that is computed first."""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...core import validation as check
from ...core.keys import format_key
from ...core.progress import ProgressBar
from ...runs.reader import between, single_threaded
from ..run import Run, load_run
from ..run_settings import optimizer_settings, settings_that_differ
from .comparison import Comparison
from .difference import Difference
from .rules import Patterns, Rules
from .unmatched import check_use, find_unmatched

#: The growth of a difference is shown after these numbers of common steps, and in the last one,
_LATER = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
#: in this many steps at most.
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
    """Compare two runs, such as of one seed before and after a change of the code, and find where they diverge.

    Everything recorded in the common steps is compared, up to the first step that diverges: the built-in statistics of all tensors, other
    metrics, logged values, learning rates, the loss scale, and whether the step was applied. NaN equals NaN. Clocks, speeds and memory are
    not compared. If one run has steps that the other lacks, values that follow from earlier steps, such as spike scores, are not compared
    either.

    Two values are equal if they differ by at most ``atol + rtol * scale``. The scale is the larger absolute value. It is at least the rms
    for a mean, a hundredth of it for a standard deviation, and 1 for shares, cosines, scores, entropies and logits, which may be close to
    zero. Unless ``rtol`` is 0, two elements may lie on the other side of the threshold for near-zero elements.

    Statistics of tensors are stored as float32, so ``rtol=0`` compares the bits of the statistics, not of the tensors. While it works,
    torch is set to one thread, which is faster here.

    Args:
        a, b: run directories, or runs.
        rtol: tolerated difference relative to the larger value.
        atol: tolerated absolute difference, added to that.
        tolerances: an ``rtol`` by pattern; the first pattern found in a key decides.
        only: one or several patterns; only keys with one of them are compared, including those that are not compared by default.
        ignore: one or several patterns; keys with one of them are not compared.
        rename: by pattern in the names of modules and parameters of ``a``, its replacement in ``b``, as for ``re.sub``.
        first, last: compare only steps from and to these.
        strict: whether a step, tensor or value that only one run has counts as a divergence.
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
    settings = settings_that_differ(left.meta, right.meta)
    of_optimizers = [name for name in settings if name in optimizer_settings(left.meta) | optimizer_settings(right.meta)]
    with ProgressBar(len(common), "diff", "step", progress) as bar:
        scan = comparison.scan(common, bar.advance)
    began, last = scan.onset, scan.steps[-1]
    onset, meaning = (None, "") if began is None else comparison.onset(began, scan.steps, of_optimizers)
    if onset is not None:
        missing, comes_first = comparison.missing(onset, scan.gaps)
        because = "The differences follow from that, or have the same cause."
        meaning = f"{missing} {because}" if comes_first else f"{meaning} {missing}".strip()
    divergences, remark = ([], "") if scan.first is None else comparison.divergences(scan.first)
    return Difference(
        runs=names,
        steps=tuple(scan.steps),
        first=divergences[0] if divergences else None,
        divergences=tuple(divergences),
        stages=comparison.stages(last),
        onset=onset,
        interpretation=" ".join(filter(None, (meaning, remark))),
        largest=comparison.largest(scan.largest[1]) if scan.largest[0] else None,
        growth={} if began is None else comparison.growth(_growth_steps(common, began, last)),
        unmatched=find_unmatched(left, right, rules, steps, scan.gaps),
        not_compared=() if rules.only else tuple(format_key(key) for key in left.scalars if rules.leaves_out(key)),
        settings=settings,
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
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}" if steps else "none of the selected ones"


def _growth_steps(common: Sequence[int], onset: int, last: int) -> list[int]:
    """Some steps from the onset on: at increasing distances, and the last compared and the last common one."""
    begin = bisect_left(common, onset)
    later = [common[begin + number] for number in _LATER if begin + number < len(common)]
    chosen = {onset, last, common[-1]}
    room = _MOST - len(chosen)
    evenly = range(room) if len(later) > room else range(len(later))
    return sorted(chosen.union(later[number * len(later) // len(evenly)] for number in evenly))


def _equal(a: Any, b: Any) -> bool:
    return bool(a == b) or (a != a and b != b)  # NaN is NaN


def _tags(left: Run, right: Run, step: int) -> dict[str, tuple[Any, Any]]:
    own, others = (run.context(step).get("tags", {}) for run in (left, right))
    return {name: (own[name], others[name]) for name in own if name in others and not _equal(own[name], others[name])}
