"""TensorBoard: one summary with all scalars for each step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ..core.errors import display
from ..core.keys import SUMMARY
from ..core.records import SpikeEvent
from .histograms import without_histograms
from .optional import require


class TensorBoardSink:
    """Writes scalars to a TensorBoard event file, as float32, which is what TensorBoard keeps.

    What ``log2_histogram`` counts becomes a histogram. All other values of a step go out as one summary, which is several times
    cheaper than ``add_scalar`` for each. Spikes are written as text under ``gradmon/spikes``.

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
        if isinstance(writer_or_dir, (str, os.PathLike)):
            require("tensorboard", self)
            self._directory = Path(writer_or_dir)
            if self._directory.is_file():
                raise NotADirectoryError(f"{str(self._directory)!r} is a file; give the directory for event files")
        elif callable(getattr(writer_or_dir, "add_scalar", None)):
            self._writer = writer_or_dir
        else:
            raise TypeError(f"writer_or_dir must be a SummaryWriter or a directory, got {display(writer_or_dir)}")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write ``values`` as one summary; the file is flushed by TensorBoard's own clock, every two minutes."""
        writer = self._open()
        values, histograms = without_histograms(values)
        for key, found in histograms.items():
            edges, total = found.edges, sum(found.counts)
            # TensorBoard draws neither mean nor deviation, so the sums have no meaning here
            writer.add_histogram_raw(key, edges[0], edges[-1], total, 0.0, 0.0, edges[1:], found.counts, step)
        if type(writer).__module__.startswith("torch.utils.tensorboard"):
            messages = import_module("tensorboard.compat.proto.summary_pb2")
            scalars = [messages.Summary.Value(tag=key, simple_value=value) for key, value in values.items()]
            # the getter opens a writer again that somebody has closed
            writer._get_file_writer().add_summary(messages.Summary(value=scalars), step)
        else:  # tensorboardX and others have messages of their own
            for key, value in values.items():
                writer.add_scalar(key, value, step)

    def log_spike(self, event: SpikeEvent, text: str) -> None:
        """Write the spike as text."""
        self._open().add_text(f"{SUMMARY}/spikes", text, event.step)

    def close(self) -> None:
        """Close the file if it is ours, else write what is buffered."""
        if self._writer is None:
            return
        if self._directory is None:
            self._writer.flush()
        else:
            self._writer.close()
            self._writer = None

    def _open(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # two seconds

            self._writer = SummaryWriter(str(self._directory))
        return self._writer
