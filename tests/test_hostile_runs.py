"""A run directory of a stranger is only data: reading it neither fails, hangs, takes much memory nor touches a file."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from torch_gradmon.core.keys import Key
from torch_gradmon.runs import format as f
from torch_gradmon.runs.index import RunIndex
from torch_gradmon.runs.log import LogReader, LogWriter, Overspent, framed, reading_within

from . import forked
from .hostile_runs import Mutator, made, read_all, records_in, show_all
from .stored_runs import ROWS, VALUES


@pytest.fixture(scope="module")
def mutator(tmp_path_factory: pytest.TempPathFactory) -> Mutator:
    path = tmp_path_factory.mktemp("made")
    files = made(path)
    return Mutator(files, {name: records_in(path / name) for name in files})


@contextmanager
def _within(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"not done in {seconds} s")

    before = [(number, signal.signal(number, late)) for number in (signal.SIGALRM, signal.SIGPROF)]
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of this process, however busy the machine is
    signal.alarm(20 * seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in before:
            signal.signal(number, handler)


def _read_mutations(mutator: Mutator, seeds: range, tmp_path: Path, shown: bool) -> None:
    refused = 0
    for seed in seeds:
        path = tmp_path / "run"
        files = mutator.write(seed, path)
        report = tmp_path / "report.html" if seed % 20 == 0 else None
        with _within(10), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                told = read_all(path)
                if shown and not told:
                    show_all(path, report)
            except Exception as error:
                raise AssertionError(f"mutation {seed}") from error
        refused += bool(told)
        assert {file.name: file.read_bytes() for file in path.iterdir()} == files, f"mutation {seed}"
        shutil.rmtree(path)
    assert refused < len(seeds) / 10, "too few were read"


@pytest.mark.parametrize(
    ("seeds", "shown"),
    [
        (range(60), False),
        pytest.param(range(60, 250), False, marks=pytest.mark.thorough),
        pytest.param(range(250, 300), True, marks=pytest.mark.extra),
    ],
)
def test_mutated_runs_are_read_without_harm(mutator: Mutator, tmp_path: Path, seeds: range, shown: bool) -> None:
    _read_mutations(mutator, seeds, tmp_path, shown)


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.timeout(3600)
def test_three_thousand_mutated_runs_are_read_without_harm(mutator: Mutator, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _read_mutations(mutator, range(300, 3300), tmp_path, shown=True)
    if sys.platform == "linux":
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


_LARGE = """
import resource, sys
from torch_gradmon.analysis.run import load_run
from torch_gradmon.runs.format import JSON, of_json
from torch_gradmon.runs.log import framed

path, kind = sys.argv[1] + "/" + sys.argv[3], sys.argv[2]
head = of_json({"is": "head", "format": 1, "writer": "", "claims": True, "facts": {}})
large = {
    "lists": lambda: JSON + b'{"facts":{"x":[' + b"[]," * 5_000_000 + b"[]]}}",
    "depth": lambda: JSON + b"[" * 20_000_000,
    "keys": lambda: of_json({"is": "keys", "first": 0, "keys": [["", "", str(number)] for number in range(1_100_000)]}),
    "name": lambda: of_json({"is": "keys", "first": 0, "keys": [["", "x" * 40_000_000, ""]]}),
    "digits": lambda: of_json({"facts": {"every": 1}}).replace(b"1", b"1" * 20_000_000),
}[kind]()
data = framed(head, 0)
data += framed(large, len(data))
with open(path, "wb") as file:
    file.write(data)
size = len(data)
del data, large
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run = load_run(sys.argv[1])
print(run.damage, run.keys()[:3], run.meta)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, size)
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="the largest memory is counted in other units elsewhere")
@pytest.mark.parametrize("kind", ["lists", "depth", "keys", "name", "digits"])
def test_memory_stays_in_proportion_to_the_bytes(kind: str, tmp_path: Path) -> None:
    with forked.start(_LARGE, tmp_path, kind, VALUES) as child:
        told, error = child.stdout.read().splitlines(), child.wait()
    assert error == 0, told
    assert "cannot be read" in told[0]
    grown, size = map(int, told[1].split())
    assert grown * 1000 < 4 * size + 200_000_000


def test_links_in_a_run_directory_are_not_followed(mutator: Mutator, tmp_path: Path) -> None:
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "run"
    mutator.write(0, elsewhere)
    path.mkdir()
    (path / VALUES).symlink_to(elsewhere / VALUES)
    assert "is a link" in read_all(path)
    (path / VALUES).unlink()
    shutil.copy(elsewhere / VALUES, path)
    (path / ROWS).symlink_to(elsewhere / ROWS)
    assert read_all(path) == ""


