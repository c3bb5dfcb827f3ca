"""A run directory of a stranger is only data: reading it neither fails, hangs, takes much memory nor touches a file."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import sys
import tracemalloc
import warnings
import zlib
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


def _memory(is_new: bool = False) -> int:
    """The most that this process has held at once since the last call with ``is_new``, in kB; 0 where the system does not say."""
    if sys.platform != "linux":
        return 0
    if is_new:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def _read_mutations(mutator: Mutator, seeds: range, tmp_path: Path, shown: bool) -> None:
    refused = 0
    if shown:  # what is loaded once is no matter of a run
        whole = tmp_path / "whole"
        mutator.write_unchanged(whole)
        show_all(whole, tmp_path / "report.html")
    for seed in seeds:
        path = tmp_path / "run"
        files = mutator.write(seed, path)
        before = _memory(is_new=True)
        report = tmp_path / "report.html" if seed % 20 == 0 else None
        with _within(10), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                told = read_all(path)
                if shown and not told:
                    show_all(path, report)
            except Exception as error:
                raise AssertionError(f"mutation {seed}") from error
        assert _memory() - before < 200_000, f"mutation {seed}"  # kB
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
    _read_mutations(mutator, range(300, 3300), tmp_path, shown=True)


_LARGE = """
import resource, sys
from torch_gradmon.analysis.run import read_run
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
run = read_run(sys.argv[1])
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
_KEYS = f.of_json({"is": "keys", "first": 0, "keys": [["", "loss", ""]]})
_SETS = f.of_json({"is": "sets", "number": 1, "keys": [0]})
#: Where the records of a file begin that has these.
_FIRST = [0, len(framed(_HEAD, 0)), len(framed(_HEAD, 0)) + len(framed(_KEYS, 0))]


def _begun(path: Path, name: str = VALUES) -> LogWriter:
    """The file with values of a run with one key, or its file with rows."""
    file = LogWriter(path / name)
    if name == VALUES:
        file.append(_HEAD)
        file.append(_KEYS)
        file.append(_SETS)
    return file


def _step(step: int, rows: tuple[int, int] = (0, 0), layouts: int = 0) -> f.StepFrame:
    return f.StepFrame(step, 1e9 + step, f.APPLIED, rows, layouts, 1, np.ones(1), b"{}", b"")


def _index(before: tuple[int, int], places: list[int], step: int, columns: dict[int, int] | None = None) -> bytes:
    """An index of JSON records, and of a step at the last place."""
    entries = [(place, 0, 0.0, 0, 0, 0, 0, f.IS_JSON) for place in places[:-1]]
    return f.of_index(before, np.array([*entries, _entry(places[-1], step)], f.ENTRY), columns or {})


def _entry(place: int, step: int) -> tuple[object, ...]:
    return place, step, 1e9 + step, 0, 0, 0, 1, 1


def _settled(path: Path) -> Path:
    for file in path.iterdir():
        os.utime(file, (1e9, 1e9))  # nothing is on its way any more
    return path


@pytest.mark.parametrize("what", ["repeated", "backwards", "of the last index", "behind"])
def test_an_index_names_each_record_since_the_last_one_once(what: str, tmp_path: Path) -> None:
    file = _begun(tmp_path)
    one = file.append(f.of_json({"is": "facts", "facts": {"one": 1}}))[0]
    step = file.append(_step(0).packed())[0]
    before = file.append(_index((0, 0), [*_FIRST, one, step], 0))
    two = file.append(f.of_json({"is": "facts", "facts": {"two": 2}}))[0]
    step = file.append(_step(1).packed())[0]
    places = {
        "repeated": [two] * 50 + [step],
        "backwards": [step, two, step],
        "of the last index": [one, two, step],
        "behind": [two, step, file.size + 2000],
    }[what]
    file.append(_index(before, places, 1))
    file.close()
    with mock.patch.object(f, "json_of", wraps=f.json_of) as parsed, closing(RunIndex(_settled(tmp_path))) as index:
        assert index.steps == [0, 1]
        assert index.meta == {"one": 1, "two": 2}
        assert parsed.call_count <= 5


