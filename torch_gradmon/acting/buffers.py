"""The model's buffers as they were before a batch came: its running statistics must not keep what a skipped batch has put into them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


@dataclass
class _Seen:
    """One buffer when the step began."""

    module: weakref.ref[nn.Module]
    name: str
    buffer: Tensor
    copy: Tensor | None


class Buffers:
    """Remembers buffers at the first forward of a step, and puts them back. The model is not kept alive.

    Most buffers never change, such as masks, and need no copy. Copied are those of normalisation layers, whose kernels change them
    without moving their version counter, those whose counter was seen to move, and in the first step all.
    """

    def __init__(self) -> None:
        self._modules: list[weakref.ref[nn.Module]] = []
        self._version: int | None = None
        self._seen: list[_Seen] = []
        self._moving: set[tuple[int, str]] = set()
        self._counters: dict[tuple[int, str], int] = {}

    def remember(self, model: nn.Module, version: int) -> None:
        """A step begins with a forward of ``model``, whose modules are others when ``version`` is. Does not synchronise."""
        if self._version != version:
            self._modules, self._version = [weakref.ref(module) for module in model.modules()], version
            self._moving, self._counters = set(), {}
        self._seen = []
        for number, reference in enumerate(self._modules):
            module = reference()
            if module is not None and module._buffers:
                always = isinstance(module, _NormBase) and module.training
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        moves = self._moves((number, name), buffer) or always
                        self._seen.append(_Seen(reference, name, buffer, buffer.detach().clone() if moves else None))

    def _moves(self, place: tuple[int, str], buffer: Tensor) -> bool:
        counter = -1 if buffer.is_inference() else buffer._version
        before = self._counters.get(place)
        self._counters[place] = counter
        if before is not None and before != counter:
            self._moving.add(place)
        return before is None or place in self._moving

    def put_back(self) -> None:
        """The step is skipped."""
        with torch.no_grad():
            for seen in self._seen:
                module = seen.module()
                if module is None or seen.name not in module._buffers:
                    continue
                module._buffers[seen.name] = seen.buffer  # where the forward has put another tensor into its place
                if seen.copy is not None:
                    seen.buffer.copy_(seen.copy)
        self.forget()

    def forget(self) -> None:
        """Let go of everything."""
        self._seen = []
