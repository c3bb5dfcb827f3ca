"""A live change of detail in one process: what it measures, when it begins and ends, and that training does not see it."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, ModuleMonitor, SpikeDetector, load_run
from torch_gradmon.analysis.spike_report import explain
from torch_gradmon.core.errors import WarningLog
from torch_gradmon.plugins.overhead_budget import OverheadBudget
from torch_gradmon.runs import detail_request as change
from torch_gradmon.runs.detail_request import DetailRequest, RequestFile, detail_request, request_text

from . import loops
from .reads import HostReads

EVERY = 100


class Loop:
    """A small training, step by step."""

    def __init__(self, *, monitored: bool = True, optimizers: int = 1, **arguments: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        parts = [self.model.parameters()] if optimizers == 1 else [self.model[0].parameters(), self.model[2].parameters()]
        self.optimizers = [torch.optim.AdamW(part, lr=1e-2) for part in parts]
        self.monitor: ModuleMonitor | None = None
        if monitored:
            self.monitor = gradmon.watch(self.model, *self.optimizers, **{"every": EVERY, "on_spike": None, **arguments})
        self.seen: list[int] = []
        self.keys: dict[int, set[str]] = {}

    def go(self, steps: int, each: Callable[[int], Any] = lambda step: None) -> Loop:
        for _ in range(steps):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.model(torch.randn(16, 4)).square().mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()
            if self.monitor is not None:
                step = self.monitor.current_step
                assert step is not None
                if values := self.monitor.get_step_metrics():
                    self.seen.append(step)
                    self.keys[step] = set(values) - {"gradmon/spike_score"}  # detectors see the steps between as well
                each(step)
        return self

    @property
    def tables(self) -> dict[str, Any]:
        assert self.monitor is not None
        record = self.monitor._runtime.pipeline.last
        return {} if record is None else dict(record.tables)

    @property
    def hooks(self) -> list[int]:
        """How many of each kind are on modules and parameters, but for the one that audits the loop."""
        modules = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in self.model.modules()]
        on_parameters = [len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in self.model.parameters()]
        return [*modules, *on_parameters]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run directory is looked into after every step."""
    monkeypatch.setattr(change, "PERIOD", 0.0)


def put(directory: Path, **arguments: Any) -> None:
    """Ask from outside, without the command."""
    session = load_run(directory)._reader.meta["tune"]["session"]
    change.write(directory, detail_request(**{"number": 1, **arguments}), session)


# --- what it says ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "one",
    [
        detail_request(1, "full", 200, 0, 1),
        detail_request(every=7, number=3),
        detail_request(preset="minimal", steps=1, number=2**53 - 1),
        detail_request(number=5),
        detail_request(every=2**53 - 1, first=2**53 - 2, steps=2**53 - 1, number=1),
    ],
)
def test_a_change_survives_the_numbers_and_the_file_it_travels_in(one: DetailRequest, tmp_path: Path) -> None:
    numbers = torch.tensor(one.numbers(), dtype=torch.float64)
    assert DetailRequest.of_numbers((numbers + torch.zeros(5)).tolist()) == one
    assert any(one.numbers())
    change.write(tmp_path, one, "me")
    assert change.read(tmp_path / change.FILE_NAME, one.number - 1) == (one, "me")
    assert [path.name for path in tmp_path.iterdir()] == [change.FILE_NAME]


def test_a_number_that_leaves_none_for_later_requests_is_ignored(tmp_path: Path) -> None:
    change.write(tmp_path, detail_request(every=1, number=2**53 - 1), "me")
    with pytest.raises(ValueError, match="far above that of the last one, 7"):
        change.read(tmp_path / change.FILE_NAME, 7)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has no users of files")
def test_a_request_of_another_user_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change.write(tmp_path, detail_request(every=1, number=1), "me")
    owner = os.stat(tmp_path / change.FILE_NAME).st_uid
    found = os.fstat
    monkeypatch.setattr(os, "geteuid", lambda: owner + 5)
    monkeypatch.setattr(os, "fstat", lambda handle: _of_user(found(handle), owner + 4))
    with pytest.raises(ValueError, match=f"user {owner + 4} made it, and the training is of user {owner + 5}"):
        change.read(tmp_path / change.FILE_NAME)


