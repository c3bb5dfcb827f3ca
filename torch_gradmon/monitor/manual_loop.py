"""Measuring at the moment when somebody says so, beside or instead of what the hooks see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..capture.grad_scale import is_unscaled, reciprocal, scale_of
from ..core.fence import fenced
from ..core.keys import SUMMARY, Key
from ..core.moments import identity
from ..plugins.clipping.adaptive import Told
from ..plugins.clipping.named import Clips
from ..statistics.norm import NORM_COLUMNS, rows_of
from ..statistics.tensor_access import accumulator_dtype
from ..step.ranks import is_dtensor, is_sharded
from .session import Session


class Hand:
    """What a loop written by hand asks a session to measure."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.guard = session.guard
        self._measured: set[int] = set()  # positions of the parameters whose gradients were just measured before clipping

    @property
    def clips(self) -> Clips:
        """Adaptive clips by name."""
        return self.session.clips

    @fenced
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

    @fenced
    def measure_before_clip(self, parameters: Iterable[Tensor]) -> None:
        """Measure these parameters' gradients before they are clipped: those that an optimizer has yet to use, and no clip has changed."""
        if self.session.planner.inventory is None or not self.session.takes_values:
            return
        positions, follower = self.session.planner.inventory.positions(parameters), self.session.follower
        positions = self.session.gradients.not_clipped(positions if follower is None else follower.to_step(positions))
        self._measured = set(positions)
        self._measure_gradients(True, self.session.gradients.there(positions))  # of one that is gone there is nothing to clip

    @fenced
    def was_clipped(self, parameters: Iterable[Tensor]) -> None:
        """These parameters' gradients have just been clipped."""
        if self.session.takes_values and self.session.planner.inventory is not None:
            self.session.gradients.clipped(self.session.planner.inventory.positions(parameters))

    def names_of(self, parameters: Sequence[Tensor]) -> list[str]:
        """The canonical name of each; one that is not of the watched model is called by its place."""
        self.session.planner.refresh()
        inventory, places = self.session.planner.inventory, self._positions()
        return [
            inventory.names[places[id(p)]] if inventory is not None and id(p) in places else f"parameters[{index}]"
            for index, p in enumerate(parameters)
        ]

    def _positions(self) -> dict[int, int]:
        inventory = self.session.planner.inventory
        return {} if inventory is None else {id(reference()): place for place, reference in enumerate(inventory.references)}

    def spread_among(self, parameters: Sequence[Tensor]) -> list[int]:
        """Places of those of which each rank has a part, or another one. All ranks ask this together.

        Raises:
            ValueError: there are such, and not every rank is known to come to the exchange of what each has.
        """
        inventory, ranks = self.session.planner.inventory, self.session.measurer.ranks
        distinct = set() if inventory is None or ranks.count == 1 else inventory.spread
        names = self.names_of(parameters) if distinct else []
        found = [i for i, p in enumerate(parameters) if is_sharded(p) or (distinct and names[i] in distinct)]
        if found and ranks.count == 1:
            raise ValueError(
                "the exact norm of gradients that are spread over ranks takes a monitor of these ranks, and process_group= names this "
                "one alone; name them all, or use a number for max_norm and exact=False, which clips as torch does"
            )
        if ranks.count > 1 and (found or any(map(is_dtensor, parameters))) and not self.session.together.ranks_take_part():
            raise ValueError(
                "the exact norm of gradients that are spread over ranks takes a monitor of the same model and metrics on every rank; make "
                "one on each of them, or use a number for max_norm and exact=False, which clips as torch does"
            )
        return found

    def rows(self, parameters: Sequence[Tensor], norm_type: float, spread: Sequence[int]) -> Tensor:
        """Rows ``[len(parameters), 8]`` of the gradients with the ``NORM_COLUMNS`` of this order, on the first one's device; those of no
        elements where there is none. From what :meth:`measure_before_clip` has just measured, where it has all.

        Where any are ``spread`` a collective, after which each rank has the rows of the whole.

        Raises:
            ValueError: a gradient that cannot be measured.
        """
        ranks, apart = self.session.measurer.ranks, set(spread)
        gradients = {place: p.grad for place, p in enumerate(parameters) if p.grad is not None}
        found = self._rows_now(parameters, norm_type) if gradients else None
        if found is None:
            parts = [ranks.own_part(gradient, place in apart) for place, gradient in gradients.items()]
            found = rows_of(parts, norm_type, self.session.measurer.built_in)
        if len(gradients) < len(parameters):
            device = next(iter(gradients.values())).device if gradients else parameters[0].device
            known, found = found, identity(len(parameters), device, accumulator_dtype(device))
            if gradients:
                found[list(gradients)] = known
        if spread:
            places = list(spread)
            merged = ranks.merged(found[places].to(ranks.device, torch.float64), NORM_COLUMNS[norm_type])
            found[places] = merged.to(found)
        return found

    @fenced
    def _rows_now(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor | None:
        if not self.session.takes_values:
            return None
        places = self._positions()
        positions = [places[id(p)] for p in parameters if id(p) in places]
        if len(set(positions)) != len(parameters) or not self._measured.issuperset(positions):
            return None  # some are not of the watched model, or named twice, which torch counts twice; or were measured earlier
        return self.session.gradients.rows_now(positions, NORM_COLUMNS[norm_type])

    @fenced
    def tell(self, told: Sequence[Told]) -> None:
        """Whole-model values of the step in flight, which stay on the device until it is over."""
        self.session.tell({Key(SUMMARY, "", one.name): one for one in told})

    def measure_after_clip(self) -> None:
        """Measure the clipped gradients, where no optimizer's hook will."""
        if self.session.follower is None:
            self.measure_gradients(False)

    @fenced
    def measure_parameters(self) -> None:
        """Measure the parameters as they are now."""
        if self.session.takes_values and self.session.planner.inventory is not None:
            self.session.parameters.measure(range(len(self.session.planner.inventory.names)))
