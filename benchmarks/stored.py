"""Cost of a step in the run directory, and of reading a long run: ``python -m benchmarks.stored``.

The records are those of the demo: norms and sparsity of each layer, updates and parameters every tenth step, the loss logged after the
step. Each is written by the package and, beside it in the same round, as a row of the same bytes in SQLite (a write-ahead log, a commit
for each). Bytes read are those that the readers ask the operating system for, with its cache warm.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sqlite3
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.stored_runs import bytes_read
from torch_gradmon.analysis.many_runs import RunCard
from torch_gradmon.analysis.run import load_run
from torch_gradmon.core.records import StepRecord, StepValues
from torch_gradmon.runs.format import pack
from torch_gradmon.runs.writer import RunWriter

from .machine import machine
from .report import RESULTS, with_spread, write_section
from .timing import quotients, spread

#: Steps of the demo whose records are written again and again; a multiple of its ten, so that as many have updates.
TRAINED = 40
ROUNDS, LONG, TIMES = 2000, 100_000, 15
QUICK = 50, 1500, 2


def records(trained: int = TRAINED) -> list[tuple[StepRecord, StepRecord]]:
    """Of each step of the demo its record as the step ends, and with what is logged after it."""
    from torch_gradmon.cli import demo
    from torch_gradmon.cli.demo_model import CharacterGPT, Sizes, corpus

    found: list[list[StepRecord]] = []

    def kept(store: RunWriter, record: StepRecord, update: bool = False, backfill: bool = False) -> None:
        if update:
            found[-1].append(record)
        else:
            found.append([record])

    sizes = Sizes()
    _, data, characters = corpus()
    with tempfile.TemporaryDirectory() as place, mock.patch.object(RunWriter, "log", kept), redirect_stderr(StringIO()):
        demo.train(CharacterGPT(characters, sizes), data, sizes, trained, Path(place), 0)
    return [(each[0], each[-1]) for each in found]


def varied(made: tuple[StepRecord, StepRecord], number: int) -> tuple[StepRecord, StepRecord]:
    """Both records of a step as those of step ``number``, with other values than any other step: equal ones would compress."""
    step, late = made
    chance = np.random.default_rng(number)
    before = StepValues.of(step.values)
    blocks = [
        block
        if block.table
        else block._replace(numbers=(np.array(block.numbers) * chance.uniform(0.9, 1.1, len(block.keys))).tolist())
        for block in before.blocks
    ]
    logged = {key: value * chance.uniform(0.9, 1.1) for key, value in StepValues.of(late.values).since(before).items()}
    values = StepValues(*blocks)
    return step._replace(step=number, values=values), late._replace(step=number, values=values.updated(logged))


class Database:
    """The same in SQLite, by hand: a row of values, and a row of statistics for each source."""

    def __init__(self, path: Path) -> None:
        self._base = sqlite3.connect(path, isolation_level=None)
        self._base.execute("PRAGMA journal_mode=WAL")
        self._base.execute("PRAGMA synchronous=NORMAL")
        self._base.execute("CREATE TABLE steps (step INTEGER PRIMARY KEY, time REAL, numbers BLOB, context TEXT)")
        self._base.execute("CREATE TABLE tables (step INTEGER, source TEXT, data BLOB, PRIMARY KEY (step, source)) WITHOUT ROWID")

    def log(self, record: StepRecord, update: bool = False) -> None:
        """One commit."""
        tables = {} if update else {source: table for source, table in record.tables.items() if not table.same_as}
        values = record.values_beside_views().by_key
        blobs = pack([(table.rows.numpy(), table.columns, True) for table in tables.values()])
        row = record.step, record.time, np.array(list(values.values())).tobytes(), json.dumps(record.context)
        self._base.execute("BEGIN")
        self._base.execute("INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?)", row)
        self._base.executemany(
            "INSERT INTO tables VALUES (?, ?, ?)",
            [(record.step, source, data) for source, (_, data) in zip(tables, blobs, strict=True)],
        )
        self._base.execute("COMMIT")

    def close(self) -> None:
        """Close it, which also empties the log."""
        self._base.close()


def writing(made: Sequence[tuple[StepRecord, StepRecord]], rounds: int) -> dict[str, Any]:
    """Microseconds of a step, and of a value that is logged after it, and bytes of both."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "base").mkdir()
        stores = {"ours": RunWriter(Path(place) / "run"), "sqlite": Database(Path(place) / "base" / "base")}
        times: dict[tuple[str, str], dict[int, float]] = {}
        for number in range(rounds):
            step, late = varied(made[number % len(made)], number)
            for name in sorted(stores, reverse=bool(number % 2)):
                for what, record in (("step", step), ("late", late)):
                    start = time.perf_counter()
                    stores[name].log(record, update=what == "late")
                    times.setdefault((name, what), {})[number] = 1e6 * (time.perf_counter() - start)
        for store in stores.values():
            store.close()
        sizes = {
            name: sum(file.stat().st_size for file in (Path(place) / folder).iterdir()) / rounds
            for name, folder in (("ours", "run"), ("sqlite", "base"))
        }
    both = {name: {n: times[name, "step"][n] + times[name, "late"][n] for n in times[name, "step"]} for name in stores}
    return {
        "us": {f"{name}/{what}": spread(list(found.values())) for (name, what), found in times.items()},
        "ratio": spread(quotients(both["ours"], both["sqlite"])),
        "bytes": sizes,
    }


