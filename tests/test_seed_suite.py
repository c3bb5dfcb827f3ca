"""What torch-module-monitor promises in its own tests, and this package keeps: the same calls, in the same order, with the same values.

Its users run the model by hand, also without gradients, and the reference before it, on inputs of their choice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_gradmon import ModuleMonitor, RefinedCoordinateCheck
from torch_gradmon.core.errors import GradmonWarning


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2, bias=False))


def outputs_of(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What each child of a sequential model returns, by a loop of the test's own."""
    found = {}
    with torch.no_grad():
        for name, child in model.named_children():
            found[name] = x = child(x)
    return found


def drifted(model: nn.Module) -> nn.Module:
    """As after some training."""
    later = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in later.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return later


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(7)


# --- the model and its steps -----------------------------------------------------------------------------------------------------


def test_before_there_is_a_module_there_is_nothing() -> None:
    monitor = ModuleMonitor()
    assert (monitor.module, monitor.reference_module, monitor.current_step) == (None, None, None)
    assert monitor.module_names == {}
    assert not monitor.is_monitoring()


def test_the_module_is_known_with_all_its_parts_and_stays() -> None:
    model = mlp()
    monitor = ModuleMonitor()
    monitor.set_module(model)
    assert monitor.module is model
    assert set(monitor.module_names) == set(model.modules())
    assert monitor.module_names[model[2]] == "2"  # type: ignore[index]
    for another in (model, mlp()):
        with pytest.raises(ValueError, match="make another ModuleMonitor"):
            monitor.set_module(another)
    with pytest.raises(ValueError, match="make another ModuleMonitor"):
        ModuleMonitor(model).set_module(model)


def test_only_steps_that_the_function_wants_are_monitored() -> None:
    model = mlp()
    monitor = ModuleMonitor(monitor_step_fn=lambda step: step % 3 == 0)
    monitor.set_module(model)
    seen = []
    for step in range(4):
        wanted = monitor.begin_step(step)
        assert monitor.current_step == step
        seen.append((wanted, monitor.is_monitoring()))
        monitor.end_step()
        assert not monitor.is_monitoring()
    assert seen == [(True, True), (False, False), (False, False), (True, True)]


# --- values ----------------------------------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(),
    "std": lambda x: x.std(),
    "norm": lambda x: x.norm(),
    "largest": lambda x: x.abs().max(),
}


def expected(source: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        f"{source}/{name}/{metric}": pytest.approx(float(function(tensor)), rel=1e-5, abs=1e-7)
        for name, tensor in tensors.items()
        for metric, function in FUNCTIONS.items()
    }


@pytest.mark.parametrize("grad", [False, True], ids=["without gradients", "with gradients"])
def test_outputs_in_a_step_begun_by_hand_are_measured_in_training_mode_with_and_without_gradients(grad: bool) -> None:
    model, x = mlp(), torch.randn(4, 3)
    monitor = ModuleMonitor(model)
    for name, function in FUNCTIONS.items():
        monitor.add_activation_metric(name, function, metric_regex="^[0-9]")
    monitor.begin_step(0)
    with torch.set_grad_enabled(grad):
        assert monitor.is_monitoring()
        model(x)
    monitor.end_step()
    assert monitor.get_step_metrics() == expected("activation", outputs_of(model, x))


def test_a_pattern_chooses_modules() -> None:
    model = mlp()
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("mean", lambda x: x.mean(), metric_regex="2")
    monitor.begin_step(0)
    with torch.no_grad():
        model(torch.randn(4, 3))
    monitor.end_step()
    assert monitor.get_step_metrics().keys() == {"activation/2/mean"}


def test_parameters_and_gradients_are_measured_when_the_loop_says_so() -> None:
    model = mlp()
    monitor = ModuleMonitor(model)
    for name, function in FUNCTIONS.items():
        monitor.add_parameter_metric(name, function)
        monitor.add_gradient_metric(name, function)
    monitor.begin_step(0)
    model(torch.randn(4, 3)).square().mean().backward()
    monitor.monitor_parameters()
    monitor.monitor_gradients()
    monitor.end_step()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert monitor.get_step_metrics() == {**expected("parameter", parameters), **expected("gradient", gradients)}


