"""A loop that was clean for long is looked at now and then only, and what begins late is found all the same."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.plugins.loop_audit import LOOKED, MOST_RESTED, RESTED, TRUSTED, Rest

from .test_traced_step import Trace

ROUND = RESTED + LOOKED


def test_pauses_become_longer_and_looks_do_not() -> None:
    rest, on = Rest(), []
    for _ in range(TRUSTED + 6 * MOST_RESTED):
        rest.step_ended(is_clean=True)
        on.append(rest.is_on)
    pauses, looks = (
        [len([*its]) for is_on, its in itertools.groupby(on[TRUSTED - 1 :]) if is_on is wanted] for wanted in (True, False)
    )
    assert not any(on[: TRUSTED - 1])
    assert pauses[:7] == [48, 96, 192, 384, 768, 768, 768]
    assert set(looks) == {LOOKED}


def test_a_pause_is_shorter_than_three_quarters_of_what_was_clean_before_it() -> None:
    rest = Rest()
    for step in range(1, 10_000):
        if rest.step_ended(is_clean=True) and rest.is_on:
            assert rest.left < 0.75 * step


def test_what_is_seen_ends_it_and_trust_begins_anew() -> None:
    rest = Rest()
    for _ in range(TRUSTED):
        rest.step_ended(is_clean=True)
    assert rest.is_on
    assert rest.step_ended(is_clean=False)
    assert not rest.is_on
    assert not any(rest.step_ended(is_clean=True) for _ in range(TRUSTED - 1))


class _Loop:
    def __init__(self, accumulation: int = 1, scaler: bool = False, optimizers: int = 1) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        parts = [self.model] if optimizers == 1 else [self.model[0], self.model[2]]
        self.optimizers = [torch.optim.SGD(part.parameters(), lr=1e-2) for part in parts]
        self.scaler = torch.amp.GradScaler(device="cpu", init_scale=8.0) if scaler else None
        self.accumulation, self.clears = accumulation, True
        self.monitor = gradmon.watch(self.model, *self.optimizers, scaler=self.scaler, every=10**6, on_spike=None)

    def step(self) -> None:
        if self.clears:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        for _ in range(self.accumulation):
            loss = (self.model(torch.randn(8, 4)) - 1).square().mean()
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        for optimizer in self.optimizers:
            if self.scaler is None:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                optimizer.step()
            else:
                self.scaler.unscale_(optimizer)
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()

    def hooks(self) -> int:
        return sum(len(p._post_accumulate_grad_hooks or ()) + len(p._backward_hooks or ()) for p in self.model.parameters())


@pytest.mark.parametrize(
    "make", [_Loop, lambda: _Loop(accumulation=3), lambda: _Loop(scaler=True), lambda: _Loop(accumulation=2, scaler=True)]
)
def test_a_sound_loop_has_no_hook_in_three_steps_of_four_and_is_told_nothing(make: Callable[[], _Loop]) -> None:
    loop = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error", gradmon.GradmonWarning)
        for _ in range(TRUSTED + 5):
            loop.step()
        found = []
        for _ in range(2 * ROUND):
            loop.step()
            found.append(loop.hooks())
    assert set(found) == {0, 1}
    assert found.count(1) == LOOKED  # the second pause is as long as the rest of two rounds
    assert [finding for finding in loop.monitor.diagnose().findings if finding.severity != "info"] == []


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("scaler", [False, True])
def test_a_step_at_rest_makes_no_call_or_few_where_steps_are_followed(accumulation: int, scaler: bool) -> None:
    loop, trace = _Loop(accumulation, scaler), Trace()
    for _ in range(TRUSTED + 5):
        loop.step()
    with trace.on():
        loop.step()
    calls = sum(calls for file, calls in trace.files.items() if file.endswith(("loop_audit.py", "loop_checks.py")))
    assert calls == (12 + 2 * accumulation if scaler else 0)


def test_with_several_optimizers_nothing_rests() -> None:
    loop = _Loop(optimizers=2)
    for _ in range(TRUSTED + RESTED // 2):
        loop.step()
    assert loop.hooks() == 2


@pytest.mark.parametrize("late", [1, RESTED // 2, RESTED, RESTED + LOOKED // 2])
def test_a_mistake_that_begins_late_is_found_in_the_next_round(late: int) -> None:
    loop = _Loop()
    for _ in range(TRUSTED + late):
        loop.step()
    loop.clears = False
    with pytest.warns(gradmon.GradmonWarning, match="not cleared between two steps"):
        for _ in range(ROUND + LOOKED):
            loop.step()
    hooks = []
    for _ in range(ROUND):
        loop.step()
        hooks.append(loop.hooks())
    assert min(hooks) >= 1  # from here on it stays awake