@pytest.mark.parametrize("what", ["more values", "fewer values", "another key", "other records", "no stream", "more behind it"])
def test_a_column_belongs_to_one_index_and_its_records(what: str, tmp_path: Path) -> None:
    file, before = _begun(tmp_path), (0, 0)
    column = f.of_column(1 if what == "another key" else 0, np.full({"more values": 2, "fewer values": 0}.get(what, 1), 7.0))
    column = {"no stream": column[:12] + b"?" * 20, "more behind it": column + b"?"}.get(what, column)
    begin = file.append(column)[0]  # of the step in the first index
    for step in range(3 if what == "other records" else 1):
        places = [*(_FIRST if not step else []), file.append(_step(step).packed())[0]]
        columns = {} if what == "other records" and not step else {0: begin}
        before = file.append(_index(before, places, step, columns))
    file.close()
    with closing(RunIndex(_settled(tmp_path))) as index:
        assert index.stored(Key("", "loss", "")) == dict.fromkeys(index.steps, 1.0)  # as the steps themselves say


@pytest.mark.parametrize("what", ["index", "column", "count of the index", "rows"])
def test_what_is_compressed_takes_no_more_than_its_place(what: str, tmp_path: Path) -> None:
    """A few bytes that stand for a gigabyte."""
    rows, file = _begun(tmp_path, ROWS), _begun(tmp_path)
    bomb = zlib.compress(bytes(1 << 30), 1)
    begin = file.append(struct.pack("<c3xII", f.COLUMN, 1, 0) + bomb)[0]
    names = [str(number) for number in range(1000)]
    layout = {"is": "layout", "source": "activation", "tensors": names, "counts": [1] * 1000, "same_as": ""}
    stored = ["mean", "abs_mean", "std", "near_zero", "nonfinite_count", "min", "max"]
    place = rows.append(f.of_json({**layout, "measured": ["count", *stored] if what == "rows" else [], "stored": stored}))[0]
    found = rows.append(f.of_tables(0, [(place, (1 << 32) - 1, b"")]))  # which leaves all columns out
    step = file.append(_step(0, found).packed())[0]
    index = _index((0, 0), [*_FIRST, step], 0, {0: begin} if what == "column" else None)
    if what == "index":
        index = index[:28] + bomb
    elif what == "count of the index":
        index = struct.pack("<c3xIIQQ", f.INDEX, 1 << 27, 0, 0, 0) + bomb
    file.append(index)
    rows.close()
    file.close()
    _settled(tmp_path)
    tracemalloc.start()
    try:
        with closing(RunIndex(tmp_path)) as run:
            assert run.stored(Key("", "loss", "")) == {0: 1.0}
            assert run.rows(0) == {}
        assert tracemalloc.get_traced_memory()[1] < 60 << 20  # the bytes of the bomb, some times over
    finally:
        tracemalloc.stop()


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


@pytest.mark.parametrize("begin", [2**63, 2**63 - 5])
def test_step_with_rows_beyond_any_file_is_damage(begin: int, tmp_path: Path) -> None:
    file = _begun(tmp_path)
    file.append(_step(0, (begin, begin + 9)).packed())
    file.append(_step(1).packed())
    file.close()
    with closing(RunIndex(_settled(tmp_path))) as index:
        assert index.steps == [1]
        assert len(index.unreadable) == 1


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
    entries = [*((place, 0, 0.0, 0, 0, 0, 0, f.IS_JSON) for place in _FIRST), _entry(outer, 0), _entry(end - len(inner), 1)]
    file.append(f.of_index((0, 0), np.array(entries, f.ENTRY), {}))
    file.close()
    with closing(RunIndex(_settled(tmp_path))) as index:
        assert index.read(1).values == {Key("", "loss", ""): 1.0}
        assert index.read(0).values == {}
