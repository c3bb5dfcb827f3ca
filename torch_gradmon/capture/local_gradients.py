"""The gradients of single micro-batches on this rank, before they are accumulated and reduced."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.keys import BATCH_GRADIENT, GRADIENT_LOCAL
from ..core.moments import ALWAYS, Column, merge
from ..step.buffer import StepBuffer
from ..step.parameter_refs import Place
from ..step.plan import SourcePlan
from .measurer import Measurement, Measurer

_SQUARES = ALWAYS | {Column.SQUARE_SUM}


class LocalGradients:
    """Measures each backward pass of one step after the other.

    Args:
        measurer: measures.
    """

    def __init__(self, measurer: Measurer) -> None:
        self._measurer = measurer
        self._by_batch = False
        self._buffer: StepBuffer | None = None
        self._plan: SourcePlan | None = None
        self._parameters: Sequence[Place] = ()
        self._uncommitted: dict[tuple[int, int], StepBuffer] = {}
        self._accumulated: dict[int, weakref.ref[Tensor]] = {}
        self._batches: dict[int, list[Tensor]] = {}  # rows of gradients by backward pass

    def begin(self, buffer: StepBuffer, plan: SourcePlan | None, parameters: Sequence[Place], by_batch: bool) -> None:
        """Start a step; ``parameters`` are those that positions in the plan refer to. ``by_batch``: each micro-batch gets a row of its
        own.
        """
        self._buffer, self._plan, self._parameters, self._by_batch = buffer, plan, parameters, by_batch
        self._uncommitted, self._accumulated, self._batches = {}, {}, {}

    def end(self) -> None:
        """End the step: store the rows of micro-batches."""
        if self._buffer is not None:
            rank = self._measurer.ranks.rank
            for number, rows in enumerate(self._batches.values()):
                self._buffer.merge_rows(BATCH_GRADIENT, [f"{rank}/{number}"], merge(torch.stack(rows)).unsqueeze(0), _SQUARES)
        self._buffer, self._uncommitted, self._accumulated, self._batches = None, {}, {}, {}

    def forget_batches(self) -> None:
        """The rows of micro-batches so far are of several steps, and of no use."""
        self._batches = {}

    def measure(self, position: int, gradient: Tensor | None, inverse_scale: Tensor | None) -> None:
        """Measure one parameter's gradient of one backward pass. It counts once :meth:`commit` is called.

        ``torch.autograd.grad``, as in gradient penalties, calls this too, but accumulates nothing and never commits.
        """
        if self._buffer is None or self._plan is None or gradient is None:
            return
        held = StepBuffer(self._buffer.step, self._measurer.complaints)
        self._measurer.measure(Measurement(held, self._plan, {position: gradient}, inverse_scale, merging=True))
        self._uncommitted[torch._C._current_graph_task_id(), position] = held

    def commit(self, position: int) -> None:
        """The gradient of the running backward pass was accumulated into ``.grad``, so it counts."""
        held = self._uncommitted.pop((torch._C._current_graph_task_id(), position), None)
        parameter = self._parameters[position]() if self._parameters else None
        if held is None or self._buffer is None or self._plan is None or parameter is None or parameter.grad is None:
            return
        accumulated, task = self._accumulated.get(position), torch._C._current_graph_task_id()
        # DDP may have replaced the gradient by a view of its bucket, which is the same gradient
        if accumulated is not None and accumulated() is not parameter.grad and not parameter.grad._is_view():
            # the gradient accumulated before was discarded, and so are its micro-batches
            self._buffer.clear(GRADIENT_LOCAL, [self._plan.names[position]])
            self._batches = {each: rows for each, rows in self._batches.items() if each == task}
        self._accumulated[position] = weakref.ref(parameter.grad)
        if self._by_batch and (rows := held.parts_of(GRADIENT_LOCAL)):
            self._batches.setdefault(task, []).extend(rows)
        self._buffer.absorb(held)
