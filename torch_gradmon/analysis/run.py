"""A run on disk, with its plots and exports."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import keys as n
from ..core.errors import display
from ..core.formatting import ProgressBar, listed, printable
from ..core.records import Chart, Engine, SpikeEvent, StepView, before_schedule
from ..runs import export as files
from ..runs.format import is_run
from ..runs.reader import RunReader, between, single_threaded
from ..step.summary import top_shares
from .spike_report import explain, suspects

if TYPE_CHECKING:
    from .diagnosis import Diagnosis

# --- What a run was made with: model, optimizers, torch ---

#: Settings of an optimizer that are about how it computes, not what.
_INTERNAL = frozenset({"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "maximize"})
#: The rate that a schedule multiplies, which stands for ``lr`` already.
_TWICE = "initial_lr"


def settings_of(meta: Mapping[str, Any]) -> dict[str, str]:
    """What a run was made with, as text: different values of several parameter groups stand one after the other."""
    return {name: _joined(values) for name, values in _values(meta).items() if name not in _INTERNAL}


def settings_that_differ(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The settings by name that two runs with these facts do not share, as text; empty for what one of them lacks."""
    own, others = _values(first), _values(second)
    found = {}
    for name in {**own, **others}:
        sides = own.get(name, []), others.get(name, [])
        if sides[0] != sides[1] and (all(sides) or name != "lr"):  # one on a device is not known
            texts = _joined(sides[0]), _joined(sides[1])
            found[name] = texts if texts[0] != texts[1] else (" | ".join(sides[0]), " | ".join(sides[1]))
    return found


def optimizer_settings(meta: Mapping[str, Any]) -> frozenset[str]:
    """The names of the settings of its optimizers."""
    groups = meta.get("optimizers") or ()
    return frozenset({"optimizer"}.union(*(group["settings"] for group in groups)))


def _values(meta: Mapping[str, Any]) -> dict[str, list[str]]:
    """The settings by name: those of optimizers for each group."""
    groups = meta.get("optimizers") or ()
    found: dict[str, list[str]] = {"model": [str(meta.get("model", ""))], "optimizer": [group["optimizer"] for group in groups]}
    for group in groups:
        for name, value in before_schedule(group["settings"]).items():
            if name != _TWICE:
                found.setdefault(name, []).append(_text(value))
    if "parameters" in meta:
        found["parameters"] = [f"{sum(math.prod(each['shape']) for each in meta['parameters'].values()):,}"]
    for name in ("preset", "every", "torch"):
        found[name] = [str(meta.get(name, ""))]
    return {name: values for name, values in found.items() if any(values)}


def _joined(values: Sequence[str]) -> str:
    return " | ".join(dict.fromkeys(values))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def load_run(path: str | os.PathLike[str]) -> Run:
    """Open the run directory ``path`` for reading.

    Raises:
        FileNotFoundError: there is no run in it; the message names those below it.
        ValueError: its file is not one of ours.
    """
    return Run(path)


def read_run(path: str | os.PathLike[str]) -> RunReader:
    """All that is stored of the run in ``path``, for the other modules; raises as :func:`load_run`."""
    try:
        return RunReader(path)
    except FileNotFoundError as error:
        below = list(find_runs(path)) if Path(path).is_dir() else []
        names = [printable(str(Path(path) / name)) for name in below]
        instead = f"there is no run in {os.fspath(path)!r} itself; below it: {listed(names, _NAMED)}"
        raise FileNotFoundError(instead if names else str(error)) from None


