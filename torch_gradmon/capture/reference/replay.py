"""One run of the reference, or of a part of it: what its parts were given and returned, and which of that came from the model.

A container's output at the reference's weights takes a run of its own, for inside it parts get other inputs than in the watched
model. But those that are handed the container's own inputs, as the first one is, get the very same; then their outputs are what
a run of theirs would give, and need not be computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...statistics.tensor_access import refusal
from ..modules.structure import tensors_of

#: Compared by value; what else an input may hold counts as another one.
_SIMPLE = (type(None), bool, int, float, str, torch.dtype, torch.device)


@dataclass
class ReplayedOutputs:
    """One call of a part.

    Attributes:
        given: its arguments with the model's tensors in the place of their copies; None where some came from elsewhere.
        first: copies of the tensors in its first argument, by path behind its name.
        outputs: copies of the tensors that it returned, by path behind its name; None until it has returned.
    """

    given: tuple[Any, ...] | None
    first: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] | None = None


class ReplayedForward:
    """Notes the calls of the parts while the reference, or a part of it, runs on copies of the model's tensors.

    Args:
        keeps_all: keep what every call took and returned; otherwise only what can stand for a call of the model.
    """

    def __init__(self, keeps_all: bool = False) -> None:
        self._keeps_all = keeps_all
        # the model's tensor, its version and that of the copy; with the copy, so that no id is used again
        self._origins: dict[int, tuple[Tensor, int, Tensor, int]] = {}
        self._calls: Counter[str] = Counter()
        self._open: list[tuple[str, int, ReplayedOutputs]] = []
        self._outcomes: dict[tuple[str, int], ReplayedOutputs] = {}

    def note(self, tensor: Tensor, copy: Tensor) -> None:
        """``copy`` was made of the model's ``tensor`` for this run."""
        if not tensor.is_inference():  # such a tensor does not tell whether it was written to
            self._origins[id(copy)] = tensor, tensor._version, copy, copy._version

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A part is called."""
        number = self._calls[name]
        self._calls[name] += 1
        outcome = ReplayedOutputs(self._traced((args, dict(kwargs))))
        if self._keeps_all:
            outcome.first = {path: tensor.detach().clone() for path, tensor in first_of(args, kwargs) if refusal(tensor) is None}
        self._open.append((name, number, outcome))

    def returned(self, name: str, output: Any) -> None:
        """A part has returned; those that were called after it and did not return have raised."""
        while self._open:
            called, number, outcome = self._open.pop()
            if called == name:
                if self._keeps_all or outcome.given is not None:
                    tensors = tensors_of(output, "")
                    outcome.outputs = {path: tensor.detach().clone() for path, tensor in tensors if refusal(tensor) is None}
                    self._outcomes[name, number] = outcome
                return

    def outcome(self, name: str, number: int) -> ReplayedOutputs | None:
        """The call of that number, counted from 0, if it was kept."""
        return self._outcomes.get((name, number))

    def outputs_for(self, name: str, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """What the call of that number returned, if it was given what the model's module is given now; else None."""
        outcome = self._outcomes.get((name, number))
        if outcome is None or outcome.given is None or not self._same(outcome.given, (args, dict(kwargs))):
            return None
        return outcome.outputs

    def _traced(self, value: Any) -> Any:
        """``value`` with the model's tensors in it; None where it holds anything else that cannot be compared."""
        found: Any
        if isinstance(value, Tensor):
            origin = self._origins.get(id(value))
            return origin[0] if origin is not None and value._version == origin[3] else None
        if isinstance(value, dict):
            found = {key: (self._traced(item), item is None) for key, item in value.items()}
            parts = found.values()
        elif type(value) in (tuple, list):
            found = parts = [(self._traced(item), item is None) for item in value]
        else:
            return value if isinstance(value, _SIMPLE) else None
        if any(part is None and not is_none for part, is_none in parts):
            return None
        if isinstance(value, dict):
            return {key: part for key, (part, _) in found.items()}
        return type(value)(part for part, _ in found)

    def _same(self, given: Any, now: Any) -> bool:
        if type(given) is not type(now):
            return False
        if isinstance(given, Tensor):
            return given is now and any(now is tensor and now._version == was for tensor, was, *_ in self._origins.values())
        if isinstance(given, dict):
            return given.keys() == now.keys() and all(self._same(item, now[key]) for key, item in given.items())
        if isinstance(given, (tuple, list)):
            return len(given) == len(now) and all(map(self._same, given, now))
        equal: bool = given == now
        return equal


def first_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors in a module's first argument, by path behind its name: the first by name where none goes by place."""
    return list(tensors_of(args[0] if args else next(iter(kwargs.values()), None), ""))
