"""Parameters, their updates, and the optimizer's state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.keys import OPTIMIZER, PARAMETER, PARAMETER_DIFFERENCE, UPDATE, UPDATE_BASE
from ..core.moments import SQUARES
from ..step.buffer import StepBuffer
from ..step.model_index import PLAIN_GRADIENTS, GradientSource, ModelIndex, there
from ..step.plan import SourcePlan
from .measurer import Measurement, Measurer, OfProducts

#: Elements of the updates that functions get at once, unless one tensor has more.
_TOGETHER = 2**22


def _together(positions: Sequence[int], tensors: Mapping[int, Tensor]) -> Iterator[list[int]]:
    group: list[int] = []
    count = 0
    for position in positions:
        if group and count + tensors[position].numel() > _TOGETHER:
            yield group
            group, count = [], 0
        group.append(position)
        count += tensors[position].numel()
    if group:
        yield group


def _settings(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        settings = {name: value for name, value in group.items() if name != "params"}
        found.update((id(parameter), settings) for parameter in group["params"])
    return found


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

    def _live(self, positions: Iterable[int]) -> Mapping[int, Tensor]:
        parameters = there(self._parameters, positions)
        if self._source is PLAIN_GRADIENTS:
            return parameters  # functions get detached ones
        return {position: self._source.value(parameter).detach() for position, parameter in parameters.items()}

    def _parts(self, positions: Iterable[int]) -> Mapping[int, Tensor]:
        spread = self._plans[UPDATE].spread
        return self._measurer.ranks.own_parts(self._live(positions), spread)

    def measure(self, positions: Iterable[int]) -> None:
        """Measure the parameters now, and their difference to the reference model."""
        if self._buffer is None:
            return
        parameters = self._live(positions)
        self._measurer.measure(Measurement(self._buffer, self._plans[PARAMETER], parameters))
        plan = self._plans[PARAMETER_DIFFERENCE]
        if plan.empty:
            return
        own, reference = {}, {}
        for position in set(plan.positions) & parameters.keys():
            name = plan.names[position]
            other = self.reference.get(name)
            if other is None or other.shape != parameters[position].shape:
                why = "has no such parameter" if other is None else f"has another shape there, {tuple(other.shape)}"
                self._buffer.absent[PARAMETER_DIFFERENCE, name] = f"the reference module {why}"
            elif getattr(other, "placements", None) != getattr(parameters[position], "placements", None):
                why = "the reference module's is not sharded over ranks in the same way"
                self._buffer.absent[PARAMETER_DIFFERENCE, name] = why
            else:
                own[position], reference[position] = parameters[position], other.detach().to(parameters[position].device)
        self._measurer.measure(Measurement(self._buffer, plan, own, second=reference))

    def before_step(self, positions: Iterable[int], as_measured: bool) -> None:
        """Copy what the step will change; ``as_measured``: nothing has changed since :meth:`measure`."""
        if self._buffer is None:
            return
        wanted = set(self._plans[UPDATE].positions).intersection(positions) - self._before.keys()
        if not wanted:
            return
        parts: dict[int, Tensor] = {}
        for position, parameter in self._parts(sorted(wanted)).items():
            name = self._plans[UPDATE].names[position]
            if isinstance(self._sample, re.Pattern) and not self._sample.search(name):
                self._buffer.absent[UPDATE, name] = f"update_regex={self._sample.pattern!r} leaves it out"
            else:
                parts[position] = self._rows(parameter)
        self._measured.difference_update(parts)
        try:
            self._before.update(zip(parts, copies(parts.values()), strict=True))
        except RuntimeError as error:  # such as a device that is out of memory
            self._measurer.complaints.add("updates", "parameters could not be copied, so their updates are not measured", error)
            self._buffer.refuse_all(UPDATE, "the parameters could not be copied before the step")
            return
        if as_measured and not isinstance(self._sample, int) and self._plans[PARAMETER].columns >= SQUARES:
            self._measured.update(parts)
            self._put = self._buffer.last_put(PARAMETER)

    def forget(self, positions: Iterable[int]) -> None:
        for position in positions:
            self._before.pop(position, None)
            self._measured.discard(position)

    def after_step(self, positions: Iterable[int], optimizer: torch.optim.Optimizer) -> None:
        if self._buffer is None:
            return
        positions = list(positions)
        before = {p: self._before[p] for p in positions if p in self._before} if self._before else {}
        after: Mapping[int, Tensor] = {}
        plan = self._plans[UPDATE]
        if before:
            self._before = {p: copy for p, copy in self._before.items() if p not in before or p in self.shared}
            after = {position: self._rows(parameter) for position, parameter in self._parts(before).items()}
            self._measurer.measure(Measurement(self._buffer, plan, after, second=before, are_parts=True))
            self._measure_base(plan, before)
        if plan.functions:
            self._run_functions(plan, before, after)
        states = self._plans[OPTIMIZER]
        if not states.empty:
            owned = {p: whole for p in positions if (whole := self._whole(p, states.names[p])) is not None}
            groups = _settings(optimizer)
            kept = {
                p: {**optimizer.state.get(q, {}), "param": q.detach(), "grad": q.grad, "group": groups.get(id(q), {})}
                for p, q in owned.items()
            }
            self._measurer.run_functions(Measurement(self._buffer, states, kept))

    def _run_functions(self, plan: SourcePlan, before: Mapping[int, Tensor], after: Mapping[int, Tensor]) -> None:
        """Run the functions of changes, and those of changes beside what was there, a few tensors at a time: the changes are copies."""
        assert self._buffer is not None
        elsewhere = {p: metrics for p, metrics in plan.functions.items() if p not in after}
        if elsewhere:  # they get the reason
            self._measurer.run_functions(Measurement(self._buffer, replace(plan, functions=elsewhere), {}))
        for positions in _together([position for position in plan.functions if position in after], after):
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

    def _whole(self, position: int, name: str) -> Tensor | None:
        """The tensor in the optimizer's groups, unless it stands for other parameters too."""
        parameter = self._parameters[position]()
        if parameter is None or self._source is PLAIN_GRADIENTS:
            return parameter
        stepped = self._source.stepped(parameter)
        if self._source.value(parameter) is stepped:
            return stepped
        assert self._buffer is not None
        self._buffer.absent[OPTIMIZER, name] = "the optimizer's state is of a flat tensor of several parameters"
        return None

    def _measure_base(self, plan: SourcePlan, before: Mapping[int, Tensor]) -> None:
        """Measure what updates are compared with, unless the copies are what was measured as parameters."""
        assert self._buffer is not None
        again: list[int] = []
        if self._measured and self._buffer.last_put(PARAMETER) is self._put:
            known = self._buffer.names_of(PARAMETER)
            again = [position for position in before if position in self._measured and plan.names[position] in known]
        if again:
            self._buffer.repeat_rows(UPDATE_BASE, plan.names_at(again), PARAMETER, SQUARES)
        rest = {position: before[position] for position in before.keys() - set(again)} if again else before
        base = SourcePlan(UPDATE_BASE, plan.names, SQUARES, plan.measured, spread=plan.spread)
        self._measurer.measure(Measurement(self._buffer, base, rest, are_parts=True))

    def _rows(self, parameter: Tensor) -> Tensor:
        count = self._sample
        if not isinstance(count, int) or parameter.dim() == 0 or parameter.shape[0] <= count:
            return parameter
        index = (
            torch.linspace(0, parameter.shape[0] - 1, count, dtype=torch.float64, device="cpu")
            .round()
            .to(parameter.device, torch.int64)
        )
        return parameter.index_select(0, index)


