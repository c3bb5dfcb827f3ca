"""Plugins of the user's own: which methods are called when, what they may do, and what happens where they fail."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, ModuleMonitor, SpikeError
from torch_gradmon.core.moments import Column
from torch_gradmon.core.records import StepRecord
from torch_gradmon.monitor.options import BUILT_IN_PLUGINS
from torch_gradmon.plugins import ActiveStep, Mode, OptimizerContext, Plugin

from .loops import differences

EXAMPLES = Path(__file__).parent.parent / "examples" / "plugins"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.stem)
def test_example_plugins_import_public_names_alone(file: Path) -> None:
    imported = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)]
    ours = {node.module for node in imported if (node.module or "").startswith("torch_gradmon")}
    assert ours == {"torch_gradmon.plugins"}


class Loop:
    def __init__(self, *plugins: Plugin, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.monitor: ModuleMonitor | None = None
        if plugins or options:
            self.monitor = gradmon.watch(self.model, self.optimizer, plugins=plugins, **options)

    def step(self, scale: float = 1.0) -> None:
        self.optimizer.zero_grad()
        (scale * self.model(torch.ones(2, 3)).square().mean()).backward()
        self.optimizer.step()

    def go(self, steps: int) -> Loop:
        for _ in range(steps):
            self.step()
        return self

    def ended(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "rng": torch.get_rng_state()}


class Diary(Plugin):
    """Writes down every call that is worth a line."""

    name = "diary"

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_step_open(self, step: ActiveStep) -> None:
        self.lines.append(f"open {step.number}")

    def on_optimizer_step(self, optimizer: Any, has_closure: bool) -> None:
        self.lines.append("optimizer")

    def after_attempt(self, step: ActiveStep, applied: bool) -> None:
        self.lines.append(f"attempt {applied}")

    def on_step_closing(self, step: ActiveStep) -> None:
        self.lines.append("closing")

    def annotate(self, step: ActiveStep) -> None:
        step.annotations["note"] = f"step {step.number}"

    def on_record(self, record: StepRecord) -> None:
        self.lines.append(f"record {record.step} {record.context['note']}")

    def on_step_closed(self, step: ActiveStep) -> None:
        self.lines.append("closed")


_MONITORED = ["open 0", "optimizer", "attempt True", "closing", "record 0 step 0", "closed"]
_IDLE = ["optimizer", "attempt True"]


def test_the_order_of_the_calls_in_a_monitored_and_in_an_idle_step() -> None:
    diary = Diary()
    Loop(diary, every=2).go(2)
    assert diary.lines == [*_MONITORED, *_IDLE]


def test_a_plugin_may_watch_idle_steps() -> None:
    diary = Diary()
    diary.watches_idle_steps = True
    Loop(diary, every=2).go(2)
    assert diary.lines == [*_MONITORED, "open 1", "optimizer", "attempt True", "closing", "closed"]


def test_a_plugin_may_begin_to_watch_while_an_idle_step_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    diary = Diary()
    loop = Loop(diary, every=2)

    def closing(is_refused: bool) -> bool:
        diary.watches_idle_steps = True
        return False

    monkeypatch.setattr(loop.monitor._runtime.pipeline.detectors, "count_unmonitored", closing)
    loop.go(2)
    assert diary.lines == [*_MONITORED, *_IDLE, "closed"]


def test_only_what_a_plugin_overrides_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> None:
        raise AssertionError("called")

    class Nothing(Plugin):
        name = "nothing"

    for name, value in list(vars(Plugin).items()):
        if callable(value) and not name.startswith("_"):
            monkeypatch.setattr(Plugin, name, forbidden)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Loop(Nothing()).go(3)


class Annoying(Plugin):
    name = "annoying"


def _raises(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("of the plugin")


_HOOKS = [name for name in vars(Plugin) if name.startswith(("on_", "before_", "after_")) or name in ("annotate", "wants")]


@pytest.mark.parametrize("hook", [hook for hook in _HOOKS if hook != "wants"])
@pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning")
def test_a_plugin_that_fails_does_not_change_training(hook: str) -> None:
    bare = Loop().go(4).ended()
    plugin = type("Failing", (Annoying,), {hook: _raises, "watches_idle_steps": True})()
    loop = Loop(plugin, every=2).go(4)
    assert differences(bare, loop.ended()) == []
    assert loop.monitor is not None
    assert loop.monitor.get_all_metrics().keys() == {0, 2}
    loop.monitor.detach()


def test_a_plugin_that_fails_is_named_in_one_warning_and_counted() -> None:
    plugin = type("Failing", (Annoying,), {"on_record": _raises})()
    loop = Loop(plugin)
    with pytest.warns(
        GradmonWarning, match="on_record.. of the plugin 'annoying' failed, what it does is lost.*of the plugin"
    ) as seen:
        loop.go(3)
    assert len(seen) == 1
    assert loop.monitor is not None
    assert loop.monitor.warning_counts()["plugin:annoying"] == 3


def test_a_plugin_may_stop_for_good_when_it_fails() -> None:
    calls = []

    class Once(Annoying):
        stops_on_failure = True
        closed = False

        def on_record(self, record: StepRecord) -> None:
            calls.append(record.step)
            raise ZeroDivisionError

        def on_detach(self) -> None:
            self.closed = True

    plugin = Once()
    loop = Loop(plugin)
    with pytest.warns(GradmonWarning, match="it is off"):
        loop.go(3)
    assert calls == [0]
    assert loop.monitor is not None
    loop.monitor.detach()
    assert plugin.closed


def test_a_plugin_says_which_steps_are_monitored() -> None:
    class Odd(Plugin):
        name = "odd"

        def wants(self, step: int, asked: bool, ahead: int | None = 0) -> bool:
            return asked or step % 2 == 1

    monitor = Loop(Odd(), every=4).go(6).monitor
    assert monitor is not None
    assert list(monitor.get_all_metrics()) == [0, 1, 3, 4, 5]
    assert [step for step in range(6, 12) if monitor.is_step_monitored(step)] == [7, 8, 9, 11]


class SkipLarge(Plugin):
    """Skips steps whose gradients are large, in every step whatever the cadence."""

    name = "skip_large"
    requires_gradients = True

    def before_optimizer_step(self, step: ActiveStep, optimizer: OptimizerContext) -> None:
        assert step.buffer is not None
        rows = step.buffer.rows_of("gradient", sorted(step.buffer.names_of("gradient")))
        step.is_skipped = bool(rows[:, Column.SQUARE_SUM].sum() > 1e6)


def test_a_plugin_may_skip_a_step() -> None:
    loop = Loop(SkipLarge(), every=100).go(3)
    before = {name: value.clone() for name, value in loop.model.state_dict().items()}
    loop.step(scale=1e9)
    assert loop.monitor is not None
    assert loop.monitor.step_was_skipped
    assert differences(before, dict(loop.model.state_dict())) == []
    loop.step()
    assert not loop.monitor.step_was_skipped
    assert differences(before, dict(loop.model.state_dict())) != []


def test_a_plugin_may_stop_the_training() -> None:
    class Stop(Plugin):
        name = "stop"

        def before_optimizer_step(self, step: ActiveStep, optimizer: OptimizerContext) -> None:
            if step.number == 2:
                raise SpikeError("enough")

    loop = Loop(Stop())
    with pytest.raises(SpikeError, match="enough"):
        loop.go(5)
    assert loop.monitor is not None
    assert loop.monitor.last_record.step == 2


def test_unmonitored_steps_with_gradients_come_to_the_plugin_that_needs_them() -> None:
    seen: list[tuple[int, Mode, bool]] = []

    class Needs(Plugin):
        name = "needs"
        requires_gradients = True

        def on_step_closing(self, step: ActiveStep) -> None:
            seen.append((step.number, step.mode, step.buffer is not None and bool(step.buffer.names_of("gradient"))))

    Loop(Needs(), every=3).go(4)
    assert [each for each in seen if each[1] is not Mode.MONITORED] == [(1, Mode.RECORDED, True), (2, Mode.RECORDED, True)]


class Counts(Plugin):
    name = "counts"

    def __init__(self) -> None:
        self.steps = 0

    def on_record(self, record: StepRecord) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.steps = state["steps"]


def test_a_plugin_belongs_to_one_monitor(tmp_path: Path) -> None:
    plugin = Diary()
    first, second = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 1)
    of_first, of_second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second))
    with pytest.warns(GradmonWarning, match="watched already"):
        monitor = [gradmon.watch(first, of_first, plugins=[plugin]) for _ in range(2)][
            1
        ]  # the same model again: a cell of a notebook
    with pytest.raises(ValueError, match="the monitor of another Sequential uses"):
        gradmon.watch(second, of_second, plugins=[plugin], run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monitor.detach()
    gradmon.watch(second, of_second, plugins=[plugin])
    plugin.lines.clear()
    second(torch.ones(2)).sum().backward()
    of_second.step()
    assert plugin.lines == _MONITORED


def test_what_a_plugin_has_learned_is_part_of_the_state() -> None:
    monitor = Loop(Counts()).go(3).monitor
    assert monitor is not None
    state = monitor.state_dict()
    assert state["plugins"] == {"counts": {"steps": 3}}
    plugin = Counts()
    resumed = Loop(plugin)
    assert resumed.monitor is not None
    resumed.monitor.load_state_dict(state)
    resumed.go(2)
    assert plugin.steps == 5
    plain = Loop(every=1)
    assert plain.monitor is not None
    plain.monitor.load_state_dict(state)  # without the plugin its part is left out
    assert "plugins" not in plain.monitor.state_dict()


def test_a_plugin_measures_more_for_a_while() -> None:
    class More(Plugin):
        name = "more"

        def on_record(self, record: StepRecord) -> None:
            if record.step in (1, 3):
                metrics = [self.context.make_metric("activation", "std")] if record.step == 1 else None
                self.context.set_overlay(self.name, metrics)
                self.context.request_replan()

    loop = Loop(More())
    assert loop.monitor is not None
    with gradmon.testing.collect_records(loop.monitor) as records:
        loop.go(6)
    assert [record.step for record in records if "activation" in record.tables] == [2, 3]


class Misspelt(Plugin):
    name = "misspelt"

    def on_step_opened(self, step: ActiveStep) -> None:
        pass


class Taken(Plugin):
    name = "loop_audit"


@pytest.mark.parametrize(
    ("plugins", "error", "message"),
    [
        (Diary(), TypeError, r"plugins=.*must be a list of plugins, such as plugins=\[MyPlugin\(\)\]"),
        ([Diary], TypeError, "which is no instance of a subclass of torch_gradmon.plugins.Plugin"),
        ([Misspelt()], ValueError, "Misspelt.on_step_opened is no hook of a plugin.*on_step_open"),
        ([Diary(), Diary()], ValueError, "there is a plugin of the name 'diary' already; give Diary another name"),
        ([Taken()], ValueError, "there is a plugin of the name 'loop_audit' already"),
    ],
    ids=["no list", "a class", "misspelt", "twice", "built in"],
)
def test_bad_plugins_are_refused(plugins: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ModuleMonitor(nn.Linear(2, 2), plugins=plugins)


def test_the_names_of_the_plugins_that_a_monitor_brings() -> None:
    monitor = ModuleMonitor(nn.Linear(2, 2), on_spike="skip", max_overhead=0.5, checks=gradmon.Checks(data=True))
    names = {plugin.name for plugin in monitor._runtime.lifecycle.plugins}
    names.add(monitor._runtime.lifecycle.plugins.needed_clips().name)  # made for the first adaptive clip
    assert names | {"replica_check"} == BUILT_IN_PLUGINS  # which takes several ranks


# --- the example of the documentation ---------------------------------------------------------------------------------------


class StopWhenStill(Plugin):
    """Stops the training when a layer's update ratio stays below a bound."""

    name = "stop_when_still"

    def __init__(self, layer: str, bound: float = 1e-5, patience: int = 20) -> None:
        self.layer, self.bound, self.patience = layer, bound, patience
        self.steps = 0

    def on_record(self, record: StepRecord) -> None:
        ratios = [value for key, value in record.values.items() if key.source == "update" and key.name == self.layer]
        self.steps = self.steps + 1 if ratios and max(ratios) < self.bound else 0

    def before_optimizer_step(self, step: ActiveStep, optimizer: OptimizerContext) -> None:
        if self.steps >= self.patience:
            raise SpikeError(f"{self.layer} changed by less than {self.bound:g} of its norm in {self.steps} steps")


def test_the_early_stop_of_the_documentation() -> None:
    loop = Loop(StopWhenStill("0.weight", bound=1.0, patience=5))
    assert loop.monitor is not None
    loop.monitor.add_update_metric("ratio")
    with pytest.raises(SpikeError, match=r"0\.weight changed by less than 1 of its norm in 5 steps"):
        loop.go(20)
    assert loop.monitor.last_record.step == 5


def test_what_acts_and_checks_goes_on_behind_the_end_of_a_tracker() -> None:
    class Tracker:
        def log(self, values: dict[str, float], *, step: int) -> None:
            pass

        def before_finish(self, call: Callable[[], object]) -> None:
            self.finish = call

    tracker, model = Tracker(), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = gradmon.watch(model, optimizer, every=10, on_spike=gradmon.Skip(), log_to=tracker)
    with pytest.warns(gradmon.GradmonWarning) as told:
        for step in range(60):
            if step < 50:
                optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean()
            (loss * math.nan if step == 45 else loss).backward()
            optimizer.step()
            if step == 40:
                tracker.finish()
        monitor.detach()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert any("Gradients are not cleared" in str(each.message) for each in told)