def _of_user(found: os.stat_result, user: int) -> os.stat_result:
    return os.stat_result((*found[:4], user, *found[5:10]))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"every": 0}, "every=0 must be a positive int"),
        ({"every": True}, "every=True must be a positive int"),
        ({"steps": -1}, "steps=-1 must be a positive int"),
        ({"preset": "ful"}, "preset='ful' is not one of 'minimal', 'standard', 'full'; did you mean full"),
        ({"first": -1}, "first=-1 must be a whole number of at least 0"),
        ({"first": 1.5}, r"first=1\.5 must be a whole number"),
        ({"every": 2**53}, "is too large; no training has that many steps"),
    ],
)
def test_what_is_no_change_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        detail_request(**arguments)


def test_words() -> None:
    assert request_text(detail_request(5, None, 1, 12).facts()) == "steps divisible by 5, for 1 step, from step 12 on"
    assert request_text({}) == "what the script asked for"


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change.write(tmp_path, detail_request(every=1, number=1), "me")

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        change.write(tmp_path, detail_request(every=2, number=2), "me")
    assert [path.name for path in tmp_path.iterdir()] == [change.FILE_NAME]
    assert change.read(tmp_path / change.FILE_NAME)[0].every == 1


# --- when it begins and ends ---------------------------------------------------------------------------------------------------------


def test_from_within_it_begins_with_the_next_step_and_ends_by_itself() -> None:
    loop = Loop(preset="minimal").go(5)
    assert loop.monitor is not None
    before, hooks = loop.monitor._runtime.planner.registry.metrics, loop.hooks
    assert loop.monitor.last_record.detail is None
    loop.monitor.set_detail(every=1, preset="full", steps=4)
    loop.go(3)
    assert loop.monitor.last_record.detail == DetailRequest(1, "full", 1, None, 1).facts()
    assert set(loop.tables) >= {"activation", "gradient", "parameter"}
    assert any(key.source == "optimizer" for key in loop.monitor._runtime.pipeline.last.values)  # type: ignore[union-attr]
    loop.go(1)
    assert loop.monitor.last_record.detail is None
    assert loop.hooks == hooks
    loop.go(EVERY - 8)
    assert loop.seen == [0, 5, 6, 7, 8, EVERY]
    assert loop.keys[EVERY] == loop.keys[0]
    assert loop.keys[6] > loop.keys[0]  # of the preset's whole-model values, those of parameters
    assert not any(key.startswith("activation") for keys in loop.keys.values() for key in keys)  # they go to the run directory
    assert loop.monitor._runtime.planner.registry.metrics == before
    assert loop.tables.keys() == {"gradient_before_clip", "gradient"}


@pytest.mark.usefixtures("at_once")
def test_from_outside_it_begins_with_the_step_after_the_look(tmp_path: Path) -> None:
    loop = Loop(run_dir=tmp_path).go(3)
    put(tmp_path, every=1, steps=3)
    loop.go(10)
    assert loop.seen == [0, 4, 5, 6]
    state = load_run(tmp_path)._reader.meta["tune"]
    assert state["last"] == {"every": 1, "steps": 3, "number": 1, "since": 4, "until": 6, "ended": "its steps are over"}
    assert "in_force" not in state
    assert "waits" not in state


def test_a_step_that_it_begins_in_has_no_part_of_what_the_root_takes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradmon.ModuleMonitor(model, every=100)
    monitor.add_activation_metric("norm", of="input")
    monitor.attach(optimizer)
    norms = []
    for step in range(4):
        if step == 2:
            monitor.set_detail(every=1, steps=2)
        batches = torch.randn(2, 5, 3)
        for x in batches:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(batches.norm()))
        if step == 2:
            assert "after the step had begun" in monitor.missing()["input/[root module]/norm"]
    monitor.detach()
    found = {step: values.get("input/[root module]/norm") for step, values in monitor.get_all_metrics().items()}
    assert found == {0: pytest.approx(norms[0], rel=1e-6), 2: None, 3: pytest.approx(norms[3], rel=1e-6)}


