"""What a monitor says of itself at a glance, in a notebook or a debugger."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.plugins.clipping import AdaGC, ZClip
from torch_gradmon.step.planner import PRESETS, PresetName


def test_a_monitor_says_what_it_watches_how_far_it_is_and_where_it_writes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = gradmon.watch(model, optimizer, preset="minimal", run_dir=tmp_path / "first", on_spike=None)
    monitor.add_gradient_metric("norm")
    where = f"the run directory {str(tmp_path / 'first')!r}"
    assert repr(monitor) == f"ModuleMonitor(Sequential, 2 metrics, no step yet, {where})"
    for factor in (1.0,) * 40 + (float("nan"),):
        optimizer.zero_grad()
        (model(torch.ones(2, 3)).sum() * factor).backward()
        optimizer.step()
    assert f"step 40, 1 of the last steps with spikes, {where})" in repr(monitor)
    monitor.set_detail(every=2, steps=10)
    model(torch.ones(2, 3)).sum().backward()
    assert "for now steps divisible by 2, for 10 steps, " in repr(monitor)
    monitor.detach()
    assert "not attached to an optimizer" in repr(monitor)


def test_a_monitor_that_is_disabled_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADMON_DISABLE", "1")
    model = nn.Linear(2, 2)
    assert repr(gradmon.watch(model, torch.optim.SGD(model.parameters(), lr=0.1))).endswith(", disabled by GRADMON_DISABLE)")


def test_one_without_an_optimizer_says_so_until_steps_begin_by_hand() -> None:
    model = nn.Linear(2, 2)
    monitor = gradmon.ModuleMonitor(model)
    assert "not attached" in repr(monitor)
    monitor.begin_step(0)
    assert repr(monitor) == "ModuleMonitor(Linear, 0 metrics, step 0)"


def test_a_monitor_that_is_printed_shows_what_trains(tmp_path: Path) -> None:
    model = nn.ModuleDict(
        {"encoder": nn.Linear(3, 4), "body": nn.Linear(4, 4), "head": nn.Linear(4, 1), "spare": nn.Linear(2, 1)}
    )
    model["encoder"].requires_grad_(False)
    groups = [{"params": model["body"].parameters()}, {"params": model["head"].parameters(), "lr": 0.5, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.25, weight_decay=0.1)
    monitor = gradmon.watch(model, optimizer, preset="minimal", run_dir=tmp_path / "first", on_spike=None)
    lines = [
        "AdamW, group 0, lr 0.25, weight decay 0.1, 2 tensors of 20 elements (45.5%): body",
        "AdamW, group 1, lr 0.5, 2 tensors of 5 elements (11.4%): head",
        "frozen, 2 tensors of 16 elements (36.4%): encoder",
        "in no optimizer, 2 tensors of 3 elements (6.8%): spare",
    ]
    assert str(monitor).splitlines() == [repr(monitor), *(f"  {line}" for line in lines)]
    optimizer.param_groups[0]["lr"] = 0.125
    model["encoder"].weight.requires_grad_(True)
    assert "AdamW, group 0, lr 0.125" in str(monitor)
    assert "frozen, 1 tensor of 4 elements (9.1%): encoder" in str(monitor)
    assert "in no optimizer, 3 tensors of 15 elements" in str(monitor)
    monitor.detach()
    assert str(monitor) == repr(monitor)
    run = gradmon.load_run(tmp_path / "first")
    assert list(map(str, run._reader.trained_parts)) == lines
    assert run._reader.model_text == "ModuleDict, 44 elements in 8 tensors, float32; 4 Linear"


def test_one_without_a_model_is_printed_in_one_line() -> None:
    assert str(gradmon.ModuleMonitor()) == repr(gradmon.ModuleMonitor())


def test_a_run_shows_the_learning_rate_that_a_schedule_multiplies(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 100)
    monitor = gradmon.watch(model, optimizer, preset="minimal", run_dir=tmp_path / "first", on_spike=None)
    assert "SGD, group 0, lr 0.005," in str(monitor)  # as it is now
    monitor.detach()
    assert str(gradmon.load_run(tmp_path / "first")._reader.trained_parts[0]).startswith("SGD, group 0, lr 0.5,")


HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m"


def _spoiled(path: Path) -> gradmon.ModuleMonitor:
    """A training whose one layer, with a name that is markup and controls a terminal, becomes NaN."""
    model = nn.ModuleDict({HOSTILE: nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, run_dir=path, on_spike=None)
    for step in range(40):
        optimizer.zero_grad()
        (model[HOSTILE](torch.ones(1, 2)).sum() * (float("nan") if step == 30 else 1)).backward()
        optimizer.step()
    monitor.get_step_metrics()
    return monitor


def test_results_are_shown_as_text_and_escaped_in_a_notebook(tmp_path: Path) -> None:
    monitor = _spoiled(tmp_path)
    diagnosis = monitor.diagnose()
    shown = [
        diagnosis,
        diagnosis.findings[0],
        monitor.why(),
        gradmon.diff_runs(tmp_path, tmp_path),
        gradmon.load_run(tmp_path).diagnose(),
    ]
    assert any("img" in str(each) for each in shown)
    for each in shown:
        page = each._repr_html_()
        assert page.startswith("<pre>")
        assert page.endswith("</pre>")
        assert "<img" not in page
        assert "\x1b" not in page + (repr(each) if each is not diagnosis.findings[0] else "")
    assert repr(diagnosis).splitlines()[0] == str(diagnosis).splitlines()[0]
    assert "Diagnosis(" not in repr(diagnosis)
    monitor.detach()


def test_why_without_a_spike_is_a_text(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    monitor = gradmon.watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert repr(monitor.why()) == "there is no spike, because no step is known yet"
    assert isinstance(monitor.why(), str)


def test_names_of_the_package_are_the_public_ones() -> None:
    assert dir(gradmon) == sorted(gradmon.__all__)


@pytest.mark.parametrize(
    "name", [name for name in dir(gradmon.ModuleMonitor) if name.startswith("add_") and name.endswith("_metric")]
)
def test_methods_that_add_metrics_explain_their_arguments(name: str) -> None:
    method = getattr(gradmon.ModuleMonitor, name)
    told = method.__doc__ or ""
    for argument in inspect.signature(method).parameters:
        assert argument == "self" or argument in told, argument


def test_help_of_watch_explains_each_argument_or_says_where() -> None:
    told = gradmon.watch.__doc__ or ""
    assert ":class:`ModuleMonitor`" in told
    assert [name for name in inspect.signature(gradmon.watch).parameters if f"{name}:" not in told] == []
    rest = inspect.signature(gradmon.ModuleMonitor).parameters.keys() - inspect.signature(gradmon.watch).parameters.keys()
    assert [
        name for name in rest if not re.search(rf"^ +(\w+, )*{name}(, \w+)*:", gradmon.ModuleMonitor.__doc__ or "", re.M)
    ] == []


def test_presets_are_literals_for_type_checkers() -> None:
    assert get_args(PresetName) == tuple(PRESETS)
    assert inspect.signature(gradmon.watch).parameters["preset"].annotation == "PresetName"


def test_what_is_handed_to_a_monitor_shows_its_settings() -> None:
    assert repr(ZClip(threshold=3.0)).startswith("ZClip(threshold=3.0, ")
    assert repr(AdaGC()) == "AdaGC(ratio=1.04, max_norm=1.0, beta=0.99, warmup=100)"
    assert repr(gradmon.SpikeDetector(signal="loss")).endswith("signal='loss')")
    assert repr(gradmon.SpikeCapture(before=4)) == "SpikeCapture(before=4, after=3)"


def test_a_sink_names_where_it_writes_and_no_secret_of_an_address(tmp_path: Path) -> None:
    sinks = gradmon.sinks
    assert repr(sinks.JsonlSink(tmp_path / "a.jsonl")) == f"JsonlSink({str(tmp_path / 'a.jsonl')!r})"
    assert repr(sinks.AlertSink("https://hooks.example.org/secret", on="spike")) == "AlertSink('hooks.example.org', on=['spike'])"
    assert "print" in repr(sinks.AlertSink(print))


@pytest.mark.extra
def test_a_sink_of_a_tracker_and_a_callback_are_no_addresses(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    sinks = gradmon.sinks
    assert repr(sinks.TensorBoardSink(tmp_path)) == f"TensorBoardSink({str(tmp_path)!r})"
    with tensorboard.SummaryWriter(tmp_path) as writer:
        assert repr(sinks.TensorBoardSink(writer)) == "TensorBoardSink(SummaryWriter)"
    registry = pytest.importorskip("prometheus_client").CollectorRegistry()
    assert repr(sinks.PrometheusSink(port=None, registry=registry)) == "PrometheusSink(port=None)"
    callback = pytest.importorskip("torch_gradmon.integrations.transformers").GradmonCallback()
    assert repr(callback).startswith("GradmonCallback(ModuleMonitor(")
