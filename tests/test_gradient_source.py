"""Gradients that are not in ``.grad``: each value equals what plain PyTorch has, and the training is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from tests.watching import watch_with

MAX_NORM = 0.05
METRICS = ("norm", "mean", "sparsity")


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def _batches(count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(4, 6, generator=generator)


class Masters:
    """An optimizer around another one that steps float32 copies of the parameters, in the manner of Megatron-LM.

    Gradients are added up in ``main_grad`` and taken out of ``grad`` as they come.
    """

    def __init__(self, model: nn.Module, scale: float = 1.0) -> None:
        self.parameters = list(model.parameters())
        for parameter in self.parameters:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
            parameter.main_param = parameter.detach().clone().float().requires_grad_()  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(self._take)
        self.optimizer = torch.optim.AdamW([p.main_param for p in self.parameters], 1e-2)  # type: ignore[attr-defined]
        self.scale = scale

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer inside."""
        return self.optimizer.param_groups

    def _take(self, parameter: Any) -> None:
        parameter.main_grad += parameter.grad
        parameter.grad = None

    def step(self) -> None:
        """Clip, step the copies, and copy back."""
        for parameter in self.parameters:
            parameter.main_param.grad = parameter.main_grad / self.scale  # type: ignore[attr-defined]
        nn.utils.clip_grad_norm_([p.main_param for p in self.parameters], MAX_NORM)  # type: ignore[attr-defined]
        self.optimizer.step()
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.copy_(parameter.main_param)  # type: ignore[attr-defined]

    def zero_grad(self) -> None:
        """Clear the sums."""
        for parameter in self.parameters:
            parameter.main_grad.zero_()  # type: ignore[attr-defined]


class Scaled(gradmon.plugins.MainGradSource):
    """As where the loss was scaled."""

    def __init__(self, optimizer: Masters) -> None:
        self.optimizer = optimizer

    def scale(self) -> float:
        """That of the loss."""
        return self.optimizer.scale


def _measured(monitor: gradmon.ModuleMonitor) -> None:
    for metric in METRICS:
        monitor.add_gradient_metric(metric, stages=["before_clip", "after_clip"])
    monitor.add_update_metric("norm")
    monitor.add_parameter_metric("norm")
    monitor.add_optimizer_metric("exp_avg_norm")


def _train(kind: str, watched: bool, micro_batches: int = 2) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """The parameters at the end, and the values of each step."""
    model, scale = _model(), 1024.0 if kind == "scaled" else 1.0
    wrapper = None if kind == "plain" else Masters(model, scale)
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2) if wrapper is None else wrapper
    monitor = None
    if watched:
        options = {"gradient_source": Scaled(wrapper)} if kind == "scaled" and wrapper is not None else {}
        monitor = watch_with(model, optimizer, **options)
        _measured(monitor)
    values = []
    batches = _batches(6 * micro_batches)
    for _ in range(6):
        for _ in range(micro_batches):
            (model(next(batches)).square().mean() * scale).backward()
        if wrapper is None:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            values.append(monitor.get_step_metrics())
            assert not {key: why for key, why in monitor.missing().items() if key.startswith(("gradient/", "update/"))}
    if monitor is not None:
        monitor.detach()
    return model.state_dict(), values


@pytest.mark.parametrize("kind", ["main_grad", "scaled"])
def test_main_grad_has_the_values_of_plain_gradients_and_training_is_the_same(kind: str) -> None:
    expected, plain = _train("plain", watched=True)
    alone, _ = _train(kind, watched=False)
    state, values = _train(kind, watched=True)
    for name, tensor in alone.items():
        assert torch.equal(tensor, state[name]), name
        assert torch.allclose(tensor, expected[name], rtol=1e-5)
    for ours, theirs in zip(values, plain, strict=True):
        numbers = {key: value for key, value in theirs.items() if "overhead" not in key}
        assert numbers.keys() <= ours.keys()
        assert {key: ours[key] for key in numbers} == pytest.approx(numbers, rel=1e-5, abs=1e-9)
    assert plain[0]["gradmon/grad_norm"] > MAX_NORM
    assert plain[0]["gradmon/grad_norm_after_clip"] == pytest.approx(MAX_NORM, rel=1e-3)


