"""The overhead budget: how the interval follows what monitoring costs, told by a clock that the test owns."""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from torch_gradmon import GradmonWarning, ModuleMonitor, watch
from torch_gradmon.core.errors import WarningLog
from torch_gradmon.monitor import steps as step_closing
from torch_gradmon.plugins.overhead_budget import OverheadBudget


class _Run:
    """A training run in which a step takes a second and monitoring it ``cost`` of one."""

    def __init__(self, budget: OverheadBudget, asked: Callable[[int], bool] = lambda step: True) -> None:
        self.budget, self.step, self.now, self.spent = budget, 0, 0.0, 0.0
        self.asked = asked

    def go(self, steps: int, cost: Callable[[int], float]) -> list[int]:
        monitored = []
        for _ in range(steps):
            here = self.budget.wants(self.step, self.asked(self.step))
            own = cost(self.step) if here else 1e-5
            self.spent += own
            self.now += 1.0 + own
            if here:
                monitored.append(self.step)
            self.budget.count(self.step, here, self.spent, self.now)
            self.step += 1
        return monitored


class _Context:
    """What the budget needs of a monitor: its warnings, and a cadence."""

    def __init__(self) -> None:
        self.ask_cadence_again = lambda: None
        self.warn = WarningLog().add


def _budget(share: float = 0.01) -> OverheadBudget:
    budget = OverheadBudget(share, lambda: 0.0)
    budget.context = _Context()  # type: ignore[assignment]
    return budget


@pytest.mark.parametrize("cost", [0.011, 0.03, 0.2])
def test_it_widens_until_the_budget_is_kept_and_says_so(cost: float) -> None:
    run = _Run(_budget())
    with pytest.warns(GradmonWarning, match="max_overhead=0.01 of the time") as said:
        run.go(300, lambda step: cost)
    before = run.spent, run.now
    run.go(40 * run.budget.interval, lambda step: cost)
    assert (run.spent - before[0]) / (run.now - before[1]) <= 0.0101
    assert run.budget.interval <= 2 * cost / 0.01  # no wider than it takes
    assert len(said) >= 1


def test_within_the_budget_every_step_is_monitored_and_nothing_is_said() -> None:
    run = _Run(_budget())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run.go(100, lambda step: 0.009) == list(range(100))


def test_the_first_step_which_prepares_everything_does_not_count() -> None:
    run = _Run(_budget())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.go(100, lambda step: 10.0 if step == 0 else 0.005)
    assert run.budget.interval == 1


def test_a_costly_tenth_step_is_averaged_over_ten() -> None:
    run = _Run(_budget())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.go(200, lambda step: 0.05 if step % 10 == 9 else 0.002)  # 0.68 % in all
    assert run.budget.interval == 1


def test_it_narrows_again_when_steps_become_cheap() -> None:
    run = _Run(_budget())
    with pytest.warns(GradmonWarning):
        run.go(200, lambda step: 0.05)
    assert run.budget.interval > 1
    run.go(2000, lambda step: 0.001)
    assert run.budget.interval == 1


def test_it_thins_the_cadence_that_was_asked_for() -> None:
    run = _Run(_budget(), lambda step: step % 5 == 0)
    with pytest.warns(GradmonWarning):
        run.go(400, lambda step: 0.3)
    assert run.budget.interval > 1
    steps = run.go(200, lambda step: 0.3)
    assert steps
    assert all(later - earlier == 5 * run.budget.interval for earlier, later in itertools.pairwise(steps))


def test_a_cadence_that_hits_no_round_number_is_thinned_alike() -> None:
    run = _Run(_budget(), lambda step: step % 10 == 3)
    with pytest.warns(GradmonWarning):
        run.go(600, lambda step: 0.5)
    assert run.budget.interval > 1
    steps = run.go(2000, lambda step: 0.5)
    assert len(steps) > 2
    assert all(step % 10 == 3 for step in steps)


def test_one_hiccup_does_not_blind_it_for_long() -> None:
    run = _Run(_budget())
    with pytest.warns(GradmonWarning):
        run.go(100, lambda step: 30.0 if step == 52 else 0.002)
    run.go(100, lambda step: 0.002)
    assert run.budget.interval == 1


@pytest.mark.parametrize("bad", [0, 1, -0.1, 1.5, True, "0.01", float("nan")])
def test_what_is_no_share_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match=r"max_overhead=.*must be a number between 0 and 1, such as 0.01"):
        ModuleMonitor(nn.Linear(2, 2), max_overhead=bad)  # type: ignore[arg-type]