def test_a_later_change_takes_the_place_of_one_before_it() -> None:
    loop = Loop().go(1)
    assert loop.monitor is not None
    loop.monitor.set_detail(every=1, preset="full", steps=100)
    loop.go(2)
    loop.monitor.set_detail(every=5, steps=10)
    loop.go(1)
    assert "activation" not in loop.tables
    loop.go(20)
    assert loop.seen == [0, 1, 2, 5, 10]
    loop.monitor.set_detail(every=1)
    loop.go(2)
    loop.monitor.set_detail(reset=True)
    loop.go(20)
    assert loop.seen == [0, 1, 2, 5, 10, 24, 25]


def test_of_two_in_the_same_moment_the_second_counts_and_a_reset_of_nothing_does_nothing() -> None:
    loop = Loop().go(1)
    assert loop.monitor is not None
    loop.monitor.set_detail(reset=True)
    loop.go(2)
    loop.monitor.set_detail(every=1)
    loop.monitor.set_detail(every=2, steps=4)
    assert loop.go(10).seen == [0, 4, 6]


def test_it_waits_for_its_first_step() -> None:
    loop = Loop().go(1)
    assert loop.monitor is not None
    loop.monitor.set_detail(every=1, steps=2, first=6)
    assert loop.monitor.last_record.detail is None
    loop.go(12)
    assert loop.seen == [0, 6, 7]
    loop.monitor.set_detail(every=1, steps=2, first=3)  # over by now
    assert loop.go(5).seen == [0, 6, 7, 13, 14]


def test_before_the_first_step_of_all() -> None:
    loop = Loop()
    assert loop.monitor is not None
    loop.monitor.set_detail(every=1, preset="full", steps=2)
    loop.go(1)
    assert "activation" in loop.tables
    assert loop.go(5).seen == [0, 1]
    assert not any(loop.hooks[1:4])


def test_a_preset_alone_keeps_the_cadence_and_may_be_less_than_the_script_measures() -> None:
    loop = Loop(every=2, preset="full").go(1)
    assert loop.monitor is not None
    everything = loop.monitor._runtime.planner.registry.metrics
    assert "activation" in loop.tables
    loop.monitor.set_detail(preset="minimal", steps=3)
    loop.go(2)
    assert loop.tables.keys() == {"gradient_before_clip", "gradient"}
    loop.go(2)
    assert "activation" in loop.tables
    assert loop.seen == [0, 2, 4]
    assert loop.keys[4] == loop.keys[0] - {key for key in loop.keys[0] if "update" in key}
    assert loop.monitor._runtime.planner.registry.metrics == everything


def test_is_step_monitored_knows_what_is_in_force() -> None:
    loop = Loop().go(5)
    assert loop.monitor is not None
    loop.monitor.set_detail(every=2, steps=5)
    assert not loop.monitor.is_step_monitored(6)  # nothing is in force before a step begins
    loop.go(1)
    assert [step for step in range(120) if loop.monitor.is_step_monitored(step)] == [0, 6, 8, 100]


def test_steps_are_counted_and_not_optimizers_micro_batches_or_numbers() -> None:
    loop = Loop(optimizers=2).go(3)
    assert loop.monitor is not None
    loop.monitor.set_detail(every=1, steps=3)
    assert loop.go(10).seen == [0, 3, 4, 5]


@pytest.mark.parametrize("attached", [False, True])
def test_by_hand_with_numbers_of_its_own(attached: bool) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = ModuleMonitor(model, every=1000)
    monitor.add_gradient_metric("norm")
    if attached:
        monitor.attach(optimizer)
    begun = []
    for step in range(0, 300, 10):
        if step == 50:
            monitor.set_detail(every=20, preset="full", steps=4, first=95)
        if monitor.begin_step(step):
            begun.append(step)
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.randn(4, 3)).square().mean().backward()
        monitor.monitor_gradients()
        optimizer.step()
        monitor.end_step()
        assert (set(monitor.get_step_metrics()) >= {"gradient/weight/norm"}) == (step in begun)
    assert begun == [0, 100, 120]  # four steps from the first one in force: 100, 110, 120 and 130
    assert not any(m._forward_hooks for m in model.modules())


