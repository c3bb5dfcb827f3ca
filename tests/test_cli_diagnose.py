"""``gradmon diagnose`` says what :func:`torch_gradmon.diagnose` finds, in a form for people, for programs and for CI."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.cli.main import main

from .pseudo_terminal import terminal

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")]


def _trained(path: Path, lr: float, steps: int = 60, name: str = "body") -> Path:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module(name, nn.Linear(8, 16))
    model.add_module("act", nn.ReLU())
    model.add_module("head", nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    monitor = gradmon.watch(model, optimizer, run_dir=path, preset="full", on_spike=None)
    for _ in range(steps):
        x = torch.randn(32, 8)
        loss = nn.functional.mse_loss(model(x), x.square().mean(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
    monitor.detach()
    return path


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _trained(tmp_path_factory.mktemp("sick"), 1.0)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _trained(tmp_path_factory.mktemp("sound"), 1e-2)


def test_a_sick_run_is_told_and_fails(sick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(sick)]) == gradmon.load_run(sick).diagnose().exit_code == 1
    printed = capsys.readouterr().out
    assert printed == f"{gradmon.load_run(sick).diagnose()}\n"
    assert "WARNING learning-rate-high" in printed


def test_a_sound_run_passes(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(sound)]) == 0
    assert capsys.readouterr().out == f"{gradmon.load_run(sound).diagnose()}\n"


@pytest.mark.parametrize("which", ["sick", "sound"])
def test_json_has_everything(which: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    path = request.getfixturevalue(which)
    assert main(["diagnose", str(path), "--json"]) == (1 if which == "sick" else 0)
    assert json.loads(capsys.readouterr().out) == gradmon.load_run(path).diagnose().to_dict()


def test_a_run_without_a_step_is_nothing_to_diagnose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(1, 1)
    gradmon.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path).detach()
    assert main(["diagnose", str(tmp_path)]) == 0
    assert "Nothing to diagnose: no monitored step yet." in capsys.readouterr().out


def test_words_are_wrapped_where_they_are_told_to_be(sick: Path) -> None:
    diagnosis = gradmon.load_run(sick).diagnose()
    assert str(diagnosis) == diagnosis.text(100)
    narrow = diagnosis.text(60)
    assert max(map(len, narrow.splitlines())) <= 60
    assert narrow.split() == str(diagnosis).split()


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo terminal")
@pytest.mark.parametrize("rich", [pytest.param(True, marks=pytest.mark.extra), False])
def test_a_terminal_gets_its_width_and_colours_where_there_is_rich(sick: Path, rich: bool) -> None:
    for environment in ({}, {"NO_COLOR": "1"}):
        with terminal("diagnose", str(sick), columns=72, rich=rich, **environment) as seen:
            assert seen.end() == 1
        lines = [line.rstrip() for line in seen.plain.splitlines()]
        assert lines == gradmon.load_run(sick).diagnose().text(72).splitlines()
        coloured = re.findall(r"\x1b\[1;(3[0-9])m((?:ERROR|WARNING|INFO) +\S+)\x1b", seen.output)
        if not rich or environment:
            assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", seen.output)
        else:
            assert ("33", "WARNING learning-rate-high") in coloured
            assert len(coloured) == sum(line.startswith(("ERROR", "WARNING", "INFO")) for line in lines)


def test_names_do_nothing_to_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _trained(tmp_path, 1.0, name="[bold]\x1b[31m<b>ü\nx")
    assert main(["diagnose", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    if "[bold]" in printed:
        assert r"[bold]\x1b[31m<b>ü" in printed
