"""Whatever part of a run is in sight: a prefix of its steps, with the values that were written."""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import subprocess
import textwrap
import time
from contextlib import closing
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.analysis.many_runs import RunCard
from torch_gradmon.analysis.plots.charts import PanelSet
from torch_gradmon.analysis.run import read_run
from torch_gradmon.core.keys import TENSOR_SOURCES, Key
from torch_gradmon.core.moments import ALL_COLUMNS, Column
from torch_gradmon.core.records import StatsTable, StepRecord, StepValues
from torch_gradmon.runs import format as f
from torch_gradmon.runs import writer as writing
from torch_gradmon.runs.log import LogReader, framed
from torch_gradmon.runs.reader import RunReader
from torch_gradmon.runs.writer import RunWriter, Successors, Superseded

from . import forked
from .hostile_runs import made, records_in
from .stored_runs import ROWS, VALUES, bytes_read
from .test_run_bulk import _record

PAGE = 4096


def _losses(run: RunReader) -> dict[int, float]:
    return run.series("x") if run.steps else {}


# --- what is in sight ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], RunReader]:
    path = tmp_path_factory.mktemp("whole")
    return made(path), read_run(path)


def _view(files: dict[str, bytes], there: dict[str, set[int]], ends: dict[str, int]) -> dict[str, bytes]:
    """The files up to ``ends``, with zeros for pages that are not there."""
    return {
        name: b"".join(
            data[page : page + PAGE] if page in there[name] else bytes(len(data[page : page + PAGE]))
            for page in range(0, len(data), PAGE)
        )[: ends[name]]
        for name, data in files.items()
    }


def _assert_part(run: RunReader, whole: RunReader) -> None:
    """Each step has what the whole run has, or less where it is not in sight; no step is left out before another."""
    assert run.steps == whole.steps[: len(run.steps)]
    for step in run.steps:
        expected = whole.metrics(step)
        found = run.metrics(step)
        assert {name: repr(value) for name, value in found.items()}.items() <= {
            name: repr(value) for name, value in expected.items()
        }.items()
        for source in TENSOR_SOURCES:
            table, other = run.table(source, step), whole.table(source, step)
            if table is not None:
                assert other is not None
                assert table.names == other.names
                assert torch.equal(table.rows, other.rows)


@pytest.mark.parametrize("seed", range(25))
def test_any_view_is_a_prefix_of_the_steps(seed: int, whole: tuple[dict[str, bytes], RunReader], tmp_path: Path) -> None:
    files, complete = whole
    chance = random.Random(seed)
    ends = {name: chance.choice([len(data), chance.randrange(len(data) + 1)]) for name, data in files.items()}
    missing = chance.choice([0, 0.02, 0.2])
    there = {name: {page for page in range(0, len(data), PAGE) if chance.random() >= missing} for name, data in files.items()}
    for name, data in _view(files, there, ends).items():
        (tmp_path / name).write_bytes(data)
    with closing(read_run(tmp_path)) as run:
        _assert_part(run, complete)