def test_a_script_that_goes_back_goes_on_counting() -> None:
    model = nn.Linear(3, 1)
    monitor = ModuleMonitor(model, every=1000)
    monitor.add_gradient_metric("norm")
    begun = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (0, 1, 2, 3, 4, 2, 3, 4, 5, 6):
            if step == 3 and len(begun) == 1:
                monitor.set_detail(every=1, steps=4)
            begun += [step] if monitor.begin_step(step) else []
            model(torch.randn(4, 3)).square().mean().backward()
            monitor.end_step()
    assert begun == [0, 3, 4, 2, 3]


# --- who asks --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "nothing to change; give every= or preset=, or reset=True"),
        ({"steps": 5}, "nothing to change"),
        ({"every": 0}, "every=0 must be a positive int"),
        ({"every": 1, "reset": True}, "reset=True goes back to the settings of the script, and takes no other argument"),
    ],
)
def test_what_asks_for_nothing_is_refused(arguments: dict[str, Any], words: str) -> None:
    loop = Loop()
    assert loop.monitor is not None
    with pytest.raises(ValueError, match=words):
        loop.monitor.set_detail(**arguments)
    assert not loop.monitor._runtime.built_in.detail.watches_idle_steps


def test_from_a_signal_handler_in_the_middle_of_a_forward_pass() -> None:
    loop = Loop().go(2)
    monitor = loop.monitor
    assert monitor is not None
    before = signal.signal(signal.SIGUSR1, lambda *_: monitor.set_detail(every=1, steps=2))
    handle = loop.model[1].register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGUSR1))
    try:
        loop.go(1)
    finally:
        signal.signal(signal.SIGUSR1, before)
        handle.remove()
    assert loop.go(5).seen == [0, 3, 4]


def test_from_another_thread_while_steps_go_on() -> None:
    loop = Loop()
    monitor = loop.monitor
    assert monitor is not None
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            monitor.set_detail(every=1, steps=2)

    thread = threading.Thread(target=ask)
    thread.start()
    loop.go(50)
    stop.set()
    thread.join()
    loop.go(10)
    assert len(loop.seen) > 2
    assert not monitor.warning_counts()
    monitor.set_detail(every=1, steps=1)  # none is lost for those before
    first = monitor.current_step
    assert first is not None
    assert loop.go(3).seen[-1] == first + 1


def test_the_environment_makes_it_inert(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRADMON_DISABLE", "1")
    model = nn.Linear(2, 1)
    monitor = gradmon.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path / "run")
    monitor.set_detail(every=1, preset="full")
    assert monitor.last_record is None
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="every=0"):
        monitor.set_detail(every=0)


# --- what stays ------------------------------------------------------------------------------------------------------------------------


def test_what_was_added_by_hand_stays_also_if_it_is_added_meanwhile() -> None:
    loop = Loop(every=1, preset="full").go(1)
    monitor = loop.monitor
    assert monitor is not None
    monitor.add_activation_metric("max", metric_regex="^0$")
    loop.go(1)
    monitor.set_detail(preset="minimal", steps=6)
    loop.go(2)
    assert "activation/0/max" in loop.keys[3]
    monitor.add_gradient_metric("norm", metric_regex="^2.weight$", stages=["after_clip"])
    monitor.add_parameter_metric("rms")
    loop.go(2)
    assert {"activation/0/max", "gradient/2.weight/norm", "parameter/0.bias/rms"} <= loop.keys[5]
    loop.go(4)
    assert monitor.last_record.detail is None
    assert {"activation/0/max", "gradient/2.weight/norm", "parameter/0.bias/rms"} <= loop.keys[9]
    names = [(metric.source, metric.name, metric.shown) for metric in monitor._runtime.planner.registry.metrics]
    assert names.count(("gradient", "norm", True)) == 1  # for which the preset's has made way for good
    assert ("gradient", "norm", False) not in names
    assert ("activation", "std", False) in names


def test_a_preset_that_the_script_adds_meanwhile_is_what_comes_after() -> None:
    loop = Loop(every=1, preset="minimal").go(1)
    assert loop.monitor is not None
    loop.monitor.set_detail(preset="standard", steps=4)
    loop.go(2)
    loop.monitor._runtime.use_preset("full")
    loop.go(1)
    assert "activation" not in loop.tables
    loop.go(2)
    assert "activation" in loop.tables


