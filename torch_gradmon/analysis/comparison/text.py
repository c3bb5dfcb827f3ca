"""A comparison of two runs in words, on one screen."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...core.keys import SUMMARY

if TYPE_CHECKING:
    from .result import Difference, Lone, Parting

_WIDTH, _KEY, _NUMBER = 100, 58, 13
#: Partings that are told one by one, and things that only one run has.
_TOLD, _LONE = 6, 3


def told(difference: Difference) -> str:
    """All of it."""
    parts = [_wrapped(opening(difference))]
    if difference.first is not None:
        parts.append(_partings(difference))
    parts += [_stages(difference), _growth(difference), _wrapped(lone(difference))]
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)


def opening(difference: Difference) -> Iterator[str]:
    """Whether and where they part, and what that points to, by sentences."""
    return _same(difference) if difference.first is None else _parting(difference)


def _wrapped(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()))
        yield from textwrap.wrap(line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _same(difference: Difference) -> Iterator[str]:
    a, b = difference.runs
    steps = difference.steps
    span = f"{len(steps)} steps, {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]} only"
    yield f"{a} and {b} are the same within the tolerance, in what both have ({span})"
    if difference.largest is None:
        yield "none of the values compared differs at all"
    else:
        yield f"the largest difference is {number(difference.largest.relative)}: {_in_a_line(difference.largest)}"
    lone = sum(len(each.keys) for each in difference.alone)
    if difference.parts:
        yield "but what only one of them has counts too (strict), see below"
    elif lone:
        yield f"but {lone} tensors and values are in one of them only: see below, --rename and --strict"


def _parting(difference: Difference) -> Iterator[str]:
    first, onset = difference.first, difference.onset
    assert first is not None
    assert onset is not None, "what parts differs"
    yield f"{difference.runs[0]} and {difference.runs[1]} part in step {first.step}: {first.key}"
    also = "" if first.other == first.key else f", in the second run {first.other}"
    yield f"  {_values(first)}, relative difference {number(first.relative)} (tolerance {first.rtol:.3g}){also}"
    if (onset.step, onset.key) != (first.step, first.key):
        yield f"a smaller difference, {number(onset.relative)}, is there since {_in_a_line(onset)}"
    yield difference.reading
    for name, (own, other) in difference.tags.items():
        yield f"tags of step {onset.step} that are not the same: {name} {_cut(str(own), 30)} and {_cut(str(other), 30)}"


def _in_a_line(parting: Parting) -> str:
    return f"step {parting.step}, {parting.key}, {_values(parting)}"


def _values(parting: Parting) -> str:
    return " and ".join(both(parting))


def both(parting: Parting) -> tuple[str, str]:
    """Both values, with as many digits as it takes to tell them apart."""
    for digits in (6, 9):
        a, b = f"{parting.a:.{digits}g}", f"{parting.b:.{digits}g}"
        if a != b:
            return a, b
    return repr(parting.a), repr(parting.b)


def _partings(difference: Difference) -> Iterator[str]:
    """What parts in the step, in the order in which it comes about."""
    titles = "".join(f"{title:>{_NUMBER}}" for title in ("first run", "second run", "relative"))
    yield f"{f'parts in step {difference.steps[-1]}, in the order of the step':<{_KEY}}{titles}"
    for parting in difference.partings[:_TOLD]:
        cells = "".join(f"{text:>{_NUMBER}}" for text in (*both(parting), number(parting.relative)))
        yield f"  {_cut(parting.key, _KEY - 3):<{_KEY - 2}}{cells}"
    more = len(difference.partings) - _TOLD
    if more > 0:
        yield f"  and {more} more"


def _stages(difference: Difference) -> Iterator[str]:
    """What was compared in the last step."""
    yield f"{f'compared in step {difference.steps[-1]}':<{_KEY}}{'tensors':>{_NUMBER}}{'values':>{_NUMBER}}{'largest':>{_NUMBER}}"
    for name, stage in difference.stages.items():
        cells = (share(stage.tensors_part, stage.tensors), share(stage.values_part, stage.values), number(stage.largest))
        yield f"  {name:<{_KEY - 2}}" + "".join(f"{cell:>{_NUMBER}}" for cell in cells)


def share(part: int, of: int) -> str:
    """How many of what was compared part."""
    return "-" if not of else f"{part} of {of}" if part else f"{of} same"


def _growth(difference: Difference) -> Iterator[str]:
    """How far the whole model is apart in later steps."""
    steps = sorted({step for values in difference.growth.values() for step in values})
    if len(steps) < 2:
        return
    width = max(9, len(str(steps[-1])) + 2)
    label = _WIDTH - 8 * width
    yield f"{'relative difference in step':<{label}}" + "".join(f"{step:>{width}}" for step in steps)
    for key, values in difference.growth.items():
        cells = "".join(f"{number(values[step]) if step in values else '-':>{width}}" for step in steps)
        yield f"  {_cut(key.removeprefix(f'{SUMMARY}/'), label - 3):<{label - 2}}{cells}"


def lone(difference: Difference) -> Iterator[str]:
    """What one of them has alone, and what was not compared."""
    for run, alone in zip(difference.runs, difference.alone, strict=True):
        yield from _of_one(run, alone)
    if difference.skipped:
        yield f"not compared: {_some(difference.skipped)}"


def _of_one(run: str, lone: Lone) -> Iterator[str]:
    if lone.steps:
        count = len(lone.steps)
        yield (
            f"only {run} has step {lone.steps[0]}"
            if count == 1
            else (f"only {run} has {count} steps between {lone.steps[0]} and {lone.steps[-1]}")
        )
    if lone.keys:
        yield f"only {run} has {_some(lone.keys)}"
    if lone.gaps:
        key, (count, step) = next(iter(lone.gaps.items()))
        more = f", and {len(lone.gaps) - 1} more such" if len(lone.gaps) > 1 else ""
        yield f"only {run} has {key} in {count} of these steps, first in {step}{more}"


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _LONE} more" if len(names) > _LONE else ""
    return f"{', '.join(names[:_LONE])}{more}"


def number(value: float) -> str:
    """A relative difference in words."""
    return f"{value:.1e}" if value else "0"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"…{text[1 - width :]}"
