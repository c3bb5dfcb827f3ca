"""Loops that straight programs follow, and the general path: both say the same, bit for bit; and a test that can fail."""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
import warnings
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor
from torch_gradmon.core.errors import WarningLog
from torch_gradmon.monitor import program
from torch_gradmon.monitor.records import Publisher
from torch_gradmon.step.record_builder import RecordFactory

from . import loops_in_two_ways as loops
from .fuzz.program import Program
from .loops_in_two_ways import Case, Change

#: A case with a warning, a spike, a run directory and a sink.
RICH = Case(
    Program(steps=8, run_dir=True, sinks=("collecting",), log=("backward",)),
    (Change(4, 0.0, "put", "forward(spoil='nan')"), Change(6, 0.6, "drop"), Change(7, 1.0, "add", "monitor.missing()")),
)


def _check(first: int, count: int) -> None:
    counts: Counter[str] = Counter()
    text = loops.check(range(first, first + count), counts)
    assert not text, text
    followed = counts["general"] - counts["programs"]
    print(f"programs have followed {followed} of {counts['general']} steps")
    assert not loops.has_programs() or followed > 0.3 * counts["general"]


@pytest.mark.parametrize("chunk", range(10))
def test_both_ways_say_the_same(chunk: int) -> None:
    _check(30 * chunk, 30)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(50))
def test_both_ways_say_the_same_in_many_loops(chunk: int) -> None:
    _check(10_000 + 100 * chunk, 100)


# --- it can fail -----------------------------------------------------------------------------------------------------------------


def _moves_a_row(original: Any, *args: Any) -> Any:
    record, signals = original(*args)
    rows = record.tables["update"].rows.view(-1)
    rows[0] = torch.nextafter(rows[0], torch.tensor(9.0))
    return record, signals


