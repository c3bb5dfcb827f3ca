"""What an optimizer steps: gradients at their three stages (of one micro-batch, before clipping, and as used by the optimizer), parameters,
their updates, and the optimizer's state.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from operator import attrgetter, eq, itemgetter, ne
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core import keys as n
from ..core.moments import ALWAYS, SQUARES, Column, merge
from ..statistics.request import accumulator_dtype, dtype_of, filled
from ..step.buffer import StepBuffer
from ..step.model_index import PLAIN_GRADIENTS, GradientSource, ModelIndex, Places
from ..step.plan import SourcePlan
from .measurer import Measurement, Measurer, OfProducts, version_of

_SQUARES = ALWAYS | {Column.SQUARE_SUM}


# --- What a GradScaler has done to the gradients, known without synchronising the device ---

_UNSCALED = 1  # torch.amp.grad_scaler.OptState.UNSCALED; READY is 0, STEPPED is 2


class GradScale:
    """Which optimizer's gradients are scaled, as far as it can be known before it steps; ``around``: returns ids of its wrappers."""

    def __init__(self, around: Callable[[Optimizer], Iterable[int]] = lambda _: ()) -> None:
        self.scaler: torch.amp.GradScaler | None = None
        self._around = around
        self._plain_steps: Counter[int] = Counter()  # consecutive steps without the scaler

    def inverse(self, optimizer: Optimizer | None, stepping: bool) -> Tensor | None:
        """The factor for the gradients, float32 on their device; None if they are unscaled. Those of parameters that no optimizer has
        (None) stay scaled, since ``unscale_`` leaves them out.
        """
        scale = getattr(optimizer, "grad_scale", None)  # set while a fused optimizer steps that unscales by itself
        if scale is None:
            if self.scaler is None or stepping or self._is_plain(optimizer):
                return None
            if optimizer is not None and self._is_unscaled(optimizer):
                return None
            scale = scale_of(self.scaler)
        return None if scale is None else reciprocal(scale)

    def mistake(self, optimizer: Optimizer, calling: torch.amp.GradScaler | None) -> str | None:
        """What was wrong about the assumed scaler, or None. Only at the optimizer's step it is certain which scaler drives it."""
        if calling is not None and not calling.is_enabled():
            calling = None  # as in most loops without mixed precision
        if calling is not None and self.scaler is None:
            return "a GradScaler was noticed only in this step; pass scaler= to attach() or watch()"
        if calling is not None and calling is not self.scaler:
            return "another GradScaler drives this optimizer; one GradScaler for all optimizers is supported"
        if self.scaler is None or scale_of(self.scaler) is None:
            return None
        plain = calling is None and not self._is_unscaled(optimizer)
        mistaken = plain != self._is_plain(optimizer)
        self._plain_steps[id(optimizer)] = self._plain_steps[id(optimizer)] + 1 if plain else 0
        return f"{type(optimizer).__name__} stepped {'without' if plain else 'again with'} the GradScaler" if mistaken else None

    def _is_unscaled(self, optimizer: Optimizer) -> bool:
        return is_unscaled(self.scaler, optimizer, self._around(optimizer))

    def _is_plain(self, optimizer: Optimizer | None) -> bool:
        """Whether this optimizer, or with None any, is assumed to step without the scaler: it did so twice in a row."""
        counts = self._plain_steps.values() if optimizer is None else [self._plain_steps[id(optimizer)]]
        return any(count >= 2 for count in counts)


def scale_of(scaler: torch.amp.GradScaler | None) -> Tensor | None:
    """The scaler's scale on the device, or None if nothing was scaled. ``get_scale()`` would synchronise."""
    return scaler._scale if scaler is not None and scaler.is_enabled() else None


def reciprocal(scale: Tensor) -> Tensor:
    """The reciprocal of the scale, rounded as in ``GradScaler.unscale_``."""
    return scale.to(accumulator_dtype(scale.device)).reciprocal().float()


def inverse(scale: float | Tensor) -> Tensor:
    """The factor that undoes a scale which an engine keeps as a number or a tensor, float32."""
    return reciprocal(scale if isinstance(scale, Tensor) else torch.tensor(float(scale), dtype=torch.float64, device="cpu"))


