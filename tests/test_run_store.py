"""The run directory: what goes in comes out again, whatever happens to the process, the disk or the step numbers."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, ModuleMonitor, SpikeDetector, load_run
from torch_gradmon.analysis.many_runs import RunCard
from torch_gradmon.analysis.run import diagnose
from torch_gradmon.cli.main import main
from torch_gradmon.core.keys import Key, parse_key
from torch_gradmon.core.moments import ALL_COLUMNS, VIEWS, Column
from torch_gradmon.core.records import StatsTable, StepRecord
from torch_gradmon.runs.log import LogWriter
from torch_gradmon.runs.writer import RunWriter
from torch_gradmon.spikes import MedianMad

from .families import BY_NAME
from .oracle import measure


def _same(stored: float, live: float) -> bool:
    return math.isclose(stored, live, rel_tol=1e-6) or (math.isnan(stored) and math.isnan(live))


@pytest.mark.parametrize("family", ["mlp", "gpt_tied", "odd_sizes", "bf16", "frozen_unused"])
def test_every_value_that_was_shown_reads_back(family: str, tmp_path: Path) -> None:
    model = BY_NAME[family].model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer, run_dir=tmp_path, on_spike=None)
    for metric in VIEWS:
        monitor.add_gradient_metric(metric)
        monitor.add_parameter_metric(metric)
        monitor.add_update_metric(metric, every=2)
        monitor.add_activation_metric(metric)
    for batch in BY_NAME[family].batches(6):
        optimizer.zero_grad()
        BY_NAME[family].loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    live = monitor.get_all_metrics()
    monitor.detach()
    run = load_run(tmp_path)
    assert run.steps == list(live) == list(range(6))
    run.steps.reverse()  # lists of their own, which a script may change
    run.segments.clear()
    assert (run.steps, run.segments) == (list(range(6)), [(0, 5)])
    keys = {key for values in live.values() for key in values}
    assert {parse_key(key).source for key in keys} == {
        "gradmon",
        "gradient",
        "gradient_before_clip",
        "parameter",
        "update",
        "activation",
    }
    assert not keys - set(run.keys())
    for key in keys:
        series = run.series(key)
        assert series.keys() == {step for step, values in live.items() if key in values}
        assert [(key, step) for step, value in series.items() if not _same(value, live[step][key])] == []


def test_metrics_that_nobody_asked_for_follow_from_the_rows(tmp_path: Path) -> None:
    model = BY_NAME["mlp"].model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradmon.watch(model, optimizer, run_dir=tmp_path)
    gradients: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for batch in BY_NAME["mlp"].batches(5):
        optimizer.zero_grad()
        BY_NAME["mlp"].loss(model, batch).backward()
        for name, parameter in model.named_parameters():
            gradients[name].append(parameter.grad.double().clone())
        optimizer.step()
    run = load_run(tmp_path)
    assert all(map(run.series, run.keys()))
    for name, of_steps in gradients.items():
        for step, g in enumerate(of_steps):
            for metric, value in {
                "std": g.std(correction=0),
                "l1_norm": g.abs().sum(),
                "max": g.abs().max(),
                "min_value": g.min(),
            }.items():
                assert run.series(f"gradient_before_clip/{name}/{metric}")[step] == pytest.approx(value.item(), rel=1e-6)
            assert run.series(f"gradient_before_clip/{name}/mean")[step] == pytest.approx(
                g.mean().item(), abs=1e-6 * g.abs().mean().item()
            )


_SEEDED = torch.Generator().manual_seed(5)
_TENSORS = {
    "normal": torch.randn(1000, generator=_SEEDED),
    "variance far below the squared mean": 1000 + 1e-3 * torch.randn(10_000, dtype=torch.float64, generator=_SEEDED),
    "constant": torch.full((777,), 0.1),
    "zero_count": torch.zeros(5),
    "empty": torch.empty(0, 3),
    "one": torch.tensor([-3.5]),
    "nan": torch.tensor([1.0, math.nan, -2.0]),
    "inf": torch.tensor([1.0, math.inf, -2.0]),
    "minus inf": torch.tensor([1.0, -math.inf, -2.0]),
    "both infs": torch.tensor([1.0, math.inf, -math.inf]),
    "only nan": torch.tensor([math.nan, math.nan]),
    "tiny": torch.randn(100, generator=_SEEDED) * 1e-18,
    "huge": torch.randn(100, generator=_SEEDED) * 1e18,
    "below eps": torch.tensor([1e-9, 1.0, 0.0]),
}


def _through_the_store(path: Path, table: StatsTable) -> StatsTable:
    store = RunWriter(path)
    store.log(StepRecord(0, 1.0, True, {}, {"gradient": table}))
    store.close()
    back = load_run(path)._reader.table("gradient", 0)
    assert back is not None
    assert back.names == table.names
    assert back.columns == table.columns
    return back


@pytest.mark.parametrize(
    "columns",
    [
        ALL_COLUMNS,
        VIEWS["norm"].columns | VIEWS["max"].columns,
        VIEWS["std"].columns,
        VIEWS["l1_norm"].columns,
        VIEWS["zero_count"].columns,
    ],
)
def test_a_table_of_odd_tensors_reads_back(columns: frozenset[Column], tmp_path: Path) -> None:
    rows = torch.stack([measure([tensor], columns)[0] for tensor in _TENSORS.values()])
    table = StatsTable(tuple(_TENSORS), rows, columns)
    back = _through_the_store(tmp_path, table)
    for metric, view in VIEWS.items():
        if view.columns <= columns | {Column.COUNT, Column.NONFINITE}:
            assert torch.equal(view.defined(back.rows), view.defined(rows))
            pairs = zip(
                table.names, view.compute(back.rows).tolist(), view.compute(rows).tolist(), view.defined(rows), strict=True
            )
            for name, stored, live, defined in pairs:
                # a variance far below the squared mean: float64 sums keep the deviation to 1e-7 of the rms
                slack = 1e-7 * _TENSORS[name].double().square().mean().sqrt().item() if metric == "std" else 0.0
                assert not defined or _same(stored, live) or abs(stored - live) <= slack, (metric, name, stored, live)


def test_counts_of_thirty_million_elements_keep_their_metrics(tmp_path: Path) -> None:
    count, mean, std = 30_000_001.0, 0.7, 1e-4
    row = [count, count * mean, count * mean, count * (mean**2 + std**2), 12_345_679.0, 3.0, -1.5, 2.5]
    table = StatsTable(("w",), torch.tensor([row], dtype=torch.float64), ALL_COLUMNS)
    back = _through_the_store(tmp_path, table)
    for metric, view in VIEWS.items():
        assert _same(view.compute(back.rows).item(), view.compute(table.rows).item()), metric


def test_scalars_events_and_context_read_back(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.25}])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    monitor = ModuleMonitor(model, run_dir=tmp_path, prefix="p/", key_order="metric_first")
    monitor.add_detector(SpikeDetector(MedianMad(warmup=4), "loss"))
    monitor.add_gradient_metric("mine", lambda g: g.abs().sum(), "weight", stages="after_clip")
    monitor.attach(optimizer, scaler=scaler)
    odd = [1.0, 1.01, 0.99, 1.0, 1.0, math.nan, math.inf, -math.inf, 9.0, 1e-300, 1e300]
    for step, value in enumerate(odd):
        optimizer.zero_grad()
        monitor_loss = model(torch.ones(1, 2)).sum() * (math.inf if step == 4 else 1.0)
        monitor.log_scalar("loss", value)
        monitor.log_context(batch_ids=[step, step + 1])
        scaler.scale(monitor_loss).backward()
        scaler.step(optimizer)
        scaler.update()
    monitor.detach()
    run = load_run(tmp_path)
    loss = run.series("loss")
    assert list(loss) == list(range(len(odd)))
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(loss.values(), odd, strict=True))
    assert run.series("gradient/weight/mine")[0] == pytest.approx(2.0)
    assert run.record(3).metrics["loss"] == 1.0
    assert [event.step for event in run.spikes] == [5, 6, 7, 8, 10]
    assert run.spikes[3].value == 9.0
    context = run.record(4).context
    assert (context["lr"], context["applied"], context["tags"]) == ([0.5, 0.25], False, {"batch_ids": [4, 5]})
    assert context["amp_scale"] in (4.0, 8.0)
    assert run.record(3).context["applied"]
    assert abs(run.record(3).context["time"] - time.time()) < 600
    assert run._reader.meta["model"] == "Linear"
    assert run._reader.meta["parameters"]["weight"] == {"shape": [1, 2], "dtype": "torch.float32"}
    with pytest.raises(KeyError, match=r"lost.*did you mean loss"):
        run.series("lost")
    with pytest.raises(KeyError, match=r"step 99 .* are 0 to 10"):
        _ = run.record(99).metrics


def test_a_late_value_after_detach_and_attach_reads_back(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, run_dir=tmp_path)
    for step in range(4):
        if step == 2:
            monitor.detach()
            monitor.attach(optimizer)
        monitor.log_scalar("late", float(step))
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    live = monitor.get_all_metrics()
    monitor.detach()
    run = load_run(tmp_path)
    assert (
        run.series("late")
        == {step: values["late"] for step, values in live.items() if "late" in values}
        == {0: 0.5, 1: 2.0, 2: 3.0}
    )
    assert run.series("gradmon/grad_norm") == {step: values["gradmon/grad_norm"] for step, values in live.items()}


def test_a_step_of_200_parameters_costs_six_to_eight_kilobytes(tmp_path: Path) -> None:
    model = nn.ParameterList(nn.Parameter(torch.randn(3, 3)) for _ in range(200))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, run_dir=tmp_path)

    def size_after(steps: int) -> int:
        for _ in range(steps):
            optimizer.zero_grad()
            sum(p.square().sum() for p in model).backward()
            optimizer.step()
        monitor.detach()
        monitor.attach(optimizer)
        return sum(file.stat().st_size for file in tmp_path.iterdir() if "values" in file.name or "rows" in file.name)

    first = size_after(20)
    per_step = (size_after(40) - first) / 40
    assert 6000 < per_step < 11_000  # every tenth step has all columns of the parameters and the updates too


# --- segments ----------------------------------------------------------------------------------------------------------------------


def _log(path: Path, steps: range, value: float) -> None:
    store = RunWriter(path)
    for step in steps:
        store.log(StepRecord(step, 0.0, True, {Key("", "x", ""): value + step}))
    store.close()


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(range(5), 0), (range(5, 8), 100)], {**{s: s for s in range(5)}, **{s: 100 + s for s in range(5, 8)}}),
        ([(range(5), 0), (range(3, 7), 100)], {0: 0, 1: 1, 2: 2, 3: 103, 4: 104, 5: 105, 6: 106}),
        ([(range(9), 0), (range(3, 5), 100)], {0: 0, 1: 1, 2: 2, 3: 103, 4: 104}),
        ([(range(9), 0), (range(3, 5), 100), (range(4, 6), 200)], {0: 0, 1: 1, 2: 2, 3: 103, 4: 204, 5: 205}),
        ([(range(5), 0), (range(4, 5), 100)], {0: 0, 1: 1, 2: 2, 3: 3, 4: 104}),
        ([(range(3), 0), (range(10, 12), 100), (range(2, 3), 200)], {0: 0, 1: 1, 2: 202}),
    ],
)
def test_a_resumed_run_goes_on_and_what_a_later_segment_repeats_takes_its_place(
    parts: list[tuple[range, float]], expected: dict[int, float], tmp_path: Path
) -> None:
    for steps, value in parts:
        _log(tmp_path, steps, value)
    run = load_run(tmp_path)
    assert run.series("x") == expected
    assert run.steps == list(expected)


def _train_into(path: Path, model: nn.Module, name: str, clip: float | None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, run_dir=path, on_spike=None)
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(torch.ones(8, 4)).square().mean()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        monitor.log_scalar(name, loss)
    monitor.detach()


@pytest.fixture
def used_twice(tmp_path: Path) -> Path:
    """A run directory whose first run had a clip, a layer more, and another name for the loss."""
    _train_into(tmp_path, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), "old", 0.01)
    with pytest.warns(GradmonWarning, match="takes its place"):
        _train_into(tmp_path, nn.Linear(4, 2), "loss", None)
    return tmp_path


def test_a_directory_used_twice_has_the_keys_of_its_last_run(used_twice: Path) -> None:
    run = load_run(used_twice)
    keys = run.keys()
    assert "loss" in keys
    assert not [key for key in keys if "clip" in key.rpartition("/")[2] or "old" in key or "0." in key or "1." in key]
    assert {name for source in run.sources for name in run.tensors(source)} == {"weight", "bias"}
    assert {key.name for key in run._reader.scalars if not key.source} == {"loss"}
    for key in keys:
        assert set(run.series(key)) <= set(run.steps)
    for gone in ("gradmon/grad_norm_after_clip", "old", "gradient/0.weight/norm"):
        with pytest.raises(KeyError) as caught:
            run.series(gone)
        suggested = str(caught.value).partition("did you mean")[2]
        assert gone not in suggested.replace("?", ",").split(", ")


def test_everything_that_reads_takes_a_directory_used_twice(used_twice: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = load_run(used_twice)
    assert diagnose(used_twice).steps == (0, 11)
    assert "old" not in str(RunCard(used_twice).to_dict())
    for kind in ("heatmap", "norm", "update", "depth", "layers"):
        pytest.importorskip("plotly")
        run.plot(kind)
    for command in ("report", "summary", "status", "diagnose"):
        assert main([command, str(used_twice)]) == 0, capsys.readouterr().err


def test_a_listed_key_without_a_defined_value_is_an_empty_series(tmp_path: Path) -> None:
    store = RunWriter(tmp_path)
    rows = torch.zeros(1, 8, dtype=torch.float64)
    rows[0, Column.COUNT] = rows[0, Column.NONFINITE] = 4
    rows[0, Column.MIN], rows[0, Column.MAX] = math.inf, -math.inf
    for step in range(3):
        store.log(StepRecord(step, 0.0, True, {}, {"gradient": StatsTable(("a",), rows, ALL_COLUMNS)}))
    store.close()
    run = load_run(tmp_path)
    series = {key: run.series(key) for key in run.keys()}  # noqa: SIM118 (a method of the run)
    assert series["gradient/a/nonfinite_count"] == {0: 4, 1: 4, 2: 4}


def test_a_rollback_inside_one_process_opens_a_segment_too(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    monitor = ModuleMonitor(model, run_dir=tmp_path)
    for value, steps in ((0, range(6)), (100, range(3, 5))):
        for step in steps:
            if value and step == 3:
                with pytest.warns(GradmonWarning, match="step 3 comes after step 5; a new segment"):
                    monitor.begin_step(step)
            else:
                monitor.begin_step(step)
            monitor.log_scalar("x", value + step)
            monitor.end_step()
    assert load_run(tmp_path).series("x") == {0: 0, 1: 1, 2: 2, 3: 103, 4: 104}


def test_a_value_that_came_late_is_in_the_run_once(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    monitor = ModuleMonitor(model, run_dir=tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor.attach(optimizer)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        monitor.log_scalar("late", step * 10)
    run = load_run(tmp_path)
    assert run.series("late") == {0: 0, 1: 10, 2: 20, 3: 30}


# --- what is no run ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "short text", "another log", "another format", "directory", "pipe"])
def test_what_is_no_run_is_refused(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "gradmon.000001.values"
    if kind == "another log":
        LogWriter(file).append(b"x" * 300)
    elif kind == "another format":
        LogWriter(file).append(b'J{"is":"head","format":2}')
    elif kind == "directory":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.write_bytes(b"hello " * (10_000 if kind == "text" else 10))
    with pytest.raises(ValueError, match=r"gradmon\.000001\.values"):
        load_run(tmp_path)


@pytest.mark.parametrize("data", [b"", bytes(10), bytes(50_000)])
def test_a_run_of_which_nothing_can_be_seen_yet_is_empty(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "gradmon.000001.values").write_bytes(data)
    assert load_run(tmp_path).steps == []
    assert RunCard(tmp_path).state == "empty"


def test_a_run_of_an_older_version_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "gradmon.sqlite").write_bytes(b"SQLite format 3")
    with pytest.raises(ValueError, match="is of an older version"):
        load_run(tmp_path)


def test_a_late_value_is_written_without_what_the_file_has(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gradmon.watch(model, optimizer, run_dir=tmp_path)
    monitor.add_gradient_metric("norm")
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    values, rows = tmp_path / "gradmon.000001.values", tmp_path / "gradmon.000001.rows"
    before = values.stat().st_size, rows.stat().st_size
    monitor.log_scalar("loss", 1.5)
    monitor.get_step_metrics()
    assert 0 < values.stat().st_size - before[0] < 200  # the key, and a step without rows and facts
    assert rows.stat().st_size == before[1]
    monitor.log_scalar("loss", 2.5)
    monitor.detach()
    run = gradmon.load_run(tmp_path)
    assert run.series("loss") == {0: 2.0}  # the mean
    assert run.series("gradient/0.weight/norm")[0] > 0
