"""Measure large CPU tensors by one compiled kernel, which reads them once: twice as fast as stock operations, after a compilation.

Opt-in, since ``torch.compile`` needs a C++ compiler and takes ten seconds or more in every process, also where its cache is warm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch._dynamo
from torch import Tensor

from .batch import Batch, Request
from .eager import DEFAULT_EPS, Eager, Look
from .moments import ALL_COLUMNS, Column
from .reading import LANES, NARROW, threshold

#: Elements per row of the kernel: sums in float32 run over this many, one vector register after the other, and go on in float64.
_ROW = 32 * LANES
#: Elements per call, which costs some 50 microseconds; the kernel needs no scratch memory.
_CALL = 1 << 24
#: What the kernel returns, in order.
_COLUMNS = (Column.SUM, Column.ABS_SUM, Column.SQUARE_SUM, Column.NEAR_ZERO, Column.MIN, Column.MAX)


class Fused(Eager):
    """:class:`Eager`, with a compiled kernel for tensors of more than 131,072 elements in float32, bfloat16 or float16.

    Args:
        eps: the kernel is compiled for it; measuring with another one compiles again.

    Attributes:
        graphs: how many graphs ``torch.compile`` has made for the kernel.

    Raises:
        Exception: whatever ``torch.compile`` raises where there is no compiler.
    """

    def __init__(self, eps: float = DEFAULT_EPS) -> None:
        super().__init__()
        self._kernels: dict[float, Callable[[Tensor], Tensor]] = {}
        counters = torch._dynamo.utils.counters["stats"]
        before = counters["unique_graphs"]
        with torch.no_grad():
            self._kernel(threshold(eps, torch.float32))(torch.zeros(4, _ROW, device="cpu"))
        self.graphs = counters["unique_graphs"] - before

    def _kernel(self, limit: float) -> Callable[[Tensor], Tensor]:
        if limit not in self._kernels:
            self._kernels[limit] = torch.compile(_kernel(limit), dynamic=True, fullgraph=True)
        return self._kernels[limit]

    def _blocks(self, batch: Batch, index: int, request: Request, dtype: torch.dtype) -> Iterator[Tensor]:
        plain = batch.minus is None and request.inverse_scale is None and not batch.wide[index]
        if not plain or dtype != torch.float32:
            yield from super()._blocks(batch, index, request, dtype)
            return
        values, _ = batch.flat(index)
        whole = values.numel() // _ROW * _ROW
        for start in range(0, whole, _CALL):
            yield values[start : min(start + _CALL, whole)]
        if whole < values.numel():
            yield values[whole:]

    def _look(self, block: Tensor, request: Request) -> Look:
        if block.dtype not in NARROW:
            return super()._look(block, request)
        if block.numel() % _ROW or block.numel() < 2 * _ROW:  # the end of a tensor, which has to have what the kernel gives
            return super()._look(block.float(), replace(request, columns=ALL_COLUMNS))
        found = self._kernel(threshold(request.eps, torch.float32))(block.view(-1, _ROW))
        return dict(zip(_COLUMNS, found.unbind(0), strict=True))


def _kernel(limit: float) -> Callable[[Tensor], Tensor]:
    def look(table: Tensor) -> Tensor:
        table = table.float()
        magnitude = table.abs()
        return torch.stack(
            [
                table.sum(1).double().sum(),
                magnitude.sum(1).double().sum(),
                table.square().sum(1).double().sum(),
                (magnitude <= limit).float().sum(1).double().sum(),
                table.amin(1).amin().double(),
                table.amax(1).amax().double(),
            ]
        )

    return look