def test_main_grad_stays_scaled_where_a_grad_scaler_unscales_the_copies() -> None:
    model = _model()
    wrapper = Masters(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    monitor = gradmon.watch(model, wrapper.optimizer, scaler=scaler)
    for batch in _batches(3):
        scaler.scale(model(batch).square().mean()).backward()
        for parameter in wrapper.parameters:
            parameter.main_param.grad = parameter.main_grad.clone()  # type: ignore[attr-defined]
        scaler.unscale_(wrapper.optimizer)
        true = nn.utils.clip_grad_norm_([p.main_param for p in wrapper.parameters], MAX_NORM)  # type: ignore[attr-defined]
        scaler.step(wrapper.optimizer)
        scaler.update()
        wrapper.zero_grad()
        values = monitor.get_step_metrics()
        assert values["gradmon/grad_norm"] == pytest.approx(float(true), rel=1e-5)
        assert values["gradmon/grad_norm_after_clip"] == pytest.approx(MAX_NORM, rel=1e-3)
    monitor.detach()


class Flat(gradmon.plugins.GradientSource):
    """All parameters are parts of one flat tensor, which the optimizer steps."""

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        self.flat = torch.cat([parameter.detach().view(-1) for parameter in parameters]).requires_grad_()
        offsets = [0]
        for parameter in parameters:
            offsets.append(offsets[-1] + parameter.numel())
        self._place = {id(p): slice(a, b) for p, a, b in zip(parameters, offsets, offsets[1:], strict=False)}

    def stepped(self, parameter: nn.Parameter) -> Tensor:
        """The flat tensor."""
        return self.flat

    def value(self, parameter: nn.Parameter) -> Tensor:
        """The elements of this parameter."""
        return self.flat.detach()[self._place[id(parameter)]]

    def used(self, parameter: nn.Parameter) -> Tensor | None:
        """Likewise of the gradient."""
        return None if self.flat.grad is None else self.flat.grad[self._place[id(parameter)]]


def test_a_flat_tensor_that_is_stepped_has_values_of_each_parameter() -> None:
    _, plain = _train("plain", watched=True, micro_batches=1)
    model = _model()
    source = Flat(model)
    optimizer = torch.optim.AdamW([source.flat], 1e-2)
    monitor = watch_with(model, optimizer, gradient_source=source)
    _measured(monitor)
    parameters = list(model.parameters())
    for step, batch in enumerate(_batches(6)):
        model(batch).square().mean().backward()
        source.flat.grad = torch.cat([parameter.grad.view(-1) for parameter in parameters])
        nn.utils.clip_grad_norm_([source.flat], MAX_NORM)
        optimizer.step()
        with torch.no_grad():
            for parameter in parameters:
                parameter.copy_(source.value(parameter).view_as(parameter))
                parameter.grad = None
        values = monitor.get_step_metrics()
        numbers = {key: value for key, value in plain[step].items() if not key.startswith("optimizer/") and "overhead" not in key}
        assert {key: values[key] for key in numbers} == pytest.approx(numbers, rel=1e-4, abs=1e-9)
        reasons = monitor.missing()
        assert reasons["optimizer/0.weight/exp_avg_norm"] == "the optimizer's state is of a flat tensor of several parameters"
    monitor.detach()


@pytest.mark.parametrize("wrong", [gradmon.plugins.GradientSource, "main_grad"])
def test_a_source_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"gradient_source=.* must be an instance of a subclass of"):
        gradmon.ModuleMonitor(_model(), gradient_source=wrong)


def test_a_source_that_fails_costs_the_values_and_not_the_training() -> None:
    class Failing(gradmon.plugins.GradientSource):
        def accumulated(self, parameter: nn.Parameter) -> Tensor | None:
            raise KeyError("no such buffer")

    def train(watch: Callable[[nn.Module, torch.optim.Optimizer], object]) -> nn.Module:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        watch(model, optimizer)
        for batch in _batches(3):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return model

    with pytest.warns(gradmon.GradmonWarning, match="no such buffer"):
        watched = train(lambda model, optimizer: watch_with(model, optimizer, gradient_source=Failing()))
    for ours, theirs in zip(watched.parameters(), train(lambda *_: None).parameters(), strict=True):
        assert torch.equal(ours, theirs)
