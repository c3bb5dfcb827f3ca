"""Measuring at the moment when somebody says so, beside or instead of what the hooks see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .capture.scaling import is_unscaled, reciprocal, scale_of
from .distributed import is_dtensor
from .guard import guarded
from .session import Session
from .statistics.norm import NORM_COLUMNS, exact_norm, norm_of_rows


class Hand:
    """What a loop written by hand asks a session to measure."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.guard = session.guard

    @guarded
    def measure_gradients(self, before_clip: bool) -> None:
        """Measure the gradients as they are now."""
        if self.session.planner.inventory is not None:
            self._measure_gradients(before_clip, list(range(len(self.session.planner.inventory.names))))

    def _measure_gradients(self, before_clip: bool, positions: list[int]) -> None:
        if not self.session.takes_values:
            return
        measure = self.session.gradients.before_clip if before_clip else self.session.gradients.after_clip
        for some, inverse_scale in self._by_scale(positions):
            measure(some, inverse_scale)

    def _by_scale(self, positions: list[int]) -> list[tuple[list[int], Tensor | None]]:
        return [(positions, self._inverse_scale())] if self.session.follower is None else self.session.follower.scales(positions)

    def _inverse_scale(self) -> Tensor | None:
        scale = None if is_unscaled(self.session.scaler, None) else scale_of(self.session.scaler)
        return None if scale is None else reciprocal(scale)

    @guarded
    def measure_before_clip(self, parameters: Iterable[Tensor]) -> None:
        """Measure these parameters' gradients before they are clipped, where that was not done at the end of backward."""
        if self.session.takes_values and self.session.planner.inventory is not None:
            positions = self.session.planner.inventory.positions(parameters)
            parts = self._by_scale(positions)
            self._measure_gradients(True, [p for some, scale in parts for p in self.session.gradients.not_measured(some, scale)])

    def are_spread(self, parameters: Sequence[Tensor]) -> bool:
        """Whether of any of these parameters each rank has a part, or another one."""
        inventory, several = self.session.planner.inventory, self.session.measurer.ranks.count > 1
        known = [] if inventory is None else [inventory.names[position] for position in inventory.positions(parameters)]
        return any(map(is_dtensor, parameters)) or (several and inventory is not None and not inventory.spread.isdisjoint(known))

    def exact_norm(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """Total norm of these parameters' gradients: from what :meth:`measure_before_clip` has just measured, where it has all.

        Raises:
            ValueError: a gradient that cannot be measured.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        rows = self._rows_now(parameters, norm_type)
        if rows is not None:
            return norm_of_rows(rows, norm_type, any(g.dtype in (torch.float64, torch.complex128) for g in gradients))
        return exact_norm(gradients, norm_type, self.session.measurer.built_in)

    @guarded
    def _rows_now(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor | None:
        inventory = self.session.planner.inventory
        if inventory is None or not self.session.takes_values:
            return None
        positions = inventory.positions(parameters)
        if len(positions) != len(parameters):
            return None  # some are not of the watched model, or named twice, which torch counts twice
        return self.session.gradients.rows_now(positions, NORM_COLUMNS[norm_type])

    def measure_after_clip(self) -> None:
        """Measure the clipped gradients, where no optimizer's hook will."""
        if self.session.follower is None:
            self.measure_gradients(False)

    @guarded
    def measure_parameters(self) -> None:
        """Measure the parameters as they are now."""
        if self.session.takes_values and self.session.planner.inventory is not None:
            self.session.parameters.measure(range(len(self.session.planner.inventory.names)))
