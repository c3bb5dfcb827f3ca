"""Idle steps that are only counted: they have the same numbers and the same effects, and end where anything has to be seen."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from tests.watching import watch_with
from torch_gradmon.monitor.program import StepProgram
from torch_gradmon.plugins import Plugin, loop_audit


@pytest.fixture(autouse=True)
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop is trusted after two steps already."""
    monkeypatch.setattr(loop_audit, "TRUSTED", 2)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the steps that were only counted."""
    steps: list[int] = []
    original = StepProgram.idle_step_ended

    def step_ended(self: StepProgram, *arguments: Any) -> bool:
        is_all = original(self, *arguments)
        if is_all:
            steps.append(self._state.ended or 0)
        return is_all

    monkeypatch.setattr(StepProgram, "idle_step_ended", step_ended)
    return steps


class Loop:
    """A loop whose steps are ``every`` apart, and what happens in it besides."""

    def __init__(self, every: int = 10, optimizer: Any = torch.optim.SGD, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.monitor = watch_with(self.model, self.optimizer, every=every, **options)
        self.records: list[int] = []
        self.monitor.add_sink(lambda values, step: self.records.append(step))

    def backward(self) -> None:
        self.model(torch.randn(8, 3)).square().mean().backward()

    def step(self, micro_batches: int = 1) -> None:
        self.optimizer.zero_grad()
        for _ in range(micro_batches):
            self.backward()
        self.optimizer.step()

    def go(self, steps: int, **arguments: Any) -> Loop:
        for _ in range(steps):
            self.step(**arguments)
        return self


class _Watcher(Plugin):
    """Sees the steps that close."""

    name = "watcher"

    def __init__(self) -> None:
        self.closed: list[int] = []

    def on_step_closed(self, step: Any) -> None:
        self.closed.append(step.number)


def test_most_idle_steps_are_only_counted_and_the_monitored_ones_are_the_same(counted: list[int]) -> None:
    loop = Loop(every=10).go(101)
    loop.monitor.detach()
    assert loop.records == list(range(0, 101, 10))
    assert loop.monitor.current_step == 100
    assert loop.monitor.get_step_counts().attempted == 101
    assert len(counted) > 40
    assert not {step % 10 for step in counted} & {0, 9}  # nor the last one before a monitored one


def test_values_are_those_of_a_loop_in_which_nothing_rests(monkeypatch: pytest.MonkeyPatch, counted: list[int]) -> None:
    def values(steps: int) -> list[dict[str, float]]:
        loop = Loop(every=7)
        loop.monitor.add_activation_metric("mean")
        loop.monitor.add_update_metric("norm")
        loop.go(steps)
        return [
            {key: value for key, value in step.items() if "overhead" not in key}
            for step in loop.monitor.get_all_metrics().values()
        ]

    resting = values(60)
    assert counted
    monkeypatch.setattr(StepProgram, "begin", lambda self, steps: None)
    assert values(60) == resting


def test_training_is_the_same() -> None:
    watched = Loop(every=10).go(60).model.state_dict()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
    assert all(torch.equal(value, watched[name]) for name, value in model.state_dict().items())


def test_the_number_of_the_step_is_right_at_any_moment() -> None:
    loop = Loop(every=10)
    for number in range(60):
        loop.optimizer.zero_grad()
        loop.backward()
        assert loop.monitor.current_step == number
        loop.optimizer.step()
        assert loop.monitor.current_step == number
        assert bool(loop.monitor.get_step_metrics()) == (number % 10 == 0)


def test_micro_batches_and_evaluation_do_not_count_as_steps(counted: list[int]) -> None:
    loop = Loop(every=10)
    for number in range(60):
        loop.step(micro_batches=3)
        with torch.no_grad():
            loop.model(torch.randn(8, 3))
        loop.model.eval()
        with torch.no_grad():
            loop.model(torch.randn(8, 3))
        loop.model.train()
        assert loop.monitor.current_step == number
    loop.monitor.detach()
    assert counted
    assert loop.records == list(range(0, 60, 10))


def test_a_loop_that_begins_to_train_in_evaluation_mode_is_followed_again(counted: list[int]) -> None:
    loop = Loop(every=10).go(24)
    assert counted[-1] == 23
    loop.model.eval()
    loop.go(24)
    loop.monitor.detach()
    assert loop.monitor.current_step == 47
    assert loop.records == [0, 10, 20, 30, 40]
    assert max(counted) == 23


def test_values_logged_in_idle_steps_are_dropped_and_those_of_monitored_ones_are_kept() -> None:
    loop = Loop(every=10)
    seen: dict[int, dict[str, float]] = {}
    loop.monitor.add_sink(lambda values, step: seen.__setitem__(step, dict(values)))
    for number in range(60):
        loop.optimizer.zero_grad()
        loop.backward()
        loop.monitor.log_scalar("early", float(number))
        loop.optimizer.step()
        loop.monitor.log_scalar("late", float(number))
    loop.monitor.detach()
    assert {step: (values["early"], values["late"]) for step, values in seen.items()} == {
        number: (float(number), float(number)) for number in range(0, 60, 10)
    }


def test_tags_given_before_a_step_are_of_that_step() -> None:
    loop = Loop(every=10)
    for number in range(60):
        loop.monitor.log_context(batch=number)
        loop.step()
    records = [record for record in loop.monitor._runtime.pipeline.history.records() if record.step % 10 == 0]
    assert [record.context["tags"]["batch"] for record in records] == [record.step for record in records]


@pytest.mark.parametrize(
    "change",
    [
        lambda monitor: monitor.set_detail(every=1),
        lambda monitor: monitor.load_state_dict({**monitor.state_dict(), "next_step": 60}),
    ],
    ids=["detail", "state"],
)
def test_what_decides_about_steps_holds_from_the_next_step_on(change: Callable[[Any], None], counted: list[int]) -> None:
    loop = Loop(every=30).go(24)
    assert counted[-1] == 23
    change(loop.monitor)
    loop.step()
    assert loop.monitor.get_step_metrics()


def test_a_pause_and_steps_by_hand_hold_at_once(counted: list[int]) -> None:
    loop = Loop(every=30).go(24)
    assert counted[-1] == 23
    with loop.monitor.no_monitor():
        loop.go(3)
    loop.step()
    assert loop.monitor.current_step == 24
    assert loop.monitor.begin_step(60)
    loop.step()
    loop.monitor.end_step()
    assert loop.monitor.get_step_metrics()["gradmon/grad_norm"] > 0


def test_detach_in_the_middle_of_a_counted_step_drops_it_and_attach_goes_on(counted: list[int]) -> None:
    loop = Loop(every=30).go(24)
    loop.backward()
    loop.monitor.detach()
    loop.monitor.attach(loop.optimizer)
    loop.go(7)
    assert loop.monitor.current_step == 30
    assert loop.monitor.get_step_metrics()


def test_an_optimizer_that_is_not_attached_is_found(counted: list[int]) -> None:
    loop = Loop(every=1000).go(24)
    assert counted[-1] == 23
    other = torch.optim.SGD(loop.model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(60):
            other.zero_grad()
            loop.backward()
            other.step()
    assert any("attach" in str(warning.message) for warning in caught)


def test_a_step_without_a_forward_is_counted_as_before(counted: list[int]) -> None:
    loop = Loop(every=30).go(24)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about steps without gradients of their own
        for _ in range(5):
            loop.optimizer.step()
    loop.go(1)
    assert loop.monitor.get_step_counts().attempted == 30
    loop.step()
    assert loop.monitor.get_step_metrics()
    assert loop.monitor.current_step == 30


def test_a_request_from_another_process_is_seen_within_a_second(tmp_path: Path, counted: list[int]) -> None:
    loop = Loop(every=1000, run_dir=tmp_path).go(24)
    assert counted[-1] == 23
    assert loop.monitor._runtime.loop is not None
    loop.monitor._runtime.loop.program._due = 0.0
    loop.go(3)
    assert counted[-2:] == [24, 26]  # the first one ends the stretch, the next one is followed


class Twice(torch.optim.SGD):
    """Calls the hooks twice for each step."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class WithClosure:
    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def step(self) -> None:
        def closure() -> Any:
            self.loop.optimizer.zero_grad()
            self.loop.backward()
            return torch.zeros(())

        self.loop.optimizer.step(closure)