@pytest.mark.parametrize("seed", range(8))
def test_a_follower_of_growing_views_never_goes_back(
    seed: int, whole: tuple[dict[str, bytes], RunReader], tmp_path: Path
) -> None:
    files, complete = whole
    chance = random.Random(seed)
    there: dict[str, set[int]] = {name: set() for name in files}
    ends = dict.fromkeys(files, 0)
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with closing(read_run(tmp_path)) as run:
        known: list[int] = []
        while sum(map(len, there.values())) < sum(-(-len(data) // PAGE) for data in files.values()):
            for name, data in files.items():
                ends[name] = min(len(data), ends[name] + chance.choice([50, PAGE, 4 * PAGE]))
                pages = [page for page in range(0, ends[name], PAGE) if page not in there[name]]
                there[name].update(chance.sample(pages, chance.randint(0, len(pages))))
            ends = {name: len(data) if len(there[name]) * PAGE >= len(data) else ends[name] for name, data in files.items()}
            for name, data in _view(files, there, ends).items():
                with open(tmp_path / name, "r+b") as file:
                    file.write(data)
            run.refresh()
            assert run.steps[: len(known)] == known
            known = run.steps
            assert known == complete.steps[: len(known)]
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        run.refresh()
        assert run.steps == complete.steps
        assert run.damage == []
        _assert_part(run, complete)
        assert run.meta == complete.meta


def test_damage_of_names_costs_their_values_and_no_others(tmp_path: Path) -> None:
    store = RunWriter(tmp_path)
    for step in range(30):
        values = {Key("", name, ""): float(step + shift) for shift, name in enumerate(("a", "b", "c")[: 1 + step // 10])}
        store.log(StepRecord(step, float(step), True, values))
    store.close()
    data = (tmp_path / VALUES).read_bytes()
    at = data.index(b'[["","b",""]]')
    (tmp_path / VALUES).write_bytes(data[:at] + b"?" + data[at + 1 :])
    os.utime(tmp_path / VALUES, (1e9, 1e9))
    with closing(read_run(tmp_path)) as run:
        assert run.steps == list(range(30))
        assert run.series("a") == {step: float(step) for step in range(30)}
        assert run.series("c") == {step: step + 2.0 for step in range(20, 30)}
        assert run.keys() == ["a", "c"]
        assert len(run.damage) >= 1


def test_damage_to_a_live_run_is_told_once_it_is_old(tmp_path: Path) -> None:
    now, steps = time.time(), list(range(900))
    with mock.patch.object(f, "INDEXED", 10_000):
        store = RunWriter(tmp_path)
        for step in steps:
            store.log(StepRecord(step, now, True, {Key("", "x", ""): 1.0}))
        store.close()
    with open(tmp_path / VALUES, "r+b") as file:
        file.seek(PAGE)
        file.write(bytes(PAGE))  # as before it arrives, or after it was lost
    with closing(read_run(tmp_path)) as run:
        known = run.steps
        assert known == steps[: len(known)]
        assert (0 < len(known) < 100, run.damage) == (True, [])
        with mock.patch.object(time, "time", return_value=now + 590):
            assert run.refresh() is None
        with mock.patch.object(time, "time", return_value=now + 610):
            os.utime(tmp_path / VALUES, (now + 600, now + 600))  # it is still written
            assert run.refresh() > known[-1]
        later = run.steps[len(known) :]
        assert later == steps[-len(later) :]
        assert len(later) > 200
        assert run.damage[0].startswith(f"{VALUES}: bytes ")


def test_rows_that_are_not_defined_are_asked_for_once(tmp_path: Path) -> None:
    store = RunWriter(tmp_path)
    for step in range(50):
        store.log(_record(step, 1.0))
    store.close()
    data = bytearray()
    for record in records_in(tmp_path / ROWS):
        data += framed(record.replace(b'"source"', b'"sauces"'), len(data))
    (tmp_path / ROWS).write_bytes(data)
    with closing(read_run(tmp_path)) as run, mock.patch.object(f, "layout_of", wraps=f.layout_of) as asked:
        assert list(run.stacks("gradient_before_clip")) == []
        assert all(run.table("gradient_before_clip", step) is None for step in run.steps)
        assert asked.call_count == 1
        assert len(run.damage) == 50
        assert run.series("x") == dict.fromkeys(range(50), 1.0)


def test_records_that_only_a_later_version_knows_are_skipped(tmp_path: Path) -> None:
    store = RunWriter(tmp_path)
    store.claim({})
    for step in range(5):
        store.log(_record(step, 1.0))
    store.close()
    data = bytearray()
    for number, record in enumerate(records_in(tmp_path / VALUES)):
        for each in (record, b"Z" + bytes(number), b'J{"is":"later","facts":{},"x":[{}]}'):
            data += framed(each, len(data))
    (tmp_path / VALUES).write_bytes(data)
    with closing(read_run(tmp_path)) as run:
        assert run.series("x") == dict.fromkeys(range(5), 1.0)
        assert run.damage == []
    assert Successors(tmp_path, 0).have_claimed()


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("rsync") is None, reason="needs rsync")
def test_a_copy_of_a_live_run_goes_along_and_is_sent_only_what_is_new(tmp_path: Path) -> None:
    def copied() -> int:
        command = ["rsync", "-a", "--append", "--stats", f"{tmp_path}/run/", f"{tmp_path}/copy/"]
        told = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"}).stdout
        return int(re.search(r"Literal data: ([\d,.]+)", told)[1].replace(",", ""))

    store = RunWriter(tmp_path / "run")
    for step in range(1000):
        store.log(_record(step, float(step)))
    first = copied()
    with closing(read_run(tmp_path / "copy")) as run:
        assert len(run.steps) == 1000
        for step in range(1000, 1010):
            store.log(_record(step, float(step)))
        assert copied() < first / 20
        assert run.refresh() == 1000
        assert run.series("x") == {step: float(step) for step in range(1010)}
        assert run.damage == []
    store.close()


# --- two writers -----------------------------------------------------------------------------------------------------------------------


def test_a_resume_while_the_old_job_lives_takes_the_run(tmp_path: Path) -> None:
    old = RunWriter(tmp_path)
    old.claim({"who": "old"})
    for step in range(10):
        old.log(_record(step, 1.0))
    new = RunWriter(tmp_path)
    new.claim({"who": "new"})
    follower = read_run(tmp_path)
    written, begin, stopped = 10, time.monotonic(), 0.0
    while not stopped and time.monotonic() < begin + 5:
        try:
            old.log(_record(written, 1.0))
        except Superseded:
            stopped = time.monotonic() - begin
        new.log(_record(written - 5, 2.0))
        written += 1
        follower.refresh()
        assert follower.steps == list(range(written - 5))
        time.sleep(0.05)
    assert 0 < stopped < 2.0
    old.close()
    new.close()
    follower.refresh()
    for run in (follower, read_run(tmp_path)):
        assert run.meta == {"who": "new"}
        assert _losses(run) == {step: 1.0 if step < 5 else 2.0 for step in range(written - 5)}
        assert run.segments == [(0, 4), (5, written - 6)]
        assert run.damage == []
        run.close()


_TRAINING = """
    import sys, time, torch, warnings
    from torch import nn
    import torch_gradmon as gradmon
    torch.set_num_threads(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = gradmon.watch(model, optimizer, run_dir=sys.argv[1], on_spike=None)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(int(sys.argv[2]), int(sys.argv[3])):
            monitor.begin_step(step)
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            monitor.log_scalar("who", float(sys.argv[4]))
            print(step, flush=True)
            time.sleep(0.01)
        monitor.detach()
    print("warnings", len(seen), *[" ".join(str(each.message).split()) for each in seen], flush=True)
"""


@pytest.mark.thorough
def test_two_processes_that_write_one_run_do_not_mix(tmp_path: Path) -> None:
    with forked.start(textwrap.dedent(_TRAINING), tmp_path, 0, 250, 1) as old:
        lines = [old.stdout.readline() for _ in range(30)]
        assert lines[-1] == "29\n"
        with forked.start(textwrap.dedent(_TRAINING), tmp_path, 20, 60, 2) as new:
            told = new.stdout.read().splitlines()[-1]
            assert new.wait() == 0
        last = old.stdout.read().splitlines()[-1]
        assert old.wait() == 0
    assert told == "warnings 0"
    assert last.startswith("warnings 1 "), last
    with closing(read_run(tmp_path)) as run:
        assert run.series("who") == {step: 1.0 if step < 20 else 2.0 for step in range(60)}
        assert run.segments == [(0, 19), (20, 59)]
        assert run.damage == []


# --- any stop --------------------------------------------------------------------------------------------------------------------------

_STEPS = """
    import sys
    from pathlib import Path
    from torch_gradmon.runs import format as f
    from torch_gradmon.runs.writer import RunWriter
    from tests.test_run_bulk import _record
    f.INDEXED = 40
    store = RunWriter(sys.argv[1])
    first = 0 if store.last is None else store.last + 1
    store.claim({})
    for step in range(first, 10_000_000):
        store.log(_record(step, float(step)))
        print(step, flush=True)
"""


def _killed_at_random(times: int, path: Path) -> None:
    chance, known = random.Random(times), -1
    for _ in range(times):
        with forked.start(textwrap.dedent(_STEPS), path) as child:
            child.stdout.readline()
            time.sleep(chance.uniform(0, 0.05))
            child.kill()
            lines = child.stdout.read().splitlines(keepends=True)
        printed = [int(line) for line in lines if line.endswith("\n")]
        with closing(read_run(path)) as run:
            assert run.steps == list(range(len(run.steps)))
            assert (printed or [known])[-1] <= run.steps[-1] <= (printed or [known + 1])[-1] + 1
            known = run.steps[-1]
            assert run.series("x") == {step: float(step) for step in run.steps}
            assert run.table("gradient_before_clip", known).rows[0, 6] == -known
            assert run.damage == []


def test_a_killed_writer_loses_at_most_its_last_step(tmp_path: Path) -> None:
    _killed_at_random(5, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_writer_that_is_killed_again_and_again_loses_no_step(tmp_path: Path) -> None:
    for number in range(20):
        _killed_at_random(10, tmp_path / str(number))


# --- clocks, and what it costs ---------------------------------------------------------------------------------------------------------


def test_a_clock_that_is_set_back_moves_no_step(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = iter([*[1e9 + step for step in range(10)], *[1e9 - 1e7 + step for step in range(10_000)]])
    monitor = gradmon.watch(model, optimizer, run_dir=tmp_path, on_spike=None)
    with mock.patch.object(time, "time", side_effect=clock):
        for step in range(40):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            monitor.log_scalar("x", float(step))
    monitor.detach()
    with closing(read_run(tmp_path)) as run:
        assert _losses(run) == {step: float(step) for step in range(40)}
        assert run.segments == [(0, 39)]
        times = [run.context(step)["time"] for step in run.steps]
        assert min(times) < times[0]
    RunCard(tmp_path)


def _large(step: int, names: tuple[str, ...]) -> StepRecord:
    rows = torch.rand(len(names), 8, dtype=torch.float64) + step
    rows[:, 0] = 1000
    values = {Key("gradmon", "", name): float(step) for name in ("grad_norm", "grad_max", "update_ratio")}
    return StepRecord(step, float(step), True, values, {"gradient": StatsTable(names, rows, ALL_COLUMNS)}, {"lr": [0.1]})


def test_a_step_is_two_writes_and_a_late_value_one(tmp_path: Path) -> None:
    names = tuple(f"layer.{number}.weight" for number in range(200))
    store = RunWriter(tmp_path)
    store.claim({})
    late = {Key("", "loss", ""): 1.0}
    for step in range(3):
        record = _large(step, names)
        store.log(record)
        store.log(StepRecord(step, record.time, True, {**record.values, **late}, record.tables, record.context), update=True)
    sizes = [(tmp_path / name).stat().st_size for name in (VALUES, ROWS)]
    writes: list[int] = []
    write = os.write

    def counted(file: int, data: bytes) -> int:
        writes.append(len(data))
        return write(file, data)

    with mock.patch.object(os, "write", counted):
        for step in range(3, 103):
            record = _large(step, names)
            store.log(record)
            assert len(writes) == 2
            store.log(StepRecord(step, record.time, True, {**record.values, **late}, record.tables, record.context), update=True)
            assert len(writes) == 3
            writes.clear()
    store.close()
    grown = sum((tmp_path / name).stat().st_size for name in (VALUES, ROWS)) - sum(sizes)
    assert grown / 100 < 6000  # of which 5600 are rows


def test_what_is_not_asked_for_is_not_read(tmp_path: Path) -> None:
    names = tuple(f"layer.{number}.weight" for number in range(200))
    store = RunWriter(tmp_path)
    for step in range(1100):
        store.log(_large(step, names))
    with bytes_read() as count:
        with closing(read_run(tmp_path)) as run:
            size = (tmp_path / VALUES).stat().st_size
            assert count == {VALUES: count[VALUES], ROWS: 0} or count == {VALUES: count[VALUES]}
            count.clear()
            for step in range(1100, 1120):
                store.log(_large(step, names))
            assert run.refresh() == 1100
            grown = (tmp_path / VALUES).stat().st_size - size
            assert count[VALUES] <= grown + 32768
            assert count[ROWS] == 0
        store.close()
        for name in (VALUES, ROWS):
            os.utime(tmp_path / name, (1e9, 1e9))
        count.clear()
        RunCard(tmp_path)
        assert ROWS not in count
        assert count[VALUES] < (tmp_path / VALUES).stat().st_size * 0.8
        count.clear()
        with closing(read_run(tmp_path)) as run:
            assert list(run.stacks("update")) == []
            assert count[ROWS] < 20_000  # what the rows are, and none of them
            count.clear()
            assert [name for name, _ in PanelSet(run).panels()] == ["gradient", "sparsity"]
        assert count[ROWS] < 1.1 * (tmp_path / ROWS).stat().st_size


def test_a_row_of_a_finished_run_and_its_loss_read_2_percent(tmp_path: Path) -> None:
    names = tuple(f"layer.{number}.weight" for number in range(150))
    loss, store = Key("", "loss", ""), RunWriter(tmp_path)
    tables = [_large(step, names).tables for step in range(10)]
    for step in range(3000):
        record = _large(step, names[:1])._replace(tables=tables[step % 10])
        store.log(record)
        late = StepValues.of(record.values).updated({loss: math.sin(step)})
        store.log(record._replace(values=late), update=True)
    store.close()
    for name in (VALUES, ROWS):
        os.utime(tmp_path / name, (1e9, 1e9))
    with bytes_read() as count:
        RunCard(tmp_path)
        with closing(read_run(tmp_path)) as run:
            assert run.stored(loss) == {step: math.sin(step) for step in range(3000)}
    assert count.total() < 0.02 * sum((tmp_path / name).stat().st_size for name in (VALUES, ROWS))


def test_columns_that_are_zero_everywhere_take_no_bytes(tmp_path: Path) -> None:
    names = tuple(f"layer.{number}.weight" for number in range(100))
    sizes, tables = [], []
    for zeros in ([], [Column.NONFINITE], [Column.NONFINITE, Column.NEAR_ZERO], [*Column][1:]):
        rows = torch.ones(len(names), 8, dtype=torch.float64)
        rows[:, Column.SQUARE_SUM] = 10.0
        rows[:, zeros] = 0.0
        tables.append(StatsTable(names, rows, ALL_COLUMNS))
    store = RunWriter(tmp_path)
    for step, table in enumerate(tables):
        store.log(_large(step, names)._replace(tables={"gradient": table}))
        sizes.append((tmp_path / ROWS).stat().st_size)
    store.close()
    assert np.diff(sizes).tolist() == [6 * 400 + 39, 5 * 400 + 39, 400 + 39]  # one column stays at least
    with closing(read_run(tmp_path)) as run:
        assert all(torch.equal(run.table("gradient", step).rows, table.rows) for step, table in enumerate(tables))
        (stack,) = run.stacks("gradient")
        assert torch.equal(stack.rows, torch.stack([table.rows for table in tables]))
        assert run.series("gradient/layer.3.weight/nonfinite_count") == {0: 1.0, 1: 0.0, 2: 0.0, 3: 0.0}


def test_a_later_file_that_takes_long_to_read_holds_no_training_up(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    writer.claim({})
    record = StepRecord(0, 1.5e9, True, {Key("", "x", ""): 1.0}, {})
    for number in range(2, 40):
        with (tmp_path / f.name_of(number, f.VALUES)).open("wb") as file:
            file.truncate(1 << 30)
    reads = [0]
    read = LogReader._bytes

    def counted(self: LogReader, at: int, count: int) -> tuple[bytes, int]:
        reads[0] += 1
        return read(self, at, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LogReader, "_bytes", counted)
        patch.setattr(writing, "_LOOK_SECONDS", 0.0)  # each look has time for one read of each file
        for _ in range(3):
            writer._looked = -math.inf
            writer.log(record._replace(step=record.step + 1))
    assert reads[0] <= 3 * 2 * writing._SUCCESSORS
    writer.close()


def test_a_file_with_the_last_number_is_an_error_and_loses_no_run(tmp_path: Path) -> None:
    (tmp_path / f.name_of(10**9 - 1, f.VALUES)).touch()
    with pytest.raises(OSError, match="has the last number of a file; give another directory"):
        RunWriter(tmp_path)
    (tmp_path / "gradmon.\u0660\u0660\u0660\u0660\u0660\u0662.values").touch()
    assert f.pairs_in(tmp_path) == [10**9 - 1]
