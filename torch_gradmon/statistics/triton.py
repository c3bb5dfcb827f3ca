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
import triton
import triton.language as tl
from torch import Tensor

from ..core.moments import WIDTH, Column
from ..core.torch_modes import copied_to_device, stream_number
from .eager import EagerStatistics
from .on_device import DeviceStatistics
from .request import Request, are_alike, are_unchanged_on, dtype_of, in_order_of_memory, threshold

# --- The kernels behind :mod:`torch_gradmon.statistics.triton`. Importing this file imports Triton ---


_COUNT, _SUM, _ABS_SUM, _SQUARE_SUM, _NEAR_ZERO, _NONFINITE, _MIN, _MAX = (tl.constexpr(column.value) for column in Column)
_WIDTH = tl.constexpr(WIDTH)
#: Numbers per tensor in the table of sizes: elements, dtype, threshold, first chunk, chunks.
_ENTRY = tl.constexpr(5)
_INF = tl.constexpr(float("inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _sums_of_blocks(
    address: tl.tensor,
    other: tl.tensor,
    length: tl.tensor,
    near: tl.tensor,
    scale: tl.tensor,
    STORED: tl.constexpr,
    ITEM: tl.constexpr,
    WIDE: tl.constexpr,
    SCALED: tl.constexpr,
    MINUS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Of the whole blocks among these elements: how many come before them, how many are in them, and for each group of threads the sums of
    x, |x| and its square, near zeros, and both extremes. None are in them if one of them is NaN or Inf.
    """
    GROUP: tl.constexpr = 16 // ITEM
    BLOCK: tl.constexpr = GROUPS * GROUP
    # Whole blocks start at the first 16-byte boundary, so a thread loads and sums 16 bytes at once. A gradient that is a view of a larger
    # buffer may start anywhere.
    head = ((-address & 15) // ITEM).to(tl.int32)
    body = tl.maximum(length - head, 0) // BLOCK * BLOCK
    if MINUS:
        body = tl.where((address ^ other) & 15 == 0, body, 0)
    aligned = tl.multiple_of(address.to(tl.pointer_type(STORED)) + head, 16)
    aligned_partner = tl.multiple_of(other.to(tl.pointer_type(STORED)) + head, 16)
    group = tl.arange(0, GROUPS)[:, None]
    member = tl.arange(0, GROUP)[None, :]
    sums = tl.zeros([GROUPS], tl.float64)
    abs_sums = tl.zeros([GROUPS], tl.float64)
    square_sums = tl.zeros([GROUPS], tl.float64)
    nears = tl.zeros([GROUPS], tl.int32)
    smallest = tl.full([GROUPS], _INF, WIDE)
    largest = tl.full([GROUPS], -_INF, WIDE)
    for first in range(0, body, BLOCK):
        index = first + group * GROUP + member
        x = tl.load(aligned + index).to(WIDE)
        if SCALED:
            x = x * tl.load(scale).to(WIDE)
        if MINUS:
            x = x - tl.load(aligned_partner + index).to(WIDE)
        wide = x.to(tl.float64)
        sums += tl.sum(wide, axis=1)
        abs_sums += tl.sum(tl.abs(wide), axis=1)
        square_sums += tl.sum(wide * wide, axis=1)
        nears += tl.sum((tl.abs(x) <= near.to(WIDE)).to(tl.int32), axis=1)
        smallest = tl.minimum(smallest, tl.min(x, axis=1))
        largest = tl.maximum(largest, tl.max(x, axis=1))
    # a non-finite sum of |x| shows NaN or Inf, and then all elements go through the slower loop of the rest
    good = tl.sum(abs_sums) < _INF
    body = tl.where(good, body, 0)
    sums = tl.where(good, sums, 0.0)
    abs_sums = tl.where(good, abs_sums, 0.0)
    square_sums = tl.where(good, square_sums, 0.0)
    nears = tl.where(good, nears, 0)
    smallest = tl.where(good, smallest, _INF)
    largest = tl.where(good, largest, -_INF)
    return head, body, sums, abs_sums, square_sums, nears, smallest, largest


@triton.jit  # type: ignore[untyped-decorator]
def _finite_part(
    source: tl.tensor,
    partner: tl.tensor,
    index: tl.tensor,
    inside: tl.tensor,
    scale: tl.tensor,
    WIDE: tl.constexpr,
    SCALED: tl.constexpr,
    MINUS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The elements at ``index``, zero where that is not ``inside``, and which of those inside are finite."""
    x = tl.load(source + index, mask=inside, other=0).to(WIDE)
    if SCALED:
        x = x * tl.load(scale).to(WIDE)
    if MINUS:
        x = x - tl.load(partner + index, mask=inside, other=0).to(WIDE)
    x = tl.where(inside, x, 0)  # zero times an infinite scale is not zero
    return x, inside & (tl.abs(x) < _INF)


@triton.jit  # type: ignore[untyped-decorator]
def _row_of_chunk(
    out: tl.tensor,
    address: tl.tensor,
    other: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    near: tl.tensor,
    scale: tl.tensor,
    STORED: tl.constexpr,
    ITEM: tl.constexpr,
    WIDE: tl.constexpr,
    SCALED: tl.constexpr,
    MINUS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Write the row of ``length`` elements of ``ITEM`` bytes, ``start`` elements after ``address``, less those after ``other``, to ``out``.

    Triton before 3.4 does not find the size by a dtype.
    """
    COLUMNS: tl.constexpr = 2
    address += start * ITEM
    other += start * ITEM
    head, body, sums, abs_sums, square_sums, nears, smallest, largest = _sums_of_blocks(
        address, other, length, near, scale, STORED, ITEM, WIDE, SCALED, MINUS, GROUPS
    )
    source = address.to(tl.pointer_type(STORED))
    partner = other.to(tl.pointer_type(STORED))
    group = tl.arange(0, GROUPS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    nonfinites = tl.zeros([GROUPS], tl.int32)
    for first in range(0, length - body, GROUPS * COLUMNS):
        # neighbouring threads take neighbouring elements, and each thread still has its own sum
        index = first + column * GROUPS + group
        inside = index < length - body
        index = tl.where(index < head, index, index + body)
        x, finite = _finite_part(source, partner, index, inside, scale, WIDE, SCALED, MINUS)
        wide = x.to(tl.float64)
        sums += tl.sum(wide, axis=1)
        abs_sums += tl.sum(tl.abs(wide), axis=1)
        square_sums += tl.sum(wide * wide, axis=1)
        nears += tl.sum((finite & (tl.abs(x) <= near.to(WIDE))).to(tl.int32), axis=1)
        nonfinites += tl.sum(inside.to(tl.int32) - finite.to(tl.int32), axis=1)
        smallest = tl.minimum(smallest, tl.min(tl.where(finite, x, _INF), axis=1))
        largest = tl.maximum(largest, tl.max(tl.where(finite, x, -_INF), axis=1))

    tl.store(out + _COUNT, length.to(tl.float64))
    tl.store(out + _SUM, tl.sum(sums))
    tl.store(out + _ABS_SUM, tl.sum(abs_sums))
    tl.store(out + _SQUARE_SUM, tl.sum(square_sums))
    tl.store(out + _NEAR_ZERO, tl.sum(nears).to(tl.float64))
    tl.store(out + _NONFINITE, tl.sum(nonfinites).to(tl.float64))
    tl.store(out + _MIN, tl.min(smallest).to(tl.float64))
    tl.store(out + _MAX, tl.max(largest).to(tl.float64))


@triton.jit  # type: ignore[untyped-decorator]
def _chunk_in_tables(
    chunk: tl.tensor, entries: tl.tensor, owners: tl.tensor, addresses: tl.tensor, SIZE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The tensor that ``chunk`` belongs to, its dtype, the chunk's first element and their number, the addresses of tensor and partner."""
    owner = tl.load(owners + chunk)
    entry = entries + owner * _ENTRY
    start = (chunk - tl.load(entry + 3)) * SIZE
    length = tl.minimum(tl.load(entry) - start, SIZE).to(tl.int32)
    return owner, tl.load(entry + 1), start, length, tl.load(addresses + owner * 2), tl.load(addresses + owner * 2 + 1)


@triton.jit  # type: ignore[untyped-decorator]
def rows_of_chunks(
    out: tl.tensor,
    entries: tl.tensor,
    owners: tl.tensor,
    addresses: tl.tensor,
    scale: tl.tensor,
    SCALED: tl.constexpr,
    MINUS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """One program per chunk: write its row."""
    chunk = tl.program_id(0).to(tl.int64)
    owner, kind, start, length, address, other = _chunk_in_tables(chunk, entries, owners, addresses, SIZE)
    near = tl.load(entries + owner * _ENTRY + 2).to(tl.float64, bitcast=True)
    out += chunk * _WIDTH
    if kind == 0:
        _row_of_chunk(out, address, other, start, length, near, scale, tl.float32, 4, tl.float32, SCALED, MINUS, GROUPS)
    elif kind == 1:
        _row_of_chunk(out, address, other, start, length, near, scale, tl.bfloat16, 2, tl.float32, SCALED, MINUS, GROUPS)
    elif kind == 2:
        _row_of_chunk(out, address, other, start, length, near, scale, tl.float16, 2, tl.float32, SCALED, MINUS, GROUPS)
    else:
        _row_of_chunk(out, address, other, start, length, near, scale, tl.float64, 8, tl.float64, SCALED, MINUS, GROUPS)


@triton.jit  # type: ignore[untyped-decorator]
def merged_rows(out: tl.tensor, entries: tl.tensor, parts: tl.tensor, LANES: tl.constexpr) -> None:
    """One program per tensor: merge the rows of its chunks, as :func:`moments.merge` does."""
    owner = tl.program_id(0).to(tl.int64)
    first = tl.load(entries + owner * _ENTRY + 3)
    chunks = tl.load(entries + owner * _ENTRY + 4).to(tl.int32)
    lane = tl.arange(0, LANES)[:, None]
    column = tl.arange(0, _WIDTH)[None, :]
    empty = tl.where(column == _MIN, _INF, tl.where(column == _MAX, -_INF, 0.0)).to(tl.float64)
    merged = tl.zeros([LANES, _WIDTH], tl.float64) + empty
    for start in range(0, chunks, LANES):
        index = start + lane
        part = tl.load(parts + (first + index) * _WIDTH + column, mask=index < chunks, other=0)
        part = tl.where(index < chunks, part, empty)
        extreme = tl.where(column == _MIN, tl.minimum(merged, part), tl.maximum(merged, part))
        merged = tl.where(column < _MIN, merged + part, extreme)
    column = tl.arange(0, _WIDTH)
    extreme = tl.where(column == _MIN, tl.min(merged, axis=0), tl.max(merged, axis=0))
    tl.store(out + owner * _WIDTH + column, tl.where(column < _MIN, tl.sum(merged, axis=0), extreme))


@triton.jit  # type: ignore[untyped-decorator]
def _product_of_chunk(
    out: tl.tensor,
    address: tl.tensor,
    other: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    STORED: tl.constexpr,
    ITEM: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Write the sum of the products of ``length`` elements, ``start`` elements after ``address`` and ``other``, to ``out``."""
    COLUMNS: tl.constexpr = 4
    source = (address + start * ITEM).to(tl.pointer_type(STORED))
    partner = (other + start * ITEM).to(tl.pointer_type(STORED))
    group = tl.arange(0, GROUPS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    sums = tl.zeros([GROUPS], tl.float64)
    for first in range(0, length, GROUPS * COLUMNS):
        index = first + column * GROUPS + group
        inside = index < length
        x = tl.load(source + index, mask=inside, other=0).to(tl.float64)
        sums += tl.sum(x * tl.load(partner + index, mask=inside, other=0).to(tl.float64), axis=1)
    tl.store(out, tl.sum(sums))


@triton.jit  # type: ignore[untyped-decorator]
def products_of_chunks(
    out: tl.tensor, entries: tl.tensor, owners: tl.tensor, addresses: tl.tensor, SIZE: tl.constexpr, GROUPS: tl.constexpr
) -> None:
    """One program per chunk of a pair of tensors: write the sum of its products."""
    chunk = tl.program_id(0).to(tl.int64)
    _, kind, start, length, address, other = _chunk_in_tables(chunk, entries, owners, addresses, SIZE)
    if kind == 0:
        _product_of_chunk(out + chunk, address, other, start, length, tl.float32, 4, GROUPS)
    elif kind == 1:
        _product_of_chunk(out + chunk, address, other, start, length, tl.bfloat16, 2, GROUPS)
    elif kind == 2:
        _product_of_chunk(out + chunk, address, other, start, length, tl.float16, 2, GROUPS)
    else:
        _product_of_chunk(out + chunk, address, other, start, length, tl.float64, 8, GROUPS)


@triton.jit  # type: ignore[untyped-decorator]
def merged_sums(out: tl.tensor, entries: tl.tensor, parts: tl.tensor, LANES: tl.constexpr) -> None:
    """One program per tensor: add the sums of its chunks."""
    owner = tl.program_id(0).to(tl.int64)
    first = tl.load(entries + owner * _ENTRY + 3)
    chunks = tl.load(entries + owner * _ENTRY + 4).to(tl.int32)
    lane = tl.arange(0, LANES)
    merged = tl.zeros([LANES], tl.float64)
    for start in range(0, chunks, LANES):
        merged += tl.load(parts + first + start + lane, mask=start + lane < chunks, other=0)
    tl.store(out + owner, tl.sum(merged))


#: Whether the kernels run on the CPU, in Triton's interpreter.
INTERPRETED = not isinstance(merged_rows, triton.JITFunction)


# --- Their launches ---

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


class TritonStatistics(EagerStatistics):
    """Measures lists of tensors with two kernels. Caches tables on the device, never a tensor. Not thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._cached: OrderedDict[tuple[_Maker, tuple[int, ...], torch.device, int | None], tuple[Tensor, ...]] = OrderedDict()
        self._size = 0
        self.on_device = DeviceStatistics()  # now, and not in the step that has the first tensor that the kernels do not accept

    def __reduce__(self) -> tuple[type[TritonStatistics], tuple[()]]:
        return TritonStatistics, ()  # a copy starts empty: the tables hold addresses of this process

    def rows(self, tensors: Sequence[Tensor], request: Request, minus: Sequence[Tensor] | None = None) -> Tensor:
        """See :meth:`EagerStatistics.rows`. All columns are filled, and each call returns new memory.

        Two kernel launches serve all tensors that :func:`supports` accepts; :class:`EagerStatistics` measures the others. Can be
        captured into a CUDA graph after the same call has run outside of one; each replay writes the rows anew. Raises any Exception
        where Triton cannot compile or launch the kernels.
        """
        scale = request.inverse_scale
        partners: Sequence[Tensor | None] = [None] * len(tensors) if minus is None else minus
        taken: Sequence[int] = []
        if tensors and (scale is None or (_readable(scale, tensors[0].device) and _has_memory(scale))):
            taken = _supported(tensors, partners)
        if not taken:
            return super().rows(tensors, request, minus)
        rows = self._rows([tensors[i] for i in taken], [partners[i] for i in taken], request.eps, scale)
        if len(taken) == len(tensors):
            return rows
        rest = sorted(set(range(len(tensors))) - set(taken))
        less = None if minus is None else [minus[i] for i in rest]
        return self._in_order(taken, rows, rest, super().rows([tensors[i] for i in rest], request, less))

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
        """See :meth:`EagerStatistics.inner_products`. Two kernel launches serve all pairs that :func:`supports` accepts."""
        taken = _supported(first, second)
        if not taken:
            return super().inner_products(first, second)
        sums = self._sums([first[i] for i in taken], [second[i] for i in taken])
        if len(taken) == len(first):
            return sums
        rest = sorted(set(range(len(first))) - set(taken))
        others = super().inner_products([first[i] for i in rest], [second[i] for i in rest])
        return self._in_order(taken, sums, rest, others)

    def _sums(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
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
    is_kind = device.type == _KIND_OF_DEVICE and _KINDS.keys() >= set(map(dtype_of, tensors))
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
    return contiguous or in_order_of_memory(tensor).is_contiguous()


def _readable(tensor: Tensor, device: torch.device) -> bool:
    """Whether what is at the address of a tensor, if it has memory, are its elements, unchanged and on ``device``."""
    return device.type == _KIND_OF_DEVICE and are_unchanged_on([tensor], device)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.data_ptr() != 0 or tensor.numel() == 0


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
    return (copied_to_device(torch.tensor(numbers, dtype=torch.int64, device="cpu"), device),)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """The context for a launch: Triton uses the current device, not that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
