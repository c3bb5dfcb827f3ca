"""Measure lists of CUDA tensors with two kernel launches, however many tensors there are: one read of memory, all columns.

The first kernel takes one chunk of one tensor per program and leaves that chunk's row, the second merges the rows of each
tensor's chunks in a fixed order. No atomics: the same input gives the same row to the last bit. Sums run in float64 from the
first element on, which the accuracy of the std and values down to 1e-30 and up to 1e30 ask for: four float64 operations an
element. GPUs such as A100 and H100 have half of their float32 rate in float64, so that memory should stay the limit; consumer
GPUs have a 32nd or a 64th of it, and there arithmetic should be the limit.

Pointers and sizes reach the kernels in tables on the device, which are kept until a tensor moves or changes its size. New
tables come from pinned memory without waiting for the device; torch's host allocator hands a pinned buffer out again only
when the copy from it is done, and never again where the copy was captured into a CUDA graph.

Importing this file imports Triton. With ``TRITON_INTERPRET=1`` in the environment before that, it measures CPU tensors instead.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import accumulate
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from ..errors import Complaints
from . import eager
from .eager import DEFAULT_EPS
from .moments import ALL_COLUMNS, WIDTH, Column
from .reading import threshold

#: Elements per program of the first kernel: 64 to 256 kB, so that ten million elements still give 306 programs.
CHUNK = 1 << 15
#: Groups of 16 bytes that a program of the first kernel loads at once: four for each of its 128 threads.
_GROUPS = 512
#: Chunks that the second kernel merges at once.
_LANES = 128
#: How the kernels tell the dtypes apart.
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
#: Tables that are kept; a list of tensors has two.
_KEPT = 32
_PLAIN = frozenset({Tensor, nn.Parameter})
_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor

_COUNT, _SUM, _ABS_SUM, _SQUARE_SUM, _NEAR_ZERO, _NONFINITE, _MIN, _MAX = (tl.constexpr(column.value) for column in Column)
_WIDTH = tl.constexpr(WIDTH)
_ENTRY = tl.constexpr(5)  # numbers per tensor in the table of sizes, see _chunks
_INF = tl.constexpr(float("inf"))


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
    WIDE: tl.constexpr,
    SCALED: tl.constexpr,
    MINUS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Write the row of ``length`` elements, ``start`` elements after ``address``, less those after ``other``, to ``out``."""
    ITEM: tl.constexpr = STORED.primitive_bitwidth // 8
    GROUP: tl.constexpr = 16 // ITEM
    BLOCK: tl.constexpr = GROUPS * GROUP
    COLUMNS: tl.constexpr = 2
    group = tl.arange(0, GROUPS)[:, None]
    member = tl.arange(0, GROUP)[None, :]
    address += start * ITEM
    other += start * ITEM
    source = address.to(tl.pointer_type(STORED))
    partner = other.to(tl.pointer_type(STORED))

    # Whole blocks from the first 16-byte boundary on: a thread loads 16 bytes at once and sums them by itself. A gradient that
    # is a view of a larger buffer may start anywhere.
    head = ((-address & 15) // ITEM).to(tl.int32)
    body = tl.maximum(length - head, 0) // BLOCK * BLOCK
    if MINUS:
        body = tl.where((address ^ other) & 15 == 0, body, 0)
    aligned = tl.multiple_of(source + head, 16)
    aligned_partner = tl.multiple_of(partner + head, 16)
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

    # The sum of |x| shows whether those blocks hold NaN or Inf. If so they are looked at again, with the elements around them.
    good = tl.sum(abs_sums) < _INF
    body = tl.where(good, body, 0)
    sums = tl.where(good, sums, 0.0)
    abs_sums = tl.where(good, abs_sums, 0.0)
    square_sums = tl.where(good, square_sums, 0.0)
    nears = tl.where(good, nears, 0)
    smallest = tl.where(good, smallest, _INF)
    largest = tl.where(good, largest, -_INF)
    nonfinites = tl.zeros([GROUPS], tl.int32)
    column = tl.arange(0, COLUMNS)[None, :]
    for first in range(0, length - body, GROUPS * COLUMNS):
        # neighbouring threads take neighbouring elements, and still a thread sums by itself
        index = first + column * GROUPS + group
        inside = index < length - body
        index = tl.where(index < head, index, index + body)
        x = tl.load(source + index, mask=inside, other=0).to(WIDE)
        if SCALED:
            x = x * tl.load(scale).to(WIDE)
        if MINUS:
            x = x - tl.load(partner + index, mask=inside, other=0).to(WIDE)
        x = tl.where(inside, x, 0)  # zero times an infinite scale is not zero
        wide = x.to(tl.float64)
        finite = inside & (tl.abs(x) < _INF)
        sums += tl.sum(wide, axis=1)
        abs_sums += tl.sum(tl.abs(wide), axis=1)
        square_sums += tl.sum(wide * wide, axis=1)
        nears += tl.sum((finite & (tl.abs(x) <= near.to(WIDE))).to(tl.int32), axis=1)
        nonfinites += tl.sum((inside & ~finite).to(tl.int32), axis=1)
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
def _rows_of_chunks(
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
    """One program per chunk: find it in the tables and write its row."""
    chunk = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners + chunk)
    entry = entries + owner * _ENTRY
    start = (chunk - tl.load(entry + 3)) * SIZE
    length = tl.minimum(tl.load(entry) - start, SIZE).to(tl.int32)
    kind = tl.load(entry + 1)
    near = tl.load(entry + 2).to(tl.float64, bitcast=True)
    address = tl.load(addresses + owner * 2)
    other = tl.load(addresses + owner * 2 + 1)
    out += chunk * _WIDTH
    if kind == 0:
        _row_of_chunk(out, address, other, start, length, near, scale, tl.float32, tl.float32, SCALED, MINUS, GROUPS)
    elif kind == 1:
        _row_of_chunk(out, address, other, start, length, near, scale, tl.bfloat16, tl.float32, SCALED, MINUS, GROUPS)
    elif kind == 2:
        _row_of_chunk(out, address, other, start, length, near, scale, tl.float16, tl.float32, SCALED, MINUS, GROUPS)
    else:
        _row_of_chunk(out, address, other, start, length, near, scale, tl.float64, tl.float64, SCALED, MINUS, GROUPS)


@triton.jit  # type: ignore[untyped-decorator]
def _merged_rows(out: tl.tensor, entries: tl.tensor, parts: tl.tensor, LANES: tl.constexpr) -> None:
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


#: Whether the kernels run on the CPU, in Triton's interpreter.
_INTERPRETED = not isinstance(_merged_rows, triton.JITFunction)


class TritonStatistics:
    """Measures lists of tensors with the kernels of this file. Keeps tables on the device between calls, never a tensor.

    Where the kernels cannot be compiled or launched, it says so once and measures with stock operations from then on.
    Not to be called by two threads at once.
    """

    def __init__(self) -> None:
        self._complaints = Complaints()
        self._kept: OrderedDict[tuple[object, ...], tuple[Tensor, ...]] = OrderedDict()

    def __reduce__(self) -> tuple[type[TritonStatistics], tuple[()]]:
        return TritonStatistics, ()  # a copy starts anew: the tables hold addresses of this process

    def measure(
        self,
        tensors: Sequence[Tensor],
        columns: frozenset[Column] = ALL_COLUMNS,
        *,
        eps: float = DEFAULT_EPS,
        inverse_scale: Tensor | None = None,
        minus: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Statistics of each tensor, with the meaning of :func:`eager.measure`.

        Two kernel launches serve all tensors that :func:`supports` accepts, and :func:`eager.measure` the others. Can be captured into
        a CUDA graph, once the same call has run outside of one; each replay then writes the rows anew.

        Args:
            tensors: on one device, of any kind.
            columns: what is needed. The kernels fill all columns, as they read every element once anyway.
            eps: an element counts as near zero when ``|x| <= eps``.
            inverse_scale: 0-d tensor on that device; each tensor is multiplied by it first, in float32 (float64 for float64).
            minus: tensors to subtract, of the same shapes; the difference is rounded once, to float32 (float64 for float64).

        Returns:
            ``[len(tensors), 8]`` float64 on the tensors' device, new memory with each call. Does not synchronise.

        Raises:
            NotMeasurable: a tensor without readable local values (meta, nested, sharded, inside a functorch transform).
        """
        partners: Sequence[Tensor | None] = [None] * len(tensors) if minus is None else minus
        taken: list[int] = []
        if tensors and not self._complaints.counts and (inverse_scale is None or _readable(inverse_scale, tensors[0].device)):
            taken = [i for i, x in enumerate(tensors) if supports(x, partners[i], tensors[0].device)]
        rows = None
        if taken:
            try:
                rows = self._rows([tensors[i] for i in taken], [partners[i] for i in taken], eps, inverse_scale)
            except Exception as error:
                self._complaints.add("triton", "the Triton kernels fail here; stock operations measure instead", error)
        if rows is None:
            return eager.measure(tensors, columns, eps=eps, inverse_scale=inverse_scale, minus=minus)
        if len(taken) == len(tensors):
            return rows
        rest = sorted(set(range(len(tensors))) - set(taken))
        less = None if minus is None else [minus[i] for i in rest]
        others = eager.measure([tensors[i] for i in rest], columns, eps=eps, inverse_scale=inverse_scale, minus=less)
        with _on(rows.device):
            places = tuple(sorted(range(len(tensors)), key=(taken + rest).__getitem__))
            (order,) = self._tables_of(_numbers, places, rows.device)
            return torch.cat([rows, others]).index_select(0, order)

    def _rows(
        self, tensors: Sequence[Tensor], partners: Sequence[Tensor | None], eps: float, inverse_scale: Tensor | None
    ) -> Tensor:
        """Rows of tensors that the kernels take; all of them have a partner, or none has."""
        device = tensors[0].device
        kinds = {dtype: (kind, _threshold_bits(eps, dtype)) for dtype, kind in _KINDS.items()}
        sizes = tuple(number for x in tensors for number in (x.numel(), *kinds[x.dtype]))
        where = tuple(
            at for x, m in zip(tensors, partners, strict=True) for at in (x.data_ptr(), m.data_ptr() if m is not None else 0)
        )
        with _on(device):
            entries, owners = self._tables_of(_chunks, sizes, device)
            (addresses,) = self._tables_of(_numbers, where, device)
            parts = torch.empty(len(owners), WIDTH, dtype=torch.float64, device=device)
            rows = torch.empty(len(tensors), WIDTH, dtype=torch.float64, device=device)
            _rows_of_chunks[(len(parts),)](
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
            _merged_rows[(len(rows),)](rows, entries, parts, LANES=_LANES, num_warps=4, enable_fp_fusion=True)
        return rows

    def _tables_of(self, make: _Maker, numbers: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
        """``make(numbers, device)``, kept for the next call with the same numbers on the same stream.

        What is kept is read on one stream only, so that it can be dropped without waiting for anything. A graph under capture
        has tables of its own, which its replays copy anew.
        """
        stream = 0
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return make(numbers, device)
            stream = torch.cuda.current_stream(device).cuda_stream
        key = (make, numbers, device, stream)
        tables = self._kept.pop(key, None) or make(numbers, device)
        self._kept[key] = tables  # the latest stand last
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return tables


_Maker = Callable[[tuple[int, ...], torch.device], tuple[Tensor, ...]]


def supports(tensor: Tensor, minus: Tensor | None = None, device: torch.device | None = None) -> bool:
    """Whether the kernels take ``tensor``, less ``minus``, on ``device`` (by default its own).

    They take dense floating tensors of 16, 32 or 64 bits in any order of dimensions, if ``minus`` lies in memory likewise.
    """
    device = tensor.device if device is None else device
    if tensor.dtype not in _KINDS or not _readable(tensor, device):
        return False
    contiguous = tensor.is_contiguous()
    if minus is not None:
        if minus.dtype != tensor.dtype or minus.shape != tensor.shape or not _readable(minus, device):
            return False
        if not (contiguous and minus.is_contiguous()) and minus.stride() != tensor.stride():
            return False
    return contiguous or _has_no_gaps(tensor)


def _readable(tensor: Tensor, device: torch.device) -> bool:
    """Whether the elements are in memory on ``device`` as they are, so that a kernel can be given their address."""
    return (
        type(tensor) in _PLAIN
        and (tensor.is_cpu if _INTERPRETED else tensor.is_cuda)
        and tensor.device == device
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not _is_functorch_wrapped(tensor)
        and not tensor.is_neg()
        and (tensor.data_ptr() != 0 or tensor.numel() == 0)
    )


def _has_no_gaps(tensor: Tensor) -> bool:
    """Whether the strides are those of a contiguous tensor with its dimensions in another order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


@lru_cache(maxsize=64)
def _threshold_bits(eps: float, dtype: torch.dtype) -> int:
    """The near-zero threshold for a dtype as the bits of a float64."""
    limit = threshold(eps, torch.float64 if dtype == torch.float64 else torch.float32)
    return cast(int, struct.unpack("<q", struct.pack("<d", limit))[0])


def _chunks(numbers: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """The tables of sizes: per tensor ``[elements, dtype, threshold, first chunk, chunks]``, per chunk its tensor."""
    tensors = [numbers[i : i + 3] for i in range(0, len(numbers), 3)]
    counts = [max(1, -(-elements // CHUNK)) for elements, _, _ in tensors]  # an empty tensor has an empty chunk
    firsts = accumulate(counts, initial=0)
    rows = [number for each in zip(tensors, firsts, counts, strict=False) for number in (*each[0], *each[1:])]
    (table,) = _numbers(tuple(rows), device)
    table = table.view(-1, 5)
    index = torch.arange(len(tensors), dtype=torch.int32, device=device)
    return table, torch.repeat_interleave(index, table[:, 4], output_size=sum(counts))


def _numbers(numbers: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """A table of the numbers as they are. The device is not waited for."""
    table = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return (table.to(device, non_blocking=True),)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Where the kernels are launched: Triton takes the current device, whatever the tensors' is."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
