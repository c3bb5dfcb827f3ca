"""The two tables that a run can be turned into: one of tensors, and one of steps."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from ...core import validation as check
from ...core.errors import nearest
from ..window import between, is_of_layer, single_threaded
from .frames import Frame, ReadableRun, StepFrame, TensorFrame

TABLES = ("tensors", "steps")


def table_of(frame: Frame, what: str, *packages: str) -> Any:
    """The frame as a ``pyarrow.Table``, for ``what``, which needs ``packages``."""
    for package in packages:
        if find_spec(package) is None:
            raise ImportError(f'{what} needs {package}: pip install "torch_gradmon[export]"')
    from .arrow import table

    with single_threaded():
        return table(frame)


def chosen_steps(run: ReadableRun, first: int | None, last: int | None) -> list[int]:
    """The steps of the run from ``first`` to ``last``.

    Raises:
        ValueError: there is none.
    """
    steps = between(run.steps, first, last)
    if not steps and run.steps:
        raise ValueError(f"the run has no step between {first} and {last}; it has {run.steps[0]} to {run.steps[-1]}")
    return steps


def frame_of(run: ReadableRun, table: str, sources: str | Sequence[str] | None, first: int | None, last: int | None) -> Frame:
    """One of the two tables.

    Raises:
        ValueError: there is no such table, step or source.
    """
    check.one_of("table", table, TABLES)
    steps = chosen_steps(run, first, last)
    if table == "steps":
        return StepFrame(run, steps)
    return TensorFrame(run, steps, None if sources is None else _known(run, [sources] if isinstance(sources, str) else sources))


def _known(run: ReadableRun, sources: Sequence[str]) -> Sequence[str]:
    there = {*run.sources, *(key.source for key in run.scalars if is_of_layer(key))}
    for source in sources:
        if source not in there:
            raise ValueError(f"the run has nothing of the source {source!r}{nearest(str(source), there)}")
    return sources
