"""Loops that are right and once brought a warning that was not true, each beside the fault that the warning is of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, ModuleMonitor

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
Optimizers = list[torch.optim.Optimizer]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def watched(count: int = 1) -> tuple[nn.Sequential, Optimizers, ModuleMonitor]:
    """A model, one optimizer for all of it or one for each of two layers, and a monitor."""
    model = net()
    parts = [model] if count == 1 else [model[0], model[2]]
    optimizers: Optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in parts]
    return model, optimizers, gradmon.watch(model, *optimizers, on_spike=None, checks=gradmon.Checks(data=False))


def norm(model: nn.Module) -> float:
    return torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm().item()


def by_backward(model: nn.Module, loss: Tensor) -> None:
    model.zero_grad()
    loss.backward()


def by_grad(model: nn.Module, loss: Tensor) -> None:
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


def by_grad_in_place(model: nn.Module, loss: Tensor) -> None:
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.copy_(gradient)


# --- gradients that no backward pass has brought -------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["bgbg", "bggg", "ggbb", "bbbbggbbgg"])
@pytest.mark.parametrize("other", [by_grad, by_grad_in_place])
@pytest.mark.parametrize("count", [1, 2])
def test_gradients_of_autograd_grad_on_some_steps_are_no_dead_hooks(
    pattern: str, other: Callable[[nn.Module, Tensor], None], count: int
) -> None:
    model, optimizers, monitor = watched(count)
    for step, letter in enumerate(pattern * 2):
        loss = model(X).square().mean()
        (by_backward if letter == "b" else other)(model, loss)
        expected = norm(model)
        for optimizer in optimizers:
            optimizer.step()
        values = monitor.get_step_metrics()
        assert monitor.last_record.step == step
        if letter == "b":
            assert values["gradmon/grad_norm"] == pytest.approx(expected, rel=1e-6)
        else:
            assert "gradmon/grad_norm" not in values
            assert values["gradmon/grad_norm_after_clip"] == pytest.approx(expected, rel=1e-6)
            missing = monitor.missing()
            assert "no backward pass ran through" in missing["gradmon/grad_norm"]
            assert "before_clip=True) once they are set" in missing["gradmon/grad_norm"]
            assert "before you clip" not in "".join(missing.values())
    assert monitor.diagnose().findings == ()
    assert monitor.warning_counts() == {}


def test_gradients_that_are_set_by_hand_have_a_norm_and_a_reason_for_what_is_absent() -> None:
    model, (optimizer,), monitor = watched(1)
    monitor.add_gradient_metric("norm")
    parameters = list(model.parameters())
    for are_some_of_backward in (False, True):
        model.zero_grad()
        loss = model(X).square().mean()
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        if are_some_of_backward:
            loss.backward(inputs=parameters[1:])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad
        nn.utils.clip_grad_norm_(parameters, 1e-3)
        expected = norm(model)
        optimizer.step()
        assert monitor.get_step_metrics()["gradmon/grad_norm_after_clip"] == pytest.approx(expected, rel=1e-6)
        missing = monitor.missing()
        names = [f"gradient_before_clip/{name}/norm" for name, _ in model.named_parameters()]
        for key in ("gradmon/grad_norm", *(names[:1] if are_some_of_backward else names)):
            assert missing[key].endswith("call monitor.monitor_gradients(before_clip=True) once they are set, before any clip")
        assert missing["gradmon/clip_fraction"] == "no step so far had gradients that were seen before a clip and after it"
    by_grad(model, model(X).square().mean())
    monitor.monitor_gradients(before_clip=True)
    expected = norm(model)
    optimizer.step()
    assert monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(expected, rel=1e-6)


def test_the_norm_of_some_gradients_that_are_set_by_hand_is_not_that_of_all() -> None:
    model, optimizers, monitor = watched(2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers[1].step()
    monitor.detach()
    assert all("grad_norm_after_clip" not in key for values in monitor.get_all_metrics().values() for key in values)


@pytest.fixture
def swapping() -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("before", [0, 2])
def test_hooks_that_a_conversion_has_killed_are_put_back_with_a_warning(before: int) -> None:
    model, (optimizer,), monitor = watched()
    monitor.add_gradient_metric("norm")

    def train(dtype: torch.dtype) -> None:
        by_backward(model, model(X.to(dtype)).square().mean())
        optimizer.step()

    for _ in range(before):
        train(torch.float32)
    optimizer.state.clear()
    model.double()  # the parameters stay the same objects, and hooks on them never fire again
    with pytest.warns(GradmonWarning, match=f"hooks on parameters had died.*missing in step {before}"):
        train(torch.float64)
    assert "hooks on parameters had died" in monitor.missing()["gradient_before_clip/0.weight/norm"]
    train(torch.float64)
    assert monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(norm(model), rel=1e-6)


# --- the order of optimizers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_detach_and_attach_between_backward_and_step_says_nothing_of_the_order(count: int) -> None:
    model, optimizers, monitor = watched(count)
    for step in range(6):
        by_backward(model, model(X).square().mean())
        expected = norm(model)
        if step % 2:
            monitor.detach()
            monitor.attach(*optimizers)
        for optimizer in optimizers:
            optimizer.step()
        assert monitor.last_record.step == step
        values = monitor.get_step_metrics()
        if step % 2:
            assert "gradmon/grad_norm" not in values
        else:
            assert values["gradmon/grad_norm"] == pytest.approx(expected, rel=1e-6)
    assert list(monitor.get_all_metrics()) == list(range(6))
    assert monitor.warning_counts() == {}


def test_two_optimizers_that_rest_by_turns_are_named_in_order() -> None:
    model = net()
    first, last = (torch.optim.SGD(model[part].parameters(), lr=0.1) for part in (0, 2))
    monitor = ModuleMonitor(model)
    monitor.add_gradient_metric("norm")
    monitor.attach(first, last)
    for step in range(12):
        by_grad(model, model[2](model[1](model[0](X))).square().mean())  # neither a forward of the whole nor a backward pass
        if step % 3 != 1:
            first.step()
        if step % 3 != 2:
            last.step()
    assert monitor.warning_counts() == {}
