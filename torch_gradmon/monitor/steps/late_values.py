"""Values and facts that come when their step has ended: into its record, wherever that is by then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.keys import Key
from ...step.buffer import StepBuffer
from ..machine.step_machine import StepState
from ..pipeline.record_pipeline import PendingQueue, RecordPipeline
from ..plugin_set import PluginSet


class LateValues:
    """The one place for what is added to the last step.

    Args:
        state: of the step machine.
        pipeline: has the record, once its values have come.
        queue: has the step while its values are on their way.
        plugins: may have kept a step that is not monitored.
    """

    def __init__(self, state: StepState, pipeline: RecordPipeline, queue: PendingQueue, plugins: PluginSet) -> None:
        self._state, self._pipeline, self._queue, self._plugins = state, pipeline, queue, plugins
        self.tags = TagLog(state, self)

    def add(self, late: StepBuffer) -> None:
        """Add values."""
        ended = self._state.clock.ended
        pending = self._queue.newest(ended)
        recorded = next((buffer for buffer in self._plugins.call("late_buffer", ended) if buffer is not None), None)
        if recorded is not None:
            recorded.absorb(late)
        elif pending is None:
            self._pipeline.add(late)
        else:
            pending.add(late)

    @property
    def is_kept(self) -> bool:
        """Whether anything takes values of the step that ended last."""
        ended = self._state.clock.ended
        if self._pipeline.last is not None or self._queue.newest(ended) is not None:
            return True
        return any(buffer is not None for buffer in self._plugins.call("late_buffer", ended))

    @property
    def is_stored(self) -> bool:
        """Whether the run directory has the step that ended last already."""
        return self._pipeline.directory.path is not None and self._queue.newest(self._state.clock.ended) is None

    def tag(self, tags: Mapping[str, Any]) -> None:
        """Add facts."""
        ended = self._state.clock.ended
        if any(self._plugins.call("tag_late", ended, tags)):
            return
        if (pending := self._queue.newest(ended)) is not None:
            pending.tags.update(tags)
        else:
            self._pipeline.tag(tags)

    @property
    def absent(self) -> dict[tuple[str, str], str]:
        """Where reasons for missing values of the last step are kept."""
        pending = self._queue.newest(self._state.clock.ended)
        return self._pipeline.absent if pending is None else pending.readback.buffer.absent

    def is_judged(self, key: Key) -> bool:
        """Whether a detector judges the value that is logged under ``key``."""
        return self._pipeline.detection.detector_set.watches(key)


class TagLog:
    """Facts about steps, from the loop.

    Args:
        state: of the step machine.
        late: takes facts of the last step.

    Attributes:
        current: facts of the open step, or of the one to come.
    """

    def __init__(self, state: StepState, late: LateValues) -> None:
        self._state, self._late = state, late
        self.current: dict[str, Any] = {}
        self._undecided: dict[str, Any] = {}
        self._ahead: set[str] = set()  # names that the loop gives before a step's forward

    def add(self, tags: Mapping[str, Any]) -> None:
        """Add facts; see :meth:`ValueLog.tag`."""
        if self._state.clock.step is None:
            self._ahead |= tags.keys()
        late = {} if self._state.is_open else {name: value for name, value in tags.items() if name not in self._ahead}
        self.current.update((name, value) for name, value in tags.items() if name not in late)
        if self._state.patterns.is_undecided:
            self._undecided.update(late)
        elif late:
            self._late.tag(late)

    def take_late(self) -> dict[str, Any]:
        """The facts of the open step, without those that the loop gives before a forward."""
        late = {name: value for name, value in self.current.items() if name not in self._ahead}
        self.current = {name: value for name, value in self.current.items() if name not in late}
        return late

    def rejoin(self, earlier: Mapping[str, Any]) -> None:
        """These are facts of the open step, too."""
        self.current = {**earlier, **self.current}

    def begin(self, is_kept: bool) -> None:
        """A step opens, and what is known of it so far ``is_kept``."""
        self.current, self._undecided = {**self.current, **self._undecided} if is_kept else {}, {}

    def clear(self) -> None:
        """Forget what is known of the step."""
        self.current = {}

    def take(self) -> dict[str, Any]:
        """The step closes: all that is known of it."""
        tags, self.current = self.current, {}
        return tags

    def release(self) -> None:
        """The undecided call was no training: facts since belong to the last step."""
        tags, self._undecided = self._undecided, {}
        if tags:
            self._late.tag(tags)
