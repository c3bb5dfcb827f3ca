"""Measure CPU tensors with one call of a C++ kernel for all of them: one read of memory, all columns.

The kernel comes built with the package, or is compiled on request, which takes a C++ compiler and about a second. It shares only the
tensors' memory with torch, so it needs neither torch's compiler nor its headers, and one build serves all releases.
"""

from __future__ import annotations

import ctypes
import tempfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ..core.moments import ALL_COLUMNS, WIDTH, Column
from . import kernel_build
from .eager import EagerStatistics
from .precise import row_needs_precise_pass
from .request import Batch, Request
from .tensor_access import is_plain, threshold

#: The kernel's codes of dtypes.
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: Some compilers do not know the processor.
_OPTIONS = (("-march=native",), ())
_Row = ctypes.c_double * WIDTH
_Entry = ctypes.c_int64 * 5
#: count, entries, scale or None, limit, threads, rows
Kernel = Callable[[int, object, object, float, int, object], None]


class CppStatistics(EagerStatistics):
    """:class:`EagerStatistics`, with a compiled kernel for float32, bfloat16 and float16.

    Args:
        kernel: of :func:`found` or :func:`compiled`.
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel
        self._entry, self._one_row = _Entry(), _Row()

    def row_of(
        self, tensor: Tensor, columns: frozenset[Column], eps: float, inverse_scale: Tensor | None = None
    ) -> list[float] | None:
        """The row of one CPU tensor of any size as numbers; see :meth:`EagerStatistics.row_of`. Always has all columns."""
        if not (is_plain(tensor) and _is_readable(tensor)):
            return None
        scale, limit, threads = _scale(inverse_scale), threshold(eps, torch.float32), torch.get_num_threads()
        for wide in (False, True):
            self._entry[:] = [tensor.data_ptr(), 0, tensor.numel(), _KINDS[tensor.dtype], wide]
            self._kernel(1, self._entry, scale, limit, threads, self._one_row)
            row = list(self._one_row)
            nonfinite, imprecise = row_needs_precise_pass(row, ALL_COLUMNS)
            if nonfinite:
                return None
            if not imprecise:
                break
        return row

    def _measure(self, batch: Batch, request: Request, device: torch.device) -> Tensor:
        # the kernel fills all columns, so all decide on the precise pass: a row does not depend on the request
        return super()._measure(batch, replace(request, columns=ALL_COLUMNS), device)

    def _first_pass(self, batch: Batch, request: Request) -> Tensor:
        entries, kept, places = array("q"), [], []
        for index, (tensor, other) in self._taken(batch):
            minus, wide = 0 if other is None else other.data_ptr(), batch.wide[index]
            entries.extend((tensor.data_ptr(), minus, tensor.numel(), _KINDS[tensor.dtype], wide))
            kept.append((tensor, other))  # some are copies that must outlive the call
            places.append(index)
        if not places:
            return super()._first_pass(batch, request)
        rows = torch.empty(len(places), WIDTH, dtype=torch.float64, device="cpu")
        limit, scale = threshold(request.eps, torch.float32), _scale(request.inverse_scale)
        self._kernel(len(places), entries.buffer_info()[0], scale, limit, torch.get_num_threads(), rows.data_ptr())
        if len(places) == len(batch.values):
            return batch.add_implicit_zeros(rows)
        both = torch.empty(len(batch.values), WIDTH, dtype=torch.float64, device="cpu")
        rest = sorted(set(range(len(batch.values))) - set(places))
        both[places] = batch.take(places).add_implicit_zeros(rows)
        both[rest] = super()._first_pass(batch.take(rest), request)
        return both

    @staticmethod
    def _taken(batch: Batch) -> Iterator[tuple[int, tuple[Tensor, Tensor | None]]]:
        """The tensors that the kernel can read, by position, each with what to subtract."""
        for index, tensor in enumerate(batch.values):
            pair = tensor, None if batch.minus is None else batch.minus[index]
            if tensor.dtype in _KINDS and not _are_readable(*pair):
                pair = batch.flat(index)
            if _are_readable(*pair):
                yield index, pair


def _are_readable(tensor: Tensor, other: Tensor | None) -> bool:
    if other is not None and not (_is_readable(other) and (other.dtype, other.shape) == (tensor.dtype, tensor.shape)):
        return False
    return _is_readable(tensor)


def _is_readable(tensor: Tensor) -> bool:
    """Whether a plain tensor's numbers are contiguous in memory and unchanged: a negative view has the opposite sign."""
    in_order = tensor.dtype in _KINDS and tensor.is_contiguous() and not tensor.is_neg()
    return in_order and (tensor.data_ptr() != 0 or tensor.numel() == 0)


def _scale(inverse_scale: Tensor | None) -> ctypes.Array[ctypes.c_float] | None:
    return None if inverse_scale is None else (ctypes.c_float * 1)(inverse_scale.item())


@lru_cache(maxsize=1)
def found() -> tuple[Kernel | None, str]:
    """The kernel that came with the package, with the kind of processor that it was built for; or None, with the reason."""
    capability = torch.backends.cpu.get_cpu_capability()
    path = kernel_build.built(capability)
    if path is None:
        return None, f"this installation has no kernel for a processor with {capability}"
    try:
        return _loaded(str(path)), capability
    except (OSError, AttributeError) as error:  # such as on a system with an older C library
        return None, f"the kernel of this installation cannot be loaded: {error}"


@lru_cache(maxsize=1)
def compiled() -> Kernel:
    """The kernel, compiled for this processor once in a process.

    Raises:
        RuntimeError: there is no compiler, or it fails; the message has its output.
    """
    with tempfile.TemporaryDirectory() as place:
        library = Path(place) / "torch_gradmon.so"
        kernel_build.compile_to(library, _OPTIONS)
        return _loaded(str(library))


def _loaded(library: str) -> Kernel:
    kernel = ctypes.CDLL(library).torch_gradmon_rows
    pointer = ctypes.c_void_p
    kernel.argtypes = [ctypes.c_int64, pointer, pointer, ctypes.c_float, ctypes.c_int, pointer]
    kernel.restype = None
    return kernel