_HEAD = f.of_json({"is": "head", "format": 1, "writer": "", "claims": True, "facts": {}})
_KEYS = len(framed(_HEAD, 0))  # where the keys begin
_SET = np.zeros(1, "<u4").tobytes()


def _begun(path: Path, name: str = VALUES) -> LogWriter:
    """The file with values of a run with one key, or its file with rows."""
    file = LogWriter(path / name)
    if name == VALUES:
        file.append(_HEAD)
        file.append(f.of_json({"is": "keys", "first": 0, "keys": [["", "loss", ""]]}))
    return file


def _step(step: int, rows: tuple[int, int] = (0, 0), layouts: int = 0) -> f.StepFrame:
    return f.StepFrame(step, 1e9 + step, f.APPLIED, rows, layouts, np.zeros(1, np.uint32), np.ones(1), b"{}", b"")


def _indexed(places: list[int], step: int) -> list[tuple[object, ...]]:
    """Entries of an index: JSON records, and the last one a step."""
    return [*((place, 0, 0.0, 0, 0, 0, 0, f.IS_JSON) for place in places[:-1]), (places[-1], step, 1e9 + step, 0, 0, 0, 0, 1)]


def _settled(path: Path) -> Path:
    for file in path.iterdir():
        os.utime(file, (1e9, 1e9))  # nothing is on its way any more
    return path


@pytest.mark.parametrize("what", ["repeated", "backwards", "of the last index", "behind"])
def test_an_index_names_each_record_since_the_last_one_once(what: str, tmp_path: Path) -> None:
    file = _begun(tmp_path)
    one = file.append(f.of_json({"is": "facts", "facts": {"one": 1}}))[0]
    step = file.append(_step(0).packed())[0]
    before = file.append(f.Index((0, 0), f.entries_of(_indexed([0, _KEYS, one, step], 0)), [_SET], {}).packed())
    two = file.append(f.of_json({"is": "facts", "facts": {"two": 2}}))[0]
    step = file.append(_step(1).packed())[0]
    places = {
        "repeated": [two] * 50 + [step],
        "backwards": [step, two, step],
        "of the last index": [one, two, step],
        "behind": [two, step, file.size + 2000],
    }[what]
    file.append(f.Index(before, f.entries_of(_indexed(places, 1)), [_SET], {}).packed())
    file.close()
    with mock.patch.object(f, "json_of", wraps=f.json_of) as parsed, closing(RunIndex(_settled(tmp_path))) as index:
        assert index.steps == [0, 1]
        assert index.meta == {"one": 1, "two": 2}
        assert parsed.call_count <= 4


@pytest.mark.parametrize("place", [0, 1])
def test_a_column_belongs_to_one_index_and_its_records(place: int, tmp_path: Path) -> None:
    file, before = _begun(tmp_path), (0, 0)
    column = file.append(f.of_column(0, np.array([2 + place]), np.array([7.0])))[0]  # of the step in the first index, or of none
    for step in range(3 - 2 * place):
        places = [0, _KEYS] if not step else []
        entries = _indexed([*places, file.append(_step(step).packed())[0]], step)
        before = file.append(f.Index(before, f.entries_of(entries), [_SET], {0: column}).packed())
    file.close()
    with closing(RunIndex(_settled(tmp_path))) as index:
        assert index.values(Key("", "loss", "")) == dict.fromkeys(index.steps, 1.0)  # as the steps themselves say


def test_two_steps_do_not_share_their_rows(tmp_path: Path) -> None:
    rows, file = _begun(tmp_path, ROWS), _begun(tmp_path)
    found = rows.append(f.of_tables(0, []))
    for step in range(3):
        file.append(_step(step, found).packed())
    rows.close()
    file.close()
    with closing(RunIndex(_settled(tmp_path))) as index:
        assert index.steps == [0]
        assert len(index.unreadable) == 2


def test_a_record_that_was_read_before_takes_time_too(tmp_path: Path) -> None:
    file = _begun(tmp_path)
    file.close()
    with closing(LogReader(tmp_path / VALUES)) as reader:
        assert reader.at(0)
        with reading_within(0.0), pytest.raises(Overspent):
            reader.at(0)


def test_records_of_an_index_do_not_lie_within_one_another(tmp_path: Path) -> None:
    file = _begun(tmp_path)
    inner = framed(_step(1)._replace(context=b"{}" + b" " * 500).packed(), 0)
    outer, end = file.append(_step(0)._replace(context=inner).packed())
    entries = _indexed([0, _KEYS, outer], 0) + _indexed([end - len(inner)], 1)
    file.append(f.Index((0, 0), f.entries_of(entries), [_SET], {}).packed())
    file.close()
    with closing(RunIndex(_settled(tmp_path))) as index:
        assert index.read(1).values == {0: 1.0}
        assert index.read(0).values == {}
