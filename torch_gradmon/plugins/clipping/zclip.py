"""ZClip: an adaptive limit for the norm of all gradients together."""

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


class ZClip(AdaptiveClip):
    """Clips the total L2 norm if it is a spike: more than ``threshold`` standard deviations above its moving average.

    With the norm x, its mean m and standard deviation s so far, and ``z = (x - m) / (s + eps)``, a spike is scaled to
    ``m + threshold^2 / z * s``: the larger the spike, the closer the result to the mean. Other gradients do not change. The first
    ``warmup`` norms, unclipped, give the mean and the population variance. After them x, clipped if it is a spike, updates the mean
    and then the variance around the new mean. A norm that is NaN or infinite changes neither the gradients nor the state.

    The state only includes the clipped norm of a spike, so a norm that doubles permanently is clipped in many steps.

    Args:
        threshold: standard deviations.
        alpha: weight of the past in mean and variance.
        warmup: the number of norms before the first one may be clipped.
        max_norm: an additional limit for the norm, from the first step on; None for none. It applies to the gradients, not to
            the state.
        eps: added to the standard deviation in z. It has the unit of a gradient norm.

    Raises:
        TypeError, ValueError: an argument is out of its range.

    Source: Kumar et al. 2025, ZClip (arXiv 2504.02507), with its 2.5 and 0.97. 25, 1e-6, ``max_norm`` throughout and learning before
    it applies are those of the authors' code, whose README has None for ``max_norm`` and whose signature has 1.0; None is our
    choice. So is the omission of norms that are not finite: a single NaN would disable the clip permanently.
    """

    def __init__(
        self, threshold: float = 2.5, alpha: float = 0.97, warmup: int = 25, max_norm: float | None = None, eps: float = 1e-6
    ) -> None:
        self.threshold, self.eps = positive("threshold", threshold), positive("eps", eps)
        self.max_norm = None if max_norm is None else positive("max_norm", max_norm)
        share("alpha", alpha)
        positive_int("warmup", warmup)
        self.alpha, self.warmup = float(alpha), warmup
        self._state = torch.zeros(3, dtype=torch.float64, device="cpu")  # norms learned, their mean, their variance

    @torch.no_grad()
    def factors(self, rows: Tensor, names: Sequence[str]) -> tuple[Tensor, list[DeviceValue]]:
        """See :meth:`AdaptiveClip.factors`: one for all, and ``clip_limit``, the norm above which this step is clipped."""
        norm = rows[:, Column.SQUARE_SUM].sum().sqrt()
        state = self._state.to(norm)
        count, mean, variance = state.unbind()
        spread, judges = variance.sqrt(), count >= self.warmup
        learns = norm.isfinite() & (rows[:, Column.COUNT].sum() > 0)
        z = (norm - mean) / (spread + self.eps)
        learned = torch.where(judges & (z > self.threshold), mean + self.threshold**2 / z * spread, norm)
        weight = torch.where(judges, 1 - self.alpha, 1 / (count + 1))
        before = learned - mean
        mean = mean + weight * before
        after = learned - mean
        # in the warm-up Welford's recurrence, so that it ends with the variance of all its norms
        variance = (1 - weight) * variance + weight * after * torch.where(judges, after, before)
        limit, allowed = state[1] + self.threshold * (spread + self.eps), learned
        there = judges
        if self.max_norm is not None:
            limit = torch.where(judges, limit, torch.inf).clamp(max=self.max_norm)
            allowed, there = learned.clamp(max=self.max_norm), torch.ones_like(judges)
        self._state = torch.where(learns, torch.stack([count + 1, mean, variance]), state)
        return torch.where(learns & (allowed < norm), allowed / norm, 1.0), [DeviceValue("clip_limit", limit, there)]

    def kept(self) -> Tensor:
        """See :meth:`AdaptiveClip.kept`."""
        return self._state  # it is replaced, never written to

    def put_back(self, kept: Tensor) -> None:
        """See :meth:`AdaptiveClip.put_back`."""
        self._state = kept

    def state_dict(self) -> dict[str, Any]:
        """How many norms were learned, their mean and variance. Synchronises with the device."""
        count, mean, variance = self._state.tolist()
        return {"count": int(count), "mean": mean, "variance": variance}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`. See :meth:`AdaptiveClip.load_state_dict`."""
        values = [float(state[name]) for name in ("count", "mean", "variance")]
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise ValueError(f"count, mean and variance must be finite and not negative, got {display(values)}")
        self._state = torch.tensor(values, dtype=torch.float64, device="cpu")