def is_unscaled(scaler: torch.amp.GradScaler | None, optimizer: Optimizer | None, around: Iterable[int] = ()) -> bool:
    """Whether the scaler has unscaled the gradients of ``optimizer``, or with None of any, in this attempt."""
    states = getattr(scaler, "_per_optimizer_states", {})
    wanted = states.keys() if optimizer is None else (id(optimizer), *around)
    return any(states[key]["stage"].value >= _UNSCALED for key in wanted if key in states)


def calling_scaler() -> torch.amp.GradScaler | None:
    """The GradScaler whose ``step`` is calling, if any. Without it, scaled gradients would be taken for true ones."""
    frame = sys._getframe(3)
    for _ in range(12):
        if frame.f_code.co_name == "step" and isinstance(owner := frame.f_locals.get("self"), torch.amp.GradScaler):
            return owner
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


_NARROW = frozenset({torch.float16, torch.bfloat16})
_GRAD, _VERSION, _FIRST, _TENSOR = attrgetter("grad"), attrgetter("_version"), itemgetter(0), frozenset({Tensor})
#: Tensors by position: the id of the only reference to each without a callback, its version, and that reference. Equal where nothing was
#: replaced, nor written to as far as versions tell; ids come first, because two references would be compared by the tensors' elements.
_Seen = dict[int, tuple[int, int, "weakref.ref[Tensor]"]]


