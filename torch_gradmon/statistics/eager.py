"""Measure tensors with stock PyTorch operations: one row of statistics per tensor, cache-sized block by block.

float32 input is squared and summed in float64, so neither long sums nor large or tiny values lose what the contract promises
(relative 1e-6; torch's own ``vector_norm`` is 0.16 % low at 3e7 float32 elements on CPU, pytorch issue 169237). Half precision
is widened first, exactly. Nothing here reads a value back to the host, except one flag per call on CPU tensors, where host
and device are the same memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import NotMeasurable
from .moments import ALL_COLUMNS, ALWAYS, Column, identity, merge_by_group

#: Elements per block on CPU: 512 kB of float32 and 1 MB of float64 scratch stay in the second-level cache.
CPU_BLOCK = 1 << 17
#: Elsewhere a block only bounds the scratch memory.
DEVICE_BLOCK = 1 << 24
#: Squares are summed in runs of this length, and the runs' sums by torch's cascade.
_RUN = 256
DEFAULT_EPS = 1e-8
_EXTREMES = frozenset({Column.MIN, Column.MAX})


def measure(
    tensors: Sequence[Tensor],
    columns: frozenset[Column] = ALL_COLUMNS,
    *,
    eps: float = DEFAULT_EPS,
    inverse_scale: Tensor | None = None,
    minus: Sequence[Tensor] | None = None,
) -> Tensor:
    """Statistics of each tensor.

    Args:
        tensors: on one device; any floating, integer or complex dtype, dense or sparse, any strides, any size. Complex
            tensors count as twice as many real numbers; a sparse tensor counts its implicit zeros.
        columns: what is needed; the others hold their identity. COUNT and NONFINITE are always exact.
        eps: an element counts as near zero when ``|x| <= eps``.
        inverse_scale: 0-d tensor; each tensor is multiplied by it first, in float32 as ``GradScaler.unscale_`` does.
        minus: tensors to subtract, of the same shapes; the difference is taken in float64.

    Returns:
        ``[len(tensors), 8]`` on the tensors' device, float64 (float32 where the device has none). Does not synchronise.

    Raises:
        NotMeasurable: a tensor without readable local values (meta, nested, sharded, inside a functorch transform).
    """
    if not tensors:
        return identity(0)
    device = tensors[0].device
    with torch.no_grad():
        inputs = [_Input(t, None if minus is None else minus[i], inverse_scale) for i, t in enumerate(tensors)]
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        if device.type != "cpu":
            return _rows(inputs, columns, eps, device, closely=True)
        rows = _rows(inputs, columns, eps, device, closely=False)
        # NaN and Inf cost four times as much to look at closely: do that only where a sum or an extreme says they are there
        witnesses = rows[:, Column.SUM : Column.NEAR_ZERO]
        if _EXTREMES & columns:
            witnesses = torch.cat([witnesses, rows[:, Column.MIN :]], dim=1)
        suspicious = ~torch.isfinite(witnesses).all(dim=1) & (rows[:, Column.COUNT] > 0)
        if bool(suspicious.any()):
            found = suspicious.nonzero().flatten().tolist()
            rows[found] = _rows([inputs[i] for i in found], columns, eps, device, closely=True)
        return rows


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on devices that have nothing wider (Apple's MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64


class _Input:
    """One tensor as flat runs of real numbers, with what has to be done to each block before it is measured."""

    def __init__(self, tensor: Tensor, minus: Tensor | None, inverse_scale: Tensor | None) -> None:
        self.values, self.implicit_zeros = flat_values(tensor)
        self.minus = None if minus is None else flat_values(minus)[0]
        if self.minus is not None and not _same_layout(tensor, minus):
            # element order is free for one tensor, but both sides of a difference must run in the same one
            self.values, self.minus = tensor.detach().reshape(-1), minus.detach().reshape(-1)  # type: ignore[union-attr]
            if tensor.is_complex():
                self.values, self.minus = (torch.view_as_real(v.resolve_conj()).reshape(-1) for v in (self.values, self.minus))
        self.inverse_scale = inverse_scale

    def blocks(self) -> Iterator[Tensor]:
        """Runs of float32 or float64 numbers; float32 unless a wider type is needed."""
        values = self.values
        size = CPU_BLOCK if values.device.type == "cpu" else DEVICE_BLOCK
        wide = accumulator_dtype(values.device)
        for start in range(0, values.numel(), size):
            block = values[start : start + size]
            if self.minus is not None:
                yield block.to(wide) - self.minus[start : start + size].to(wide)
                continue
            if block.dtype not in (torch.float32, torch.float64):
                block = block.to(torch.float32 if block.is_floating_point() else wide)
            yield block if self.inverse_scale is None else block * self.inverse_scale.to(block.dtype)


def refusal(tensor: Tensor) -> str | None:
    """Why ``tensor`` cannot be measured, or None where it can."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "inside a torch.func transform"
    if hasattr(tensor, "_local_tensor") or hasattr(tensor, "_local_shards"):
        return "a sharded tensor (DTensor); sharded training is not measured yet"
    if type(tensor).__name__ == "FakeTensor":
        return "a fake tensor, which has no values"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.device.type == "meta":
        return "a tensor on the meta device, which has no values"
    return None


