"""What the backends get: the request, and the tensors as a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter, eq, not_

import torch
from torch import Tensor, nn

from ..core.errors import NotMeasurable
from ..core.moments import ALL_COLUMNS, Column
from ..core.torch_modes import has_float64

# --- Which tensors can be read, and how to flatten them ---

#: Floating dtypes whose numbers float32 holds exactly, and which convert to it fast.
NARROW = frozenset({torch.float32, torch.bfloat16, torch.float16})
#: Dtypes of real numbers that copy to float64.
REAL = NARROW | {torch.float64, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
#: float32 numbers in a vector register of the CPU, as torch's kernels use them; at least those of AVX2.
LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
#: Types whose memory holds the elements unchanged; nn.Buffer makes plain tensors.
PLAIN: set[type[Tensor]] = {Tensor, nn.Parameter}
dtype_of, is_on_cpu, _LAYOUT, is_nested, _DEVICE, _SHAPE = map(
    attrgetter, ("dtype", "is_cpu", "layout", "is_nested", "device", "shape")
)
_STRIDED = frozenset({torch.strided})
is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def filled(sizes: Sequence[int], most: int) -> list[list[int]]:
    """The places of ``sizes``, in order, in groups that add up to at most ``most``; one that is larger is alone."""
    groups: list[list[int]] = []
    total = most
    for place, size in enumerate(sizes):
        if not groups or total + size > most:
            groups.append([])
            total = 0
        groups[-1].append(place)
        total += size
    return groups


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on devices without it."""
    return torch.float64 if has_float64(device) else torch.float32


def is_plain(tensor: Tensor) -> bool:
    """Whether ``tensor`` is an ordinary dense CPU tensor of real numbers. Cheap."""
    return (
        type(tensor) in PLAIN
        and tensor.dtype in REAL
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not is_functorch_wrapped(tensor)
    )


class PlainTensors(list[Tensor]):
    """Tensors that :func:`is_plain` accepts, so they need not be checked again."""


def as_plain(tensors: Sequence[Tensor]) -> PlainTensors | None:
    """The ``tensors`` if :func:`is_plain` holds for all of them, found without one call for each; else None."""
    is_plain_all = (
        PLAIN.issuperset(map(type, tensors))
        and REAL.issuperset(map(dtype_of, tensors))
        and all(map(is_on_cpu, tensors))
        and _STRIDED.issuperset(map(_LAYOUT, tensors))
        and not any(map(is_nested, tensors))
        and not any(map(is_functorch_wrapped, tensors))
    )
    return PlainTensors(tensors) if is_plain_all else None


