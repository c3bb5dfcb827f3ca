"""AdaGC: an adaptive limit for the gradient of each parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.errors import display
from ...core.moments import Column
from ...core.validation import positive, positive_int, share
from .adaptive import AdaptiveClip, DeviceValue


class AdaGC(AdaptiveClip):
    """Clips the gradient of each parameter separately, at ``ratio`` times the moving average of its clipped norms.

    During the first ``warmup`` norms of a parameter its gradient is scaled as by a clip of the total norm at ``max_norm``, and the
    smallest norm after that scaling is the initial average g. From then on a norm x above ``ratio * g`` is scaled to it, and
    ``g = beta * g + (1 - beta) * min(x, ratio * g)``. A norm that is NaN, infinite or zero changes neither the gradient nor the
    state of its parameter. A step in which the parameter has no gradient changes nothing either.

    Args:
        ratio: above 1; otherwise no average could grow.
        beta: weight of the past in the average.
        warmup: the number of norms of a parameter before it is clipped separately.
        max_norm: the limit of the total norm during the warm-up.

    Raises:
        TypeError, ValueError: an argument is out of its range.

    Source: Wang et al. 2025, AdaGC (arXiv 2502.11034). 1.04, 0.99, 100 and 1.0 are those of the authors' code and its script; the
    package pytorch_optimizer has 1.05 and 0.98, which may be the paper's. Ours: no epsilon, so that the norm is the limit itself;
    a warm-up counted for each parameter, which is the same where all have a gradient in every step; the total of the finite norms
    in the warm-up; and no learning from zero, from which an average could never grow: the first gradients of half of all matrices
    are zero where the others start at zero, as in LoRA.
    """

    def __init__(self, ratio: float = 1.04, beta: float = 0.99, warmup: int = 100, max_norm: float = 1.0) -> None:
        self.ratio, self.max_norm = positive("ratio", ratio, above=1.0), positive("max_norm", max_norm)
        share("beta", beta)
        positive_int("warmup", warmup)
        self.beta, self.warmup = float(beta), warmup
        self._row: dict[str, int] = {}
        self._state = _unlearned(0)
        self._asked: tuple[tuple[str, ...], Tensor | None] | None = None

    @torch.no_grad()
    def factors(self, rows: Tensor, names: Sequence[str]) -> tuple[Tensor, list[DeviceValue]]:
        """See :meth:`AdaptiveClip.factors`: one for each parameter, and ``clipped_parameters``, how many were scaled down."""
        squares = rows[:, Column.SQUARE_SUM]
        norms, finite = squares.sqrt(), squares.isfinite()
        places = self._places(names, rows)
        state = self._state if places is None else self._state[places]
        level, count = state.unbind(1)
        learns, judges = finite & (norms > 0), count >= self.warmup
        total = torch.where(finite, squares, 0.0).sum().sqrt()
        # where the level is still infinite nothing is judged; a total of zero clips nothing
        factors = torch.where(judges, self.ratio * level / norms, self.max_norm / total).clamp(max=1.0)
        factors = torch.where(learns, factors, 1.0)
        clipped = norms * factors
        level = torch.where(judges, self.beta * level + (1 - self.beta) * clipped, torch.minimum(level, clipped))
        state = torch.where(learns.unsqueeze(1), torch.stack([level, count + 1], dim=1), state)
        if places is None:
            self._state = state
        else:
            self._state[places] = state
        return factors, [DeviceValue("clipped_parameters", (factors < 1).sum())]

    def _places(self, names: Sequence[str], like: Tensor) -> Tensor | None:
        """The rows of these parameters in the state; None for all rows in order. Adds rows for new parameters."""
        new = [name for name in names if name not in self._row]
        for name in new:
            self._row[name] = len(self._row)
        self._state = torch.cat([self._state.to(like), _unlearned(len(new)).to(like)]) if new else self._state.to(like)
        asked = tuple(names)
        if self._asked is None or self._asked[0] != asked or new:
            rows = [self._row[name] for name in names]
            in_order = rows == list(range(len(self._row)))
            self._asked = asked, None if in_order else torch.tensor(rows, dtype=torch.int64, device="cpu")
        places = self._asked[1]
        if places is not None and places.device != like.device:
            places = places.to(like.device, non_blocking=True)
            self._asked = asked, places
        return places

    def kept(self) -> tuple[dict[str, int], Tensor]:
        """See :meth:`AdaptiveClip.kept`."""
        return dict(self._row), self._state.clone()

    def put_back(self, kept: tuple[dict[str, int], Tensor]) -> None:
        """See :meth:`AdaptiveClip.put_back`."""
        self._row, self._state, self._asked = *kept, None

    def state_dict(self) -> dict[str, Any]:
        """The average of each parameter and the number of norms in it. Synchronises with the device."""
        rows = self._state.tolist()
        found = {name: rows[row] for name, row in self._row.items()}
        return {"norms": {name: [level, int(count)] for name, (level, count) in found.items() if count}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`. See :meth:`AdaptiveClip.load_state_dict`."""
        norms = {str(name): [float(level), float(count)] for name, (level, count) in dict(state["norms"]).items()}
        if not all(math.isfinite(level) and level >= 0 and count >= 1 for level, count in norms.values()):
            raise ValueError(f"norms must be finite and not negative, with a count of at least one, got {display(norms)}")
        self._row = {name: row for row, name in enumerate(norms)}
        self._state = torch.tensor(list(norms.values()), dtype=torch.float64, device="cpu").reshape(-1, 2)
        self._asked = None


def _unlearned(count: int) -> Tensor:
    """Initial rows of AdaGC's state, ``[count, 2]``: the average, and the number of norms in it."""
    return torch.tensor([[math.inf, 0.0]], dtype=torch.float64, device="cpu").repeat(count, 1)
