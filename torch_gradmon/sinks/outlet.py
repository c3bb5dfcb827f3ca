"""An outlet stands between the monitor and one sink: it filters keys, thins steps, and keeps the sink's failures from training."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import Complaints, display
from ..names import compile_pattern

#: Failures in a row after which a sink is dropped.
PATIENCE = 3


class Outlet:
    """One sink with its filter.

    Args:
        sink: an object with ``log(dict, step=)`` or ``log_metrics(dict, step=)``, or a callable of the same arguments.
        keys: a pattern; only keys in which it is found are sent.
        every: only steps that are divisible by it are sent.
        complaints: where failures are reported, each under ``sink:{class}``.
        deferred: values may come one step late, so that nothing waits for the device.

    Raises:
        TypeError: ``sink`` is none of these.
        ValueError: ``every`` is not a positive int, or ``keys`` is no valid pattern.
    """

    def __init__(
        self, sink: Any, keys: str | re.Pattern[str] | None, every: int, complaints: Complaints, deferred: bool = False
    ) -> None:
        self._send = _sender(sink)
        self._keys = None if keys is None else compile_pattern(keys, "keys")
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every={every!r} must be a positive int, such as 10 for every tenth step")
        self.sink = sink
        self.every = every
        self.deferred = deferred
        self.dropped = False
        self._failures = 0
        self._complaints = complaints
        self._cause = complaints.unused(f"sink:{self.name}")

    @property
    def name(self) -> str:
        """The sink's class, for messages."""
        return getattr(self.sink, "__name__", type(self.sink).__name__)

    def send(self, values: Mapping[str, float], step: int) -> None:
        """Give the step's values to the sink. Never raises: a failing sink is tried again with the next step, then dropped."""
        if step % self.every:
            return
        if self.dropped:
            self._complaints.counts[self._cause] += 1
            return
        chosen = {key: value for key, value in values.items() if self._keys is None or self._keys.search(key)}
        try:
            self._send(chosen, step)
            self._failures = 0
        except Exception as error:
            self._failures += 1
            self.dropped = self._failures >= PATIENCE
            self._complaints.add(
                self._cause,
                f"the sink {self.name} failed in step {step}; training goes on, the step is lost there, "
                f"and after {PATIENCE} failures in a row the sink is dropped",
                error,
            )

    def close(self) -> None:
        """Close the sink where it can be closed. Never raises."""
        close = getattr(self.sink, "close", None)
        if callable(close):
            try:
                close()
            except Exception as error:
                self._complaints.add(f"{self._cause}:close", f"the sink {self.name} could not be closed", error)


def _sender(sink: Any) -> Callable[[dict[str, float], int], Any]:
    for method in ("log", "log_metrics"):
        function = getattr(sink, method, None)
        if callable(function):
            return lambda values, step: function(values, step=step)
    if callable(sink):
        return lambda values, step: sink(values, step=step)
    raise TypeError(
        f"a sink needs a method log(dict, step=) or log_metrics(dict, step=), or must be callable, got {display(sink)}"
    )