def test_a_whole_step_has_outputs_parameters_and_gradients_together() -> None:
    model, x = mlp(), torch.randn(4, 3)
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("mean", FUNCTIONS["mean"], metric_regex="^[0-9]")
    monitor.add_parameter_metric("norm", FUNCTIONS["norm"])
    monitor.add_gradient_metric("norm", FUNCTIONS["norm"])
    model(x).square().mean().backward()  # before the step, it is nobody's
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    monitor.begin_step(0)
    model(x).square().mean().backward()
    monitor.monitor_parameters()
    monitor.monitor_gradients()
    monitor.end_step()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    whole = {**expected("activation", outputs_of(model, x)), **expected("parameter", parameters), **expected("gradient", before)}
    chosen = {key: value for key, value in whole.items() if key.endswith("/mean") == key.startswith("activation")}
    values = monitor.get_step_metrics()
    assert values == {key: chosen[key] for key in values}
    assert len(values) == 3 + 3 + 3


# --- the refined coordinate check ------------------------------------------------------------------------------------------------


def test_the_check_asks_for_a_module_and_a_reference_and_knows_both() -> None:
    model, reference = mlp(), mlp()
    monitor = ModuleMonitor()
    with pytest.raises(ValueError, match="no module to check"):
        RefinedCoordinateCheck(monitor)
    monitor.set_module(model)
    with pytest.raises(ValueError, match="no reference module"):
        RefinedCoordinateCheck(monitor)
    monitor.set_reference_module(reference)
    check = RefinedCoordinateCheck(monitor)
    assert (check.module, check.reference_module) == (model, reference)
    assert monitor.reference_module is reference


def length(tensor: Tensor) -> float:
    """What a key of the check stands for."""
    return float(tensor.norm(dim=-1).mean())


def terms(now: nn.Module, start: nn.Module, x: Tensor, x0: Tensor) -> dict[str, float]:
    """The decomposition of each child, written out."""
    found: dict[str, float] = {}
    with torch.no_grad():
        for name, child in now.named_children():
            child0 = start.get_submodule(name)
            y, y0, moved = child(x), child0(x0), child0(x)
            update = f"RCC (W_t-W_0)x_t/{name}"
            propagated = f"RCC W_0(x_t-x_0)/{name}"
            found[f"{update}/l2norm"] = length(y - moved)
            if isinstance(child, nn.Embedding):
                return found
            found[f"{propagated}/l2norm"] = length(moved - y0)
            found[f"RCC x_t/{name}/l2norm"], found[f"RCC (x_t-x_0)/{name}/l2norm"] = length(x), length(x - x0)
            if isinstance(child, (nn.Linear, nn.LayerNorm)):
                bias, bias0 = (0 if each.bias is None else each.bias for each in (child, child0))  # type: ignore[union-attr]
                found[f"{update}.weight/l2norm"] = length((y - bias) - (moved - bias0))
                found[f"{propagated}.weight/l2norm"] = length(moved - y0)
                found[f"{update}.weight/W_t x_t/l2norm"] = length(y - bias)
                found[f"{propagated}.weight/W_0 x_0/l2norm"] = length(y0 - bias0)
            if isinstance(child, nn.LayerNorm):
                plain, plain0 = (nn.functional.layer_norm(each, child.normalized_shape, eps=child.eps) for each in (x, x0))
                found[f"{update}.weight/x_t/l2norm"] = length(plain)
                found[f"{propagated}.weight/x_t-x_0/l2norm"] = length(plain - plain0)
            x, x0 = y, y0
    return found


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(3, 6, bias=False)),
    "with bias": lambda: nn.Sequential(nn.Linear(3, 6)),
    "two layers": mlp,
    "layer norm": lambda: nn.Sequential(nn.LayerNorm(3)),
    "embedding": lambda: nn.Sequential(nn.Embedding(9, 4)),
}


def checked(now: nn.Module, start: nn.Module) -> tuple[ModuleMonitor, RefinedCoordinateCheck]:
    monitor = ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.set_module(now)
    monitor.set_reference_module(start)
    return monitor, RefinedCoordinateCheck(monitor)


def two_inputs(kind: str) -> tuple[Tensor, Tensor]:
    if kind == "embedding":
        return torch.randint(9, (2, 5)), torch.randint(9, (2, 5))
    return torch.randn(4, 3), torch.randn(4, 3)


