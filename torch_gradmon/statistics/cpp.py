"""Measure CPU tensors with one call of a C++ kernel for all of them: one read of memory, all columns; or for all inner products.

The kernel comes built with the package, or is compiled on request, which takes a C++ compiler and about a second. It shares only the
tensors' memory with torch, so it needs neither torch's compiler nor its headers, and one build serves all releases.
"""

from __future__ import annotations

import ctypes
import tempfile
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.moments import ALL_COLUMNS, WIDTH, Column
from .eager import EagerStatistics, measure_precisely, needs_precise_pass
from .request import Batch, PlainTensors, Request, are_alike, as_plain, dtype_of, flat_pair, is_plain, threshold

#: The kernel's codes of dtypes.
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: Some compilers do not know the processor.
_OPTIONS = (("-march=native",), ())
_Row = ctypes.c_double * WIDTH
_Entry = ctypes.c_int64 * 4


class Kernel(NamedTuple):
    # of count, entries, scale or None, limit, threads, and the rows to write; returns how many of them are not finite
    rows: Callable[[int, object, object, float, int, object], int]
    products: Callable[[int, object, int, object], None]  # of count, entries, threads, and the products to write


class CppStatistics(EagerStatistics):
    """:class:`EagerStatistics`, with a compiled kernel for float32, bfloat16 and float16."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel
        self._entry, self._one_row = _Entry(), _Row()

    def row_of(
        self, tensor: Tensor, columns: frozenset[Column], eps: float, inverse_scale: Tensor | None = None
    ) -> list[float] | None:
        """The row of one CPU tensor of any size as numbers; see :meth:`EagerStatistics.row_of`. Always has all columns."""
        kind = _KINDS.get(tensor.dtype)
        if kind is None or not is_plain(tensor) or not tensor.is_contiguous() or tensor.is_neg():
            return None
        self._entry[:] = [tensor.data_ptr(), 0, tensor.numel(), kind]
        if self._entry[2] and not self._entry[0]:
            return None
        scale, limit = None if inverse_scale is None else _scale(inverse_scale), threshold(eps, torch.float32)
        nonfinite = self._kernel.rows(1, self._entry, scale, limit, torch.get_num_threads(), self._one_row)
        return None if nonfinite else list(self._one_row)

    def rows(self, tensors: Sequence[Tensor], request: Request, minus: Sequence[Tensor] | None = None) -> Tensor:
        # the kernel shares memory alone with torch, so neither autograd nor autocast sees it
        if tensors and torch._C._functorch.peek_interpreter_stack() is None and _are_readable(tensors, minus):
            return self._by_kernel(tensors, minus, request)
        return super().rows(tensors, request, minus)

    def _measure(self, batch: Batch, request: Request, device: torch.device) -> Tensor:
        # the kernel fills all columns, so all decide on the precise pass: a row does not depend on the request
        request = Request(ALL_COLUMNS, request.eps, request.inverse_scale)
        # some are copies that must outlive the call
        pairs = {place: batch.flat(place) for place, tensor in enumerate(batch.values) if tensor.dtype in _KINDS}
        taken = {place: (a, b) for place, (a, b) in pairs.items() if _are_readable([a], None if b is None else [b])}
        rows = torch.empty(len(batch.values), WIDTH, dtype=torch.float64, device="cpu")
        if rest := sorted(set(range(len(batch.values))) - taken.keys()):
            rows[rest] = super()._measure(batch.take(rest), request, device)
        if taken:
            others = [other for _, other in taken.values() if other is not None] or None
            found = self._by_kernel([values for values, _ in taken.values()], others, request)
            rows[[*taken]] = batch.take([*taken]).add_implicit_zeros(found)
        return rows

    def _by_kernel(self, values: Sequence[Tensor], others: Sequence[Tensor] | None, request: Request) -> Tensor:
        entries, rows = _entries(values, others), torch.empty(len(values), WIDTH, dtype=torch.float64, device="cpu")
        limit = threshold(request.eps, torch.float32)
        scale = None if request.inverse_scale is None else _scale(request.inverse_scale)
        if self._kernel.rows(len(values), entries.buffer_info()[0], scale, limit, torch.get_num_threads(), rows.data_ptr()):
            closer, _ = needs_precise_pass(rows.tolist(), ALL_COLUMNS)
            rows[closer] = measure_precisely(Batch.read(values, others).take(closer), request)
        return rows

    def inner_products(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
        if not first[0].is_cpu:
            return super().inner_products(first, second)
        with torch.no_grad():
            if _are_readable(first, second):
                return self._products(first, second)
            pairs = list(map(flat_pair, first, second))  # in any memory format
            places = [place for place, (a, b) in enumerate(pairs) if _are_readable([a], [b])]
            products = torch.empty(len(pairs), dtype=torch.float64, device="cpu")
            if rest := sorted({*range(len(pairs))}.difference(places)):
                products[rest] = super().inner_products([first[place] for place in rest], [second[place] for place in rest])
            if places:
                products[places] = self._products([pairs[place][0] for place in places], [pairs[place][1] for place in places])
            return products

    def _products(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
        entries, products = _entries(first, second), torch.empty(len(first), dtype=torch.float64, device="cpu")
        self._kernel.products(len(first), entries.buffer_info()[0], torch.get_num_threads(), products.data_ptr())
        return products


def _entries(values: Sequence[Tensor], others: Sequence[Tensor] | None) -> array[int]:
    entries = array("q", bytes(8 * 4 * len(values)))
    entries[0::4] = array("q", map(Tensor.data_ptr, values))
    entries[1::4] = array("q", map(Tensor.data_ptr, others) if others else bytes(8 * len(values)))
    entries[2::4] = array("q", map(Tensor.numel, values))
    entries[3::4] = array("q", map(_KINDS.__getitem__, map(dtype_of, values)))
    return entries


def _are_readable(tensors: Sequence[Tensor], others: Sequence[Tensor] | None) -> bool:
    """Whether the kernel can read these tensors, and what to subtract from each: plain ones of its dtypes, contiguous in memory and
    unchanged there: a negative view has the opposite sign. Without one call for each.
    """
    plain = tensors if isinstance(tensors, PlainTensors) else as_plain(tensors)
    return (
        plain is not None
        and _KINDS.keys() >= plain.dtypes
        and all(map(Tensor.is_contiguous, plain))
        and not any(map(Tensor.is_neg, plain))
        and (all(map(Tensor.data_ptr, plain)) or all(t.data_ptr() or not t.numel() for t in plain))
        and (others is None or (are_alike(plain, others) and _are_readable(others, None)))
    )


def _scale(inverse_scale: Tensor) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * 1)(inverse_scale.item())


@lru_cache(maxsize=1)
def found() -> tuple[Kernel | None, str]:
    """The kernel that came with the package, with the kind of processor that it was built for; or None, with the reason."""
    from . import kernel_build  # not for a training without a tensor on a CPU

    capability = torch.backends.cpu.get_cpu_capability()
    path = kernel_build.built(capability)
    if path is None:
        return None, f"this installation has no kernel for a processor with {capability}"
    try:
        return loaded(str(path)), capability
    except (OSError, AttributeError) as error:  # such as on a system with an older C library
        return None, f"the kernel of this installation cannot be loaded: {error}"


@lru_cache(maxsize=1)
def compiled() -> Kernel:
    """The kernel, compiled for this processor once in a process; RuntimeError with the compiler's output."""
    from . import kernel_build

    with tempfile.TemporaryDirectory() as place:
        library = Path(place) / "torch_gradmon.so"
        kernel_build.compile_to(library, _OPTIONS)
        return loaded(str(library))


def loaded(library: str) -> Kernel:
    of_library, pointer = ctypes.CDLL(library), ctypes.c_void_p
    of_rows = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, pointer, pointer, ctypes.c_float, ctypes.c_int, pointer)
    of_products = ctypes.CFUNCTYPE(None, ctypes.c_int64, pointer, ctypes.c_int, pointer)
    return Kernel(of_rows(("torch_gradmon_rows", of_library)), of_products(("torch_gradmon_products", of_library)))
