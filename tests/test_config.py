"""``MonitorOptions``: the options of a monitor, and the order in which a monitor is built."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_gradmon import ModuleMonitor
from torch_gradmon.monitor.builder import build
from torch_gradmon.monitor.options import MonitorOptions


def test_the_options_and_their_defaults_are_those_of_the_monitor() -> None:
    parameters = dict(inspect.signature(ModuleMonitor).parameters)
    for name in ("module", "log_to", "spike_capture", "logger", "cpu_offload"):  # ModuleMonitor's own, or with another default
        del parameters[name]
    fields = [field for field in dataclasses.fields(MonitorOptions) if field.name != "spike_capture"]
    assert {name: each.default for name, each in parameters.items()} == {field.name: field.default for field in fields}
    assert {name: each.annotation for name, each in parameters.items()} == {field.name: field.type for field in fields}


def test_a_config_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        MonitorOptions().every = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "interval", "monitored"),
    [
        ({}, 1, [0, 1, 2, 3, 4]),
        ({"every": 2}, 2, [0, 2, 4]),
        ({"monitor_step_fn": lambda step: step > 2}, None, [3, 4]),
        ({"every": lambda step: step > 2}, None, [3, 4]),
    ],
)
def test_the_cadence(options: dict[str, object], interval: int | None, monitored: list[int]) -> None:
    config = MonitorOptions(**options)  # type: ignore[arg-type]
    assert config.interval == interval
    assert [step for step in range(5) if config.is_step_monitored(step)] == monitored


def test_a_model_that_is_refused_leaves_no_run_directory(tmp_path: Path) -> None:
    config = MonitorOptions(run_dir=tmp_path / "run")
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        build(config, torch.ones(2))  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
    session = build(config, nn.Linear(2, 1))
    assert (tmp_path / "run").exists()
    session.detach()
