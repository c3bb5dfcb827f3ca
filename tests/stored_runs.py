"""Run directories as files: copied with changes, emptied, filled with something else."""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from torch_gradmon.analysis.many_runs import RunCard
from torch_gradmon.analysis.run import read_run
from torch_gradmon.core.keys import TENSOR_SOURCES
from torch_gradmon.core.records import StepRecord
from torch_gradmon.runs import log
from torch_gradmon.runs.writer import RunWriter

VALUES, ROWS = "gradmon.000001.values", "gradmon.000001.rows"
NO_RECORD = b"no record at all, just some bytes " * 2000


def changed(card: RunCard, **changes: Any) -> RunCard:
    found = copy.copy(card)
    vars(found).update(changes)
    return found


@contextmanager
def bytes_read() -> Iterator[Counter[str]]:
    """Counts the bytes that are read of each file that is opened meanwhile, by name; one that is only opened has none."""
    count: Counter[str] = Counter()

    class Counting(io.FileIO):
        def __init__(self, path: Path, mode: str, buffering: int, opener: Any) -> None:
            super().__init__(path, mode, opener=opener)
            self._of = path.name
            count[self._of] += 0

        def read(self, size: int = -1) -> bytes:
            data = super().read(size)
            count[self._of] += len(data)
            return data

    with mock.patch.object(log, "open", Counting, create=True):
        yield count


def emptied(path: Path) -> None:
    """Remove the run in ``path``."""
    for file in path.glob("gradmon.*.*"):
        file.unlink()


def rewritten(
    path: Path,
    record: Callable[[StepRecord], StepRecord] = lambda record: record,
    facts: Callable[[dict[str, Any]], dict[str, Any]] = lambda facts: facts,
) -> None:
    """Write the run in ``path`` once more, with other records or facts; without states of random generators."""
    with closing(read_run(path)) as run:
        meta = facts(dict(run.meta))
        records = []
        for each in run.records():
            tables = {source: table for source in TENSOR_SOURCES if (table := run.table(source, each.step)) is not None}
            records.append(record(each._replace(tables=tables)))
    emptied(path)
    store = RunWriter(path, meta)
    for each in records:
        store.log(each)
    store.close()


def timed(path: Path, when: Callable[[StepRecord], float]) -> None:
    """Give the steps of a run other times, and take its end away."""
    rewritten(
        path,
        lambda record: record._replace(time=when(record)),
        lambda facts: {name: value for name, value in facts.items() if name != "tune"},
    )
