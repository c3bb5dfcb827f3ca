"""Values that travel behind the device: when records are made, who waits for them, and that nothing is lost or mixed up.

No device but a GPU computes behind the host's back, so here an arrival is told when it has come; one test runs on a GPU.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor
from torch_gradmon.step.buffer import DeviceToHostCopy


class _Slow:
    """Arrivals on the CPU that come when they are told to, and remember who waited."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.come = False
        self.landed_early = 0
        land = DeviceToHostCopy.land

        def wait(arrival: DeviceToHostCopy) -> list[Tensor]:
            self.landed_early += not self.come
            return land(arrival)

        monkeypatch.setattr(DeviceToHostCopy, "is_local", property(lambda _: False, lambda *_: None), raising=False)
        monkeypatch.setattr(DeviceToHostCopy, "is_ready", lambda _: self.come)
        monkeypatch.setattr(DeviceToHostCopy, "land", wait)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Slow]:
    return _Slow(monkeypatch)


class _Loop:
    def __init__(self, activations: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.monitor = ModuleMonitor(self.model, **options)
        self.monitor.add_gradient_metric("norm")
        if activations:
            self.monitor.add_activation_metric("norm")
        self.monitor.attach(self.optimizer)
        self.norms: list[float] = []

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(5, 3)).square().mean().backward()
        self.norms.append(self.model[0].weight.grad.double().norm().item())
        self.optimizer.step()


KEY = "gradient/0.weight/norm"


def test_nobody_waits_for_a_deferred_sink_and_it_gets_every_step_in_order(slow: _Slow) -> None:
    loop, sent = _Loop(), []
    loop.monitor.add_sink(lambda values, step: sent.append((step, values[KEY])), deferred=True)
    for _ in range(3):
        loop.step()
    assert [step for step, _ in sent] == [0]
    assert slow.landed_early == 1  # a step is never more than one behind, though it be waited for
    slow.come = True
    for _ in range(2):
        loop.step()
    assert [step for step, _ in sent] == [0, 1, 2, 3]
    assert slow.landed_early == 1
    loop.monitor.detach()
    assert [step for step, _ in sent] == [0, 1, 2, 3, 4]
    assert [value for _, value in sent] == pytest.approx(loop.norms, rel=1e-6)


def test_a_sink_that_is_not_deferred_is_fed_when_the_next_step_begins(slow: _Slow) -> None:
    loop, sent = _Loop(), []
    loop.monitor.add_sink(lambda values, step: sent.append(step))
    loop.step()
    assert sent == []
    loop.model(torch.randn(5, 3))
    assert sent == [0]
    assert slow.landed_early == 1


def test_without_a_sink_or_a_question_nothing_is_waited_for_until_two_steps_fly(slow: _Slow) -> None:
    loop = _Loop()
    loop.step()
    loop.step()
    assert slow.landed_early == 0
    assert loop.monitor.get_step_metrics()[KEY] == pytest.approx(loop.norms[1], rel=1e-6)
    assert slow.landed_early == 2
    assert sorted(loop.monitor.get_all_metrics()) == [0, 1]


def test_asked_in_the_middle_of_a_step_it_answers_with_the_one_before(slow: _Slow) -> None:
    loop = _Loop()
    loop.step()
    loop.optimizer.zero_grad()
    loss = loop.model(torch.randn(5, 3)).square().mean()
    assert loop.monitor.get_step_metrics()[KEY] == pytest.approx(loop.norms[0], rel=1e-6)
    loss.backward()
    loop.optimizer.step()
    assert sorted(loop.monitor.get_all_metrics()) == [0, 1]


def test_a_value_logged_after_the_step_lands_in_it_though_its_own_are_on_their_way(slow: _Slow) -> None:
    loop, sent = _Loop(), []
    loop.monitor.add_sink(lambda values, step: sent.append((step, values.get("loss"))), deferred=True)
    for number in range(4):
        loop.step()
        loop.monitor.log_scalar("loss", torch.tensor(float(number)))
        loop.monitor.log_scalar("loss", float(number))
        loop.monitor.log_context(batch=number)
    loop.monitor.detach()
    assert sent == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]


def test_tags_and_late_values_reach_the_run_directory_of_their_step(slow: _Slow, tmp_path: Any) -> None:
    loop = _Loop(run_dir=tmp_path)
    for number in range(3):
        loop.step()
        loop.monitor.log_scalar("loss", float(number))
        loop.monitor.log_context(batch=number)
    loop.monitor.detach()
    run = gradmon.load_run(tmp_path)
    assert run.steps == [0, 1, 2]
    assert [run.record(step).context["tags"] for step in run.steps] == [{"batch": number} for number in range(3)]
    assert run.series("loss") == {0: 0.0, 1: 1.0, 2: 2.0}
    assert all(run.record(step).context["overhead_fraction"] > 0 for step in run.steps)


def test_metrics_that_are_due_on_other_steps_are_those_of_their_own_step(slow: _Slow) -> None:
    loop = _Loop()
    loop.monitor.add_activation_metric("mean", every=2)
    loop.monitor.add_gradient_metric("mean", every=2)
    for _ in range(4):
        loop.step()
    found = loop.monitor.get_all_metrics()
    for step in range(4):
        assert ("activation/0/mean" in found[step]) == (step % 2 == 0)
        assert ("gradient/0.weight/mean" in found[step]) == (step % 2 == 0)
        assert "activation/0/norm" in found[step]


def test_after_a_step_that_was_not_monitored_there_are_no_values_of_another_one(slow: _Slow) -> None:
    loop = _Loop(every=2)
    loop.step()
    loop.step()
    assert loop.monitor.get_step_metrics() == {}
    assert sorted(loop.monitor.get_all_metrics()) == [0]


