"""``layers=`` shows right values whatever else is measured, and what was not measured never comes out as a number."""

from __future__ import annotations

import contextlib
import csv
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import torch_gradmon as gradmon
from tests import oracle
from torch_gradmon import ModuleMonitor, SpikeDetector
from torch_gradmon.cli.terminal import layer_table as rows_of_layers
from torch_gradmon.cli.terminal.live import LiveRun
from torch_gradmon.core.moments import Column, identity
from torch_gradmon.core.records import StatsTable
from torch_gradmon.runs.reader import StatsSeries
from torch_gradmon.spikes.detector_set import GradientNormHistory
from torch_gradmon.step.summary import top_shares

Tensors = dict[str, Tensor]
PATTERN = r"^h\.1\..*weight$"


def _model() -> nn.Module:
    torch.manual_seed(3)
    body = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))
    return _Net(body)


class _Net(nn.Module):
    def __init__(self, body: nn.ModuleList) -> None:
        super().__init__()
        self.h, self.head = body, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = x + block(x)
        return self.head(x)


def _norm(tensors: Tensors, names: list[str]) -> float:
    return oracle.values([tensors[name] for name in names])["norm"]


def _members(choice: str, names: list[str], with_groups: bool) -> dict[str, list[str]]:
    """The names of the parameters behind each value, by its label."""
    if choice == "blocks":
        blocks = {name: ".".join(name.split(".")[:2]) if name.startswith("h.") else name.split(".")[0] for name in names}
        found = {block: [name for name in names if blocks[name] == block] for block in blocks.values()}
        groups = {"group_0": [n for n in names if n.endswith("weight")], "group_1": [n for n in names if n.endswith("bias")]}
        return {**found, **(groups if with_groups else {})}
    return {name: [name] for name in names if choice == "all" or re.search(PATTERN, name)}


#: What else is measured, by name: it adds metrics, and says on which steps updates have norms.
Adds = Callable[[ModuleMonitor], object]
METRICS: dict[str, tuple[Adds, Callable[[int], bool]]] = {
    "nothing else": (lambda monitor: None, lambda step: False),
    "columns without squares": (
        lambda monitor: (
            monitor.add_gradient_metric("max"),
            monitor.add_update_metric("max"),
            monitor.add_parameter_metric("l1_norm"),
        ),
        lambda step: False,
    ),
    "functions": (lambda monitor: monitor.add_gradient_metric("own", lambda t: t.abs().amax()), lambda step: False),
    "norms of some": (lambda monitor: monitor.add_gradient_metric("norm", metric_regex="head"), lambda step: False),
    "norms of all": (
        lambda monitor: (monitor.add_gradient_metric("rms"), monitor.add_update_metric("norm")),
        lambda step: True,
    ),
    "logged by hand": (lambda monitor: monitor.add_detector(SpikeDetector(signal="loss")), lambda step: False),
    "one value of the model": (lambda monitor: monitor.add_model_metric("param_norm"), lambda step: False),
    "cheap, and columns of updates without squares": (
        lambda monitor: (monitor._runtime.use_preset("minimal"), monitor.add_update_metric("max")),
        lambda step: False,
    ),
    "standard": (lambda monitor: monitor._runtime.use_preset("standard"), lambda step: step == 0),
}


def _train(monitor: ModuleMonitor, model: nn.Module, optimizer: SGD, micro_batches: int, steps: int, by_hand: bool) -> list[Seen]:
    generator, seen = torch.Generator().manual_seed(7), []
    for step in range(steps):
        if by_hand:
            monitor.begin_step(step)
        for _ in range(micro_batches):
            x = torch.randn(5, 4, generator=generator)
            (model(x).square().mean() / micro_batches).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        if by_hand:
            monitor.monitor_gradients(before_clip=True)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()
        optimizer.zero_grad()
        after = {name: p.detach().double() - parameters[name].double() for name, p in model.named_parameters()}
        if by_hand:
            monitor.end_step()
        seen.append(Seen(gradients, parameters, after, monitor.get_step_metrics()))
    return seen


