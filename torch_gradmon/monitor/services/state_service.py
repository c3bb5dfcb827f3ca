"""The state that a resumed run needs, and a monitor in one line of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...core.errors import display
from ...runs.detail_request import request_text
from ..config import BUILT_IN_PLUGINS
from ..runtime import Runtime
from .metrics_service import MetricsService
from .queries import Queries

#: Parts that are absent from states of monitors without a spike policy, and of earlier versions.
_OPTIONAL_PARTS = {"attempted", "acting", "clipping", "plugins"}
#: Parts of plugins that a monitor brings, with their names; those of the user's are in the part ``plugins`` by name.
_PARTS = {"acting": "spike_policy", "clipping": "clipping"}


@dataclass(slots=True)
class StateService:
    """Saves and loads the state of a runtime."""

    runtime: Runtime

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers and lists."""
        runtime = self.runtime
        Queries(runtime).settle_now()
        runtime.lifecycle.hooks.wake()  # so that plugins have seen all steps
        records = {"summary": runtime.factory.summary.state_dict(), "detectors": runtime.pipeline.detection.state_dict()}
        steps = {"next_step": runtime.state.next_attempt, "attempted": runtime.state.clock.attempts}
        parts = {part: plugin.state_dict() for part, name in _PARTS.items() if (plugin := runtime.plugin(name)) is not None}
        states = {plugin.name: plugin.state_dict() for plugin in runtime.plugins if plugin.name not in BUILT_IN_PLUGINS}
        own = {name: state for name, state in states.items() if state is not None}
        return {**steps, **records, **parts, **({"plugins": own} if own else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, or leave everything as it was and raise."""
        self._check(state)
        before, part = self.state_dict(), ""
        try:
            for part in before:
                if part in state or part not in _OPTIONAL_PARTS:
                    self._load(part, state[part])
        except Exception as error:  # a checkpoint may be of somebody else
            for each, value in before.items():
                self._load(each, value)
            raise ValueError(
                f"state[{part!r}] is not what ModuleMonitor.state_dict() gives, got {display(state.get(part))}; nothing was loaded"
            ) from error

    def _check(self, state: object) -> None:
        if not isinstance(state, Mapping):
            raise TypeError(f"expected the dict of ModuleMonitor.state_dict(), got {display(state)}")
        absent = {"next_step", "summary", "detectors"} - state.keys()
        if absent:
            raise ValueError(f"this is no state of a ModuleMonitor: it lacks {', '.join(sorted(absent))}; it has {sorted(state)}")
        mine = self.runtime.pipeline.detection.detector_set.detectors
        if not isinstance(state["detectors"], Mapping) or set(state["detectors"]) != set(mine):
            raise ValueError(
                f"state['detectors'] has {display(state['detectors'])} and this monitor detectors of {sorted(mine)}; "
                "add detectors of the same signals before loading"
            )

    def _load(self, part: str, value: Any) -> None:
        runtime = self.runtime
        if part == "next_step":
            runtime.connection.continue_at(int(value))
        elif part == "attempted":
            runtime.state.clock.count_from(int(value))
        elif part in _PARTS:
            runtime.plugin(_PARTS[part]).load_state_dict(value)
        elif part == "plugins":
            for plugin in runtime.plugins:
                if plugin.name in value:
                    plugin.load_state_dict(value[plugin.name])
        elif part == "summary":
            runtime.factory.summary.load_state_dict(value)
        else:
            runtime.pipeline.detection.load_state_dict(value)

    def text(self) -> str:
        """The ``repr`` of the monitor."""
        return f"ModuleMonitor({', '.join(self._words())})"

    def table(self) -> str:
        """The monitor in one line, and a line for each part of the model that trains, is frozen, or has no optimizer."""
        setup = self.runtime.plugin("setup_check")
        return "\n  ".join([self.text(), *map(str, [] if setup is None else setup.parts())])

    def _words(self) -> Iterator[str]:
        runtime, module = self.runtime, self.runtime.planner.module
        count = len(runtime.planner.registry.metrics)
        yield "nothing" if module is None else type(module).__name__
        yield "1 metric" if count == 1 else f"{count} metrics"
        yield "no step yet" if runtime.state.clock.step is None else f"step {runtime.state.clock.step}"
        if spikes := len({event.step for event in runtime.pipeline.history.recent().events}):
            yield f"{spikes} of the last steps with spikes"
        if (detail := MetricsService(runtime).detail()) is not None:
            yield f"for now {request_text(detail.facts())}"
        if runtime.fence.inert:
            yield "disabled by GRADMON_DISABLE"
        elif runtime.loop is None and not runtime.state.is_manual:
            yield "not attached to an optimizer"
        if place := runtime.pipeline.directory.description:
            yield place