def test_by_hand_the_end_of_a_step_waits(slow: _Slow) -> None:
    loop = _Loop()
    for number in range(2):
        loop.monitor.begin_step(number)
        loop.step()
        loop.monitor.end_step()
        assert slow.landed_early == number + 1


def _spiked() -> _Loop:
    """A loop whose step 1 spikes, and raises when the next one begins."""
    loop = _Loop(on_spike="raise")
    loop.monitor._runtime.use_preset("standard")
    loop.step()
    with torch.no_grad():
        loop.model[0].weight.fill_(torch.nan)
    loop.step()
    return loop


def test_where_a_spike_raises_the_record_is_wanted_at_once(slow: _Slow) -> None:
    loop = _spiked()
    with pytest.raises(gradmon.core.errors.SpikeError, match="step 1"):
        loop.model(torch.randn(5, 3))


def test_a_refused_step_is_counted_once_its_predecessors_have_landed(slow: _Slow) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer, scaler=scaler, every=2, on_spike=None)
    for number in range(5):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(5, 3)).square().mean()).backward()
        if number == 1:  # not monitored, and refused
            model.weight.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
    found = monitor.get_all_metrics()
    assert [found[step]["gradmon/steps_not_applied"] for step in (0, 2, 4)] == [0, 1, 1]


def test_a_spike_that_raises_loses_no_late_value_of_its_step(slow: _Slow) -> None:
    loop = _spiked()
    loop.monitor.log_scalar("loss", 1.0)
    with pytest.raises(gradmon.core.errors.SpikeError, match="step 1"):
        loop.model(torch.randn(5, 3))
    assert loop.monitor.get_all_metrics()[1]["loss"] == 1.0


def test_late_values_depart_when_the_next_step_begins(slow: _Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = _Loop()
    loop.monitor.add_sink(lambda values, step: None, deferred=True)
    sent: list[int] = []
    init = DeviceToHostCopy.__init__

    def made(self: DeviceToHostCopy, *given: Any) -> None:
        init(self, *given)
        sent.append(len(self.host))

    monkeypatch.setattr(DeviceToHostCopy, "__init__", made)
    for number in range(4):
        loop.step()
        loop.monitor.log_scalar("loss", torch.tensor(float(number)))
        sent.clear()
        loop.optimizer.zero_grad()
        loss = loop.model(torch.randn(5, 3)).square().mean()
        assert sent == [1]  # and none later, which would be behind the work of the step that has begun
        loss.backward()
        loop.optimizer.step()
    assert [values.get("loss") for values in loop.monitor.get_all_metrics().values()][::2] == [0.0, 1.0, 2.0, 3.0]


def test_an_interrupt_while_waiting_loses_no_step(slow: _Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = _Loop()
    loop.step()

    def interrupted(_: DeviceToHostCopy) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DeviceToHostCopy, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.monitor.get_step_metrics()
    loop.step()
    assert sorted(loop.monitor.get_all_metrics()) == [0, 1]


def test_only_a_sink_that_wants_the_step_is_waited_for(slow: _Slow) -> None:
    loop = _Loop()
    loop.monitor.add_sink(lambda values, step: None, every=100)
    loop.step()  # number 0, which it wants
    loop.step()
    assert slow.landed_early == 1
    loop.model(torch.randn(5, 3))
    assert slow.landed_early == 1


def test_values_before_a_forward_that_is_not_seen_are_of_its_step_though_the_last_one_is_on_its_way(slow: _Slow) -> None:
    loop = _Loop(activations=False)  # no hook on a part either
    for step in range(3):
        loop.optimizer.zero_grad()
        loss = loop.model[2](loop.model[1](loop.model[0](torch.randn(5, 3)))).square().mean()
        loop.monitor.log_scalar("loss", step)
        loss.backward()
        loop.optimizer.step()
        loop.monitor.log_scalar("after", step)
    assert [(v["loss"], v["after"]) for v in loop.monitor.get_all_metrics().values()] == [(0, 0), (1, 1), (2, 2)]


def test_what_is_on_its_way_reaches_the_run_directory_without_detach(slow: _Slow, tmp_path: Any) -> None:
    def train() -> None:
        loop = _Loop(run_dir=tmp_path)
        for _ in range(4):
            loop.step()

    train()
    gc.collect()
    assert gradmon.load_run(tmp_path).steps == [0, 1, 2, 3]


def test_to_wait_for_a_device_that_is_behind_is_no_time_of_the_monitor(slow: _Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceToHostCopy, "wait", lambda _: time.sleep(0.3))
    monkeypatch.setattr(DeviceToHostCopy, "land", lambda arrival: list(arrival.host))
    loop = _Loop()
    for _ in range(4):
        loop.step()
    assert loop.monitor._runtime.fence.spent() < 0.6  # of two waits


@pytest.mark.gpu
def test_on_a_gpu_a_deferred_sink_stalls_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    monitor = gradmon.watch(model, optimizer, layers="all")
    sent: list[int] = []
    monitor.add_sink(lambda values, step: sent.append(step), deferred=True)
    x = torch.randn(16, 64, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for _ in range(12):
        step()
    waits: list[bool] = []
    synchronize = torch.cuda.Event.synchronize

    def waiting(event: torch.cuda.Event) -> None:
        waits.append(not event.query())
        synchronize(event)

    monkeypatch.setattr(torch.cuda.Event, "synchronize", waiting)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(12):
            step()
            monitor.log_scalar("late", x.sum())
            torch.cuda._sleep(10_000)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not any(waits)
    monitor.detach()
    assert sent == list(range(24))
