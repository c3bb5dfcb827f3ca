"""Clipping by a limit that follows the gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.errors import display
from ..core.moments import Column
from ..core.torch_modes import capture_check
from ..core.validation import one_of, positive, positive_int, share
from ..statistics.histogram import NORM_COLUMNS, norm_of_rows
from ..step.active_step import ActiveStep
from ..step.plugin import Plugin
from ..step.ranks import is_dtensor, local_part

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
        raise NotImplementedError

    def put_back(self, kept: Any) -> None:
        """Restore the state ``kept`` after a skipped step."""
        raise NotImplementedError

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


# --- named ---


#: The names that ``max_norm`` accepts.
_BY_NAME: dict[str, type[AdaptiveClip]] = {"zclip": ZClip, "adagc": AdaGC}


class AdaptiveClips(Plugin):
    """Keeps clips by name for as long as a monitor lives.

    Args:
        may_skip: steps may be skipped, and what was learned in them has to be forgotten.
    """

    name = "clipping"

    def __init__(self, may_skip: bool) -> None:
        self._may_skip = may_skip
        self._named: dict[str, AdaptiveClip] = {}
        self._before: dict[int, tuple[AdaptiveClip, Any]] = {}

    def named(self, name: str) -> AdaptiveClip:
        """The clip of that name.

        Raises:
            ValueError: there is none of that name.
        """
        if name not in self._named:
            self._named[name] = _new(name)
        return self._named[name]

    def learns(self, adaptive: AdaptiveClip) -> None:
        """A clip is about to learn from the step in flight."""
        if self._may_skip and id(adaptive) not in self._before:
            self._before[id(adaptive)] = adaptive, adaptive.kept()

    def on_step_open(self, step: ActiveStep) -> None:
        """What was learned so far stays."""
        self._before = {}

    def on_skip(self, step: ActiveStep) -> None:
        """The step in flight is skipped: forget what was learned from it."""
        for adaptive, kept in self._before.values():
            adaptive.put_back(kept)
        self._before = {}

    def state_dict(self) -> dict[str, Any]:
        """What those by name have learned, as plain numbers. Synchronises with the device."""
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


# --- Gradient clipping that measures on the way ---


_NARROW = frozenset({torch.bfloat16, torch.float16})


class GradientRows(Protocol):
    """What measures for a clip, and what it knows of the parameters."""

    @property
    def clips(self) -> AdaptiveClips:
        """Adaptive clips by name."""

    def measure_before_clip(self, parameters: Iterable[Tensor]) -> None:
        """Measure these parameters' gradients before they are clipped."""

    def was_clipped(self, parameters: Iterable[Tensor]) -> None:
        """These parameters' gradients have just been clipped."""

    def measure_after_clip(self) -> None:
        """Measure the clipped gradients if no optimizer has a hook."""

    def names_of(self, parameters: Sequence[Tensor]) -> list[str]:
        """The canonical name of each."""

    def spread_among(self, parameters: Sequence[Tensor]) -> list[int]:
        """Indices of the parameters that differ between ranks."""

    def rows(self, parameters: Sequence[Tensor], norm_type: float, spread: Sequence[int]) -> Tensor:
        """Rows ``[len(parameters), 8]`` of the gradients."""

    def put(self, values: Sequence[DeviceValue]) -> None:
        """Add whole-model values to the current step."""


def clip(
    measures: GradientRows,
    parameters: Sequence[Tensor],
    max_norm: float | str | AdaptiveClip,
    norm_type: float,
    error_if_nonfinite: bool,
    exact: bool | None,
) -> Tensor:
    """Measure the gradients of ``parameters`` before and after clipping them, as torch does or adaptively; see ``ModuleMonitor``."""
    norm_type = float(norm_type)
    if (exact or isinstance(max_norm, (str, AdaptiveClip))) and (check := capture_check()) is not None and check():
        how = "exact=True" if exact else "an adaptive clip"
        raise ValueError(
            f"{how} cannot be captured into a graph; use a number for max_norm and exact=False, or clip outside of it"
        )
    if isinstance(max_norm, str):
        max_norm = measures.clips.named(max_norm)
    if isinstance(max_norm, AdaptiveClip):
        if norm_type != 2.0 or exact is False:
            given = "exact=False" if exact is False else f"norm_type={norm_type}"
            raise ValueError(f"an adaptive clip goes by the exact norm of order 2, got {given}; leave it out")
        total = _clip_adaptively(measures, list(dict.fromkeys(parameters)), max_norm, error_if_nonfinite)
    else:
        limit = _number(max_norm)
        total = (_clip_exactly if exact else _clip_as_torch)(measures, parameters, limit, norm_type, error_if_nonfinite)
    measures.was_clipped(parameters)
    measures.measure_after_clip()
    return total


