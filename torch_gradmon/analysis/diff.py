"""Two runs side by side: where they part, and in what."""

from __future__ import annotations

import contextlib
import json
import os
import textwrap
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..core import validation as check
from ..core.formatting import ProgressBar, ShownAsText, cut_start, listed, part_of, strict
from ..core.keys import SUMMARY, format_key
from ..runs.reader import RunReader, between, single_threaded
from .comparison import Comparison, Divergence, Patterns, Rules, StageCounts, Unmatched
from .run import Run, optimizer_settings, read_run, settings_that_differ


@dataclass(frozen=True, repr=False)
class RunDiff(ShownAsText):
    """Where two runs diverge; ``str()`` gives it as text on one screen.

    Attributes:
        runs: their names.
        steps: the common steps that were compared, in this order, up to the first divergence.
        first: of the first step that diverges, the value that is computed first; None without a divergence.
        divergences: all divergent values of that step, one for each tensor, in the order of computation.
        stages: what was compared in that step, or in the last one without a divergence.
        onset: the first difference of any size in the compared steps; None without any.
        interpretation: what the onset points to; empty without a difference.
        largest: the largest relative difference within the tolerance before the runs diverge.
        growth: by key of a whole-model value, the difference in some steps from the onset on.
        unmatched: what only the first run has, and what only the second.
        not_compared: values left out: those of clocks, and, if the runs have different steps, those that follow from earlier steps.
        settings: by name, what the first and the second run were made with and do not share, as text.
        tags: tags of the onset's step that differ.
        strict: whether unmatched values count as a divergence.
    """

    runs: tuple[str, str]
    steps: tuple[int, ...]
    first: Divergence | None
    divergences: tuple[Divergence, ...]
    stages: Mapping[str, StageCounts]
    onset: Divergence | None
    interpretation: str
    largest: Divergence | None
    growth: Mapping[str, Mapping[int, float]]
    unmatched: tuple[Unmatched, Unmatched]
    not_compared: tuple[str, ...] = ()
    settings: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    tags: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    strict: bool = False

    def __str__(self) -> str:
        compared = _table(f"compared in step {self.steps[-1]}", ("tensors", "values", "largest"), stage_rows(self))
        tables = [*([] if self.first is None else [_divergences(self)]), compared, _growth(self)]
        parts = [_wrapped(opening(self)), *tables, _wrapped(unmatched(self))]
        return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)

    @property
    def diverges(self) -> bool:
        """Whether the runs diverge; if ``strict``, also whether one of them has unmatched values."""
        return self.first is not None or (self.strict and any(self.unmatched))

    @property
    def exit_code(self) -> int:
        """For CI: 0 if the runs are equal within the tolerance, 1 otherwise."""
        return int(self.diverges)

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON; numbers that are not finite are strings, as in a :class:`JsonlSink`."""
        found = {
            "runs": list(self.runs),
            "parts": self.diverges,
            "strict": self.strict,
            "steps": {"compared": len(self.steps), "first": self.steps[0], "last": self.steps[-1]},
            "first": self.first and asdict(self.first),
            "partings": [asdict(divergence) for divergence in self.divergences],
            "stages": {name: asdict(stage) for name, stage in self.stages.items()},
            "onset": self.onset and asdict(self.onset),
            "reading": self.interpretation,
            "largest_within_tolerance": self.largest and asdict(self.largest),
            "growth": {key: {str(step): v for step, v in values.items()} for key, values in self.growth.items()},
            "alone": [
                {"steps": list(own.steps), "keys": list(own.keys), "gaps": {k: list(v) for k, v in own.gaps.items()}}
                for own in self.unmatched
            ],
            "not_compared": list(self.not_compared),
            "settings": {name: list(values) for name, values in self.settings.items()},
            "tags": {name: list(values) for name, values in self.tags.items()},
        }
        return {name: strict(value) for name, value in found.items()}

    def to_json(self) -> str:
        """The result as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False, default=str)


# --- The same as text, on one screen ---

_WIDTH, _KEY, _NUMBER = 100, 58, 13
#: Divergences that are listed, and names of unmatched values.
_DIVERGENCES, _NAMES = 6, 3


def opening(result: RunDiff) -> Iterator[str]:
    """The sentences on whether and where the runs diverge, and what that points to."""
    yield from _equal(result) if result.first is None else _divergent(result)
    sides = ((name, *(cut_start(side, 30) or "none" for side in values)) for name, values in result.settings.items())
    if result.settings:
        yield f"settings that differ: {'; '.join(f'{name} {own} and {other}' for name, own, other in sides)}"


