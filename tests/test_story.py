"""The story of a spike: by the monitor that saw it, from the run directory, and on the command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor, SpikeDetector, load_run
from torch_gradmon.analysis.run import read_run
from torch_gradmon.analysis.spike_report import _row, explain
from torch_gradmon.cli.main import main


def _spiked(run_dir: Path | None, steps: int = 50, spoiled: float = 40.0) -> ModuleMonitor:
    """A run in which the second layer goes wrong in step 39, and all of the model in step 40."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    monitor = gradmon.watch(model, optimizer, on_spike=None, run_dir=run_dir)
    monitor.add_detector(SpikeDetector(signal="loss"))
    x = torch.randn(32, 6)
    for step in range(steps):
        monitor.log_context(batch_ids=[4 * step, 4 * step + 1])
        hidden = model[1](model[0](x).detach()).square().mean()
        loss = model(x).square().mean() * (spoiled if step == 40 else 1) + 10 * spoiled * hidden * (step == 39)
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.item())
        optimizer.step()
    return monitor


def test_the_story_names_what_who_when_and_what_came_after() -> None:
    text = _spiked(None).why(40)
    lines = text.splitlines()
    assert lines[0].startswith("step 40: grad_norm = ")
    assert lines[1].startswith("step 40: loss = ")
    assert lines[2] == "  one spike of 2 steps in a row, 39 to 40, the largest in step 39"
    assert lines[3] == "  batch_ids [160, 161], lr 1e-06"
    titles = next(line for line in lines if line.startswith("signal")).split()
    assert titles == ["signal", "37", "38", "39", "[40]", "41", "42", "43", "44"]
    first = lines[next(row for row, line in enumerate(lines) if line.startswith("parameter, by suspicion")) + 1].split()
    assert first[0] in ("1.weight", "1.bias")
    assert first[-1] == "39"  # it moved the step before
    assert next(line for line in lines if line.startswith("2.weight")).split()[-2:] == ["this", "step"]
    assert "after the spike of steps 39 to 40 grad_norm is back to normal since step 41" in text
    assert "after the spike of steps 39 to 40 loss is back to normal since step 41" in text


def test_the_worst_step_is_told_of_by_default_and_other_steps_on_request() -> None:
    monitor = _spiked(None)
    assert monitor.why() == monitor.why(39)
    assert monitor.why(20).startswith("step 20: no detector called it a spike")
    with pytest.raises(ValueError, match="step 77 is not known: 50 steps are known, from 0 to 49"):
        monitor.why(77)
    assert _spiked(None, steps=30).why().startswith("there is no spike in the 30 monitored steps from 0 to 29")
    monitor = ModuleMonitor(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="nothing looks for spikes"):
        monitor.why()
    monitor = ModuleMonitor(nn.Linear(1, 1), preset="minimal")
    assert monitor.why() == "there is no spike, because no step is known yet"
    with pytest.raises(TypeError, match="step must be an int"):
        monitor.why(torch.tensor(3))


@pytest.mark.parametrize("asked", [False, True])
def test_the_story_has_a_row_for_a_signal_of_one_parameter_whether_its_metric_is_shown_or_not(
    tmp_path: Path, asked: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    monitor = gradmon.watch(model, optimizer, on_spike=None, run_dir=tmp_path)
    if asked:
        monitor.add_gradient_metric("rms")
    monitor.add_detector(SpikeDetector(signal=re.compile(r"^gradient_before_clip/.*/rms$")))
    x = torch.randn(32, 6)
    for step in range(50):
        optimizer.zero_grad()
        (model(x).square().mean() * (50 if step == 40 else 1)).backward()
        optimizer.step()
    told = monitor.why(40)
    worst = monitor._runtime.pipeline.history._records[40].events[-1]
    monitor.detach()
    for text in (told, explain(read_run(tmp_path), 40)):
        row = next(line for line in text.splitlines() if line.startswith(worst.signal)).split()
        assert row[4] == f"{worst.value:.4g}"
        assert "-" not in row[1:]
        assert f"after the spike of step 40 {worst.signal} is back to normal since step 41" in text


def test_a_run_directory_tells_the_same_story(tmp_path: Path) -> None:
    monitor = _spiked(tmp_path)
    told = monitor.why()
    monitor.detach()
    # statistics are stored as float32, of which the story shows four digits
    assert explain(read_run(tmp_path)) == told
    assert [event.where for event in load_run(tmp_path).spikes if event.step == 40] == [
        event.where for event in monitor._runtime.pipeline.history.recent().events if event.step == 40
    ]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _spiked(tmp_path).detach()
    assert main(["why", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("step 39: grad_norm = ")
    assert main(["why", str(tmp_path), "--step", "40"]) == 0
    assert capsys.readouterr().out.startswith("step 40: ")
    for words, message in (
        (["why", str(tmp_path), "--step", "999"], "step 999 is not known"),
        (["why", str(tmp_path / "no")], "there is no run in"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_a_step_that_is_not_finite_names_the_parameters() -> None:
    text = _spiked(None, spoiled=float("inf")).why(40)
    assert "step 40: grad_norm is nan" in text
    assert "loss is inf" in text or "loss is nan" in text


def test_the_random_state_of_a_spike_brings_its_numbers_back(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    monitor = gradmon.watch(model, optimizer, on_spike=None, run_dir=tmp_path)
    x, outputs = torch.randn(32, 6), {}
    for step in range(30):
        outputs[step] = model(x)
        optimizer.zero_grad()
        (outputs[step].square().mean() * (100 if step == 25 else 1)).backward()
        if step == 25:
            before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.step()
    monitor.detach()
    run = load_run(tmp_path)
    assert [event.step for event in run.spikes] == [25]
    model.load_state_dict(before)
    torch.set_rng_state(run.record(25).rng_state["cpu"])
    assert torch.equal(model(x), outputs[25])
    with pytest.raises(KeyError, match="no random state is kept of step 24"):
        _ = run.record(24).rng_state


def test_a_watched_model_draws_the_numbers_that_it_draws_without_a_monitor() -> None:
    drawn = []
    for watched in (False, True):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        if watched:
            gradmon.watch(model, optimizer)
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        drawn.append(torch.get_rng_state())
    assert torch.equal(*drawn)


def test_values_of_a_row_are_apart_however_long_they_are() -> None:
    cells = ["0.00068617", "0.000680851", "0.0006755321"]
    assert _row("lr", cells).split() == ["lr", *cells]
