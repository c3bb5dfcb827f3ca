"""Gradient clipping that measures on the way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...core.errors import display
from ...core.torch_modes import capture_check
from ...statistics.histogram import NORM_COLUMNS, norm_of_rows
from ...step.ranks import is_dtensor
from .adaptive import AdaptiveClip, DeviceValue
from .named import AdaptiveClips

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
            part = _local(parameter.grad)
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


def _local(gradient: Tensor) -> Tensor:
    if not is_dtensor(gradient):
        return gradient
    part: Tensor = gradient.to_local()  # type: ignore[attr-defined]
    return part.wait() if hasattr(part, "wait") else part
