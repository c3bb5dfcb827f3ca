"""Many steps of two hundred layers, into every sink at once: each file has every value."""

from __future__ import annotations

import json
import os
import struct
from importlib.util import find_spec
from pathlib import Path

import pytest

import torch_gradmon as gradmon

from . import forked, wandb_files

PACKAGES = ("wandb", "tensorboard", "trackio")
pytestmark = [pytest.mark.extra, pytest.mark.skipif(not all(map(find_spec, PACKAGES)), reason="a logger is not installed")]

LAYERS = 200
SCRIPT = f"""
import json, sys
import torch, trackio, wandb
from torch import nn
import torch_gradmon as gradmon

torch.set_num_threads(1)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range({LAYERS}))

    def forward(self, x):
        return sum(layer(x) for layer in self.layers)


torch.manual_seed(0)
model = Wide()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
run = wandb.init(project="tests")
trackio.init(project="tests", name="run", auto_log_gpu=False, auto_log_cpu=False)
with gradmon.watch(model, optimizer, layers="all", run_dir="run", on_spike=None) as monitor:
    for sink in (gradmon.sinks.JsonlSink("metrics.jsonl"), run, gradmon.sinks.TensorBoardSink("tb"), trackio):
        monitor.add_sink(sink)
    for step in range(int(sys.argv[1])):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            run.log({{"loss": loss.item()}})
run.finish()
trackio.finish()
values = monitor.get_all_metrics()
json.dump({{step: dict(row) for step, row in values.items()}}, open("expected.json", "w"))

from trackio.sqlite_storage import SQLiteStorage

json.dump(SQLiteStorage.get_logs("tests", "run"), open("trackio.json", "w"))
"""

Rows = dict[int, dict[str, float]]


@pytest.fixture(scope="module", params=[150, pytest.param(1000, marks=pytest.mark.slow)])
def steps(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture(scope="module")
def directory(steps: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("long")
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "HF_HUB_OFFLINE": "1"}
    settings = {"PATH": os.environ["PATH"], "HOME": str(directory), "HF_HOME": str(directory), **offline}
    done = forked.run(SCRIPT, steps, environment=settings, cwd=directory, timeout=280)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="module")
def expected(directory: Path, steps: int) -> Rows:
    rows = {int(step): row for step, row in json.loads((directory / "expected.json").read_text()).items()}
    assert list(rows) == list(range(steps))
    per_layer = [sum(key.startswith("gradient_before_clip/") for key in row) for row in rows.values()]
    assert per_layer == [LAYERS] * steps
    return rows


def test_jsonl(directory: Path, expected: Rows) -> None:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert {row.pop("step"): row for row in lines} == expected


def test_wandb(directory: Path, expected: Rows, steps: int) -> None:
    rows = wandb_files.history(directory)
    assert sum("loss" in row for row in rows) == steps // 10
    ours = [row for row in rows if "gradmon/step" in row]
    found = {
        row["gradmon/step"]: {k: v for k, v in row.items() if k[0] != "_" and k not in ("loss", "gradmon/step")} for row in ours
    }
    assert found == expected
    assert len(ours) == steps
    assert not [key for key in wandb_files.summary(directory) if "layers" in key]


def test_tensorboard(directory: Path, expected: Rows) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(directory / "tb"), size_guidance={"scalars": 0})
    reader.Reload()
    found: Rows = {}
    for tag in reader.Tags()["scalars"]:
        for event in reader.Scalars(tag):
            found.setdefault(event.step, {})[tag] = event.value
    narrow = {step: {k: struct.unpack("f", struct.pack("f", v))[0] for k, v in row.items()} for step, row in expected.items()}
    assert found == narrow


def test_trackio(directory: Path, expected: Rows) -> None:
    rows = json.loads((directory / "trackio.json").read_text())
    assert all(row.pop("timestamp") for row in rows)
    assert {row.pop("step"): row for row in rows} == expected


def test_run_directory(directory: Path, expected: Rows) -> None:
    run = gradmon.load_run(directory / "run")
    key = "gradient_before_clip/layers.199.weight/norm"
    assert run.series(key) == pytest.approx({step: row[key] for step, row in expected.items()}, rel=1e-6)