#: What is wrong in one way: of which method, and where that must be seen.
DEFECTS: dict[str, tuple[Any, str, Any, str]] = {
    "a row": (RecordFactory, "make", _moves_a_row, "/read/"),
    "a warning": (WarningLog, "warn", lambda *_: None, "/warnings"),
    "its words": (WarningLog, "warn", lambda old, self, text, *more: old(self, f"{text}.", *more), "/warnings"),
    "a sink": (Publisher, "publish", lambda _, self: setattr(self, "waiting", None), "/rows"),
    "a value": (ModuleMonitor, "get_step_metrics", lambda _, self: {}, "/read/"),
    "a reason": (ModuleMonitor, "missing", lambda old, self: dict.fromkeys(old(self), "no reason"), "/read/"),
    "the order": (ModuleMonitor, "state_dict", lambda old, self: dict(reversed(old(self).items())), "/read/"),
    "a parameter": (torch.nn.Module, "zero_grad", lambda *_, **__: None, "/training/"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_of_one_way_is_seen(defect: str) -> None:
    owner, name, around, where = DEFECTS[defect]
    original = getattr(owner, name)

    def patched() -> Any:
        return mock.patch.object(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))

    found = loops.difference(RICH, Counter(), patched)
    assert any(each.startswith(where) for each in found), found


def test_a_case_that_fails_is_made_smaller() -> None:
    small = loops.smallest(loops.draw(7), lambda case: case.program.steps > 3)
    assert small == Case(Program(seed=7, steps=4), (), small.after)


# --- what each question of a program is for ----------------------------------------------------------------------------------------


class Scene:
    """A small loop with its monitor, and what the monitor has said."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.1), torch.nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.monitor = gradmon.watch(self.model, self.optimizer, **options)
        self.said: list[object] = []

    def loss(self) -> torch.Tensor:
        return self.model(torch.randn(8, 4)).square().mean()

    def usual(self, steps: int = 4, passes: int = 1) -> None:
        for _ in range(steps):
            for _ in range(passes):
                self.loss().backward()
            self.step()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.said.append((self.monitor.current_step, sorted(map(str, self.monitor.missing().items()))))

    def closure(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss


def _evaluates_with_gradients(scene: Scene) -> None:
    scene.model.eval()
    scene.loss()
    scene.model.train()
    scene.monitor.log_scalar("accuracy", 1.0)  # of the last step


def _is_called_without_gradients(scene: Scene) -> None:
    with torch.no_grad():
        scene.loss()
    scene.monitor.log_scalar("accuracy", 1.0)


def _is_transformed(scene: Scene) -> None:
    parameters = dict(scene.model.named_parameters())
    torch.func.grad(lambda p: torch.func.functional_call(scene.model, p, (torch.randn(2, 4),)).sum())(parameters)
    scene.monitor.log_scalar("accuracy", 1.0)


def _recomputes(scene: Scene) -> None:
    checkpoint(scene.model, torch.randn(8, 4), use_reentrant=False, preserve_rng_state=True).mean().backward()
    scene.step()


def _calls_the_model_in_a_pass(scene: Scene) -> None:
    def look(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            scene.model(torch.randn(2, 4)).sum()

    handle = scene.model[0].weight.register_hook(look)
    scene.usual(2)
    handle.remove()


def _was_seen_in_a_capture(scene: Scene) -> None:
    """A graph was captured, and what follows may be between its replays."""
    scene.monitor._runtime.fence.is_captured = True
    scene.usual(2)


def _steps_by_closure(scene: Scene) -> None:
    scene.optimizer.step(scene.closure)


def _steps_by_keyword(scene: Scene) -> None:
    scene.optimizer.step(closure=scene.closure)


def _raises_in_closure(scene: Scene) -> None:
    def closure() -> torch.Tensor:
        scene.closure()
        raise KeyError

    with pytest.raises(KeyError):
        scene.optimizer.step(closure)


def _steps_without_a_pass(scene: Scene) -> None:
    scene.step()


def _steps_twice(scene: Scene) -> None:
    scene.loss().backward()
    scene.optimizer.step()
    scene.step()


def _interrupts_a_pass(scene: Scene) -> None:
    def fail(_: torch.Tensor) -> None:
        raise KeyError

    handle = scene.model[0].weight.register_hook(fail)
    with pytest.raises(KeyError):
        scene.loss().backward()
    handle.remove()
    scene.step()


def _accumulates_less_than_ever(scene: Scene) -> None:
    scene.usual(110, passes=2)
    scene.usual(1, passes=1)


def _steps_within_the_pass(scene: Scene) -> None:
    handle = scene.model[2].bias.register_post_accumulate_grad_hook(lambda _: scene.optimizer.step())
    scene.loss().backward()
    handle.remove()
    scene.optimizer.zero_grad()


def _steps_in_a_hook_of_its_own(scene: Scene) -> None:
    def halve(*_: object) -> None:
        scene.model[0].weight.grad.mul_(0.5)

    handle = scene.optimizer.register_step_pre_hook(halve)
    scene.usual(2)
    handle.remove()


def _is_driven_by_an_unknown_scaler(scene: Scene) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(3):
        scaler.scale(scene.loss()).backward()
        scaler.step(scene.optimizer)
        scaler.update()
        scene.optimizer.zero_grad()


def _forgets_to_update_its_scaler(scene: Scene) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for updates in (True, True, False, True):
        scaler.scale(scene.loss()).backward()
        scaler.step(scene.optimizer)
        if updates:
            scaler.update()
        else:
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scene.optimizer.zero_grad()


def _overflows(scene: Scene) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (1.0, 1.0, math.inf, 1.0):
        scaler.scale(scene.loss() * factor).backward()
        scaler.step(scene.optimizer)
        if factor == math.inf:
            scene.loss()
        scaler.update()
        scene.optimizer.zero_grad()


def _trains_in_evaluation_mode(scene: Scene) -> None:
    scene.model.eval()
    scene.usual(3)
    scene.model.train()


def _is_traced(scene: Scene) -> None:
    torch.jit.trace(scene.model, torch.randn(2, 4), check_trace=False)
    scene.monitor.log_scalar("accuracy", 1.0)


def _goes_back(scene: Scene) -> None:
    scene.monitor.load_state_dict({**scene.monitor.state_dict(), "next_step": 1})


def _is_paused(scene: Scene) -> None:
    with scene.monitor.no_monitor():
        scene.usual(1)
    scene.loss().backward()
    with scene.monitor.no_monitor():
        scene.step()


def _counts_steps_by_hand(scene: Scene) -> None:
    for number in (50, 51):
        scene.monitor.begin_step(number)
        scene.usual(1)
        scene.monitor.end_step()


def _changes_its_groups(scene: Scene) -> None:
    scene.model.add_module("last", torch.nn.Linear(1, 1))
    scene.optimizer.add_param_group({"params": list(scene.model.last.parameters()), "lr": 0.01})


def _trains_a_copy(scene: Scene) -> None:
    clone = copy.deepcopy(scene.model)
    clone(torch.randn(8, 4)).mean().backward()


def _asks_for_more(scene: Scene) -> None:
    scene.loss().backward()
    scene.monitor.add_gradient_metric("norm")
    scene.step()


class Pair(Scene):
    """The same with two optimizers, one for each layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.monitor.detach()
        self.model.register_parameter("unowned", torch.nn.Parameter(torch.ones(2)))
        self.first, self.last = (torch.optim.SGD(self.model[place].parameters(), lr=0.1) for place in (0, 2))
        self.monitor = gradmon.watch(self.model, self.first, self.last, **options)

    def step(self) -> None:
        self.first.step()
        self.last.step()
        self.cleared()

    def cleared(self) -> None:
        self.model.zero_grad()
        self.said.append((self.monitor.current_step, sorted(map(str, self.monitor.missing().items()))))


def _first_one_alone(pair: Pair) -> None:
    pair.loss().backward()
    pair.first.step()
    pair.cleared()


def _first_one_rests(pair: Pair) -> None:
    for _ in range(3):
        pair.loss().backward()
        pair.last.step()
        pair.cleared()


def _last_one_rests(pair: Pair) -> None:
    for _ in range(14):
        pair.loss().backward()
        pair.first.step()
        pair.cleared()


def _other_order(pair: Pair) -> None:
    for _ in range(3):
        pair.loss().backward()
        pair.last.step()
        pair.first.step()
        pair.cleared()


def _critic_steps_first(pair: Pair) -> None:
    for _ in range(3):
        pair.loss().backward()
        pair.first.step()
        pair.first.zero_grad()
    pair.usual(1)


def _take_turns(pair: Pair) -> None:
    for _ in range(4):
        for optimizer in (pair.first, pair.last):
            pair.loss().backward()
            optimizer.step()
            optimizer.zero_grad()
        pair.cleared()


def _turns_of_one_layer_each(pair: Pair) -> None:
    for _ in range(4):
        for optimizer, place in ((pair.first, 0), (pair.last, 2)):
            pair.loss().backward(inputs=list(pair.model[place].parameters()))
            optimizer.step()
        pair.cleared()


def _a_closure_in_the_last(pair: Pair) -> None:
    for _ in range(3):
        pair.loss().backward()
        pair.first.step()
        pair.last.step(pair.closure)
        pair.cleared()


def _closures_in_both(pair: Pair) -> None:
    for _ in range(4):
        pair.first.step(pair.closure)
        pair.last.step(pair.closure)
        pair.cleared()


def _a_closure_that_raises(pair: Pair) -> None:
    for _ in range(3):
        pair.first.step(pair.closure)
        with pytest.raises(ZeroDivisionError):
            pair.last.step(lambda: 1 / 0)
        pair.cleared()


def _a_scaler_for_both(pair: Pair) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (1.0, 1.0, 1.0, math.inf, 1.0):
        scaler.scale(pair.loss()).backward()
        pair.model[0].weight.grad.mul_(factor)
        scaler.step(pair.first)
        scaler.step(pair.last)
        scaler.update()
        pair.cleared()


def _an_evaluation_between(pair: Pair) -> None:
    pair.loss().backward()
    pair.first.step()
    pair.model.eval()
    pair.loss()
    pair.model.train()
    pair.last.step()
    pair.cleared()


def _left_between(pair: Pair) -> None:
    pair.loss().backward()
    pair.first.step()
    pair.cleared()
    pair.loss().backward()
    pair.step()


def _an_edit_between(pair: Pair) -> None:
    pair.loss().backward()
    pair.first.step()
    pair.model[2].weight.grad.mul_(0.5)
    pair.last.step()
    pair.cleared()


UNUSUAL, IN_PAIRS = (
    [each for each in list(globals().values()) if inspect.isfunction(each) and [*inspect.signature(each).parameters] == [kind]]
    for kind in ("scene", "pair")
)


def _told(event: Any, after: int, kind: type[Scene] = Scene, **options: Any) -> list[object]:
    with mock.patch.object(program, "AFTER", after), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        scene = kind(**options)
        scene.usual()
        event(scene)
        scene.usual()
        records = scene.monitor._runtime.pipeline.history.records()
        found = [(each.step, each.applied, dict(each.values), dict(each.context), each.events) for each in records]
        scene.monitor.detach()
    parameters = [each.tolist() for each in scene.model.parameters()]
    told = [parameters, found, scene.said, scene.monitor.get_step_counts(), [str(each.message) for each in warned]]
    return [re.sub(r"'?overhead_fraction'?[^,}]*", "", repr(each)) for each in told]


@pytest.mark.parametrize("options", [{}, {"on_spike": "skip"}, {"every": 2}, {"preset": "full"}], ids=str)
@pytest.mark.parametrize("event", UNUSUAL, ids=lambda event: event.__name__.removeprefix("_"))
def test_unusual_steps_are_those_of_the_general_path(event: Any, options: dict[str, Any]) -> None:
    assert _told(event, 0, **options) == _told(event, sys.maxsize, **options)


@pytest.mark.parametrize("options", [{}, {"on_spike": "skip"}, {"every": 2}, {"preset": "full"}], ids=str)
@pytest.mark.parametrize("event", IN_PAIRS, ids=lambda event: event.__name__.removeprefix("_"))
def test_unusual_pairs_are_those_of_the_general_path(event: Any, options: dict[str, Any]) -> None:
    assert _told(event, 0, Pair, **options) == _told(event, sys.maxsize, Pair, **options)
