"""What a run can be turned into."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .. import check
from ..bar import Bar
from ..errors import display, nearest
from ..window import between, is_of_layer, single_threaded
from . import files
from .frames import Frame, Readable, Steps, Tensors

TABLES = ("tensors", "steps")


class ExportMethods:
    """Methods of :class:`torch_gradmon.run.Run`."""

    def export(
        self: Readable,
        path: str | os.PathLike[str],
        table: str | None = None,
        *,
        sources: str | Sequence[str] | None = None,
        first: int | None = None,
        last: int | None = None,
        force: bool = False,
        progress: bool | None = None,
    ) -> list[Path]:
        """Write the run into files, some steps at a time, so that memory does not grow with the run.

        There are two tables. ``tensors`` has a row for each tensor in each step, with the columns step, source, name, all built-in
        metrics, the number of elements (``count``) and other metrics of tensors: ``row[metric]`` is ``run.series("source/name/metric")
        [step]``. ``steps`` has a row for each step: the time, whether the step was applied, learning rates, the loss scale, values of the
        whole model, what was logged by hand, and tags, spikes and other facts as JSON. A column whose name is taken gets an underscore.

        Args:
            path: of the file; its ending, .parquet, .csv or .jsonl, says how it is written. Parquet needs pyarrow.
            table: which of the two; None for both: ``tensors`` into ``path``, and ``steps`` beside it, ``out.steps.parquet``.
            sources: the sources of ``tensors``, such as ``"gradient_before_clip"``; None for all.
            first, last: the steps from and to these only.
            force: replace files that are there.
            progress: whether to show a bar (if tqdm is installed); by default if stderr is a terminal.

        Returns:
            The paths of the files. They are there as a whole or not at all.

        Raises:
            ValueError, TypeError: an argument is wrong.
            FileExistsError: a file is there already.
            ImportError: pyarrow is missing.
            OSError: a file cannot be written.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path must be the path of a file, got {display(path)}")
        check.flag(force=force)
        main = Path(path)
        chosen = TABLES if table is None else (table,)
        paths = [main, main.with_name(f"{main.stem}.steps{main.suffix}")][: len(chosen)]
        for each in paths:
            files.check_path(each, force)
        if sources is not None and table == "steps":
            raise ValueError("sources chooses among tensors, of which the table of steps has none; leave it out")
        frames = [_frame(self, each, sources, first, last) for each in chosen]
        with single_threaded(), Bar(len(chosen) * len(_chosen(self, first, last)), "export", "step", progress) as bar:
            files.write(dict(zip(paths, frames, strict=True)), force, bar.advance)
        return paths

    def to_arrow(
        self: Readable,
        table: str = "steps",
        *,
        sources: str | Sequence[str] | None = None,
        first: int | None = None,
        last: int | None = None,
    ) -> Any:
        """One of the two tables of :meth:`export` as a ``pyarrow.Table``. What is not there is null, and NaN is NaN.

        Args:
            table: ``"steps"`` or ``"tensors"``, which may be large: a hundred bytes for each tensor in each step.
            sources, first, last: see :meth:`export`.

        Raises:
            ValueError, TypeError: an argument is wrong.
            ImportError: pyarrow is missing.
        """
        return _table(_frame(self, table, sources, first, last), "to_arrow()", "pyarrow")

    def to_pandas(
        self: Readable,
        table: str = "steps",
        *,
        sources: str | Sequence[str] | None = None,
        first: int | None = None,
        last: int | None = None,
    ) -> Any:
        """One of the two tables of :meth:`export` as a ``pandas.DataFrame``. What is not there is NaN; :meth:`to_arrow` tells it apart.

        Sources and names are categories, in the order of the model; the time is that of UTC.

        Args:
            table, sources, first, last: see :meth:`to_arrow`.

        Raises:
            ValueError, TypeError: an argument is wrong.
            ImportError: pyarrow or pandas is missing.
        """
        found = _table(_frame(self, table, sources, first, last), "to_pandas()", "pyarrow", "pandas")
        with single_threaded():
            return found.to_pandas()


def _table(frame: Frame, what: str, *packages: str) -> Any:
    """The frame as a ``pyarrow.Table``, for ``what``, which needs ``packages``."""
    for package in packages:
        if find_spec(package) is None:
            raise ImportError(f'{what} needs {package}: pip install "torch_gradmon[export]"')
    from .arrow import table

    with single_threaded():
        return table(frame)


def _chosen(run: Readable, first: int | None, last: int | None) -> list[int]:
    steps = between(run.steps, first, last)
    if not steps and run.steps:
        raise ValueError(f"the run has no step between {first} and {last}; it has {run.steps[0]} to {run.steps[-1]}")
    return steps


def _frame(run: Readable, table: str, sources: str | Sequence[str] | None, first: int | None, last: int | None) -> Frame:
    check.one_of("table", table, TABLES)
    steps = _chosen(run, first, last)
    if table == "steps":
        return Steps(run, steps)
    return Tensors(run, steps, None if sources is None else _known(run, [sources] if isinstance(sources, str) else sources))


def _known(run: Readable, sources: Sequence[str]) -> Sequence[str]:
    there = {*run.sources, *(key.source for key in run.scalars if is_of_layer(key))}
    for source in sources:
        if source not in there:
            raise ValueError(f"the run has nothing of the source {source!r}{nearest(str(source), there)}")
    return sources