class GradientCapture:
    """Measures the gradients of one step: of each micro-batch, at the end of backward, and again before the optimizer uses them.

    Rows of the first are never reused for the second: identity and version counter do not show an edit through ``.data``, no sum shows
    every edit, and comparing all elements costs as much as measuring them.
    """

    def __init__(self, measurer: Measurer) -> None:
        self._measurer = measurer
        self._buffer: StepBuffer | None = None
        self._plans: Mapping[str, SourcePlan] = {}
        self._parameters = Places(())
        self._source: GradientSource = PLAIN_GRADIENTS
        self._seen: _Seen = {}
        self._scaled = False
        self._held: dict[Hashable, tuple[StepBuffer, _Seen, list[int]]] = {}
        # frozen since the model was first seen, perhaps only for a part of each step
        self._doubtful: frozenset[int] = frozenset()
        self._at_rest: frozenset[int] = frozenset()  # positions that were frozen when the model was seen
        self._clipped: _Seen = {}  # gradients after a clip by the monitor
        self._spent: set[int] = set()  # positions whose gradients an optimizer has used
        self._passed: set[int] = set()  # positions whose gradients were measured when another one did so
        self._has_used = False  # some were measured as an optimizer uses them
        # of single micro-batches on this rank, before they are accumulated and reduced
        self._by_batch = False
        self._uncommitted: dict[tuple[int, int], StepBuffer] = {}
        self._accumulated: dict[int, weakref.ref[Tensor]] = {}
        self._batches: dict[int, list[Tensor]] = {}  # rows of gradients by backward pass

    def begin(self, buffer: StepBuffer, plans: Mapping[str, SourcePlan], inventory: ModelIndex, by_batch: bool) -> None:
        """Start a step; ``by_batch``: each micro-batch is measured separately, too."""
        parameters, doubtful = inventory.references, inventory.trainable.doubtful
        if parameters is not self._parameters:
            known = parameters.there(parameters.positions)
            self._at_rest = frozenset(position for position, parameter in known.items() if not parameter.requires_grad)
        self._buffer, self._plans, self._parameters, self._source = buffer, plans, parameters, inventory.source
        self._doubtful = frozenset()
        if doubtful:
            self._doubtful = frozenset(p for p, name in enumerate(plans[n.GRADIENT].names) if name in doubtful)
        self._by_batch, self._has_used, self._uncommitted, self._accumulated, self._batches = by_batch, False, {}, {}, {}
        self._seen, self._held, self._clipped, self._scaled, self._spent, self._passed = {}, {}, {}, False, set(), set()

    def with_gradient(self, positions: Collection[int]) -> list[int]:
        return list(self._gradients(positions, False)[0])

    def not_clipped(self, positions: Sequence[int]) -> list[int]:
        """The positions whose gradients have changed since the last clip, or were not clipped."""
        gradients, now = self._gradients(positions, False)
        same = {p for p, g in gradients.items() if type(g) is Tensor and not g._is_view() and self._clipped.get(p) == now[p]}
        return [position for position in positions if position not in same]

    def clipped(self, positions: Sequence[int]) -> None:
        self._clipped.update(self._gradients(positions, False)[1])

    def are_measured(self, positions: Collection[int]) -> bool:
        return self._seen.keys() >= self._gradients(positions, False)[0].keys()

    def rows_now(self, positions: Sequence[int], columns: frozenset[Column]) -> Tensor | None:
        """The rows of these gradients, just measured before clipping; None if one is missing."""
        plan = self._plans.get(n.GRADIENT_BEFORE_CLIP)
        gradients, _ = self._gradients(positions, False)
        if self._buffer is None or plan is None or self._scaled or not gradients or not columns - ALWAYS <= plan.columns:
            return None
        placed = self._buffer.names_of(n.GRADIENT_BEFORE_CLIP)
        names = [plan.names[p] for p in gradients]
        if not placed.issuperset(names) or len({gradient.device for gradient in gradients.values()}) > 1:
            return None
        return self._buffer.rows_of(n.GRADIENT_BEFORE_CLIP, names)

    def end(self) -> None:
        if self._buffer is not None:
            for number, rows in enumerate(self._batches.values()):
                name = f"{self._measurer.ranks.rank}/{number}"
                self._buffer.merge_rows(n.BATCH_GRADIENT, [name], merge(torch.stack(rows)).unsqueeze(0), _SQUARES)
        self._buffer, self._seen, self._held = None, {}, {}
        self._uncommitted, self._accumulated, self._batches = {}, {}, {}

    def forget_batches(self) -> None:
        """The rows of micro-batches so far are of several steps, and of no use."""
        self._batches = {}

    def measure_local(self, position: int, gradient: Tensor | None, inverse_scale: Tensor | None) -> None:
        """Measure one parameter's gradient of one backward pass. It counts once it is committed: ``torch.autograd.grad``, as in gradient
        penalties, calls this too, but accumulates nothing.
        """
        plan = self._plans.get(n.GRADIENT_LOCAL)
        if self._buffer is None or plan is None or gradient is None:
            return
        held = StepBuffer(self._buffer.step, self._measurer.complaints)
        self._measurer.measure(Measurement(held, plan, {position: gradient}, inverse_scale, merging=True))
        self._uncommitted[torch._C._current_graph_task_id(), position] = held

    def commit_local(self, position: int) -> None:
        """The gradient of the running backward pass was accumulated into ``.grad``, so it counts."""
        held = self._uncommitted.pop((torch._C._current_graph_task_id(), position), None)
        parameter = self._parameters[position]() if self._parameters else None
        if held is None or self._buffer is None or parameter is None or parameter.grad is None:
            return
        accumulated, task = self._accumulated.get(position), torch._C._current_graph_task_id()
        # DDP may have replaced the gradient by a view of its bucket, which is the same gradient
        if accumulated is not None and accumulated() is not parameter.grad and not parameter.grad._is_view():
            # the gradient accumulated before was discarded, and so are its micro-batches
            self._buffer.clear(n.GRADIENT_LOCAL, [self._plans[n.GRADIENT_LOCAL].names[position]])
            self._batches = {each: rows for each, rows in self._batches.items() if each == task}
        self._accumulated[position] = weakref.ref(parameter.grad)
        if self._by_batch and (rows := held.parts_of(n.GRADIENT_LOCAL)):
            self._batches.setdefault(task, []).extend(rows)
        self._buffer.absorb(held)

    def _gradients(self, positions: Collection[int], are_used: bool) -> tuple[dict[int, Tensor], _Seen]:
        """By position: as accumulated, or as the optimizer uses them; and how they are now."""
        if self._buffer is not None and self._doubtful:
            # a gradient is no sign of it: zero_grad(set_to_none=False) leaves one to a layer that stays frozen
            parameters = self._parameters.there(self._doubtful.intersection(positions))
            self._buffer.thawed.update(self._plans[n.GRADIENT].names[p] for p, each in parameters.items() if each.requires_grad)
        read = _GRAD if self._source is PLAIN_GRADIENTS else self._source.used if are_used else self._source.accumulated
        gradients = self._parameters.there(positions, read)
        references = [*map(weakref.ref, gradients.values())]
        try:
            versions = [*map(_VERSION, gradients.values())]
        except RuntimeError:  # tensors of the inference mode have none
            versions = [*map(version_of, gradients.values())]
        return gradients, dict(zip(gradients, zip(map(id, references), versions, references, strict=True), strict=True))

    def before_clip(self, positions: Sequence[int], inverse_scale: Tensor | None, held_for: Hashable | None = None) -> None:
        """Measure the accumulated gradients, not yet clipped, anew; ``held_for``: keep the values under this key until :meth:`release`."""
        if self._buffer is None:
            return
        plan, target = self._plans[n.GRADIENT_BEFORE_CLIP], self._buffer
        self._scaled |= inverse_scale is not None
        gradients, seen = self._gradients(positions, False)
        if held_for is not None:
            target = StepBuffer(self._buffer.step, self._measurer.complaints)
            self._held[held_for] = target, seen, list(positions)
        elif self._seen or self._spent or self._passed:
            self._replace_seen(self._buffer, positions, seen)
        else:
            self._seen = seen
        self._measurer.measure(Measurement(target, plan, gradients, inverse_scale))

    def _replace_seen(self, buffer: StepBuffer, positions: Sequence[int], seen: _Seen) -> None:
        """Values of gradients that were discarded since, as by zero_grad in a closure, are dropped."""
        buffer.clear(n.GRADIENT_BEFORE_CLIP, self._plans[n.GRADIENT_BEFORE_CLIP].names_at(positions))
        were = {position: self._seen.pop(position, None) for position in positions}
        are_new = bool(were) and all(old and p in seen and old[0] != seen[p][0] for p, old in were.items())
        if not self._spent.isdisjoint(were):
            # not dropped but used, as by a closure that is called again: what was done to them is over
            self._spent.difference_update(were)
            for note in ("dropped", "assigned"):
                buffer.noted.pop(note, None)
        elif are_new and self._passed.isdisjoint(were):
            buffer.noted["dropped"] = True
        self._passed.difference_update(were)  # those were of another turn
        self._seen.update(seen)

    def release(self, held_for: Hashable) -> None:
        if self._buffer is not None and held_for in self._held:
            held, seen, positions = self._held.pop(held_for)
            self._replace_seen(self._buffer, positions, seen)
            self._buffer.absorb(held)
            self._buffer.noted.pop("edited", None)

    def drop_scaled(self, reason: str) -> None:
        """Drop what was measured before the optimizer's step, because its scale is unknown."""
        if self._buffer is not None:
            for source in (n.GRADIENT_BEFORE_CLIP, n.GRADIENT_LOCAL):
                self._buffer.clear(source)
                self._buffer.absent[source, ""] = reason
            self._seen, self._held = {}, {}

    def after_clip(self, positions: Sequence[int], inverse_scale: Tensor | None) -> None:
        """Measure the gradients that the optimizer is about to use. Replaces an earlier call's values."""
        if self._buffer is None:
            return
        plan, buffer, is_plain = self._plans[n.GRADIENT], self._buffer, self._source is PLAIN_GRADIENTS
        names = plan.names if len(positions) == len(plan.names) else plan.names_at(positions)
        gradients, now = self._gradients(positions, True)
        if self._has_used:
            # an engine steps one group after the other, and frees the gradients of those before
            buffer.clear(n.GRADIENT, names if is_plain else plan.names_at(sorted(gradients)))
        self._has_used = True
        buffer.used.update(names)
        missing, narrow = {*positions}.difference(gradients), _NARROW.intersection(map(dtype_of, gradients.values()))
        if missing:
            parameters = self._parameters.there(sorted(missing - self._at_rest))
            buffer.frozen.update(plan.names_at([p for p, parameter in parameters.items() if not parameter.requires_grad]))
        were: list[Any] = [*map(self._seen.get, gradients)]
        are_seen = bool(were) and None not in were
        changed = [*compress(gradients.values(), map(ne, were, now.values()))] if are_seen else []
        # subclasses (DTensor) have no version counter that tells, and views (of DDP's buckets) share one
        telling = compress(changed, map(_TENSOR.__contains__, map(type, changed)))
        if not all(map(Tensor._is_view, telling)) or not self._seen.keys().isdisjoint(missing):
            buffer.noted["edited"] = True
        elif are_seen and self._scaled and narrow:
            buffer.noted["rounds"] = True  # unscaling moves no version counter: other values without an edit
        if are_seen and is_plain and not any(map(eq, map(_FIRST, were), map(_FIRST, now.values()))):
            buffer.noted["assigned"] = True  # others than those that were measured
        self._spent.update(gradients)
        if len(gradients) < len(self._seen):
            self._passed = self._seen.keys() - gradients
        if narrow:
            buffer.noted["rounding"] = max(torch.finfo(dtype).eps / 2 for dtype in narrow)
        self._measurer.measure(Measurement(buffer, plan, gradients, inverse_scale))


