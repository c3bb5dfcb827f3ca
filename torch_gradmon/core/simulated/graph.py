"""Graphs of a simulated device: operations that are captured once and run by replays, without Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Call(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class SimulatedGraph:
    """Operations with the memory that they read and write, as in a CUDA graph.

    While it is captured nothing runs: afterwards memory has the values of before, and new tensors have none. A replay changes the values
    but, unlike an operation that Python calls, no version counter.

    Attributes:
        error: the first thing that a capture does not allow; None if there was none.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._made: list[Tensor] = []
        self.error: str | None = None

    def refuse(self, what: str) -> None:
        """Something that a capture does not allow, which makes the graph useless.

        Raises:
            RuntimeError: in any case.
        """
        self.error = self.error or f"operation not permitted when stream is capturing: {what}"  # CUDA's words
        raise RuntimeError(self.error)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], written: Iterable[Tensor]) -> Any:
        """Capture one operation on tensors of the host; it changes ``written``."""
        for tensor in written:
            self._before.setdefault(id(tensor), (tensor, tensor.clone()))
        result = function(*args, **kwargs)
        self._calls.append(_Call(function, args, kwargs, result))
        self._made += [tensor for tensor in tensors_in([result]) if all(tensor is not old for old in tensors_in(args))]
        return result

    def end(self) -> None:
        """The capture is over.

        Raises:
            RuntimeError: it was not allowed to do what it did.
        """
        for tensor in self._made:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        for tensor, values in self._before.values():
            tensor.copy_(values)
        self._before, self._made = {}, []
        if self.error is not None:
            raise RuntimeError(self.error)

    def replay(self) -> None:
        """Run all operations."""
        with torch.no_grad():
            for function, args, kwargs, result in self._calls:
                for old, new in zip(tensors_in([result]), tensors_in([function(*args, **kwargs)]), strict=True):
                    if old is not new:
                        old.copy_(new)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments or results of an operation: tensors, lists of them, or plain values."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
