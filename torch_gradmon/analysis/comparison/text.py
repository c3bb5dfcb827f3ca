"""The comparison of two runs as text, on one screen."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from ...core.formatting import cut_start, listed, part_of
from ...core.keys import SUMMARY
from .result import ComparisonResult, Divergence, Unmatched

_WIDTH, _KEY, _NUMBER = 100, 58, 13
#: Divergences that are listed, and names of unmatched values.
_DIVERGENCES, _NAMES = 6, 3


def to_text(result: ComparisonResult) -> str:
    """The comparison as text."""
    parts = [_wrapped(opening(result))]
    if result.first is not None:
        parts.append(_divergences(result))
    parts += [_stages(result), _growth(result), _wrapped(unmatched(result))]
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)


def opening(result: ComparisonResult) -> Iterator[str]:
    """The sentences on whether and where the runs diverge, and what that points to."""
    yield from _equal(result) if result.first is None else _divergent(result)
    if result.settings:
        both = (
            f"{name} {cut_start(own, 30) or 'none'} and {cut_start(other, 30) or 'none'}"
            for name, (own, other) in result.settings.items()
        )
        yield f"settings that differ: {'; '.join(both)}"


def _wrapped(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()))
        yield from textwrap.wrap(line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _equal(result: ComparisonResult) -> Iterator[str]:
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


def _divergent(result: ComparisonResult) -> Iterator[str]:
    first, onset = result.first, result.onset
    assert first is not None
    assert onset is not None, "divergent values differ"
    yield f"{result.runs[0]} and {result.runs[1]} diverge in step {first.step}: {first.key}"
    also = "" if first.other == first.key else f", in the second run {first.other}"
    yield f"  {_values(first)}, relative difference {number(first.relative)} (tolerance {first.rtol:.3g}){also}"
    if (onset.step, onset.key) != (first.step, first.key):
        yield f"a smaller difference, {number(onset.relative)}, exists since {_on_one_line(onset)}"
    yield result.interpretation
    for name, (own, other) in result.tags.items():
        yield f"tags of step {onset.step} that differ: {name} {cut_start(str(own), 30)} and {cut_start(str(other), 30)}"


def _on_one_line(divergence: Divergence) -> str:
    return f"step {divergence.step}, {divergence.key}, {_values(divergence)}"


def _values(divergence: Divergence) -> str:
    return " and ".join(both(divergence))


def both(divergence: Divergence) -> tuple[str, str]:
    """Both values, with as many digits as show the difference."""
    for digits in (6, 9):
        a, b = f"{divergence.a:.{digits}g}", f"{divergence.b:.{digits}g}"
        if a != b:
            return a, b
    return repr(divergence.a), repr(divergence.b)


def _divergences(result: ComparisonResult) -> Iterator[str]:
    """The divergent values of the last step, in the order of computation."""
    titles = "".join(f"{title:>{_NUMBER}}" for title in ("first run", "second run", "relative"))
    yield f"{f'diverges in step {result.steps[-1]}, in the order of the step':<{_KEY}}{titles}"
    for divergence in result.divergences[:_DIVERGENCES]:
        cells = "".join(f"{text:>{_NUMBER}}" for text in (*both(divergence), number(divergence.relative)))
        yield f"  {cut_start(divergence.key, _KEY - 3):<{_KEY - 2}}{cells}"
    more = len(result.divergences) - _DIVERGENCES
    if more > 0:
        yield f"  and {more} more"


def _stages(result: ComparisonResult) -> Iterator[str]:
    """What was compared in the last step."""
    titles = "".join(f"{title:>{_NUMBER}}" for title in ("tensors", "values", "largest"))
    yield f"{f'compared in step {result.steps[-1]}':<{_KEY}}{titles}"
    for row in stage_rows(result):
        yield f"  {row[0]:<{_KEY - 2}}" + "".join(f"{cell:>{_NUMBER}}" for cell in row[1:])


def stage_rows(result: ComparisonResult) -> list[list[str]]:
    """For each stage its name, how many tensors and values diverge, and the largest difference."""
    return [
        [name, part_of(stage.tensors_part, stage.tensors), part_of(stage.values_part, stage.values), number(stage.largest)]
        for name, stage in result.stages.items()
    ]


def _growth(result: ComparisonResult) -> Iterator[str]:
    """The differences of the whole model in later steps."""
    steps = sorted({step for values in result.growth.values() for step in values})
    if len(steps) < 2:
        return
    width = max(9, len(str(steps[-1])) + 2)
    label = _WIDTH - 8 * width
    yield f"{'relative difference in step':<{label}}" + "".join(f"{step:>{width}}" for step in steps)
    for key, values in result.growth.items():
        cells = "".join(f"{number(values[step]) if step in values else '-':>{width}}" for step in steps)
        yield f"  {cut_start(key.removeprefix(f'{SUMMARY}/'), label - 3):<{label - 2}}{cells}"


def unmatched(result: ComparisonResult) -> Iterator[str]:
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