def are_unchanged_on(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Whether all are ordinary strided tensors on ``device`` that show their memory as it is, found without one call for each."""
    return (
        PLAIN.issuperset(map(type, tensors))
        and {device}.issuperset(map(_DEVICE, tensors))
        and _STRIDED.issuperset(map(_LAYOUT, tensors))
        and not any(map(is_nested, tensors))
        and not any(map(is_functorch_wrapped, tensors))
        and not any(map(Tensor.is_neg, tensors))
    )


def on_accelerator(tensors: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """The ``tensors`` if all can be measured and are on one accelerator, found without one call for each; else None."""
    is_elsewhere = not (tensors[0].is_cpu or tensors[0].is_meta)
    return tensors if is_elsewhere and are_unchanged_on(tensors, tensors[0].device) else None


def are_alike(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether each tensor has the shape and dtype of the one at its place in ``second``, found without one call for each."""
    return (
        len(first) == len(second)
        and all(map(eq, map(dtype_of, first), map(dtype_of, second)))
        and all(map(eq, map(_SHAPE, first), map(_SHAPE, second)))
    )


def refusal(tensor: Tensor) -> str | None:
    if type(tensor) in PLAIN and not (tensor.is_nested or tensor.is_meta or is_functorch_wrapped(tensor)):
        return None
    if is_functorch_wrapped(tensor):
        return "inside a torch.func transform"
    if hasattr(tensor, "_local_tensor") or hasattr(tensor, "_local_shards"):
        return "a tensor that is sharded over ranks (DTensor)"
    if type(tensor).__name__ == "FakeTensor":
        return "a fake tensor, which has no values"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.device.type == "meta":
        return "a tensor on the meta device, which has no values"
    return None


def _coalesced(tensor: Tensor) -> Tensor:
    """A sparse tensor with one number for each place; sums of narrow numbers are not rounded to their width. Others as they are."""
    if tensor.layout != torch.sparse_coo:
        return tensor
    if tensor.dtype in (torch.bfloat16, torch.float16) and not tensor.is_coalesced():
        tensor = tensor.float()
    return tensor.coalesce()


def in_order_of_memory(tensor: Tensor) -> Tensor:
    """The same with permuted dimensions: contiguous if it has neither gaps nor overlaps."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def flat_values(tensor: Tensor) -> tuple[Tensor, int]:
    """All stored numbers of ``tensor`` as one dimension, and the number of implicit zeros. The order is arbitrary, so any dense layout is
    a view; only gaps and overlaps need a copy.
    """
    if (reason := refusal(tensor)) is not None:
        raise NotMeasurable(reason)
    tensor, zeros = tensor.detach(), 0
    if tensor.layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        tensor = _coalesced(tensor)
        zeros = tensor.numel() - tensor.values().numel()
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
        zeros *= 2
    if not tensor.is_contiguous():
        dense = in_order_of_memory(tensor)
        tensor = dense if dense.is_contiguous() else tensor
    flat = tensor if tensor.dim() == 1 and tensor.is_contiguous() else tensor.reshape(-1)
    return flat if type(flat) is Tensor else flat.as_subclass(Tensor), zeros


def flat_at_once(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """:func:`flat_values` of tensors of an accelerator, found without one call for each; None if any needs more than a view."""
    if on_accelerator(tensors) is None or any(map(Tensor.is_complex, tensors)) or not all(map(Tensor.is_contiguous, tensors)):
        return None
    return [tensor.detach().view(-1) for tensor in tensors]


def flat_pair(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of two tensors of equal shape as one dimension, in the same order whatever their layouts."""
    for tensor in (a, b):
        if (reason := refusal(tensor)) is not None:
            raise NotMeasurable(reason)
    if a.layout == b.layout == torch.strided and a.stride() == b.stride():
        return flat_values(a)[0], flat_values(b)[0]
    a, b = (_coalesced(x).detach().to_dense().reshape(-1) for x in (a, b))
    if a.is_complex():
        a, b = (torch.view_as_real(x.resolve_conj()).reshape(-1) for x in (a, b))
    return a, b


#: Between these the square of a float32 number is normal, so squares of neighbouring numbers differ.
SMALLEST_SQUARED, LARGEST_SQUARED = 2.0**-62, 2.0**63


@lru_cache(maxsize=64)
def threshold_of_squares(eps: float) -> float:
    """A limit for float32 squares that is exceeded exactly if ``|x| > eps``, for ``eps`` from :data:`SMALLEST_SQUARED` to
    :data:`LARGEST_SQUARED`.

    Neighbours differ by at least 2^-24 of their size, their squares by more than one unit in the last place, which rounding cannot close.
    """
    limit = torch.tensor(threshold(eps, torch.float32), dtype=torch.float32, device="cpu")
    return float(limit * limit)


@lru_cache(maxsize=64)
def threshold(eps: float, dtype: torch.dtype) -> float:
    """The largest number of ``dtype`` that is at most ``eps``: comparing with it equals comparing in real numbers."""
    if dtype != torch.float32:
        return eps
    rounded = torch.tensor(min(eps, torch.finfo(dtype).max), dtype=dtype, device="cpu")
    return float(rounded) if float(rounded) <= eps else float(torch.nextafter(rounded, -torch.ones_like(rounded)))


DEFAULT_EPS = 1e-8


class Request:
    """``columns``: needed ones; the others hold their identity, or values that cost nothing extra. COUNT and NONFINITE are always exact.
    An element counts as near zero when ``|x| <= eps``. ``inverse_scale``: a 0-d tensor that multiplies every element first, in float32 as
    ``GradScaler.unscale_`` does, or None.
    """

    def __init__(
        self, columns: frozenset[Column] = ALL_COLUMNS, eps: float = DEFAULT_EPS, inverse_scale: Tensor | None = None
    ) -> None:
        self.columns, self.eps, self.inverse_scale = columns, eps, inverse_scale
        self.squares, self.near_zero = Column.SQUARE_SUM in columns, Column.NEAR_ZERO in columns
        self.magnitudes = self.near_zero or Column.ABS_SUM in columns
        self.extremes = Column.MIN in columns or Column.MAX in columns
        # also if nothing else would show a non-finite element
        self.sums = Column.SUM in columns or not (self.squares or self.magnitudes or self.extremes)

    def zeros_by_squares(self, dtype: torch.dtype) -> bool:
        """Whether squares can count small magnitudes, so that no magnitudes are needed."""
        by_squares = self.near_zero and self.squares and Column.ABS_SUM not in self.columns
        return by_squares and dtype == torch.float32 and SMALLEST_SQUARED <= self.eps <= LARGEST_SQUARED

    def unscaled(self, values: Tensor) -> Tensor:
        """``values`` times the inverse scale: in float32 as ``GradScaler.unscale_`` does, float64 for wider input."""
        if self.inverse_scale is None:
            return values
        dtype = torch.float32 if values.dtype in NARROW else torch.float64
        return values.to(dtype) * self.inverse_scale.to(dtype)


@dataclass
class Batch:
    """Tensors to be measured together. A tensor that is not plain is flattened."""

    values: list[Tensor]
    minus: list[Tensor] | None  # tensors of the same shapes to subtract, or None
    wide: list[bool]  # for each tensor, whether float32 cannot hold its numbers
    zeros: dict[int, int]  # number of implicit zeros of sparse tensors, by position

    @classmethod
    def read(cls, tensors: Sequence[Tensor], minus: Sequence[Tensor] | None) -> Batch:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise NotMeasurable("inside a torch.func transform")
        plain = tensors if isinstance(tensors, PlainTensors) else as_plain(tensors)
        values = list(tensors) if plain is None else plain
        others = None if minus is None else list(minus)
        zeros: dict[int, int] = {}
        if plain is None and tensors and (flat := flat_at_once([*values, *(others or ())])) is not None:
            values, others = flat[: len(values)], flat[len(values) :] or None
        elif plain is None or (others is not None and as_plain(others) is None):
            for index, tensor in enumerate(values):
                if others is not None:
                    if not (is_plain(tensor) and is_plain(others[index])):
                        values[index], others[index] = flat_pair(tensor, others[index])
                elif not is_plain(tensor):
                    values[index], implied = flat_values(tensor)
                    if implied:
                        zeros[index] = implied
        wide = [*map(not_, map(NARROW.__contains__, map(dtype_of, values)))]
        if others is not None:
            wide = [one or other.dtype not in NARROW for one, other in zip(wide, others, strict=True)]
        return cls(values, others, wide, zeros)

    def take(self, members: Sequence[int], widened: bool = False) -> Batch:
        """Some of the tensors; ``widened`` measures all of them in float64."""
        return Batch(
            [self.values[i] for i in members],
            None if self.minus is None else [self.minus[i] for i in members],
            [widened or self.wide[i] for i in members],
            {place: self.zeros[i] for place, i in enumerate(members) if i in self.zeros},
        )

    def flat(self, index: int) -> tuple[Tensor, Tensor | None]:
        """One tensor flattened, with what to subtract."""
        if self.minus is None:
            return flat_values(self.values[index])[0], None
        return flat_pair(self.values[index], self.minus[index])

    def add_implicit_zeros(self, rows: Tensor) -> Tensor:
        """Count the implicit zeros of sparse tensors in ``rows`` ``[n, 8]``, in place."""
        for index, count in self.zeros.items():
            rows[index, [Column.COUNT, Column.NEAR_ZERO]] += count
            rows[index, Column.MIN].clamp_(max=0)
            rows[index, Column.MAX].clamp_(min=0)
        return rows
