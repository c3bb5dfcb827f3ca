"""What is said of a value: of one signal by its rule, and of many signals by a rule each."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.errors import display
from ..core.formatting import times
from .hampel import Hampel, value_at
from .hampel_bank import HampelBank
from .rules import Rule

#: From so many signals on, judging them one by one takes longer than together.
_TOGETHER = 100


class Verdict(NamedTuple):
    """What a detector says of one value.

    Attributes:
        is_spike: the verdict.
        score: infinite for NaN and Inf, None while the rule warms up.
        threshold: of the score.
        reason: in words; empty when there is no spike.
        usual: what the rule took for normal, in units of the signal; None where it does not say, or there is no spike.
    """

    is_spike: bool
    score: float | None
    threshold: float
    reason: str
    usual: float | None = None


def judged(rule: Rule, signal: str, step: int, value: float) -> Verdict:
    """The verdict on ``value``, which is learned afterwards unless it is NaN or infinite.

    Raises:
        TypeError: it is no number.
    """
    verdict = foreseen(rule, signal, step, value)
    learn(rule, value)
    return verdict


def learn(rule: Rule, value: float) -> None:
    """Let ``rule`` learn ``value``, which was scored before."""
    if math.isfinite(value := float(value)):
        rule.update(value)


def foreseen(rule: Rule, signal: str, step: int, value: float) -> Verdict:
    """The verdict on ``value``; nothing is learned.

    Raises:
        TypeError: it is no number.
    """
    try:
        value = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"value must be a number, got {display(value)} in step {step}") from error
    threshold = float(rule.threshold)
    if not math.isfinite(value):
        return Verdict(True, math.inf, threshold, f"{signal} is {value}", getattr(rule, "baseline", None))
    found = rule.score(value)
    score = None if found is None else float(found)  # of any kind of number
    if score is None or not score > threshold:
        score = None if score != score else score
        return Verdict(False, score, threshold, "")
    usual = getattr(rule, "baseline", None)  # before it learns the spike
    return Verdict(True, score, threshold, _words(signal, value, usual, score, threshold), usual)


def state_of(rule: Rule) -> dict[str, Any]:
    """What ``rule`` has learned; nothing where it cannot tell."""
    tell = getattr(rule, "state_dict", None)
    return tell() if callable(tell) else {}


def load_state(rule: Rule, state: Mapping[str, Any]) -> None:
    """The inverse of :func:`state_of`."""
    if callable(getattr(rule, "load_state_dict", None)):
        rule.load_state_dict(state)


class Each:
    """A copy of one rule for each signal, made when the signal comes first. Many of the default rule are judged together.

    Args:
        rule: what is copied.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._rules: dict[str, Rule] = {}
        self._bank: HampelBank | None = None
        self._rows: dict[str, int] = {}

    def update(self, step: int, values: Mapping[str, float]) -> dict[str, Verdict]:
        """Judge ``values`` by signal, then learn them."""
        row = self._row(values)
        if self._bank is not None and row is None:
            self.load_state_dict(self.state_dict())  # into single rules
        if self._bank is None and type(self._rule) is Hampel and len(values) >= _TOGETHER:
            self._unite(values)
            row = self._row(values)
        if self._bank is not None and row is not None:
            return self._told(self._bank, self._bank.update(row), values)
        return {signal: judged(self._single(signal), signal, step, value) for signal, value in values.items()}

    def foresee(self, step: int, values: Mapping[str, float]) -> dict[str, Verdict]:
        """The verdicts that :meth:`update` will give; nothing is learned."""
        row = self._row(values)
        if self._bank is not None and row is None:
            self.load_state_dict(self.state_dict())  # into single rules
        if self._bank is not None and row is not None:
            return self._told(self._bank, self._bank.judged(row), values)
        return {signal: foreseen(self._single(signal), signal, step, value) for signal, value in values.items()}

    def _row(self, values: Mapping[str, float]) -> Tensor | None:
        """What a bank is fed, NaN for signals without a value; None where there is no bank, or none for these values."""
        if self._bank is None or not values.keys() <= self._rows.keys():
            return None
        row = torch.tensor([values.get(signal, math.nan) for signal in self._rows], dtype=torch.float64, device="cpu")
        return None if _is_negative(row) else row

    def _single(self, signal: str) -> Rule:
        if signal not in self._rules:
            self._rules[signal] = copy.deepcopy(self._rule)
        return self._rules[signal]

    def _told(self, bank: HampelBank, judged: tuple[Tensor, ...], values: Mapping[str, float]) -> dict[str, Verdict]:
        scores, spikes, usual = (found.tolist() for found in judged)
        found, threshold = dict(zip(self._rows, scores, strict=True)), bank.threshold
        # NaN is a score that there is not yet
        verdicts = {
            signal: Verdict(False, score if (score := found[signal]) == score else None, threshold, "") for signal in values
        }
        for signal in itertools.compress(self._rows, spikes):
            if signal not in values:
                continue
            value, score = values[signal], found[signal]
            reason, before = f"{signal} is {value}", usual[self._rows[signal]]
            normal = value_at(before) if math.isfinite(before) else None
            if math.isfinite(value):
                reason = _words(signal, value, normal, score, threshold)
            verdicts[signal] = Verdict(True, score, threshold, reason, normal)
        return verdicts

    def _unite(self, signals: Mapping[str, float]) -> None:
        if any(isinstance(rule, Hampel) and rule.linear for rule in self._rules.values()):
            return
        if _is_negative(torch.tensor(list(signals.values()), dtype=torch.float64, device="cpu")):
            return
        names = dict.fromkeys([*self._rules, *signals])
        learned = {name: rule.state_dict() for name, rule in self._rules.items()}
        assert isinstance(self._rule, Hampel)
        self._rows = {name: row for row, name in enumerate(names)}
        with torch.inference_mode(False):  # it will be written to outside of that mode
            self._bank = HampelBank(self._rule, len(names))
        new = self._rule.state_dict()
        self._bank.load([learned.get(name, new) for name in names])
        self._rules = {}

    def state_dict(self) -> dict[str, Any]:
        """The state of each rule, by signal."""
        if self._bank is not None:
            return {signal: self._bank.state(row) for signal, row in self._rows.items()}
        return {signal: state_of(rule) for signal, rule in self._rules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._bank, self._rows, self._rules = None, {}, {}
        for signal, learned in state.items():
            load_state(self._single(signal), learned)


def _is_negative(row: Tensor) -> bool:
    """Whether a bank cannot take it: the logarithm of a negative number is nothing, but not a number is no reason to leave."""
    return bool(((row < 0) & (row != -math.inf)).any())


def _words(signal: str, value: float, usual: float | None, score: float, threshold: float) -> str:
    how = f"(score {score:.3g}, threshold {threshold:g})"
    if usual is None or usual <= 0:
        return f"{signal} = {value:.4g} lies above normal {how}"
    return f"{signal} = {value:.4g} is {times(value / usual)} the usual {usual:.4g} {how}"
