"""Gradients at their three stages: of one micro-batch, before clipping, and as the optimizer uses them."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..core.keys import BATCH_GRADIENT, GRADIENT, GRADIENT_BEFORE_CLIP, GRADIENT_LOCAL
from ..core.moments import ALWAYS, Column, merge
from ..step.buffer import StepBuffer
from ..step.parameter_refs import Place
from ..step.plan import SourcePlan
from .measurer import Measurer

_NARROW = frozenset({torch.float16, torch.bfloat16})
_SQUARES = ALWAYS | {Column.SQUARE_SUM}
_Seen = dict[int, tuple["weakref.ref[Tensor]", int]]


class GradientCapture:
    """Measures the gradients of one step: at the end of backward, and again when the optimizer is about to use them.

    Rows of the first are never reused for the second. Identity and version counter of a gradient do not show an edit through
    ``.data``, and no sum shows every edit; to compare all elements would cost what measuring them costs.
    """

    def __init__(self, measurer: Measurer) -> None:
        self._measurer = measurer
        self._buffer: StepBuffer | None = None
        self._plans: Mapping[str, SourcePlan] = {}
        self._parameters: Sequence[Place] = ()
        self._seen: _Seen = {}
        self._scaled = False
        self._held: dict[Hashable, tuple[StepBuffer, _Seen, list[int]]] = {}
        self._uncommitted: dict[tuple[int, int], StepBuffer] = {}
        self._accumulated: dict[int, weakref.ref[Tensor]] = {}
        self.measures_batches = False  # each micro-batch by itself
        self._doubtful: frozenset[int] = frozenset()
        self._clipped: _Seen = {}  # as a clip by the monitor has left them
        self._batches: dict[int, list[Tensor]] = {}  # rows of its gradients, by backward pass

    def begin(
        self,
        buffer: StepBuffer,
        plans: Mapping[str, SourcePlan],
        parameters: Sequence[Place],
        doubtful: Collection[str] = (),
    ) -> None:
        """Start a step; ``parameters`` are those that the plans' positions speak of, ``doubtful`` the names of those that were
        frozen since the model was first seen, perhaps for a part of each step only.
        """
        self._buffer, self._plans, self._parameters = buffer, plans, parameters
        self._doubtful = (
            frozenset(p for p, name in enumerate(plans[GRADIENT].names) if name in doubtful) if doubtful else frozenset()
        )
        self._seen, self._held, self._uncommitted, self._accumulated, self._batches = {}, {}, {}, {}, {}
        self._scaled, self._clipped = False, {}

    def there(self, positions: Iterable[int]) -> list[int]:
        """Those that have gradients now."""
        return list(self._gradients(positions))

    def not_clipped(self, positions: Sequence[int]) -> list[int]:
        """Those whose gradients no clip has left as they are: what one clip leaves is not before the next."""
        gradients = self._gradients(positions)
        same = {p for p, g in gradients.items() if p in self._clipped and _tells_edits(g) and _is_as(self._clipped[p], g)}
        return [position for position in positions if position not in same]

    def clipped(self, positions: Sequence[int]) -> None:
        """These parameters' gradients have just been clipped."""
        self._clipped.update((p, (weakref.ref(g), _version(g))) for p, g in self._gradients(positions).items())

    def are_measured(self, positions: Iterable[int]) -> bool:
        """Whether the gradients before clipping that there are have been measured."""
        return all(position in self._seen for position in self._gradients(positions))

    def rows_now(self, positions: Sequence[int], columns: frozenset[Column]) -> Tensor | None:
        """The rows of these parameters' gradients, just measured before clipping; None where one of them has none."""
        plan = self._plans.get(GRADIENT_BEFORE_CLIP)
        gradients = self._gradients(positions)
        if self._buffer is None or plan is None or self._scaled or not gradients or not columns - ALWAYS <= plan.columns:
            return None
        placed = self._buffer.names_of(GRADIENT_BEFORE_CLIP)
        names = [plan.names[p] for p in gradients]
        if not placed.issuperset(names) or len({gradient.device for gradient in gradients.values()}) > 1:
            return None
        return self._buffer.rows_of(GRADIENT_BEFORE_CLIP, names)

    def end(self) -> None:
        """End the step, and let go of everything that it held."""
        if self._buffer is not None:
            rank = self._measurer.ranks.rank
            for number, rows in enumerate(self._batches.values()):
                self._buffer.merge_rows(BATCH_GRADIENT, [f"{rank}/{number}"], merge(torch.stack(rows)).unsqueeze(0), _SQUARES)
        self._buffer, self._seen, self._held, self._uncommitted = None, {}, {}, {}
        self._accumulated, self._batches = {}, {}

    def _gradients(self, positions: Iterable[int]) -> dict[int, Tensor]:
        found = {}
        if self._buffer is not None and self._doubtful:
            # the gradient does not show it: zero_grad(set_to_none=False) leaves one to a layer that was frozen for good
            thawed = (
                p for p in self._doubtful.intersection(positions) if (q := self._parameters[p]()) is not None and q.requires_grad
            )
            self._buffer.thawed.update(self._plans[GRADIENT].names[p] for p in thawed)
        for position in positions:
            parameter = self._parameters[position]()
            if parameter is not None and parameter.grad is not None:
                found[position] = parameter.grad
        return found

    def before_clip(self, positions: Sequence[int], inverse_scale: Tensor | None, held_for: Hashable | None = None) -> None:
        """Measure the gradients as they are now: accumulated and not yet clipped. Replaces an earlier call's values.

        ``held_for``: keep the values aside under this number until :meth:`release` says that they count.
        """
        if self._buffer is None:
            return
        plan = self._plans[GRADIENT_BEFORE_CLIP]
        self._scaled |= inverse_scale is not None
        gradients = self._gradients(positions)
        seen = {position: (weakref.ref(gradient), _version(gradient)) for position, gradient in gradients.items()}
        if held_for is None:
            target = self._buffer
            # a gradient that was thrown away since, as by zero_grad in a closure, leaves nothing behind
            target.clear(GRADIENT_BEFORE_CLIP, [plan.names[p] for p in positions])
            self._replace_seen(positions, seen)
        else:
            target = StepBuffer(self._buffer.step, self._measurer.complaints)
            self._held[held_for] = target, seen, list(positions)
        self._measurer.measure(target, plan, gradients, inverse_scale=inverse_scale)

    def _replace_seen(self, positions: Iterable[int], seen: _Seen) -> None:
        for position in positions:
            self._seen.pop(position, None)
        self._seen.update(seen)

    def release(self, held_for: Hashable) -> None:
        """What was held under this number counts after all."""
        if self._buffer is not None and held_for in self._held:
            held, seen, positions = self._held.pop(held_for)
            names = self._plans[GRADIENT_BEFORE_CLIP].names
            self._buffer.take_over(held, GRADIENT_BEFORE_CLIP, [names[p] for p in positions])
            self._replace_seen(positions, seen)
            self._buffer.noted.pop("edited", None)

    def forget_scaled(self, reason: str) -> None:
        """What was measured before the optimizer's step was scaled by an unknown number: drop it, and say why."""
        if self._buffer is not None:
            for source in (GRADIENT_BEFORE_CLIP, GRADIENT_LOCAL):
                self._buffer.clear(source)
                self._buffer.absent[source, ""] = reason
            self._seen, self._held = {}, {}

    def after_clip(self, positions: Sequence[int], inverse_scale: Tensor | None) -> None:
        """Measure the gradients that the optimizer is about to use. Replaces an earlier call's values."""
        if self._buffer is None:
            return
        plan = self._plans[GRADIENT]
        names = [plan.names[p] for p in positions]
        self._buffer.clear(GRADIENT, names)
        self._buffer.used.update(names)
        gradients = self._gradients(positions)
        if any(p in self._seen and p not in gradients for p in positions):
            self._buffer.noted["edited"] = True
        elif gradients and all(p in self._seen for p in gradients):
            self._note_edits(gradients)
        if narrow := {gradient.dtype for gradient in gradients.values()} & _NARROW:
            self._buffer.noted["rounding"] = max(torch.finfo(dtype).eps / 2 for dtype in narrow)
        self._measurer.measure(self._buffer, plan, gradients, inverse_scale=inverse_scale)

    def _note_edits(self, gradients: Mapping[int, Tensor]) -> None:
        """Note whether these were written to since they were measured before clipping; without a note the values decide."""
        assert self._buffer is not None
        touched = any(_tells_edits(gradient) and not self._untouched(p, gradient) for p, gradient in gradients.items())
        # unscaling moves no counter, and in low precision it rounds: other values, and no edit
        rounds = self._scaled and any(gradient.dtype in _NARROW for gradient in gradients.values())
        if touched or (rounds and all(map(_tells_edits, gradients.values()))):
            self._buffer.noted["edited"] = max(self._buffer.noted.get("edited", False), touched)

    def _untouched(self, position: int, gradient: Tensor) -> bool:
        return _is_as(self._seen[position], gradient)

    def local(self, position: int, gradient: Tensor | None, inverse_scale: Tensor | None) -> None:
        """Measure the gradient that one backward pass brings for one parameter; it counts once :meth:`commit_local` comes.

        ``torch.autograd.grad``, as in gradient penalties, comes through here too, but accumulates nothing and never commits.
        """
        if self._buffer is None or gradient is None:
            return
        held = StepBuffer(self._buffer.step, self._measurer.complaints)
        self._measurer.measure(held, self._plans[GRADIENT_LOCAL], {position: gradient}, inverse_scale=inverse_scale, merging=True)
        self._uncommitted[torch._C._current_graph_task_id(), position] = held

    def commit_local(self, position: int) -> None:
        """The gradient of the running backward pass was accumulated into ``.grad``: it counts."""
        held = self._uncommitted.pop((torch._C._current_graph_task_id(), position), None)
        parameter = self._parameters[position]() if self._parameters else None
        if held is None or self._buffer is None or parameter is None or parameter.grad is None:
            return
        accumulated, task = self._accumulated.get(position), torch._C._current_graph_task_id()
        # DDP may have put a view of its bucket in the place of the gradient, which is no other one for that
        if accumulated is not None and accumulated() is not parameter.grad and not parameter.grad._is_view():
            # what was accumulated before was thrown away since, and so are its micro-batches
            self._buffer.clear(GRADIENT_LOCAL, [self._plans[GRADIENT_LOCAL].names[position]])
            self._batches = {each: rows for each, rows in self._batches.items() if each == task}
        self._accumulated[position] = weakref.ref(parameter.grad)
        if self.measures_batches and (rows := held.parts_of(GRADIENT_LOCAL)):
            self._batches.setdefault(task, []).extend(rows)
        self._buffer.absorb(held)


def _tells_edits(gradient: Tensor) -> bool:
    """Whether its version counter moves with each edit, and only then: those of subclasses (DTensor) tell nothing, and views (of
    DDP's buckets) share one with their neighbours.
    """
    return type(gradient) is Tensor and not gradient._is_view()


def _is_as(seen: tuple[weakref.ref[Tensor], int], gradient: Tensor) -> bool:
    reference, version = seen
    return reference() is gradient and version == _version(gradient)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
