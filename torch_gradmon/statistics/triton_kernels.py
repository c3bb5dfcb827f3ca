"""The kernels behind :mod:`torch_gradmon.statistics.triton`. Importing this file imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from ..core.moments import WIDTH, Column

_COUNT, _SUM, _ABS_SUM, _SQUARE_SUM, _NEAR_ZERO, _NONFINITE, _MIN, _MAX = (tl.constexpr(column.value) for column in Column)
_WIDTH = tl.constexpr(WIDTH)
#: Numbers per tensor in the table of sizes: elements, dtype, threshold, first chunk, chunks.
_ENTRY = tl.constexpr(5)
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
    ITEM: tl.constexpr,
    WIDE: tl.constexpr,
    SCALED: tl.constexpr,
    MINUS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Write the row of ``length`` elements of ``ITEM`` bytes, ``start`` elements after ``address``, less those after ``other``, to ``out``.

    Triton before 3.4 does not find the size by a dtype.
    """
    GROUP: tl.constexpr = 16 // ITEM
    BLOCK: tl.constexpr = GROUPS * GROUP
    COLUMNS: tl.constexpr = 2
    group = tl.arange(0, GROUPS)[:, None]
    member = tl.arange(0, GROUP)[None, :]
    address += start * ITEM
    other += start * ITEM
    source = address.to(tl.pointer_type(STORED))
    partner = other.to(tl.pointer_type(STORED))

    # Whole blocks start at the first 16-byte boundary, so a thread loads and sums 16 bytes at once. A gradient that is a view of a larger
    # buffer may start anywhere.
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

    # A non-finite sum of |x| shows NaN or Inf. Then all elements go through the slower loop below.
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
        # neighbouring threads take neighbouring elements, and each thread still has its own sum
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
