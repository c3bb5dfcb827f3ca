"""Metrics of the optimizer's state, and of updates beside their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.metric import Metric
from ..statistics.precise import inner_product, sum_of_squared_ratios
from ..statistics.tensor_access import accumulator_dtype, refusal
from ..step.built_ins import BuiltIn
from ..step.reduction import cosine, growth, turn

State = Mapping[str, Any]
#: Two tensors of one shape.
_Pair = tuple[Tensor, Tensor]


class OfProducts:
    """A value that follows from inner products, which add up over ranks.

    Args:
        reducer: how ranks merge the products.
        function: of the products, in the order of :meth:`pairs`.
    """

    def __init__(self, reducer: str, function: Callable[..., Tensor]) -> None:
        self._reducer, self._function = reducer, function

    def pairs(self, state: State) -> list[tuple[Tensor, Tensor]]:
        """The tensors whose inner products decide the value; none where there is no value."""
        raise NotImplementedError

    def value(self, products: Tensor) -> Tensor:
        """The value from the inner products, in their first dimension."""
        return self._function(*products.unbind())

    def __call__(self, state: State) -> Tensor | None:
        """0-d, or None where there is no value."""
        pairs = self.pairs(state)
        return self.value(_products(pairs)) if pairs else None

    def contribution(self, state: State) -> tuple[str, Tensor] | None:
        """What one rank's part of a tensor contributes, and how contributions merge."""
        pairs = self.pairs(state)
        return (self._reducer, _products(pairs)) if pairs else None


class StateNorm(OfProducts):
    """The norm of the first of these state tensors that the optimizer has."""

    def __init__(self, *names: str) -> None:
        super().__init__("norm", torch.sqrt)
        self._names = names

    def pairs(self, state: State) -> list[tuple[Tensor, Tensor]]:
        """None without such a state."""
        found = next((state[name] for name in self._names if isinstance(state.get(name), Tensor)), None)
        return [] if found is None else [(found, found)]


class Cosine(OfProducts):
    """The cosine between the gradient and the momentum."""

    def __init__(self) -> None:
        super().__init__("cosine", cosine)

    def pairs(self, state: State) -> list[tuple[Tensor, Tensor]]:
        """None without momentum."""
        gradient = state["grad"]
        momentum = next((state[name] for name in ("exp_avg", "momentum_buffer") if isinstance(state.get(name), Tensor)), None)
        if gradient is None or momentum is None or momentum.shape != gradient.shape:
            return []
        return [(gradient, momentum), (gradient, gradient), (momentum, momentum)]


class TurnOf(OfProducts):
    """What a change does to the direction or length of a parameter."""

    def pairs(self, state: State) -> list[tuple[Tensor, Tensor]]:
        """The parameter with itself, with its change, and the change with itself."""
        before, change = state["param"], state["change"]
        return [(before, before), (before, change), (change, change)]


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


def _products(pairs: Sequence[_Pair]) -> Tensor:
    return torch.stack([inner_product(a, b) for a, b in pairs])


class ProductGroups:
    """Pairs of tensors by device and metric, whose inner products are computed in one call for each device."""

    def __init__(self) -> None:
        self._groups: dict[torch.device, dict[Metric, tuple[list[int], list[Sequence[_Pair]]]]] = {}

    def add(self, metric: Metric, position: int, pairs: Sequence[_Pair]) -> None:
        """The pairs of a parameter, as many for each of a metric. Those that cannot be read, or lie on several devices, are left out."""
        device = pairs[0][0].device
        for pair in pairs:
            for tensor in pair if pair[0] is not pair[1] else pair[:1]:
                if tensor.device != device or refusal(tensor) is not None:
                    return
        positions, found = self._groups.setdefault(device, {}).setdefault(metric, ([], []))
        positions.append(position)
        found.append(pairs)

    def values(
        self, inner_products: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
    ) -> Iterator[tuple[Metric, list[int], Tensor]]:
        """Each metric with the positions and the values ``[positions]`` of its parameters. A device where one fails is left out."""
        for of_device in self._groups.values():
            try:
                yield from list(self._of(of_device, inner_products))
            except Exception:  # whose tensor it was is found out where they are called one by one
                continue

    @staticmethod
    def _of(
        of_device: dict[Metric, tuple[list[int], list[Sequence[_Pair]]]],
        inner_products: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor],
    ) -> Iterator[tuple[Metric, list[int], Tensor]]:
        together = [pair for _, found in of_device.values() for column in zip(*found, strict=True) for pair in column]
        products = inner_products([a for a, _ in together], [b for _, b in together])
        sizes = [len(found) * len(found[0]) for _, found in of_device.values()]
        for (metric, (positions, _)), own in zip(of_device.items(), torch.split(products, sizes), strict=True):
            yield metric, positions, metric.function.value(own.view(-1, len(positions)))  # type: ignore[union-attr]


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


#: Built-ins of the change beside the parameter before it.
UPDATE_BUILT_INS = {
    "angle": BuiltIn(
        frozenset(),
        "rad",
        "angle between the parameter before and after the step; absent for a zero parameter",
        TurnOf("angle", turn),
    ),
    "growth": BuiltIn(
        frozenset(),
        "1",
        "relative growth of the parameter's norm in the step; absent for a zero parameter",
        TurnOf("growth", growth),
    ),
}