def test_detach_ends_it_and_leaves_no_hook(tmp_path: Path) -> None:
    loop = Loop(run_dir=tmp_path)
    assert loop.monitor is not None
    loop.monitor.set_detail(every=1, preset="full")
    loop.go(3)
    assert any(loop.hooks)
    loop.monitor.detach()
    assert not any(loop.hooks)
    assert loop.monitor.last_record.detail is None
    state = load_run(tmp_path)._reader.meta["tune"]
    assert not state["listens"]
    assert state["last"]["until"] == 2
    assert state["last"]["ended"] == "the run has ended, or its monitor was detached"
    loop.monitor.attach(*loop.optimizers)
    assert loop.go(10).seen == [0, 1, 2]
    assert load_run(tmp_path)._reader.meta["tune"]["listens"]


def test_a_state_has_nothing_of_it_so_that_a_resumed_run_does_what_its_script_says() -> None:
    loop = Loop()
    assert loop.monitor is not None
    loop.monitor.set_detail(every=1, preset="full")
    loop.go(3)
    again = Loop()
    assert again.monitor is not None
    again.monitor.load_state_dict(loop.monitor.state_dict())
    assert again.go(10).seen == []
    assert again.monitor.current_step == 12


def test_the_closer_look_after_a_spike_goes_on_beside_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    with gradmon.testing.collect_records(monitor) as records:
        for step in range(60):
            if step == 50:
                monitor.set_detail(preset="full", steps=2)
            optimizer.zero_grad()
            (model(torch.randn(16, 4)).square().mean() * (1e4 if step == 50 else 1)).backward()
            optimizer.step()
    assert [record.step for record in records if "activation" in record.tables] == [50, 51, 52, 53]
    assert [record.step for record in records if "activation_gradient" in record.tables] == [51, 52, 53]
    assert monitor._runtime.planner.registry.hidden >= {("activation", "std")}
    assert monitor._runtime.planner.registry.metrics == ()
    assert not monitor._runtime.captures.modules.hooks.has_hooks


# --- who wins --------------------------------------------------------------------------------------------------------------------------


def test_it_stands_above_monitor_step_fn_which_is_asked_once_a_step_as_ever() -> None:
    asked: list[int] = []

    def every_fourth_call(step: int) -> bool:
        asked.append(step)
        return len(asked) % 4 == 1

    loop = Loop(monitored=False)
    monitor = loop.monitor = ModuleMonitor(loop.model, monitor_step_fn=every_fourth_call, preset="minimal")
    monitor.attach(*loop.optimizers)
    asked.clear()
    loop.go(6)
    monitor.set_detail(every=1, steps=3)
    loop.go(14)
    assert asked == [*range(21)]
    assert loop.seen == [0, 4, 6, 7, 8, 12, 16]


def test_it_stands_above_the_budget_which_learns_nothing_of_it() -> None:
    loop = Loop(every=1, max_overhead=1e-5)
    monitor = loop.monitor
    assert monitor is not None
    with pytest.warns(GradmonWarning, match="max_overhead"):
        loop.go(400)
    budget = monitor._runtime.built_in.budget
    assert budget is not None
    interval, told = budget.interval, dict(monitor.warning_counts())
    assert interval > 4
    del loop.seen[:]
    monitor.set_detail(every=1, preset="full", steps=40)
    loop.go(40)
    assert loop.seen == [*range(400, 440)]
    assert budget.interval == interval
    assert monitor.warning_counts() == told
    loop.go(interval)
    assert len(loop.seen) <= 41
    monitor.set_detail(preset="full", steps=20)  # no word about the cadence: the budget rules
    loop.go(20)
    assert len(loop.seen) < 50


def test_a_budget_goes_back_to_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OverheadBudget, "count", lambda *_: None)  # which goes by the clock
    loop = Loop(every=1, max_overhead=0.9).go(60)
    assert loop.monitor is not None
    budget = loop.monitor._runtime.built_in.budget
    assert budget is not None
    budget.interval = 4  # as it was found for what the script asks for
    loop.monitor.set_detail(preset="full", steps=50)
    loop.go(20)
    budget.interval = 16  # as it may be found for more
    loop.go(20)
    loop.monitor.set_detail(preset="full", steps=10)  # one takes the place of another
    loop.go(11)
    assert loop.monitor.last_record.detail is None
    assert budget.interval == 4


# --- records, stories, detectors -------------------------------------------------------------------------------------------------------


