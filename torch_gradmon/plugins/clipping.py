"""Clipping by a limit that follows the gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.errors import display
from ..core.moments import Column
from ..core.validation import one_of, positive, positive_int, share
from ..step.active_step import ActiveStep
from ..step.plugin import Plugin

# --- Clips whose limit adapts to the gradients ---


class DeviceValue(NamedTuple):
    """A 0-d value of the step and its name under ``gradmon/``. ``there``: whether it exists; None if it adds up over calls."""

    name: str
    value: Tensor
    there: Tensor | None = None


class AdaptiveClip:
    """The alternative to a number in ``ModuleMonitor.clip_grad_norm_(max_norm=...)``."""

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({settings})"

    def factors(self, rows: Tensor, names: Sequence[str]) -> tuple[Tensor, list[DeviceValue]]:
        """Factors for the gradients, at most 1. Updates the state. Does not synchronise.

        Args:
            rows: statistics of the gradients, ``[n, 8]``. Only counts and sums of squares are used. A row is zero where a
                parameter has no gradient.
            names: names of the parameters.

        Returns:
            One 0-d factor for all gradients or factors ``[n]``, and the values to report with the step.
        """
        raise NotImplementedError

    def kept(self) -> Any:
        """The state so far, for :meth:`put_back`. Does not synchronise."""
        return {name: value for name, value in vars(self).items() if name.startswith("_")}  # which are replaced, never written to

    def put_back(self, kept: Any) -> None:
        """Restore the state ``kept`` after a skipped step."""
        vars(self).update(kept)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers. Synchronises with the device."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`, bit for bit.

        Raises:
            KeyError, TypeError, ValueError: ``state`` is invalid; nothing is loaded.
        """
        raise NotImplementedError


# --- AdaGC: an adaptive limit for the gradient of each parameter ---


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
        self._state = state if places is None else self._state.index_put((places,), state)
        return factors, [DeviceValue("clipped_parameters", (factors < 1).sum())]

    def _places(self, names: Sequence[str], like: Tensor) -> Tensor | None:
        """The rows of these parameters in the state; None for all rows in order. Adds rows for new parameters."""
        new = [name for name in names if name not in self._row]
        if new:
            self._row = {**self._row, **{name: len(self._row) + place for place, name in enumerate(new)}}
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


# --- ZClip: an adaptive limit for the norm of all gradients together ---


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


#: The names that ``max_norm`` accepts.
_BY_NAME: dict[str, type[AdaptiveClip]] = {"zclip": ZClip, "adagc": AdaGC}


class AdaptiveClips(Plugin):
    """Keeps clips by name for as long as a monitor lives. ``may_skip``: what was learned in a step that is skipped has to be forgotten."""

    name = "clipping"

    def __init__(self, may_skip: bool) -> None:
        self._may_skip = may_skip
        self._named: dict[str, AdaptiveClip] = {}
        self._step: ActiveStep | None = None  # in which those learned that are in _before
        self._before: dict[int, tuple[AdaptiveClip, Any]] = {}

    def named(self, name: str) -> AdaptiveClip:
        """The clip of that name.

        Raises:
            ValueError: there is none of that name.
        """
        if name not in self._named:
            self._named[name] = _new(name)
        return self._named[name]

    def learns(self, adaptive: AdaptiveClip, step: ActiveStep | None) -> None:
        """A clip is about to learn from the step in flight; what was learned in earlier ones stays."""
        if self._may_skip:
            if step is not self._step:
                self._step, self._before = step, {}
            self._before.setdefault(id(adaptive), (adaptive, adaptive.kept()))

    def on_skip(self, step: ActiveStep) -> None:
        """The step in flight is skipped: forget what was learned from it."""
        for adaptive, kept in self._before.values() if step is self._step else ():
            adaptive.put_back(kept)
        self._step, self._before = None, {}

    def state_dict(self) -> dict[str, Any]:
        """What those by name have learned. Synchronises with the device."""
        return {name: clip.state_dict() for name, clip in self._named.items()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """The clips by name are those of ``states``, and no others; where that fails nothing is changed.

        Raises:
            KeyError, TypeError, ValueError: no such states.
        """
        clips = {name: _new(name) for name in states}
        for name, state in states.items():
            clips[name].load_state_dict(state)
        self._named = clips


def _new(name: str) -> AdaptiveClip:
    one_of("max_norm", name, tuple(_BY_NAME))
    return _BY_NAME[name]()
