"""Copied, pickled, saved: a watched model is the plain model that it was, and its copies feed no monitor."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import MonitorMixin

from .test_life_cycle import one_step, small_model, watched


def through_bytes(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("take", [copy.deepcopy, through_bytes, through_torch], ids=["deepcopy", "pickle", "torch.save"])
def test_a_copy_of_a_watched_model_is_a_plain_model(take: Callable[[nn.Module], nn.Module]) -> None:
    model, optimizer, _, monitor = watched()
    one_step(model, optimizer)
    values = monitor.get_step_metrics()
    taken = take(model)
    assert not any(layer.is_monitoring or layer.get_module_monitor() for layer in taken if isinstance(layer, MonitorMixin))
    model(torch.ones(2, 3)).sum().backward()  # a step is open while the copy runs
    copied = torch.optim.SGD(taken.parameters(), lr=0.1)
    for _ in range(3):
        one_step(taken, copied)
    assert torch.equal(model(torch.full((1, 3), 0.5)), take(model)(torch.full((1, 3), 0.5)))
    optimizer.step()
    assert list(monitor.get_all_metrics()) == [0, 1, 2, 3]
    assert monitor.get_all_metrics()[2] == values
    assert [dict(p._backward_hooks or {}) for p in taken.parameters()] == [{}] * 4
    assert take(taken)[2].weight.shape == (2, 5)  # and a copy can be copied


def test_the_state_dict_is_that_of_a_plain_model() -> None:
    model, optimizer, _, _ = watched()
    plain = small_model()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for _ in range(2):
        one_step(plain, plain_optimizer)
    ours, other = model.state_dict(), plain.state_dict()
    assert list(ours) == list(other)
    assert ours._metadata == other._metadata
    assert all(torch.equal(ours[name], other[name]) for name in ours)
    assert optimizer.state_dict().keys() == plain_optimizer.state_dict().keys()
    plain.load_state_dict(ours)
    plain_optimizer.load_state_dict(optimizer.state_dict())


def test_copies_of_the_optimizer_and_the_scaler_do_not_feed_the_monitor() -> None:
    model, optimizer, scaler, monitor = watched()
    for taken in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        for group in taken.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        taken.step()
    for taken_scaler in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert not taken_scaler.is_enabled()
    both_model, both_optimizer = copy.deepcopy((model, optimizer))
    one_step(both_model, both_optimizer)
    assert monitor.current_step == 1
    one_step(model, optimizer)
    assert monitor.current_step == 2


def test_a_saved_model_loads_where_torch_gradmon_is_not_installed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, preset="full")
    monitor.add_gradient_metric("norm", stages=["local"])
    one_step(model, optimizer)
    torch.save(model, tmp_path / "model.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(model))
    code = f"""
        import sys
        sys.modules["torch_gradmon"] = None
        import pickle, torch
        for load in (lambda file: torch.load(file, weights_only=False), pickle.load):
            with open({str(tmp_path)!r} + ("/model.pkl" if load is pickle.load else "/model.pt"), "rb") as file:
                model = load(file)
            out = model(torch.ones(1, 3))
            out.sum().backward()
            print(*out.flatten().tolist())
        torch.load({str(tmp_path)!r} + "/optimizer.pt", weights_only=True)
        assert not [name for name in sys.modules if name.startswith("torch_gradmon.")]
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = model(torch.ones(1, 3)).flatten().tolist()
    assert [[float(x) for x in line.split()] for line in done.stdout.splitlines()] == [pytest.approx(expected)] * 2
