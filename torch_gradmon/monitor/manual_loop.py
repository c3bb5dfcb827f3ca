"""Measurements that the script requests explicitly, in addition to the hooks or instead of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..capture.gradients import is_unscaled, reciprocal, scale_of
from ..core.errors import display
from ..core.fence import fenced
from ..core.keys import SUMMARY, Key
from ..core.moments import identity
from ..core.torch_modes import capture_check, outside_dispatch_modes
from ..plugins.clipping import AdaptiveClip, DeviceValue
from ..statistics.histogram import NORM_COLUMNS, norm_of_rows, rows_of
from ..statistics.request import accumulator_dtype
from ..step.model_index import PLAIN_GRADIENTS
from ..step.ranks import is_dtensor, is_sharded, local_part
from .runtime import Runtime

#: On a GPU a factor would be rounded to so few bits before it multiplies.
_NARROW = frozenset({torch.bfloat16, torch.float16})


class ManualLoop:
    """Carries out the explicit measurements of a training loop."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.fence = runtime, runtime.fence
        self._lifecycle, self._gradients = runtime.lifecycle, runtime.captures.gradients

    @fenced
    def capture_activation(self, name: str, activations: Any) -> None:
        if (modules := self.runtime.captures.modules) is not None:
            modules.capture(name, activations)

    @fenced
    def record_attention(self, name: str, named: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> None:
        """Measure one call of attention, unless the monitor has recognised it."""
        with outside_dispatch_modes():
            self.runtime.captures.needed_modules().report_attention(
                name, named, {"query": named["query"], "key": named["key"], **arguments}
            )

    @fenced
    def measure_parameters(self) -> None:
        if (inventory := self.runtime.planner.inventory) is not None and self._lifecycle.has_values:
            self.runtime.captures.parameters.measure(range(len(inventory.names)))

    @fenced
    def measure_gradients(self, before_clip: bool) -> None:
        if before_clip:
            self._open_unseen()
        if (inventory := self.runtime.planner.inventory) is not None:
            self._measure(before_clip, list(range(len(inventory.names))))

    def _open_unseen(self) -> None:
        """Where a graph runs forward and backward, and calls no hooks, the clip is the first that is seen of a step."""
        patterns = self.runtime.state.patterns
        had_no_backward = not patterns.is_first and patterns.backwards_at_step == 0
        if (self.fence.is_captured or had_no_backward) and self.runtime.loop is not None:
            self.runtime.cycle.ensure_open(hides_forward=False)

    def _measure(self, before_clip: bool, positions: list[int]) -> None:
        if self._lifecycle.has_values:
            measure = self._gradients.before_clip if before_clip else self._gradients.after_clip
            loop = self.runtime.loop
            for some, scale in [(positions, self._inverse_scale())] if loop is None else loop.by_scale(positions):
                measure(some, scale)

    def _inverse_scale(self) -> Tensor | None:
        scaler = self.runtime.scaler
        scale = None if is_unscaled(scaler, None) else scale_of(scaler)
        return None if scale is None else reciprocal(scale)


def clip_gradients(
    runtime: Runtime,
    parameters: Any,
    max_norm: float | str | AdaptiveClip,
    norm_type: float,
    error_if_nonfinite: bool,
    exact: bool | None,
) -> Tensor:
    source, inventory, module = runtime.planner.source, runtime.planner.inventory, runtime.planner.module()
    if source.outer is not None or (not source.is_pipeline and source is not PLAIN_GRADIENTS and inventory and inventory.spread):
        raise ValueError(
            "monitor.clip_grad_norm_ does not know the norm of gradients that an engine has in parts: clip as the engine does, by "
            "model.clip_grad_norm_ of FSDP1 or gradient_clipping in DeepSpeed's configuration; the monitor measures before and after"
        )
    if source.is_pipeline:
        raise ValueError(
            "the stages of a pipeline are clipped by a norm of all of them, which monitor.clip_grad_norm_ does not know; clip as "
            "without a monitor: it measures before and after"
        )
    if parameters is None:
        if module is None:
            raise ValueError("there is no module whose gradients to clip; pass parameters=, or watch a module first")
        parameters = list(dict.fromkeys(map(source.stepped, module.parameters())))  # as the optimizer has them
    if (exact or isinstance(max_norm, (str, AdaptiveClip))) and (check := capture_check()) is not None and check():
        how = "exact=True" if exact else "an adaptive clip"
        raise ValueError(
            f"{how} cannot be captured into a graph; use a number for max_norm and exact=False, or clip outside of it"
        )
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return GradientClip(runtime, parameters, float(norm_type), error_if_nonfinite).by(max_norm, exact)


class GradientClip(ManualLoop):
    """Clips the gradients of ``parameters``, as torch does, by their exact norm or adaptively, and measures them before and after that."""

    def __init__(self, runtime: Runtime, parameters: list[Tensor], norm_type: float, error_if_nonfinite: bool) -> None:
        super().__init__(runtime)
        self._parameters, self._norm_type, self._error_if_nonfinite = parameters, norm_type, error_if_nonfinite
        self._measurer = runtime.captures.measurer
        self._measured: set[int] = set()  # positions of the parameters whose gradients were just measured before clipping

    def by(self, max_norm: float | str | AdaptiveClip, exact: bool | None) -> Tensor:
        """Clip; returns the norm before that."""
        if isinstance(max_norm, str):
            max_norm = self._lifecycle.plugins.needed_clips().named(max_norm)
        if isinstance(max_norm, AdaptiveClip):
            if self._norm_type != 2.0 or exact is False:
                given = "exact=False" if exact is False else f"norm_type={self._norm_type}"
                raise ValueError(f"an adaptive clip goes by the exact norm of order 2, got {given}; leave it out")
            total = self._adaptively(max_norm)
        else:
            try:
                limit = float(max_norm)  # a tensor with one element is one, too
            except (TypeError, ValueError, RuntimeError):
                raise TypeError(
                    f'max_norm is a number, "zclip", "adagc", a ZClip or an AdaGC, got {display(max_norm)}; parameters are given by name: '
                    "clip_grad_norm_(1.0, parameters=model.parameters())"
                ) from None
            if exact:
                total = self._exactly(limit)
            else:
                self._measure_before()
                total = torch.nn.utils.clip_grad_norm_(self._parameters, limit, self._norm_type, self._error_if_nonfinite)
        self._was_clipped()
        if self.runtime.loop is None:  # else an optimizer's hook measures
            self.measure_gradients(False)
        return total

    def _exactly(self, max_norm: float) -> Tensor:
        parameters, norm_type = self._parameters, self._norm_type
        if norm_type not in NORM_COLUMNS:
            raise ValueError(f"exact=True knows the norms 1, 2 and inf, got norm_type={norm_type}; use exact=False for others")
        if norm_type != 2.0 and any(p.is_complex() for p in parameters):
            raise ValueError(
                f"exact=True knows the norm of order {norm_type} of real gradients only; use exact=False for complex ones"
            )
        _, total = self._rows_and_norm()
        if not any(map(is_dtensor, parameters)):
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        else:  # torch multiplies a DTensor by nothing but a DTensor
            _scale(parameters, torch.clamp(max_norm / (total + 1e-6), max=1.0))
        return total

    def _adaptively(self, adaptive: AdaptiveClip) -> Tensor:
        self._parameters = list(dict.fromkeys(self._parameters))
        rows, total = self._rows_and_norm()
        if len(rows):
            self._lifecycle.plugins.needed_clips().learns(adaptive, self._lifecycle.active)
            factors, values = adaptive.factors(rows, self._names())
            _scale(self._parameters, factors)
            self._put(values)
        return total

    # --- what is measured ------------------------------------------------------------------------------------------------------

    @fenced
    def _measure_before(self) -> None:
        """Measure the gradients before clipping, unless they were clipped before or an optimizer has used them."""
        self._open_unseen()
        inventory, loop = self.runtime.planner.inventory, self.runtime.loop
        if inventory is None or not self._lifecycle.has_values:
            return
        positions = inventory.positions(self._parameters)
        positions = self._gradients.not_clipped(positions if loop is None else loop.to_step(positions))
        self._measured = set(positions)
        self._measure(True, self._gradients.with_gradient(positions))  # one without a gradient has nothing to clip

    @fenced
    def _was_clipped(self) -> None:
        if (inventory := self.runtime.planner.inventory) is not None and self._lifecycle.has_values:
            self._gradients.clipped(inventory.positions(self._parameters))

    @fenced
    def _put(self, values: Sequence[DeviceValue]) -> None:
        """Add whole-model values to the current step; they stay on the device until the step ends."""
        self._lifecycle.values.put({Key(SUMMARY, "", one.name): one for one in values})

    # --- the norm --------------------------------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        """The canonical name of each parameter, or ``parameters[index]`` outside the watched model."""
        self.runtime.planner.refresh()
        inventory = self.runtime.planner.inventory
        known = {} if inventory is None else {each: inventory.names[place] for each, place in inventory.places().items()}
        return [known.get(id(p), f"parameters[{index}]") for index, p in enumerate(self._parameters)]

    def _spread(self) -> list[int]:
        """Indices of the parameters that differ between ranks: sharded ones and ones that only some ranks have. All ranks call this.

        Raises:
            ValueError: there are some, and not every rank is known to join the exchange.
        """
        inventory, count, parameters = self.runtime.planner.inventory, self._measurer.ranks.count, self._parameters
        distinct = set() if inventory is None or count == 1 else inventory.spread
        names = self._names() if distinct else []
        found = [i for i, p in enumerate(parameters) if is_sharded(p) or (distinct and names[i] in distinct)]
        if found and count == 1:
            raise ValueError(
                "the exact norm of gradients that are spread over ranks takes a monitor of these ranks, and Distributed(process_group=) "
                "names this one alone; name them all, or use a number for max_norm and exact=False, which clips as torch does"
            )
        needs_ranks = count > 1 and (found or any(map(is_dtensor, parameters)))
        if needs_ranks and not self._lifecycle.exchange.ranks_take_part():
            raise ValueError(
                "the exact norm of gradients that are spread over ranks takes a monitor of the same model and metrics on every rank; make "
                "one on each of them, or use a number for max_norm and exact=False, which clips as torch does"
            )
        return found

    def _rows_and_norm(self) -> tuple[Tensor, Tensor]:
        """A row for each parameter's gradient, none where no gradient is anywhere, and the total norm."""
        spread = self._spread()
        self._measure_before()
        gradients = {place: p.grad for place, p in enumerate(self._parameters) if p.grad is not None}
        if not gradients and not spread:
            return torch.empty(0, 8, device="cpu"), torch.tensor(0.0, device="cpu")
        rows = self._rows(gradients, spread)
        total = norm_of_rows(rows, self._norm_type, any(g.dtype in (torch.float64, torch.complex128) for g in gradients.values()))
        if self._error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(
                f"the total norm of order {self._norm_type} of the gradients is {float(total)}, so it cannot clip them"
            )
        return rows, total

    def _rows(self, gradients: Mapping[int, Tensor], spread: Sequence[int]) -> Tensor:
        """Rows ``[len(parameters), 8]`` of the gradients with the ``NORM_COLUMNS`` of this order, on the first gradient's device.

        A parameter without a gradient has the row of an empty tensor. The rows that were measured before the clip are reused if all
        gradients were. With ``spread`` this is a collective, and each rank gets the rows of the whole tensors.

        Raises:
            ValueError: a gradient cannot be measured.
        """
        ranks, parameters, apart = self._measurer.ranks, self._parameters, set(spread)
        found = self._rows_now() if gradients else None
        if found is None:
            parts = [ranks.own_part(gradient, place in apart) for place, gradient in gradients.items()]
            found = rows_of(parts, self._norm_type, self._measurer.statistics)
        if len(gradients) < len(parameters):
            device = next(iter(gradients.values())).device if gradients else parameters[0].device
            known, found = found, identity(len(parameters), device, accumulator_dtype(device))
            if gradients:
                found[list(gradients)] = known
        if spread:
            merged = ranks.merged(found[spread].to(ranks.device, accumulator_dtype(ranks.device)), NORM_COLUMNS[self._norm_type])
            found[spread] = merged.to(found)
        return found

    @fenced
    def _rows_now(self) -> Tensor | None:
        if (inventory := self.runtime.planner.inventory) is None or not self._lifecycle.has_values:
            return None
        places = inventory.places()
        positions = [places[id(p)] for p in self._parameters if id(p) in places]
        if len(set(positions)) != len(self._parameters) or not self._measured.issuperset(positions):
            return None  # a parameter is outside the model, given twice (torch counts it twice), or not measured just now
        return self._gradients.rows_now(positions, NORM_COLUMNS[self._norm_type])


@torch.no_grad()
def _scale(parameters: Sequence[Tensor], factors: Tensor) -> None:
    """Multiply the gradients in place by ``factors``, 0-d for all of them or one for each; of DTensors what is on this rank."""
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[int]]] = {}
    for place, parameter in enumerate(parameters):
        if parameter.grad is not None:
            part = local_part(parameter.grad)
            parts, places = groups.setdefault((part.device, part.dtype), ([], []))
            parts.append(part)
            places.append(place)
    for (device, dtype), (parts, places) in groups.items():
        here = factors.to(device, torch.promote_types(dtype.to_real(), torch.float32))
        each = [here] * len(parts) if here.dim() == 0 else [here[place] for place in places]
        if dtype in _NARROW:
            for part, factor in zip(parts, each, strict=True):
                part.copy_(part.float() * factor)
        elif any(part.layout != torch.strided for part in parts):
            for part, factor in zip(parts, each, strict=True):
                part.mul_(factor)
        else:
            torch._foreach_mul_(parts, here if here.dim() == 0 else each)