def test_records_say_under_what_they_were_measured(tmp_path: Path) -> None:
    loop = Loop(run_dir=tmp_path).go(1)
    assert loop.monitor is not None
    loop.monitor.set_detail(every=2, preset="full", steps=5)
    loop.go(20)
    run = load_run(tmp_path)
    assert run.steps == [0, 2, 4]
    assert run.record(2).context["tuned"] == {"every": 2, "preset": "full", "number": 1}
    assert "tuned" not in run.record(0).context
    assert run._reader.table("activation", 4) is not None
    words = "measured under a live change of detail (gradmon detail, number 1): steps divisible by 2, preset full"
    assert words in explain(run._reader, 4)
    assert words in loop.monitor.why(4)
    assert "tuned" not in explain(run._reader, 0)
    assert "live change" not in explain(run._reader, 0)


def test_detectors_judge_the_steps_between(tmp_path: Path) -> None:
    loop = Loop(run_dir=tmp_path, every=1000).go(1)
    monitor = loop.monitor
    assert monitor is not None
    monitor.add_detector(SpikeDetector(signal="param_norm"))
    monitor.set_detail(every=1, steps=60)
    loop.go(70)
    assert sum("spike_score/param_norm" in keys for keys in loop.keys.values()) > 20


# --- training does not see it ----------------------------------------------------------------------------------------------------------

_SETTINGS = [
    loops.Setting(family="mlp", optimizer_name="adamw_foreach", clip="norm", micro_batches=4),
    loops.Setting(family="gpt_tied", optimizer_name="adamw_fused", clip="norm", recompute="nonreentrant"),
    loops.Setting(family="gpt_tied", optimizer_name="sgd", micro_batches=4, recompute="reentrant"),
    loops.Setting(family="mlp", optimizer_name="adamw_loop", scaler=True),
    loops.Setting(family="mlp", optimizer_name="lbfgs", micro_batches=4),
    loops.Setting(family="frozen_unused", optimizer_name="sgd", compile=True),
    loops.Setting(family="gpt_tied", optimizer_name="adamw_foreach", compile=True),
]


@pytest.mark.filterwarnings("ignore:torch_gradmon.*something was compiled")
@pytest.mark.parametrize("setting", _SETTINGS, ids=str)
def test_training_is_the_same_bit_for_bit(setting: loops.Setting, tmp_path: Path) -> None:
    monitors = []

    def watch(model: Any, optimizer: Any, scaler: Any) -> ModuleMonitor:
        monitor = ModuleMonitor(model, every=1000, on_metric_error="raise", run_dir=tmp_path / "run", preset="minimal")
        monitor.set_detail(every=1, preset="full", steps=4, first=3)
        monitors.append(monitor)
        return monitor.attach(optimizer, scaler=scaler)

    plain = loops.train(**dict(setting.parts()))
    tuned = loops.train(**dict(setting.parts()), monitored=watch)
    assert loops.differences(plain, tuned) == []
    run = load_run(tmp_path / "run")
    assert run.steps == [0, 3, 4, 5, 6]  # so it was awake
    assert (run._reader.table("activation", 4) is not None) != setting.compile
    assert run._reader.table("gradient", 4) is not None


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("preset", ["standard", "full"])
def test_a_compiled_model_is_not_compiled_again(preset: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    counters.clear()
    loop = Loop(monitored=False)
    inner, loop.model = loop.model, torch.compile(loop.model, backend="aot_eager")  # type: ignore[assignment]
    monitor = loop.monitor = gradmon.watch(loop.model, *loop.optimizers, preset=preset, every=10, run_dir=tmp_path, on_spike=None)
    loop.go(3)
    hooks = [len(module._forward_hooks) for module in inner.modules()]
    monitor.set_detail(every=1, preset="full", steps=3)
    with pytest.warns(GradmonWarning, match="a change of detail leaves activations and attention as the script asked for"):
        loop.go(3)
    loop.go(10)
    assert loop.seen == [0, 3, 4, 5, 10]
    assert counters["stats"]["unique_graphs"] == 1
    assert [len(module._forward_hooks) for module in inner.modules()] == hooks
    run = load_run(tmp_path)
    for step in run.steps:
        assert (run._reader.table("activation", step) is not None) == (preset == "full")
    assert run._reader.table("gradient", 4) is not None
    assert not [cause for cause in monitor.warning_counts() if cause != "tune:compiled"]
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_a_model_that_is_compiled_meanwhile_is_not_compiled_again_when_the_change_ends() -> None:
    torch._dynamo.reset()
    counters.clear()
    loop = Loop().go(3)
    assert loop.monitor is not None
    loop.monitor.set_detail(every=1, preset="full", steps=8)
    loop.go(2)
    inner, loop.model = loop.model, torch.compile(loop.model, backend="aot_eager")  # type: ignore[assignment]
    loop.go(20)
    assert loop.seen == [0, *range(3, 11)]
    assert counters["stats"]["unique_graphs"] == 1
    loop.monitor.detach()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in inner.modules())
    torch._dynamo.reset()


