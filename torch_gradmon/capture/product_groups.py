"""Metrics that follow from inner products of a parameter's tensors, such as norms of optimizer states: those of all parameters together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..core.metric import Metric
from ..statistics.tensor_access import refusal

#: Two tensors of one shape.
_Pair = tuple[Tensor, Tensor]


class ProductGroups:
    """Pairs of tensors by device and metric, whose inner products are computed in one call for each device."""

    def __init__(self) -> None:
        self._groups: dict[torch.device, dict[Metric, tuple[list[int], list[Sequence[_Pair]]]]] = {}

    def add(self, metric: Metric, position: int, pairs: Sequence[_Pair]) -> None:
        """The pairs of a parameter, as many for each of a metric. Those that cannot be read, or lie on several devices, are left out."""
        tensors = [tensor for pair in pairs for tensor in pair]
        if len({tensor.device for tensor in tensors}) == 1 and not any(map(refusal, tensors)):
            positions, found = self._groups.setdefault(tensors[0].device, {}).setdefault(metric, ([], []))
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
