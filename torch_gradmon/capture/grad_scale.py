"""What a GradScaler has done to the gradients, known without synchronising the device."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..statistics.tensor_access import accumulator_dtype

_UNSCALED = 1  # torch.amp.grad_scaler.OptState.UNSCALED; READY is 0, STEPPED is 2


class GradScale:
    """Which optimizer's gradients are scaled, as far as it can be known before the optimizer steps.

    Args:
        around: returns further ids that the scaler may use for an optimizer.

    Attributes:
        scaler: the one that is known.
    """

    def __init__(self, around: Callable[[Optimizer], Iterable[int]] = lambda _: ()) -> None:
        self.scaler: torch.amp.GradScaler | None = None
        self._around = around
        self._plain_steps: Counter[int] = Counter()  # consecutive steps without the scaler

    def adopt(self, scaler: torch.amp.GradScaler) -> None:
        """This scaler scales the gradients."""
        self.scaler = scaler

    def inverse(self, optimizer: Optimizer | None, stepping: bool) -> Tensor | None:
        """The factor for the gradients, float32 on their device; None if they are unscaled.

        With None as optimizer: for parameters that no optimizer has. They stay scaled, since ``unscale_`` leaves them out.
        """
        scale = getattr(optimizer, "grad_scale", None)  # set while a fused optimizer steps that unscales by itself
        if scale is None:
            scale = scale_of(self.scaler)
            if scale is None or stepping or self._is_plain(optimizer):
                return None
            if optimizer is not None and self._is_unscaled(optimizer):
                return None
        return reciprocal(scale)

    def mistake(self, optimizer: Optimizer, calling: torch.amp.GradScaler | None) -> str | None:
        """What was wrong about the assumed scaler, or None. Only at the optimizer's step it is certain which scaler drives it."""
        if calling is not None and not calling.is_enabled():
            calling = None  # as in most loops without mixed precision
        if calling is not None and self.scaler is None:
            return "a GradScaler was noticed only in this step; pass scaler= to attach() or watch()"
        if calling is not None and calling is not self.scaler:
            return "another GradScaler drives this optimizer; one GradScaler for all optimizers is supported"
        if scale_of(self.scaler) is None:
            return None
        plain = calling is None and not self._is_unscaled(optimizer)
        mistaken = plain != self._is_plain(optimizer)
        self._plain_steps[id(optimizer)] = self._plain_steps[id(optimizer)] + 1 if plain else 0
        return f"{type(optimizer).__name__} stepped {'without' if plain else 'again with'} the GradScaler" if mistaken else None

    def _is_unscaled(self, optimizer: Optimizer) -> bool:
        return is_unscaled(self.scaler, optimizer, self._around(optimizer))

    def _is_plain(self, optimizer: Optimizer | None) -> bool:
        """Whether this optimizer, or with None any, is assumed to step without the scaler: it did so twice in a row."""
        counts = self._plain_steps.values() if optimizer is None else [self._plain_steps[id(optimizer)]]
        return any(count >= 2 for count in counts)


def scale_of(scaler: torch.amp.GradScaler | None) -> Tensor | None:
    """The scaler's scale on the device, or None if nothing was scaled. ``get_scale()`` would synchronise."""
    return scaler._scale if scaler is not None and scaler.is_enabled() else None


def reciprocal(scale: Tensor) -> Tensor:
    """The reciprocal of the scale, rounded as in ``GradScaler.unscale_``."""
    return scale.to(accumulator_dtype(scale.device)).reciprocal().float()


def inverse(scale: float | Tensor) -> Tensor:
    """The factor that undoes a scale which an engine keeps as a number or a tensor, float32."""
    return reciprocal(scale if isinstance(scale, Tensor) else torch.tensor(float(scale), dtype=torch.float64, device="cpu"))


def is_unscaled(scaler: torch.amp.GradScaler | None, optimizer: Optimizer | None, around: Iterable[int] = ()) -> bool:
    """Whether the scaler has unscaled the gradients of ``optimizer``, or with None of any, in this attempt. ``around``: ids of its
    wrappers.
    """
    states = getattr(scaler, "_per_optimizer_states", {})
    wanted = states.keys() if optimizer is None else (id(optimizer), *around)
    return any(states[key]["stage"].value >= _UNSCALED for key in wanted if key in states)


def calling_scaler() -> torch.amp.GradScaler | None:
    """The GradScaler whose ``step`` is calling, if any. Without it, scaled gradients would be taken for true ones."""
    frame = sys._getframe(3)
    for _ in range(12):
        if frame.f_code.co_name == "step" and isinstance(owner := frame.f_locals.get("self"), torch.amp.GradScaler):
            return owner
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