class Run:
    """A run on disk. If it was resumed or rolled back, later segments replace the steps that they repeat."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._reader = read_run(path)

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._reader.path

    @property
    def steps(self) -> list[int]:
        """The steps that were monitored, or recorded around a spike, ascending."""
        return list(self._reader.steps)

    @property
    def segments(self) -> list[tuple[int, int]]:
        """First and last step of each unbroken part; each part begins where the run was rewound to."""
        return list(self._reader.segments)

    @property
    def spikes(self) -> list[SpikeEvent]:
        """The spikes of all steps, in order."""
        return self._reader.events

    @property
    def damage(self) -> list[str]:
        """What could not be read because a file is damaged, each on one line; empty if nothing is."""
        return self._reader.damage

    @property
    def sources(self) -> list[str]:
        """The sources with statistics in any step."""
        return self._reader.sources

    def tensors(self, source: str) -> list[str]:
        """The tensors with statistics of ``source`` in any step, in model order."""
        return self._reader.tensors(source)

    def keys(self) -> list[str]:
        """Every key that :meth:`series` accepts: whole-model and logged values, then tensors in model order."""
        return self._reader.keys()

    def series(self, key: str) -> dict[int, float]:
        """Value by step for one key, such as ``gradmon/grad_norm`` or ``gradient_before_clip/h.0.attn.weight/std``.

        Any built-in metric of a tensor with stored statistics is available. Steps without the value are left out; it may be
        defined in none, as the largest finite element of a tensor that was NaN all along.

        Raises:
            KeyError: it is none of :meth:`keys`.
        """
        return self._reader.series(key)

    def refresh(self) -> int | None:
        """Read what was written since the last look, at a cost that does not grow with the run.

        Returns:
            The first step that may be new or changed; None if nothing was written. A late value changes the last known step, and a
            rollback all steps from its target on.
        """
        return self._reader.refresh()

    def close(self) -> None:
        """Close the file."""
        self._reader.close()

    def __repr__(self) -> str:
        return repr(self._reader)

    def record(self, step: int) -> StepView:
        """What is stored of a step: ``metrics``, ``spikes``, ``context``, ``suspects``, ``rng_state``, ``top_gradients(10)``.

        Raises:
            KeyError: the step is not in the run.
        """
        reader = self._reader
        reader.check_step(step)
        return StepView(
            step,
            lambda count: top_shares(reader.table(n.GRADIENT_BEFORE_CLIP, step), count),
            metrics=lambda: reader.metrics(step),
            spikes=lambda: tuple(event for event in reader.events if event.step == step),
            context=lambda: reader.context(step),
            suspects=lambda: [*suspects(reader, step)],
            rng_state=lambda: reader.rng_state(step),
        )

    def diagnose(self) -> Diagnosis:
        """What is wrong with the training, where, and what to do: print it, or read ``findings`` and ``exit_code``. The run may have ended,
        still go on, or have been killed. At most 400 steps of a long run are looked at: both ends, those around spikes, and evenly
        spaced ones.
        """
        from .diagnosis.diagnose import diagnose_history
        from .diagnosis.history import History

        return diagnose_history(History.of_run(self._reader))

    def why(self, step: int | None = None) -> str:
        """The report on ``step``, by default on the worst step of the largest spike, or that there is no spike.

        Raises:
            ValueError: the step is unknown.
        """
        return explain(self._reader, step)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def plot(self, kind: Chart = "heatmap", *, engine: Engine = "plotly", **options: Any) -> Any:
        """A figure of the run; see :meth:`ModuleMonitor.plot <torch_gradmon.ModuleMonitor.plot>`."""
        from .plots.charts import plot

        return plot(self._reader, kind, engine, options)

    def export(
        self,
        path: str | os.PathLike[str],
        table: str | None = None,
        *,
        sources: str | Sequence[str] | None = None,
        first: int | None = None,
        last: int | None = None,
        progress: bool | None = None,
    ) -> list[Path]:
        """Write the run into files, some steps at a time, so that memory does not grow with the run.

        There are two tables. ``tensors`` has a row for each tensor in each step, with the columns step, source, name, all
        built-in metrics, the number of elements (``count``) and other metrics of tensors: ``row[metric]`` is
        ``run.series("source/name/metric")[step]``. ``steps`` has a row for each step: the time, whether the step was applied,
        learning rates, the loss scale, values of the whole model, logged values, and tags, spikes and other facts as JSON. A
        column whose name is taken gets an underscore.

        Args:
            path: the file; its ending, .parquet, .csv or .jsonl, is the format. Parquet needs pyarrow. Missing directories are
                made, and an existing file is replaced.
            table: one of the two; None for both: ``tensors`` into ``path``, and ``steps`` beside it, ``out.steps.parquet``.
            sources: the sources of ``tensors``, such as ``"gradient_before_clip"``; None for all.
            first, last: only the steps from and to these.
            progress: whether to show a bar (if tqdm is installed); by default if stderr is a terminal.

        Returns:
            The paths of the files. A file is either complete or absent.

        Raises:
            ValueError, TypeError: an argument is wrong.
            ImportError: pyarrow is missing.
            OSError: a file cannot be written.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path must be the path of a file, got {display(path)}")
        main = Path(path)
        chosen = files.TABLES if table is None else (table,)
        paths = [main, main.with_name(f"{main.stem}.steps{main.suffix}")][: len(chosen)]
        for each in paths:
            if each.suffix.lower() not in files.FORMATS:
                raise ValueError(f"{str(each)!r} ends in none of {', '.join(files.FORMATS)}, by which the format is chosen")
            if each.is_dir():
                raise ValueError(f"{str(each)!r} is a directory; name a file in it")
        if sources is not None and table == "steps":
            raise ValueError("sources selects tensors, and the table of steps has none; leave it out")
        with ProgressBar(len(chosen) * len(between(self._reader.steps, first, last)), "export", "step", progress) as bar:
            tables = [files.parts_of(self._reader, each, sources, first, last, bar.advance) for each in chosen]
            files.write(dict(zip(paths, tables, strict=True)))
        return paths

    def to_arrow(
        self,
        table: str = "steps",
        *,
        sources: str | Sequence[str] | None = None,
        first: int | None = None,
        last: int | None = None,
    ) -> Any:
        """One of the two tables of :meth:`export` as a ``pyarrow.Table``. Missing values are null, NaN is NaN.

        Args:
            table: ``"steps"`` or ``"tensors"``, which may be large: a hundred bytes for each tensor in each step.
            sources, first, last: see :meth:`export`.

        Raises:
            ValueError, TypeError: an argument is wrong.
            ImportError: pyarrow is missing.
        """
        parts = files.parts_of(self._reader, table, sources, first, last, lambda steps: None)
        return files.arrow_table(parts, "to_arrow()", "pyarrow")

    def to_pandas(
        self,
        table: str = "steps",
        *,
        sources: str | Sequence[str] | None = None,
        first: int | None = None,
        last: int | None = None,
    ) -> Any:
        """One of the two tables of :meth:`export` as a ``pandas.DataFrame``. Missing values are NaN; :meth:`to_arrow`
        distinguishes them.

        Sources and names are categories, in model order; times are in UTC.

        Args:
            table, sources, first, last: see :meth:`to_arrow`.

        Raises:
            ValueError, TypeError: an argument is wrong.
            ImportError: pyarrow or pandas is missing.
        """
        parts = files.parts_of(self._reader, table, sources, first, last, lambda steps: None)
        with single_threaded():
            return files.arrow_table(parts, "to_pandas()", "pyarrow", "pandas").to_pandas()


