"""Reading many steps at a time, and only what is new, gives what reading step by step from a run opened afresh does."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.analysis.run import read_run
from torch_gradmon.core import keys as n
from torch_gradmon.core.keys import Key, format_key
from torch_gradmon.core.moments import ALL_COLUMNS, VIEWS
from torch_gradmon.core.records import SpikeEvent, StatsTable, StepRecord
from torch_gradmon.runs import format as f
from torch_gradmon.runs.log import BLOCK
from torch_gradmon.runs.reader import _STEPS, RunReader, StatsSeries
from torch_gradmon.runs.writer import RunWriter

from .families import BY_NAME
from .oracle import measure
from .stored_runs import ROWS, VALUES, bytes_read

pytestmark = pytest.mark.thorough


def _trained(path: Path, family: str, steps: int = 12, clip: float | None = 0.05, **arguments: object) -> None:
    model = BY_NAME[family].model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer, run_dir=path, on_spike=None, **arguments)
    for step, batch in enumerate(BY_NAME[family].batches(steps)):
        optimizer.zero_grad()
        BY_NAME[family].loss(model, batch).backward()
        if clip is not None and step % 3:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        some = next(p for p in model.parameters() if p.grad is not None and p.numel())
        if step == 8:
            some.grad.view(-1)[0] = math.nan
        if step in (5, 9):  # a step in which a parameter has no gradient
            some.grad = None
        optimizer.step()
        monitor.log_scalar("loss", step * 0.5)
    monitor.detach()


def _steps(stacks: Iterator[StatsSeries]) -> list[tuple[int, tuple[str, ...], torch.Tensor, frozenset]]:
    return [(step, s.names, rows, s.columns) for s in stacks for step, rows in zip(s.steps, s.rows, strict=True)]


def _assert_stacks_are_tables(run: RunReader, since: int | None = None) -> None:
    for source in n.TENSOR_SOURCES:
        found = {step: rest for step, *rest in _steps(run.stacks(source, since))}
        wanted = {step: run.table(source, step) for step in run.steps if since is None or step >= since}
        wanted = {step: table for step, table in wanted.items() if table is not None}
        assert list(found) == list(wanted)
        for step, (names, rows, columns) in found.items():
            assert (names, columns) == (wanted[step].names, wanted[step].columns)
            assert torch.equal(rows.nan_to_num(nan=-7.5), wanted[step].rows.nan_to_num(nan=-7.5))


def _assert_records_are_steps(run: RunReader, since: int | None = None) -> None:
    records = list(run.records(since))
    assert [record.step for record in records] == [step for step in run.steps if since is None or step >= since]
    for record in records:
        values = {format_key(key): value for key, value in record.values.items()}
        assert repr(values) == repr(run.metrics(record.step))  # repr: NaN is not equal to itself
        assert {"time": record.time, "applied": record.applied, **record.context} == run.context(record.step)
    assert repr([event for record in run.records() for event in record.events]) == repr(run.events)


@pytest.mark.parametrize("clip", [0.05, None])
@pytest.mark.parametrize("family", ["mlp", "gpt_tied", "odd_sizes", "frozen_unused"])
def test_what_is_read_at_once_is_what_is_read_step_by_step(family: str, clip: float | None, tmp_path: Path) -> None:
    _trained(tmp_path, family, clip=clip, preset="full")
    run = read_run(tmp_path)
    assert {n.GRADIENT, n.GRADIENT_BEFORE_CLIP, n.PARAMETER, n.UPDATE, n.ACTIVATION} <= set(run.sources)
    for since in (None, 0, 5, 11, 12):
        _assert_stacks_are_tables(run, since)
        _assert_records_are_steps(run, since)


def test_what_is_present_in_some_steps_is_what_they_have(tmp_path: Path) -> None:
    _trained(tmp_path, "frozen_unused", preset="full")
    run = read_run(tmp_path)
    for steps in (run.steps, [5], [0, 9, 11, 99], []):
        there = [step for step in steps if step in run.steps]
        found = {
            Key(source, name, "") for source in run.sources for step in there for name in (run.table(source, step) or _NONE).names
        }
        assert run.present(steps) == found.union(*(record.values for record in run.records() if record.step in steps))


def test_wanted_chooses_values(tmp_path: Path) -> None:
    _trained(tmp_path, "mlp")
    run = read_run(tmp_path)
    assert [record.values for record in run.records(10, lambda key: not key.source)] == [
        {Key("", "loss", ""): 5.0},
        {Key("", "loss", ""): 5.5},
    ]
    assert all(record.values == {} for record in run.records(wanted=lambda key: False))


def test_the_values_of_a_stack_are_those_of_a_series(tmp_path: Path) -> None:
    _trained(tmp_path, "mlp")
    run = read_run(tmp_path)
    for metric in VIEWS:
        for stack in run.stacks(n.GRADIENT_BEFORE_CLIP):
            assert stack.has(metric)
            for name, column in zip(stack.names, stack.values(metric).unbind(1), strict=True):
                series = run.series(f"{n.GRADIENT_BEFORE_CLIP}/{name}/{metric}")
                for step, value in zip(stack.steps, column.tolist(), strict=True):
                    assert value == pytest.approx(series.get(step, math.nan), nan_ok=True, rel=1e-12)
    narrow = StatsSeries((0,), ("a",), torch.ones(1, 1, 8, dtype=torch.float64), VIEWS["norm"].columns)
    assert narrow.has("norm")
    assert not narrow.has("mean")


def test_merged_rows_are_those_of_the_tensors_together() -> None:
    tensors = {"a.w": torch.randn(3, 5), "a.b": torch.tensor([2.0, 0.0]), "c": torch.tensor([-9.0])}
    steps = [{name: (number + 1) * tensor for name, tensor in tensors.items()} for number in range(4)]
    rows = torch.stack([torch.cat([measure([t], ALL_COLUMNS) for t in step.values()]) for step in steps])
    merged = StatsSeries((0, 1, 2, 3), tuple(tensors), rows, ALL_COLUMNS).merged(("a", "c", "none"), [0, 0, 1])
    for metric in ("norm", "mean", "std", "max", "min_value", "sparsity", "l1_norm"):
        for number, step in enumerate(steps):
            together = torch.cat([step["a.w"].flatten(), step["a.b"]]).double()
            expected = {
                "norm": together.norm(),
                "mean": together.mean(),
                "std": together.std(correction=0),
                "max": together.abs().max(),
                "min_value": together.min(),
                "sparsity": (together.abs() <= 1e-8).double().mean(),
                "l1_norm": together.abs().sum(),
            }[metric]
            assert merged.values(metric)[number, 0].item() == pytest.approx(expected.item(), rel=1e-6)
    assert merged.values("mean")[:, 2].isnan().all()


# --- only what is new ----------------------------------------------------------------------------------------------------------------


def _record(step: int, value: float, events: bool = False) -> StepRecord:
    rows = measure([torch.tensor([value, -value, 0.0])], ALL_COLUMNS).repeat(2, 1)
    tables = {"gradient_before_clip": StatsTable(("a", "b"), rows, ALL_COLUMNS)}
    found = (SpikeEvent(step, "x", value, 9.0, 5.0, "much"),) if events else ()
    return StepRecord(step, float(step), True, {Key("", "x", ""): value}, tables, {"lr": [value]}, found)


_NONE = StatsTable((), torch.empty(0, 8), frozenset())


#: How often each of these happens.
_HABITS = ([10, 3, 2, 1, 1, 1], [10, 10, 0, 1, 0, 0], [10, 0, 0, 1, 0, 0])


class _Follower:
    """What somebody keeps who reads only what is new."""

    def __init__(self, run: RunReader) -> None:
        self.run = run
        self.records = {record.step: record for record in run.records()}

    def look(self) -> int | None:
        since = self.run.refresh()
        if since is not None:
            self.records = {step: record for step, record in self.records.items() if step < since}
            self.records.update((record.step, record) for record in self.run.records(since))
        return since


@pytest.mark.parametrize("seed", range(30))
def test_whoever_reads_what_is_new_knows_what_a_fresh_reader_knows(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps, late values, steps in between that are filled in, facts, rollbacks, resuming, in any order."""
    chance = random.Random(seed)
    monkeypatch.setattr(f, "INDEXED", chance.choice([5, 20, 512]))
    store = RunWriter(tmp_path)
    follower = _Follower(read_run(tmp_path))
    assert follower.records == {}
    step, value = 0, 0.0
    for _ in range(120):
        value += 1
        what = chance.choices(["step", "amend", "fill", "fact", "back", "resume"], chance.choice(_HABITS))[0]
        if what == "step" or step == 0:
            step += chance.choice([1, 1, 10])
            store.log(_record(step, value))
            last = step
        elif what == "amend":
            store.log(_record(last, value, events=True), update=True)
        elif what == "fill" and last > 3:
            store.log(_record(max(0, last - chance.randrange(1, 25)), value), backfill=True)
        elif what == "fact":
            store.annotate({"x": value})
        elif what == "back":
            step = chance.randrange(0, step + 1)
            if chance.random() < 0.5:
                store.rewind(step)
            else:
                store.log(_record(step, value))
                last = step
        elif what == "resume":
            store.close()
            store = RunWriter(tmp_path)
            step = max(0, step - chance.choice([0, 0, 5]))
        if chance.random() < 0.4:
            follower.look()
            fresh = read_run(tmp_path)
            assert follower.run.steps == fresh.steps
            assert follower.run.segments == fresh.segments
            assert list(follower.records.values()) == list(fresh.records())
            assert follower.run.events == fresh.events
            assert follower.run.stored(Key("", "x", "")) == fresh.stored(Key("", "x", ""))
            assert {step: record.values[Key("", "x", "")] for step, record in follower.records.items()} == fresh.stored(
                Key("", "x", "")
            )
            assert follower.run.meta == fresh.meta
            fresh.close()
    store.close()
    follower.look()
    assert follower.look() is None
    _assert_stacks_are_tables(follower.run)
    _assert_records_are_steps(follower.run)


