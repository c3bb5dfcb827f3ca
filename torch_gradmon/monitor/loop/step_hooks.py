"""A pair of hooks on the step of each optimizer, around the hooks of others, out of the sight of compilers."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from ...capture.hooks import Handles, untraced_by_itself
from .idle_stretch import IdleStretch

StepHook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any]


def _put_first(optimizer: Optimizer) -> None:
    """Move the hooks of monitors before those of others, in their order.

    Then other hooks after the step find the gradients restored, and their writes do not count as updates. For hooks before the step
    see :meth:`StepHooks._step_called`.
    """
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        known = getattr(optimizer, hooks, None)
        if isinstance(known, OrderedDict):
            for name in [name for name, hook in reversed(known.items()) if hasattr(hook, "keeps_alive")]:
                known.move_to_end(name, last=False)


class StepHooks:
    """Calls ``before`` as the last hook before an optimizer's step and ``after`` as the first one behind it.

    Args:
        kept: kept alive by the optimizers, and by nothing else here.
        optimizers: get the hooks.
        before: may return other arguments for the step.
        after: called with the step's arguments.
        stretch: idle steps that are only counted.

    Attributes:
        is_shielded: a compiler is loaded, and does not trace the hooks.
    """

    def __init__(
        self, kept: object, optimizers: Iterable[Optimizer], before: StepHook, after: StepHook, stretch: IdleStretch
    ) -> None:
        self._handles = Handles()
        self._around_last: dict[int, StepHook] = {}  # the wrapper of the last hook before each optimizer's step
        self._before = before
        self._shielded: dict[str, StepHook] = {"called": self._step_called, "before": before, "after": after}
        self.is_shielded = False
        for optimizer in optimizers:
            # the only strong references: a monitor without others lives as long as its optimizer
            self._handles.of_optimizer(
                optimizer.register_step_pre_hook(self._strongly(kept, "called", stretch, stretch.step_began))
            )
            self._handles.of_optimizer(
                optimizer.register_step_post_hook(self._strongly(kept, "after", stretch, stretch.step_ended))
            )
            _put_first(optimizer)
        self.shield()

    def _strongly(self, kept: object, name: str, stretch: IdleStretch, counts: StepHook) -> StepHook:
        method, shielded, is_after = self._shielded[name], self._shielded, name == "after"

        def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if torch.compiler.is_dynamo_compiling():  # else the shield would cost a tenth of a step that is not monitored
                return shielded[name](optimizer, args, kwargs)
            # with others on the step, the last of them may be behind ours, and one that raises prevents the step
            is_alone = is_after or len(getattr(optimizer, "_optimizer_step_pre_hooks", ())) == 1
            if is_alone and stretch.left and counts(optimizer, args, kwargs):
                return None
            return method(optimizer, args, kwargs)

        untraced_by_itself(hook)
        hook.keeps_alive = kept  # type: ignore[attr-defined]
        return hook

    def shield(self) -> None:
        """Prevent a compiled ``optimizer.step`` from tracing its hooks, if a compiler is loaded: importing one takes a second."""
        if not self.is_shielded and (compiler := sys.modules.get("torch._dynamo")) is not None:
            self.is_shielded = True
            for name, method in self._shielded.items():
                self._shielded[name] = compiler.disable(method)

    def remove(self) -> None:
        """Remove all hooks; a second call does nothing."""
        self._handles.remove()
        self._around_last = {}

    def _step_called(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrap the last hook before the step for this call: it may clip, so the gradients are final only when it returns.

        Other hooks keep their positions: one that removes itself must stay last in the dict, which is being iterated over.
        """
        known = getattr(optimizer, "_optimizer_step_pre_hooks", None)
        name = next(reversed(known)) if isinstance(known, OrderedDict) and known else None
        if not isinstance(known, OrderedDict) or name is None or hasattr(known[name], "keeps_alive"):
            return self._before(optimizer, args, kwargs)
        hook = known[name]

        def and_ours(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if name in known:
                known[name] = hook
            result = hook(optimizer, args, kwargs)
            if self._around_last.get(id(optimizer)) is not and_ours:
                return result  # a leftover of a step in which an earlier hook raised
            del self._around_last[id(optimizer)]
            given = result if isinstance(result, tuple) and len(result) == 2 else (args, kwargs)
            # this function is part of the graph of a compiled step
            ours = (self._shielded["before"] if torch.compiler.is_dynamo_compiling() else self._before)(optimizer, *given)
            return result if ours is None else ours

        known[name] = self._around_last[id(optimizer)] = and_ours
        return None
