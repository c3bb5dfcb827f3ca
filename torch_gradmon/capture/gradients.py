"""Gradients at their three stages: of one micro-batch, before clipping, and as the optimizer uses them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..names import BATCH_GRADIENT, GRADIENT, GRADIENT_BEFORE_CLIP, GRADIENT_LOCAL, Key
from ..plan import SourcePlan
from ..shelf import Place
from ..statistics.moments import ALWAYS, Column, merge
from ..step import StepBuffer
from .measuring import Measurer

#: What tells an edited gradient from its former self.
_WITNESSES = frozenset({Column.SUM, Column.SQUARE_SUM})
_SQUARES = ALWAYS | {Column.SQUARE_SUM}
_Seen = dict[int, tuple["weakref.ref[Tensor]", int]]


class GradientCapture:
    """Measures the gradients of one step, and reuses what it measured before clipping where nothing has touched them since.

    Whether a gradient was touched is told by its identity and its version counter, which unscaling leaves alone and clipping
    moves. An edit through ``.data`` moves neither, so on CPU its sums are compared too, at a fraction of what measuring
    costs; elsewhere that would take a synchronisation, and everything is measured anew.
    """

    def __init__(self, measurer: Measurer) -> None:
        self._measurer = measurer
        self._buffer: StepBuffer | None = None
        self._plans: Mapping[str, SourcePlan] = {}
        self._parameters: Sequence[Place] = ()
        self._seen: _Seen = {}
        self._scaled = False
        self._held: dict[int, tuple[StepBuffer, _Seen, list[int]]] = {}
        self._uncommitted: dict[tuple[int, int], StepBuffer] = {}
        self._accumulated: dict[int, weakref.ref[Tensor]] = {}
        self.measures_batches = False  # each micro-batch by itself
        self._batches: dict[int, list[Tensor]] = {}  # rows of its gradients, by backward pass

    def begin(self, buffer: StepBuffer, plans: Mapping[str, SourcePlan], parameters: Sequence[Place]) -> None:
        """Start a step; ``parameters`` are those that the plans' positions speak of."""
        self._buffer, self._plans, self._parameters = buffer, plans, parameters
        self._seen, self._held, self._uncommitted, self._accumulated, self._batches = {}, {}, {}, {}, {}
        self._scaled = False

    def not_measured(self, positions: Sequence[int], inverse_scale: Tensor | None) -> list[int]:
        """Those whose gradients before clipping were not measured as they are now."""
        gradients = self._gradients(positions)
        unmoved = {p for p, gradient in gradients.items() if self._untouched(p, gradient)}
        same = self._compared(unmoved, gradients, inverse_scale)[0] if unmoved else set()
        return [position for position in positions if position not in same]

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
        for position in positions:
            parameter = self._parameters[position]()
            if parameter is not None and parameter.grad is not None:
                found[position] = parameter.grad
        return found

    def before_clip(self, positions: Sequence[int], inverse_scale: Tensor | None, held_for: int | None = None) -> None:
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

    def release(self, held_for: int) -> None:
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
        plan, before = self._plans[GRADIENT], self._plans[GRADIENT_BEFORE_CLIP]
        self._buffer.clear(GRADIENT, [plan.names[p] for p in positions])
        gradients = self._gradients(positions)
        unmoved = {p for p, gradient in gradients.items() if self._untouched(p, gradient)}
        same, differing = self._compared(unmoved, gradients, inverse_scale)
        if gradients and all(p in self._seen for p in gradients):
            # unscaling in low precision rounds, which is no edit
            touched = {p for p, gradient in gradients.items() if p not in unmoved and _tells_edits(gradient)}
            edited = bool(touched) or (bool(differing) and not self._scaled)
            if edited or all(map(_tells_edits, gradients.values())):  # else the values tell, once they are on the host
                self._buffer.noted["edited"] = max(self._buffer.noted.get("edited", False), edited)
        reused = same if plan.columns <= before.columns else set()
        if reused:
            self._buffer.reuse_rows(GRADIENT, [plan.names[p] for p in plan.measured if p in reused], GRADIENT_BEFORE_CLIP)
        self._measurer.statistics(
            self._buffer, plan, {p: g for p, g in gradients.items() if p not in reused}, inverse_scale=inverse_scale
        )
        twins = {p for p in same & plan.functions.keys() if self._reuse_values(p)}
        self._measurer.run_functions(
            self._buffer, plan, {p: g for p, g in gradients.items() if p not in twins}, inverse_scale=inverse_scale
        )

    def _compared(
        self, positions: set[int], gradients: Mapping[int, Tensor], inverse_scale: Tensor | None
    ) -> tuple[set[int], set[int]]:
        """Of these gradients those whose sums are still what they were before clipping, and those whose sums differ."""
        assert self._buffer is not None
        before = self._plans[GRADIENT_BEFORE_CLIP]
        placed = self._buffer.names_of(GRADIENT_BEFORE_CLIP)
        known = [p for p in before.measured if p in positions and gradients[p].device.type == "cpu" and before.names[p] in placed]
        if not known or Column.SQUARE_SUM not in before.columns:
            return set(), set()
        columns = sorted(_WITNESSES & before.columns)
        then = self._buffer.rows_of(GRADIENT_BEFORE_CLIP, [before.names[p] for p in known])[:, columns]
        now = self._measurer.built_in.measure([gradients[p] for p in known], frozenset(columns), inverse_scale)[:, columns]
        equal = ((now == then) | (now.isnan() & then.isnan())).all(dim=1).tolist()
        same = {position for position, is_equal in zip(known, equal, strict=True) if is_equal}
        return same, set(known) - same

    def _reuse_values(self, position: int) -> bool:
        """Take over the values of the metric functions where each has its twin before clipping."""
        assert self._buffer is not None
        plan, before = self._plans[GRADIENT], self._plans[GRADIENT_BEFORE_CLIP]
        twins = {(m.name, m.function, m.aggregation) for m in before.functions.get(position, ())}
        metrics = plan.functions[position]
        if position in plan.spread or not all((m.name, m.function, m.aggregation) in twins for m in metrics):
            return False
        name = plan.names[position]
        for metric in metrics:
            self._buffer.reuse_value(Key(GRADIENT, name, metric.name), Key(GRADIENT_BEFORE_CLIP, name, metric.name))
            place = f"{name}/{metric.name}"
            if (GRADIENT_BEFORE_CLIP, place) in self._buffer.absent:
                self._buffer.absent[GRADIENT, place] = self._buffer.absent[GRADIENT_BEFORE_CLIP, place]
        return True

    def _untouched(self, position: int, gradient: Tensor) -> bool:
        if position not in self._seen or not _tells_edits(gradient):
            return False
        reference, version = self._seen[position]
        return reference() is gradient and version == _version(gradient)

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


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
