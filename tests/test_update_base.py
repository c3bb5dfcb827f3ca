"""What updates are compared with: the parameters before the step, also where an optimizer steps several times in one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon


def test_an_optimizer_that_steps_thrice_in_a_step_has_the_ratio_of_its_last_one() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"judge": nn.Linear(4, 1, bias=False), "maker": nn.Linear(4, 4, bias=False)})
    judging = torch.optim.SGD(model["judge"].parameters(), 0.5)
    making = torch.optim.SGD(model["maker"].parameters(), 0.1)
    monitor = gradmon.watch(model, judging, making, layers="all")
    noise = torch.randn(8, 4)
    for _ in range(3):
        before = model["judge"].weight.detach().clone()
        judging.zero_grad()
        (-model["judge"](noise) - model["judge"](model["maker"](noise).detach())).mean().backward()
        judging.step()
        expected = float((model["judge"].weight.detach() - before).norm() / before.norm())
    making.zero_grad()
    model["judge"](model["maker"](noise)).mean().backward()
    making.step()
    assert monitor.get_step_metrics()["update/judge.weight/ratio"] == pytest.approx(expected, rel=1e-6)


def test_steps_by_hand_with_two_optimizer_steps() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    monitor = gradmon.watch(model, optimizer)
    monitor.add_update_metric("ratio", every=1)
    monitor.begin_step(0)
    for _ in range(2):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        expected = float((model.weight.detach() - before).norm() / before.norm())
    monitor.end_step()
    assert monitor.get_step_metrics()["update/weight/ratio"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:torch_gradmon. the spike detector")
def test_a_look_at_gradients_between_steps_opens_none() -> None:
    """Gradients by ``autograd.grad``: no hook sees a backward pass."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gradmon.watch(model, optimizer)
    for step in range(4):
        loss = model(torch.ones(2, 4)).sum()
        for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            parameter.grad = gradient
        optimizer.step()
        monitor.monitor_gradients()
        monitor.log_scalar("step", float(step))
    monitor.detach()
    assert {step: values["step"] for step, values in monitor.get_all_metrics().items()} == {
        step: float(step) for step in range(4)
    }
