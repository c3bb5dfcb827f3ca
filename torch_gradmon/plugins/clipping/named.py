"""The adaptive clips of a run: those that were asked for by name, and what those in use knew before the step in flight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.validation import one_of
from ...step.active_step import ActiveStep
from ...step.plugin import Plugin
from .adagc import AdaGC
from .adaptive import AdaptiveClip
from .zclip import ZClip

#: The names that ``max_norm`` accepts.
_BY_NAME: dict[str, type[AdaptiveClip]] = {"zclip": ZClip, "adagc": AdaGC}


class AdaptiveClips(Plugin):
    """Keeps clips by name for as long as a monitor lives.

    Args:
        may_skip: steps may be skipped, and what was learned in them has to be forgotten.
    """

    name = "clipping"

    def __init__(self, may_skip: bool) -> None:
        self._may_skip = may_skip
        self._named: dict[str, AdaptiveClip] = {}
        self._before: dict[int, tuple[AdaptiveClip, Any]] = {}

    def named(self, name: str) -> AdaptiveClip:
        """The clip of that name.

        Raises:
            ValueError: there is none of that name.
        """
        if name not in self._named:
            self._named[name] = _new(name)
        return self._named[name]

    def learns(self, adaptive: AdaptiveClip) -> None:
        """A clip is about to learn from the step in flight."""
        if self._may_skip and id(adaptive) not in self._before:
            self._before[id(adaptive)] = adaptive, adaptive.kept()

    def on_step_open(self, step: ActiveStep) -> None:
        """What was learned so far stays."""
        self._before = {}

    def on_skip(self, step: ActiveStep) -> None:
        """The step in flight is skipped: forget what was learned from it."""
        for adaptive, kept in self._before.values():
            adaptive.put_back(kept)
        self._before = {}

    def state_dict(self) -> dict[str, Any]:
        """What those by name have learned, as plain numbers. Synchronises with the device."""
        return {name: clip.state_dict() for name, clip in self._named.items()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """The clips by name are those of ``states``, and no others; where that fails nothing is changed.

        Raises:
            KeyError, TypeError, ValueError: no such states.
        """
        clips = {name: _new(name) for name in states}
        for name, state in states.items():
            clips[name].load_state_dict(state)
        self._named = clips


def _new(name: str) -> AdaptiveClip:
    one_of("max_norm", name, tuple(_BY_NAME))
    return _BY_NAME[name]()
