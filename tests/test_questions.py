"""The page of questions: its commands run on the run that its code makes, and its lines for DDP do what they promise."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_gradmon as gradmon
from torch_gradmon.cli.main import main

from .ranks import on_ranks

PAGE = (Path(__file__).parent.parent / "docs" / "questions.md").read_text(encoding="utf-8")


def test_there_are_ten_questions() -> None:
    assert len(re.findall(r"^## .*\?$", PAGE, re.M)) == 10


@pytest.mark.extra
def test_the_commands_run_on_the_run_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.S)[0], {})
    commands = re.findall(r"^gradmon .*$", PAGE, re.M)
    assert len(commands) == 4
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr().out
    assert "spike (step 60)" in printed
    assert "step 60: grad_norm = " in printed


def _train(rank: int, directory: str, corrupts: bool) -> None:
    torch.manual_seed(0)
    ddp_model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    monitor = gradmon.watch(ddp_model, optimizer, run_dir=directory, distributed=gradmon.Distributed(log_on_all_ranks=True))
    torch.manual_seed(rank)
    for step in range(8):
        optimizer.zero_grad()
        loss = ddp_model(torch.randn(8, 4)).square().mean()
        loss.backward()
        monitor.log_scalar("loss", loss)
        optimizer.step()
        if corrupts and rank == 1 and step == 4:
            with torch.no_grad():
                ddp_model.module.weight[0, 0] += 1e-3
    monitor.detach()


@pytest.mark.ranks
@pytest.mark.parametrize(("corrupts", "code"), [(False, 0), (True, 1)])
def test_the_runs_of_two_ranks_show_whether_they_train_the_same_model(tmp_path: Path, corrupts: bool, code: int) -> None:
    on_ranks(2, _train, str(tmp_path), corrupts)
    assert main(["diff", f"{tmp_path}/rank0", f"{tmp_path}/rank1", "--rtol", "0", "--ignore", "loss"]) == code
