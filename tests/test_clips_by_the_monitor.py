"""Clips by the monitor, and gradients under a GradScaler, where a part of the model steps by itself or belongs to no optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon


def _norm(tensors: list[Tensor | None]) -> float:
    return float(torch.cat([t.double().flatten() for t in tensors if t is not None]).norm())


@pytest.mark.parametrize("exact", [False, True])
def test_what_one_clip_leaves_is_not_before_the_next(exact: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    for _ in range(2):
        optimizer.zero_grad()
        (100 * model(torch.randn(5, 3)).square().mean()).backward()
        before = _norm([p.grad for p in model.parameters()])
        monitor.clip_grad_norm_(0.5, parameters=model[0].parameters(), exact=exact)
        total = monitor.clip_grad_norm_(0.05, exact=exact)
        after = _norm([p.grad for p in model.parameters()])
        optimizer.step()
        values = monitor.get_step_metrics()
        assert values["gradmon/grad_norm"] == pytest.approx(before, rel=1e-6)
        assert values["gradmon/grad_norm_after_clip"] == pytest.approx(after, rel=1e-6)
        assert values["gradmon/clip_fraction"] == 1
        assert after == pytest.approx(0.05, rel=1e-3)
        assert float(total) < before
    monitor.detach()


def test_a_clip_after_each_micro_batch_is_before_the_clip_at_the_end() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    for _ in range(3):
        monitor.clip_grad_norm_(0.1)
        model(torch.randn(5, 3)).square().mean().backward()
    before = _norm([p.grad for p in model.parameters()])
    monitor.clip_grad_norm_(0.1)
    optimizer.step()
    assert monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(before, rel=1e-6)
    monitor.detach()


@pytest.mark.parametrize("exact", [False, True])
def test_a_clip_of_both_players_leaves_the_values_of_the_one_that_has_stepped(exact: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"critic": nn.Linear(4, 1), "generator": nn.Linear(3, 4)})
    critic, generator = (torch.optim.SGD(model[name].parameters(), lr=0.01) for name in ("critic", "generator"))
    monitor = gradmon.watch(model, critic, generator, preset="minimal", on_spike=None)
    monitor.add_gradient_metric("norm", stages=("before_clip", "after_clip"))
    for _ in range(3):
        expected: dict[str, float] = {}
        for name, optimizer in (("critic", critic), ("generator", generator)):
            model.zero_grad()
            fake = model["generator"](torch.randn(6, 3))
            score = model["critic"](fake.detach() if name == "critic" else fake)
            (10 * score.square().mean()).backward()
            weight = model[name].weight
            expected[f"gradient_before_clip/{name}.weight/norm"] = _norm([weight.grad])
            monitor.clip_grad_norm_(0.5, exact=exact)
            expected[f"gradient/{name}.weight/norm"] = _norm([weight.grad])
            optimizer.step()
        values = monitor.get_step_metrics()
        assert {key: values[key] for key in expected} == pytest.approx(expected, rel=1e-6)
    monitor.detach()


def test_an_edit_through_data_after_unscaling_is_an_edit() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    monitor = gradmon.watch(model, optimizer, scaler=scaler, on_spike=None)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(5, 3)).square().mean()).backward()
        scaler.unscale_(optimizer)
        for p in model.parameters():
            p.grad.data.clamp_(-1e-3, 1e-3)
        after = _norm([p.grad for p in model.parameters()])
        scaler.step(optimizer)
        scaler.update()
        values = monitor.get_step_metrics()
        assert values["gradmon/grad_norm_after_clip"] == pytest.approx(after, rel=1e-6)
        assert values["gradmon/clip_fraction"] == 1
    monitor.detach()


@pytest.mark.parametrize("unscales", [False, True])
def test_what_no_optimizer_has_is_unscaled_too(unscales: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    monitor = gradmon.watch(model, optimizer, scaler=scaler, on_spike=None)
    monitor.add_gradient_metric("norm", stages=("before_clip", "after_clip"))
    for _ in range(2):
        model.zero_grad()
        scaler.scale(model(torch.randn(5, 3)).square().mean()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        bias = _norm([model.bias.grad]) / 256
        scaler.update()
        values = monitor.get_step_metrics()
        assert values["gradient/bias/norm"] == pytest.approx(bias, rel=1e-6)
        assert values["gradient_before_clip/bias/norm"] == pytest.approx(bias, rel=1e-6)
    monitor.detach()


def test_arguments_in_the_order_of_torch_are_refused_with_the_remedy() -> None:
    model = nn.Linear(2, 1)
    monitor = gradmon.ModuleMonitor(model)
    with pytest.raises(TypeError, match=r"max_norm is a number, .* of type generator; .*parameters=model.parameters"):
        monitor.clip_grad_norm_(model.parameters(), 1.0)  # type: ignore[arg-type]