def reading(made: Sequence[tuple[StepRecord, StepRecord]], steps: int, times: int) -> dict[str, Any]:
    """Milliseconds of the processor, and megabytes that are read, of what people do with a long run."""
    with tempfile.TemporaryDirectory() as place:
        store = RunWriter(place)
        began = time.time() - 1e5 - steps
        for number in range(steps):
            step, late = (each._replace(time=began + number) for each in varied(made[number % len(made)], number))
            store.log(step)
            store.log(late, update=True)
        size = sum(file.stat().st_size for file in Path(place).iterdir())
        loss = next(key for key in made[0][1].values if key.name == "loss")
        layer = made[0][0].tables["gradient_before_clip"].names[0]

        def opened() -> None:
            load_run(place).close()

        def row() -> None:
            RunCard(place)

        found: dict[str, Any] = {}
        with bytes_read() as count, closing(load_run(place)) as run:
            what: dict[str, Callable[[], object]] = {
                "open": opened,
                "row": row,
                "loss": lambda: run._reader.stored(loss),
                "layer": lambda: run.series(f"gradient_before_clip/{layer}/norm"),
            }
            for name, call in what.items():
                taken, before = [], count.total()
                for _ in range(times):
                    start = time.process_time()
                    call()
                    taken.append(1e3 * (time.process_time() - start))
                found[name] = {"ms": spread(taken), "megabytes": (count.total() - before) / times / 1e6}
            followed, before = [], count.total()
            for number in range(steps, steps + 50 * times):
                store.log(made[number % len(made)][0]._replace(step=number, time=time.time()))
                start = time.process_time()
                run.refresh()
                _ = run.record(number).metrics
                followed.append(1e3 * (time.process_time() - start))
            new = (count.total() - before) / len(followed) / 1e6
        store.close()
        return {"steps": steps, "megabytes": size / 1e6, "follow": {"ms": spread(followed), "megabytes": new}, **found}


_WHAT = {
    "open": "open it",
    "row": "its row in a list of runs",
    "loss": "its loss curve, once it is open",
    "layer": "the curve of a layer",
    "follow": "a new step, by who has it open",
}


def markdown(result: Mapping[str, Any]) -> str:
    """The section of the documentation."""
    where, written, read = result["machine"], result["writing"], result["reading"]
    us, sizes = written["us"], written["bytes"]
    lines = [
        f"A step of the demo takes {with_spread(us['ours/step'])} µs to write, and the loss that is logged after it "
        f"{with_spread(us['ours/late'])} µs; rows of the same bytes in SQLite, each with a commit, {with_spread(us['sqlite/step'])} and "
        f"{with_spread(us['sqlite/late'])} µs. Together that is {with_spread(written['ratio'])} times the time of SQLite. A step takes "
        f"{sizes['ours']:,.0f} bytes, with SQLite {sizes['sqlite']:,.0f}.",
        "",
        f"| a run of {read['steps']:,} steps, {read['megabytes']:,.0f} MB | ms of the processor | MB read |",
        "| --- | ---: | ---: |",
        *(f"| {label} | {with_spread(read[name]['ms'])} | {read[name]['megabytes']:.3g} |" for name, label in _WHAT.items()),
        "",
        f"{where['processor']} ({where['cores']} cores), {where['system']}, Python {where['python']}, torch {where['torch']}; "
        f"{result['date']}. Medians, quartiles in brackets.",
    ]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print, and keep the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stored", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only to see whether it runs; writes nothing without --out")
    parser.add_argument("--out", type=Path, help="where the result goes")
    asked = parser.parse_args(words)
    rounds, steps, times = QUICK if asked.quick else (ROUNDS, LONG, TIMES)
    made = records(10 if asked.quick else TRAINED)
    result = {
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "rounds": rounds,
        "writing": writing(made, rounds),
        "reading": reading(made, steps, times),
    }
    print(markdown(result))
    out = asked.out or (None if asked.quick else RESULTS / "stored.json")
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if not asked.quick and asked.out is None:
        write_section("stored", markdown(result))


if __name__ == "__main__":
    main()