@pytest.mark.parametrize("grad", [False, True], ids=["without gradients", "with gradients"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_check_compares_with_the_run_of_the_reference_that_the_loop_made(kind: str, grad: bool) -> None:
    start = MODELS[kind]()
    now = drifted(start)
    x0, x = two_inputs(kind)
    monitor, check = checked(now, start)
    monitor.begin_step(0)
    with torch.set_grad_enabled(grad):
        start(x0)
        now(x)
    check.refined_coordinate_check()
    monitor.end_step()
    assert monitor.get_step_metrics() == pytest.approx(terms(now, start, x, x0), rel=1e-5, abs=1e-6)


def test_of_several_runs_each_of_the_model_goes_with_the_last_of_the_reference_before_it() -> None:
    start = mlp()
    now = drifted(start)
    monitor, check = checked(now, start)
    batches = [two_inputs("linear") for _ in range(2)]
    monitor.begin_step(0)
    for x0, x in batches:
        with torch.no_grad():
            start(torch.randn(4, 3))  # which the next one takes the place of
            start(x0)
        now(x).sum().backward()
        check.refined_coordinate_check()
        monitor.after_micro_batch()
    monitor.end_step()
    each = [terms(now, start, x, x0) for x0, x in batches]
    assert monitor.get_step_metrics() == pytest.approx({k: (each[0][k] + each[1][k]) / 2 for k in each[0]}, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("how", ["none", "behind the model", "not monitored", "evaluated", "attached"])
def test_otherwise_the_reference_runs_by_itself_on_what_the_model_gets(how: str) -> None:
    """A teacher that runs behind the model is none to compare the next batch with."""
    start = mlp()
    now = drifted(start)
    monitor, _ = checked(now, start)
    monitor.add_activation_difference_metric("largest", lambda a, b: (a - b).abs().max(), metric_regex="^2$")
    optimizer = torch.optim.SGD(now.parameters(), lr=0.0)
    if how == "attached":
        monitor.attach(optimizer)
    else:
        monitor.begin_step(0)
    batches = [torch.randn(4, 3) for _ in range(2)]
    for x in batches:
        if how == "not monitored":
            with monitor.no_monitor():
                start(torch.randn(4, 3))
        if how == "attached":
            start(torch.randn(4, 3))
        output = now(x)
        if how == "behind the model":
            start(x)
        if how == "evaluated":
            now.eval()
            now(torch.randn(4, 3))
            now.train()
        output.sum().backward()
    optimizer.step()
    monitor.end_step()
    values = monitor.get_step_metrics()
    each = [terms(now, start, x, x) for x in batches]
    for key in each[0]:
        assert values[key] == pytest.approx((each[0][key] + each[1][key]) / 2, rel=1e-5, abs=1e-6)
    between = [float((outputs_of(now, x)["2"] - outputs_of(start, x)["2"]).abs().max()) for x in batches]
    assert values["activation_difference/2/largest"] == pytest.approx(sum(between) / 2, rel=1e-5)


def test_differences_of_outputs_are_to_the_run_that_the_loop_made_too() -> None:
    start = mlp()
    now = drifted(start)
    monitor = ModuleMonitor(now)
    monitor.set_reference_module(start)
    monitor.add_activation_difference_metric("largest", lambda a, b: (a - b).abs().max(), metric_regex="^[0-9]")
    x0, x = two_inputs("linear")
    monitor.begin_step(0)
    with torch.no_grad():
        start(x0)
        now(x)
    monitor.end_step()
    ours, theirs = outputs_of(now, x), outputs_of(start, x0)
    assert monitor.get_step_metrics() == {
        f"activation_difference/{name}/largest": pytest.approx(float((ours[name] - theirs[name]).abs().max()), rel=1e-5)
        for name in ours
    }
    assert not [hook for part in start.modules() for hook in (*part._forward_hooks, *part._forward_pre_hooks)]


def test_the_hand_decides_only_in_steps_that_it_begins() -> None:
    model = mlp()
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("calls", lambda x: torch.ones(()), metric_regex="^2$", metric_aggregation_fn="sum")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor.attach(optimizer)

    def step() -> None:
        model(torch.randn(4, 3)).sum().backward()
        with torch.no_grad():
            model(torch.randn(4, 3))
        model.eval()
        model(torch.randn(4, 3))
        model.train()
        optimizer.step()

    step()
    assert monitor.get_step_metrics() == {"activation/2/calls": 1.0}
    monitor.begin_step(1)
    step()
    monitor.end_step()
    assert monitor.get_step_metrics() == {"activation/2/calls": 2.0}


def test_a_run_of_the_reference_that_cannot_be_followed_goes_on_and_another_takes_its_place() -> None:
    class Untouchable(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.clone:
                raise RuntimeError("no copies")
            return super().__torch_function__(func, types, args, kwargs or {})

    start = mlp()
    now = drifted(start)
    monitor, _ = checked(now, start)
    x0, x = two_inputs("linear")
    monitor.begin_step(0)
    with torch.no_grad(), pytest.warns(GradmonWarning, match="could not be followed"):
        start(x0.as_subclass(Untouchable))
    now(x)
    monitor.end_step()
    assert monitor.get_step_metrics() == pytest.approx(terms(now, start, x, x), rel=1e-5, abs=1e-6)
