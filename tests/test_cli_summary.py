"""``gradmon summary`` tells what plain torch saw, in any width, whatever layers are called, and NaN is loud."""

from __future__ import annotations

import io
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import load_run
from torch_gradmon.analysis.diagnosis.series import lower_median
from torch_gradmon.analysis.run import read_run
from torch_gradmon.cli.catalogue import MOST, SORTS
from torch_gradmon.cli.main import main
from torch_gradmon.cli.terminal.layer_table import LayerRow, RunSummary, groups, sort_rows, summarize
from torch_gradmon.core.records import SpikeEvent
from torch_gradmon.runs.writer import RunWriter
from torch_gradmon.spikes.attribution import spike_cause

from . import forked
from .pseudo_terminal import terminal
from .test_run_bulk import _record

STEPS, SPIKE, SPOILED, EVERY = 60, 45, 52, 10
#: Layers whose names do harm if somebody takes them for markup.
NAMES = ("[bold]a", "<b>&lt;", "[/]", "a_very_long_name_" * 6)


def _model() -> nn.Sequential:
    model = nn.Sequential()
    for name in NAMES:
        model.add_module(name, nn.Linear(6, 6))
        model.add_module(f"{name}_act", nn.ReLU())
    model.add_module("head", nn.Linear(6, 1, bias=False))
    return model


