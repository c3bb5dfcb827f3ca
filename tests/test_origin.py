"""Where NaN or Inf began, and the closer look that is taken after a spike."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, ModuleMonitor, SpikeDetector
from torch_gradmon.analysis.run import read_run
from torch_gradmon.analysis.spike_report import explain
from torch_gradmon.core.keys import ACTIVATION, ACTIVATION_GRADIENT
from torch_gradmon.spikes.attribution import nonfinite_origin

BAD = 20


class Part(nn.Module):
    """A linear layer and a place for an accident."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.accident: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y if self.accident is None else self.accident(y)


FORWARD: Callable[[Tensor], Tensor] = lambda y: y * torch.nan  # noqa: E731
BACKWARD: Callable[[Tensor], Tensor] = lambda y: torch.sqrt(y * 0)  # noqa: E731 (finite, with an infinite gradient)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Part(), nn.Tanh(), nn.Linear(8, 1))


@contextmanager
def heard() -> Iterator[list[str]]:
    """What is said in here, afterwards."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", GradmonWarning)
        yield texts
    texts += [str(warning.message) for warning in said]


def watched(accident: Callable[[Tensor], Tensor], steps: int = 30, preset: str = "standard") -> tuple[ModuleMonitor, list[str]]:
    """An ordinary loop with the accident in one step; what was said."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer, preset=preset)
    with heard() as said:
        for step in range(steps):
            model[1].accident = accident if step == BAD else None
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    return monitor, said


def by_hand(
    accident: Callable[[Tensor], Tensor], post_spike_steps: int = 3
) -> tuple[list[dict[str, list[str]]], list[str], ModuleMonitor]:
    """A loop by hand that takes no step with bad gradients, so that the parameters stay as they are; sources by step."""
    model = net()
    monitor = ModuleMonitor(model, on_spike="warn", spike_capture=gradmon.SpikeCapture(after=post_spike_steps))
    monitor.add_detector(SpikeDetector())
    with heard() as said, gradmon.testing.collect_records(monitor) as records:
        for step in range(30):
            model[1].accident = accident if step >= BAD else None
            model.zero_grad()
            monitor.begin_step(step)
            model(torch.randn(4, 8)).square().mean().backward()
            monitor.monitor_gradients(before_clip=True)
            monitor.end_step()
    sources = [{source: list(table.names) for source, table in record.tables.items()} for record in records]
    return sources, said, monitor


def test_gradients_alone_tell_that_it_came_from_the_forward_pass() -> None:
    _, said = watched(FORWARD)
    assert "step 20: grad_norm is nan; NaN or Inf in the gradient of 3.bias, 3.weight, 1.linear.bias and 3 more" in said[0]
    assert said[0].endswith(
        "no parameter's is spared, so it came out of the forward pass, the loss, or the first layers of the backward pass: log the loss "
        "to distinguish them"
    )
    assert [text for text in said[1:] if "parameters hold NaN or Inf" in text] == [said[1]]
    assert said[2].endswith("it did not recover")
    assert len(said) == 3


@pytest.mark.parametrize(
    ("accident", "words"),
    [
        (lambda out: out * torch.nan, "and the loss is nan, so it came out of the forward pass or the loss"),
        (
            # as a fused kernel with a fault in its backward pass
            lambda out: torch.sqrt(out * 0) + out,
            "but the loss is finite, so it arose in the backward pass, in a derivative between the loss and 2.bias",
        ),
    ],
)
def test_a_loss_that_was_logged_tells_on_which_side_all_gradients_were_spoiled(
    accident: Callable[[Tensor], Tensor], words: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer, run_dir=tmp_path)
    with heard() as said:
        for step in range(BAD + 1):
            optimizer.zero_grad()
            out = model(torch.randn(4, 8))
            loss = (accident(out) if step == BAD else out).square().mean()
            monitor.log_scalar("loss", loss.detach())
            loss.backward()
            optimizer.step()
    (text,) = [text for text in said if "grad_norm" in text]
    assert f"no parameter's is spared, {words}" in text
    assert words in str(monitor.why(BAD))
    monitor.detach()
    assert words in explain(read_run(tmp_path), BAD)


def test_a_loss_logged_after_the_step_is_not_asked_for() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer)
    with heard() as said:
        for step in range(BAD + 1):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean() * (torch.nan if step == BAD else 1.0)
            loss.backward()
            optimizer.step()
            monitor.log_scalar("loss", loss.detach())
    (text,) = [text for text in said if "grad_norm" in text]
    assert "the loss, which is not logged yet in this step, tells which" in text
    assert "log the loss" not in text
    assert "the loss is nan" in monitor.why(BAD)


def test_gradients_alone_tell_where() -> None:
    _, said = watched(BACKWARD)
    assert said[0].endswith("nearer to the loss, from 3.weight on, all are finite, so it arose at 1.linear.bias")


def test_outputs_that_were_measured_name_the_module_in_the_step_itself() -> None:
    _, said = watched(FORWARD, preset="full")
    assert "step 20: the forward pass has its first NaN or Inf in the output of 1 (32 of 32 elements)" in said[1]


@pytest.mark.parametrize(
    ("accident", "words"),
    [
        (FORWARD, "step 21: the forward pass has its first NaN or Inf in the output of 1 (32 of 32 elements)"),
        (
            BACKWARD,
            "step 21: the forward pass is finite, and the backward pass has its first NaN or Inf in the gradient of the output of "
            "1.linear (32 of 32 elements)",
        ),
    ],
)
def test_where_the_parameters_stay_finite_the_next_step_names_the_module(
    accident: Callable[[Tensor], Tensor], words: str
) -> None:
    _, said, _ = by_hand(accident)
    assert [text for text in said if words in text] == [said[1]]


