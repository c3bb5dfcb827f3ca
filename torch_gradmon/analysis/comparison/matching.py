"""Two sheets of values: which columns correspond, how much their values differ, and whether that exceeds the tolerance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...core import keys as n
from ...core.keys import Key
from ...runs.reader import COUNT, ValueMatrix
from .rules import Rules

#: A value that may be close to zero because it is a difference, or a count of few, is compared relative to a share of another
#: metric.
_BESIDE = {"mean": ("rms", 1.0), "std": ("rms", 1e-2), "zeros": (COUNT, 1.0), "grad_mean": ("grad_std", 1.0)}
#: Shares, cosines, scores, entropies and logits are compared relative to 1.
_OF_UNIT_ONE = frozenset({"sparsity", "grad_sparsity", "grad_momentum_cosine", "clipped_share", "spike_score"})
_SOURCES_OF_UNIT_ONE = frozenset({*n.ATTENTION_SOURCES.values(), n.SPIKE_SCORE})
#: Metrics of near-zero elements. Rounding may move this many of them across the threshold.
_OF_ELEMENTS, _STRAY = ("sparsity", "zeros"), 2.0


class _Scales(NamedTuple):
    """Columns that are compared relative to more than their own size.

    Attributes:
        columns: their numbers, among those compared.
        left, right: the columns of the two sheets that give the scale.
        share: the factor of that scale; 0 for none.
        unit: the smallest scale.
    """

    columns: Tensor
    left: Tensor
    right: Tensor
    share: Tensor
    unit: Tensor

    def of(self, left: ValueMatrix, right: ValueMatrix) -> Tensor:
        """The scales ``[steps, columns]``."""
        size = torch.maximum(left.values[:, self.left].abs(), right.values[:, self.right].abs())
        return torch.maximum(size.nan_to_num_(0.0, posinf=0.0) * self.share, self.unit)


@dataclass(frozen=True)
class Pairing:
    """Which columns of two sheets are compared, and how.

    Attributes:
        keys: in the first run.
        others: the corresponding keys in the second.
        left, right: the numbers of the columns.
        rtol: tolerance of each.
        floors: the scales of those that may be close to zero.
        elements: those that count single elements, and the number of all elements.
    """

    keys: tuple[Key, ...]
    others: tuple[Key, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    rtol: Tensor
    floors: _Scales
    elements: _Scales

    @classmethod
    def of(cls, left: Sequence[Key], right: Sequence[Key], rules: Rules) -> Pairing:
        """All columns that both sheets have and ``rules`` compare."""
        places = {key: column for column, key in enumerate(left)}, {key: column for column, key in enumerate(right)}
        found = [
            (key, other, rtol)
            for key in left
            if (other := rules.renamed(key)) in places[1] and (rtol := rules.tolerance(key, other)) is not None
        ]
        keys, others = tuple(key for key, _, _ in found), tuple(other for _, other, _ in found)

        def measured(wanted: Mapping[int, tuple[str, float, float]]) -> _Scales:
            rows = []
            for row, (metric, share, unit) in wanted.items():
                at = [place.get(key._replace(metric=metric)) for place, key in zip(places, (keys[row], others[row]), strict=True)]
                rows.append((row, at[0] or 0, at[1] or 0, 0.0 if None in at else share, unit))
            columns = list(zip(*rows, strict=True)) if rows else [()] * 5
            return _Scales(*map(_whole, columns[:3]), *map(_real, columns[3:]))

        return cls(
            keys,
            others,
            tuple(places[0][key] for key in keys),
            tuple(places[1][other] for other in others),
            _real([rtol for _, _, rtol in found]),
            measured({row: floor for row, key in enumerate(keys) if any((floor := _floor(key))[1:])}),
            measured({row: (COUNT, 1.0, 0.0) for row, key in enumerate(keys) if key.metric in _OF_ELEMENTS}),
        )

    def stray(self, left: ValueMatrix, right: ValueMatrix) -> Tensor:
        """The difference that rounding allows in metrics of single elements; 0 if equal bits are required."""
        columns = self.elements.columns
        whole = torch.tensor([self.keys[column].metric == "zeros" for column in columns.tolist()], dtype=torch.bool, device="cpu")
        per_element = torch.where(whole, 1.0, 1.0 / self.elements.of(left, right).clamp(min=1.0))
        return torch.where(self.rtol[columns] > 0, _STRAY * per_element, 0.0)


@dataclass(frozen=True)
class SheetComparison:
    """Two sheets compared; all tensors are ``[steps, pairs of columns]``.

    Attributes:
        pairing: of the columns.
        left, right: the values.
        has_left, has_right: where there is a value.
        relative: difference relative to the larger value; infinite where one is not finite.
        differs: where there is a difference.
        diverges: where it exceeds the tolerance.
    """

    pairing: Pairing
    left: Tensor
    right: Tensor
    has_left: Tensor
    has_right: Tensor
    relative: Tensor
    differs: Tensor
    diverges: Tensor


def compare(left: ValueMatrix, right: ValueMatrix, pairing: Pairing, atol: float) -> SheetComparison:
    """Compare two sheets of the same steps. NaN equals NaN, and an infinite value equals itself."""
    left_part, right_part = left.columns(pairing.left), right.columns(pairing.right)
    a, b, has_a, has_b = left_part.values, right_part.values, left_part.there, right_part.there
    gap = (a - b).abs_()  # NaN where either is NaN, and between infinities of one sign
    scale = torch.maximum(a.abs(), b.abs())
    scale[:, pairing.floors.columns] = torch.maximum(scale[:, pairing.floors.columns], pairing.floors.of(left, right))
    allowed = scale * pairing.rtol + atol
    allowed[:, pairing.elements.columns] += pairing.stray(left, right)
    both = has_a & has_b
    differs = both & (gap != 0)
    diverges = differs & ~(gap <= allowed)
    relative = torch.where(differs, gap.div_(scale), 0.0)
    if not bool(torch.where(both, scale, 0.0).isfinite().all()):
        equal = (a == b) | (a.isnan() & b.isnan())
        is_number = a.isfinite() & b.isfinite()
        differs = both & ~equal
        diverges = differs & (diverges | ~is_number)
        relative = torch.where(differs, torch.where(is_number, relative, torch.inf), 0.0)
    return SheetComparison(pairing, a, b, has_a, has_b, relative, differs, diverges)


def _floor(key: Key) -> tuple[str, float, float]:
    """The metric that gives the scale, its share, and the smallest scale; zeros without any."""
    is_of_one = key.metric in _OF_UNIT_ONE or key.source in _SOURCES_OF_UNIT_ONE
    return (*_BESIDE.get(key.metric, ("", 0.0)), 1.0 if is_of_one else 0.0)


def _whole(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _real(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")
