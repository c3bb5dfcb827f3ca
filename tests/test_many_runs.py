"""Many runs in one table, and how one of them is."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_gradmon as gradmon
from tests.live_training import LAYER, train
from tests.stored_runs import changed, rewritten, timed
from torch_gradmon.analysis.diagnosis import Diagnosis, Finding
from torch_gradmon.analysis.many_runs import RunCard, next_action, status_dict
from torch_gradmon.analysis.run import diagnose, load_run
from torch_gradmon.cli.main import main
from torch_gradmon.core.keys import Key

RATES = (1e-3, 1e-2)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    for rate in RATES:
        train(place / f"lr-{rate:g}", 80, lr=rate)
    train(place / "deep" / "spiked", 60, spike=40)
    return place


def output(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(list(words)) == code
    return capsys.readouterr().out


def test_compare_as_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output(capsys, "compare", str(root), "--json"))
    assert found["differ"] == ["lr"]
    losses = [run["loss"] for run in found["runs"]]
    assert losses == sorted(losses)
    assert {run["name"] for run in found["runs"]} == {"lr-0.001", "lr-0.01", "deep/spiked"}
    assert not any(run["is_diagnosed"] for run in found["runs"])
    started = json.loads(output(capsys, "compare", str(root), "--json", "--sort", "started", "--diagnose"))["runs"]
    assert [run["name"] for run in started] == ["lr-0.001", "lr-0.01", "deep/spiked"]
    assert started[2]["findings"][0][:2] == ["warning", "spike"]
    some = json.loads(output(capsys, "compare", str(root / "lr-0.01"), str(root / "deep"), "--json", "--sort", "name"))["runs"]
    assert [run["name"] for run in some] == [str(root / "deep" / "spiked"), str(root / "lr-0.01")]


@pytest.mark.extra
def test_compare_as_a_table(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    lines = output(capsys, "compare", str(root), "--sort", "name").splitlines()
    assert lines[0].split() == ["run", "state", "step", "loss", "spikes", "cost", "lr"]
    assert lines[1].startswith("deep/spiked")
    assert f"1: step 40 {LAYER}" in lines[1]
    assert [line.split()[0] for line in lines[1:4]] == ["deep/spiked", "lr-0.001", "lr-0.01"]
    assert "--diagnose" in lines[4]
    diagnosed = output(capsys, "compare", str(root), "--diagnose")
    assert "spike in 4.weight" in diagnosed
    assert "--diagnose" not in diagnosed
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, output(capsys, "compare", str(root)).splitlines())) <= 40


@pytest.mark.extra
@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_a_table_has_the_columns_that_fit_whole_and_names_the_others(width: int, root: Path) -> None:
    from rich.console import Console

    from torch_gradmon.cli.terminal.tables import show_runs

    card = RunCard(root / "lr-0.01")
    settings = [
        {
            "model": "DistributedDataParallel",
            "optimizer": "SparseAdam",
            "lr": f"0.{n}",
            "weight_decay": f"0.0{n}",
            "amsgrad": f"{n}",
        }
        for n in (1, 2)
    ]
    settings[1].update(model="Sequential", optimizer="AdamW")
    finding = [("warning", "not-in-optimizer", "blocks.0.attention.weight")]
    cards = [changed(card, name=f"a-run-with-a-long-name-{n}", settings=one, findings=finding) for n, one in enumerate(settings)]
    console = Console(width=width, file=io.StringIO())
    show_runs(console, cards)
    head, *lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    titles = head.split()
    assert titles[:4] == ["run", "state", "step", "loss"]
    left = " ".join(lines).partition("They also differ in ")[2]
    assert {*titles} & {*settings[0]} == {name for name in settings[0] if name not in left}
    assert sum("a-run-with-a-long-name-" in line for line in lines) == 2
    text = "".join(" ".join(lines).split())
    assert all(text.count(number) for name, number in settings[0].items() if name in titles and name in ("lr", "weight_decay"))


def test_compare_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path), "--json"]) == 2
    assert "there is no run in" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "none"), "--json"]) == 2
    assert "there is no directory" in capsys.readouterr().err


def test_a_run_that_diverged_is_last(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("lr-0.001", "lr-0.01"):
        shutil.copytree(root / name, tmp_path / name)
    lose(tmp_path / "lr-0.01")
    runs = json.loads(output(capsys, "compare", str(tmp_path), "--json"))["runs"]
    assert [(run["name"], run["loss"] == "NaN") for run in runs] == [("lr-0.001", False), ("lr-0.01", True)]
    assert math.isnan(RunCard(tmp_path / "lr-0.01").loss or 0.0)


def lose(path: Path) -> None:
    """Make the last loss NaN."""
    lost = {Key("", "loss", ""): math.nan}
    rewritten(path, lambda record: record._replace(values={**record.values, **lost}) if record.step == 79 else record)


def test_status(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(root / "deep" / "spiked")
    found = json.loads(output(capsys, "status", path, "--json", code=1))
    assert (found["state"], found["healthy"], found["step"], found["spikes"]) == ("ended", False, 59, 1)
    assert found["worst_spike"]["where"] == LAYER
    assert found["next"]["command"] == f"gradmon why {path} --step 40"
    assert found["next"]["rule"] == found["findings"][0]["rule"] == "spike"
    assert found["next"]["action"] == found["findings"][0]["advice"]
    text = output(capsys, "status", path, code=1).splitlines()
    assert text[0].startswith(f"{path}: step 59 was recorded")
    assert text[-1].startswith(" " * 10) or text[-1].startswith("next")
    assert any(line.startswith("warning   spike in 4.weight: ") for line in text)
    with closing(load_run(path)) as run:
        losses = list(run.series("loss").values())
    # three of sixty steps, and the lower median of an odd number is the median
    now, first = sorted(losses[-3:])[1], losses[0]
    assert text[1] == f"loss      {now:.4g} (median of the last twentieth of the steps), at first {first:.4g}"


def test_the_status_of_a_run_that_diverged_has_its_last_loss(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    shutil.copytree(root / "lr-0.01", path)
    lose(path)
    assert "\nloss      nan, at first " in output(capsys, "status", str(path), code=1)


def test_the_next_action_names_information_too(root: Path) -> None:
    cause = "The gradient of the loss is not that of a mean."
    card = RunCard(root / "lr-0.01")
    told = Diagnosis.of([Finding("loss-scale", "info", "", (0, 9), {}, cause, "Use reduction='mean'.")], (0, 9), {})
    assert told.healthy
    assert next_action(card, told) == "Of interest, loss-scale: Use reduction='mean'."
    assert status_dict(card, told)["next"]["rule"] == "loss-scale"


def test_status_of_a_healthy_run_that_goes_silent(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    shutil.copytree(root / "lr-0.01", path)
    found = json.loads(output(capsys, "status", str(path), "--json"))
    assert (found["healthy"], found["next"]["action"], found["next"]["rule"]) == (True, "Nothing.", None)
    with closing(load_run(path)) as run:
        times = {step: run.record(step).context["time"] for step in run.steps}
    shift = time.time() - max(times.values())
    timed(path, lambda record: times[record.step] + shift)
    found = json.loads(output(capsys, "status", str(path), "--json"))
    assert (found["state"], found["next"]["action"]) == ("running", "Let it train.")
    timed(path, lambda record: times[record.step] + shift - 10_000)
    found = json.loads(output(capsys, "status", str(path), "--json", code=1))
    assert (found["state"], found["healthy"]) == ("silent", False)
    assert found["next"]["action"].startswith("Look at the process")


def test_status_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "there is no run" in capsys.readouterr().err


@pytest.mark.parametrize("read", [load_run, diagnose, lambda path: gradmon.diff_runs(path, path)])
def test_load_run_of_a_directory_of_runs_names_those(read: Callable[[Path], object], root: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"no run in .* itself; below it: .*{re.escape(str(root / 'lr-0.01'))}"):
        read(root)


@pytest.mark.parametrize("command", ["report", "summary", "status", "diagnose", "why"])
def test_a_directory_of_runs_is_told_from_a_run(command: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly" if command == "report" else "rich")
    assert main([command, str(root)]) == 2
    below = ", ".join(str(root / name) for name in ("deep/spiked", "lr-0.001", "lr-0.01"))
    assert f"there is no run in {str(root)!r} itself; below it: {below}\n" in capsys.readouterr().err


def _card(root: Path, **changes: Any) -> Any:
    return changed(RunCard(root / "lr-0.001"), **changes)


def _table(cards: list[Any], width: int) -> str:
    pytest.importorskip("rich")
    from rich.console import Console

    from torch_gradmon.cli.terminal.tables import show_runs

    console = Console(file=io.StringIO(), width=width)
    show_runs(console, cards)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_table_of_runs_keeps_the_name_of_a_model_whole(root: Path) -> None:
    names = "BertForSequenceClassification", "BertForTokenClassification"
    cards = [_card(root, name=name[:6], settings={"model": name}, findings=()) for name in names]
    for name in names:
        assert name in _table(cards, 120)
    for line in _table(cards, 60).splitlines():  # which folds
        assert len(line) <= 60


def test_table_of_runs_counts_what_is_only_information(root: Path) -> None:
    hints = [("info", "learning-rate-high", ""), ("info", "dead-units", "1")]
    assert "2 info" in _table([_card(root, findings=hints, is_diagnosed=True)], 120)
    assert "none" in _table([_card(root, findings=(), is_diagnosed=True)], 120)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("is_parallel", [False, True])
def test_a_run_has_the_name_of_the_model_inside_of_wrappers(
    is_parallel: bool, alone: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Net(nn.Linear):
        pass

    model: Any = torch.compile(Net(2, 2), backend="eager")
    if is_parallel:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gradmon.watch(model, optimizer, run_dir=tmp_path / "run")
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    monitor.detach()
    assert RunCard(tmp_path / "run").settings["model"] == "Net"
    assert "OptimizedModule" not in output(capsys, "compare", str(tmp_path), "--json")


def test_compare_sorts_by_any_logged_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, values in {"over": (0.3, 2.0), "best": (0.9, 0.4), "nan": (0.5, math.nan), "none": ()}.items():
        _validated(tmp_path / name, values)
    found = json.loads(output(capsys, "compare", str(tmp_path), "--json", "--sort", "val/loss"))["runs"]
    assert [run["name"] for run in found] == ["best", "over", "nan", "none"]
    assert [run["metrics"] for run in found] == [{"val/loss": 0.4}, {"val/loss": 2.0}, {"val/loss": "NaN"}, {}]
    assert found[0]["logged"] == ["loss", "val/loss"]
    found = json.loads(output(capsys, "compare", str(tmp_path), "--json", "--sort", "val/loss", "--largest"))["runs"]
    assert [run["name"] for run in found] == ["over", "best", "nan", "none"]
    found = json.loads(output(capsys, "compare", str(tmp_path), "--json", "--sort", "name", "--largest"))["runs"]
    assert [run["name"] for run in found] == ["over", "none", "nan", "best"]
    whole = json.loads(output(capsys, "compare", str(tmp_path), "--json", "--sort", "gradmon/grad_norm"))["runs"]
    assert all(run["metrics"].keys() == {"gradmon/grad_norm"} for run in whole)


def test_compare_sorts_by_a_setting(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = [run["settings"]["lr"] for run in json.loads(output(capsys, "compare", str(root), "--json", "--sort", "lr"))["runs"]]
    assert rates == sorted(rates, key=float)
    found = json.loads(output(capsys, "compare", str(root), "--json", "--sort", "lr", "--largest"))["runs"]
    assert [run["settings"]["lr"] for run in found] == rates[::-1]


def _validated(path: Path, values: Sequence[float]) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradmon.watch(model, optimizer, run_dir=path, on_spike=None) as monitor:
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).square().sum()
            loss.backward()
            optimizer.step()
            monitor.log_scalar("loss", loss.detach())
            if step % 2 and values:
                monitor.log_scalar("val/loss", values[step // 2])


def test_compare_refuses_a_value_that_no_run_has(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(root), "--json", "--sort", "los"]) == 2
    assert "no run has values for 'los'; did you mean loss?" in capsys.readouterr().err


@pytest.mark.extra
def test_compare_shows_the_value_it_sorts_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _validated(tmp_path / "over", (0.3, 2.0))
    _validated(tmp_path / "best", (0.9, 0.4))
    plain = output(capsys, "compare", str(tmp_path)).splitlines()
    assert plain[0].split() == ["run", "state", "step", "loss"]
    assert "Logged: val/loss; --sort NAME shows one and sorts by it." in plain
    head, *lines = output(capsys, "compare", str(tmp_path), "--sort", "val/loss").splitlines()
    assert head.split() == ["run", "state", "step", "loss", "val/loss"]
    assert [line.split()[-1] for line in lines[:2]] == ["0.400", "2.00"]
    assert not any("--sort" in line for line in lines)


def test_the_setting_that_varies_most_has_a_column_at_80_columns(root: Path) -> None:
    cards = [
        _card(
            root,
            name=f"gpt-{rate:g}-with-a-long-name",
            settings={"optimizer": "AdamW" if rate < 1 else "SGD", "lr": f"{rate}"},
            findings=[("warning", "update-ratio-high", "blocks.0.attention.weight")],
            spikes=30,
            spike_step=100,
            spike_where="all 3 layers rose together",
        )
        for rate in (1e-3, 1e-2, 1.0)
    ]
    table = _table(cards, 80)
    assert {"findings", "spikes", "lr"} <= set(table.splitlines()[0].split())
    assert all(len(line) <= 80 for line in table.splitlines())
    assert "They also differ in optimizer." in table
    assert "rose" not in table
    assert "rose" in _table(cards, 120)


@pytest.mark.extra
def test_the_loss_of_one_network_is_named_and_ranks_no_runs(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, loss in (("a", 0.9), ("b", 0.1)):
        shutil.copytree(root / "lr-0.01", tmp_path / name)
        lost = {Key("", "loss_d", ""): loss}
        rewritten(tmp_path / name, lambda record, lost=lost: record._replace(values={**without_loss(record.values), **lost}))
    runs = json.loads(output(capsys, "compare", str(tmp_path), "--json"))["runs"]
    assert [(run["name"], run["loss"], run["loss_key"]) for run in runs] == [("a", 0.9, "loss_d"), ("b", 0.1, "loss_d")]
    assert "loss_d: the loss of one network is low where the others lose" in " ".join(
        output(capsys, "compare", str(tmp_path)).split()
    )
    assert main(["status", str(tmp_path / "a")]) in (0, 1)
    assert "loss_d is that of one network, and low where the others lose" in " ".join(capsys.readouterr().out.split())


def without_loss(values: Mapping[Key, float]) -> dict[Key, float]:
    return {key: value for key, value in values.items() if key != Key("", "loss", "")}
