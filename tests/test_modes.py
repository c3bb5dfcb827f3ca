"""Modes around the loop see the loop's operations and none of the monitor's, and autocast keeps the weights that it has cast."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

import torch_gradmon as gradmon
from tests.watching import watch_with
from torch_gradmon import ModuleMonitor

from . import loops
from .test_no_change import heaviest


class Dispatched(TorchDispatchMode):
    """Logs each operation, and draws a random number for it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        torch.rand(())
        return function(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """Logs each function of torch, and draws a random number for it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(resolve_name(function) or repr(function))
        torch.rand(())
        return function(*args, **(kwargs or {}))


SETTINGS = [
    loops.Setting("gpt_tied", "adamw_foreach", "norm", 2),
    loops.Setting("mlp", "lbfgs", "value"),
    loops.Setting("mlp", "adamw_fused", "norm", 1, scaler=True),
    loops.Setting("gpt_tied", "sgd", recompute="nonreentrant"),
]


@pytest.mark.parametrize("mode", [Dispatched, Called])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_mode_around_the_loop_sees_nothing_of_ours(setting: loops.Setting, mode: Callable[[], Any], tmp_path: Path) -> None:
    def run(watch: loops.Watch | None) -> tuple[dict[str, Any], list[str]]:
        around = mode()

        def monitored(*args: Any) -> Any:  # attached before the loop, and detached in it
            monitor = None if watch is None else watch(*args)
            around.__enter__()
            return monitor

        result = loops.train(**dict(setting.parts()), steps=2, monitored=monitored)
        around.__exit__(None, None, None)
        return result, around.seen

    plain, expected = run(None)
    watched, seen = run(heaviest(tmp_path))
    assert len(expected) > 30
    first = next((i for i, (a, b) in enumerate(zip(seen, expected, strict=False)) if a != b), 0)
    assert seen == expected, (seen[max(first - 3, 0) : first + 5], expected[max(first - 3, 0) : first + 5])
    assert loops.differences(plain, watched) == []


@pytest.mark.parametrize("mode", [Dispatched, Called])
def test_a_mode_sees_nothing_of_what_acts_on_spikes_and_records_between_monitored_steps(mode: Callable[[], Any]) -> None:
    def run(**options: Any) -> list[str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with mode() as around:
            monitor = watch_with(model, optimizer, preset="full", **options) if options else None
            if monitor is not None:
                monitor.set_reference_module("init")
                monitor.add_gradient_metric("norm", stages=("local",))
            for _ in range(6):
                loss = model(torch.randn(8, 4)).square().mean()
                value = loss.detach()
                if monitor is not None:
                    monitor.log_scalar("loss", value)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if monitor is not None:  # what is asked of it in between
                    monitor.last_record.top_gradients()
                    str(monitor.missing())
                    monitor.diagnose()
                    monitor.detach()
                    monitor.attach(optimizer)
        if monitor is not None:
            monitor.detach()
        return around.seen  # type: ignore[no-any-return]

    expected = run()
    for options in ({"on_spike": "skip"}, {"every": 3, "spike_capture": gradmon.SpikeCapture(before=2)}):
        seen = run(**options)
        first = next((i for i, (a, b) in enumerate(zip(seen, expected, strict=False)) if a != b), 0)
        assert seen == expected, (options, seen[max(first - 3, 0) : first + 5], expected[max(first - 3, 0) : first + 5])


class Twice(nn.Module):
    """Calls one module twice, so that its weight is cast once and used twice while autocast keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.shared(x))
        x = x.reshape(-1, 2, 4, 8)
        x = torch.nn.functional.scaled_dot_product_attention(x, x, x).reshape(-1, 16)
        return self.head(torch.tanh(self.shared(x)))


def _largest(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x.reshape(-1, 4) @ x.reshape(-1, 4).T).amax().float()


def _metrics(monitor: ModuleMonitor) -> None:
    monitor.add_activation_metric("kurtosis")
    monitor.add_activation_metric("largest", _largest)
    monitor.add_attention_metric("entropy")
    monitor.add_activation_metric("norm", of=("input", "output"))
    monitor.add_gradient_metric("largest", _largest, metric_regex="weight")


def _trained(dtype: torch.dtype, cadence: Callable[[ModuleMonitor], None] | None, reference: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = None
    if cadence is not None:
        monitor = ModuleMonitor(model, on_metric_error="raise")
        cadence(monitor)
        if reference:
            monitor.set_reference_module("init")
            monitor.add_activation_difference_metric("norm")
        monitor.attach(optimizer)
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", dtype)
    try:
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(64, 16)).float().square().mean()
            loss.backward()
            optimizer.step()
            torch.clear_autocast_cache()
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()
    if monitor is not None:
        assert any(name.startswith("activation/") for name in monitor.get_step_metrics())
        monitor.detach()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("reference", [False, True])
def test_autocast_that_was_enabled_without_a_context_keeps_its_cast_weights(reference: bool) -> None:
    plain, watched = _trained(torch.bfloat16, None), _trained(torch.bfloat16, _metrics, reference)
    assert loops.differences(plain, watched) == []


def test_emptying_the_cache_in_between_would_change_the_parameters() -> None:
    """The test above can fail: autocast's cache matters to this model."""

    def emptying(monitor: ModuleMonitor) -> None:
        monitor.add_activation_metric("empties", lambda x: (torch.clear_autocast_cache(), x.sum())[1])

    assert loops.differences(_trained(torch.bfloat16, None), _trained(torch.bfloat16, emptying)) != []


def test_metric_functions_run_without_autocast_and_leave_its_settings() -> None:
    model = nn.Linear(4, 4)
    dtypes: list[Any] = []

    def product(x: Tensor) -> Tensor:
        dtypes.append((x @ x.T).dtype)
        return x.float().sum()

    monitor = ModuleMonitor(model, on_metric_error="raise")
    monitor.add_parameter_metric("product", product, metric_regex="weight")
    monitor.add_gradient_metric("product", product, metric_regex="weight")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor.attach(optimizer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled()
        assert torch.autocast_increment_nesting() == 2
        torch.autocast_decrement_nesting()
    assert dtypes
    assert set(dtypes) == {torch.float32}
    monitor.detach()


@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_mode_sees_an_evaluation_of_an_encoder_as_without_a_monitor(with_gradients: bool) -> None:
    def seen(is_watched: bool) -> list[str]:
        torch.manual_seed(0)
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if is_watched:
            gradmon.watch(model, optimizer, preset="full", on_spike=None)
        model(torch.ones(2, 3, 8)).sum().backward()
        optimizer.step()
        model.eval()
        with Called() as mode, torch.set_grad_enabled(with_gradients):
            model(torch.ones(2, 3, 8))
        return mode.seen

    assert seen(is_watched=True) == seen(is_watched=False)