def test_where_hooks_fire_twice_nothing_is_only_counted(counted: list[int]) -> None:
    loop = Loop(every=10, optimizer=Twice).go(60)
    loop.monitor.detach()
    assert loop.monitor.get_step_counts().attempted == 60
    assert loop.records == list(range(0, 60, 10))


def test_closures_are_followed(counted: list[int]) -> None:
    loop = Loop(every=10)
    closures = WithClosure(loop)
    for _ in range(60):
        closures.step()
    loop.monitor.detach()
    assert not counted
    assert loop.records == list(range(0, 60, 10))


@pytest.mark.parametrize(
    "options", [{"on_spike": "skip"}, {"max_overhead": 0.5}, {"spike_capture": gradmon.SpikeCapture(before=4)}], ids=str
)
def test_plugins_that_need_idle_steps_get_them(options: dict[str, Any], counted: list[int]) -> None:
    loop = Loop(every=10, **options).go(60)
    assert not counted
    assert loop.monitor.get_step_counts().attempted == 60


def test_a_function_that_selects_steps_is_asked_once_for_each(counted: list[int]) -> None:
    torch.manual_seed(0)
    model, asked = nn.Linear(3, 1), []

    def wanted(step: int) -> bool:
        asked.append(step)
        return step % 10 == 0

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gradmon.watch(model, optimizer, every=wanted)
    for _ in range(40):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
    assert not counted
    assert sorted(set(asked)) == list(range(41))


