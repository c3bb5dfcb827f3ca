"""The format of run directories is what its page says, and stays readable."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torch_gradmon.analysis.run import read_run
from torch_gradmon.core.keys import Key
from torch_gradmon.core.moments import Column
from torch_gradmon.core.records import StepRecord
from torch_gradmon.runs.log import LogReader
from torch_gradmon.runs.writer import RunWriter

from .stored_programs import found_in, write_run

ROOT = Path(__file__).parent.parent
#: What some numbers are called that are stored in place of a sum.
_DERIVED = {"mean": "SUM", "abs_mean": "ABS_SUM", "std": "SQUARE_SUM"}
GOLDEN = Path(__file__).parent / "golden" / "run-format-1"


def _reader() -> str:
    """The reader on the page of the format."""
    page = (ROOT / "docs" / "reference" / "run-format.md").read_text(encoding="utf-8")
    return page.partition("```python\n")[2].partition("```")[0]


def _read_elsewhere(path: Path) -> dict[int, dict[str, Any]]:
    """What that reader finds, in a process that has neither torch nor this package."""
    program = (
        "import sys, pickle\nsys.modules['torch'] = sys.modules['torch_gradmon'] = None\n"
        f"{_reader()}\nsys.stdout.buffer.write(pickle.dumps(read_run(sys.argv[1])))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program, str(path)], capture_output=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr.decode()
    found: dict[int, dict[str, Any]] = pickle.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    write_run(path, steps=30)
    return path


def test_the_reader_of_the_page_has_at_most_60_lines() -> None:
    assert sum(bool(line.strip()) for line in _reader().splitlines()) <= 60


def test_the_reader_of_the_page_finds_what_load_run_does(run_dir: Path) -> None:
    found, run = _read_elsewhere(run_dir), read_run(run_dir)
    assert len(list(run_dir.glob("gradmon.*.values"))) == 3
    assert len(run.segments) == 3
    assert run.events
    assert list(found) == run.steps
    sources = set()
    for step in run.steps:
        own, theirs = found[step]["values"], run.metrics(step)
        assert own.keys() == theirs.keys()
        assert own == pytest.approx(theirs, rel=0, abs=0, nan_ok=True)
        for source in run.sources:
            table = run.table(source, step)
            assert (table is not None) == (source in found[step]["rows"])
            if table is not None:
                sources.add(source)
                rows = found[step]["rows"][source]
                assert list(rows) == list(table.names)
                for name, row in zip(table.names, table.rows.tolist(), strict=True):
                    _agree(rows[name], row)
    assert {"gradient", "gradient_before_clip", "parameter", "update", "activation"} <= sources


def _agree(stored: dict[str, float], row: list[float]) -> None:
    """Whether stored numbers are those of a row of sufficient statistics."""
    count = row[Column.COUNT]
    for column, number in stored.items():
        at = Column[_DERIVED.get(column, column.upper())]
        if at is Column.SQUARE_SUM:
            expected = row[at] / count
            if math.isfinite(number) and math.isfinite(expected):
                number = number**2 + stored.get("mean", 0.0) ** 2
        else:
            expected = row[at] / count if at in (Column.SUM, Column.ABS_SUM) else row[at]
        assert number == pytest.approx(expected, rel=1e-12, abs=1e-300, nan_ok=True), column


def test_the_page_names_all_kinds_of_records(run_dir: Path) -> None:
    page = (ROOT / "docs" / "reference" / "run-format.md").read_text(encoding="utf-8")
    seen: dict[str, set[str]] = {}
    for path in run_dir.iterdir():
        for record in LogReader(path).follow():
            assert f"| `{record.data[:1].decode()}`" in page
            if record.data[:1] == b"J":
                facts = json.loads(record.data[1:])
                seen.setdefault(facts.pop("is"), set()).update(facts)
    for kind, fields in seen.items():
        assert f"| `{kind}` |" in page
        assert all(re.search(rf"`{field}`", page) for field in fields), kind


def test_a_run_of_format_1_stays_readable_with_its_values() -> None:
    expected = json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))
    assert found_in(GOLDEN) == expected
    assert list(map(str, _read_elsewhere(GOLDEN))) == list(expected["steps"])


def test_damage_to_keys_costs_their_values_and_no_others(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    writer.claim({})
    for step, names in enumerate(("ab", "c", "d", "c", "ad")):
        writer.log(StepRecord(step, 1e9 + step, True, {Key("", name, ""): float(ord(name)) for name in names}, {}, {}, ()))
    writer.close()
    (path,) = tmp_path.glob("*.values")
    (place,) = [record.begin for record in LogReader(path).follow() if b'"keys":[["","c",""]]' in record.data]
    data = bytearray(path.read_bytes())
    data[place + 20] ^= 1
    path.write_bytes(data)
    os.utime(path, (1e9, 1e9))  # nothing is on its way any more
    run = read_run(tmp_path)
    assert len(run.damage) == 1
    assert {step: run.metrics(step) for step in run.steps} == {
        0: {"a": 97.0, "b": 98.0},
        1: {},  # whose value has no name
        2: {"d": 100.0},
        3: {},
        4: {"a": 97.0, "d": 100.0},
    }


def test_a_late_value_does_not_store_random_states_again(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    states = [
        record for path in (tmp_path / "run").glob("*.rows") for record in LogReader(path).follow() if len(record.data) > 5000
    ]
    assert len(states) == len({record.data[8:16] for record in states}) > 0  # one of each step
