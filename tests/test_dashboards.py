"""Dashboards of TensorBoard and W&B: each value of a monitor is on one chart, and only there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.sinks import tensorboard_layout, wandb_workspace
from torch_gradmon.sinks.dashboards import panels
from torch_gradmon.sinks.wandb import AXIS


@pytest.fixture(scope="module")
def keys() -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer)
    for source in ("gradient", "parameter"):
        for metric in ("norm", "max"):
            getattr(monitor, f"add_{source}_metric")(metric)
    model(torch.randn(8, 4)).square().mean().backward()
    monitor.log_scalar("train/loss", 1.0)
    monitor.log_scalar("accuracy", 0.5)
    optimizer.step()
    found = list(monitor.get_step_metrics())
    monitor.detach()
    return found


def test_every_value_of_the_monitor_is_on_one_chart(keys: list[str]) -> None:
    found = panels(keys)
    assert [(panel.section, panel.title) for panel in found[:2]] == [("training", "loss"), ("training", "grad_norm")]
    assert {panel.section for panel in found} == {"training", "whole model", "gradient", "gradient before clip", "parameter"}
    shown = [key for panel in found for key in panel.keys]
    assert len(shown) == len(set(shown))
    assert set(keys) - set(shown) == {"accuracy"}
    for panel in found:
        assert tuple(key for key in keys if re.search(panel.pattern, key)) == panel.keys


def test_names_with_signs_of_patterns_are_matched_as_they_are() -> None:
    (first, second) = panels(["gradient/a.b[0]/norm", "gradmon/grad_norm", "gradientx/a/norm"])
    assert re.search(second.pattern, "gradient/a.b[0]/norm")
    assert not re.search(second.pattern, "gradientx/a/norm")
    assert first.keys == ("gradmon/grad_norm",)
    with pytest.raises(ValueError, match="accuracy"):
        panels(["accuracy"])


@pytest.mark.extra
def test_tensorboard_reads_the_layout(keys: list[str], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_custom_scalars(tensorboard_layout(keys))
    events = EventAccumulator(str(tmp_path)).Reload()
    layout = Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    titles = {category.title: [chart.title for chart in category.chart] for category in layout.category}
    assert titles["gradient"] == ["norm", "max"]
    (chart,) = (
        chart for category in layout.category if category.title == "gradient" for chart in category.chart if chart.title == "norm"
    )
    matched = [key for key in keys if re.match(chart.multiline.tag[0], key)]
    assert matched == [f"gradient/{place}.{kind}/norm" for place in (0, 2) for kind in ("weight", "bias")]


@pytest.mark.extra
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the package's own
def test_the_workspace_has_a_section_for_each_source(keys: list[str]) -> None:
    """What is sent is built; nothing is sent."""
    pytest.importorskip("wandb_workspaces")
    workspace = wandb_workspace("me", "mine", keys)
    assert [section.name for section in workspace.sections] == [
        "training",
        "whole model",
        "gradient",
        "gradient before clip",
        "parameter",
    ]
    assert [section.is_open for section in workspace.sections] == [True, False, False, False, False]
    (plot,) = (
        plot for section in workspace.sections if section.name == "gradient" for plot in section.panels if plot.title == "norm"
    )
    assert plot.metric_regex == "^gradient/.*/norm$"
    assert plot.x == AXIS
    sent = workspace._to_model().model_dump_json(by_alias=True)
    assert "^gradient/.*/norm$" in sent
    assert "train/loss" in sent


def test_without_the_package_its_name_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for module in ("wandb_workspaces", "wandb_workspaces.workspaces"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match="pip install wandb-workspaces"):
        wandb_workspace("me", "mine", ["gradmon/grad_norm"])
