"""Exports: every number is that of the run, in every format, and a file is there as a whole or not at all."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import Run, SpikeDetector, load_run
from torch_gradmon.cli.main import main
from torch_gradmon.core.keys import Key
from torch_gradmon.core.moments import ALL_COLUMNS, VIEWS
from torch_gradmon.core.records import StatsTable, StepRecord
from torch_gradmon.runs import export as frames
from torch_gradmon.runs.reader import RunReader
from torch_gradmon.runs.writer import RunWriter
from torch_gradmon.spikes import MedianMad

from .oracle import measure
from .test_run_window import same, values_of

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clipped and unclipped steps, two learning rates, custom metrics, attention, tags, a spike, NaN, and names that are taken."""
    path = tmp_path_factory.mktemp("runs") / "odd"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    groups = [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": list(model[2].parameters()), "lr": 0.01}]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    monitor = gradmon.watch(model, optimizer, preset="full", run_dir=path, on_spike=None)
    monitor.add_gradient_metric("total", lambda g: g.sum(), every=2)
    monitor.add_parameter_metric("name", lambda w: w.numel(), "^0")  # a column of that name there is already
    monitor.add_detector(SpikeDetector(MedianMad(warmup=4), "loss"))
    for step in range(12):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        if step % 3:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if step != 7:
            monitor.log_context(batch=[step, "a,\"b'"], worst=math.inf)
        monitor.log_scalars({"loss": 1e6 if step == 9 else 1 + 0.01 * step, "lr": 3.0, "step": -1.0, "lr_0": 5.0})
        if step == 5:
            monitor.log_scalar("seldom", math.nan)
        if step == 6:
            monitor.log_scalar("seldom", -math.inf)
        optimizer.step()
    monitor.detach()
    store = RunWriter(path)  # what attention has, and a step with nothing but NaN
    heads = {Key("attention_entropy", "0.head_1", ""): 0.5, Key("attention_entropy", "0", "mean"): 0.25}
    rows = measure([torch.tensor([math.nan, 1.0]), torch.empty(0)], ALL_COLUMNS)
    rows = torch.cat([rows, measure([torch.tensor([math.inf])], ALL_COLUMNS)])[:2]
    store.log(
        StepRecord(12, 5.0, False, heads, {"parameter": StatsTable(("0.weight", "2.bias"), rows, ALL_COLUMNS)}, {"odd": math.nan})
    )
    store.close()
    return path


def _number(text: str) -> float | None:
    return float(text) if text else None


def _expected(run: Run, step: int) -> tuple[dict[str, float], dict[str, float]]:
    """Values of layers and others, by key."""
    layers: dict[str, float] = {}
    others: dict[str, float] = {}
    sources = {*run.sources, "attention_entropy", "optimizer"}
    for key, value in values_of(run._reader, step).items():
        (layers if key.split("/")[0] in sources else others)[key] = value
    return layers, others


def _check(run: Run, tensors: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    """``tensors`` and ``steps`` are rows without what is not there, numbers as floats."""
    assert [row["step"] for row in steps] == run.steps
    by_step: dict[int, dict[str, float]] = {step: {} for step in run.steps}
    for row in tensors:
        for column, value in row.items():
            if column not in ("step", "source", "name"):
                metric = {"name_": "name", "value": ""}.get(column, column)
                key = "/".join(part for part in (row["source"], row["name"], metric) if part)
                assert key not in by_step[row["step"]]
                by_step[row["step"]][key] = value
    for step, row in zip(run.steps, steps, strict=True):
        layers, others = _expected(run, step)
        assert same(by_step[step], layers)
        context = dict(run.record(step).context)
        values = {
            key: value
            for key, value in row.items()
            if key not in ("step", "time", "applied", "lr_0", "lr_1", "tags", "events", "context")
        }
        for key in ("step", "lr_0"):
            if f"{key}_" in values:
                values[key] = values.pop(f"{key}_")
        assert same(values, others)
        assert row["applied"] is context.pop("applied")
        assert row["time"].timestamp() == pytest.approx(context.pop("time"), abs=1e-6)
        assert [row[f"lr_{group}"] for group in (0, 1) if f"lr_{group}" in row] == context.pop("lr", [])
        assert row.get("tags") == _strict(context.pop("tags", None))
        assert row.get("context") == _strict(context or None)
        assert [event["signal"] for event in row.get("events") or []] == [e.signal for e in run.spikes if e.step == step]
    order = [(row["step"], run.sources.index(row["source"]) if row["source"] in run.sources else 99) for row in tensors]
    assert [step for step, _ in order] == sorted(step for step, _ in order)


def _strict(value: Any) -> Any:
    return json.loads(json.dumps(value).replace("NaN", '"NaN"').replace("Infinity", '"Infinity"'))


# --- without any package ------------------------------------------------------------------------------------------------------------


def _of_csv(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found: dict[str, Any] = {}
            for name, text in row.items():
                if text == "":
                    continue
                if name in ("source", "name"):
                    found[name] = text
                elif name == "step":
                    found[name] = int(text)
                elif name == "time":
                    found[name] = datetime.fromisoformat(text)
                elif name == "applied":
                    found[name] = {"true": True, "false": False}[text]
                elif name in ("tags", "events", "context"):
                    found[name] = json.loads(text)
                else:
                    found[name] = float(text)
            yield found


def _of_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        for name, value in row.items():
            if name == "time":
                row[name] = datetime.fromisoformat(value)
            elif isinstance(value, str) and name not in ("source", "name"):
                row[name] = _WORDS[value]
            elif isinstance(value, int) and not isinstance(value, bool) and name != "step":
                row[name] = float(value)
        yield row


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_every_number_of_a_text_is_that_of_the_run(kind: str, path: Path, tmp_path: Path) -> None:
    run = load_run(path)
    files = run.export(tmp_path / f"out.{kind}")
    assert files == [tmp_path / f"out.{kind}", tmp_path / f"out.steps.{kind}"]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    read = {"csv": _of_csv, "jsonl": _of_jsonl}[kind]
    tensors, steps = (list(read(file)) for file in files)
    _check(run, tensors, steps)
    assert {row["source"] for row in tensors} >= {
        "gradient",
        "gradient_before_clip",
        "parameter",
        "optimizer",
        "attention_entropy",
    }
    assert steps[5]["seldom"] != steps[5]["seldom"]
    assert steps[6]["seldom"] == -math.inf
    assert "seldom" not in steps[7]
    assert steps[9]["events"][0]["value"] == 1e6
    assert "tags" not in steps[7]
    assert steps[3]["tags"] == {"batch": [3, "a,\"b'"], "worst": "Infinity"}
    last = [row for row in tensors if row["step"] == 12]
    assert [
        (row["name"], row.get("norm"), row.get("mean"), row.get("count")) for row in last if row["source"] == "parameter"
    ] == [
        ("0.weight", pytest.approx(math.nan, nan_ok=True), pytest.approx(math.nan, nan_ok=True), 2.0),
        ("2.bias", 0.0, None, 0.0),
    ]


def test_many_parts_are_the_same_as_one(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(path)
    whole = [file.read_bytes() for file in run.export(tmp_path / "whole.csv")]
    monkeypatch.setattr(frames, "_CELLS", 1)
    window, read = RunReader.window, []
    monkeypatch.setattr(RunReader, "window", lambda run, steps: read.append(len(list(steps))) or window(run, steps))
    assert [file.read_bytes() for file in run.export(tmp_path / "parts.csv")] == whole
    assert set(read) == {1}


def test_tensors_of_one_step_in_parts_are_the_same_as_one(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(path)
    whole = [file.read_bytes() for file in run.export(tmp_path / "whole.csv")]
    monkeypatch.setattr(frames, "_CELLS", 100)
    with mock.patch.object(frames, "_cells", wraps=frames._cells) as made:
        assert [file.read_bytes() for file in run.export(tmp_path / "parts.csv")] == whole
    cells = [len(window.steps) * len(wanted) for window, _, wanted in (call.args for call in made.call_args_list)]
    assert len(cells) > 2 * len(run.steps)
    assert max(cells) <= 100  # steps, tensors, metrics


def test_a_part_of_a_run(path: Path, tmp_path: Path) -> None:
    run = load_run(path)
    (file,) = run.export(tmp_path / "out.csv", "tensors", sources="update", first=3, last=10)
    rows = list(_of_csv(file))
    assert {(row["step"], row["source"]) for row in rows} == {(10, "update")}
    (file,) = run.export(tmp_path / "steps.csv", "steps", first=12)
    assert [row["step"] for row in _of_csv(file)] == [12]
    (file,) = run.export(tmp_path / "none.csv", "tensors", sources="update", first=11)
    assert list(_of_csv(file)) == []
    assert file.read_text().startswith('"step","source","name","norm",')


def test_one_group_has_one_learning_rate_and_a_scale_has_a_column(tmp_path: Path) -> None:
    store = RunWriter(tmp_path)
    for step in range(3):
        store.log(
            StepRecord(
                step, 1.5e9 + step / 8, True, {Key("", "x", ""): 1.0}, {}, {"lr": [0.5], **({"amp_scale": 8.0} if step else {})}
            )
        )
    store.close()
    files = load_run(tmp_path).export(tmp_path / "out.csv")
    columns = "step source name norm rms mean std max min_value max_value l1_norm sparsity zero_count nonfinite_count count"
    assert files[0].read_text() == ",".join(f'"{column}"' for column in columns.split()) + "\n"
    assert files[1].read_text().splitlines() == [
        '"step","time","applied","lr","amp_scale","x","tags","events","context"',
        '0,"2017-07-14T02:40:00.000000+00:00","true",0.5,"",1.0,"","",""',
        '1,"2017-07-14T02:40:00.125000+00:00","true",0.5,8.0,1.0,"","",""',
        '2,"2017-07-14T02:40:00.250000+00:00","true",0.5,8.0,1.0,"","",""',
    ]


@pytest.mark.parametrize("name", ["=1+1", "+x", "-x", "@x", "\tx", "a\rb", 'a"b', "a,b"])
def test_names_in_csv_break_no_row_and_are_no_formula(name: str, tmp_path: Path) -> None:
    table = StatsTable((name,), torch.ones(1, 8, dtype=torch.float64), ALL_COLUMNS)
    store = RunWriter(tmp_path / "run")
    store.log(StepRecord(0, 0.0, True, {Key("", name, ""): 1.0}, {"gradient": table}))
    store.close()
    for file in load_run(tmp_path / "run").export(tmp_path / "out.csv"):
        with file.open(newline="") as lines:
            rows = list(csv.reader(lines))
        assert len(rows) == 2
        assert len(rows[0]) == len(rows[1])
        texts = [cell for row in rows for cell in row if not cell.replace(".", "").isdigit()]
        assert not any(text.startswith(tuple("=+-@\t\r")) for text in texts)


@pytest.mark.parametrize("table", frames.TABLES)
def test_what_comes_late_into_the_last_step_of_a_run_that_goes_on_has_no_column(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients = StatsTable(("w",), torch.ones(1, 8, dtype=torch.float64), ALL_COLUMNS)
    store = RunWriter(tmp_path)
    for step in range(3):
        store.log(StepRecord(step, 0.0, True, {Key("", "x", ""): 1.0}, {"gradient": gradients}))
    run, done = load_run(tmp_path), []
    monkeypatch.setattr(frames, "_CELLS", 1)
    parts = frames.parts_of(run._reader, table, None, None, None, done.append)
    first = next(parts)
    late = {Key("", "late", ""): 2.0, Key("", "x", ""): 1.0, Key("gradient", "w", "mine"): 3.0, Key("gradient", "v", "norm"): 4.0}
    store.log(StepRecord(2, 0.0, True, late, {"gradient": gradients}), update=True)
    found = [first, *parts]
    assert [part["step"].tolist() for part in found] == [[0], [1], [2]]
    assert [list(part) for part in found] == [list(first)] * 3
    assert not {"late", "mine"} & {*first}
    assert done == [1, 1, 1]
    store.close()


# --- files ----------------------------------------------------------------------------------------------------------------------------


def test_directories_are_made_and_what_is_there_is_replaced(path: Path, tmp_path: Path) -> None:
    run = load_run(path)
    files = run.export(tmp_path / "new" / "deep" / "out.csv")
    assert [file.name for file in files] == ["out.csv", "out.steps.csv"]
    files[1].write_text("before")
    assert run.export(tmp_path / "new" / "deep" / "out.csv")[1].read_text() != "before"


def test_no_half_file_is_left(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(path)
    (tmp_path / "out.csv").write_text("before")
    monkeypatch.setattr(frames, "_CELLS", 1)
    window = RunReader.window

    def fails(run: RunReader, steps: list[int]) -> Any:
        if 11 in steps:
            raise OSError("the disk is full")
        return window(run, steps)

    monkeypatch.setattr(RunReader, "window", fails)
    for table in (None, "tensors", "steps"):
        with pytest.raises(OSError, match="the disk is full"):
            run.export(tmp_path / "out.csv", table)
    assert [file.name for file in tmp_path.iterdir()] == ["out.csv"]
    assert (tmp_path / "out.csv").read_text() == "before"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"path": "out.xlsx"}, ValueError, "ends in none of .parquet, .csv, .jsonl"),
        ({"path": "out"}, ValueError, "ends in none of"),
        ({"path": 3}, TypeError, "path must be the path of a file"),
        ({"path": "folder.csv"}, ValueError, "is a directory; name a file in it"),
        ({"path": "out.csv", "table": "layers"}, ValueError, "table='layers' is not one of 'tensors', 'steps'"),
        ({"path": "out.csv", "sources": ["gradients"]}, ValueError, "nothing of the source 'gradients'; did you mean gradient"),
        ({"path": "out.csv", "first": -1}, ValueError, "first=-1 must not be negative"),
        ({"path": "out.csv", "last": 1.5}, TypeError, "last must be an int"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.csv").mkdir()
    with pytest.raises(error, match=message):
        load_run(path).export(**arguments)
    assert [file.name for file in tmp_path.iterdir()] == ["folder.csv"]


def test_the_command_line(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", str(path), "--output", str(tmp_path / "out.csv")]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert [line.split(" (")[0] for line in printed.out.splitlines()] == [
        str(tmp_path / "out.csv"),
        str(tmp_path / "out.steps.csv"),
    ]
    assert printed.err == ""
    for more, message in (
        (["--source", "gradien"], "nothing of the source 'gradien'"),
        (["--first", "-2"], "first=-2"),
    ):
        assert main([*words, *more]) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.err.count("\n") == 1
    assert main(["export", str(tmp_path / "nowhere"), "--output", str(tmp_path / "x.csv")]) == 2
    assert "there is no run" in capsys.readouterr().err
    assert main(["export", str(path), "--output", str(tmp_path / "a.jsonl"), "--table", "steps", "--last", "3"]) == 0
    assert [row["step"] for row in _of_jsonl(tmp_path / "a.jsonl")] == [0, 1, 2, 3]
    assert main([*words, "--source", "gradient", "--source", "update"]) == 0
    assert {row["source"] for row in _of_csv(tmp_path / "out.csv")} == {"gradient", "update"}


def test_a_missing_package_is_named(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["export", str(path), "--output", str(tmp_path / "out.parquet")]) == 2
    assert capsys.readouterr().err == (
        'gradmon: error: Parquet needs pyarrow: pip install "torch_gradmon[export]"; .csv and .jsonl need nothing\n'
    )
    run = load_run(path)
    for method in (run.to_arrow, run.to_pandas):
        with pytest.raises(ImportError, match=r'needs pyarrow: pip install "torch_gradmon\[export\]"'):
            method()
    assert list(tmp_path.iterdir()) == []


# --- Arrow, Parquet and pandas -------------------------------------------------------------------------------------------------------


def _of_arrow(table: Any) -> list[dict[str, Any]]:
    rows = [{name: value for name, value in row.items() if value is not None} for row in table.to_pylist()]
    for row in rows:
        for name in ("tags", "events", "context"):
            if name in row:
                row[name] = json.loads(row[name])
    return rows


@pytest.mark.extra
def test_every_number_of_an_arrow_table_and_of_parquet_is_that_of_the_run(path: Path, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    run = load_run(path)
    tensors, steps = run.to_arrow("tensors"), run.to_arrow()
    _check(run, _of_arrow(tensors), _of_arrow(steps))
    for file, table in zip(run.export(tmp_path / "out.parquet"), (tensors, steps), strict=True):
        back = pq.read_table(file)
        assert back.schema == table.schema
        assert _same_rows(back, table)
    assert tensors.schema.field("source").type == pa.dictionary(pa.int32(), pa.string())
    assert tensors.schema.field("norm").type == pa.float64()
    assert tensors.schema.field("step").type == tensors.schema.field("count").type == pa.int64()
    assert steps.schema.field("time").type == pa.timestamp("us", "UTC")
    seldom = steps["seldom"]
    assert (seldom.null_count, seldom[5].as_py() != seldom[5].as_py(), seldom[6].as_py()) == (11, True, -math.inf)


def _same_rows(one: Any, other: Any) -> bool:
    return all(
        a.keys() == b.keys() and all(a[k] == b[k] or (a[k] != a[k] and b[k] != b[k]) for k in a)
        for a, b in zip(one.to_pylist(), other.to_pylist(), strict=True)
    )


@pytest.mark.extra
def test_parquet_is_written_by_row_groups(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    run = load_run(path)
    monkeypatch.setattr(frames, "_CELLS", 2000)  # more than in one step
    (file,) = run.export(tmp_path / "out.parquet", "tensors")
    assert len(run.steps) / 4 <= pq.ParquetFile(file).num_row_groups <= len(run.steps)
    assert _same_rows(pq.read_table(file), run.to_arrow("tensors"))


@pytest.mark.extra
def test_a_frame_of_pandas(path: Path) -> None:
    pd = pytest.importorskip("pandas")
    run = load_run(path)
    tensors = run.to_pandas("tensors", sources=["gradient_before_clip", "parameter"])
    assert isinstance(tensors["source"].dtype, pd.CategoricalDtype)
    assert list(tensors["name"].cat.categories) == ["0.weight", "0.bias", "2.weight", "2.bias"]  # in the order of the model
    norms = tensors[tensors.source == "gradient_before_clip"].pivot(index="step", columns="name", values="norm")
    series = run.series("gradient_before_clip/2.weight/norm")
    assert norms["2.weight"].to_dict() == series
    steps = run.to_pandas()
    assert steps.set_index("step")["loss"].dropna().to_dict() == run.series("loss")
    assert str(steps["time"].dtype) == "datetime64[us, UTC]"
    assert steps["applied"].tolist() == [True] * 12 + [False]
    assert math.isnan(steps["seldom"][5])
    with pytest.raises(ValueError, match="table='layers'"):
        run.to_pandas("layers")


@pytest.mark.extra
def test_the_command_writes_parquet(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    assert main(["export", str(path), "--output", str(tmp_path / "out.parquet")]) == 0
    assert capsys.readouterr().err == ""
    assert pq.read_table(tmp_path / "out.steps.parquet").num_rows == len(load_run(path).steps)
    assert set(VIEWS) <= set(pq.read_schema(tmp_path / "out.parquet").names)


@pytest.mark.extra
def test_a_bar_tells_how_far_it_is(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = load_run(path)
    run.export(tmp_path / "out.csv", progress=True)
    shown = capsys.readouterr().err
    assert "export:" in shown
    assert f"/{2 * len(run.steps)}" in shown
    run.export(tmp_path / "out.csv", progress=False)
    assert capsys.readouterr().err == ""


def test_what_has_no_effect_is_refused(tmp_path: Path) -> None:
    store = RunWriter(tmp_path / "run")
    for step in range(3):
        store.log(StepRecord(step, 0.0, True, {Key("", "x", ""): 1.0}, {}))
    store.close()
    run = load_run(tmp_path / "run")
    with pytest.raises(ValueError, match="sources selects tensors"):
        run.export(tmp_path / "x.csv", "steps", sources="gradient")
    with pytest.raises(ValueError, match=r"the run has no step between 1000 and None; it has 0 to 2"):
        run.export(tmp_path / "x.csv", first=1000)
    assert not (tmp_path / "x.csv").exists()