def test_a_scaler_is_followed(counted: list[int]) -> None:
    torch.manual_seed(0)
    model, scaler = nn.Linear(3, 1), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = gradmon.watch(model, optimizer, every=10, scaler=scaler)
    for number in range(60):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 3)).square().mean() * (torch.inf if number == 33 else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert not counted
    assert monitor.get_step_counts().overflowed == 1
    assert monitor.current_step == 59


def test_a_spike_is_found_after_a_stretch(counted: list[int]) -> None:
    loop = Loop(every=10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(800):
            loop.optimizer.zero_grad()
            (loop.model(torch.randn(8, 3)).square().mean() * (1e4 if number == 700 else 1)).backward()
            loop.optimizer.step()
    assert counted
    assert any("step 700" in str(warning.message) for warning in caught)


def test_a_plugin_of_the_user_sees_the_steps_that_it_asks_for(counted: list[int]) -> None:
    class Sees(Plugin):
        name = "sees"

        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_optimizer_step(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
            self.steps.append(self.context.coming_step)

    class Misses(Sees):
        name = "misses"
        may_miss = 3

    sees, misses = Sees(), Misses()
    Loop(every=10, plugins=[sees]).go(60)
    assert (sees.steps, counted) == ([*range(60)], [])
    Loop(every=10, plugins=[misses]).go(60)
    assert sorted([*misses.steps, *counted]) == [*range(60)]
    assert len(counted) > 10


def test_plugins_know_what_they_have_missed_when_the_state_is_saved_and_at_the_end(counted: list[int]) -> None:
    class Misses(Plugin):
        name = "misses"
        may_miss = 1000

        def after_attempt(self, step: Any, applied: bool) -> None:
            pass

        def state_dict(self) -> int | None:
            return self.context.last_step

        def on_detach(self) -> None:
            self.last = self.context.last_step

    misses = Misses()
    loop = Loop(every=30, plugins=[misses]).go(12)
    assert counted[-1] == 11
    assert loop.monitor.state_dict()["plugins"] == {"misses": 11}
    loop.go(8).monitor.detach()
    assert misses.last == 19


def test_a_plugin_that_requires_gradients_in_some_idle_steps_gets_them() -> None:
    class Some(Plugin):
        name = "some"

        def __init__(self) -> None:
            self.seen: list[int] = []

        @property
        def requires_gradients(self) -> bool:  # type: ignore[override]
            return (self.context.last_step or 0) % 7 == 0

        def on_step_closing(self, step: Any) -> None:
            if not step.is_monitored and step.buffer is not None:
                self.seen.append(step.number)

    some = Some()
    Loop(every=30, plugins=[some]).go(30)
    assert some.seen == [1, 8, 15, 22, 29]


def test_a_plugin_that_begins_to_watch_within_a_step_sees_its_end() -> None:
    sees = _Watcher()
    loop = Loop(every=30, plugins=[sees]).go(5)
    loop.backward()
    sees.watches_idle_steps = True
    loop.optimizer.step()
    loop.go(2)
    assert sees.closed == [0, 5, 6, 7]


@pytest.mark.parametrize("answer", [None, 1, []], ids=str)
def test_a_plugin_may_answer_by_a_property(answer: Any, counted: list[int]) -> None:
    class Answers(Plugin):
        name = "answers"
        is_asked = False

        @property
        def watches_idle_steps(self) -> Any:  # type: ignore[override]
            return answer if self.is_asked else False

        def on_step_closed(self, step: Any) -> None:
            pass

    answers = Answers()
    loop = Loop(every=30, plugins=[answers]).go(5)
    answers.is_asked = True
    loop.go(30)
    assert counted == []
    assert loop.monitor.get_step_counts().attempted == 35


def test_a_plugin_whose_answer_fails_warns_and_sees_all_steps(counted: list[int]) -> None:
    class Fails(Plugin):
        name = "fails"

        def after_attempt(self, step: Any, applied: bool) -> None:
            pass

        @property
        def may_miss(self) -> int:  # type: ignore[override]
            raise KeyError("x")

    with pytest.warns(gradmon.GradmonWarning, match="may_miss"):
        loop = Loop(every=30, plugins=[Fails()]).go(10)
    assert counted == []
    assert set(loop.monitor.warning_counts()) == {"plugin:fails"}


class Fragile(torch.optim.SGD):
    """Its step raises where ``fails`` is set."""

    fails = False

    def step(self, closure: Any = None) -> None:
        if self.fails:
            raise RuntimeError("out of memory")
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(parameter.grad, alpha=-0.01)


class OwnHooks(torch.optim.SGD):
    """Keeps its hooks under other names than torch does."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.before, self.after = self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks
        del self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self._registered(self.before, hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self._registered(self.after, hook)

    @staticmethod
    def _registered(hooks: Any, hook: Any) -> Any:
        handle = torch.utils.hooks.RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def step(self, closure: Any = None) -> None:
        for hook in self.before.values():
            hook(self, (self,), {})
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(parameter.grad, alpha=-0.01)
        for hook in self.after.values():
            hook(self, (self,), {})

    step.hooked = True  # type: ignore[attr-defined]


def test_an_optimizer_with_hooks_of_its_own_kind_goes_on() -> None:
    loop = Loop(every=10, optimizer=OwnHooks).go(60)
    loop.monitor.detach()
    assert loop.records == list(range(0, 60, 10))
    assert loop.monitor.get_step_counts().attempted == 60


def test_a_step_that_raises_was_not_applied(counted: list[int]) -> None:
    loop = Loop(every=10, optimizer=Fragile).go(5)
    assert counted[-1] == 4
    loop.optimizer.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        loop.step()
    loop.optimizer.fails = False
    loop.go(9).monitor.detach()
    counts = loop.monitor.get_step_counts()
    assert (counts.applied, counts.interrupted, counts.overflowed) == (14, 1, 0)
    assert loop.records == [0, 10]


def test_a_closure_and_a_scaler_that_come_late_are_followed(counted: list[int]) -> None:
    loop = Loop(every=30, optimizer=lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, fused=True)).go(5)
    WithClosure(loop).step()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with pytest.warns(gradmon.GradmonWarning, match="a GradScaler was noticed only in this step"):
        for number in range(40):
            loop.optimizer.zero_grad()
            loss = loop.model(torch.randn(8, 3)).square().mean() * (torch.inf if number < 3 else 1)
            scaler.scale(loss).backward()
            scaler.step(loop.optimizer)
            scaler.update()
    assert counted == [3, 4]
    assert (loop.monitor.get_step_counts().applied, loop.monitor.get_step_counts().overflowed) == (43, 3)


def test_a_state_loaded_within_a_counted_step_begins_a_segment() -> None:
    loop = Loop(every=10).go(4)
    state = loop.monitor.state_dict()
    loop.go(37)
    loop.backward()
    loop.monitor.load_state_dict(state)
    with pytest.warns(gradmon.GradmonWarning, match="step 4 comes after step 41"):
        loop.go(30)
    assert loop.records == [0, 10, 20, 30, 40, 10, 20, 30]


def test_a_plugin_may_watch_from_its_beginning_and_stop(counted: list[int]) -> None:
    watcher = _Watcher()
    watcher.watches_idle_steps = True
    loop = Loop(every=30, plugins=[watcher]).go(10)
    assert (watcher.closed, counted) == ([*range(10)], [])
    watcher.watches_idle_steps = False
    loop.go(10)
    assert watcher.closed == [*range(10)]
    assert counted


def test_a_plugin_may_begin_to_watch_from_another_thread() -> None:
    watcher = _Watcher()
    loop = Loop(every=30, plugins=[watcher]).go(8)
    thread = threading.Thread(target=setattr, args=(watcher, "watches_idle_steps", True))
    thread.start()
    thread.join()
    loop.go(2)
    assert watcher.closed == [0, 8, 9]


@pytest.mark.parametrize("watches", [False, True])
def test_a_class_may_have_its_own_beginning(watches: bool, counted: list[int]) -> None:
    @dataclass(eq=False)
    class Field(_Watcher):
        watches_idle_steps: bool = watches

        def __post_init__(self) -> None:
            super().__init__()

    class Attribute(_Watcher):
        watches_idle_steps = watches

    class Inherited(Attribute):
        _watching = "of the plugin itself"

    for kind in (Field, Attribute, Inherited):
        watcher = kind()
        assert watcher.watches_idle_steps is watches
        loop = Loop(every=30, plugins=[watcher]).go(6)
        assert watcher.closed == ([*range(6)] if watches else [0])
        watcher.watches_idle_steps = False
        loop.go(6)
        watcher.watches_idle_steps = True
        loop.go(1)
        assert watcher.closed == ([*range(6), 12] if watches else [0, 12])
        assert counted
        counted.clear()


@pytest.mark.parametrize("is_attached_again", [False, True])
def test_a_plugin_that_moves_on_is_heard_by_each_of_its_monitors(is_attached_again: bool) -> None:
    watcher = _Watcher()
    first = Loop(every=30, plugins=[watcher]).go(5)
    if is_attached_again:
        first.monitor.detach()
        second = Loop(every=30, plugins=[watcher]).go(5)
        second.monitor.detach()
        first.monitor.attach(first.optimizer)
        first.go(5)
    else:
        gradmon.ModuleMonitor(first.model, plugins=[watcher])  # never attached
    watcher.closed.clear()
    before = first.monitor.get_step_counts().attempted
    watcher.watches_idle_steps = True
    first.go(2)
    assert watcher.closed == [before, before + 1]


def test_the_time_of_counted_steps_is_overhead() -> None:
    loop = Loop(every=30).go(5)
    fence = loop.monitor._runtime.fence
    before = fence.spent()
    loop.go(20)
    loop.backward()
    loop.monitor.set_detail(every=1)  # the loop is followed again
    assert fence.spent() - before > 20e-6


def test_tags_of_a_counted_step_are_not_of_the_next_one() -> None:
    loop = Loop(every=30).go(5)
    loop.backward()
    loop.monitor.log_context(batch=5)
    loop.optimizer.step()
    loop.monitor.set_detail(every=1)
    loop.step()
    assert loop.monitor._runtime.pipeline.history.records()[-1].context.get("tags") is None


def test_an_evaluation_with_gradients_in_a_step_is_no_step(counted: list[int]) -> None:
    loop = Loop(every=30).go(5)
    for number in range(5, 9):
        loop.optimizer.zero_grad()
        loop.backward()
        loop.model.eval()
        torch.autograd.grad(loop.model(torch.randn(8, 3)).sum(), list(loop.model.parameters()))
        loop.model.train()
        loop.optimizer.step()
        assert loop.monitor.current_step == number


def test_an_optimizer_that_is_replaced_is_reported_in_the_next_forward(counted: list[int]) -> None:
    loop = Loop(every=1000).go(24)
    assert counted[-1] == 23
    with pytest.warns(gradmon.GradmonWarning, match="the attached optimizers are gone"):
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.01)
        loop.backward()


def test_a_model_called_in_another_thread_is_followed(counted: list[int]) -> None:
    loop = Loop(every=1000).go(24)
    caller = threading.Thread(target=loop.model, args=(torch.randn(8, 3),))
    caller.start()
    caller.join()
    loop.optimizer.step()
    assert (loop.monitor.current_step, counted[-1]) == (24, 23)


def test_steps_that_the_script_ends_itself_are_measured_at_the_same_numbers() -> None:
    loop = Loop(every=30).go(22)
    for _ in range(80):
        loop.backward()
        loop.monitor.end_step()
    loop.monitor.detach()
    assert loop.records == [0, 30, 60, 90]


def test_the_time_of_counted_steps_is_part_of_the_overhead(counted: list[int]) -> None:
    loop = Loop(every=1000).go(24)
    before = loop.monitor._runtime.fence.spent()
    loop.go(10)
    assert len({*counted} & {*range(24, 34)}) > 5
    assert loop.monitor._runtime.fence.spent() > before
