"""Metrics of outputs that depend on the kind of module: dead and dormant units, saturated gates, alignment with the weight."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...core.keys import ACTIVATION, UNDEFINED, Key
from ...core.torch_modes import keep_for_current_stream
from ...statistics.histogram import PARTICIPATION_RATIO, first_left_vector, participation_ratio
from ...statistics.request import NARROW, accumulator_dtype, refusal, threshold
from ...step.buffer import StepBuffer
from ...step.plan import BuiltIn

#: Consecutive monitored steps without output after which a unit counts as dead.
WINDOW = 100
#: Distance from either bound of a sigmoid or tanh within which an output counts as saturated.
MARGIN = 0.05

#: Share of the mean over the units at or below which a unit is dormant (Sokar et al. 2023, arXiv 2302.12902, definition 3.1, whose code
#: takes 0.025 and 0.1).
DORMANT_SHARE = 0.025

_BOUNDS: tuple[tuple[type[nn.Module], float, float], ...] = (
    (nn.Sigmoid, 0.0, 1.0),
    (nn.Hardsigmoid, 0.0, 1.0),
    (nn.Tanh, -1.0, 1.0),
)
_CHANNELS_FIRST = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._LPPoolNd,
)


class _Saturation:
    def bind(self, module: Any) -> Callable[[Tensor], Tensor] | str:
        for kind, low, high in _BOUNDS:
            if isinstance(module, kind):
                return lambda x: _share_outside(x, low, high)
        return f"its module is no {', '.join(kind.__name__ for kind, *_ in _BOUNDS)}, whose outputs have bounds"


def _share_outside(x: Tensor, low: float, high: float) -> Tensor:
    wide = x.to(accumulator_dtype(x.device))  # in which the bounds are exact
    return ((wide < low + MARGIN) | (wide > high - MARGIN)).to(wide.dtype)


class UnitsOf:
    """Finds the dimension of the units in a module's output.

    Args:
        module: the first dimension after the batch is meant for convolutions, batch norms, pooling and other modules with outputs of four
            dimensions or more; else the last.
    """

    def __init__(self, module: Any) -> None:
        self._has_channels = isinstance(module, _CHANNELS_FIRST)
        self._is_linear = isinstance(module, nn.Linear)
        convolves = isinstance(module, nn.modules.conv._ConvNd)
        self._dim_of_one_sample = len(module.kernel_size) + 1 if convolves else -1

    def dim(self, output: Tensor) -> int:
        """The dimension; ``output`` has one at least."""
        if output.dim() == self._dim_of_one_sample:
            return 0
        channels = self._has_channels or (output.dim() >= 4 and not self._is_linear)
        return 1 if channels and output.dim() >= 3 else output.dim() - 1


class _Dormant:
    def bind(self, module: Any) -> Callable[[Tensor], Tensor | None] | str:
        units_of = UnitsOf(module)

        def share(output: Tensor) -> Tensor | None:
            """Of the units whose mean |x| is :data:`DORMANT_SHARE` of the mean over the units or less; NaN with what is not finite."""
            if not output.dim() or output.layout != torch.strided:
                return None
            dim = units_of.dim(output)
            others = [other for other in range(output.dim()) if other != dim]
            wide = accumulator_dtype(output.device)
            sums = torch.linalg.vector_norm(output, 1, dim=others, dtype=wide) if others else output.abs().to(wide)
            return torch.where(sums.isfinite().all(), (sums <= DORMANT_SHARE * sums.mean()).to(wide).mean(), torch.nan)

        return share


class _Participation:
    def bind(self, module: Any) -> Callable[[Tensor], Tensor | None] | str:
        units_of = UnitsOf(module)
        return lambda x: participation_ratio(x.movedim(units_of.dim(x), -1)) if x.dim() else None


class _SingularSide:
    def bind(self, module: Any) -> Callable[[Tensor], Tensor | None] | str:
        if not isinstance(module, nn.Linear):
            return "its module is no Linear, whose output shows on which side of a singular vector an input lies"
        reference = weakref.ref(module)

        def sides(output: Tensor) -> Tensor | None:
            """For each row, whether it lies on the one side of the first singular vector (1) or on the other (0)."""
            alive = reference()
            # the attribute could be a parametrization that runs
            weight = None if alive is None else alive._parameters.get("weight")
            if alive is None or weight is None or not output.dim() or refusal(weight) is not None:
                return None
            if (vector := first_left_vector(weight)) is None:
                return None
            bias = alive._parameters.get("bias")
            wide = output.to(vector.dtype) if bias is None else output.to(vector.dtype) - bias.to(vector.dtype)
            along = wide @ vector
            found = torch.where(along.isnan(), torch.nan, (along > 0).to(vector.dtype))
            return torch.where(vector.any(), found, UNDEFINED)

        return sides


class DeadUnits:
    """Counts, for one module's output, the consecutive monitored steps in which each unit was silent.

    Args:
        module: see :class:`UnitsOf`.

    Memory: five bytes per unit.
    """

    def __init__(self, module: Any) -> None:
        self._units_of = UnitsOf(module)
        self._alive: Tensor | None = None
        self._silent: Tensor | None = None
        self.steps = 0

    def see(self, output: Tensor, eps: float) -> None:
        """Add one output of this step; a unit is alive if ``|x| > eps`` or NaN for any sample. Does not synchronise."""
        if output.dim() == 0:
            return
        if output.layout != torch.strided:
            output = output.to_dense()
        units = self._units_of.dim(output)
        others = [dim for dim in range(output.dim()) if dim != units]
        magnitude = output.detach().abs()
        magnitude = magnitude.float() if magnitude.dtype in NARROW else magnitude
        awake = (magnitude <= threshold(eps, magnitude.dtype)).logical_not()
        alive = awake.any(dim=others) if others else awake
        if self._alive is None or self._alive.shape != alive.shape or self._alive.device != alive.device:
            self._alive, self._silent, self.steps = alive, None, 0
        else:
            self._alive |= alive

    def discard(self) -> None:
        """Forget the outputs of this step."""
        if self._alive is not None:
            self._alive = torch.zeros_like(self._alive)

    def end_step(self) -> Tensor | None:
        """The share of dead units, 0-d; None before :data:`WINDOW` steps."""
        if self._alive is None:
            return None
        if self._silent is None:
            self._silent = torch.zeros_like(self._alive, dtype=torch.int32)
        keep_for_current_stream(self._alive)
        keep_for_current_stream(self._silent)
        self._silent = torch.where(self._alive, 0, self._silent + 1)
        self._alive = torch.zeros_like(self._alive)
        self.steps += 1
        dead = (self._silent >= WINDOW).to(accumulator_dtype(self._silent.device))
        return dead.mean() if self.steps >= WINDOW else None


class DeadUnitTracker:
    """The :class:`DeadUnits` of all outputs, by path."""

    def __init__(self) -> None:
        self._units: dict[str, DeadUnits] = {}
        self._seen: set[str] = set()

    def clear(self) -> None:
        """Discard which outputs were seen in this step."""
        self._seen.clear()

    def discard(self) -> None:
        """Forget the outputs of this step."""
        for path in self._seen:
            self._units[path].discard()
        self._seen.clear()

    def see(self, path: str, module: Callable[[], nn.Module | None] | None, output: Tensor, eps: float) -> None:
        """Add one output of ``module``, given as a weak reference."""
        if path not in self._units:
            self._units[path] = DeadUnits(None if module is None else module())
        self._units[path].see(output, eps)
        self._seen.add(path)

    def end_step(self, buffer: StepBuffer) -> None:
        """Store the shares of dead units of outputs seen in this step."""
        for path in self._seen:
            share = self._units[path].end_step()
            if share is not None:
                buffer.put_value(Key(ACTIVATION, path, "dead"), share)
            else:
                steps = self._units[path].steps
                buffer.absent[ACTIVATION, f"{path}/dead"] = f"it takes {WINDOW} monitored steps, and {steps} were seen"
        self._seen.clear()


class _Dead:
    """Marks the metric, whose :class:`DeadUnits` outlive a call."""

    def bind(self, module: Any) -> Callable[..., Any] | str:
        return "it is measured for outputs of modules only"


DEAD = _Dead()
#: Built-in metrics of inputs, and of outputs too.
INPUT_BUILT_INS = {
    PARTICIPATION_RATIO: BuiltIn(
        frozenset(),
        "1",
        "participation ratio: how many directions the rows of units fill; mean of the micro-batches",
        _Participation(),
    )
}
#: Built-in metrics of outputs, in addition to the views of statistics.
ACTIVATION_BUILT_INS = {
    "dead": BuiltIn(
        frozenset(), "share", f"share of units with |output| <= eps for every sample of the last {WINDOW} monitored steps", DEAD
    ),
    "saturation": BuiltIn(
        frozenset(), "share", f"share of the outputs of a sigmoid or tanh that are within {MARGIN} of either bound", _Saturation()
    ),
    "dormant": BuiltIn(
        frozenset(),
        "share",
        f"share of units whose mean |output| is {DORMANT_SHARE} of the mean over units or less; mean of the micro-batches",
        _Dormant(),
    ),
    "singular_side": BuiltIn(
        frozenset(),
        "share",
        "share of the inputs of a Linear on one side of the first singular vector of its weight: 0 or 1 if all lie on one side",
        _SingularSide(),
    ),
    **INPUT_BUILT_INS,
}