def diagnose(path: str | os.PathLike[str]) -> Diagnosis:
    """The same as :meth:`Run.diagnose` of the run in ``path``, which is closed again."""
    with load_run(path) as run:
        return run.diagnose()


# --- The runs below a directory ---

#: Directories below each other that are looked into.
_DEPTH = 4
#: Runs that the error of a directory without one names.
_NAMED = 5


def find_runs(root: str | os.PathLike[str]) -> dict[str, Path]:
    """The run directories in and below ``root``, at most four levels deep, by their path from there, sorted.

    Names that are no printable text are left out. Links are not followed, so that nothing outside is shown. If ``root`` is a
    run itself, its name is that of the directory.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    top = Path(root)
    if not top.is_dir():
        raise FileNotFoundError(f"there is no directory {os.fspath(root)!r}")
    found = {}
    for place, directories, names in os.walk(top):
        below = Path(place).relative_to(top)
        if len(below.parts) >= _DEPTH:
            directories.clear()
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        if is_run(name for name in names if not os.path.islink(os.path.join(place, name))):
            name = below.as_posix() if below.parts else top.resolve().name
            if name.isprintable():  # else it is no text, which JSON and addresses could not have
                found[name] = Path(place)
    return dict(sorted(found.items()))


def is_below(path: Path, root: str | os.PathLike[str]) -> bool:
    """Whether a run that was found still stands where it was found, and nobody has put a link in its way."""
    return path.resolve() == Path(root).resolve() / path.relative_to(root)
