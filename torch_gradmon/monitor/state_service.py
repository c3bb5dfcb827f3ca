"""The state that a resumed run needs, and a monitor in one line of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.errors import display
from ..runs.detail_request import in_words
from .metrics_service import MetricsService
from .session import Session

#: Parts that are absent from states of monitors without a spike policy, and of earlier versions.
_OPTIONAL_PARTS = {"attempted", "acting", "clipping"}


@dataclass(slots=True)
class StateService:
    """Saves and loads the state of a session."""

    session: Session

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers and lists."""
        session = self.session
        session.settle_now()
        policy = {} if session.actor is None else {"acting": session.actor.state_dict()}
        steps = {"next_step": session.next_attempt, "attempted": session.attempted}
        return {**steps, **session.ledger.state_dict(), **policy, "clipping": session.clips.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, or leave everything as it was and raise."""
        self._check(state)
        before, part = self.state_dict(), ""
        try:
            for part in before:
                if part in state or part not in _OPTIONAL_PARTS:
                    self._load(part, state[part])
        except (KeyError, TypeError, ValueError) as error:
            for each, value in before.items():
                self._load(each, value)
            raise ValueError(
                f"state[{part!r}] is not what ModuleMonitor.state_dict() gives, got {display(state[part])}; nothing was loaded"
            ) from error

    def _check(self, state: object) -> None:
        if not isinstance(state, Mapping):
            raise TypeError(f"expected the dict of ModuleMonitor.state_dict(), got {display(state)}")
        absent = {"next_step", "summary", "detectors"} - state.keys()
        if absent:
            raise ValueError(f"this is no state of a ModuleMonitor: it lacks {', '.join(sorted(absent))}; it has {sorted(state)}")
        mine = self.session.ledger.judges.detectors
        if not isinstance(state["detectors"], Mapping) or set(state["detectors"]) != set(mine):
            raise ValueError(
                f"state['detectors'] has {display(state['detectors'])} and this monitor detectors of {sorted(mine)}; "
                "add detectors of the same signals before loading"
            )

    def _load(self, part: str, value: Any) -> None:
        session = self.session
        if part == "next_step":
            session.next_step = int(value)
        elif part == "attempted":
            session.attempted = int(value)
        elif part == "clipping":
            session.clips.load_state_dict(value)
        elif part == "acting":
            assert session.actor is not None
            session.actor.load_state_dict(value)
        else:
            session.ledger.load_part(part, value)

    def text(self) -> str:
        """The ``repr`` of the monitor."""
        return f"ModuleMonitor({', '.join(self._words())})"

    def _words(self) -> Iterator[str]:
        session, module = self.session, self.session.planner.module
        count = len(session.planner.registry.metrics)
        yield "nothing" if module is None else type(module).__name__
        yield "1 metric" if count == 1 else f"{count} metrics"
        yield "no step yet" if session.step is None else f"step {session.step}"
        if spikes := len({event.step for event in session.ledger.recent().events}):
            yield f"{spikes} of the last steps with spikes"
        if (detail := MetricsService(session).detail()) is not None:
            yield f"for now {in_words(detail.facts())}"
        if session.guard.inert:
            yield "disabled by GRADMON_DISABLE"
        elif session.follower is None and not session.by_hand:
            yield "not attached to an optimizer"
        if place := session.ledger.outbox.place:
            yield place
