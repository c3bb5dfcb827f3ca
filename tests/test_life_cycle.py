"""A monitor comes and goes without a trace: it keeps nothing alive, changes no copy, and leaves hooks as it found them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor, MonitorMixin, load_run


class Layer(nn.Linear, MonitorMixin):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.is_monitoring:
            self.get_module_monitor().log_tensor("layer_norm", y.norm(dim=-1))
        return y


def small_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Layer(3, 5), nn.Tanh(), nn.Linear(5, 2))


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()


def watched(
    run_dir: Path | None = None, steps: int = 2
) -> tuple[nn.Sequential, torch.optim.Optimizer, torch.amp.GradScaler, ModuleMonitor]:
    """A model with every kind of hook that there is."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    monitor = gradmon.watch(model, optimizer, scaler=scaler, preset="full", run_dir=run_dir)
    monitor.add_activation_metric("rms")
    monitor.add_activation_metric("mine", lambda x: x.mean())
    monitor.add_gradient_metric("norm", stages=["local"])
    monitor.add_update_metric("ratio")
    for _ in range(steps):
        one_step(model, optimizer)
    return model, optimizer, scaler, monitor


# --- lifetimes -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("detach", [False, True], ids=["attached", "detached"])
@pytest.mark.parametrize("open_step", [False, True], ids=["between steps", "in a step"])
def test_the_monitor_keeps_neither_model_nor_optimizer_alive(detach: bool, open_step: bool) -> None:
    model, optimizer, _, monitor = watched()
    if open_step:
        model(torch.ones(2, 3)).sum().backward()
    if detach:
        monitor.detach()
    gone = [weakref.ref(x) for x in (model, *model, *model.parameters(), optimizer)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)
    assert monitor.get_all_metrics().keys() == {0, 1}


def test_model_and_optimizer_go_without_the_garbage_collector_as_far_as_torch_lets_them() -> None:
    model, _optimizer, _scaler, monitor = watched()
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None, "something of ours makes a cycle through the model"
    finally:
        gc.enable()
    assert monitor.current_step == 1