def flat_values(tensor: Tensor) -> tuple[Tensor, int]:
    """All stored numbers of ``tensor`` as one dimension, and how many zeros it implies without storing them.

    The order of the numbers is free, so any dense layout is a view; only gaps and overlaps cost a copy.
    """
    if (reason := refusal(tensor)) is not None:
        raise NotMeasurable(reason)
    tensor, zeros = tensor.detach(), 0
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        zeros = tensor.numel() - tensor.values().numel()
        tensor = tensor.values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        zeros = tensor.numel() - tensor.values().numel()
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
        zeros *= 2
    if not tensor.is_contiguous():
        dense = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
        tensor = dense if dense.is_contiguous() else tensor
    return tensor.reshape(-1), zeros


def _same_layout(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and a.layout == b.layout == torch.strided and a.stride() == b.stride()


def _rows(inputs: Sequence[_Input], columns: frozenset[Column], eps: float, device: torch.device, closely: bool) -> Tensor:
    """One row for each input. Looked at closely it is right for any values, otherwise for finite ones."""
    look = _look_closely if closely else _look
    wide = accumulator_dtype(device)
    owners: list[int] = []
    counts: list[int] = []
    found: dict[Column, list[Tensor]] = {}
    for index, source in enumerate(inputs):
        for block in source.blocks():
            owners.append(index)
            counts.append(block.numel())
            for column, value in look(block, columns, eps, wide):
                found.setdefault(column, []).append(value)
    rows = identity(len(owners), device, wide)
    rows[:, Column.COUNT] = torch.tensor(counts, dtype=wide, device="cpu").to(device, non_blocking=True)
    for column, values in found.items():
        rows[:, column] = torch.stack(values)
    if owners != list(range(len(inputs))):
        rows = merge_by_group(rows, owners, len(inputs))
    for index, source in enumerate(inputs):
        if source.implicit_zeros:
            rows[index, [Column.COUNT, Column.NEAR_ZERO]] += source.implicit_zeros
            rows[index, Column.MIN].clamp_(max=0)
            rows[index, Column.MAX].clamp_(min=0)
    return rows


Found = Iterator[tuple[Column, Tensor]]


def _look(block: Tensor, columns: frozenset[Column], eps: float, wide: torch.dtype) -> Found:
    """What is wanted of a block, if all of it is finite. NaN and Inf turn a sum or an extreme into one."""
    if Column.SUM in columns or Column.SQUARE_SUM in columns:
        widened = block.to(wide)
        if Column.SUM in columns:
            yield Column.SUM, widened.sum()
        if Column.SQUARE_SUM in columns:
            yield Column.SQUARE_SUM, _sum_of_squares(widened)
    if _EXTREMES & columns:
        smallest, largest = torch.aminmax(block)
        yield Column.MIN, smallest
        yield Column.MAX, largest
    if Column.ABS_SUM in columns or Column.NEAR_ZERO in columns:
        magnitude = block.abs()
        yield Column.ABS_SUM, magnitude.sum()
        if Column.NEAR_ZERO in columns:
            # in place and in floating point: into a boolean tensor the comparison costs several times as much
            yield Column.NEAR_ZERO, magnitude.le_(_threshold(eps, block.dtype)).sum()
    if columns <= ALWAYS:
        yield Column.SQUARE_SUM, torch.dot(block, block)  # only as the witness of NaN and Inf


def _look_closely(block: Tensor, columns: frozenset[Column], eps: float, wide: torch.dtype) -> Found:
    """The same for any values, in float64; what nobody asked for comes along."""
    block = block.to(wide)
    finite = torch.isfinite(block)
    magnitude = block.abs()
    yield Column.SUM, block.sum()
    yield Column.SQUARE_SUM, _sum_of_squares(block)
    yield Column.NONFINITE, (~finite).sum()
    yield Column.MIN, torch.where(finite, block, torch.inf).amin()
    yield Column.MAX, torch.where(finite, block, -torch.inf).amax()
    yield Column.ABS_SUM, magnitude.sum()
    yield Column.NEAR_ZERO, (magnitude <= eps).sum()  # false for NaN and Inf


def _sum_of_squares(block: Tensor) -> Tensor:
    """Sum of squares to 1e-15. One dot product over a whole block is off by 1e-13, and the std of a constant by its root."""
    whole = block.numel() // _RUN * _RUN
    rest = block[whole:]
    squares = torch.dot(rest, rest)
    return squares if whole == 0 else squares + torch.linalg.vector_norm(block[:whole].view(-1, _RUN), dim=1).square().sum()


def inner_product(a: Tensor, b: Tensor) -> Tensor:
    """Sum of ``a * b`` over all elements, accumulated in float64 block by block: 0-d, on the tensors' device. Does not synchronise."""
    with torch.no_grad():
        if not _same_layout(a, b):
            a, b = a.detach().to_dense().reshape(-1), b.detach().to_dense().reshape(-1)
        left, right, wide = flat_values(a)[0], flat_values(b)[0], accumulator_dtype(a.device)
        total = torch.zeros((), dtype=wide, device=a.device)
        for start in range(0, left.numel(), CPU_BLOCK):
            total += torch.dot(left[start : start + CPU_BLOCK].to(wide), right[start : start + CPU_BLOCK].to(wide))
        return total


@lru_cache(maxsize=64)
def _threshold(eps: float, dtype: torch.dtype) -> float:
    """The largest number of ``dtype`` that is not above ``eps``: the comparison then equals the one in real numbers."""
    if dtype != torch.float32:
        return eps
    bits = struct.unpack("<I", struct.pack("<f", eps))[0]
    rounded: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return rounded if rounded <= eps else float(struct.unpack("<f", struct.pack("<I", bits - 1))[0])
