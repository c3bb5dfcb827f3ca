"""An outlet stands between the monitor and one sink: it filters keys and thins steps; a :class:`Delivery` does the rest."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping
from functools import partial
from typing import Any

from ..core.errors import WarningLog
from ..core.keys import compile_pattern
from ..core.records import SpikeEvent
from .adapters import closer, name_of, sender
from .delivery import Delivery, PendingCall, ThreadedDelivery

_NORM = "gradmon/grad_norm"
#: What is put behind the key of the gradient norm for the largest one since the last row.
LARGEST = "_max"


class FilteredSink:
    """One sink with its filter.

    Args:
        sink: an object with ``log(dict, step=)`` or ``log_metrics(dict, step=)``, or a callable of the same arguments. If it has
            a method ``log_spike(event, text)``, that is called for each spike, whatever ``keys`` and ``every`` say.
        keys: a pattern; only keys in which it is found are sent.
        every: only steps that are divisible by it are sent. Where that is more than 1, each row has beside
            ``gradmon/grad_norm`` the largest one since the row before, as ``gradmon/grad_norm_max``.
        complaints: where failures are reported, each under ``sink:{class}``.
        deferred: values may come one step late, so that nothing waits for the device.
        thread: call the sink in a thread of its own.
        kept: where else lost rows can be found, for the message.
        without: keys that are never sent, which may become more.

    Raises:
        TypeError: ``sink`` is none of these.
        ValueError: ``every`` is not a positive int, or ``keys`` is no valid pattern.
    """

    def __init__(
        self,
        sink: Any,
        keys: str | re.Pattern[str] | None,
        every: int,
        complaints: WarningLog,
        deferred: bool = False,
        thread: bool = False,
        kept: str = "",
        without: Container[str] = (),
    ) -> None:
        self._keys = None if keys is None else compile_pattern(keys, "keys")
        self._without = without
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every={every!r} must be a positive int, such as 10 for every tenth step")
        self.sink = sink
        self.every = every
        self.deferred = deferred
        self.given = sink  # what it was made from
        self.is_own = type(sink).__module__.startswith(__package__ or " ")  # which holds nothing of the training
        self.is_on_all_ranks = False  # whether it has values also where another rank speaks
        self._log = sender(self.sink)
        self._complaints = complaints
        self._delivery = (ThreadedDelivery if thread else Delivery)(name_of(self.sink), complaints, kept)
        self._norm: str | None = None
        self._largest = -math.inf
        self._lost = 0

    @property
    def dropped(self) -> bool:
        """Whether the sink was given up."""
        return self._delivery.dropped

    def send(self, values: Mapping[str, float], step: int) -> None:
        """Give the step's values to the sink. Never raises: a failing sink is tried again with the next step, then dropped."""
        if self.every > 1:
            self._note_norm(values)
            if step % self.every:
                return
        chosen = {key: value for key, value in values.items() if self._chooses(key)}
        if self._norm is not None and self._largest != -math.inf:
            chosen[self._norm + LARGEST] = self._largest
            self._largest = -math.inf
        self._delivery.put(PendingCall(step, partial(self._log_copy, chosen, step)))
        # rows that a sink took, kept back, and could keep no longer
        lost, self._lost = getattr(self.sink, "lost", 0) - self._lost, getattr(self.sink, "lost", 0)
        if lost:
            self._delivery.lose(lost)

    def _log_copy(self, values: dict[str, float], step: int) -> None:
        self._log(dict(values), step)  # a sink may do with it as it likes, also where it is tried again

    def _chooses(self, key: str) -> bool:
        return key not in self._without and (self._keys is None or self._keys.search(key) is not None)

    def _note_norm(self, values: Mapping[str, float]) -> None:
        if self._norm is None:
            self._norm = next((key for key in values if key.endswith(_NORM) and self._chooses(key)), None)
        value = values.get(self._norm or "")
        if value is not None and not (math.isnan(self._largest) or value <= self._largest):
            self._largest = value  # also where that is NaN, so that it is seen

    def send_spike(self, event: SpikeEvent, text: str) -> None:
        """Tell the sink of a spike, if it has a method for that. Never raises."""
        log_spike = getattr(self.sink, "log_spike", None)
        if callable(log_spike):
            self._delivery.put(PendingCall(event.step, partial(log_spike, event, text), rows=0))

    def close(self) -> None:
        """Send what waits and close the sink where it can be closed. Never raises."""
        if not self._delivery.close():
            return  # its thread hangs in it, and closing might hang as well
        if (close := closer(self.sink)) is not None:
            try:
                close()
            except (Exception, SystemExit) as error:
                cause = f"{self._delivery.cause}:close"
                self._complaints.add(cause, f"the sink {name_of(self.sink)} could not be closed", error)
