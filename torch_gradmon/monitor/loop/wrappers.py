"""Optimizers that wrap others, as Lookahead does: their own changes are part of the inner optimizer's step."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

from ...capture.hooks import WrappedMethod

#: Packages of trainers, whose wrappers pass a step on as it is, or leave it out.
_TRAINERS = ("accelerate.", "lightning.", "lightning_fabric.", "pytorch_lightning.", "transformers.")


class WrapperCalls:
    """Follows the calls of ``step`` of wrappers, by a stand-in for the method on the instance: not all of them call hooks.

    Args:
        wrappers: each with the optimizer inside, which calls hooks.
        began: called with the optimizer inside when the outermost wrapper is about to step.
        ended: called with the optimizer inside when the outermost wrapper has stepped, and with whether that one has.
    """

    def __init__(
        self,
        wrappers: Iterable[tuple[Any, Optimizer]],
        began: Callable[[Optimizer], object],
        ended: Callable[[Optimizer, bool], object],
    ) -> None:
        self._began, self._ended = began, ended
        self._depth: Counter[int] = Counter()
        self._stepped: set[int] = set()
        self._inside: dict[int, tuple[weakref.ref[Any], weakref.ref[Optimizer]]] = {}
        self._wrapped: list[_WrappedStep] = []
        for outer, inner in wrappers:
            self._inside[id(outer)] = weakref.ref(outer), weakref.ref(inner)
            if not any(kind.__module__.startswith(_TRAINERS) for kind in type(outer).__mro__):
                self._wrapped.append(_WrappedStep(outer, "step", functools.partial(self._step, weakref.ref(inner))))

    @property
    def exist(self) -> bool:
        """Whether there are any."""
        return bool(self._inside)

    def inside(self, optimizer: Any) -> Any:
        """The optimizer inside of this one, or itself."""
        outer, inner = self._inside.get(id(optimizer), (None, None))
        found = inner() if inner is not None and outer is not None and outer() is optimizer else None
        return optimizer if found is None else found

    def around(self, optimizer: Optimizer) -> list[int]:
        """The ids of the wrappers around this one."""
        return [key for key, (_, inner) in self._inside.items() if inner() is optimizer]

    def goes_on(self, optimizer: Optimizer) -> bool:
        """The optimizer has stepped; whether a wrapper around it is still at it."""
        goes_on = self._depth[id(optimizer)] > 0
        if goes_on:
            self._stepped.add(id(optimizer))
        return goes_on

    def _step(self, inner: weakref.ref[Optimizer], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        optimizer = inner()
        if optimizer is None:
            return original(*args, **kwargs)
        if not self._depth[id(optimizer)]:
            self._began(optimizer)
        self._depth[id(optimizer)] += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._depth[id(optimizer)] -= 1
            if not self._depth[id(optimizer)]:
                stepped = id(optimizer) in self._stepped
                self._stepped.discard(id(optimizer))
                self._ended(optimizer, stepped)

    def remove(self) -> None:
        """Take all stand-ins away."""
        for wrapped in reversed(self._wrapped):
            wrapped.remove()
        self._wrapped, self._inside = [], {}


class _WrappedStep(WrappedMethod):
    """Looks like the method itself to learning rate schedulers, which mark it, and wrap the function in it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original(), name)

    @property
    def __func__(self) -> Callable[..., Any]:
        @functools.wraps(self._original().__func__)  # type: ignore[attr-defined]
        def step(_: Any, *args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return step
