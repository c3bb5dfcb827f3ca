"""Measure CPU tensors by one call of a kernel in C++, however many tensors there are: one read of memory, all columns.

Opt-in, since it needs a C++ compiler and about a second when the monitor is made. Nothing but the memory of the tensors is
shared with the kernel, so that no compiler of torch, and no header, has a part in it.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ..core.moments import ALL_COLUMNS, WIDTH, Column
from .eager import EagerStatistics
from .precise import row_needs_precise_pass
from .request import Batch, Request
from .tensor_access import is_plain, threshold

_SOURCE = Path(__file__).with_name("cpp_kernel.cpp")
#: How the kernel tells the dtypes apart.
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: No -ffast-math: linked into a library it would have the whole process flush subnormal numbers to zero.
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC")
#: Tried in turn: Apple's compiler has no OpenMP, and not every one knows the processor that it runs on.
_EXTRA = (("-march=native", "-fopenmp"), ("-march=native",), ())
_TIMEOUT_S = 60
_Row = ctypes.c_double * WIDTH
_Entry = ctypes.c_int64 * 5
#: count, entries, scale or None, limit, threads, rows
Kernel = Callable[[int, object, object, float, int, object], None]


class CppStatistics(EagerStatistics):
    """:class:`EagerStatistics`, with a compiled kernel for float32, bfloat16 and float16.

    Raises:
        RuntimeError: there is no compiler, or it fails; the message has its words.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kernel = compiled()
        self._entry, self._one_row = _Entry(), _Row()

    def row_of(
        self, tensor: Tensor, columns: frozenset[Column], eps: float, inverse_scale: Tensor | None = None
    ) -> list[float] | None:
        """The row of one CPU tensor of any size as numbers; see :meth:`EagerStatistics.row_of`. All columns, whichever are asked for."""
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
        # all columns come along, so all of them decide who needs a second look: a row is the same whatever is asked for
        return super()._measure(batch, replace(request, columns=ALL_COLUMNS), device)

    def _first_look(self, batch: Batch, request: Request) -> Tensor:
        entries, kept, places = array("q"), [], []
        for index, (tensor, other) in self._taken(batch):
            minus, wide = 0 if other is None else other.data_ptr(), batch.wide[index]
            entries.extend((tensor.data_ptr(), minus, tensor.numel(), _KINDS[tensor.dtype], wide))
            kept.append((tensor, other))  # copies, some of them, that have to outlive the call
            places.append(index)
        if not places:
            return super()._first_look(batch, request)
        rows = torch.empty(len(places), WIDTH, dtype=torch.float64, device="cpu")
        limit, scale = threshold(request.eps, torch.float32), _scale(request.inverse_scale)
        self._kernel(len(places), entries.buffer_info()[0], scale, limit, torch.get_num_threads(), rows.data_ptr())
        if len(places) == len(batch.values):
            return batch.add_implicit_zeros(rows)
        both = torch.empty(len(batch.values), WIDTH, dtype=torch.float64, device="cpu")
        rest = sorted(set(range(len(batch.values))) - set(places))
        both[places] = batch.take(places).add_implicit_zeros(rows)
        both[rest] = super()._first_look(batch.take(rest), request)
        return both

    @staticmethod
    def _taken(batch: Batch) -> Iterator[tuple[int, tuple[Tensor, Tensor | None]]]:
        """The tensors that the kernel can take, by position, each with what is to be subtracted."""
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
    """Whether the numbers of a plain tensor are in memory in a row, as they are: a negative view has them with the other sign."""
    in_order = tensor.dtype in _KINDS and tensor.is_contiguous() and not tensor.is_neg()
    return in_order and (tensor.data_ptr() != 0 or tensor.numel() == 0)


def _scale(inverse_scale: Tensor | None) -> ctypes.Array[ctypes.c_float] | None:
    return None if inverse_scale is None else (ctypes.c_float * 1)(inverse_scale.item())


@lru_cache(maxsize=1)
def compiled() -> Kernel:
    """The kernel, compiled once in a process."""
    compiler, said = _compiler(), ""
    with tempfile.TemporaryDirectory() as place:
        for number, extra in enumerate(_EXTRA):
            library = os.path.join(place, f"torch_gradmon_{number}.so")
            command = [*compiler, *_FLAGS, *extra, "-o", library, str(_SOURCE)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
            try:
                if done.returncode == 0:
                    return _loaded(library)
                said = said or done.stderr.strip()
            except OSError as error:
                said = said or str(error)
    raise RuntimeError(f"{' '.join(compiler)} failed:\n{said[:2000]}")


def _compiler() -> list[str]:
    if wanted := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(wanted[0]) is None:
            raise RuntimeError(f"the compiler that $CXX names was not found: {' '.join(wanted)}")
        return wanted
    found = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    if found is None:
        raise RuntimeError("no C++ compiler was found: neither g++, clang++ nor c++; $CXX may name one")
    return [found]


def _loaded(library: str) -> Kernel:
    kernel = ctypes.CDLL(library).torch_gradmon_rows
    pointer = ctypes.c_void_p
    kernel.argtypes = [ctypes.c_int64, pointer, pointer, ctypes.c_float, ctypes.c_int, pointer]
    kernel.restype = None
    return kernel