def _number(max_norm: object) -> float:
    try:
        return float(max_norm)  # type: ignore[arg-type]  # a tensor with one element is one, too
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f'max_norm is a number, "zclip", "adagc", a ZClip or an AdaGC, got {display(max_norm)}; parameters are given by name: '
            "clip_grad_norm_(1.0, parameters=model.parameters())"
        ) from None


def _clip_as_torch(
    measures: GradientRows, parameters: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    measures.measure_before_clip(parameters)
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)


def _clip_exactly(
    measures: GradientRows, parameters: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    if norm_type not in NORM_COLUMNS:
        raise ValueError(f"exact=True knows the norms 1, 2 and inf, got norm_type={norm_type}; use exact=False for others")
    if norm_type != 2.0 and any(p.is_complex() for p in parameters):
        raise ValueError(
            f"exact=True knows the norm of order {norm_type} of real gradients only; use exact=False for complex ones"
        )
    _, total = _measured(measures, parameters, norm_type, error_if_nonfinite)
    if not any(map(is_dtensor, parameters)):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    else:  # torch multiplies a DTensor by nothing but a DTensor
        _scale(parameters, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


def _clip_adaptively(
    measures: GradientRows, parameters: Sequence[Tensor], adaptive: AdaptiveClip, error_if_nonfinite: bool
) -> Tensor:
    rows, total = _measured(measures, parameters, 2.0, error_if_nonfinite)
    if len(rows):
        measures.clips.learns(adaptive)
        factors, values = adaptive.factors(rows, measures.names_of(parameters))
        _scale(parameters, factors)
        measures.put(values)
    return total


def _measured(
    measures: GradientRows, parameters: Sequence[Tensor], norm_type: float, error_if_nonfinite: bool
) -> tuple[Tensor, Tensor]:
    """A row for each parameter's gradient, none where no gradient is anywhere, and the total norm."""
    spread = measures.spread_among(parameters)
    measures.measure_before_clip(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients and not spread:
        return torch.empty(0, 8, device="cpu"), torch.tensor(0.0, device="cpu")
    rows = measures.rows(parameters, norm_type, spread)
    total = norm_of_rows(rows, norm_type, any(g.dtype in (torch.float64, torch.complex128) for g in gradients))
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(f"the total norm of order {norm_type} of the gradients is {float(total)}, so it cannot clip them")
    return rows, total


@torch.no_grad()
def _scale(parameters: Sequence[Tensor], factors: Tensor) -> None:
    """Multiply the gradients in place by ``factors``, 0-d for all of them or one for each; of DTensors what is on this rank."""
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[int]]] = {}
    for place, parameter in enumerate(parameters):
        if parameter.grad is not None:
            part = local_part(parameter.grad)
            parts, places = groups.setdefault((part.device, part.dtype), ([], []))
            parts.append(part)
            places.append(place)
    for (device, dtype), (parts, places) in groups.items():
        here = factors.to(device, torch.promote_types(dtype.to_real(), torch.float32))
        each = [here] * len(parts) if here.dim() == 0 else [here[place] for place in places]
        if dtype in _NARROW:  # on a GPU the factor would be rounded to so few bits first
            for part, factor in zip(parts, each, strict=True):
                part.copy_(part.float() * factor)
        elif any(part.layout != torch.strided for part in parts):
            for part, factor in zip(parts, each, strict=True):
                part.mul_(factor)
        else:
            torch._foreach_mul_(parts, here if here.dim() == 0 else each)