# --- the file --------------------------------------------------------------------------------------------------------------------------


def test_the_file_is_looked_at_once_a_second_and_read_when_it_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    reads: list[Path] = []
    now, stat, read = 0.0, os.stat, change.read

    def counted(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        looks.extend([now] * str(path).endswith(change.FILE_NAME))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", counted)
    monkeypatch.setattr(change, "read", lambda path, last: reads.append(path) or read(path, last))
    box = RequestFile(tmp_path, "me", WarningLog().add, clock=lambda: now)
    found = []
    for tick in range(5000):
        now = tick / 1000
        if tick == 1500:
            change.write(tmp_path, detail_request(every=1, number=1), "me")
        if tick == 3500:
            change.write(tmp_path, detail_request(every=2, number=2), "another")
        found.append((now, box.look()))
    assert looks == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert len(reads) == 2
    assert [(when, one) for when, one in found if one is not None] == [(2.0, detail_request(every=1, number=1))]


def test_a_training_looks_once_a_second_by_a_real_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change, "PERIOD", 0.2)
    loop = Loop(run_dir=tmp_path, every=10**6).go(1)
    looks, stat = [], os.stat

    def counted(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        looks.extend([path] * str(path).endswith(change.FILE_NAME))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", counted)
    until = threading.Event()
    threading.Timer(1.0, until.set).start()
    steps = 0
    while not until.is_set():
        loop.go(1)
        steps += 1
    assert steps > 20
    assert 3 <= len(looks) <= 6


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _text(text: str | bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(text.encode() if isinstance(text, str) else text)


def _said(**facts: Any) -> Callable[[Path], Any]:
    return _text(json.dumps({"format": 1, "session": "?", "number": 1, "every": 1, **facts}))


_HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "half": (_text('{"format": 1, "sess'), "it is not JSON"),
    "empty": (_text(""), "it is not JSON"),
    "bytes": (_text(b"\xff\xfe\x00"), "it is not JSON"),
    "deep": (_text("[" * 4000), "it is not JSON"),
    "large": (_text('"' + "x" * 100_000), "it is larger than 4096 bytes"),
    "list": (_text("[1, 2]"), "not an object"),
    "long number": (_text('{"format": 1, "every": ' + "9" * 4000 + "}"), "it is not JSON|session"),
    "other format": (_said(format=2), "its format is not 1"),
    "no session": (_said(session=None), "its session is no text"),
    "no number": (_said(number=0), "it has no number"),
    "negative": (_said(every=-1), "every=-1 must be a positive int"),
    "fraction": (_said(steps=0.5), r"steps=0\.5 must be a positive int"),
    "a word": (_said(every="1; import os"), "every='1; import os' must be a positive int"),
    "true": (_said(every=True), "every=True must be a positive int"),
    "no preset": (_said(preset="../../etc/passwd"), "preset='../../etc/passwd' is not one of"),
    "too many": (_said(steps=10**30), "is too large"),
    "unknown": (_said(command="rm"), "unknown fields"),
    "pipe": (_fifo, "it is not a regular file"),
    "directory": (Path.mkdir, "Is a directory|it is not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "Too many levels of symbolic links"),
    "loop": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
}


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("kind", _HOSTILE)
def test_what_is_no_file_of_ours_is_said_once_and_training_goes_on(kind: str, tmp_path: Path) -> None:
    write, words = _HOSTILE[kind]
    loop = Loop(run_dir=tmp_path).go(1)
    write(tmp_path / change.FILE_NAME)
    with pytest.warns(GradmonWarning, match=words) as said:
        loop.go(5)
    assert len(said) == 1
    assert "\n" not in str(said[0].message)
    assert len(str(said[0].message)) < 400
    assert loop.seen == [0]
    path = tmp_path / change.FILE_NAME
    path.rmdir() if path.is_dir() else path.unlink()
    loop.go(1)
    put(tmp_path, every=1, steps=1)
    assert loop.go(3).seen == [0, 8]


@pytest.mark.usefixtures("at_once")
def test_a_monitor_that_raises_does_not_raise_for_a_file_of_somebody_elses(tmp_path: Path) -> None:
    loop = Loop(monitored=False)
    loop.monitor = ModuleMonitor(loop.model, on_metric_error="raise", run_dir=tmp_path, every=EVERY)
    loop.monitor.attach(*loop.optimizers)
    (tmp_path / change.FILE_NAME).write_text("{")
    with pytest.warns(GradmonWarning, match="is ignored, and training continues unchanged"):
        loop.go(3)


@pytest.mark.usefixtures("at_once")
def test_what_was_asked_of_an_earlier_run_is_not_taken_by_a_new_one_or_a_resumed_one(tmp_path: Path) -> None:
    first = Loop(run_dir=tmp_path).go(2)
    assert first.monitor is not None
    put(tmp_path, every=1, number=7)
    first.go(4)
    assert first.seen == [0, 3, 4, 5]
    state = first.monitor.state_dict()
    first.monitor.detach()
    put(tmp_path, every=1, number=8)  # after its end
    second = Loop(run_dir=tmp_path)
    assert second.monitor is not None
    second.monitor.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert second.go(10).seen == []
    put(tmp_path, every=1, number=1, steps=1)  # which need not grow from one run to the next
    assert second.go(3).seen == [17]


@pytest.mark.usefixtures("at_once")
def test_an_older_number_or_the_same_again_is_not_taken(tmp_path: Path) -> None:
    loop = Loop(run_dir=tmp_path).go(1)
    put(tmp_path, every=1, number=5, steps=1)
    loop.go(4)
    put(tmp_path, every=1, number=5, steps=1)
    loop.go(4)
    put(tmp_path, every=1, number=4, steps=3)
    loop.go(4)
    assert loop.seen == [0, 2]
    put(tmp_path, every=1, number=5, steps=2)  # two people at the same time
    assert loop.go(4).seen == [0, 2, 14, 15]


@pytest.mark.usefixtures("at_once")
def test_a_run_directory_that_is_gone_does_no_harm(tmp_path: Path) -> None:
    loop = Loop(run_dir=tmp_path / "run").go(1)
    for path in (tmp_path / "run").iterdir():
        path.unlink()
    (tmp_path / "run").rmdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.go(5)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    yield
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_idle_steps_have_no_hooks_and_read_nothing(tmp_path: Path) -> None:
    counts = []
    for loop in (Loop(monitored=False).go(3), Loop(run_dir=tmp_path).go(3)):
        with HostReads("cpu") as reads:
            loop.go(3)
        counts.append(reads.counts)
    assert counts[0] == counts[1]
    assert sum(loop.hooks[4:]) == 1  # the one that audits the loop


def test_a_tensor_of_a_step_is_not_kept_by_what_ended(tmp_path: Path) -> None:
    loop = Loop(run_dir=tmp_path)
    assert loop.monitor is not None
    loop.monitor.set_detail(every=1, preset="full", steps=2)
    kept: list[weakref.ref[Tensor]] = []
    handle = loop.model[0].register_forward_hook(lambda module, args, output: kept.append(weakref.ref(output)))
    loop.go(2)
    handle.remove()
    loop.go(2)
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


def test_a_broken_file_where_warnings_are_errors_costs_no_step(tmp_path: Path, at_once: None) -> None:
    loop = Loop(run_dir=tmp_path, every=1).go(3)
    (tmp_path / change.FILE_NAME).write_text("{broken")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(GradmonWarning, match="is ignored"):
            loop.go(1)
        loop.go(3)
    assert loop.monitor is not None
    loop.monitor.detach()
    assert load_run(tmp_path).steps == list(range(7))
