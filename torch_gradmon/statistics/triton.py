"""Measure lists of CUDA tensors with two kernel launches, however many tensors there are: one read of memory, all columns.

The first kernel takes one chunk of one tensor per program and writes that chunk's row; the second merges the rows of each tensor's chunks
in a fixed order. There are no atomics: the same input gives the same row to the last bit. Sums run in float64 from the first element on,
as the accuracy of the std and values down to 1e-30 and up to 1e30 require: four float64 operations per element. GPUs such as A100 and
H100 have half of their float32 rate in float64, so memory should be the limit; consumer GPUs have a 32nd or a 64th, so arithmetic should.

Pointers and sizes reach the kernels in device tables, which are cached until a tensor moves or changes its size. New tables come from
pinned memory without waiting for the device. torch's host allocator reuses a pinned buffer only after the copy from it is done, and
never after the copy was captured into a CUDA graph.

Importing this file imports Triton. With ``TRITON_INTERPRET=1`` in the environment, it measures CPU tensors instead.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import accumulate, chain, repeat
from typing import cast

import torch
from torch import Tensor

from ..core.accelerator import copied_to_device, stream_number
from ..core.moments import WIDTH
from .eager import EagerStatistics
from .request import Backend, Request
from .tensor_access import PLAIN, are_alike, are_unchanged_on, dtype_of, dtypes_of, is_functorch_wrapped, threshold
from .triton_kernels import INTERPRETED, merged_rows, merged_sums, products_of_chunks, rows_of_chunks

#: Elements per program of the first kernel: 64 to 256 kB; ten million elements still give 306 programs.
CHUNK = 1 << 15
#: Groups of 16 bytes that a program of the first kernel loads at once: four for each of its 128 threads.
_GROUPS = 512
#: Chunks that the second kernel merges at once.
_LANES = 128
#: The kernels' codes of dtypes.
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
#: Where the kernels run; torch calls GPUs of AMD by the same name.
_KIND_OF_DEVICE = "cpu" if INTERPRETED else "cuda"
#: The largest number of numbers in all cached tables, and the smallest number of tables; a list of tensors has two, and one more for each
#: place in memory where it was.
_CACHED, _FEWEST = 20_000, 4


class TritonStatistics(Backend):
    """Measures lists of tensors with two kernels. Caches tables on the device, never a tensor. Not thread-safe."""

    def __init__(self) -> None:
        self._cached: OrderedDict[tuple[_Maker, tuple[int, ...], torch.device, int | None], tuple[Tensor, ...]] = OrderedDict()
        self._size = 0
        self._others = EagerStatistics()  # for tensors that the kernels do not accept

    def __reduce__(self) -> tuple[type[TritonStatistics], tuple[()]]:
        return TritonStatistics, ()  # a copy starts empty: the tables hold addresses of this process

    def rows(self, tensors: Sequence[Tensor], request: Request, minus: Sequence[Tensor] | None = None) -> Tensor:
        """See :meth:`Backend.rows`. All columns are filled, and each call returns new memory.

        Two kernel launches serve all tensors that :func:`supports` accepts; :class:`EagerStatistics` measures the others. Can be
        captured into a CUDA graph after the same call has run outside of one; each replay writes the rows anew.

        Raises:
            NotMeasurable: see :meth:`Backend.rows`.
            Exception: Triton cannot compile or launch the kernels.
        """
        scale = request.inverse_scale
        partners: Sequence[Tensor | None] = [None] * len(tensors) if minus is None else minus
        taken: Sequence[int] = []
        if tensors and (scale is None or (_readable(scale, tensors[0].device) and _has_memory(scale))):
            taken = _supported(tensors, partners)
        if not taken:
            return self._others.rows(tensors, request, minus)
        rows = self._rows([tensors[i] for i in taken], [partners[i] for i in taken], request.eps, scale)
        if len(taken) == len(tensors):
            return rows
        rest = sorted(set(range(len(tensors))) - set(taken))
        less = None if minus is None else [minus[i] for i in rest]
        return self._in_order(taken, rows, rest, self._others.rows([tensors[i] for i in rest], request, less))

    def _in_order(self, taken: Sequence[int], rows: Tensor, rest: list[int], others: Tensor) -> Tensor:
        """``rows`` at the places ``taken``, and ``others`` at the ``rest``."""
        with _on(rows.device):
            places = tuple(sorted(range(len(taken) + len(rest)), key=[*taken, *rest].__getitem__))
            (order,) = self._tables_of(_numbers, places, rows.device)
            return torch.cat([rows, others]).index_select(0, order)

    def _rows(
        self, tensors: Sequence[Tensor], partners: Sequence[Tensor | None], eps: float, inverse_scale: Tensor | None
    ) -> Tensor:
        """Rows of tensors that the kernels accept; either all have a partner or none."""
        device = tensors[0].device
        limits = [_threshold_bits(eps, dtype) for dtype in _KINDS]
        with _on(device):
            entries, owners, addresses = self._tables(tensors, partners, limits)
            parts = torch.empty(len(owners), WIDTH, dtype=torch.float64, device=device)
            rows = torch.empty(len(tensors), WIDTH, dtype=torch.float64, device=device)
            rows_of_chunks[(len(parts),)](
                parts,
                entries,
                owners,
                addresses,
                addresses if inverse_scale is None else inverse_scale,
                SCALED=inverse_scale is not None,
                MINUS=partners[0] is not None,
                SIZE=CHUNK,
                GROUPS=_GROUPS,
                num_warps=4,
                enable_fp_fusion=True,
            )
            merged_rows[(len(rows),)](rows, entries, parts, LANES=_LANES, num_warps=4, enable_fp_fusion=True)
        return rows

    def inner_products(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
        """See :meth:`Backend.inner_products`. Two kernel launches serve all pairs that :func:`supports` accepts."""
        taken = _supported(first, second)
        if not taken:
            return self._others.inner_products(first, second)
        sums = self._sums([first[i] for i in taken], [second[i] for i in taken])
        if len(taken) == len(first):
            return sums
        rest = sorted(set(range(len(first))) - set(taken))
        others = self._others.inner_products([first[i] for i in rest], [second[i] for i in rest])
        return self._in_order(taken, sums, rest, others)

    def _sums(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
        """The inner products of pairs that the kernels accept."""
        device = first[0].device
        with _on(device):
            entries, owners, addresses = self._tables(first, second, [0] * len(_KINDS))
            parts = torch.empty(len(owners), dtype=torch.float64, device=device)
            sums = torch.empty(len(first), dtype=torch.float64, device=device)
            products_of_chunks[(len(parts),)](
                parts, entries, owners, addresses, SIZE=CHUNK, GROUPS=_GROUPS, num_warps=4, enable_fp_fusion=True
            )
            merged_sums[(len(sums),)](sums, entries, parts, LANES=_LANES, num_warps=4, enable_fp_fusion=True)
        return sums

    def _tables(
        self, tensors: Sequence[Tensor], partners: Sequence[Tensor | None], limits: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tables of :func:`_chunks`, with near-zero thresholds ``limits`` of the kinds, and the addresses of tensors and partners."""
        device = tensors[0].device
        of_dtypes = map(_KINDS.__getitem__, map(dtype_of, tensors))
        sizes = (*map(Tensor.numel, tensors), *of_dtypes, *limits)
        others = repeat(0) if partners[0] is None else map(Tensor.data_ptr, cast(Sequence[Tensor], partners))
        where = tuple(chain.from_iterable(zip(map(Tensor.data_ptr, tensors), others, strict=False)))
        entries, owners = self._tables_of(_chunks, sizes, device)
        (addresses,) = self._tables_of(_numbers, where, device)
        return entries, owners, addresses

    def _tables_of(self, make: _Maker, numbers: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
        """``make(numbers, device)``, cached for calls with the same numbers on the same stream.

        A cached table is read on one stream only, so it can be dropped without waiting. A graph under capture gets its own tables, which
        its replays copy anew.
        """
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return make(numbers, device)
        key = (make, numbers, device, stream_number(device))
        tables = self._cached.pop(key, None)
        if tables is None:
            tables = make(numbers, device)
            self._size += len(numbers)
            while self._size > _CACHED and len(self._cached) >= _FEWEST:
                (_, dropped, *_), _ = self._cached.popitem(last=False)
                self._size -= len(dropped)
        self._cached[key] = tables  # least recently used first
        return tables


_Maker = Callable[[tuple[int, ...], torch.device], tuple[Tensor, ...]]


def _supported(tensors: Sequence[Tensor], partners: Sequence[Tensor | None]) -> Sequence[int]:
    """The places of the tensors that :func:`supports` accepts, on the device of the first; either all have a partner or none."""
    device = tensors[0].device
    pair = [tensors] if partners[0] is None else [tensors, cast(Sequence[Tensor], partners)]
    is_kind = device.type == _KIND_OF_DEVICE and _KINDS.keys() >= dtypes_of(tensors)
    if is_kind and all(are_unchanged_on(each, device) for each in pair) and (len(pair) == 1 or are_alike(*pair)):
        checks = [(has, each) for each in pair for has in (Tensor.is_contiguous, Tensor.data_ptr)]
        if all(all(map(has, each)) for has, each in checks):
            return range(len(tensors))
        usual = map(all, zip(*(map(has, each) for has, each in checks), strict=True))
        return [i for i, is_usual in enumerate(usual) if is_usual or _fits(tensors[i], partners[i])]
    return [i for i, (x, other) in enumerate(zip(tensors, partners, strict=True)) if supports(x, other, device)]


def supports(tensor: Tensor, minus: Tensor | None = None, device: torch.device | None = None) -> bool:
    """Whether the kernels accept ``tensor``, minus ``minus``, on ``device`` (by default its own).

    They accept dense floating tensors of 16, 32 or 64 bits in any order of dimensions, if ``minus`` has the same memory layout.
    """
    device = tensor.device if device is None else device
    if tensor.dtype not in _KINDS or not _readable(tensor, device):
        return False
    if minus is not None and (minus.dtype != tensor.dtype or minus.shape != tensor.shape or not _readable(minus, device)):
        return False
    return _fits(tensor, minus)


def _fits(tensor: Tensor, minus: Tensor | None) -> bool:
    """Whether the kernels accept the layout of ``tensor``, and that of ``minus``, which has its shape; all else about them is right."""
    if not all(_has_memory(x) for x in (tensor, minus) if x is not None):
        return False
    contiguous = tensor.is_contiguous()
    if minus is not None and not (contiguous and minus.is_contiguous()) and minus.stride() != tensor.stride():
        return False
    return contiguous or _has_no_gaps(tensor)


def _readable(tensor: Tensor, device: torch.device) -> bool:
    """Whether what is at the address of a tensor, if it has memory, are its elements, unchanged and on ``device``."""
    return (
        type(tensor) in PLAIN
        and device.type == _KIND_OF_DEVICE
        and tensor.device == device
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not is_functorch_wrapped(tensor)
        and not tensor.is_neg()
    )


def _has_memory(tensor: Tensor) -> bool:
    return tensor.data_ptr() != 0 or tensor.numel() == 0


def _has_no_gaps(tensor: Tensor) -> bool:
    """Whether the strides are those of a contiguous tensor with permuted dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


@lru_cache(maxsize=64)
def _threshold_bits(eps: float, dtype: torch.dtype) -> int:
    """The near-zero threshold of a dtype, as the bits of a float64."""
    limit = threshold(eps, torch.float64 if dtype == torch.float64 else torch.float32)
    return cast(int, struct.unpack("<q", struct.pack("<d", limit))[0])


def _chunks(numbers: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Tables of sizes: per tensor ``[elements, dtype, threshold, first chunk, chunks]``, per chunk its tensor.

    The numbers are the elements of each tensor, then the kinds of their dtypes, then the threshold of each kind.
    """
    count = (len(numbers) - len(_KINDS)) // 2
    elements, kinds, thresholds = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
    counts = [max(1, -(-each // CHUNK)) for each in elements]  # an empty tensor has an empty chunk
    firsts = accumulate(counts, initial=0)
    limits = map(thresholds.__getitem__, kinds)
    rows = chain.from_iterable(zip(elements, kinds, limits, firsts, counts, strict=False))
    (table,) = _numbers(tuple(rows), device)
    table = table.view(-1, 5)
    index = torch.arange(count, dtype=torch.int32, device=device)
    return table, torch.repeat_interleave(index, table[:, 4], output_size=sum(counts))


def _numbers(numbers: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """A table of ``numbers``. Does not wait for the device."""
    return (copied_to_device(torch.tensor(numbers, dtype=torch.int64, device="cpu"), device),)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """The context for a launch: Triton uses the current device, not that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
