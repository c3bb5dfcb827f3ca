"""Rows stand in the order in which the model has its parameters and modules, whatever the order in which they were measured."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.analysis.plots import charts
from torch_gradmon.analysis.plots.charts import PanelSet
from torch_gradmon.analysis.run import read_run
from torch_gradmon.core.keys import parse_key
from torch_gradmon.core.records import ModelOrder, merged

MODULES = ["[root module]", "front", "late", "back", "back.up", "back.down"]


class Back(nn.Module):
    """Has its layers in another order than it calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(torch.tanh(self.down(x)))


class Net(nn.Module):
    """``back`` is called before ``front``; ``late`` comes between them when it is there. Outputs of ``front`` are too large to wait."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.front = nn.Linear(8, 8)
        self.add_module("late", nn.Linear(8, 8) if late else None)
        self.back = Back()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.front(self.back(x).repeat(10_000, 1))
        return x if self.late is None else self.late(x)


def train(model: Net, path: Path, steps: int = 6, start: int = 0, grow_at: int | None = None) -> gradmon.ModuleMonitor:
    optimizers = [torch.optim.SGD(model.back.parameters(), lr=0.1), torch.optim.SGD(model.front.parameters(), lr=0.1)]
    monitor = gradmon.ModuleMonitor(model, run_dir=path)
    monitor.add_activation_metric("rms")
    monitor.add_gradient_metric("norm")
    monitor.add_gradient_metric("mine", lambda gradient: gradient.sum(), "front|late")
    monitor.attach(*optimizers, start_step=start)
    for step in range(start, start + steps):
        if step == grow_at:
            model.late = nn.Linear(8, 8)
            model.late.requires_grad_()
            optimizers[1].add_param_group({"params": model.late.parameters()})
        model(torch.ones(2, 8)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return monitor


def parameters(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def in_order(names: list[str], wanted: list[str]) -> bool:
    return list(dict.fromkeys(names)) == [name for name in wanted if name in names]


@pytest.mark.parametrize("how", ["at once", "grown", "resumed"])
def test_rows_of_a_run_stand_in_the_order_of_the_model(tmp_path: Path, how: str) -> None:
    model = Net(late=how == "at once")
    monitor = train(model, tmp_path, grow_at=3 if how == "grown" else None)
    if how == "resumed":  # by another process, in whose code the model has one more layer
        monitor.detach()
        model = Net(late=True)
        monitor = train(model, tmp_path, start=6)
    monitor.detach()
    run = gradmon.load_run(tmp_path)
    assert run.tensors("activation") == MODULES
    assert run.tensors("gradient") == parameters(model)
    assert charts.heatmap(PanelSet(run._reader), "activation").rows == tuple(MODULES)
    assert charts.depth(PanelSet(run._reader)).rows == tuple(parameters(model))
    keys = list(map(parse_key, run.keys()))
    assert in_order([key.name for key in keys if key.source == "activation"], MODULES)
    assert in_order([key.name for key in keys if key.source == "gradient"], parameters(model))
    assert [key.metric for key in keys if (key.source, key.name) == ("gradient", "late.weight")][-1] == "mine"


@pytest.mark.extra
def test_rows_of_what_a_monitor_remembers_are_in_order(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monitor = train(Net(), tmp_path, grow_at=3)
    axes = monitor.plot("heatmap", engine="matplotlib", view="activation").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == MODULES


def test_calls_are_still_known_in_their_order(tmp_path: Path) -> None:
    train(Net(), tmp_path).detach()
    called = gradmon.load_run(tmp_path)._reader.tensors_as_measured("activation")
    assert called.index("back.down") < called.index("back.up") < called.index("back")


def test_a_table_of_another_run_with_two_optimizers_is_in_order_in_the_terminal(tmp_path: Path) -> None:
    from torch_gradmon.cli.terminal.layer_table import summarize

    model = Net(late=True)
    train(model, tmp_path).detach()
    run = gradmon.load_run(tmp_path)
    assert [row.name for row in summarize(run._reader, "run").rows] == parameters(model)


def test_exported_rows_are_in_order(tmp_path: Path) -> None:
    model = Net(late=True)
    train(model, tmp_path / "run").detach()
    gradmon.load_run(tmp_path / "run").export(tmp_path / "out.csv", sources=["gradient", "activation"])
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    step, source, name = (head.index(column) for column in ("step", "source", "name"))
    first = [row for row in rows if row[step] == "0"]
    assert [row[name] for row in first if row[source] == "gradient"] == parameters(model)
    assert [row[name] for row in first if row[source] == "activation"] == MODULES


def test_parts_of_outputs_calls_and_heads_stand_with_their_module_and_unknown_names_with_their_neighbours() -> None:
    order = ModelOrder(["a.weight", "c.weight"], ["[root module]", "a", "a.b", "c"])
    measured = [["c", "a.b.head_10", "a.b.head_2", "a[1]", "a@10", "a@2", "a", "[root module].loss"]]
    wanted = ["[root module].loss", "a", "a@2", "a@10", "a[1]", "a.b.head_2", "a.b.head_10", "c"]
    assert order.sorted("activation", measured) == wanted
    # a layer that the model had once, and one of which nobody knows any more where it was
    assert order.sorted("gradient", [["c.weight", "a.weight"], ["a.weight", "gone.weight", "c.weight", "x"]]) == [
        "a.weight",
        "gone.weight",
        "c.weight",
        "x",
    ]
    assert ModelOrder().sorted("gradient", [["b"], ["a", "b", "c"]]) == ["a", "b", "c"]


def test_names_of_several_orders_are_merged() -> None:
    assert merged([["a", "c", "d"], ["b", "b", "c"], ["a", "aa", "b", "z"]]) == ["a", "aa", "b", "c", "d", "z"]
    assert merged([]) == []
    assert merged([["a"], ["x"]]) == ["a", "x"]


def test_two_runs_over_each_other_are_in_order(tmp_path: Path) -> None:
    from torch_gradmon.analysis.plots.charts import RunPair

    train(Net(), tmp_path / "a").detach()
    model = Net(late=True)
    train(model, tmp_path / "b").detach()
    pair = RunPair(*(PanelSet(read_run(tmp_path / name), name) for name in "ab"))
    for view, wanted in (("gradient", parameters(model)), ("activation", MODULES)):
        panels = pair.panels(view)
        assert panels is not None
        assert list(panels.difference.names) == wanted


def test_outputs_that_are_too_large_to_wait_are_not_before_those_that_were_called_first(tmp_path: Path) -> None:
    """A NaN takes a large output off the path on which the others are measured."""
    model, factors = Net(), iter([1.0, 1.0, torch.nan])
    model.front.register_forward_hook(lambda _module, _inputs, output: output * next(factors))
    train(model, tmp_path, steps=3).detach()
    run = gradmon.load_run(tmp_path)
    tables = [run._reader.table("activation", step) for step in run.steps]
    assert [list(table.names) for table in tables if table is not None] == [
        ["back.down", "back.up", "back", "front", "[root module]"]
    ] * 3