def _wrapped(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()))
        yield from textwrap.wrap(line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _equal(result: RunDiff) -> Iterator[str]:
    a, b = result.runs
    steps = result.steps
    span = f"{len(steps)} steps, {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]} only"
    yield f"{a} and {b} are equal within the tolerance, in all that both have ({span})"
    if result.largest is None:
        yield "none of the compared values differs at all"
    else:
        yield f"the largest difference is {number(result.largest.relative)}: {_on_one_line(result.largest)}"
    count = sum(len(own.keys) for own in result.unmatched)
    if result.diverges:
        yield "but what only one of them has counts too (strict), see below"
    elif count:
        yield f"but {count} tensors and values are in one of them only: see below, --rename and --strict"


def _divergent(result: RunDiff) -> Iterator[str]:
    first, onset = result.first, result.onset
    assert first is not None
    assert onset is not None, "divergent values differ"
    yield f"{result.runs[0]} and {result.runs[1]} diverge in step {first.step}: {first.key}"
    also = "" if first.other == first.key else f", in the second run {first.other}"
    yield f"  {' and '.join(both(first))}, relative difference {number(first.relative)} (tolerance {first.rtol:.3g}){also}"
    if (onset.step, onset.key) != (first.step, first.key):
        yield f"a smaller difference, {number(onset.relative)}, exists since {_on_one_line(onset)}"
    yield result.interpretation
    for name, (own, other) in result.tags.items():
        yield f"tags of step {onset.step} that differ: {name} {cut_start(str(own), 30)} and {cut_start(str(other), 30)}"


def _on_one_line(divergence: Divergence) -> str:
    return f"step {divergence.step}, {divergence.key}, {' and '.join(both(divergence))}"


def both(divergence: Divergence) -> tuple[str, str]:
    """Both values, with as many digits as show the difference."""
    for digits in (6, 9):
        a, b = f"{divergence.a:.{digits}g}", f"{divergence.b:.{digits}g}"
        if a != b:
            return a, b
    return repr(divergence.a), repr(divergence.b)


def _table(
    head: str, titles: Sequence[str], rows: Iterable[Sequence[str]], label: int = _KEY, width: int = _NUMBER
) -> Iterator[str]:
    yield f"{head:<{label}}" + "".join(f"{title:>{width}}" for title in titles)
    for name, *cells in rows:
        yield f"  {cut_start(name, label - 3):<{label - 2}}" + "".join(f"{cell:>{width}}" for cell in cells)


def _divergences(result: RunDiff) -> Iterator[str]:
    head = f"diverges in step {result.steps[-1]}, in the order of the step"
    shown = ((each.key, *both(each), number(each.relative)) for each in result.divergences[:_DIVERGENCES])
    yield from _table(head, ("first run", "second run", "relative"), shown)
    if (more := len(result.divergences) - _DIVERGENCES) > 0:
        yield f"  and {more} more"


def stage_rows(result: RunDiff) -> list[list[str]]:
    """For each stage its name, how many tensors and values diverge, and the largest difference."""
    return [
        [name, part_of(stage.tensors_part, stage.tensors), part_of(stage.values_part, stage.values), number(stage.largest)]
        for name, stage in result.stages.items()
    ]


def _growth(result: RunDiff) -> Iterator[str]:
    steps = sorted({step for values in result.growth.values() for step in values})
    if len(steps) < 2:
        return
    width = max(9, len(str(steps[-1])) + 2)
    rows = (
        (key.removeprefix(f"{SUMMARY}/"), *(number(values[step]) if step in values else "-" for step in steps))
        for key, values in result.growth.items()
    )
    yield from _table("relative difference in step", list(map(str, steps)), rows, _WIDTH - 8 * width, width)


def unmatched(result: RunDiff) -> Iterator[str]:
    """What only one of the runs has, and what was not compared."""
    for run, own in zip(result.runs, result.unmatched, strict=True):
        yield from _of_one(run, own)
    if result.not_compared:
        yield f"not compared: {listed(result.not_compared, _NAMES)}"


def _of_one(run: str, own: Unmatched) -> Iterator[str]:
    if own.steps:
        first, last, count = own.steps[0], own.steps[-1], len(own.steps)
        yield f"only {run} has step {first}" if count == 1 else f"only {run} has {count} steps between {first} and {last}"
    if own.keys:
        yield f"only {run} has {listed(own.keys, _NAMES)}"
    if own.gaps:
        key, (count, step) = next(iter(own.gaps.items()))
        more = f", and {len(own.gaps) - 1} more such" if len(own.gaps) > 1 else ""
        yield f"only {run} has {key} in {count} of these steps, first in {step}{more}"


def number(value: float) -> str:
    """A relative difference."""
    return f"{value:.1e}" if value else "0"


# --- Where two runs diverge: the first step, and in it the value that is computed first ---

#: The growth of a difference is shown after these numbers of common steps, and in the last one,
_LATER = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
#: in this many steps at most.
_MOST = 8


def diff_runs(
    a: Run | str | os.PathLike[str],
    b: Run | str | os.PathLike[str],
    rtol: float = 1e-5,
    atol: float = 0.0,
    *,
    tolerances: Mapping[str, float] | None = None,
    keys: Patterns | None = None,
    ignore: Patterns | None = None,
    rename: Mapping[str, str] | None = None,
    first: int | None = None,
    last: int | None = None,
    strict: bool = False,
    progress: bool | None = None,
) -> RunDiff:
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
        keys: one or several patterns; only keys with one of them are compared, including those that are not compared by default.
        ignore: one or several patterns; keys with one of them are not compared.
        rename: by pattern in the names of modules and parameters of ``a``, its replacement in ``b``, as for ``re.sub``.
        first, last: compare only steps from and to these.
        strict: whether a step, tensor or value that only one run has counts as a divergence.
        progress: whether to show a bar (if tqdm is installed); by default if stderr is a terminal.

    Raises:
        FileNotFoundError: there is no run.
        ValueError, TypeError: an argument is wrong, a pattern matches nothing, or the runs have nothing in common.
    """
    rules = Rules(rtol, atol, tolerances, keys, ignore, rename)
    check.flag(strict=strict)
    with single_threaded(), contextlib.ExitStack() as opened:
        left, right = (
            run._reader if isinstance(run, Run) else opened.enter_context(contextlib.closing(read_run(run))) for run in (a, b)
        )
        names = "a" if isinstance(a, Run) else os.fspath(a), "b" if isinstance(b, Run) else os.fspath(b)
        return _diff(left, right, names, rules, (first, last), strict, progress)


def _diff(
    left: RunReader,
    right: RunReader,
    names: tuple[str, str],
    rules: Rules,
    bounds: tuple[int | None, int | None],
    strict: bool,
    progress: bool | None,
) -> RunDiff:
    comparison = Comparison(left, right, rules)
    steps = between(left.steps, *bounds), between(right.steps, *bounds)
    common = sorted(set(steps[0]) & set(steps[1]))
    if not common:
        raise ValueError(f"the runs have no step in common: the first has {_span(steps[0])}, the second {_span(steps[1])}")
    rules.with_memory = between(left.steps, None, common[-1]) == between(right.steps, None, common[-1])
    with ProgressBar(len(common), "diff", "step", progress) as bar:
        comparison.scan(common, bar.advance)
    settings, began = settings_that_differ(left.meta, right.meta), comparison.onset
    of_optimizers = optimizer_settings(left.meta) | optimizer_settings(right.meta)
    onset, meaning = comparison.first_difference([name for name in settings if name in of_optimizers])
    divergences, remark = comparison.divergences()
    return RunDiff(
        runs=names,
        steps=tuple(comparison.steps),
        first=divergences[0] if divergences else None,
        divergences=tuple(divergences),
        stages=comparison.stages(comparison.steps[-1]),
        onset=onset,
        interpretation=" ".join(filter(None, (meaning, remark))),
        largest=comparison.largest(),
        growth={} if began is None else comparison.growth(_growth_steps(common, began, comparison.steps[-1])),
        unmatched=comparison.unmatched(steps),
        not_compared=() if rules.keys else tuple(format_key(key) for key in left.scalars if rules.leaves_out(key)),
        settings=settings,
        tags={} if began is None else _tags(left, right, began),
        strict=strict,
    )


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


def _tags(left: RunReader, right: RunReader, step: int) -> dict[str, tuple[Any, Any]]:
    own, others = (run.context(step).get("tags", {}) for run in (left, right))
    both = {name: (value, others[name]) for name, value in own.items() if name in others}
    return {name: (a, b) for name, (a, b) in both.items() if a != b and (a == a or b == b)}  # NaN is as NaN