def test_the_closer_look_is_taken_for_some_steps_and_leaves_nothing_behind() -> None:
    sources, _, monitor = by_hand(FORWARD)
    close = [step for step, of in enumerate(sources) if ACTIVATION in of]
    assert close == [BAD + 1, BAD + 2, BAD + 3]
    assert set(sources[BAD + 1][ACTIVATION]) == {"0", "1.linear", "1", "2", "3", "[root module]"}
    assert all(ACTIVATION_GRADIENT in sources[step] for step in close)
    assert monitor._runtime.planner.registry.metrics == ()
    assert not monitor._runtime.captures.modules.hooks._hooks
    assert not any("activation" in key for key in monitor.get_step_metrics())
    assert not any("activation" in key for values in monitor.get_all_metrics().values() for key in values)


def test_without_a_closer_look_nothing_more_is_measured() -> None:
    sources, _, _ = by_hand(FORWARD, post_spike_steps=0)
    assert not any(ACTIVATION in of for of in sources)


def test_a_closer_look_leaves_what_the_user_asked_for_as_it_is() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    monitor.add_activation_metric("max", metric_regex="^0$")
    keys = []
    for step in range(30):
        loss = model(torch.randn(4, 8)).square().mean() * (1e4 if step == BAD else 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        keys.append({key for key in monitor.get_step_metrics() if key.startswith("activation")})
    assert keys == [{"activation/0/max"}] * 30
    assert [metric.name for metric in monitor._runtime.planner.registry.metrics if metric.source == ACTIVATION] == ["max"]


def test_the_same_parameters_with_and_without_a_closer_look() -> None:
    states = []
    for post_spike_steps in (0, 3):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        monitor = ModuleMonitor(model, spike_capture=gradmon.SpikeCapture(after=post_spike_steps), preset="standard")
        monitor.attach(optimizer)
        for step in range(30):
            loss = model(torch.randn(4, 8)).square().mean() * (1e3 if step == BAD else 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_run_directory_has_what_the_closer_look_saw(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer, on_spike=None, run_dir=tmp_path)
    for step in range(30):
        loss = model(torch.randn(4, 8)).square().mean() * (1e4 if step == BAD else 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    monitor.detach()
    run = gradmon.load_run(tmp_path)
    assert sorted(run.series("activation/1.linear/std")) == [BAD + 1, BAD + 2, BAD + 3]


def test_a_record_without_nan_has_no_origin() -> None:
    monitor, _ = watched(lambda y: y, preset="full")
    assert monitor._runtime.pipeline.last is not None
    assert nonfinite_origin(monitor._runtime.pipeline.last) == ""


def _scaled(accident: Callable[[Tensor], Tensor], init_scale: float) -> tuple[list[str], list[int]]:
    """A loop under a scaler with the accident in every step from 20 on; what was said, and the steps with outputs."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    monitor = gradmon.watch(model, optimizer, scaler=scaler)
    with heard() as said, gradmon.testing.collect_records(monitor) as records:
        for step in range(40):
            model[1].accident = accident if step >= BAD else None
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            monitor.get_step_metrics()
    return said, [record.step for record in records if ACTIVATION in record.tables]


def test_steps_that_a_scaler_refuses_again_and_again_are_looked_at_too() -> None:
    said, close = _scaled(FORWARD, init_scale=1024.0)
    assert close == [BAD + 3, BAD + 4, BAD + 5]
    assert [text for text in said if "first NaN or Inf" in text] == [
        "torch_gradmon: step 23: the forward pass has its first NaN or Inf in the output of 1 (32 of 32 elements); "
        "4 steps in a row were not applied"
    ]


def test_a_scaler_that_seeks_its_scale_is_no_news() -> None:
    said, close = _scaled(lambda y: y + (y - y.detach()) * 1e6, init_scale=2.0**125)  # the gradient is large
    assert close[:3] == [BAD + 3, BAD + 4, BAD + 5]  # later ones follow the spike of the first step that is applied
    assert not any("first NaN or Inf" in text for text in said)


def test_refused_steps_in_a_row_are_counted_also_where_they_are_not_monitored() -> None:
    looked = []
    for refused in (range(30, 37), (30, 40, 50)):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        monitor = gradmon.watch(model, optimizer, scaler=scaler, every=10, on_spike=None)
        for step in range(60):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 8)).square().mean() * (torch.inf if step in refused else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        looked.append([step for step in monitor.get_all_metrics() if step % 10])
    assert looked == [[33, 34, 35], []]


@pytest.mark.parametrize("when", ["before the step", "after it"])
def test_a_loss_that_is_logged_late_tells_where_nan_came_from(when: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer, run_dir=tmp_path)
    with heard() as said:
        for step in range(BAD + 3):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean() * (torch.inf if step == BAD else 1.0)
            loss.backward()
            if when == "before the step":
                monitor.log_scalar("loss", loss.detach())
            optimizer.step()
            if when == "after it":
                monitor.log_scalar("loss", loss.detach())
    assert not any("log the loss" in text for text in said)
    told = [text for text in said if f"step {BAD}: " in text and "and the loss is inf, so it came out of" in text]
    assert len(told) == 1
    assert ("the loss, which is not logged yet in this step, tells which" in said[0]) == (when == "after it")
    monitor.detach()
    assert "and the loss is inf" in str(gradmon.load_run(tmp_path).spikes[0])
