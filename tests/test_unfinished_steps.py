"""A forward or backward pass that no optimizer follows is no step: nothing records it, judges it or counts it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor, SpikeDetector
from torch_gradmon.monitor.runtime import at_exit

from .loops import differences


class Run:
    """A game of two, of which the generator alone is watched."""

    def __init__(self, watches: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.generator, self.judge = nn.Linear(3, 4), nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.generator.parameters(), lr=0.1)
        self.other = torch.optim.SGD(self.judge.parameters(), lr=0.1)
        self.sink = gradmon.testing.RecordingSink()
        self.scored: list[int] = []
        self.norms: list[float] = []
        if watches:
            self.monitor = ModuleMonitor(self.generator, **options, preset="standard")
            self.monitor.add_activation_metric("rms")
            detector = SpikeDetector(signal="loss")
            update = detector.update
            detector.update = lambda step, value: (self.scored.append(step), update(step, value))[1]  # type: ignore[method-assign]
            self.monitor.add_detector(detector)
            self.monitor.add_sink(self.sink)
            self.monitor.attach(self.optimizer)

    def forward(self) -> torch.Tensor:
        loss = self.judge(self.generator(torch.randn(5, 3))).square().mean()
        if hasattr(self, "monitor"):
            self.monitor.log_scalar("loss", loss.detach())
        return loss

    def turn(self) -> None:
        self.generator.zero_grad()
        self.forward().backward()
        self.norms.append(torch.cat([p.grad.double().flatten() for p in self.generator.parameters()]).norm().item())
        self.optimizer.step()

    def other_turn(self) -> None:
        self.judge.zero_grad()
        (-self.forward()).backward()
        self.other.step()

    def check(self, steps: int) -> None:
        """These steps are there, and nothing else is, anywhere."""
        numbers = list(range(steps))
        assert list(self.monitor.get_all_metrics()) == numbers
        norms = [values["gradmon/grad_norm"] for values in self.monitor.get_all_metrics().values()]
        assert norms == pytest.approx(self.norms, rel=1e-6)
        assert self.sink.steps == numbers
        assert self.scored == numbers
        assert self.monitor.current_step == self.monitor.last_record.step == steps - 1
        assert self.monitor.get_step_metrics()["gradmon/grad_norm"] == pytest.approx(self.norms[-1], rel=1e-6)
        counts = self.monitor.get_step_counts()
        assert (counts.attempted, counts.applied) == (steps, steps)
        assert self.monitor.state_dict()["next_step"] == steps


TAILS: dict[str, Callable[[Run], object]] = {
    "the other player's turn": Run.other_turn,
    "an evaluation in training mode": Run.forward,
    "an unfinished accumulation": lambda run: [run.forward().backward() for _ in range(2)],
    "nothing": lambda run: None,
}


@pytest.mark.parametrize("tail", TAILS)
def test_what_no_optimizer_follows_is_in_no_record(tail: str, tmp_path: Path) -> None:
    run = Run(run_dir=tmp_path)
    for _ in range(3):
        run.turn()
    TAILS[tail](run)
    run.monitor.detach()
    run.check(3)
    assert list(gradmon.load_run(tmp_path).steps) == [0, 1, 2]
    run.optimizer.step()  # of which the monitor sees nothing any more
    run.check(3)


@pytest.mark.parametrize("tail", TAILS)
def test_steps_go_on_with_the_number_of_the_next_attempt(tail: str) -> None:
    run = Run()
    for turns in (2, 3):
        for _ in range(turns):
            run.turn()
        TAILS[tail](run)
        run.monitor.detach()
        run.monitor.attach(run.optimizer)
    run.check(5)


def test_nothing_is_recorded_where_there_was_no_step_at_all(tmp_path: Path) -> None:
    run = Run(run_dir=tmp_path)
    run.other_turn()
    run.monitor.detach()
    assert run.monitor.current_step is run.monitor.last_record is None
    assert (run.monitor.get_all_metrics(), run.sink.rows, run.scored) == ({}, [], [])
    assert list(gradmon.load_run(tmp_path).steps) == []
    assert run.monitor.get_step_counts().attempted == 0


def test_the_end_of_the_program_records_no_unfinished_step() -> None:
    run = Run()
    run.turn()
    run.other_turn()
    session = run.monitor._runtime
    at_exit(lambda: session, session.pipeline.publisher)
    run.check(1)


@pytest.mark.parametrize("unfinished", [False, True])
def test_a_state_that_is_saved_within_an_unfinished_step_goes_on_with_its_number(unfinished: bool) -> None:
    run = Run()
    run.turn()
    if unfinished:
        run.forward()
    assert run.monitor.state_dict()["next_step"] == 1
    run.turn()
    assert run.monitor.state_dict()["next_step"] == 2


def test_a_step_begun_by_hand_takes_the_place_of_an_unfinished_one() -> None:
    run = Run()
    run.forward()  # before the loop, or before begin_step()
    for step in range(3):
        run.monitor.begin_step(step)
        run.turn()
        run.monitor.end_step()
    run.monitor.detach()
    run.check(3)
    assert run.monitor.warning_counts() == {}


def test_a_step_that_one_of_two_optimizers_has_taken_is_recorded() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 1)})
    first, last = (torch.optim.SGD(model[name].parameters(), lr=0.01) for name in "ab")
    monitor = gradmon.watch(model, first, last)
    model["b"](model["a"](torch.randn(2, 3))).sum().backward()
    first.step()
    monitor.detach()
    assert list(monitor.get_all_metrics()) == [0]
    assert monitor.get_step_counts().attempted == 1


@pytest.mark.parametrize("every", [1, 2])
def test_an_optimizer_that_raised_has_made_an_attempt_that_was_not_applied(every: int) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = gradmon.watch(model, optimizer, every=every)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = "fast" if step == 1 else 0.01
        model(torch.randn(2, 3)).sum().backward()
        with pytest.raises(TypeError) if step == 1 else contextlib.nullcontext():
            optimizer.step()
    monitor.detach()
    assert (monitor.last_record.step, monitor.get_step_metrics()["gradmon/steps_not_applied"]) == (2, 1.0)
    assert (monitor.get_step_counts().attempted, monitor.get_step_counts().applied) == (3, 2)


def _by_closure(optimizer: torch.optim.Optimizer, model: nn.Module, fails: bool) -> float:
    """The norm of the gradients that the step used."""
    norms = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.randn(2, 3)).square().sum()
        loss.backward()
        if fails:
            raise RuntimeError("out of data")
        norms.append(torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm().item())
        return loss

    optimizer.step(closure)
    return norms[-1]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS, torch.optim.Adam])
def test_the_step_after_a_closure_that_raised_is_a_step_of_its_own(kind: type[torch.optim.Optimizer]) -> None:
    model = nn.Linear(3, 1)
    optimizer = kind(model.parameters(), lr=0.01, **({"max_iter": 1} if kind is torch.optim.LBFGS else {}))  # type: ignore[call-arg]
    monitor = ModuleMonitor(model, preset="standard")
    monitor.add_gradient_metric("norm")
    monitor.attach(optimizer)
    used = {}
    for step in range(5):
        if step in (1, 2):
            with pytest.raises(RuntimeError, match="out of data"):
                _by_closure(optimizer, model, fails=True)
        else:
            used[step] = _by_closure(optimizer, model, fails=False)
    found = monitor.get_all_metrics()
    assert list(found) == [0, 1, 2, 3, 4]
    for step, norm in used.items():
        parts = [found[step][f"gradient/{name}/norm"] for name in ("weight", "bias")]
        assert math.hypot(*parts) == pytest.approx(norm, rel=1e-6)
        assert found[step]["gradmon/grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert [values["gradmon/steps_not_applied"] for values in found.values()] == [0, 1, 2, 2, 2]
    assert (monitor.get_step_counts().attempted, monitor.get_step_counts().applied) == (5, 3)


def test_a_step_by_hand_whose_optimizer_raised_is_not_applied() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = gradmon.watch(model, optimizer)
    for step in range(3):
        monitor.begin_step(step)
        if step == 1:
            with pytest.raises(RuntimeError, match="out of data"):
                _by_closure(optimizer, model, fails=True)
        else:
            _by_closure(optimizer, model, fails=False)
        monitor.end_step()
        assert monitor.get_step_metrics()["gradmon/steps_not_applied"] == min(step, 1)
    assert (monitor.get_step_counts().attempted, monitor.get_step_counts().applied) == (3, 2)


def test_parameters_are_the_same_with_and_without_the_monitor() -> None:
    found = []
    for watches in (False, True):
        run = Run(watches)
        for _ in range(3):
            run.turn()
            run.other_turn()
        if watches:
            run.monitor.detach()
        found.append((run.generator.state_dict(), run.judge.state_dict(), torch.get_rng_state()))
    assert differences(*found) == []


@pytest.mark.parametrize("every", [1, 10])
def test_a_closure_that_raised_is_no_overflow(every: int) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = gradmon.watch(model, optimizer, every=every, on_spike=None)
    for step in range(41):
        if 10 <= step < 30:  # as many in a row would be a scaler that never finds its scale
            with pytest.raises(RuntimeError, match="out of data"):
                _by_closure(optimizer, model, fails=True)
        else:
            _by_closure(optimizer, model, fails=False)
        if step == 20:
            monitor.get_step_metrics()
            reason = monitor.missing().get("gradmon/update_norm", "")
    counts = monitor.get_step_counts()
    assert (counts.attempted, counts.applied, counts.interrupted, counts.overflowed, counts.nonfinite) == (41, 21, 20, 0, 0)
    assert "its closure raised RuntimeError" in str(monitor.why(10))
    if every == 1:
        assert "updates" in reason or "its closure raised RuntimeError" in reason
    assert not any(finding.rule == "non-finite-gradient" for finding in monitor.diagnose().findings)


def test_counts_of_interrupted_steps_are_resumed() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = gradmon.watch(model, optimizer)
    _by_closure(optimizer, model, fails=False)
    with pytest.raises(RuntimeError, match="out of data"):
        _by_closure(optimizer, model, fails=True)
    _by_closure(optimizer, model, fails=False)
    state = monitor.state_dict()
    monitor.detach()
    other = ModuleMonitor(model, preset="standard")
    other.attach(optimizer)
    other.load_state_dict(state)
    assert (other.get_step_counts().interrupted, other.get_step_counts().overflowed) == (1, 0)


@pytest.mark.parametrize("accepts", [True, False])
def test_a_state_after_a_closure_that_raised_has_its_step(accepts: bool) -> None:
    """As of a script that catches the error, saves, and is started again."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    def fails() -> torch.Tensor:
        closure()
        raise RuntimeError("out of memory")

    monitor = gradmon.watch(model, optimizer)
    optimizer.step(closure)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(fails)
    state = monitor.state_dict()
    if not accepts:
        with pytest.raises(ValueError, match="nothing was loaded"):
            monitor.load_state_dict({**state, "detectors": {"grad_norm": 3}})
    else:
        monitor.detach()
        monitor = gradmon.watch(model, optimizer)
        monitor.load_state_dict(state)
    optimizer.step(closure)
    assert monitor.last_record.step == 2
    assert monitor.get_step_metrics()["gradmon/steps_not_applied"] == 1
    counts = monitor.get_step_counts()
    assert (counts.attempted, counts.applied, counts.interrupted) == (3, 2, 1)