def test_a_monitor_that_exceeds_its_budget_leaves_out_steps() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, max_overhead=0.0001, on_spike=None)
    monitor.add_gradient_metric("slow", lambda g: (time.sleep(0.003), g.sum())[1])
    monitored = []

    def train() -> None:
        for step in range(40):
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if monitor.get_step_metrics():
                monitored.append(step)

    with pytest.warns(GradmonWarning, match="max_overhead=0.0001"):
        train()
    assert monitored[:4] == [0, 1, 2, 3]
    assert len(monitored) <= 10


# --- the warning about the cost ----------------------------------------------------------------------------------------------------


class _Clock:
    """A loop in which training takes ``training`` seconds a step, and the monitor ``own``."""

    def __init__(self, training: float, own: float) -> None:
        self.training, self.own, self.now, self.total = training, own, 0.0, 0.0
        self.complaints = WarningLog()

    def spent(self) -> float:
        return self.total

    def run(self, notice: step_closing.CostNotice, steps: int) -> None:
        for _ in range(steps):
            self.now += self.training + self.own
            self.total += self.own
            notice.monitored += 1
            if notice.monitored == notice.due:
                notice.look()


@pytest.mark.parametrize(
    ("every", "remedy"), [(1, "every=10 brings"), (2, "every=20 brings"), (None, "one in ten of these steps brings")]
)
def test_cost_warning_names_share_and_remedy(monkeypatch: pytest.MonkeyPatch, every: int | None, remedy: str) -> None:
    clock = _Clock(training=0.002, own=0.003)
    monkeypatch.setattr(step_closing, "PATIENCE", 5.0)
    monkeypatch.setattr(step_closing, "perf_counter", lambda: clock.now)
    notice = step_closing.CostNotice(clock, every)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clock.run(notice, 1700)  # 4.95 seconds of its own after the first 50
    with pytest.warns(GradmonWarning, match=rf"60% of the time of this loop, 3 ms for each.*{remedy} that to about 13%"):
        clock.run(notice, 1000)
    assert not notice.due
    assert clock.complaints.counts["cost"] == 1


def test_cost_warning_is_absent_below_a_third(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(training=0.0062, own=0.003)
    monkeypatch.setattr(step_closing, "PATIENCE", 5.0)
    monkeypatch.setattr(step_closing, "perf_counter", lambda: clock.now)
    notice = step_closing.CostNotice(clock, 1)  # type: ignore[arg-type]
    clock.run(notice, 2000)
    assert not notice.due
    assert not clock.complaints.counts


def test_cost_warning_comes_from_a_real_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_closing, "PATIENCE", 0.0)
    monkeypatch.setattr(step_closing, "LARGE", 0.0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = watch(model, optimizer, every=3)
    with pytest.warns(GradmonWarning, match="every=30 brings") as caught:
        for _ in range(3 * 60):
            optimizer.zero_grad()
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
    assert len(caught) == 1
    monitor.detach()


# --- what log_scalar costs ---------------------------------------------------------------------------------------------------------


def _calls(function: Callable[[], object]) -> int:
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count - 1


@pytest.mark.parametrize("every", [1, 10])
def test_log_scalar_makes_few_calls_after_first(every: int) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = watch(model, optimizer, every=every)
    seen = {}
    monitor.add_sink(lambda values, step: seen.update({step: values["loss"]}))
    losses, most = {}, 0
    for step in range(31):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
        calls = _calls(lambda loss=loss: monitor.log_scalar("loss", loss.detach()))  # type: ignore[misc]
        loss.detach().zero_()  # the value was read, not the tensor kept
        most = max(most, calls) if step > 1 else 0
    assert most <= 12
    assert monitor.get_step_metrics().get("loss") == (losses[30] if every == 1 or 30 % every == 0 else None)
    monitor.detach()
    assert seen == {step: value for step, value in losses.items() if step % every == 0}


def test_log_scalar_time_is_part_of_the_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 1)
    monitor = watch(model, torch.optim.SGD(model.parameters(), 0.1))
    fence = monitor._runtime.fence
    monitor.log_scalar("loss", 1.0)
    before = fence.spent()
    for value in (2.0, 3):  # a float and an int wait for the next event
        monitor.log_scalar("loss", value)
        after = fence.spent()
        assert after > before
        before = after
    monitor.log_scalar("other", 1.0)
    assert fence.spent() > before
