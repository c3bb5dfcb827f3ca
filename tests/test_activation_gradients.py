"""Gradients of what modules take and return: through every kind of backward pass, against ``autograd.grad``, at no cost to it."""

from __future__ import annotations

import functools
import gc
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests import oracle
from tests.test_activations import KINDS, ROOT, SGD, Twin, check, watched
from torch_gradmon import ModuleMonitor

# most loops here are of what is measured, and leave out what the audit of the loop misses
pytestmark = pytest.mark.filterwarnings("ignore:torch_gradmon. Gradients are not cleared")

GRADIENTS = ("output_gradient", "input_gradient")
NEEDS_NONE = "it needs no gradient: nothing that it is computed from is trained"
ABSENT = "no backward pass that ends in parameters brought a gradient for its "


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def gradients_of(values: dict[tuple[str, str], list[Tensor]]) -> dict[tuple[str, str], list[Tensor]]:
    return {key: tensors for key, tensors in values.items() if key[0].endswith("_gradient")}


# --- backward passes of all kinds --------------------------------------------------------------------------------------------------


def _plain(loss: Tensor, model: nn.Module, x: Tensor) -> None:
    loss.backward()


def _create_graph(loss: Tensor, model: nn.Module, x: Tensor) -> None:
    loss.backward(create_graph=True)
    for parameter in model.parameters():  # breaks the cycle that torch warns of
        parameter.grad = parameter.grad.detach()


def _autograd_backward(loss: Tensor, model: nn.Module, x: Tensor) -> None:
    torch.autograd.backward([loss])


def _inputs_are_all(loss: Tensor, model: nn.Module, x: Tensor) -> None:
    loss.backward(inputs=list(model.parameters()))


def _the_input_too(loss: Tensor, model: nn.Module, x: Tensor) -> None:
    loss.backward(inputs=[*model.parameters(), x])


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")  # torch's, once in a process
@pytest.mark.parametrize("back", [_plain, _create_graph, _autograd_backward, _inputs_are_all, _the_input_too])
def test_every_way_to_go_back(back: Callable[..., None]) -> None:
    model = net()
    twin = Twin(model)
    optimizer, monitor = watched(model, *GRADIENTS)
    for size in (4, 1):  # accumulated over two micro-batches
        x = torch.randn(size, 5)
        twin.backward(twin.model(x).cos().sum())
        twin.forget()
        x.requires_grad_(back is _the_input_too)
        back(model(x).cos().sum(), model, x)
    optimizer.step()
    metrics = monitor.get_step_metrics()
    if back is _the_input_too:
        ours = {key for key in metrics if key.startswith(("input_gradient/0/", f"input_gradient/{ROOT}/"))}
        assert len(ours) == 2 * len(oracle.BUILT_INS)
        metrics = {key: value for key, value in metrics.items() if key not in ours}
    check(metrics, gradients_of(twin.values))


@pytest.mark.parametrize(
    ("inputs", "there"),
    [
        (lambda model, x: [model[2].weight], {"2", ROOT}),
        (lambda model, x: [model[0].bias], {"0", "1", "2", ROOT}),
        (lambda model, x: [x], set()),
    ],
    ids=["the last layer", "the first", "no parameter"],
)
def test_a_backward_pass_for_some_inputs_brings_what_is_on_its_way(inputs: Callable[..., list[Tensor]], there: set[str]) -> None:
    model = net()
    twin = Twin(model)
    optimizer, monitor = watched(model, "output_gradient")
    x = torch.randn(4, 5, requires_grad=True)
    model(x).square().sum().backward(inputs=inputs(model, x))
    twin.backward(twin.model(x).square().sum())
    optimizer.step()
    expected = {key: tensors for key, tensors in twin.values.items() if key[0] == "activation_gradient" and key[1] in there}
    check(monitor.get_step_metrics(), expected)
    missing = monitor.missing()
    assert {key.split("/")[1] for key in missing} == {"0", "1", "2", ROOT} - there
    assert set(missing.values()) <= {f"{ABSENT}output in a training forward"}