# --- Parameters, their updates, and the optimizer's state ---

#: Elements of the updates that functions get at once, unless one tensor has more.
_TOGETHER = 2**22


class ParameterCapture:
    """Measures parameters before the optimizer's step, and updates: parameters after it minus before it.

    ``update_sample`` limits the copies for updates: None for all, an int for at most that many rows (evenly spaced slices of the first
    dimension) of each parameter, or a pattern for their names. Memory: during one optimizer's step, a copy of its parameters or of the
    sample.
    """

    def __init__(self, measurer: Measurer, update_sample: int | re.Pattern[str] | None) -> None:
        self._measurer = measurer
        self._sample = update_sample
        self._buffer: StepBuffer | None = None
        self._before: dict[int, Tensor] = {}
        self._measured: set[int] = set()  # positions whose copies are what was measured as parameters, by the rows of `_put`
        self._put: Tensor | None = None
        self.reference: Mapping[str, nn.Parameter] = {}  # parameters by name, whose differences are measured
        self._source: GradientSource = PLAIN_GRADIENTS
        self.shared: set[int] = set()  # positions of parameters that several optimizers step

    def sample_description(self) -> str | None:
        """What update values cover, if not all elements of every parameter."""
        if self._sample is None:
            return None
        if isinstance(self._sample, re.Pattern):
            return f"of the parameters that match {self._sample.pattern!r} only"
        return f"of at most {self._sample} rows of each parameter"

    def begin(self, buffer: StepBuffer, plans: Mapping[str, SourcePlan], inventory: ModelIndex) -> None:
        self._buffer, self._plans, self._parameters, self._source = buffer, plans, inventory.references, inventory.source
        self._before, self._measured = {}, set()

    def end(self) -> None:
        self._buffer, self._before = None, {}

    def _live(self, positions: Collection[int]) -> Mapping[int, Tensor]:
        parameters = self._parameters.there(positions)
        if self._source is PLAIN_GRADIENTS:
            return parameters  # functions get detached ones
        return {position: self._source.value(parameter).detach() for position, parameter in parameters.items()}

    def _parts(self, positions: Collection[int]) -> Mapping[int, Tensor]:
        spread = self._plans[n.UPDATE].spread
        return self._measurer.ranks.own_parts(self._live(positions), spread)

    def measure(self, positions: Collection[int]) -> None:
        """Measure the parameters now, and their difference to the reference model."""
        if self._buffer is None:
            return
        parameters = self._parameters.there(positions) if self._source is PLAIN_GRADIENTS else self._live(positions)
        self._measurer.measure(Measurement(self._buffer, self._plans[n.PARAMETER], parameters))
        plan = self._plans[n.PARAMETER_DIFFERENCE]
        if plan.empty:
            return
        own, reference = {}, {}
        for position in set(plan.positions) & parameters.keys():
            name = plan.names[position]
            other = self.reference.get(name)
            if other is None or other.shape != parameters[position].shape:
                why = "has no such parameter" if other is None else f"has another shape there, {tuple(other.shape)}"
                self._buffer.absent[n.PARAMETER_DIFFERENCE, name] = f"the reference module {why}"
            elif getattr(other, "placements", None) != getattr(parameters[position], "placements", None):
                why = "the reference module's is not sharded over ranks in the same way"
                self._buffer.absent[n.PARAMETER_DIFFERENCE, name] = why
            else:
                own[position], reference[position] = parameters[position], other.detach().to(parameters[position].device)
        self._measurer.measure(Measurement(self._buffer, plan, own, second=reference))

    def before_step(self, positions: Iterable[int], as_measured: bool) -> None:
        """Copy what the step will change; ``as_measured``: nothing has changed since :meth:`measure`."""
        if self._buffer is None:
            return
        wanted = set(self._plans[n.UPDATE].positions).intersection(positions) - self._before.keys()
        if not wanted:
            return
        parts: dict[int, Tensor] = {}
        for position, parameter in self._parts(sorted(wanted)).items():
            name = self._plans[n.UPDATE].names[position]
            if isinstance(self._sample, re.Pattern) and not self._sample.search(name):
                self._buffer.absent[n.UPDATE, name] = f"update_regex={self._sample.pattern!r} leaves it out"
            else:
                parts[position] = self._rows(parameter)
        self._measured.difference_update(parts)
        try:
            self._before.update(zip(parts, copies(parts.values()), strict=True))
        except RuntimeError as error:  # such as a device that is out of memory
            self._measurer.complaints.add("updates", "parameters could not be copied, so their updates are not measured", error)
            self._buffer.refuse_all(n.UPDATE, "the parameters could not be copied before the step")
            return
        if as_measured and not isinstance(self._sample, int) and self._plans[n.PARAMETER].columns >= SQUARES:
            self._measured.update(parts)
            self._put = self._buffer.last_put(n.PARAMETER)

    def forget(self, positions: Iterable[int]) -> None:
        for position in positions:
            self._before.pop(position, None)
            self._measured.discard(position)

    def after_step(self, positions: Sequence[int], optimizer: Optimizer) -> None:
        if self._buffer is None:
            return
        before = {p: self._before[p] for p in positions if p in self._before} if self._before else {}
        after: Mapping[int, Tensor] = {}
        plan = self._plans[n.UPDATE]
        if before:
            self._before = {p: copy for p, copy in self._before.items() if p not in before or p in self.shared}
            after = {position: self._rows(parameter) for position, parameter in self._parts(before).items()}
            self._measurer.measure(Measurement(self._buffer, plan, after, second=before, are_parts=True))
            self._measure_base(plan, before)
        if plan.functions:
            self._run_functions(plan, before, after)
        states = self._plans[n.OPTIMIZER]
        if not states.empty:
            parameters = self._parameters.there(positions)
            owned: Mapping[int, Tensor] = parameters
            if self._source is not PLAIN_GRADIENTS:
                owned = {p: whole for p, q in parameters.items() if (whole := self._whole(q, states.names[p])) is not None}
            groups, state = dict[int, dict[str, Any]](), optimizer.state
            for group in optimizer.param_groups:
                settings = {name: value for name, value in group.items() if name != "params"}
                groups.update(dict.fromkeys(map(id, group["params"]), settings))
            kept = {  # functions get detached ones
                p: {**state.get(q, {}), "param": q, "grad": q.grad, "group": groups.get(id(q), {})} for p, q in owned.items()
            }
            self._measurer.run_functions(Measurement(self._buffer, states, kept))

    def _run_functions(self, plan: SourcePlan, before: Mapping[int, Tensor], after: Mapping[int, Tensor]) -> None:
        """Run the functions of changes, and those of changes beside what was there, a few tensors at a time: the changes are copies."""
        assert self._buffer is not None
        elsewhere = {p: metrics for p, metrics in plan.functions.items() if p not in after}
        if elsewhere:  # they get the reason
            self._measurer.run_functions(Measurement(self._buffer, replace(plan, functions=elsewhere), {}))
        due = [position for position in plan.functions if position in after]
        for places in filled([after[position].numel() for position in due], _TOGETHER):
            positions = [due[place] for place in places]
            alone: dict[int, Any] = {}
            beside: dict[int, Any] = {}
            for position in positions:
                wide = torch.promote_types(after[position].dtype, torch.float32)
                base = before[position].to(wide)
                alone[position] = after[position].to(wide) - base
                beside[position] = {"param": base, "change": alone[position]}
            for values, takes_both in ((alone, False), (beside, True)):
                functions = {
                    p: kept
                    for p in positions
                    if (kept := tuple(m for m in plan.functions[p] if isinstance(m.function, OfProducts) == takes_both))
                }
                if functions:
                    self._measurer.run_functions(Measurement(self._buffer, replace(plan, functions=functions), values))

    def _whole(self, parameter: nn.Parameter, name: str) -> Tensor | None:
        """The tensor in the optimizer's groups, unless it stands for other parameters too."""
        stepped = self._source.stepped(parameter)
        if self._source.value(parameter) is stepped:
            return stepped
        assert self._buffer is not None
        self._buffer.absent[n.OPTIMIZER, name] = "the optimizer's state is of a flat tensor of several parameters"
        return None

    def _measure_base(self, plan: SourcePlan, before: Mapping[int, Tensor]) -> None:
        """Measure what updates are compared with, unless the copies are what was measured as parameters."""
        assert self._buffer is not None
        are_put = self._measured and self._buffer.last_put(n.PARAMETER) is self._put
        known = self._buffer.names_of(n.PARAMETER) if are_put else set()
        again = [position for position in before if position in self._measured and plan.names[position] in known]
        if again:
            self._buffer.repeat_rows(n.UPDATE_BASE, plan.names_at(again), n.PARAMETER, SQUARES)
        rest = {position: before[position] for position in before.keys() - set(again)} if again else before
        base = SourcePlan(n.UPDATE_BASE, plan.names, SQUARES, plan.measured, spread=plan.spread)
        self._measurer.measure(Measurement(self._buffer, base, rest, are_parts=True))

    def _rows(self, parameter: Tensor) -> Tensor:
        count = self._sample
        if not isinstance(count, int) or parameter.dim() == 0 or parameter.shape[0] <= count:
            return parameter
        places = torch.linspace(0, parameter.shape[0] - 1, count, dtype=torch.float64, device="cpu").round()
        return parameter.index_select(0, places.to(parameter.device, torch.int64))