def test_segments_are_what_was_written_without_a_break(tmp_path: Path) -> None:
    assert RunWriter(tmp_path).close() is None
    assert read_run(tmp_path).segments == []
    store = RunWriter(tmp_path)
    for step in [*range(0, 900, 10), *range(450, 500, 10)]:
        store.log(_record(step, 1.0))
    run = read_run(tmp_path)
    assert run.segments == [(0, 440), (450, 490)]
    assert len(run.steps) == 50
    store.close()


def test_what_a_rollback_took_back_is_gone_though_nothing_takes_its_place(tmp_path: Path) -> None:
    store = RunWriter(tmp_path)
    for step in range(10):
        store.log(_record(step, 1.0))
    follower = _Follower(read_run(tmp_path))
    store.rewind(4)
    assert follower.look() == 4
    assert follower.run.steps == list(follower.records) == [0, 1, 2, 3]
    store.log(_record(7, 2.0))
    assert follower.look() == 7
    assert follower.run.steps == list(follower.records) == read_run(tmp_path).steps == [0, 1, 2, 3, 7]
    store.close()


def test_the_parts_that_are_read_meet(tmp_path: Path) -> None:
    store = RunWriter(tmp_path)
    steps = 2 * _STEPS + 1
    for step in range(steps):
        store.log(_record(step, float(step)))
    store.close()
    run = read_run(tmp_path)
    assert [record.step for record in run.records()] == list(range(steps))
    assert [step for stack in run.stacks("gradient_before_clip") for step in stack.steps] == list(range(steps))


