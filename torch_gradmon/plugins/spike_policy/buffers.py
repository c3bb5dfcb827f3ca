"""The model's buffers before a batch: a skipped batch must not change running statistics."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ...core.errors import WarningLog

#: The most bytes of buffers to copy in every step, the smallest first: statistics are small, masks are not.
COPIED = 32 << 20


@dataclass
class _Seen:
    """One buffer at the start of the step; its tensor is None if the name had none yet."""

    module: weakref.ref[nn.Module]
    name: str
    buffer: Tensor | None
    place: tuple[int, str]
    version: int
    copy: Tensor | None = None


class Buffers:
    """Remembers buffers before a step, and restores them. Does not keep the model alive.

    It copies the buffers of normalisation layers, those whose version counter has changed before, and the smallest others up to
    :data:`COPIED` bytes. The counter alone is not sufficient: kernels of normalisation layers and writes to ``.data`` bypass it.
    """

    def __init__(self) -> None:
        self._modules: list[weakref.ref[nn.Module]] = []
        self._version: int | None = None
        self._seen: list[_Seen] = []
        self._moving: set[tuple[int, str]] = set()
        self._counters: dict[tuple[int, str], int] = {}

    def remember(self, model: nn.Module, version: int) -> None:
        """Remember the buffers at the start of a step. ``version`` changes with the model's modules. Does not synchronise."""
        if self._version != version:
            self._modules, self._version = [weakref.ref(module) for module in model.modules()], version
            self._moving, self._counters = set(), {}
        self._seen, left = [], COPIED
        others: list[tuple[int, int, _Seen, Tensor]] = []
        for number, reference in enumerate(self._modules):
            module = reference()
            for name, buffer in module._buffers.items() if module is not None else ():
                counter = -1 if buffer is None or buffer.is_inference() else buffer._version
                seen = _Seen(reference, name, buffer, (number, name), counter)
                self._seen.append(seen)
                if buffer is None or is_fixed(buffer):
                    continue
                if self._moves(seen.place, counter) or _normalises(module):
                    seen.copy = buffer.detach().clone()
                    left -= buffer.nbytes
                else:
                    others.append((buffer.nbytes, len(others), seen, buffer))
        for size, _, seen, buffer in sorted(others, key=lambda each: each[:2]):
            if (left := left - size) < 0:
                break
            seen.copy = buffer.detach().clone()

    def _moves(self, place: tuple[int, str], counter: int) -> bool:
        if self._counters.setdefault(place, counter) != counter:
            self._moving.add(place)
        self._counters[place] = counter
        return place in self._moving

    def put_back(self) -> list[str]:
        """Restore the buffers after a skipped step; may be called repeatedly. Returns the names of those that could not be restored."""
        failed = []
        with torch.no_grad():
            for seen in self._seen:
                module = seen.module()
                if module is None or seen.name not in module._buffers:
                    continue
                module._buffers[seen.name] = seen.buffer  # the forward may have replaced it
                try:
                    if seen.copy is not None and seen.buffer is not None:
                        seen.buffer.copy_(seen.copy)
                        self._counters[seen.place] = seen.buffer._version
                    elif seen.buffer is not None and seen.version >= 0 and seen.buffer._version != seen.version:
                        failed.append(seen.name)  # it is large, and changed for the first time
                except RuntimeError:
                    failed.append(seen.name)
        return failed

    def forget(self) -> None:
        """Drop all buffers."""
        self._seen = []


class KnownBuffers:
    """The model's buffers as they were before the batch of the open step.

    Args:
        complaints: receives a warning about buffers that could not be restored.

    Attributes:
        is_known: whether they were remembered since the last attempt.
    """

    def __init__(self, complaints: WarningLog) -> None:
        self._buffers, self._complaints = Buffers(), complaints
        self.is_known = False

    def remember(self, module: nn.Module, version: int) -> None:
        """Remember the buffers. ``version`` changes with the model's modules."""
        self._buffers.remember(module, version)

    def remember_once(self, module: nn.Module, version: int) -> None:
        """Remember the buffers at the first call since the last attempt."""
        if not self.is_known:
            self.remember(module, version)
            self.is_known = True

    def step_dropped(self) -> None:
        """The next call of the model is the first one again."""
        self.is_known = False

    def attempt_ended(self, module: nn.Module, version: int) -> None:
        """Prepare for a new batch. Remembers the buffers now if no call of the model was seen, as when only its parts are called."""
        if not self.is_known:
            self.remember(module, version)
        self.is_known = False

    def put_back(self) -> None:
        """Restore the buffers."""
        if failed := self._buffers.put_back():
            names = ", ".join(failed[:3])
            message = f"buffers of the model ({names}) could not be made what they were before a step that was skipped"
            self._complaints.add("buffers", message)

    def forget(self) -> None:
        """Drop all buffers."""
        self._buffers.forget()


def _normalises(module: nn.Module | None) -> bool:
    """Whether ``module`` may write to its buffers by a normalisation kernel; any TorchScript module may."""
    return isinstance(module, (_NormBase, torch.jit.ScriptModule)) and getattr(module, "training", False)


def is_fixed(buffer: Tensor) -> bool:
    """Whether in-place writes to it are impossible."""
    return buffer.is_inference() or any(
        stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)
    )
