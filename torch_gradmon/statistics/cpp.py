"""Measure CPU tensors with one call of a C++ kernel for all of them: one read of memory, all columns; or for all inner products.

The kernel comes built with the package, or is compiled on request, which takes a C++ compiler and about a second. It shares only the
tensors' memory with torch, so it needs neither torch's compiler nor its headers, and one build serves all releases.
"""

from __future__ import annotations

import ctypes
import tempfile
from array import array
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from itertools import chain, compress, cycle
from operator import not_
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.moments import ALL_COLUMNS, WIDTH
from .eager import EagerStatistics, measure_precisely, needs_precise_pass
from .request import Batch, Request, are_alike, as_plain, dtype_of, flat_pair, is_plain, threshold

#: The kernel's codes of dtypes.
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_Row = ctypes.c_double * WIDTH
_UNKNOWN: tuple[array[int], int, Any] = array("q"), 0, None
#: The largest number of uses whose tensors are known.
_MOST = 10_000
#: Some compilers do not know the processor.
_OPTIONS = (("-march=native",), ())


class Kernel(NamedTuple):
    # of count, entries, scale or None, limit, threads, the rows to write, and their total or None; returns how many rows are not finite
    rows: Callable[[int, object, object, float, int, object, object], int]
    products: Callable[[int, object, int, object], None]  # of count, entries, threads, and the products to write


