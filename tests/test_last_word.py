"""The line on stderr at the end of a training: what is wrong with its run, once, and never a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.analysis.run import diagnose

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parent.parent
PROGRAM = """
import sys
import torch
from torch import nn
import torch_gradmon as gradmon

def train(lr, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    monitor = gradmon.watch(model, optimizer, checks=gradmon.Checks(data=False), **options)
    for _ in range(120):
        x = torch.randn(16, 4)
        loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.log_scalar("loss", loss)
    return monitor, optimizer
"""


def ended(directory: Path, body: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", PROGRAM + body]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("kept = train(3.0, run_dir='a run')", 1),
        ("train(3.0, run_dir='a run')", 1),  # the monitor is gone before the end
        ("monitor, optimizer = train(3.0, run_dir='a run'); monitor.detach(); monitor.detach()", 1),
        ("kept = train(3.0, run_dir='a run'); sys.exit(3)", 1),
        ("train(3.0, run_dir='a run')[0].detach(); import shutil; shutil.rmtree('a run')", 1),
        ("kept = train(3.0, run_dir='a run'); import shutil; shutil.rmtree('a run')", 0),
        ("kept = train(3.0, run_dir='a run'); sys.stderr.close(); sys.stderr = None", 0),
        ("kept = train(3.0, run_dir='a run', on_spike=None)", 0),
        ("kept = train(3.0)", 0),
        ("kept = train(1e-3, run_dir='a run')", 0),
    ],
)
def test_last_word_is_one_line_where_something_was_found(body: str, lines: int, tmp_path: Path) -> None:
    done = ended(tmp_path, body)
    assert done.returncode == (3 if "exit" in body else 0)
    told = [line for line in done.stderr.splitlines() if "gradmon diagnose" in line]
    assert len(told) == lines, done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout
    for line in told:
        assert line.startswith("torch_gradmon: ")
        assert "learning-rate-high" in line
        assert line.endswith("gradmon diagnose 'a run'")


@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
def test_last_word_tells_of_steps_after_the_first_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e3)
    monitor = gradmon.watch(model, optimizer, run_dir=tmp_path, on_spike="warn", checks=gradmon.Checks(data=False))
    for _ in range(2):
        for _ in range(40):
            optimizer.zero_grad()
            loss = torch.nan * model(torch.ones(1, 2)).sum()
            loss.backward()
            optimizer.step()
            monitor.log_scalar("loss", loss)
        monitor.detach()
        assert diagnose(tmp_path).exit_code == 1
        assert "non-finite" in capsys.readouterr().err
        monitor.detach()
        assert not capsys.readouterr().err
        monitor.attach(optimizer)
    monitor.detach()
