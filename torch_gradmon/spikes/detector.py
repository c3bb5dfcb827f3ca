"""A detector watches one signal, or all signals that match a pattern, and turns the scores of a rule into verdicts."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..core.errors import display
from ..core.records import SpikeEvent
from .hampel import Hampel
from .rules import FunctionRule, Rule
from .verdicts import RulePerSignal, Verdict, judge, learn, load_state, state_of, verdict_on

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

    Raises:
        TypeError, ValueError: an argument is of another kind.
    """

    def __init__(self, rule: Rule | Callable[[float], Any] | None = None, signal: str | re.Pattern[str] = "grad_norm") -> None:
        text = signal.pattern if isinstance(signal, re.Pattern) else signal
        if not (isinstance(text, str) and text):
            raise ValueError(
                f"signal must be the name of a value, such as 'grad_norm', or a compiled pattern, got {display(signal)}"
            )
        self.signal = signal
        self.rule = _rule(rule, text.rstrip("$"))
        self._fresh = copy.deepcopy(state_of(self.rule))
        self._rules = RulePerSignal(self.rule)
        self._predicted: tuple[int, float, Verdict] | None = None

    def update(self, step: int, value: float) -> Verdict:
        """Score ``value``, then learn it. NaN and Inf are always spikes and are never learned.

        Raises:
            TypeError: ``value`` is not a number.
        """
        known, self._predicted = self._predicted, None
        if known is not None and known[:2] == (step, value):  # a user's rule is called only once for each value
            learn(self.rule, value)
            return known[2]
        return judge(self.rule, self.name, step, value)

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
            self._predicted = step, value, verdict_on(self.rule, self.name, step, value)
        return self._predicted[2]

    def predict_all(self, step: int, values: Mapping[str, float]) -> dict[str, Verdict]:
        """:meth:`predict` for values by key."""
        return self._rules.predict(step, values)

    def update_all(self, step: int, values: Mapping[str, float]) -> dict[str, Verdict]:
        """:meth:`update` for values by key. Each key has its own rule, created when the key first appears."""
        return self._rules.update(step, values)

    def event(self, step: int, value: float, verdict: Verdict, signal: str | None = None) -> SpikeEvent:
        """The event for a spike."""
        score = math.inf if verdict.score is None else verdict.score
        return SpikeEvent(step, signal or self.name, value, score, verdict.threshold, verdict.reason, verdict.usual)

    @property
    def name(self) -> str:
        """The signal, or the pattern."""
        return self.signal if isinstance(self.signal, str) else self.signal.pattern

    def state_dict(self) -> dict[str, Any]:
        """What the rules have learned, as plain numbers and lists, for JSON and ``torch.load(weights_only=True)``."""
        return {
            "signal": self.name,
            "kind": type(self.rule).__name__,
            "rule": state_of(self.rule),
            "rules": self._rules.state_dict(),
        }

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
        self._rules.load_state_dict(state.get("rules", {}))


def _rule(rule: Rule | Callable[[float], Any] | None, signal: str) -> Rule:
    if rule is None:
        return Hampel.for_losses() if signal.lower().endswith("loss") else Hampel()
    if all(callable(getattr(rule, method, None)) for method in _METHODS) and hasattr(rule, "threshold"):
        _check_update(rule)
        return rule  # type: ignore[return-value]
    if callable(rule) and not isinstance(rule, type):
        return FunctionRule(rule)
    raise TypeError(
        f"rule must have the methods {' and '.join(_METHODS)} and a threshold, such as MedianMad(), or be a function of the value, "
        f"got {display(rule)}"
    )


def _check_update(rule: object) -> None:
    try:
        inspect.signature(rule.update).bind(0.0)  # type: ignore[attr-defined]
    except ValueError:  # a function written in C may have no signature
        return
    except TypeError as error:
        raise TypeError(f"update of {display(rule)} must take the value and nothing else: {error}") from None