def test_a_look_costs_no_more_in_a_long_run(tmp_path: Path) -> None:
    store = RunWriter(tmp_path)
    with bytes_read() as count:
        run = read_run(tmp_path)
        for step in range(2001):
            store.log(_record(step, 1.0))
            if step in (99, 1999):
                run.refresh()
                count.clear()
            if step in (100, 2000):
                run.refresh()
                assert run.steps == list(range(step + 1))
                assert count.total() < BLOCK + 1000  # from the beginning of a block on
    store.close()


def test_a_reader_in_the_middle_of_its_reading_holds_up_no_writer(tmp_path: Path) -> None:
    store = RunWriter(tmp_path)
    for step in range(3 * _STEPS):
        store.log(_record(step, 1.0))
    run = read_run(tmp_path)
    records, stacks = run.records(), run.stacks("gradient_before_clip")
    next(records)
    next(stacks)
    store.log(_record(10_000, 1.0))
    store.rewind(10_000)
    assert sum(1 for _ in records) == 3 * _STEPS - 1
    assert run.refresh() == 10_000
    store.log(_record(10_000, 2.0))
    assert run.refresh() == 10_000
    assert run.steps[-1] == 10_000
    store.close()


def test_a_run_is_whole_in_a_copy_of_its_two_files(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, run_dir=tmp_path / "run")
    for step in range(20):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if step == 10:
            run = read_run(tmp_path / "run")
    monitor.detach()
    (tmp_path / "copy").mkdir()
    for name in (VALUES, ROWS):
        (tmp_path / "copy" / name).write_bytes((tmp_path / "run" / name).read_bytes())
    assert read_run(tmp_path / "copy").steps == list(range(20))
    assert run.refresh() == 11
    assert run.steps == list(range(20))