def test_a_monitor_that_nobody_kept_lives_as_long_as_its_optimizer(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gone = weakref.ref(gradmon.watch(model, optimizer, run_dir=tmp_path)._runtime)
    for _ in range(3):
        gc.collect()
        one_step(model, optimizer)
    assert gone() is not None
    assert load_run(tmp_path).steps == [0, 1, 2]
    del optimizer
    gc.collect()
    assert gone() is None
    model(torch.ones(2, 3)).sum().backward()  # hooks that are left do nothing


class _Pair(nn.Module):
    """Two networks without a forward of both."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.a, self.b = modules


@pytest.mark.parametrize("kind", [nn.ModuleDict, nn.ModuleList, _Pair])
def test_a_container_that_was_made_for_the_monitor_lives_as_long_as_its_optimizers(kind: Callable[[Any], nn.Module]) -> None:
    first, second = nn.Linear(3, 2), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    monitor = gradmon.watch(kind({"a": first, "b": second} if kind is nn.ModuleDict else [first, second]), optimizer)
    for _ in range(3):
        gc.collect()
        second(first(torch.ones(2, 3))).sum().backward()
        optimizer.step()
    assert monitor.last_record.step == 2
    gone = weakref.ref(first)
    del first, second, optimizer
    gc.collect()
    assert gone() is None


def test_a_model_that_is_gone_while_its_optimizer_steps_is_named() -> None:
    first, second = nn.Linear(3, 2), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    monitor = gradmon.watch(nn.Sequential(first, second), optimizer)
    gc.collect()
    with pytest.warns(
        gradmon.GradmonWarning, match="the watched model is gone: keep a reference to it, or, .*; nothing is measured any more"
    ):
        for _ in range(3):
            second(first(torch.ones(2, 3))).sum().backward()
            optimizer.step()
    assert monitor.get_step_metrics() == {}
    (why,) = set(monitor.missing().values())
    assert why.startswith(
        "the watched model is gone: keep a reference to it, or, if only its parts are called, watch an nn.ModuleDict"
    )


def test_the_monitor_goes_with_the_model_it_watched_by_hand() -> None:
    model = small_model()
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("norm")
    monitor.begin_step(0)
    model(torch.ones(2, 3))
    gone = weakref.ref(monitor)
    del monitor
    gc.collect()
    assert gone() is None
    assert not model[0].is_monitoring
    model(torch.ones(2, 3)).sum().backward()


# --- detach ------------------------------------------------------------------------------------------------------------------------


def _traces(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> list[Any]:
    found: list[Any] = []
    for module in model.modules():
        found.append(sorted(vars(module)))
        found += [(name, dict(hooks)) for name, hooks in sorted(vars(module).items()) if "hook" in name and hooks is not None]
    for parameter in model.parameters():
        for attribute in ("_post_accumulate_grad_hooks", "_backward_hooks"):
            hooks = getattr(parameter, attribute)
            found.append(None if hooks is None else dict(hooks))
        found.append(sorted(vars(parameter)) if hasattr(parameter, "__dict__") else None)
    found += [(name, dict(hooks)) for name, hooks in sorted(vars(optimizer).items()) if "hook" in name]
    return [*found, dict(vars(scaler)), sorted(vars(optimizer))]


def _foreign_hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.register_forward_pre_hook(lambda module, args: None)
    model[0].register_forward_hook(lambda module, args, output: None, always_call=True)
    model[0].weight.register_hook(lambda gradient: None)
    model[2].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    optimizer.register_step_pre_hook(lambda *_: None)


@pytest.mark.parametrize("foreign", [False, True], ids=["bare", "with hooks of others"])
@pytest.mark.parametrize("leave", ["detach", "with", "in a step", "twice", "again"])
def test_detach_leaves_everything_as_it_was_found(foreign: bool, leave: str) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    optimizer.step()  # torch itself notes things in an optimizer at its first step
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    if foreign:
        _foreign_hooks(model, optimizer)
    before = _traces(model, optimizer, scaler)
    for _ in range(2 if leave == "again" else 1):
        monitor = ModuleMonitor(model)
        with monitor:
            monitor._runtime.use_preset("full")
            monitor.add_gradient_metric("rms", stages=["local"])
            monitor.add_activation_metric("rms")
            monitor.attach(optimizer, scaler=scaler)
            assert _traces(model, optimizer, scaler) != before
            for _ in range(2):
                one_step(model, optimizer)
            if leave == "in a step":
                model(torch.ones(2, 3)).sum().backward()
            if leave != "with":
                monitor.detach()
            if leave == "twice":
                monitor.detach()
        for old, new in zip(before, _traces(model, optimizer, scaler), strict=True):
            assert new == old


def test_attach_works_again_after_detach_and_numbers_go_on() -> None:
    model, optimizer, scaler, monitor = watched()
    monitor.detach()
    one_step(model, optimizer)
    monitor.attach(optimizer, scaler=scaler)
    one_step(model, optimizer)
    assert list(monitor.get_all_metrics()) == [0, 1, 2]
    for name, parameter in model.named_parameters():
        expected = parameter.grad.double().norm().item()
        assert monitor.get_step_metrics()[f"gradient_local/{name}/norm"] == pytest.approx(expected, rel=1e-6)
    assert "activation/0/rms" in monitor.get_step_metrics()
    assert "layer_norm" in monitor.get_step_metrics()


# --- long runs -----------------------------------------------------------------------------------------------------------------------


def _hook_count(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    dicts = [h for module in model.modules() for name, h in vars(module).items() if "hook" in name and isinstance(h, dict)]
    for parameter in model.parameters():
        dicts += [parameter._post_accumulate_grad_hooks or {}, parameter._backward_hooks or {}]
    return sum(map(len, dicts)) + len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


@pytest.mark.parametrize("steps", [1_100, pytest.param(2_150, marks=pytest.mark.slow)])
def test_long_trainings_grow_neither_memory_nor_hooks(steps: int) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    monitor = ModuleMonitor(model, every=2, history=100, preset="standard")
    monitor.add_gradient_metric("norm", stages=["local"])
    monitor.add_activation_metric("mine", lambda x: x.mean())
    monitor.attach(optimizer)
    monitor._runtime.pipeline.history._most = 50  # so that it is full soon
    x, seen = torch.ones(2, 2), []
    for step in range(steps + 150):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        monitor.log_scalar("loss", 1.0)
        # what is remembered for a diagnosis goes up and down between two bounds
        if step >= (600, steps, 10**9)[len(seen)] and len(monitor._runtime.pipeline.history.sampled()) == 60:
            gc.collect()
            seen.append((sys.getallocatedblocks(), len(gc.get_objects()), _hook_count(model, optimizer)))
    (blocks, objects, hooks), (later_blocks, later_objects, later_hooks) = seen
    assert later_hooks <= hooks + 1  # that of the audit comes and goes
    assert later_objects - objects < 100
    assert later_blocks - blocks < 400
    assert len(monitor.get_all_metrics()) == 100


def test_a_function_on_spike_keeps_nothing_alive() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = nn.Linear(3, 1)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.monitor = gradmon.watch(self.model, self.optimizer, on_spike=self.spiked)

        def spiked(self, event: object) -> None:
            self.monitor.last_record.top_gradients()

        def train(self) -> None:
            for _ in range(3):
                self.model(torch.randn(2, 3)).square().sum().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()

    trainer = Trainer()
    trainer.train()
    alive = [weakref.ref(x) for x in (trainer.model, trainer.optimizer, trainer.monitor)]
    del trainer
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("when", ["before", "inside", "after"])
def test_a_tag_goes_to_its_step_wherever_the_loop_gives_it(when: str, every: int) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.ModuleMonitor(model, every=every, on_spike=None)
    monitor.attach(optimizer)
    with gradmon.testing.collect_records(monitor) as records:
        for step in range(6):
            if when == "before":
                monitor.log_context(batch=step)
            optimizer.zero_grad()
            loss = model(torch.randn(2, 3)).sum()
            if when == "inside":
                monitor.log_context(batch=step)
            loss.backward()
            optimizer.step()
            if when == "after":
                monitor.log_context(batch=step)
    assert {record.step: record.context.get("tags") for record in records} == {
        step: {"batch": step} for step in range(0, 6, every)
    }


def test_a_tag_of_a_step_that_is_not_monitored_goes_to_no_other_step() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.ModuleMonitor(model, every=2)
    monitor.attach(optimizer)
    tags = []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 3)).sum()
        if step == 1:
            monitor.log_context(batch=1)
        loss.backward()
        optimizer.step()
        record = monitor._runtime.pipeline.last
        tags.append(None if record is None else record.context.get("tags"))
    assert tags == [None] * 4


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()


def test_what_is_logged_while_the_monitor_is_detached_belongs_to_no_step() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = gradmon.watch(model, optimizer)
    monitor.log_scalar("value", 1.0)
    _step(model, optimizer)
    monitor.detach()
    with pytest.warns(gradmon.GradmonWarning, match="value was logged while the monitor is detached, and is dropped"):
        monitor.log_scalar("value", 7.0)
    assert monitor.get_step_metrics()["value"] == 1.0
    monitor.attach(optimizer)
    monitor.log_scalar("value", 3.0)  # behind the step that ended last
    assert monitor.get_step_metrics()["value"] == 2.0
    _step(model, optimizer)
    monitor.detach()
    assert monitor.get_step_metrics().get("value") is None
    assert monitor.get_all_metrics()[0]["value"] == 2.0