Seen = list[dict[str, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Seen, list[float]]:
    """A run with a clip, a warm-up, a spike and a NaN, and what plain torch saw of it: tensors by kind and name, and losses."""
    path = tmp_path_factory.mktemp("runs") / "[red]<i>first"
    torch.manual_seed(3)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    seen: Seen = []
    losses: list[float] = []
    monitor = gradmon.watch(model, optimizer, run_dir=path, on_spike=None)
    named = dict(model.named_parameters())
    at = torch.tensor([[math.nan]]).expand(6, 6)
    named["[/].weight"].register_hook(lambda gradient: gradient * at if step == SPOILED else gradient)
    for step in range(STEPS):
        x = torch.randn(64, 6)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean() * (1e5 if step == SPIKE else 1)
        optimizer.zero_grad()
        loss.backward()
        kinds = {"before": {name: p.grad.double().clone() for name, p in named.items()}}
        if step != SPOILED:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        kinds["after"] = {name: p.grad.double().clone() for name, p in named.items()}
        kinds["weights"] = {name: p.detach().double().clone() for name, p in named.items()}
        if step == SPOILED:
            optimizer.zero_grad()  # nothing of it reaches the weights
            kinds.pop("after")
        optimizer.step()
        kinds["update"] = {name: p.detach().double() - kinds["weights"][name] for name, p in named.items()}
        schedule.step()
        monitor.log_scalar("loss", loss.detach())
        seen.append(kinds)
        losses.append(loss.item())
    monitor.detach()
    return path, seen, losses


def _together(kinds: dict[str, dict[str, Tensor]], kind: str, names: list[str]) -> Tensor:
    return torch.cat([kinds[kind][name].flatten() for name in names])


def _expected(seen: Seen, names: list[str], last: int | None) -> dict[str, Any]:
    steps = range(STEPS)[-(last or STEPS) :]
    norms = {step: _together(seen[step], "before", names).norm().item() for step in steps}
    whole = {step: _together(seen[step], "before", list(seen[step]["before"])).norm().item() for step in steps}
    finite = {step: norm for step, norm in norms.items() if math.isfinite(norm)}
    at = max(finite, key=lambda step: finite[step])
    bad = [step for step in steps if step not in finite]
    shares = [(norms[step] / whole[step]) ** 2 for step in steps if math.isfinite(whole[step])]
    zeros = []
    for step in steps:
        gradient = _together(seen[step], "before", names)
        gradient = gradient[gradient.isfinite()]
        zeros += [(gradient.abs() <= 1e-8).double().mean().item()] if len(gradient) else []
    updates = [step for step in steps if step % EVERY == 0]
    return {
        "norm": lower_median(finite.values()),
        "largest": finite[at],
        "at": at,
        "share": sum(shares) / len(shares),
        "clipped": lower_median(_together(seen[step], "after", names).norm().item() for step in steps if "after" in seen[step]),
        "update": lower_median(
            (_together(seen[step], "update", names).norm() / _together(seen[step], "weights", names).norm()).item()
            for step in updates
        ),
        "zeros": lower_median(zeros),
        "nonfinite": len(bad),
        "since": bad[0] if bad else None,
    }


def _assert_row(row: LayerRow, expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        found = getattr(row, name)
        assert found == (value if value is None else pytest.approx(value, rel=2e-6)), (row.name, name)


@pytest.mark.parametrize("last", [None, 10, STEPS + 1])
def test_each_row_is_what_plain_torch_saw(trained: tuple[Path, Seen, list[float]], last: int | None) -> None:
    path, seen, _ = trained
    run = load_run(path)
    names = list(seen[0]["before"])
    summary = summarize(run._reader, "x", last=last)
    assert [row.name for row in summary.rows] == names
    assert all(row.parameters == 1 for row in summary.rows)
    for row in summary.rows:
        _assert_row(row, _expected(seen, [row.name], last))
    assert sum(row.share for row in summary.rows) == pytest.approx(1)
    assert any(row.zeros > 0 for row in summary.rows), "the test sees no sparsity"


def test_a_block_is_what_its_parameters_are_together(trained: tuple[Path, Seen, list[float]]) -> None:
    path, seen, _ = trained
    members: dict[str, list[str]] = {}
    for name in seen[0]["before"]:
        members.setdefault(name.split(".")[0], []).append(name)
    members["head.weight"] = members.pop("head")
    rows = summarize(read_run(path), "x", depth=1).rows
    assert [(row.name, row.parameters) for row in rows] == [(block, len(names)) for block, names in members.items()]
    for row in rows:
        _assert_row(row, _expected(seen, members[row.name], None))


def test_the_head_of_a_summary_is_what_happened(trained: tuple[Path, Seen, list[float]]) -> None:
    path, seen, losses = trained
    run = load_run(path)
    summary = summarize(run._reader, "x")
    told = summary.overview
    assert (told.steps, told.first, told.last, summary.segments) == (STEPS, 0, STEPS - 1, [(0, STEPS - 1)])
    assert told.rates == pytest.approx((0.001, 0.02, 0.02))
    assert told.ended - told.began == run.record(STEPS - 1).context["time"] - run.record(0).context["time"]
    lines = {line.name: line for line in summary.lines}
    assert next(iter(lines)) == "loss"
    loss = lines["loss"]
    assert (loss.first, loss.last, loss.at) == (pytest.approx(losses[0]), pytest.approx(losses[-1]), losses.index(max(losses)))
    assert (loss.largest, loss.median) == (pytest.approx(max(losses)), pytest.approx(lower_median(losses)))
    norm = lines["grad_norm"]
    assert (norm.count, norm.nonfinite, norm.since, norm.at) == (STEPS, 1, SPOILED, SPIKE)
    assert norm.largest == pytest.approx(_together(seen[SPIKE], "before", list(seen[0]["before"])).norm().item(), rel=1e-6)
    assert [spike.step for spike in summary.spikes] == sorted({event.step for event in run.spikes}) == [SPIKE, SPOILED]
    assert "times the usual" in summary.spikes[0].words
    assert summary.spikes[1][1:] == (SPOILED, SPOILED, "grad_norm is nan", "[/].weight", "has NaN or Inf")
    assert summary.spikes[0].moved == spike_cause(run.record(SPIKE).suspects, SPIKE).did


@pytest.mark.parametrize("column", [*SORTS, "name"])
def test_rows_are_sorted_by_any_column(trained: tuple[Path, Seen, list[float]], column: str) -> None:
    summary = summarize(read_run(trained[0]), "x", sort=column)
    found = [getattr(row, column) for row in summary.rows]
    assert found == sorted(found, reverse=column != "name")
    assert len(set(found)) > 1 or column == "at"  # of the spike


def test_what_is_not_known_is_sorted_last() -> None:
    values = (1.0, None, 3.0)
    rows = [LayerRow(str(value), 1, value, 1.0, None, 0.5, None, None, None, 0, None) for value in values]
    assert [row.name for row in sort_rows(rows, "norm")] == ["3.0", "1.0", "None"]


def test_json_is_the_summary(trained: tuple[Path, Seen, list[float]], capsys: pytest.CaptureFixture[str]) -> None:
    path, _, _ = trained
    assert main(["summary", str(path), "--json", "--tail", "20"]) == 0
    found = json.loads(capsys.readouterr().out)
    summary = summarize(read_run(path), str(path), last=20)
    assert found == summary.to_dict()
    assert found["steps"] == {"count": 20, "first": 40, "last": 59, "segments": [[40, 59]]}
    assert [row["name"] for row in found["layers"]] == [row.name for row in summary.rows]
    spoiled = next(row for row in found["layers"] if row["name"] == "[/].weight")
    assert (spoiled["nonfinite"], spoiled["since"]) == (1, SPOILED)
    assert found["spikes"][1] == {
        "step": SPOILED,
        "first": SPOILED,
        "last": SPOILED,
        "words": "grad_norm is nan",
        "layer": "[/].weight",
        "moved": "has NaN or Inf",
    }


# --- which rows ----------------------------------------------------------------------------------------------------------------------


def test_many_parameters_are_shown_by_blocks() -> None:
    names = [f"h.{block}.{part}.{kind}" for block in range(8) for part in "abc" for kind in ("weight", "bias")]
    names += ["head.weight"]
    assert len(names) > MOST
    found = groups(names)
    assert found.titles == (*(f"h.{block}" for block in range(8)), "head.weight")
    assert found.place["h.3.b.bias"] == 3
    assert groups(names, everything=True).titles == tuple(names)
    assert groups(names, depth=1).titles == ("h", "head.weight")
    assert groups(names, depth=3).titles[:3] == ("h.0.a", "h.0.b", "h.0.c")
    assert groups(names[:MOST]).titles == tuple(names[:MOST])
    assert groups([]).titles == ()


def test_a_filter_takes_parameters_and_leaves_their_shares(trained: tuple[Path, Seen, list[float]]) -> None:
    run = load_run(trained[0])
    every = {row.name: row for row in summarize(run._reader, "x").rows}
    assert main(["summary", str(trained[0]), "--json", "--keys", "weight$"]) == 0
    some = summarize(run._reader, "x", pattern=re.compile("weight$")).rows
    assert [row.name for row in some] == [name for name in every if name.endswith("weight")]
    assert [repr(row) for row in some] == [repr(every[row.name]) for row in some]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--keys", "hed"], "matches no parameter of the run; known are <b>"),
        (["--keys", "("], "is not a valid regular expression"),
        (["--sort", "size"], "invalid choice: 'size'"),
        (["--tail", "0"], "is not a positive whole number"),
        (["--depth", "1", "--all"], "not allowed with argument"),
    ],
)
def test_a_wrong_request_is_told(
    words: list[str], told: str, trained: tuple[Path, Seen, list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["summary", str(trained[0]), "--json", *words])
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert told in captured.err


# --- runs of all kinds ----------------------------------------------------------------------------------------------------------------


def test_a_run_without_a_step(tmp_path: Path) -> None:
    RunWriter(tmp_path).close()
    summary = summarize(read_run(tmp_path), "x")
    assert (summary.overview.steps, summary.lines, summary.rows, summary.spikes) == (0, [], [], [])
    assert json.loads(json.dumps(summary.to_dict(), allow_nan=False))["steps"]["first"] is None


def test_a_resumed_run_counts_what_came_later(tmp_path: Path) -> None:
    for steps, value in ((range(30), 1.0), (range(20, 40), 5.0)):
        store = RunWriter(tmp_path)
        for step in steps:
            store.log(_record(step, value))
        store.close()
    summary = summarize(read_run(tmp_path), "x")
    assert summary.segments == [(0, 19), (20, 39)]
    assert summary.overview.steps == 40
    assert [(line.name, line.is_logged, line.first, line.last, line.at) for line in summary.lines] == [("x", True, 1.0, 5.0, 20)]
    assert [(row.largest, row.at) for row in summary.rows] == [(pytest.approx(math.sqrt(50)), 20)] * 2
    assert summarize(read_run(tmp_path), "x", last=5).segments == [(35, 39)]


def test_only_what_was_logged_by_hand(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    monitor = gradmon.ModuleMonitor(model, run_dir=tmp_path)
    for step in range(3):
        monitor.begin_step(step)
        monitor.log_scalars({f"value_{number}": step for number in range(20)})
        monitor.end_step()
    summary = summarize(read_run(tmp_path), "x")
    assert (len(summary.lines), summary.unshown, summary.rows) == (8, 12, [])
    assert len(summarize(read_run(tmp_path), "x", everything=True).lines) == 20


def test_gradients_after_the_clip_alone(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    monitor = gradmon.ModuleMonitor(model, run_dir=tmp_path)
    monitor.add_gradient_metric("norm")
    for step in range(3):
        monitor.begin_step(step)
        model(torch.ones(1, 2) * (step + 1)).sum().backward()
        monitor.monitor_gradients()
        monitor.end_step()
        model.zero_grad()
    rows = summarize(read_run(tmp_path), "x").rows
    assert [(row.name, row.at) for row in rows] == [("weight", 2), ("bias", 0)]
    assert rows[0].norm == pytest.approx(2 * math.sqrt(2))
    assert all(row.clipped is row.update is row.zeros is None for row in rows)


def test_the_spikes_of_many_are_the_largest_ones(tmp_path: Path) -> None:
    store = RunWriter(tmp_path)
    for step in range(30):
        events = (SpikeEvent(step, "x", 100.0 - abs(step - 12), 9.0, 5.0, "much", usual=1.0),) if step % 2 else ()
        store.log(_record(step, 1.0)._replace(events=events))
    store.close()
    summary = summarize(read_run(tmp_path), "x")
    assert ([spike.step for spike in summary.spikes], len(summary.spiked)) == ([5, 7, 9, 11, 13, 15, 17, 19], 15)
    assert len(summarize(read_run(tmp_path), "x", everything=True).spikes) == 15


# --- how it looks ----------------------------------------------------------------------------------------------------------------------


def _drawn(summary: RunSummary, width: int, colours: bool = False) -> str:
    from rich.console import Console

    from torch_gradmon.cli.terminal.tables import show_summary

    console = Console(width=width, file=io.StringIO(), force_terminal=colours, color_system="standard" if colours else None)
    console._highlight = False
    show_summary(console, summary)
    return console.file.getvalue()


@pytest.mark.extra
@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_every_width_shows_each_layer_in_a_line(trained: tuple[Path, Seen, list[float]], width: int) -> None:
    path = trained[0]
    summary = summarize(read_run(path), str(path))
    drawn = _drawn(summary, width)
    lines = drawn.splitlines()
    assert max(map(len, lines)) <= width
    for row in summary.rows:
        end = row.name[-7:]
        assert any(line.split(" ")[0].endswith(end) and f"{row.norm:.3g}"[:4] in line for line in lines), (row.name, drawn)
    assert "[bold]a.weight" in drawn
    assert "<b>&lt;.weight" in drawn
    assert "[/].bias" in drawn
    assert "[red]<i>first" in drawn.replace("\n", "")
    assert ("…" in drawn) == (width < 200)
    left_out = next((line for line in lines if line.startswith("no room for ")), "")
    assert bool(left_out) == (width <= 80)
    for column in ("zeros", "update", "at"):
        assert (f" {column}" in drawn.partition("Layers")[2].partition("norm:")[0]) == (column not in left_out)


@pytest.mark.extra
def test_nan_is_loud(trained: tuple[Path, Seen, list[float]]) -> None:
    summary = summarize(read_run(trained[0]), "x")
    drawn = _drawn(summary, 100, colours=True)
    loud = [line for line in drawn.splitlines() if "\x1b[1;31m" in line]
    assert any("in the gradients of 1 of 9 rows below, first in step 52" in line for line in loud)
    assert any("[/].weight" in line for line in loud)
    assert any("grad_norm" in line for line in loud)
    assert not any("head.weight" in line for line in loud)
    assert "NaN/Inf" not in _drawn(summarize(read_run(trained[0]), "x", last=5), 100)


@pytest.mark.extra
def test_the_words_of_a_summary(trained: tuple[Path, Seen, list[float]]) -> None:
    drawn = _drawn(summarize(read_run(trained[0]), "runs/first"), 120)
    assert "60 monitored, 0 to 59" in drawn
    assert "0.001 to 0.02, 0.02 at the end" in drawn
    assert "Spikes: 2\n" in re.sub(" +\n", "\n", drawn)
    assert "grad_norm is nan; [/].weight has NaN or Inf" in drawn
    assert "gradmon why runs/first --step 52 explains the largest" in drawn


@pytest.mark.extra
@pytest.mark.parametrize("width", [60, 80])
def test_an_empty_run_and_one_that_was_resumed_are_drawn(width: int, tmp_path: Path) -> None:
    RunWriter(tmp_path / "empty").close()
    assert "none yet" in _drawn(summarize(read_run(tmp_path / "empty"), "x"), width)
    store = RunWriter(tmp_path / "resumed")
    for step in [*range(30), *range(20, 40)]:
        store.log(_record(step, 1.0))
    store.close()
    assert "to step 20" in _drawn(summarize(read_run(tmp_path / "resumed"), "x"), width)


@pytest.mark.extra
@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo terminal")
def test_a_real_terminal_gets_a_table_of_its_width(trained: tuple[Path, Seen, list[float]]) -> None:
    with terminal("summary", str(trained[0]), columns=72) as seen:
        assert seen.end() == 0
    lines = seen.plain.splitlines()
    assert max(map(len, lines)) <= 72
    assert any(line.startswith("[bold]a.weight") for line in lines)
    assert "\x1b[1;31m" in seen.output


def test_without_rich_the_extra_is_named_and_json_works(trained: tuple[Path, Seen, list[float]]) -> None:
    code = "import sys; sys.modules['rich'] = None; from torch_gradmon.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = forked.run(code, "summary", trained[0])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'gradmon: error: the summary, without --json, needs rich: pip install "torch_gradmon[cli]"\n'
    done = forked.run(code, "summary", trained[0], "--json")
    assert (done.returncode, json.loads(done.stdout)["steps"]["count"]) == (0, STEPS)
