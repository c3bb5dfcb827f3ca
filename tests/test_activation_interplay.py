"""Activations and attention where several things meet: two monitors, parts called alone, branches, interrupts, threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_gradmon import ModuleMonitor

# most loops here are of what is measured, and leave out what the audit of the loop misses
pytestmark = pytest.mark.filterwarnings("ignore:torch_gradmon. Gradients are not cleared")

X = torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Whose parts have the names that recorded tensors get."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (4, 4)).transpose(1, 2) for part in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


def watched(model: nn.Module) -> tuple[ModuleMonitor, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    return ModuleMonitor(model).attach(optimizer), optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor = X) -> None:
    model(x).square().mean().backward()
    optimizer.step()


def norm(tensor: Tensor) -> Any:
    return pytest.approx(tensor.detach().double().norm().item(), rel=1e-6)


def test_two_monitors_of_one_model_see_its_attention_and_go_without_a_trace() -> None:
    model, original = nn.Sequential(Attention()), [F.scaled_dot_product_attention]
    first, optimizer = watched(model)
    second = ModuleMonitor(model).attach(optimizer)
    first.add_attention_metric("entropy")
    second.add_attention_metric("entropy")
    step(model, optimizer)
    first.add_activation_metric("norm")  # hangs hooks anew, behind those of the other
    for _ in range(3):
        step(model, optimizer)
    assert "attention_entropy/0/mean" in first.get_step_metrics()
    assert "attention_entropy/0/mean" in second.get_step_metrics()
    first.detach()
    second.detach()
    assert F.scaled_dot_product_attention is original[0]
    model(X)


def test_recorded_tensors_do_not_mix_with_modules_of_their_names() -> None:
    model = nn.Sequential(Attention())
    monitor, optimizer = watched(model)
    monitor.add_attention_metric("entropy")
    monitor.add_activation_metric("norm")
    step(model, optimizer)
    values = monitor.get_step_metrics()
    assert values["activation/0.query/norm"] == norm(model[0].query(X))
    assert values["activation/0[query]/norm"] == norm(model[0].query(X))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_module_inside_of_a_branch_is_left_out_with_a_reason() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = torch.cond(x.sum() > 0, lambda t: self.layer(t), lambda t: self.layer(t) * 2, (x,))
            return found

    torch._dynamo.reset()
    model = Branches()
    monitor, optimizer = watched(model)
    monitor.add_activation_metric("norm")
    step(model, optimizer)
    assert "activation/[root module]/norm" in monitor.get_step_metrics()
    assert "a branch of torch.cond" in monitor.missing()["activation/layer/norm"]


def test_a_model_that_is_called_by_its_parts_has_all_calls_of_training_and_no_others() -> None:
    model = nn.ModuleDict({"body": nn.Linear(16, 16), "head": nn.Linear(16, 1)})
    monitor, optimizer = watched(model)
    monitor.add_activation_metric("calls", lambda _: 1.0, "^body$", "sum")
    for _ in range(3):
        for _ in range(4):
            model["head"](model["body"](X)).mean().backward()
        with torch.no_grad():
            model["body"](X)
        model.eval()
        model["body"](X)
        model.train()
        optimizer.step()
        assert monitor.get_step_metrics() == {"activation/body/calls": 4}


def test_a_part_that_is_tried_between_steps_counts_for_none() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    monitor, optimizer = watched(model)
    monitor.add_activation_metric("norm", metric_regex="^0$")
    for number in range(3):
        step(model, optimizer)
        model[0](100 * X)
        monitor.log_scalar("number", number)  # of the step that has just ended
        assert monitor.get_step_metrics() == {"activation/0/norm": norm(model[0](X)), "number": number}


def test_an_interrupt_at_the_end_of_a_step_leaves_nothing_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    monitor, optimizer = watched(model)
    monitor.add_activation_metric("norm")
    gradients = monitor._runtime.captures.gradients

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gradients, "end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(model, optimizer, 100 * X)
    monkeypatch.undo()
    step(model, optimizer)
    assert monitor.get_step_metrics()["activation/0/norm"] == norm(model(X))


def test_forwards_on_two_threads_are_all_counted() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("norm")
    for number in range(5):
        monitor.begin_step(number)
        threads = [threading.Thread(target=lambda: [model(X) for _ in range(4)]) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        monitor.end_step()
        assert monitor.get_step_metrics()["activation/0/norm"] == norm(torch.cat([model[0](X)] * 8))
