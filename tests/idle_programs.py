"""Random loops whose idle steps are counted, and the same ones with all steps followed: everything that can be seen of both is equal.

``python -m tests.idle_programs 0 1000`` runs the programs of these seeds and prints those that differ.
"""

from __future__ import annotations

import copy
import pickle
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_gradmon as gradmon
from torch_gradmon.monitor.program import StepProgram
from torch_gradmon.plugins import loop_audit

#: The steps after which a loop is trusted here, so that short programs have idle steps that are counted.
TRUSTED = 2


class Interrupted(Exception):
    """What the program itself raises."""


class Net(nn.Module):
    """Runs in one piece or by its parts, checkpointed or not, and may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 1)
        self.fails, self.checkpoints = False, False

    def forward(self, x: Tensor) -> Tensor:
        """A column."""
        if self.fails:
            raise Interrupted("forward")
        hidden = checkpoint(self.body, x, use_reentrant=False) if self.checkpoints else self.body(x)
        return torch.as_tensor(self.head(hidden))


class Stepper(torch.optim.SGD):
    """SGD that may fail, or call the model in its step."""

    before: Callable[[], object] | None = None

    def step(self, closure: Any = None) -> Any:
        if self.before is not None:
            self.before()
        return super().step(closure)  # its hooks fire twice, as in many classes of others


class Program(NamedTuple):
    """A loop, as names of methods of :class:`Loop` with their arguments."""

    every: int
    optimizer: str
    metrics: tuple[str, ...]
    moves: tuple[tuple[Any, ...], ...]


#: What may happen at any place of a plain loop, by kind: a program draws some kinds.
ODD: dict[str, list[tuple[Any, ...]]] = {
    "evaluation": [("evaluate", False), ("evaluate", True), ("mode", False), ("mode", True), ("mode", True)],
    "parts": [("by_parts",)],
    "failure": [("forward_fails",), ("backward_fails",), ("step_fails",), ("hook_fails", True), ("hook_fails", False)],
    "closure": [("closure", False), ("closure", True)],
    "within": [("step_calls_model",), ("steps_in_backward",)],
    "checkpoint": [("checkpoints", True), ("checkpoints", False)],
    "function": [("functional",), ("copies",)],
    "parameters": [("adds_group",), ("freezes", True), ("freezes", False)],
    "scaler": [("scaled", 1.0), ("scaled", 1.0), ("scaled", float("inf"))],
    "optimizers": [("other_steps",), ("replaces",), ("attach",)],
    "values": [("log", "early"), ("log", "late"), ("tag", "a"), ("tag", "b"), ("ask",), ("save",)],
    "position": [("load", 0), ("load", 1), ("load", 3), ("load", -4), ("load", 7)],
    "detail": [
        ("detail", {"every": 1}),
        ("detail", {"every": 2, "steps": 3}),
        ("detail", {"preset": "full"}),
        ("detail", {"reset": True}),
    ],
    "metrics": [("metric", "activation"), ("metric", "update"), ("metric", "full")],
    "pause": [("pause",), ("go_on",), ("go_on",)],
    "away": [("detach",), ("attach",), ("attach",)],
    "hand": [("begin", 0), ("begin", 1), ("begin", 5), ("end",), ("end",), ("attach",)],
    "clip": [("clip", True), ("clip", False)],
    "order": [("step",), ("forward",), ("backward",), ("clear",)],
    "size": [("forward", 1e4), ("forward", 1e4), ("forward", float("inf"))],
}


def draw(seed: int) -> Program:
    """The program of a seed: plain steps first, then other moves among them, alone or as habits."""
    chance = random.Random(seed)
    kinds = chance.sample(list(ODD), chance.choice([1, 1, 2, 3, 5, 8]))
    rate, micro_batches, plain = (
        chance.choice([0.004, 0.01, 0.03, 0.1]),
        chance.choice([1, 1, 1, 2, 3]),
        chance.choice([6, 15, 30]),
    )
    moves: list[tuple[Any, ...]] = []
    habit: tuple[str, tuple[Any, ...]] | None = None

    def odd() -> tuple[Any, ...]:
        return chance.choice(ODD[chance.choice(kinds)])

    for number in range(plain + chance.choice([40, 70, 110])):
        micro_batches = chance.choice([1, 2, 3, 5]) if chance.random() < 0.02 else micro_batches
        for move in ["clear", *["forward", "backward"] * micro_batches, "step"]:
            moves.append((move,))
            if number < plain:
                continue
            moves += [odd()] if chance.random() < rate else []
            moves += [habit[1]] if habit is not None and habit[0] == move else []
            if chance.random() < 0.006:
                habit = move, odd()
            elif chance.random() < 0.01:
                habit = None
    metrics = tuple(chance.sample(["activation", "update", "gradient"], chance.choice([0, 0, 1, 2])))
    return Program(chance.choice([3, 5, 10, 30]), chance.choice(["stepper", "adam", "fused", "sgd"]), metrics, tuple(moves))


class Loop:
    """Carries a program out; ``is_watched``: under a monitor."""

    def __init__(self, program: Program, is_watched: bool) -> None:
        torch.manual_seed(0)
        self.program, self.model, self.loss = program, Net(), torch.zeros(())
        self.optimizer, self.other = self._optimizer(), torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.01)
        self.scaler: torch.amp.GradScaler | None = None
        self.pauses: list[AbstractContextManager[object]] = []
        self.monitor = gradmon.watch(self.model, self.optimizer, every=program.every) if is_watched else None
        self.rows: list[tuple[int, str]] = []
        if self.monitor is not None:
            self.monitor.add_sink(lambda values, step: self.rows.append((step, _shown(values))))
            for name in program.metrics:
                self.metric(name)

    def _optimizer(self) -> torch.optim.Optimizer:
        parameters = self.model.parameters()
        makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
            "stepper": lambda: Stepper(parameters, lr=0.01),
            "adam": lambda: torch.optim.Adam(parameters, lr=0.001),
            "fused": lambda: torch.optim.Adam(parameters, lr=0.001, fused=True),
            "sgd": lambda: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        }
        return makers[self.program.optimizer]()

    def run(self) -> list[Any]:
        """All that can be seen of the run, move by move."""
        seen: list[Any] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for move, *arguments in self.program.moves:
                try:
                    result = getattr(self, move)(*arguments)
                except (
                    Interrupted,
                    RuntimeError,
                    ValueError,
                    AssertionError,
                ) as error:  # torch's own answers are part of it, too
                    result = f"{type(error).__name__}: {error}"
                seen.append((move, arguments, repr(result), *self._state(), len(caught)))
            while self.pauses:
                self.go_on()
            if self.monitor is not None:
                self.detach()
                records = self.monitor._runtime.pipeline.history.records()
                seen.append([(record.step, record.applied, record.context.get("tags")) for record in records])
                seen += [self.rows, self.monitor.warning_counts(), self.save(), [str(warning.message) for warning in caught]]
        return [*seen, repr([value.tolist() for value in self.model.state_dict().values()])]  # NaN is equal to itself then

    def _state(self) -> tuple[Any, ...]:
        monitor = self.monitor
        return (
            ()
            if monitor is None
            else (monitor.current_step, monitor._runtime.state.ended, str(monitor.get_step_counts()), len(self.rows))
        )

    # --- the loop --------------------------------------------------------------------------------------------------------------

    def _called(self) -> Tensor:
        return torch.as_tensor(self.model(torch.randn(6, 3)))

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def forward(self, factor: float = 1.0) -> None:
        self.loss = self._called().square().mean() * factor

    def by_parts(self) -> None:
        self.model.head(self.model.body(torch.randn(6, 3))).square().mean().backward()

    def backward(self) -> None:
        if self.loss.requires_grad:
            loss, self.loss = self.loss, torch.zeros(())
            loss.backward()

    def step(self) -> None:
        self.optimizer.step()

    def evaluate(self, with_gradients: bool) -> None:
        was_training = self.model.training
        self.model.eval()
        with torch.set_grad_enabled(with_gradients):
            loss = self._called().square().mean()
        if with_gradients:
            loss.backward()
        self.model.train(was_training)

    def mode(self, is_training: bool) -> None:
        self.model.train(is_training)

    def forward_fails(self) -> None:
        self.model.fails = True
        try:
            self._called()
        finally:
            self.model.fails = False

    def backward_fails(self) -> None:
        def fails(gradient: Tensor) -> None:
            raise Interrupted("backward")

        output = self._called()
        output.register_hook(fails)
        output.sum().backward()

    def _step_with(self, before: Callable[[], object]) -> None:
        if isinstance(self.optimizer, Stepper):
            self.optimizer.before = before
            try:
                self.optimizer.step()
            finally:
                self.optimizer.before = None

    def step_fails(self) -> None:
        def fails() -> None:
            raise Interrupted("step")

        self._step_with(fails)

    def step_calls_model(self) -> None:
        self._step_with(self._called)

    def hook_fails(self, is_before: bool) -> None:
        def fails(*arguments: object) -> None:
            raise Interrupted("hook")

        register = self.optimizer.register_step_pre_hook if is_before else self.optimizer.register_step_post_hook
        handle = register(fails)
        try:
            self.optimizer.step()
        finally:
            handle.remove()

    def closure(self, fails: bool) -> None:
        def closure() -> float:
            self.clear()
            self.forward()
            if fails:
                raise Interrupted("closure")
            self.backward()
            return 0.0

        self.optimizer.step(closure)

    def steps_in_backward(self) -> None:
        handle = self.model.head.weight.register_post_accumulate_grad_hook(lambda parameter: self.optimizer.step())
        try:
            self._called().square().mean().backward()
        finally:
            handle.remove()

    def checkpoints(self, are_on: bool) -> None:
        self.model.checkpoints = are_on

    def functional(self) -> None:
        parameters = dict(self.model.named_parameters())
        self.loss = torch.func.functional_call(self.model, parameters, (torch.randn(6, 3),)).square().mean()

    def copies(self) -> None:
        copy.deepcopy(self.optimizer).step()
        for copied in (copy.deepcopy(self.model), pickle.loads(pickle.dumps(self.model))):
            copied(torch.randn(6, 3)).sum().backward()

    def adds_group(self) -> None:
        self.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})

    def freezes(self, is_frozen: bool) -> None:
        self.model.head.requires_grad_(not is_frozen)

    def scaled(self, factor: float) -> None:
        self.scaler = self.scaler or torch.amp.GradScaler("cpu", init_scale=4.0)
        self.clear()
        self.scaler.scale(self._called().square().mean() * factor).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def other_steps(self) -> None:
        self.other.step()

    def replaces(self) -> None:
        self.optimizer = self._optimizer()

    def clip(self, by_monitor: bool) -> None:
        if by_monitor and self.monitor is not None:
            self.monitor.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    # --- the monitor -----------------------------------------------------------------------------------------------------------

    def log(self, key: str) -> None:
        if self.monitor is not None:
            self.monitor.log_scalar(key, 1.5)

    def tag(self, name: str) -> None:
        if self.monitor is not None:
            self.monitor.log_context(**{name: 1})

    def ask(self) -> Any:
        monitor = self.monitor
        if monitor is None:
            return None
        ahead = [monitor.is_step_monitored((monitor.current_step or 0) + offset) for offset in range(-2, 4)]
        return _shown(monitor.get_step_metrics()), sorted(monitor.missing().items()), ahead, monitor.is_monitoring()

    def save(self) -> Any:
        state = {} if self.monitor is None else self.monitor.state_dict()
        return {part: repr(state.get(part)) for part in ("next_step", "attempted")}

    def load(self, offset: int) -> None:
        if self.monitor is not None:
            state = self.monitor.state_dict()
            self.monitor.load_state_dict({**state, "next_step": max(0, state["next_step"] + offset)})

    def detail(self, arguments: dict[str, Any]) -> None:
        if self.monitor is not None:
            self.monitor.set_detail(**arguments)

    def metric(self, name: str) -> None:
        if self.monitor is not None:
            add: dict[str, Callable[[], object]] = {
                "activation": lambda monitor=self.monitor: monitor.add_activation_metric("mean"),
                "update": lambda monitor=self.monitor: monitor.add_update_metric("norm"),
                "gradient": lambda monitor=self.monitor: monitor.add_gradient_metric("max"),
                "full": lambda monitor=self.monitor: monitor._runtime.use_preset("full"),
            }
            add[name]()

    def pause(self) -> None:
        if self.monitor is not None:
            self.pauses.append(self.monitor.no_monitor())
            self.pauses[-1].__enter__()

    def go_on(self) -> None:
        if self.pauses:
            self.pauses.pop().__exit__(None, None, None)

    def detach(self) -> None:
        if self.monitor is not None:
            self.monitor.detach()

    def attach(self) -> None:
        if self.monitor is not None:
            self.monitor.attach(self.optimizer)

    def begin(self, offset: int) -> Any:
        return None if self.monitor is None else self.monitor.begin_step((self.monitor.current_step or 0) + offset)

    def end(self) -> None:
        if self.monitor is not None:
            self.monitor.end_step()


def _shown(values: dict[str, float]) -> str:
    return repr(sorted((key, value) for key, value in values.items() if "overhead" not in key))


@contextmanager
def _counting(is_on: bool) -> Iterator[list[int]]:
    """The steps that were only counted."""
    counted: list[int] = []
    begin, ended, trusted = StepProgram.begin, StepProgram.idle_step_ended, loop_audit.TRUSTED

    def step_ended(self: StepProgram, *arguments: Any) -> bool:
        is_all = ended(self, *arguments)
        counted.extend([self._state.ended or 0] * is_all)
        return is_all

    StepProgram.idle_step_ended, loop_audit.TRUSTED = step_ended, TRUSTED  # type: ignore[method-assign]
    if not is_on:
        StepProgram.begin = lambda self, steps: None  # type: ignore[method-assign]
    try:
        yield counted
    finally:
        StepProgram.begin, StepProgram.idle_step_ended, loop_audit.TRUSTED = begin, ended, trusted  # type: ignore[method-assign]


def run(program: Program, counts: bool = True, is_watched: bool = True) -> tuple[list[Any], int]:
    """All that can be seen of a run, and how many steps were only counted; none unless it ``counts``."""
    with _counting(counts) as counted:
        return Loop(program, is_watched).run(), len(counted)


def differences(program: Program) -> tuple[list[str], int]:
    """What a run in which steps are counted shows otherwise than one in which all are followed, and the number of such steps."""
    (seen, counted), (expected, _), (alone, _) = run(program), run(program, counts=False), run(program, is_watched=False)
    found = [f"counted  {a}\n    followed {b}" for a, b in zip(seen, expected, strict=True) if a != b][:1]
    return found + ["the model is not that of a run without a monitor"] * (seen[-1] != alone[-1]), counted


def main(first: int, end: int) -> int:
    """Run the programs of these seeds; the number of those that differ is capped as an exit code."""
    torch.set_num_threads(1)
    start, failed, steps = time.perf_counter(), 0, 0
    for seed in range(first, end):
        found, counted = differences(draw(seed))
        steps += counted
        if found:
            failed += 1
            print(f"seed {seed}", *found, sep="\n    ", flush=True)
    print(f"{end - first} programs, {steps} counted steps: {failed} differ, {time.perf_counter() - start:.0f} s")
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
