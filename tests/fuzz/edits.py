"""What loops do to gradients between the backward pass and the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

#: Those that keep the norm of every gradient, and move no version counter.
UNSEEN = ("data_flip", "data_neg")
#: Those whose factor does not depend on the norm.
SCALINGS = ("scale", "replace")
CLIPS = ("clip_norm", "clip_norm_loose", "clip_value", "by_hand", "data_clamp")


def apply(how: str, parameters: Sequence[nn.Parameter], clip: Callable[..., Tensor]) -> list[Tensor]:
    """Edit the gradients; what came of it that a loop may print."""
    there = [p for p in parameters if p.grad is not None]
    if how == "clip_norm":
        return [clip(parameters, 0.05)]
    if how == "clip_norm_loose":
        return [clip(parameters, 1e6)]
    if how == "clip_value":
        torch.nn.utils.clip_grad_value_(parameters, 0.02)
    elif how == "by_hand":
        return [_by_hand(there, 0.05)]
    for p in there:
        gradient = p.grad
        assert gradient is not None
        if how == "scale":
            gradient.mul_(0.5)
        elif how == "replace":
            p.grad = gradient * 0.5
        elif how == "noise":
            gradient.add_(torch.randn_like(gradient), alpha=0.01)
        elif how == "data_neg":
            gradient.data.neg_()
        elif how == "data_flip":
            gradient.data.copy_(gradient.flip(0) if gradient.dim() else gradient.clone())
        elif how == "data_clamp":
            gradient.data.clamp_(-0.02, 0.02)
    if how == "drop_one" and there:
        there[0].grad = None
    return []


def _by_hand(there: Sequence[nn.Parameter], limit: float) -> Tensor:
    if not there:
        return torch.zeros(())
    total = torch.stack([p.grad.detach().double().square().sum() for p in there]).sum().sqrt()  # type: ignore[union-attr]
    for p in there:
        if total > limit:
            p.grad.mul_(float(limit / total))  # type: ignore[union-attr]
    return total