def test_gradients_that_are_asked_for_by_hand_do_not_count() -> None:
    """A gradient penalty, and gradients with respect to parameters, inputs and the outputs of layers."""
    model = net()
    optimizer, monitor = watched(model, *GRADIENTS)
    monitor.add_activation_metric("calls", lambda g: torch.ones(()), "", "sum", of=GRADIENTS)
    twin = Twin(model)
    for _ in range(2):
        twin.values.clear()
        twin.forget()
        x = torch.randn(4, 5, requires_grad=True)
        losses = []
        for each in (model, twin.model):
            out = each(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            slopes = torch.autograd.grad(out.square().sum(), list(each.parameters()), create_graph=True)
            torch.autograd.grad(out.sum(), out, retain_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean() + 0.1 * sum(s.square().sum() for s in slopes)
            losses.append(out.square().mean() + penalty)
        losses[0].backward()
        twin.backward(losses[1])
        optimizer.step()
        metrics = monitor.get_step_metrics()
        calls = {key: metrics.pop(key) for key in list(metrics) if key.endswith("/calls")}
        assert set(calls.values()) == {1.0}
        check(metrics, gradients_of(twin.values))


def test_two_losses_of_one_forward_with_a_backward_pass_each_merge() -> None:
    model = net()
    twin = Twin(model)
    optimizer, monitor = watched(model, *GRADIENTS)
    x = torch.randn(4, 5)
    out, same = model(x), twin.model(x)
    out[:, 0].sum().backward(retain_graph=True)
    twin.backward(same[:, 0].sum(), retain_graph=True)
    (3 * out.square().sum()).backward()
    twin.backward(3 * same.square().sum())
    optimizer.step()
    values = gradients_of(twin.values)
    assert [len(tensors) for tensors in values.values()] == [2] * 6
    check(monitor.get_step_metrics(), values)


def test_a_tensor_that_goes_into_two_forwards_counts_once_for_each_backward() -> None:
    model = net()
    optimizer, monitor = watched(model, "input_gradient", metrics=("norm",))
    hidden = torch.ones(2, 5, requires_grad=True) * 2  # as the output of an encoder of somebody else
    brought = []
    for factor in (1.0, 2.0):
        loss = factor * model(hidden).sum()
        brought += torch.autograd.grad(loss, hidden, retain_graph=True)
        loss.backward(retain_graph=True)
    optimizer.step()
    assert monitor.get_step_metrics()[f"input_gradient/{ROOT}/norm"] == pytest.approx(oracle.values(brought)["norm"], rel=1e-6)


def test_a_backward_pass_while_paused_and_one_after_the_step_do_not_count() -> None:
    model = net()
    twin = Twin(model)
    _, monitor = watched(model, "output_gradient")
    monitor.begin_step(0)
    x = torch.randn(2, 5)
    loss = model(x).square().sum()
    with monitor.no_monitor():
        loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    twin.backward(twin.model(x).square().sum())
    monitor.end_step()
    loss.backward(retain_graph=True)
    check(monitor.get_step_metrics(), {k: v for k, v in twin.values.items() if k[0] == "activation_gradient"})
    monitor.begin_step(1)
    loss.backward()
    monitor.end_step()
    assert monitor.get_step_metrics() == {}


def test_a_hidden_state_kept_over_steps_has_the_gradient_of_the_step_that_made_it() -> None:
    class Shift(nn.Module):
        """Keeps nothing for its backward pass that a step of an optimizer would change."""

        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.bias

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.read = nn.Sequential(Shift(), Shift()), Shift()

        def forward(self, x: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
            hidden = self.cell(x if hidden is None else x + hidden)
            return self.read(hidden.sin()), hidden

    model = Recurrent()
    twin = Twin(model)
    optimizer, monitor = watched(model, *GRADIENTS)
    states: list[Tensor | None] = [None, None]
    for step in range(3):
        twin.values.clear()
        twin.forget()
        for _ in range(3):
            x = torch.randn(2, 3)
            for place, each in enumerate((model, twin.model)):
                out, states[place] = each(x, states[place])
                loss = out.square().sum()
                if each is model:
                    loss.backward(retain_graph=True)
                else:
                    twin.backward(loss, retain_graph=True)
        optimizer.step()
        expected = gradients_of(twin.values)
        check(monitor.get_step_metrics(), expected, f"step {step}")
        assert len(expected["input_gradient", f"{ROOT}[1]"]) == (6 if step else 3)


def test_no_hook_of_an_earlier_step_is_left_in_a_graph_that_is_kept() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(3, 3).requires_grad_(False)  # that a step of the optimizer leaves the graph as it is
            self.bias = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
            return self.cell(x + hidden) + self.bias

    model = Chain()
    nn.init.eye_(model.cell.weight)
    optimizer, monitor = watched(model, *GRADIENTS, metrics=("norm",))
    hidden = torch.zeros(2, 3)
    for _ in range(20):  # whose inputs nothing but the graph holds: one takes the other's place in memory
        hidden = model(torch.randn(2, 3), hidden)
    optimizer.step()
    model(torch.randn(2, 3), hidden).sum().backward()
    optimizer.step()
    one = pytest.approx(math.sqrt(6), rel=1e-6)
    assert monitor.get_step_metrics() == {
        **{f"activation_gradient/{name}/norm": one for name in (ROOT, "cell")},
        **{f"input_gradient/{path}/norm": one for path in (f"{ROOT}[1]", "cell")},
    }


# --- tensors of all kinds ------------------------------------------------------------------------------------------------------------


class Variant(nn.Module):
    """The same function, with operations in place or without."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.act, self.last = nn.Linear(4, 6), nn.ReLU(inplace=kind == "relu"), nn.Linear(6, 2)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.kind == "arithmetic":
            y += 0.3
            y.mul_(2.0)
        elif self.kind == "view":
            y.view(-1).add_(0.3)
            y.t().mul_(2.0)
        else:
            y = (y + 0.3) * 2.0
        return self.last(self.act(y)).square()


@pytest.mark.parametrize("kind", ["relu", "arithmetic", "view"])
def test_what_is_changed_in_place_afterwards_has_the_gradient_of_what_it_was(kind: str) -> None:
    model, twin = Variant(kind), Twin(Variant("none"))
    optimizer, monitor = watched(model, *KINDS)
    for _ in range(2):
        twin.values.clear()
        twin.forget()
        x = torch.randn(5, 4)
        model(x).sum().backward()
        twin.backward(twin.model(x).sum())
        optimizer.step()
        check(monitor.get_step_metrics(), twin.values)


class Learned(nn.Module):
    """Returns its parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))

    def forward(self) -> Tensor:
        return self.weight


class Prompted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.read = Learned(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.prompt()).sin() * x


def test_a_parameter_as_output_or_input_has_its_gradient_and_collects_no_hooks() -> None:
    model = Prompted()
    twin = Twin(model)
    optimizer, monitor = watched(model, *KINDS)
    x = torch.randn(2, 3, requires_grad=True)  # a leaf that is the same in all steps
    hooks = []
    for _ in range(5):
        twin.values.clear()
        for factor in (1.0, 2.0, 3.0):  # micro-batches that all have it, and its gradient once each
            twin.forget()
            (factor * model(x).sum()).backward()
            twin.backward(factor * twin.model(x).sum())
        hooks.append([len(t._backward_hooks or ()) for t in (model.prompt.weight, x)])
        optimizer.step()
        check(monitor.get_step_metrics(), twin.values)
        assert [len(t._backward_hooks or ()) for t in (model.prompt.weight, x)] == [1, 0]  # that of each parameter
    assert hooks == [hooks[0]] * 5
    assert {"activation_gradient/prompt/norm", f"input_gradient/{ROOT}/norm"} <= monitor.get_step_metrics().keys()


def test_complex_outputs_count_as_twice_as_many_real_numbers() -> None:
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft(x) * self.weight

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spectrum, self.twist = Spectrum(), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.twist(self.spectrum(x).conj() * 1j).abs().square().sum()

    model = Model()
    twin = Twin(model)
    optimizer, monitor = watched(model, *KINDS)
    for size in (3, 1):
        x = torch.randn(size, 4)
        model(x).backward()
        twin.backward(twin.model(x))
        twin.forget()
    optimizer.step()
    check(monitor.get_step_metrics(), twin.values)
    assert oracle.reals(twin.values["activation_gradient", "spectrum"]).numel() == 2 * 4 * 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_gradients_of_other_dtypes(dtype: torch.dtype) -> None:
    model = net().to(dtype)
    twin = Twin(model)
    optimizer, monitor = watched(model, *KINDS)
    x = torch.randn(7, 5, dtype=dtype)
    model(x).sum().backward()
    twin.backward(twin.model(x).sum())
    optimizer.step()
    check(monitor.get_step_metrics(), twin.values)


def test_gradients_that_are_not_finite() -> None:
    model = net()
    twin = Twin(model)
    optimizer, monitor = watched(model, *GRADIENTS)
    weights = torch.tensor([1.0, float("inf"), float("nan")])
    x = torch.randn(2, 5)
    (model(x) * weights).sum().backward()
    twin.backward((twin.model(x) * weights).sum())
    optimizer.step()
    check(monitor.get_step_metrics(), gradients_of(twin.values))
    assert monitor.get_step_metrics()["activation_gradient/2/nonfinite_count"] == 4.0


@pytest.mark.parametrize("part", [nn.Tanh, lambda: nn.Linear(4, 4).requires_grad_(False)], ids=["no parameters", "frozen"])
def test_what_is_checkpointed_by_itself_and_has_nothing_to_train_has_gradients(part: Callable[[], nn.Module]) -> None:
    class Model(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.part, self.checkpointed = nn.Linear(4, 4), part(), checkpointed

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return checkpoint(self.part, x, use_reentrant=True) if self.checkpointed else self.part(x)

    model, twin = Model(True), Twin(Model(False))
    optimizer, monitor = watched(model, *GRADIENTS)
    x = torch.randn(3, 4)
    model(x).square().sum().backward()
    twin.backward(twin.model(x).square().sum())
    optimizer.step()
    check(monitor.get_step_metrics(), gradients_of(twin.values))


class Exponential(torch.autograd.Function):
    """Two outputs of one node that Python made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x.exp(), x.sin()

    @staticmethod
    def backward(ctx: Any, of_exp: Tensor, of_sin: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return of_exp * x.exp() + of_sin * x.cos()


@pytest.mark.parametrize("anomaly", [False, True], ids=["plain", "in anomaly mode"])
def test_outputs_of_a_function_with_a_backward_of_its_own(anomaly: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.both, self.read = nn.Linear(3, 3), Apply(), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            exp, sin = self.both(self.first(x))
            return self.read(exp) + self.read(sin)

    class Apply(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return Exponential.apply(x)

    model = Model()
    twin = Twin(model)
    optimizer, monitor = watched(model, *KINDS)
    with torch.autograd.set_detect_anomaly(anomaly):
        for size in (2, 1):
            twin.forget()
            x = torch.randn(size, 3)
            model(x).sum().backward()
            twin.backward(twin.model(x).sum())
    optimizer.step()
    check(monitor.get_step_metrics(), twin.values)


def test_what_needs_no_gradient_has_none_but_a_reason() -> None:
    model = nn.Sequential(nn.Linear(5, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 2))
    optimizer, monitor = watched(model, *GRADIENTS, metrics=("norm",))
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    assert monitor.get_step_metrics().keys() == {"activation_gradient/2/norm", f"activation_gradient/{ROOT}/norm"}
    assert monitor.missing() == {
        **{f"activation_gradient/{name}/norm": NEEDS_NONE for name in "01"},
        **{f"input_gradient/{name}/norm": NEEDS_NONE for name in ("0", "1", "2", ROOT)},
    }


def test_a_frozen_model_has_values_and_no_gradients() -> None:
    model = net().requires_grad_(False)
    monitor = ModuleMonitor(model, on_metric_error="raise")
    monitor.add_activation_metric("norm", of=("output", *GRADIENTS))
    monitor.begin_step(0)
    x = torch.randn(2, 5, requires_grad=True)
    model(x).sum().backward()
    monitor.end_step()
    assert x.grad is not None
    assert monitor.get_step_metrics().keys() == {f"activation/{name}/norm" for name in ("0", "1", "2", ROOT)}
    assert set(monitor.missing().values()) == {
        f"{ABSENT}output in a training forward",
        f"{ABSENT}input in a training forward",
    }


def test_a_monitor_of_gradients_keeps_no_parameter_alive() -> None:
    model = net()
    optimizer, monitor = watched(model, *GRADIENTS)
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    gone = [weakref.ref(thing) for thing in (model, *model, *model.parameters(), optimizer)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)
    assert "activation_gradient/0/norm" in monitor.get_step_metrics()


class Stateful(nn.Module):
    """Keeps a tensor that it learns, as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.state = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.state) + x


def test_a_model_that_keeps_an_input_is_pickled_in_mid_step_without_a_warning() -> None:
    model = Stateful()
    _, monitor = watched(model, "input_gradient", metrics=("norm",))
    loss = model(torch.ones(2, 3)).sum()
    assert model.state._backward_hooks
    taken = pickle.loads(pickle.dumps(model))  # a warning is an error in these tests
    assert torch.equal(taken.state, model.state)
    loss.backward()
    assert monitor.is_monitoring()


def test_a_step_that_begins_in_a_transform_has_its_gradients() -> None:
    model = net()
    twin = Twin(model)
    optimizer, monitor = watched(model, *GRADIENTS)
    x = torch.randn(2, 5)
    torch.func.grad(lambda x: model(x).sum())(x)
    model(x).sum().backward()
    twin.backward(twin.model(x).sum())
    optimizer.step()
    check(monitor.get_step_metrics(), gradients_of(twin.values))


def test_parameters_that_thaw_and_freeze_between_steps() -> None:
    model = net()
    twin = Twin(model)
    optimizer, monitor = watched(model, *GRADIENTS)
    for frozen in (False, True, False):
        twin.values.clear()
        twin.forget()
        for each in (model, twin.model):
            each[0].requires_grad_(not frozen)
        x = torch.randn(2, 5)
        model(x).square().sum().backward()
        twin.backward(twin.model(x).square().sum())
        optimizer.step()
        check(monitor.get_step_metrics(), gradients_of(twin.values))
        assert ("activation_gradient/0/norm" in monitor.get_step_metrics()) != frozen


# --- scaled losses -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init_scale", [1024.0, 1000.0, 2.0**16])
@pytest.mark.parametrize("attached", [True, False], ids=["attached", "by hand"])
def test_gradients_are_divided_by_the_scale(attached: bool, init_scale: float) -> None:
    model = net()
    twin = Twin(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)
    optimizer = SGD(model.parameters(), lr=0.0)
    monitor = ModuleMonitor(model, on_metric_error="raise", scaler=None if attached else scaler)
    for metric in oracle.BUILT_INS:
        monitor.add_activation_metric(metric, of=GRADIENTS)
    monitor.add_activation_metric("widest", lambda g: g.abs().amax(), "^0$", "max", of="output_gradient")
    if attached:
        monitor.attach(optimizer, scaler=scaler)
    for step in range(5):  # the scale grows on the way
        twin.values.clear()
        if not attached:
            monitor.begin_step(step)
        for size in (3, 2):
            twin.forget()
            x = torch.randn(size, 5)
            scaler.scale(model(x).square().sum()).backward()
            twin.backward(twin.model(x).square().sum())
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if not attached:
            monitor.end_step()
        metrics = monitor.get_step_metrics()
        widest = max(float(g.abs().max()) for g in twin.values["activation_gradient", "0"])
        assert metrics.pop("activation_gradient/0/widest") == pytest.approx(widest, rel=1e-6)
        check(metrics, gradients_of(twin.values), f"step {step}")
    assert scaler.get_scale() == 4 * init_scale


def test_an_overflow_shows_and_the_next_step_is_divided_by_the_smaller_scale() -> None:
    model = net()
    twin = Twin(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = SGD(model.parameters(), lr=0.0)
    monitor = ModuleMonitor(model, on_metric_error="raise")
    for metric in oracle.BUILT_INS:
        monitor.add_activation_metric(metric, of=GRADIENTS)
    monitor.attach(optimizer, scaler=scaler)
    for factor in (1.0, float("inf"), 1.0):
        twin.values.clear()
        twin.forget()
        x = torch.randn(3, 5)
        weights = torch.tensor([1.0, factor, 1.0])
        scaler.scale((model(x) * weights).sum()).backward()
        twin.backward((twin.model(x) * weights).sum())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        check(monitor.get_step_metrics(), gradients_of(twin.values), f"times {factor}")
    assert scaler.get_scale() == 128.0


def test_a_scale_that_a_gradient_has_no_room_for_gives_functions_the_true_gradient() -> None:
    """One over 2**16 times a small number underflows in float16."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3)).half()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    monitor = ModuleMonitor(model, on_metric_error="raise", scaler=scaler)
    monitor.add_activation_metric("mine", lambda g: g.double().abs().sum(), "^0$", "sum", of="output_gradient")
    monitor.begin_step(0)
    taken: list[Tensor] = []
    handle = model[0].register_forward_hook(lambda module, args, output: taken.append(output))
    out = model(torch.full((2, 5), 0.1, dtype=torch.float16))
    handle.remove()
    loss = scaler.scale((out.float() * 1e-5).sum())
    (expected,) = torch.autograd.grad(loss, taken, retain_graph=True)
    loss.backward()
    monitor.end_step()
    truth = expected.double().abs().sum().item() / 2**16
    assert expected.abs().max().item() / 2**16 < 6e-6  # far below what float16 holds with all its digits
    assert monitor.get_step_metrics() == {"activation_gradient/0/mine": pytest.approx(truth, rel=1e-6)}


def scaled(model: nn.Module, **attach: Any) -> tuple[SGD, ModuleMonitor]:
    optimizer = SGD(model.parameters(), lr=0.0)
    monitor = ModuleMonitor(model)
    monitor.add_activation_metric("max", of=GRADIENTS)
    monitor.attach(optimizer, **attach)
    return optimizer, monitor


@pytest.mark.filterwarnings("ignore:torch_gradmon. a GradScaler was noticed")
def test_gradients_of_a_step_whose_scaler_was_noticed_too_late_are_absent() -> None:
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer, monitor = scaled(model)
    for number in range(2):
        scaler.scale(model(torch.randn(2, 5)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert monitor.get_step_metrics().get("activation_gradient/2/max") == (1.0 if number else None)
        assert bool(monitor.missing().get("activation_gradient/2/max")) != bool(number)
    assert "noticed" in monitor.missing().get("activation_gradient/2/max", "noticed")


def test_another_optimizer_of_the_same_scaler_has_stepped_before() -> None:
    """A GAN with one scaler, of which one network is watched."""
    model, other = net(), net()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer, monitor = scaled(model, scaler=scaler)
    others = SGD(other.parameters(), lr=0.0)
    for _ in range(2):
        x = torch.randn(2, 5)
        scaler.scale(other(x).sum()).backward()
        scaler.step(others)
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert monitor.get_step_metrics()["activation_gradient/2/max"] == 1.0


@pytest.mark.filterwarnings("ignore:torch_gradmon. SGD stepped without the GradScaler")
def test_where_the_scaler_is_given_up_no_gradient_is_divided_by_its_scale() -> None:
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer, monitor = scaled(model, scaler=scaler)
    found = []
    for number in range(5):
        loss = model(torch.randn(2, 5)).sum()
        if number == 0:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        found.append(monitor.get_step_metrics().get("activation_gradient/2/max"))
    assert set(found) == {1.0, None}  # until it is known
    assert found[0] == found[-1] == 1.0


# --- training is as without ------------------------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Checkpointed of both kinds and selectively, in place, shared, dropping out, with a parameter as output and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.inplace, self.norm = nn.Linear(4, 8), nn.ReLU(inplace=True), nn.BatchNorm1d(8)
        self.one, self.two = (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()) for _ in range(2))
        self.lstm, self.prompt, self.last = nn.LSTM(8, 8), Learned(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inplace(self.first(x)))
        x = checkpoint(self.one, x, use_reentrant=False)
        x = checkpoint(self.two, x, use_reentrant=True)
        contexts = functools.partial(create_selective_checkpoint_contexts, self._policy)
        x = checkpoint(self.one, x, use_reentrant=False, context_fn=contexts)
        x, _ = self.lstm(x.unsqueeze(1))
        return self.last(x.squeeze(1)) + self.prompt().sum()

    @staticmethod
    def _policy(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        keep = operation in (torch.ops.aten.addmm.default, torch.ops.aten.sum.default, torch.ops.aten.clone.default)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _trained(is_watched: bool, every: int = 1) -> tuple[list[Tensor], list[int]]:
    """What is left of four steps, the next random numbers with it, and how many keys each step had."""
    model = Everything()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    keys = []
    monitor = ModuleMonitor(model, on_metric_error="raise", every=every)
    if is_watched:
        for metric in (*oracle.BUILT_INS, "kurtosis", "log2_histogram"):
            for split in (False, True):
                monitor.add_activation_metric(metric, of=tuple(KINDS), split_calls=split)
        monitor.add_activation_metric("random", lambda t: torch.rand_like(t.abs()).sum(), of=tuple(KINDS))
        for metric in ("dead", "saturation"):
            monitor.add_activation_metric(metric)
        monitor.attach(optimizer, scaler=scaler)
    torch.manual_seed(11)
    for _ in range(4):
        for _ in range(2):
            x = torch.randn(6, 4, requires_grad=True)
            loss = model(x).square().mean()
            (slope,) = torch.autograd.grad(loss, model.last.weight, retain_graph=True)
            scaler.scale(loss + slope.square().sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        keys.append(len(monitor.get_step_metrics()) if is_watched else 0)
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return [*(t.detach() for t in model.state_dict().values()), *state, torch.rand(5)], keys


@pytest.mark.parametrize("every", [1, 2])
def test_training_is_the_same_to_the_last_bit(every: int) -> None:
    (bare, _), (left, keys) = _trained(False), _trained(True, every)
    assert all(torch.equal(a, b) for a, b in zip(bare, left, strict=True))
    assert [count > 500 for count in keys] == [step % every == 0 for step in range(4)]


def test_the_graph_of_the_model_is_as_without() -> None:
    def nodes(loss: Tensor) -> list[str]:
        found, queue = [], [loss.grad_fn]
        while queue:
            node = queue.pop()
            if node is not None:
                found.append(node.name())
                queue.extend(following for following, _ in node.next_functions)
        return found

    x = torch.randn(2, 5)
    bare = nodes(net()(x).sum())
    model = net()
    _, monitor = watched(model, *KINDS)
    out = model(x)
    assert nodes(out.sum()) == bare
    assert out._backward_hooks
    assert not out.retains_grad
    assert monitor.is_monitoring()


def _hooks(tensor: Tensor, *hooks: Any) -> Tensor:
    for hook in hooks:
        tensor.register_hook(hook)
    return tensor


def test_hooks_of_others_on_the_same_tensors_work_as_before() -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(_hooks(self.a(x), lambda g: g * 2, lambda g: g.clamp(-0.5, 0.5)))

    torch.manual_seed(0)
    model = Hooked()
    torch.manual_seed(0)
    bare = Hooked()
    optimizer, monitor = watched(model, *GRADIENTS)
    x = torch.randn(3, 5)
    for each in (model, bare):
        each(x).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), bare.parameters(), strict=True))
    optimizer.step()
    assert "activation_gradient/a/norm" in monitor.get_step_metrics()
