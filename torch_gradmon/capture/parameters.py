"""Parameters, their updates, and the optimizer's state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.keys import OPTIMIZER, PARAMETER, PARAMETER_DIFFERENCE, UPDATE, UPDATE_BASE
from ..core.moments import SQUARES
from ..statistics.on_device import copies
from ..statistics.precise import inner_product, sum_of_squared_ratios
from ..statistics.tensor_access import accumulator_dtype
from ..step.buffer import StepBuffer
from ..step.built_ins import BuiltIn
from ..step.gradient_source import PLAIN_GRADIENTS, GradientSource
from ..step.parameter_refs import Place
from ..step.plan import SourcePlan
from ..step.reduction import cosine
from .measurer import Measurement, Measurer

State = Mapping[str, Any]


class StateNorm:
    """The norm of the first of these state tensors that the optimizer has."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def pairs(self, state: State) -> list[tuple[Tensor, Tensor]]:
        """The tensors whose inner products decide the value; none without such a state."""
        found = next((state[name] for name in self._names if isinstance(state.get(name), Tensor)), None)
        return [] if found is None else [(found, found)]

    def value(self, products: Tensor) -> Tensor:
        """The value from the inner products, in their first dimension."""
        return products[0].sqrt()

    def __call__(self, state: State) -> Tensor | None:
        """0-d, or None without such a state."""
        return _value(self, state)

    def contribution(self, state: State) -> tuple[str, Tensor] | None:
        """What one rank's part of a tensor contributes, and how contributions merge."""
        pairs = self.pairs(state)
        return ("norm", _products(pairs)) if pairs else None


class Cosine:
    """The cosine between the gradient and the momentum."""

    def pairs(self, state: State) -> list[tuple[Tensor, Tensor]]:
        """The tensors whose inner products decide the value; none without momentum."""
        gradient = state["grad"]
        momentum = next((state[name] for name in ("exp_avg", "momentum_buffer") if isinstance(state.get(name), Tensor)), None)
        if gradient is None or momentum is None or momentum.shape != gradient.shape:
            return []
        return [(gradient, momentum), (gradient, gradient), (momentum, momentum)]

    def value(self, products: Tensor) -> Tensor:
        """The value from the inner products, in their first dimension."""
        return cosine(*products.unbind())

    def __call__(self, state: State) -> Tensor | None:
        """0-d, or None without momentum."""
        return _value(self, state)

    def contribution(self, state: State) -> tuple[str, Tensor] | None:
        """What one rank's part of a tensor contributes, and how contributions merge."""
        pairs = self.pairs(state)
        return ("cosine", _products(pairs)) if pairs else None


class OutOfStep:
    """How far the gradient has left Adam's second moment behind: ``sqrt(mean(g^2 / max(v, eps^2)))``, v with Adam's correction for the
    first steps. StableAdamW divides its rate by this number where it is above 1; its authors saw that spikes of the loss come one to
    eight steps after it has risen (Wortsman et al. 2023, arXiv 2304.13013, abstract).
    """

    def _sums(self, state: State) -> Tensor | None:
        """The sum over the elements and their number, ``[2]``; None without a second moment of Adam."""
        gradient, moment, step, group = (state.get(name) for name in ("grad", "exp_avg_sq", "step", "group"))
        if gradient is None or not isinstance(moment, Tensor) or moment.shape != gradient.shape or gradient.is_complex():
            return None
        if not group or step is None or not {"betas", "eps"} <= group.keys():
            return None
        if isinstance(step, Tensor):  # on the CPU, unless the optimizer is fused or capturable
            step = step.to(accumulator_dtype(step.device))
        corrected = 1 - group["betas"][1] ** step
        sums = sum_of_squared_ratios(gradient, moment, corrected, group["eps"] ** 2)
        return torch.stack([sums, sums.new_full((), moment.numel())])

    def __call__(self, state: State) -> Tensor | None:
        """0-d, or None without a second moment of Adam."""
        sums = self._sums(state)
        return None if sums is None else (sums[0] / sums[1]).sqrt()

    def contribution(self, state: State) -> tuple[str, Tensor] | None:
        """What one rank's part of a tensor contributes, and how contributions merge."""
        sums = self._sums(state)
        return None if sums is None else ("rms", sums)


