"""Alerts that call: spikes and findings to a webhook or a function, from a thread of their own."""

from __future__ import annotations

import contextlib
import html
import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

from ..core.errors import display
from ..core.formatting import placed
from ..core.loop_mistakes import MISTAKES, RANK_FAULTS, SETUP_MISTAKES, LoopFinding
from ..core.records import SpikeEvent
from ..core.torch_modes import HomeProcess
from .delivery import Outbox

Kind = Literal["spike", "finding", "stalled"]
#: Seconds that a receiver has to answer, the attempts, and the seconds before the second one, which double with each.
TIMEOUT, ATTEMPTS, PAUSE = 5.0, 5, 1.0
#: Alerts that may wait, and seconds that the end of the training waits for them.
_WAITING, _LAST = 100, 10.0
#: Seconds between two alerts about the same signal.
QUIET = 60.0
_MISTAKES = {**MISTAKES, **RANK_FAULTS, **SETUP_MISTAKES}
#: Hosts whose webhooks take a text and nothing else.
_TEXT_ONLY = ("slack.com",)


@dataclass(frozen=True)
class Alert:
    """What a receiver gets.

    Attributes:
        kind: of the alert.
        text: for people.
        run: the run directory, or what the alert was asked to name; may be empty.
        step: of the spike, of the first occurrence, or the last one; None if there is none.
        what: the signal, or the rule.
        where: the layer, if it is known.
    """

    kind: Kind
    text: str
    run: str = ""
    step: int | None = None
    what: str = ""
    where: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def post(url: str, alert: Alert, timeout: float = TIMEOUT) -> None:
    """Send an alert to a webhook as JSON; Slack gets the text alone.

    Raises:
        OSError: it cannot be reached, or has answered with an error.
    """
    host = urlsplit(url).hostname or ""
    is_text = any(host == known or host.endswith(f".{known}") for known in _TEXT_ONLY)
    # in escaped text Slack finds no mentions and no links, see "Escaping text" in its "Formatting message text"
    body = {"text": html.escape(alert.text, quote=False)} if is_text else alert.to_dict()
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout).close()
    except urllib.error.HTTPError as answer:  # of 300 and above
        answer.close()
        raise


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A webhook that has moved is an error: urllib would follow with a GET, which has no body."""

    def redirect_request(self, *args: Any, **options: Any) -> None:
        """None makes the answer an HTTPError."""


class Messenger:
    """Calls a receiver in a thread of its own, again and again where it fails. Never waits, never raises.

    Args:
        target: the address of a webhook, or a function of an :class:`Alert`.
        pause: seconds before the second attempt.

    Attributes:
        lost: alerts that were given up.

    Raises:
        TypeError: it is neither.
        ValueError: the address is not one of http or https.
    """

    def __init__(self, target: str | Callable[[Alert], object], pause: float = PAUSE) -> None:
        if isinstance(target, str):
            parts = urlsplit(target)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(
                    f"an alert goes to an address such as 'https://example.org/hook', or to a function; got {target!r}"
                )
        elif not callable(target):
            raise TypeError(f"an alert goes to the address of a webhook or to a function, got {display(target)}")
        self._target, self._pause, self.lost = target, pause, 0
        self._process, self._outbox = HomeProcess(), Outbox("torch_gradmon alerts", _WAITING, self._deliver)

    def __repr__(self) -> str:
        """Where it calls; the path of an address may be a secret."""
        return repr(urlsplit(self._target).hostname) if isinstance(self._target, str) else display(self._target)

    def send(self, alert: Alert) -> None:
        """Queue an alert; it is lost if a hundred wait already."""
        if self._process.is_forked:
            return
        try:
            self._outbox.put(alert)
        except (queue.Full, RuntimeError):  # a thread cannot begin while the interpreter ends
            self.lost += 1

    def close(self, seconds: float = _LAST) -> None:
        """Give what waits one last chance, for so long at most."""
        if not self._process.is_forked:
            self._outbox.close(seconds)

    def _deliver(self, alert: Alert, ending: threading.Event) -> None:
        call = partial(post, self._target) if isinstance(self._target, str) else self._target
        for attempt in range(ATTEMPTS):
            with contextlib.suppress(Exception, SystemExit):  # a receiver that is down must not end anything
                call(alert)
                return
            if ending.is_set() or attempt == ATTEMPTS - 1:
                break
            ending.wait(self._pause * 2**attempt)
        self.lost += 1


class AlertSink:
    """Calls a webhook or a function about spikes and findings, from a thread of its own: training never waits for it, and never stops.

    ``monitor.add_sink(AlertSink("https://..."))``, or ``watch(..., log_to=AlertSink(...))``. A webhook gets JSON with ``kind``, ``text``,
    ``run``, ``step``, ``what`` (the signal or rule) and ``where``; one of Slack the text alone. A function gets the same as a
    :class:`torch_gradmon.sinks.Alert`. A failed call is repeated four times, after 1, 2, 4 and 8 seconds, then counted as lost in
    :meth:`ModuleMonitor.warning_counts`. A signal calls once a minute at most, a finding once. Findings are those that the training
    makes itself: mistakes of the loop, of the setup and of the data, differences between ranks, and signs of a divergence; all rules are
    applied by :meth:`ModuleMonitor.diagnose`. At the end ten seconds are given to what is under way.

    Args:
        target: the address of a webhook, or a function.
        on: ``"spike"``, ``"finding"``, or both.

    Raises:
        TypeError: ``target`` is neither.
        ValueError: the address is not one of http or https, or ``on`` is unknown. A training that stalls cannot call: ``"stalled"``
            comes from outside, by ``gradmon serve --alert``.
    """

    takes_values = False
    #: A function of the script may hold its model, so the monitor holds the sink no longer than any other.
    is_of_script = True

    def __init__(
        self,
        target: str | Callable[[Alert], object],
        on: Literal["spike", "finding"] | Iterable[Literal["spike", "finding"]] = ("spike", "finding"),
    ) -> None:
        chosen = {on} if isinstance(on, str) else set(on)
        if "stalled" in chosen:
            raise ValueError(
                "a training that stalls cannot call: 'stalled' comes from outside, by 'gradmon serve DIRECTORY --alert URL' on this machine"
            )
        if not chosen or chosen - {"spike", "finding"}:
            raise ValueError(f"on= takes 'spike', 'finding' or both, got {on!r}")
        self._on, self._run = chosen, ""
        self._findings: Callable[[], Sequence[LoopFinding]] = list
        self._messenger = Messenger(target)
        self._last: dict[str, float] = {}
        self._withheld: dict[str, tuple[int, SpikeEvent, str]] = {}
        self._known: set[str] = set()

    def __repr__(self) -> str:
        return f"AlertSink({self._messenger}, on={sorted(self._on)})"

    def connect(self, run: str, findings: Callable[[], Sequence[LoopFinding]]) -> None:
        """The monitor's run directory, named in alerts, and what returns its findings so far."""
        self._run, self._findings = run, findings

    @property
    def lost(self) -> int:
        """Alerts that were given up."""
        return self._messenger.lost

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Look for new findings."""
        if "finding" not in self._on:
            return
        for finding in self._findings():
            if finding.rule not in self._known:
                self._known.add(finding.rule)
                where = finding.where[0] if finding.where else ""
                known = _MISTAKES.get(finding.rule)
                meaning = "" if known is None else f". {known.cause}. {known.advice}."
                text = f"{placed(finding.rule, where)}, first in step {finding.first}{meaning}"
                self._messenger.send(Alert("finding", self._named(text), self._run, finding.first, finding.rule, where))

    def log_spike(self, event: SpikeEvent, text: str) -> None:
        """Send it, unless the last one of its signal is less than a minute old."""
        if "spike" not in self._on:
            return
        now, count = time.monotonic(), self._withheld.get(event.signal, (0,))[0]
        if now - self._last.get(event.signal, -QUIET) < QUIET:
            self._withheld[event.signal] = count + 1, event, text
            return
        self._last[event.signal] = now
        self._withheld.pop(event.signal, None)
        self._send_spike(event, text, count)

    def _send_spike(self, event: SpikeEvent, text: str, before: int) -> None:
        if before:
            text = f"{text} (and {before} more before)"
        layer, size, _ = event.where.partition(" (")  # where several rose together there is none
        where = layer if size and " " not in layer else ""
        self._messenger.send(Alert("spike", self._named(text), self._run, event.step, event.signal, where))

    def _named(self, text: str) -> str:
        return f"{self._run}: {text}" if self._run else text

    def close(self) -> None:
        """Send the last spike of each signal that was withheld, and wait for what is under way, for ten seconds at most."""
        for count, event, text in self._withheld.values():
            self._send_spike(event, text, count - 1)
        self._withheld.clear()
        self._messenger.close()
