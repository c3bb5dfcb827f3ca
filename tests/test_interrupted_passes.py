"""Passes that are interrupted are no part of the step that the loop goes on with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from torch_gradmon import ModuleMonitor

# most loops here are of what is measured, and leave out what the audit of the loop misses
pytestmark = pytest.mark.filterwarnings("ignore:torch_gradmon. Gradients are not cleared")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


class Stop(Exception):
    pass


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Stop


def batch(number: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(number))


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), Attention(), nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), 1e-2)


def watched(model: nn.Module, optimizer: torch.optim.Optimizer) -> ModuleMonitor:
    monitor = ModuleMonitor(model, on_metric_error="raise").attach(optimizer)
    monitor.add_activation_metric("norm", of=("output", "output_gradient", "input", "input_gradient"))
    monitor.add_activation_metric("largest", lambda x: x.abs().max())
    monitor.add_attention_metric("entropy")
    monitor.add_attention_metric("max_logit")
    monitor.add_gradient_metric("norm")
    return monitor


def fails_in_forward(error: type[BaseException]) -> Callable[[nn.Module, Tensor], None]:
    def fail(model: nn.Module, x: Tensor) -> None:
        def stop(*_: object) -> None:
            raise error

        handle = model[3].register_forward_pre_hook(stop)  # type: ignore[index]
        try:
            with pytest.raises(error):
                model(x)
        finally:
            handle.remove()

    return fail


def fails_in_backward(model: nn.Module, x: Tensor) -> None:
    handle = model[1].register_forward_hook(lambda module, args, output: Failing.apply(output))  # type: ignore[index]
    loss = model(x).square().mean()
    handle.remove()
    with pytest.raises(Stop):
        loss.backward()


FAILURES = {
    "forward": fails_in_forward(Stop),
    "ctrl-c in forward": fails_in_forward(KeyboardInterrupt),
    "backward": fails_in_backward,
}


def of_modules(values: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in values.items() if not key.startswith("gradmon/")}


def trained(fail: Callable[[nn.Module, Tensor], None] | None, in_handler: bool = False) -> tuple[list[dict[str, float]], int]:
    """The metrics of four steps; in the third the batch fails first, and again."""
    model, optimizer = made()
    monitor = watched(model, optimizer)
    found = []

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(batch(number)).square().mean().backward()
        optimizer.step()
        found.append(of_modules(monitor.get_step_metrics()))

    for number in range(4):
        if fail is not None and number == 2:
            optimizer.zero_grad()
            for scale in (1000.0, 10.0):
                fail(model, batch(number, scale))
        if in_handler:
            try:
                raise ValueError
            except ValueError:
                step(number)
        else:
            step(number)
    return found, monitor.current_step


@pytest.mark.parametrize("fails", FAILURES)
def test_a_pass_that_was_interrupted_counts_in_no_step(fails: str) -> None:
    found, last = trained(FAILURES[fails])
    assert (found, last) == trained(None)


@pytest.mark.parametrize("fails", FAILURES)
def test_an_interrupted_micro_batch_has_the_step_absent_with_a_reason(fails: str) -> None:
    model, optimizer = made()
    monitor = watched(model, optimizer)
    for number in range(3):
        optimizer.zero_grad()
        for part in range(2):
            if (number, part) == (1, 1):
                FAILURES[fails](model, batch(part, 1000.0))
            model(batch(part)).square().mean().backward()
        optimizer.step()
        values, missing = monitor.get_step_metrics(), monitor.missing()
        keys = ["activation/1/norm", "activation_gradient/1/norm", "attention_entropy/2/mean", "activation/1/largest"]
        assert [key in values for key in keys] == [number != 1] * 4
        if number == 1:
            assert all("was interrupted" in missing[key.replace("/2/mean", "/.*")] for key in keys)
        assert "gradient/0.weight/norm" in values


def test_a_pass_within_an_exception_handler_counts() -> None:
    assert trained(None, in_handler=True) == trained(None)


def test_a_batch_that_is_tried_again_in_the_handler_counts_once() -> None:
    model, optimizer = made()
    monitor = watched(model, optimizer)
    other, own = made()
    twin = watched(other, own)
    for number in range(3):
        try:
            if number == 1:
                fails_in_forward(Stop)(model, batch(7, 1000.0))
            raise Stop
        except Stop:
            model(batch(number)).square().mean().backward()
        other(batch(number)).square().mean().backward()
        optimizer.step()
        own.step()
        assert of_modules(monitor.get_step_metrics()) == of_modules(twin.get_step_metrics())


def test_an_evaluation_that_is_interrupted_takes_nothing_from_the_step() -> None:
    model, optimizer = made()
    monitor = watched(model, optimizer)
    for number in range(2):
        optimizer.zero_grad()
        loss = model(batch(number)).square().mean()
        model.eval()
        with torch.no_grad():
            FAILURES["ctrl-c in forward" if number else "forward"](model, batch(number, 1000.0))
        model.train()
        loss.backward()
        optimizer.step()
        assert of_modules(monitor.get_step_metrics()) == trained(None)[0][number]


def test_a_model_that_calls_itself_is_not_taken_for_an_interrupted_one() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            x = self.layer(x)
            return self(x, False) if again else x

    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    monitor = ModuleMonitor(model).attach(optimizer)
    monitor.add_activation_metric("norm", metric_regex="layer")
    x = torch.randn(3, 4)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        first = model.layer(x).detach()
        both = torch.cat([first, model.layer(first).detach()]).double().norm().item()
        assert monitor.get_step_metrics()["activation/layer/norm"] == pytest.approx(both, rel=1e-6)


def test_dead_units_do_not_wake_by_a_pass_that_was_interrupted() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
        model[0].bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    monitor = ModuleMonitor(model).attach(optimizer)
    monitor.add_activation_metric("dead", metric_regex="^1$")
    for number in range(100):
        if number == 50:
            handle = model[2].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(torch.tensor([[1.0, 1.0]]))
            handle.remove()
        model(torch.tensor([[1.0, -1.0]])).sum().backward()
        optimizer.step()
    assert monitor.get_step_metrics()["activation/1/dead"] == 0.5


def test_a_step_whose_only_pass_was_interrupted_says_so() -> None:
    for fails in FAILURES:
        model, optimizer = made()
        monitor = watched(model, optimizer)
        step_of(model, optimizer, 0)
        FAILURES[fails](model, batch(1))
        optimizer.step()
        values, missing = monitor.get_step_metrics(), monitor.missing()
        assert not [key for key in values if key.startswith(("activation", "input", "attention"))]
        for key in ("activation/1/norm", "activation_gradient/1/norm", "attention_entropy/.*", "activation/1/largest"):
            assert missing[key] == "the forward or backward pass of this step was interrupted, as by an exception"


def test_gradients_of_an_interrupted_pass_count_when_used() -> None:
    model, optimizer = made()
    monitor = watched(model, optimizer)
    for goes_on in (False, True):
        model(batch(0)).square().mean().backward()
        fails_in_backward(model, batch(1))
        if goes_on:
            model(batch(2)).square().mean().backward()
        used = model[3].weight.grad.double().norm().item()  # type: ignore[index, union-attr]
        optimizer.step()
        optimizer.zero_grad()
        values, missing = monitor.get_step_metrics(), monitor.missing()
        assert values["gradient/3.weight/norm"] == pytest.approx(used, rel=1e-6)
        assert values.get("gradient_before_clip/3.weight/norm") == (pytest.approx(used, rel=1e-6) if goes_on else None)
        assert goes_on or "was interrupted" in missing["gradient_before_clip/3.weight/norm"]


@pytest.mark.parametrize("how", ["by hand", "by hand, steps", "steps"])
@pytest.mark.parametrize("passes", [0, 1])
def test_part_of_an_interrupted_pass_is_no_gradient_norm(how: str, passes: int) -> None:
    """One gradient is measured as it comes, since an optimizer might step in the hook of the loop on it."""
    model, optimizer = made()
    monitor = watched(model, optimizer)
    monitor._runtime.use_preset("standard")
    if "by hand" in how:
        monitor.begin_step(0)
    for number in range(passes):
        model(batch(number)).square().mean().backward()
    handle = model[3].weight.register_post_accumulate_grad_hook(lambda _: 1 / 0)  # type: ignore[index, union-attr, arg-type]
    with pytest.raises(ZeroDivisionError):
        model(batch(2)).square().mean().backward()
    handle.remove()
    optimizer.zero_grad()
    if "steps" in how:
        optimizer.step()
    if "by hand" in how:
        monitor.end_step()
    values, missing = monitor.get_step_metrics(), monitor.missing()
    for key in ("gradmon/grad_norm", "gradmon/grad_max", "gradmon/grad_nonfinite_count", "gradmon/grad_top_fraction"):
        assert key not in values
        assert "the last backward pass was interrupted" in missing[key]


@pytest.mark.parametrize("attached", [True, False])
def test_a_backward_that_reached_no_parameter_leaves_its_forward(attached: bool) -> None:
    model, optimizer = made()
    monitor = watched(model, optimizer) if attached else ModuleMonitor(model, on_metric_error="raise")
    if not attached:
        monitor.add_activation_metric("norm", of=("output", "output_gradient"))
    for number, fails in enumerate((False, True)):
        if not attached:
            monitor.begin_step(number)
        model.zero_grad()
        if fails:
            output = model(batch(7, 1000.0))
            output.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                output.square().mean().backward()
        kept: list[Tensor] = []
        output = model(batch(number))
        output.register_hook(kept.append)
        output.square().mean().backward()
        optimizer.step()
        if not attached:
            monitor.end_step()
    values = monitor.get_step_metrics()
    assert values["activation_gradient/[root module]/norm"] == pytest.approx(kept[0].double().norm().item(), rel=1e-6)
    assert values["activation/[root module]/norm"] > 100 * output.norm().item()


def test_an_evaluation_before_an_interrupted_forward_mixes_nothing() -> None:
    model, optimizer = made()
    monitor = watched(model, optimizer)
    with torch.no_grad():
        model(batch(5))
    FAILURES["forward"](model, batch(6, 1000.0))
    with torch.no_grad():
        model(batch(5))
    step_of(model, optimizer, 0)
    assert of_modules(monitor.get_step_metrics()) == trained(None)[0][0]


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_a_pass_without_the_monitor_takes_nothing_from_the_step(fails: str) -> None:
    model, optimizer = made()
    monitor = watched(model, optimizer)
    for paused in (False, True):
        for part in range(2):
            model(batch(0)).square().mean().backward()
            if paused and not part:
                kept = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
                with monitor.no_monitor():
                    FAILURES[fails](model, batch(6, 1000.0))
                for name, p in model.named_parameters():
                    p.grad = kept[name]
        optimizer.step()
        optimizer.zero_grad()
        values, missing = monitor.get_step_metrics(), monitor.missing()
        assert {"activation/1/norm", "activation_gradient/1/norm", "attention_entropy/2/mean"} <= values.keys()
        assert not [reason for reason in missing.values() if "interrupted" in reason]


def test_the_end_of_a_nested_pass_is_not_that_of_the_step() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.second, self.first(x), use_reentrant=True)

    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    monitor = ModuleMonitor(model, on_metric_error="raise").attach(optimizer)
    monitor.add_activation_metric("norm", metric_regex="first")
    handle = model.first.weight.register_post_accumulate_grad_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(100 * torch.ones(3, 4)).sum().backward()
    handle.remove()
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    true = model.first(torch.ones(3, 4)).double().norm().item()
    assert monitor.get_step_metrics()["activation/first/norm"] == pytest.approx(true, rel=1e-6)


def test_the_dropping_is_hidden_from_modes_of_the_loop() -> None:
    seen: list[Any] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    counts = []
    for is_watched in (False, True):
        model, optimizer = made()
        monitor = watched(model, optimizer).add_activation_metric("dead") if is_watched else None
        with Mode():
            seen.clear()
            step_of(model, optimizer, 0)
            for fails in FAILURES.values():
                fails(model, batch(6))
            step_of(model, optimizer, 1)
            counts.append(len(seen))
        del monitor
    assert counts[0] == counts[1]


def test_a_forward_in_which_the_hooks_are_installed_counts_within_a_handler() -> None:
    model, optimizer = made()
    monitor = ModuleMonitor(model, monitor_step_fn=lambda step: step == 2).attach(optimizer)
    monitor.add_activation_metric("norm", metric_regex="^1$")
    for number in range(3):
        try:
            raise Stop
        except Stop:
            step_of(model, optimizer, number)
    assert "activation/1/norm" in monitor.get_step_metrics()


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    model(batch(number)).square().mean().backward()
    optimizer.step()