# --- Copies of what a step will change ---

#: Bytes of the blocks of memory that copies share, and in which each begins at a multiple of the second number.
_BLOCK, _ALIGNMENT = 1 << 28, 64


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """A copy of each tensor. On an accelerator those of one dtype share their memory, since they are copied by few launches."""
    found = list(tensors)
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(found):
        is_composed = hasattr(type(tensor), "__tensor_flatten__")  # of other tensors, such as a quantised one
        is_plain = not tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous() and not is_composed
        if not is_plain or tensor.nbytes > _BLOCK:
            found[place] = tensor.clone()
            continue
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(place)
    for of_kind in by_kind.values():
        for block in filled([found[place].nbytes for place in of_kind], _BLOCK):
            # in one block of memory, each aligned as kernels with vector loads need it
            step = _ALIGNMENT // found[of_kind[0]].element_size()
            gap = found[of_kind[0]].new_empty(step)
            parts: list[Tensor] = []
            numbers = []
            for place in map(of_kind.__getitem__, block):
                numbers.append((place, len(parts)))
                parts.append(found[place].view(-1))
                if missing := -found[place].numel() % step:
                    parts.append(gap[:missing])
            pieces = torch.split(torch.cat(parts), [*map(Tensor.numel, parts)])
            for place, number in numbers:
                found[place] = pieces[number].view(found[place].shape)
    return found