# --- Copies of what a step will change ---


#: Bytes of the blocks of memory that copies share, and in which each begins at a multiple of the second number.
_BLOCK, _ALIGNMENT = 1 << 28, 64


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """A copy of each tensor. On an accelerator those of one dtype share their memory, since they are copied by few launches."""
    found = list(tensors)
    blocks: dict[tuple[torch.device, torch.dtype], list[list[int]]] = {}
    filled: dict[tuple[torch.device, torch.dtype], int] = {}
    for place, tensor in enumerate(found):
        is_composed = hasattr(type(tensor), "__tensor_flatten__")  # of other tensors, such as a quantised one
        is_plain = not tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous() and not is_composed
        if not is_plain or tensor.nbytes > _BLOCK:
            found[place] = tensor.clone()
            continue
        kind = tensor.device, tensor.dtype
        if kind not in blocks or filled[kind] + tensor.nbytes > _BLOCK:
            blocks.setdefault(kind, []).append([])
            filled[kind] = 0
        blocks[kind][-1].append(place)
        filled[kind] += tensor.nbytes
    for places in (places for of_kind in blocks.values() for places in of_kind):
        for place, piece in zip(places, _packed([found[place] for place in places]), strict=True):
            found[place] = piece
    return found


def _packed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors of one dtype in one block of memory, each aligned as kernels with vector loads need it."""
    step = _ALIGNMENT // tensors[0].element_size()
    gap = tensors[0].new_empty(step)
    parts, lengths = [], []
    for tensor in tensors:
        parts.append(tensor.view(-1))
        lengths.append(tensor.numel())
        if missing := -tensor.numel() % step:
            parts.append(gap[:missing])
            lengths.append(missing)
    pieces = iter(torch.split(torch.cat(parts), lengths))
    found = []
    for tensor in tensors:
        found.append(next(pieces).view(tensor.shape))
        if tensor.numel() % step:
            next(pieces)
    return found