class CppStatistics(EagerStatistics):
    """:class:`EagerStatistics`, with a compiled kernel for float32, bfloat16 and float16."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel
        # by use: what the kernel got in its last call; how many tensors torch's guards know, negative if they cannot tell; and these guards
        self._known: dict[Hashable, tuple[array[int], int, Any]] = {}

    def row_of(self, tensor: Tensor, eps: float, inverse_scale: Tensor | None = None, use: Hashable = None) -> list[float] | None:
        """The row of one CPU tensor, with all columns, as numbers equal to those of :meth:`rows`; None if that must be used. ``use``: as
        of :meth:`at_once`.
        """
        last, known, guards = self._known.get(use) or _UNKNOWN
        if guards is not None and guards.check(tensor):
            entry = array("q", (tensor.data_ptr(), 0, last[2], last[3]))
        else:
            kind = _KINDS.get(tensor.dtype)
            if kind is None or not is_plain(tensor) or not tensor.is_contiguous() or tensor.is_neg():
                return None
            entry = array("q", (tensor.data_ptr(), 0, tensor.numel(), kind))
            self._learn(use, last, known, entry, [tensor])
        if entry[2] and not entry[0]:
            return None
        scale, limit, row = None if inverse_scale is None else _scale(inverse_scale), threshold(eps, torch.float32), _Row()
        nonfinite = self._kernel.rows(1, entry.buffer_info()[0], scale, limit, torch.get_num_threads(), row, None)
        return None if nonfinite else row[:]

    def _learn(self, use: Hashable, last: array[int], known: int, entries: array[int], tensors: Sequence[Tensor]) -> None:
        """Guards cost as much as they save in one call, so they are made for what has come twice."""
        if len(self._known) > _MOST:
            self._known.clear()
        if use and (known > 0 or last[2::4] != entries[2::4] or last[3::4] != entries[3::4]):
            self._known[use] = entries, 0, None
        elif use and known == 0:
            self._known[use] = entries, *_guards(tensors)

    def rows(self, tensors: Sequence[Tensor], request: Request, minus: Sequence[Tensor] | None = None) -> Tensor:
        found = self.at_once(tensors, request.eps, request.inverse_scale, minus)
        return super().rows(tensors, request, minus) if found is None else found[0]

    def at_once(
        self,
        tensors: Sequence[Tensor],
        eps: float,
        inverse_scale: Tensor | None = None,
        minus: Sequence[Tensor] | None = None,
        use: str = "",
    ) -> tuple[Tensor, list[float] | None] | None:
        """The rows of tensors, with all columns, on any thread; and these merged into one, with the bits of ``rows.sum(0)``, where all
        are finite. None if :meth:`rows` must be used: the kernel cannot read all. ``use``: names calls that usually get tensors alike.
        """
        number, every = len(tensors), tensors if minus is None else [*tensors, *minus]
        last, known, guards = self._known.get(use) or _UNKNOWN
        is_known = guards is not None and known == len(every) and guards.check(*every)
        addresses = [*map(Tensor.data_ptr, every)] if is_known else []
        # those without elements have none, nor does freed memory
        if is_known and (all(addresses) or not any(compress(cycle(last[2::4]), map(not_, addresses)))):
            entries = last[:]  # other threads may read them
            entries[0::4] = array("q", addresses[:number])
            if minus is not None:
                entries[1::4] = array("q", addresses[number:])
        else:
            # the kernel shares memory alone with torch, so neither autograd nor autocast sees it
            if torch._C._functorch.peek_interpreter_stack() is not None or (read := _entries(tensors, minus)) is None:
                return None
            entries = read
            self._learn(use, last, known, entries, every)
        rows, total = torch.empty(number, WIDTH, dtype=torch.float64, device="cpu"), _Row()
        scale, limit = None if inverse_scale is None else _scale(inverse_scale), threshold(eps, torch.float32)
        if self._kernel.rows(number, entries.buffer_info()[0], scale, limit, torch.get_num_threads(), rows.data_ptr(), total):
            closer, _ = needs_precise_pass(rows.tolist(), ALL_COLUMNS)
            rows[closer] = measure_precisely(Batch.read(tensors, minus).take(closer), Request(ALL_COLUMNS, eps, inverse_scale))
            return rows, None
        return rows, total[:]

    def _measure(self, batch: Batch, request: Request, device: torch.device) -> Tensor:
        # the kernel fills all columns, so all decide on the precise pass: a row does not depend on the request
        request = Request(ALL_COLUMNS, request.eps, request.inverse_scale)
        # some are copies that must outlive the call
        pairs = {place: batch.flat(place) for place, tensor in enumerate(batch.values) if tensor.dtype in _KINDS}
        taken = {place: (a, b) for place, (a, b) in pairs.items() if _entries([a], None if b is None else [b])}
        rows = torch.empty(len(batch.values), WIDTH, dtype=torch.float64, device="cpu")
        if rest := sorted(set(range(len(batch.values))) - taken.keys()):
            rows[rest] = super()._measure(batch.take(rest), request, device)
        if taken:
            others = [other for _, other in taken.values() if other is not None] or None
            found = self.rows([values for values, _ in taken.values()], request, others)
            rows[[*taken]] = batch.take([*taken]).add_implicit_zeros(found)
        return rows

    def inner_products(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
        if not first[0].is_cpu:
            return super().inner_products(first, second)
        with torch.no_grad():
            pairs = list(map(flat_pair, first, second))  # in any memory format
            found = {place: entry for place, (a, b) in enumerate(pairs) if (entry := _entries([a], [b]))}
            products = torch.empty(len(pairs), dtype=torch.float64, device="cpu")
            if rest := sorted({*range(len(pairs))} - found.keys()):
                products[rest] = super().inner_products([first[place] for place in rest], [second[place] for place in rest])
            if found:
                products[[*found]] = self._products(array("q", chain.from_iterable(found.values())))
            return products

    def products_at_once(self, columns: Sequence[Sequence[Tensor]], pairs: Sequence[tuple[int, int]], use: str) -> Tensor | None:
        """As :meth:`inner_products`, of pairs of columns by number, if all are plain. ``use``: as of :meth:`at_once`."""
        kind, every = (use, (*map(len, columns),), (*pairs,)), [*chain.from_iterable(columns)]
        last, known, guards = self._known.get(kind) or _UNKNOWN
        addresses = [array("q", map(Tensor.data_ptr, column)) for column in columns]
        if guards is not None and guards.check(*every) and all(map(all, addresses)):
            entries = last[:]  # other threads may read them
            for side in (0, 1):
                entries[side::4] = array("q", chain.from_iterable(addresses[pair[side]] for pair in pairs))
            return self._products(entries)
        read = _entries(*([*chain.from_iterable(columns[pair[side]] for pair in pairs)] for side in (0, 1)))
        if read is not None:
            self._learn(kind, last, known, read, every)
        return None if read is None else self._products(read)

    def _products(self, entries: array[int]) -> Tensor:
        products = torch.empty(len(entries) // 4, dtype=torch.float64, device="cpu")
        self._kernel.products(len(products), entries.buffer_info()[0], torch.get_num_threads(), products.data_ptr())
        return products


def _entries(tensors: Sequence[Tensor], others: Sequence[Tensor] | None) -> array[int] | None:
    """What the kernel gets of each tensor: addresses of it and of the other one, size and kind. None unless all are plain, of its dtypes,
    contiguous and unchanged in memory: a negative view has the opposite sign.
    """
    every, number = tensors if others is None else [*tensors, *others], len(tensors)
    if as_plain(every) is None or not _KINDS.keys() >= {*(dtypes := [*map(dtype_of, every)])}:
        return None
    if not all(map(Tensor.is_contiguous, every)) or any(map(Tensor.is_neg, every)) or (others and not are_alike(tensors, others)):
        return None
    addresses, sizes = [*map(Tensor.data_ptr, every)], [*map(Tensor.numel, every)]
    if any(compress(sizes, map(not_, addresses))):
        return None
    entries = array("q", bytes(4 * 8 * number))
    entries[0::4], entries[2::4] = array("q", addresses[:number]), array("q", sizes[:number])
    entries[3::4] = array("q", [*map(_KINDS.__getitem__, dtypes[:number])])
    if others is not None:
        entries[1::4] = array("q", addresses[number:])
    return entries


def _guards(tensors: Sequence[Tensor]) -> tuple[int, Any]:
    """How many tensors there are, and guards of torch's compiler that tell in one call whether others are such tensors too: of the same
    types, dtypes, sizes, strides, and views of memory. ``.data`` may have been replaced, so no tensor is taken for known.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes, strides = ([[*of(tensor)] for tensor in tensors] for of in (Tensor.size, Tensor.stride))
        guards: Any = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]
        return (len(tensors), guards) if guards.check(*tensors) else (-1, None)  # not if one of them is there twice
    except Exception:  # a private API
        return -1, None


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
    of_rows = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, pointer, pointer, ctypes.c_float, ctypes.c_int, pointer, pointer)
    of_products = ctypes.CFUNCTYPE(None, ctypes.c_int64, pointer, ctypes.c_int, pointer)
    return Kernel(of_rows(("torch_gradmon_rows", of_library)), of_products(("torch_gradmon_products", of_library)))
