"""Measure large CPU tensors by one compiled kernel, which reads them once: twice as fast as stock operations, after a compilation.

Opt-in, since the compiler of torch needs one for C++ and takes ten seconds in every process.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch._dynamo
import torch._inductor
from torch import Tensor, nn

from ..modes import unseen
from .batch import Request
from .eager import DEFAULT_EPS, Eager, Look
from .moments import ALL_COLUMNS, Column
from .reading import LANES, NARROW, threshold

#: Elements per row of the kernel: sums in float32 run over this many, one vector register after the other, and go on in float64.
_ROW = 32 * LANES
#: Elements per call, which costs some 50 microseconds; the kernel needs no scratch memory.
_CALL = 1 << 24
#: A compiled kernel, which takes and returns lists.
Kernel = Callable[[list[Tensor]], list[Tensor]]
#: What it returns, in order.
_COLUMNS = (Column.SUM, Column.ABS_SUM, Column.SQUARE_SUM, Column.NEAR_ZERO, Column.MIN, Column.MAX)


class Fused(Eager):
    """:class:`Eager`, with a compiled kernel for tensors of more than 131,072 elements in float32, bfloat16 or float16.

    Args:
        eps: the kernel is compiled for it; measuring with another one compiles again.

    Attributes:
        graphs: how many graphs ``torch.compile`` has made for the kernel.

    Raises:
        Exception: whatever torch raises where there is no compiler.
    """

    def __init__(self, eps: float = DEFAULT_EPS) -> None:
        super().__init__()
        self._kernels: dict[tuple[float, torch.dtype], Kernel] = {}
        counters = torch._dynamo.utils.counters["stats"]
        before = counters["unique_graphs"]
        self._kernel(threshold(eps, torch.float32), torch.float32)
        self.graphs = counters["unique_graphs"] - before

    def _kernel(self, limit: float, dtype: torch.dtype) -> Kernel:
        kernel = self._kernels.get((limit, dtype))
        if kernel is None:
            kernel = self._kernels[limit, dtype] = _built(limit, dtype)
        return kernel

    def _blocks(self, values: Tensor, minus: Tensor | None, request: Request, dtype: torch.dtype) -> Iterator[Tensor]:
        if minus is not None or request.inverse_scale is not None or dtype != torch.float32 or values.dtype not in NARROW:
            yield from super()._blocks(values, minus, request, dtype)
            return
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
        (found,) = self._kernel(threshold(request.eps, torch.float32), block.dtype)([block.view(-1, _ROW)])
        return dict(zip(_COLUMNS, found.unbind(0), strict=True))


class _Look(nn.Module):
    """What is compiled: rows ``[n, _ROW]`` to the six columns of all of them together."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self._limit = limit

    def forward(self, table: Tensor) -> Tensor:
        """Sums in float32 along the rows, then in float64."""
        table = table.float()
        magnitude = table.abs()
        return torch.stack(
            [
                table.sum(1).double().sum(),
                magnitude.sum(1).double().sum(),
                table.square().sum(1).double().sum(),
                (magnitude <= self._limit).float().sum(1).double().sum(),
                table.amin(1).amin().double(),
                table.amax(1).amax().double(),
            ]
        )


def _built(limit: float, dtype: torch.dtype) -> Kernel:
    """Compiled ahead of time: a function that ``torch.compile`` makes spends more on its guards than the kernel takes."""
    example = torch.zeros(64, _ROW, dtype=dtype, device="cpu")
    rows = torch.export.Dim("rows", min=2)
    with torch.no_grad(), unseen(), warnings.catch_warnings(), tempfile.TemporaryDirectory() as place:
        warnings.simplefilter("ignore")  # torch's own, of what its parts do
        program = torch.export.export(_Look(limit), (example,), dynamic_shapes=({0: rows},))
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=os.path.join(place, "look.pt2"), inductor_configs={"cpp.dynamic_threads": True}
        )
        # its __call__ goes through pytrees, a quarter of the time that a tensor of average size takes
        run: Kernel = torch._inductor.aoti_load_package(path).loader.run
    return run