@dataclass
class Seen:
    """One step as seen by hand, beside what the monitor showed of it."""

    gradients: Tensors
    parameters: Tensors
    updates: Tensors
    metrics: Mapping[str, float]


def _optimizer(model: nn.Module) -> SGD:
    sides = [[p for name, p in model.named_parameters() if name.endswith(end)] for end in ("weight", "bias")]
    return SGD([{"params": side} for side in sides], lr=0.05)


@pytest.mark.parametrize("by_hand", [False, True], ids=["attached", "by hand"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("choice", ["all", "blocks", "top", PATTERN])
@pytest.mark.parametrize("what", METRICS)
def test_values_of_layers_equal_the_oracle_whatever_else_is_measured(
    what: str, choice: str, micro_batches: int, by_hand: bool
) -> None:
    add, has_updates = METRICS[what]
    model = _model()
    optimizer, names = _optimizer(model), [name for name, _ in model.named_parameters()]
    monitor = ModuleMonitor(model, layers=choice, on_metric_error="raise")
    add(monitor)
    if not by_hand:
        monitor.attach(optimizer)
    for step, seen in enumerate(_train(monitor, model, optimizer, micro_batches, 2, by_hand)):
        expected = {}
        if choice == "top":
            total = _norm(seen.gradients, names) ** 2
            shares = {name: _norm(seen.gradients, [name]) ** 2 / total for name in names}
            best = sorted(shares, key=lambda name: -shares[name])[:10]
            expected = {f"gradient_before_clip/{name}/share": shares[name] for name in best}
        else:
            for label, members in _members(choice, names, with_groups=not by_hand).items():
                expected[f"gradient_before_clip/{label}/norm"] = _norm(seen.gradients, members)
                if has_updates(step) and not by_hand:
                    ratio = _norm(seen.updates, members) / _norm(seen.parameters, members)
                    expected[f"update/{label}/ratio"] = ratio
        shown = {k: v for k, v in seen.metrics.items() if re.match(r"(gradient_before_clip/.*/(norm|share)|update/.*/ratio)$", k)}
        if what == "norms of some":  # what was asked for is shown too
            expected |= {f"gradient_before_clip/{n}/norm": _norm(seen.gradients, [n]) for n in names if n.startswith("head")}
        assert shown.keys() == expected.keys(), f"{what} {choice} step {step}"
        for key, value in expected.items():
            assert shown[key] == pytest.approx(value, rel=1e-6), f"{what} {choice} step {step} {key}"


def test_layers_cost_only_the_squares_before_clipping() -> None:
    model = _model()
    monitor = ModuleMonitor(model, layers="all").attach(_optimizer(model))
    plans, _ = monitor._runtime.planner.plans(0, monitor._runtime.factory.summary)
    assert {source: plan.columns for source, plan in plans.items() if not plan.empty} == {
        "gradient_before_clip": {Column.COUNT, Column.SQUARE_SUM}
    }


def test_values_of_layers_also_under_a_live_change_and_with_a_flight_recorder() -> None:
    model = _model()
    optimizer, names = _optimizer(model), [name for name, _ in model.named_parameters()]
    monitor = ModuleMonitor(model, layers="all", every=3, spike_capture=gradmon.SpikeCapture(before=2))
    monitor.add_gradient_metric("max")
    monitor.attach(optimizer)
    monitor.set_detail(every=1, preset="minimal", steps=2)
    for step, seen in enumerate(_train(monitor, model, optimizer, 1, 6, by_hand=False)):
        shown = {k: v for k, v in seen.metrics.items() if k.endswith("/norm")}
        wanted = [f"gradient_before_clip/{name}/norm" for name in names] if seen.metrics else []
        assert sorted(shown) == sorted(wanted)
        assert bool(seen.metrics) == (step in (0, 1, 3)), step
        for name in names if shown else []:
            assert shown[f"gradient_before_clip/{name}/norm"] == pytest.approx(_norm(seen.gradients, [name]), rel=1e-6)


# --- what was not measured is no number ----------------------------------------------------------------------------------------


def _partly(columns: frozenset[Column], is_part: bool = False) -> StatsTable:
    rows = identity(2)
    rows[:, Column.COUNT] = 4.0
    for column in columns:
        rows[:, column] = 3.0
    return StatsTable(("a", "b"), rows, columns, is_part=is_part)


def test_no_share_is_told_of_what_is_not_whole_or_not_squares() -> None:
    for table in (_partly(frozenset({Column.MAX})), _partly(frozenset({Column.SQUARE_SUM}), is_part=True)):
        assert top_shares(table, 3) == []
    gradients = GradientNormHistory()
    gradients.add(0, {"gradient_before_clip": _partly(frozenset({Column.SQUARE_SUM}), is_part=True)})
    assert [suspect.share for suspect in gradients.suspects(0)] == [None, None]
    gradients.add(1, {"gradient_before_clip": _partly(frozenset({Column.SQUARE_SUM}))})
    assert [suspect.share for suspect in gradients.suspects(1)] == [0.5, 0.5]


def test_top_parameters_are_of_the_whole_model_or_none() -> None:
    model = _model()
    optimizer = _optimizer(model)
    monitor = ModuleMonitor(model)
    monitor.add_gradient_metric("norm", metric_regex="head")
    monitor.attach(optimizer)
    _train(monitor, model, optimizer, 1, 1, by_hand=False)
    assert monitor.last_record.top_gradients() == []


@pytest.mark.parametrize("metric", ["max", "mean", "sparsity", "l1_norm"])
def test_no_reader_makes_norms_of_other_columns(metric: str, tmp_path: Path) -> None:
    model = _model()
    optimizer = _optimizer(model)
    monitor = ModuleMonitor(model, run_dir=tmp_path / "run")
    monitor.add_gradient_metric(metric)
    monitor.add_update_metric(metric)
    monitor.add_parameter_metric(metric)
    monitor.attach(optimizer)
    _train(monitor, model, optimizer, 1, 12, by_hand=False)
    monitor.detach()
    with contextlib.closing(gradmon.load_run(tmp_path / "run")) as run:
        keys = run.keys()
        assert not any(key.rpartition("/")[2] in ("norm", "rms", "std", "ratio") for key in keys)
        with pytest.raises(KeyError):
            run.series("gradient/head.weight/norm")
        rows = rows_of_layers.layer_rows(run._reader, rows_of_layers.groups([name for name, _ in model.named_parameters()]))
        for row in rows:
            assert row.norm is row.largest is row.share is row.update is row.clipped is None, row
        live = LiveRun(run._reader, 100)
        assert live.suspects(3)[1] == [] == live.top_layers(3)
        assert list(run.record(11).suspects) == []
        assert not {"norm", "ratio"} & {key.metric for record in run._reader.records() for key in record.values}
        run.export(tmp_path / "run.csv", "tensors", progress=False)
    with open(tmp_path / "run.csv", encoding="utf-8") as file:
        exported = list(csv.DictReader(file))
    assert exported
    assert not any(row.get(name) for row in exported for name in ("norm", "rms", "std", "ratio"))
    assert gradmon.load_run(tmp_path / "run").diagnose().exit_code == 0


def test_a_stack_without_squares_has_no_norms() -> None:
    rows = identity(2).reshape(1, 2, 8).clone()
    assert StatsSeries((0,), ("a", "b"), rows, frozenset({Column.MAX})).values("norm").isnan().all()
    assert StatsSeries((0,), ("a", "b"), rows, frozenset({Column.SQUARE_SUM})).values("norm").tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("signal", ["grad_norm", "grad_top_fraction", "grad_max", "grad_mean", "param_norm", "update_norm"])
def test_a_detector_measures_what_it_judges(signal: str) -> None:
    model = _model()
    optimizer, names = _optimizer(model), [name for name, _ in model.named_parameters()]
    monitor = ModuleMonitor(model)
    monitor.add_gradient_metric("l1_norm", metric_regex="head")  # whose table alone would be a part of the model
    judged: list[float] = []
    monitor.add_detector(SpikeDetector(lambda value: judged.append(value) and None, signal=signal))
    monitor.attach(optimizer)
    seen = _train(monitor, model, optimizer, 1, 3, by_hand=False)
    monitor.detach()
    for value, step in zip(judged, seen, strict=True):
        largest = max(_norm(step.gradients, [name]) for name in names)
        true = {
            "grad_norm": _norm(step.gradients, names),
            "grad_top_fraction": (largest / _norm(step.gradients, names)) ** 2,
            "grad_max": oracle.values(list(step.gradients.values()))["max"],
            "grad_mean": oracle.values(list(step.gradients.values()))["mean"],
            "param_norm": _norm(step.parameters, names),
            "update_norm": _norm(step.updates, names),
        }[signal]
        assert value == pytest.approx(true, rel=1e-6, abs=1e-9)


def test_a_preset_that_is_added_within_a_step_shows_nothing_of_the_part_that_was_measured() -> None:
    model = _model()
    optimizer, names = _optimizer(model), [name for name, _ in model.named_parameters()]
    monitor = ModuleMonitor(model)
    monitor.add_gradient_metric("norm", metric_regex="head")
    monitor.add_parameter_metric("max")
    monitor.attach(optimizer)
    model(torch.randn(5, 4)).square().mean().backward()
    monitor._runtime.use_preset("standard")
    optimizer.step()
    optimizer.zero_grad()
    values, missing = monitor.get_step_metrics(), monitor.missing()
    for name in ("grad_norm", "grad_max", "grad_top_fraction", "param_norm", "update_norm"):
        assert f"gradmon/{name}" not in values
        assert missing[f"gradmon/{name}"] == "it was asked for after the step had begun"
    (seen,) = _train(monitor, model, optimizer, 1, 1, by_hand=False)
    assert seen.metrics["gradmon/grad_norm"] == pytest.approx(_norm(seen.gradients, names), rel=1e-6)


def test_steps_with_nonfinite_gradients_are_counted_as_far_as_gradients_are_measured() -> None:
    model = _model()
    optimizer = _optimizer(model)
    monitor = ModuleMonitor(model)
    monitor.add_gradient_metric("max", metric_regex="head.weight")
    monitor.attach(optimizer)
    for factor in (1.0, float("inf"), 1.0):
        (model(torch.randn(5, 4)).square().mean() * factor).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()
        optimizer.zero_grad()
    monitor.detach()
    assert monitor.get_step_counts().nonfinite == 1


class Wrapped(nn.Module):
    """A model inside another module, as a LightningModule has it; its embedding gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.m = nn.ModuleDict(
            {"emb": nn.Linear(4, 4), "h": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "head": nn.Linear(4, 2)}
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.m["head"](self.m["h"](self.m["emb"](x).detach()))


def test_blocks_within_a_wrapper_are_shown_one_by_one() -> None:
    model = Wrapped()
    optimizer = SGD(model.parameters(), lr=0.1)
    monitor = ModuleMonitor(model, layers="blocks", on_metric_error="raise")
    monitor.attach(optimizer)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    found, missing = monitor.get_step_metrics(), monitor.missing()
    for block, part in (("m.h.0", model.m["h"][0]), ("m.h.1", model.m["h"][1]), ("m.head", model.m["head"])):  # type: ignore[index]
        norm = _norm({name: p.grad.double() for name, p in part.named_parameters() if p.grad is not None}, ["weight", "bias"])
        assert found[f"gradient_before_clip/{block}/norm"] == pytest.approx(norm, rel=1e-6)
    assert "gradient_before_clip/m.emb/norm" in missing
    assert not any(key.startswith("gradient_before_clip/m/") for key in {**found, **missing})
