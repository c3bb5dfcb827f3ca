"""A detector watches one signal, or all signals that match a pattern, and turns the scores of a rule into verdicts."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..core.errors import display
from ..core.formatting import is_multiple, times
from ..core.records import SpikeEvent
from .hampel import Hampel, value_at

if TYPE_CHECKING:
    from .rules import HampelBank, Rule

# --- verdicts ---

#: From this number of signals on, a bank is faster than single rules: three times with a hundred, six times with a thousand.
_TOGETHER = 100


class Verdict(NamedTuple):
    """A detector's verdict on one value.

    Attributes:
        is_spike: whether the value is a spike.
        score: infinite for NaN and Inf, None while the rule warms up.
        threshold: of the score.
        reason: as text; empty without a spike.
        usual: the rule's baseline in units of the signal; None without a spike, or if the rule has no baseline.
    """

    is_spike: bool
    score: float | None
    threshold: float
    reason: str
    usual: float | None = None


def verdict_on(rule: Rule, signal: str, step: int, value: float, learns: bool) -> Verdict:
    """The verdict on ``value``. If the rule ``learns``, it then learns the value unless that is NaN or infinite.

    Raises:
        TypeError: ``value`` is not a number.
    """
    try:
        value = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"value must be a number, got {display(value)} in step {step}") from error
    threshold = float(rule.threshold)
    if not math.isfinite(value):
        return Verdict(True, math.inf, threshold, f"{signal} is {value}", getattr(rule, "baseline", None))
    found = rule.score(value)
    score = None if found is None else float(found)  # a rule may return any number type
    if score is None or not score > threshold:
        verdict = Verdict(False, None if score != score else score, threshold, "")
    else:
        usual = getattr(rule, "baseline", None)  # before it learns the spike
        verdict = Verdict(True, score, threshold, _words(signal, value, usual, score, threshold), usual)
    if learns:
        rule.update(value)
    return verdict


def state_of(rule: Rule) -> dict[str, Any]:
    """What ``rule`` has learned; empty if it has no ``state_dict``."""
    state_dict = getattr(rule, "state_dict", None)
    return state_dict() if callable(state_dict) else {}


def load_state(rule: Rule, state: Mapping[str, Any]) -> None:
    """The inverse of :func:`state_of`."""
    if callable(getattr(rule, "load_state_dict", None)):
        rule.load_state_dict(state)


def _words(signal: str, value: float, usual: float | None, score: float, threshold: float) -> str:
    how = f"(score {score:.3g}, threshold {threshold:g})"
    if usual is None or not is_multiple(value, usual):  # it may be above the other of two medians
        return f"{signal} = {value:.4g} lies above normal {how}"
    return f"{signal} = {value:.4g} is {times(value / usual)} the usual {usual:.4g} {how}"


# --- the detector ---

_METHODS = ("score", "update")


class SpikeDetector:
    """Detects spikes of a signal, step by step. Works with and without a monitor.

    >>> detector = SpikeDetector()
    >>> verdicts = [detector.update(step, value) for step, value in enumerate([1.0, 1.1, 0.9, 1.0] * 10 + [9.0])]
    >>> [step for step, verdict in enumerate(verdicts) if verdict.is_spike]
    [40]
    >>> verdicts[40].reason
    'grad_norm = 9 is 9 times the usual 1 (score 19.2, threshold 5.5)'

    Args:
        rule: an object like ``MedianMad()``, see :class:`torch_gradmon.spikes.Rule`, or a function of the value that returns whether it
            is a spike. Default: :class:`Hampel`, with its preset for losses if the signal's name ends in ``loss``.
        signal: the name of a whole-model value, such as ``grad_norm``, of a logged scalar, such as ``loss``, or a key, such as
            ``update/h.0.attn.weight/norm``. A compiled pattern, such as ``re.compile("^gradient/.*/norm$")``, watches every matching
            key, each with its own copy of the rule.

    Attributes:
        name: the signal, or the pattern.

    Raises:
        TypeError, ValueError: an argument is of another kind.
    """

    def __init__(self, rule: Rule | Callable[[float], Any] | None = None, signal: str | re.Pattern[str] = "grad_norm") -> None:
        text = signal.pattern if isinstance(signal, re.Pattern) else signal
        if not (isinstance(text, str) and text):
            raise ValueError(
                f"signal must be the name of a value, such as 'grad_norm', or a compiled pattern, got {display(signal)}"
            )
        self.signal, self.name = signal, text
        self.rule = _rule(rule, text.rstrip("$"))
        self._fresh = copy.deepcopy(state_of(self.rule))
        # of a pattern: a copy of the rule for each signal, made when that first appears, or a bank in the place of many default ones
        self._rules: dict[str, Rule] = {}
        self._bank: HampelBank | None = None
        self._rows: dict[str, int] = {}  # of the bank, by signal
        self._predicted: tuple[int, float, Verdict] | None = None

    def __repr__(self) -> str:
        return f"SpikeDetector({getattr(self.rule, '__name__', type(self.rule).__name__)}, signal={self.signal!r})"

    def update(self, step: int, value: float) -> Verdict:
        """Score ``value``, then learn it. NaN and Inf are always spikes and are never learned.

        Raises:
            TypeError: ``value`` is not a number.
        """
        known, self._predicted = self._predicted, None
        if known is None or known[:2] != (step, value):
            return verdict_on(self.rule, self.name, step, value, learns=True)
        if math.isfinite(value := float(value)):  # a user's rule is called only once for each value
            self.rule.update(value)
        return known[2]

    def restart(self) -> None:
        """Forget the values of the signal so far: what comes is another quantity. A rule without a ``state_dict`` goes on."""
        self._predicted = None
        load_state(self.rule, self._fresh)

    def predict(self, step: int, value: float) -> Verdict:
        """The verdict that :meth:`update` will return for this value. Nothing is learned.

        Raises:
            TypeError: ``value`` is not a number.
        """
        if self._predicted is None or self._predicted[:2] != (step, value):
            self._predicted = step, value, verdict_on(self.rule, self.name, step, value, learns=False)
        return self._predicted[2]

    def predict_all(self, step: int, values: Mapping[str, float]) -> dict[str, Verdict]:
        """:meth:`predict` for values by key."""
        return self._together(step, values, learns=False)

    def update_all(self, step: int, values: Mapping[str, float]) -> dict[str, Verdict]:
        """:meth:`update` for values by key. Each key has its own rule, created when the key first appears."""
        return self._together(step, values, learns=True)

    def _together(self, step: int, values: Mapping[str, float], learns: bool) -> dict[str, Verdict]:
        is_many = learns and type(self.rule) is Hampel and len(values) >= _TOGETHER
        if self._bank is not None or is_many:
            # it compares logarithms; -inf is allowed, because non-finite values are not learned
            is_negative = any(-math.inf < value < 0 for value in values.values())
            if self._bank is not None and (is_negative or not values.keys() <= self._rows.keys()):
                self._use_rules(self._learned())
            if self._bank is None and is_many and not is_negative:
                self._use_bank(values)
        if self._bank is None:
            return {signal: verdict_on(self._rule_of(signal), signal, step, value, learns) for signal, value in values.items()}
        row = torch.tensor([values.get(signal, math.nan) for signal in self._rows], dtype=torch.float64, device="cpu")
        scores, spikes, usual = (found.tolist() for found in self._bank.verdicts(row, learns))
        verdicts, threshold = {}, self._bank.threshold
        for signal, value in values.items():
            place = self._rows[signal]
            score = scores[place]
            if not spikes[place]:  # a NaN score means that the rule has no score yet
                verdicts[signal] = Verdict(False, score if score == score else None, threshold, "")
                continue
            normal = value_at(usual[place]) if math.isfinite(usual[place]) else None
            reason = _words(signal, value, normal, score, threshold) if math.isfinite(value) else f"{signal} is {value}"
            verdicts[signal] = Verdict(True, score, threshold, reason, normal)
        return verdicts

    def _rule_of(self, signal: str) -> Rule:
        if signal not in self._rules:
            self._rules[signal] = copy.deepcopy(self.rule)
        return self._rules[signal]

    def _use_rules(self, learned: Mapping[str, Any]) -> None:
        self._bank, self._rows, self._rules = None, {}, {}
        for signal, state in learned.items():
            load_state(self._rule_of(signal), state)

    def _use_bank(self, signals: Iterable[str]) -> None:
        assert isinstance(self.rule, Hampel)
        if any(isinstance(each, Hampel) and each.linear for each in self._rules.values()):
            return
        from .rules import HampelBank  # most trainings have few signals

        learned, fresh = self._learned(), self.rule.state_dict()
        self._rows = {name: row for row, name in enumerate(dict.fromkeys([*learned, *signals]))}
        self._bank, self._rules = HampelBank(self.rule, len(self._rows)), {}
        self._bank.load([learned.get(name, fresh) for name in self._rows])

    def _learned(self) -> dict[str, Any]:
        """The state of each signal's rule."""
        if self._bank is not None:
            return {signal: self._bank.state(row) for signal, row in self._rows.items()}
        return {signal: state_of(rule) for signal, rule in self._rules.items()}

    def event(self, step: int, value: float, verdict: Verdict, signal: str | None = None) -> SpikeEvent:
        """The event for a spike."""
        score = math.inf if verdict.score is None else verdict.score
        return SpikeEvent(step, signal or self.name, value, score, verdict.threshold, verdict.reason, verdict.usual)

    def state_dict(self) -> dict[str, Any]:
        """What the rules have learned, as plain numbers and lists, for JSON and ``torch.load(weights_only=True)``."""
        return {"signal": self.name, "kind": type(self.rule).__name__, "rule": state_of(self.rule), "rules": self._learned()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`.

        Raises:
            KeyError, TypeError, ValueError: it is not such a state, or the state of another rule.
        """
        kind, own = state.get("kind"), type(self.rule).__name__
        if kind is not None and kind != own:
            raise ValueError(f"the state of {self.name} is that of the rule {kind}, but this detector uses {own}")
        if not isinstance(state.get("rules", {}), Mapping):
            raise TypeError(f"the rules of {self.name} must be a dict of states by signal, got {display(state['rules'])}")
        self._predicted = None
        load_state(self.rule, state["rule"])
        self._use_rules(state.get("rules", {}))


def _rule(rule: Rule | Callable[[float], Any] | None, signal: str) -> Rule:
    if rule is None:
        return Hampel.for_losses() if signal.lower().endswith("loss") else Hampel()
    if all(callable(getattr(rule, method, None)) for method in _METHODS) and hasattr(rule, "threshold"):
        try:
            inspect.signature(rule.update).bind(0.0)  # type: ignore[union-attr]
        except TypeError as error:
            raise TypeError(f"update of {display(rule)} must take the value and nothing else: {error}") from None
        except ValueError:  # a function written in C may have no signature
            pass
        return rule  # type: ignore[return-value]
    if callable(rule) and not isinstance(rule, type):
        from .rules import FunctionRule

        return FunctionRule(rule)
    raise TypeError(
        f"rule must have the methods {' and '.join(_METHODS)} and a threshold, such as MedianMad(), or be a function of the value, "
        f"got {display(rule)}"
    )
