"""Windows: what a run knows of some steps, as matrices, is what it tells step by step."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor
from torch_gradmon.analysis.run import read_run
from torch_gradmon.core.keys import GRADIENT, GRADIENT_BEFORE_CLIP, TENSOR_SOURCES, Key, format_key
from torch_gradmon.core.moments import ALL_COLUMNS, ALWAYS, VIEWS, Column
from torch_gradmon.core.records import StatsTable, StepRecord
from torch_gradmon.runs import reader as window
from torch_gradmon.runs.reader import COUNT, RunReader, single_threaded
from torch_gradmon.runs.writer import RunWriter
from torch_gradmon.step.plan import evaluate_view

from .families import BY_NAME
from .oracle import measure


def values_of(run: RunReader, step: int) -> dict[str, float]:
    """What the run tells of one step by other means: what is stored as such, else the views of its tables, and the counts."""
    found = {}
    for source in TENSOR_SOURCES:
        table = run.table(source, step)
        if table is not None:
            for metric, view in VIEWS.items():
                if view.columns <= table.columns | ALWAYS:
                    there, values = evaluate_view(view, table.rows)
                    pairs = zip(table.names, values, there, strict=True)
                    found.update({f"{source}/{name}/{metric}": value for name, value, is_there in pairs if is_there})
            counts = zip(table.names, table.rows[:, Column.COUNT].tolist(), strict=True)
            found.update({f"{source}/{name}/{COUNT}": count for name, count in counts})
    return {**found, **run.metrics(step)}


def same(one: dict[str, float], other: dict[str, float]) -> bool:
    """Bit for bit, except that NaN is NaN."""
    return one.keys() == other.keys() and all(
        value == other[key] or (math.isnan(value) and math.isnan(other[key])) for key, value in one.items()
    )


def _check(run: RunReader, steps: list[int]) -> int:
    """Every value of a window, and no other, is what the run has; returns how many there are."""
    window = run.window(steps)
    assert list(window.steps) == [step for step in run.steps if step in steps]
    sheets = [window.others, *map(window.sheet, window.sources)]
    number = 0
    for row, step in enumerate(window.steps):
        found: dict[str, float] = {}
        for sheet in sheets:
            values, there = sheet.values[row].tolist(), sheet.there[row].tolist()
            assert all(math.isnan(value) for value, is_there in zip(values, there, strict=True) if not is_there)
            of_sheet = zip(map(format_key, sheet.keys), values, there, strict=True)
            new = {key: value for key, value, is_there in of_sheet if is_there}
            assert not new.keys() & found.keys()
            found.update(new)
        assert same(found, values_of(run, step))
        number += len(found)
    return number


@pytest.mark.parametrize("family", ["mlp", "gpt_tied", "odd_sizes", "frozen_unused"])
def test_a_window_has_the_values_of_its_steps(family: str, tmp_path: Path) -> None:
    model = BY_NAME[family].model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer, preset="full", run_dir=tmp_path, on_spike=None)
    monitor.add_gradient_metric("total", lambda g: g.sum(), every=2)
    monitor.add_update_metric("std", every=3)
    for step, batch in enumerate(BY_NAME[family].batches(7)):
        optimizer.zero_grad()
        BY_NAME[family].loss(model, batch).backward()
        if step % 2:  # where nothing clips, the gradients of the optimizer are stored as those before clipping
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if step == 4:
            monitor.log_scalar("seldom", math.nan)
        monitor.log_scalar("loss", float(step))
        optimizer.step()
    monitor.detach()
    run = read_run(tmp_path)
    assert _check(run, run.steps) > 300
    assert _check(run, [1, 4, 5, 99]) > 100
    assert _check(run, []) == 0
    assert run.window([4]).records[4].context["lr"] == [1e-3]


def _tables() -> dict[str, StatsTable]:
    tensors = {
        "normal": torch.arange(10.0),
        "nan": torch.tensor([1.0, math.nan]),
        "only inf": torch.tensor([math.inf]),
        "empty": torch.empty(0),
        "zero_count": torch.zeros(3),
    }
    rows = torch.stack([measure([tensor], ALL_COLUMNS)[0] for tensor in tensors.values()])
    names = tuple(tensors)
    return {
        GRADIENT_BEFORE_CLIP: StatsTable(names, rows, ALL_COLUMNS),
        GRADIENT: StatsTable(names[1:], rows[1:], ALL_COLUMNS, same_as=GRADIENT_BEFORE_CLIP),  # a part of them
        "activation": StatsTable(names[:3], rows[:3], VIEWS["norm"].columns),
    }


def test_odd_tensors_and_parts_of_another_source_read_back(tmp_path: Path) -> None:
    store = RunWriter(tmp_path)
    for step in range(3):
        tables = _tables()
        if step == 1:
            del tables["activation"]
        custom = {Key("gradient", "zero_count", "norm"): 7.0} if step == 0 else {}
        store.log(StepRecord(step, 0.0, True, {**custom, Key("", "x", ""): math.inf}, tables))
    store.close()
    run = read_run(tmp_path)
    assert _check(run, run.steps) > 40
    sheet = run.window(run.steps).sheet(GRADIENT)
    assert [key.name for key in sheet.keys if key.metric == COUNT] == ["nan", "only inf", "empty", "zero_count"]
    norms = sheet.values[:, sheet.keys.index(Key("gradient", "zero_count", "norm"))].tolist()
    assert norms == [7.0, 0.0, 0.0]  # what is stored as such comes first


def test_later_segments_take_the_place_of_steps(tmp_path: Path) -> None:
    for steps, value in ((range(9), 0.0), (range(3, 5), 100.0)):
        store = RunWriter(tmp_path)
        for step in steps:
            table = StatsTable(("w",), torch.full((1, 8), value + step + 1, dtype=torch.float64), ALL_COLUMNS)
            store.log(StepRecord(step, 0.0, True, {Key("", "x", ""): value + step}, {"parameter": table}))
        store.close()
    run = read_run(tmp_path)
    window = run.window(range(20))
    assert window.steps == (0, 1, 2, 3, 4)
    assert window.others.values[:, 0].tolist() == [0, 1, 2, 103, 104]
    assert _check(run, [2, 3]) > 5


def test_two_windows_are_alike_if_their_bytes_are(tmp_path: Path) -> None:
    windows = []
    for number, scale in enumerate((1.0, 1.0, 1.0 + 1e-6)):
        store = RunWriter(tmp_path / str(number))
        for step in range(3):
            rows = measure([torch.arange(5.0) * (scale if step == 2 else 1.0)], ALL_COLUMNS)
            store.log(StepRecord(step, float(number), True, {}, {"parameter": StatsTable(("w",), rows, ALL_COLUMNS)}))
        store.close()
        windows.append(read_run(tmp_path / str(number)).window(range(3)))
    assert windows[0].is_like(windows[1], "parameter")
    assert not windows[0].is_like(windows[2], "parameter")
    assert windows[0].is_like(windows[2], "gradient")  # of which there is nothing


def test_a_custom_metric_is_no_reason_to_take_windows_for_alike(tmp_path: Path) -> None:
    for name, factor in (("a", 1.0), ("b", 2.0)):
        model = nn.Linear(2, 1)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        monitor = ModuleMonitor(model, run_dir=tmp_path / name)
        monitor.add_parameter_metric("norm")
        monitor.add_parameter_metric("mine", lambda w, factor=factor: w.sum() * factor, "weight")
        monitor.begin_step(0)
        monitor.monitor_parameters()
        monitor.end_step()
        monitor.detach()
    one, other = (read_run(tmp_path / name).window([0]) for name in "ab")
    assert not one.is_like(other, "parameter")


def test_a_window_has_no_cells_for_keys_of_other_sources(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    for step in range(50):
        values = {Key("", "loss", ""): 1.0, Key("gradient", f"w{step}", "own"): 2.0}
        writer.log(StepRecord(step, float(step), True, values, {}, {}, ()))
    writer.close()
    with mock.patch.object(window, "empty_matrix", wraps=window.empty_matrix) as made:
        found = read_run(tmp_path).window(range(50))
        assert found.others.keys == (Key("", "loss", ""),)
        assert found.sources == ["gradient"]
    assert [call.args for call in made.call_args_list] == [(50, 1)]
    assert found.sheet("gradient").there.sum() == 50


def test_the_number_of_threads_is_as_before() -> None:
    torch.set_num_threads(2)
    with contextlib.suppress(KeyError), single_threaded():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == 2


def test_a_series_has_the_steps_in_which_a_value_is_stored_and_those_in_which_it_follows(tmp_path: Path) -> None:
    """A layer of the dashboard stores its norm, but in steps in which a metric has the statistics of its parameter stored."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.ModuleMonitor(model, run_dir=tmp_path, layers="weight")
    for name in ("norm", "max", "sparsity"):
        monitor.add_gradient_metric(name, metric_regex="weight", every=2)
    monitor.attach(optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    known = monitor.get_all_metrics()
    monitor.detach()
    run = read_run(tmp_path)
    for key in {key for values in known.values() for key in values}:
        series = run.series(key)
        for step, values in known.items():
            assert key not in values or series[step] == pytest.approx(values[key], rel=1e-6), (key, step)
