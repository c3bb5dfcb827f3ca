"""TensorBoard: one summary with all scalars for each step."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ..core.errors import display
from ..core.keys import SUMMARY
from ..core.records import SpikeEvent
from ..statistics.histogram import HIGHEST, LOWEST
from ..step.plan import HISTOGRAM_NAME
from .delivery import require

# --- Rebuild histograms from the values of a step, for trackers that can show them ---

_CLASS = re.compile(rf"^(.*{HISTOGRAM_NAME})\.(-?\d+)(/.*)?$")  # in both styles of keys


#: ``log2 |x|`` at the start of each class, and at the end of the last.
EDGES = list(range(LOWEST, HIGHEST + 2))


def without_histograms(values: Mapping[str, float]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """``values`` without the classes of histograms, and by key the number of elements in each class, without zeros."""
    scalars: dict[str, float] = {}
    found: dict[str, list[float]] = {}
    for key, value in values.items():
        part = _CLASS.match(key) if HISTOGRAM_NAME in key else None
        if part is None or not LOWEST <= int(part[2]) <= HIGHEST:
            scalars[key] = value
        else:
            found.setdefault(part[1] + (part[3] or ""), [0.0] * (len(EDGES) - 1))[int(part[2]) - LOWEST] = value
    return scalars, found


def with_histograms_of(package: str, values: Mapping[str, float]) -> dict[str, Any]:
    """``values`` with the classes of histograms as histograms of ``package``."""
    scalars, histograms = without_histograms(values)
    made = {key: import_module(package).Histogram(np_histogram=(counts, EDGES)) for key, counts in histograms.items()}
    return {**scalars, **made}


# --- TensorBoard: one summary with all scalars for each step ---

#: How the names of files end that are written here.
_OURS = f".{SUMMARY}"


class TensorBoardSink:
    """Writes scalars to a TensorBoard event file, as float32, TensorBoard's own precision.

    In a directory each step is shown once: a row whose step was written before, as after a resume from a checkpoint or a rollback,
    begins a new file, from which TensorBoard learns to discard the steps from there on. It discards them in all files of the directory,
    so this is left out where others write there too. A ``SummaryWriter`` of yours takes ``purge_step=``.

    ``log2_histogram`` becomes a histogram. All other values of a step are one summary, several times cheaper than ``add_scalar`` for each.
    Spikes are written as text under ``gradmon/spikes``.

    Args:
        writer_or_dir: a ``SummaryWriter``, which stays open, or the directory for a new one.

    Raises:
        ImportError: tensorboard is not installed.
        TypeError: ``writer_or_dir`` is neither.
        NotADirectoryError: it is a file.
    """

    def __init__(self, writer_or_dir: Any) -> None:
        self._directory: Path | None = None
        self._writer: Any = None
        self._last = -1  # the last step that was written
        if isinstance(writer_or_dir, (str, os.PathLike)):
            require("tensorboard", self)
            self._directory = Path(writer_or_dir)
            if self._directory.is_file():
                raise NotADirectoryError(f"{str(self._directory)!r} is a file; give the directory for event files")
        elif callable(getattr(writer_or_dir, "add_scalar", None)):
            self._writer = writer_or_dir
        else:
            raise TypeError(f"writer_or_dir must be a SummaryWriter or a directory, got {display(writer_or_dir)}")

    def __repr__(self) -> str:
        return f"TensorBoardSink({type(self._writer).__name__ if self._directory is None else repr(str(self._directory))})"

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write ``values`` as one summary; TensorBoard flushes the file every two minutes."""
        if self._directory is not None and step < self._last:
            self.close()
        writer = self._open(step)
        values, histograms = without_histograms(values)
        for key, counts in histograms.items():
            # TensorBoard shows neither mean nor deviation, so the sums are not needed
            writer.add_histogram_raw(key, EDGES[0], EDGES[-1], sum(counts), 0.0, 0.0, EDGES[1:], counts, step)
        if type(writer).__module__.startswith("torch.utils.tensorboard"):
            messages = import_module("tensorboard.compat.proto.summary_pb2")
            scalars = [messages.Summary.Value(tag=key, simple_value=value) for key, value in values.items()]
            # the getter reopens a writer that the script has closed
            writer._get_file_writer().add_summary(messages.Summary(value=scalars), step)
        else:  # tensorboardX and others have other message classes
            for key, value in values.items():
                writer.add_scalar(key, value, step)
        self._last = step

    def log_spike(self, event: SpikeEvent, text: str) -> None:
        """Write the spike as text: a block of code, since TensorBoard would take names in it for Markdown."""
        block = "\n".join(f"    {line}" for line in text.splitlines())
        self._open(event.step).add_text(f"{SUMMARY}/spikes", block, event.step)

    def close(self) -> None:
        """Close the file if it is ours, else write what is buffered."""
        if self._writer is None:
            return
        if self._directory is None:
            self._writer.flush()
        else:
            self._writer.close()
            self._writer = None

    def _open(self, step: int) -> Any:
        """The writer. A new one has those files of its directory that were written here lose ``step`` and later ones."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # two seconds

            assert self._directory is not None
            files = [path.name for path in self._directory.glob("*tfevents*")]
            purged = step if files and all(name.endswith(_OURS) for name in files) else None
            self._writer = SummaryWriter(str(self._directory), purge_step=purged, filename_suffix=_OURS)
        return self._writer