def _products(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.stack([inner_product(a, b) for a, b in pairs])


def _value(of: StateNorm | Cosine, state: State) -> Tensor | None:
    pairs = of.pairs(state)
    return of.value(_products(pairs)) if pairs else None


#: Built-ins of the optimizer's state after the step, which includes this step's gradient. The cosine is MosaicML Composer's
#: ``cosine/moment_grad``.
OPTIMIZER_BUILT_INS = {
    "exp_avg_norm": BuiltIn(frozenset(), "1", "norm of the first moment or momentum", StateNorm("exp_avg", "momentum_buffer")),
    "exp_avg_sq_norm": BuiltIn(
        frozenset(), "1", "norm of the second moment of Adam and its kin", StateNorm("exp_avg_sq", "square_avg")
    ),
    "grad_momentum_cosine": BuiltIn(frozenset(), "1", "cosine between the gradient and the momentum", Cosine()),
    "out_of_step": BuiltIn(
        frozenset(), "1", "root mean square of the gradient over the root of Adam's second moment", OutOfStep()
    ),
}


def _settings(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """By identity of each parameter, the settings of its group."""
    found: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        settings = {name: value for name, value in group.items() if name != "params"}
        found.update((id(parameter), settings) for parameter in group["params"])
    return found


class ParameterCapture:
    """Measures parameters before the optimizer's step, and updates: parameters after it minus before it.

    Args:
        measurer: measures.
        update_sample: limits the copies for updates: None for all, an int for at most that many rows (evenly spaced slices of the first
            dimension) of each parameter, or a pattern for the names of parameters.

    Memory: during one optimizer's step, a copy of its parameters (or of the sample).
    """

    def __init__(self, measurer: Measurer, update_sample: int | re.Pattern[str] | None) -> None:
        self._measurer = measurer
        self._sample = update_sample
        self._buffer: StepBuffer | None = None
        self._before: dict[int, Tensor] = {}
        self._measured: set[int] = set()  # positions whose copies are what was measured as parameters, in this version
        self._version = 0
        self._reference: Mapping[str, nn.Parameter] = {}
        self._source = PLAIN_GRADIENTS
        self._shared: set[int] = set()  # positions of parameters that several optimizers step

    def compare_with(self, reference: Mapping[str, nn.Parameter]) -> None:
        """Measure differences to these parameters, by name."""
        self._reference = reference

    def share(self, positions: set[int]) -> None:
        """Several optimizers step the parameters at these positions."""
        self._shared = positions

    def sample_description(self) -> str | None:
        """What update values cover, if not all elements of every parameter."""
        if self._sample is None:
            return None
        if isinstance(self._sample, re.Pattern):
            return f"of the parameters that match {self._sample.pattern!r} only"
        return f"of at most {self._sample} rows of each parameter"

    def begin(
        self,
        buffer: StepBuffer,
        plans: Mapping[str, SourcePlan],
        parameters: Sequence[Place],
        source: GradientSource = PLAIN_GRADIENTS,
    ) -> None:
        """Start a step; ``parameters`` are those that positions in the plans refer to."""
        self._buffer, self._plans, self._parameters, self._source = buffer, plans, parameters, source
        self._before, self._measured = {}, set()

    def end(self) -> None:
        """End the step and release everything it held."""
        self._buffer, self._before = None, {}

    def _live(self, positions: Iterable[int]) -> dict[int, Tensor]:
        found = {position: self._parameters[position]() for position in positions}
        there = {position: parameter for position, parameter in found.items() if parameter is not None}
        if self._source is not PLAIN_GRADIENTS:
            return {position: self._source.value(parameter).detach() for position, parameter in there.items()}
        return {position: parameter.detach() for position, parameter in there.items()}

    def _parts(self, positions: Iterable[int]) -> Mapping[int, Tensor]:
        """The part of each parameter that this rank counts."""
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
        there, reference = {}, {}
        for position in set(plan.positions) & parameters.keys():
            name = plan.names[position]
            other = self._reference.get(name)
            if other is None or other.shape != parameters[position].shape:
                why = "has no such parameter" if other is None else f"has another shape there, {tuple(other.shape)}"
                self._buffer.absent[PARAMETER_DIFFERENCE, name] = f"the reference module {why}"
            elif getattr(other, "placements", None) != getattr(parameters[position], "placements", None):
                why = "the reference module's is not sharded over ranks in the same way"
                self._buffer.absent[PARAMETER_DIFFERENCE, name] = why
            else:
                there[position], reference[position] = parameters[position], other.detach().to(parameters[position].device)
        self._measurer.measure(Measurement(self._buffer, plan, there, second=reference))

    def before_step(self, positions: Iterable[int], as_measured: bool) -> None:
        """Copy what the step will change; ``as_measured``: nothing has changed since :meth:`measure`."""
        if self._buffer is None:
            return
        wanted = set(self._plans[UPDATE].positions).intersection(positions) - self._before.keys()
        parts: dict[int, Tensor] = {}
        for position, parameter in self._parts(sorted(wanted)).items():
            name = self._plans[UPDATE].names[position]
            if isinstance(self._sample, re.Pattern) and not self._sample.search(name):
                self._buffer.absent[UPDATE, name] = f"update_sample={self._sample.pattern!r} leaves it out"
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
            self._version = self._buffer.version_of(PARAMETER)

    def forget(self, positions: Iterable[int]) -> None:
        """Drop the copies of parameters that are not stepped after all."""
        for position in positions:
            self._before.pop(position, None)
            self._measured.discard(position)

    def after_step(self, positions: Iterable[int], optimizer: torch.optim.Optimizer) -> None:
        """Measure what the step changed, and the optimizer's state."""
        if self._buffer is None:
            return
        positions = list(positions)
        before = {position: self._before[position] for position in positions if position in self._before}
        self._before = {
            position: copy for position, copy in self._before.items() if position not in before or position in self._shared
        }
        after = {position: self._rows(parameter) for position, parameter in self._parts(before).items()}
        plan = self._plans[UPDATE]
        self._measurer.statistics(Measurement(self._buffer, plan, after, second=before, are_parts=True))
        self._measure_base(plan, before)
        for position in plan.functions.keys() & after.keys():
            wide = torch.promote_types(after[position].dtype, torch.float32)
            change = after[position].to(wide) - before[position].to(wide)
            self._measurer.run_functions(Measurement(self._buffer, plan, {position: change}))
        states = self._plans[OPTIMIZER]
        if not states.empty:
            owned = {p: whole for p in positions if (whole := self._whole(p, states.names[p])) is not None}
            groups = _settings(optimizer)
            kept = {
                p: {**optimizer.state.get(q, {}), "param": q.detach(), "grad": q.grad, "group": groups.get(id(q), {})}
                for p, q in owned.items()
            }
            self._measurer.run_functions(Measurement(self._buffer, states, kept))

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
        if self._measured and self._buffer.version_of(PARAMETER) == self._version:
            known = self._buffer.names_of(PARAMETER)
            again = [position for position in before if position in self._measured and plan.names[position] in known]
        if again:
            self._buffer.repeat_rows(UPDATE_BASE, plan.names_at(again), PARAMETER, SQUARES)
        rest = {position: before[position] for position in before.keys() - set(again)} if again else before
        base = SourcePlan(UPDATE_BASE, plan.names, SQUARES, plan.measured, spread=plan.spread)
        self._measurer.statistics(Measurement(self._buffer, base, rest, are_parts=True))

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
