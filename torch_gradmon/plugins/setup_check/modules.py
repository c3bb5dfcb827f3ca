"""Modules whose mode or settings defeat them: evaluation mode in training, dropout of nearly everything, a batch norm that never moves."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ..tallies import Tallies

#: A dropout of this share is taken for the share that is kept; the largest in use is about 0.8.
_DROPPED = 0.9
#: A batch norm whose running statistics take less than this share of each batch does not reach them within a thousand steps.
_STILL = 1e-3


def has_modes(module: nn.Module) -> bool:
    """Whether the model behaves otherwise in evaluation mode in a part that is trained: it has dropout, or batch norms of its own
    statistics.
    """
    for each in module.modules():
        children = list(each.children())
        drops = any(isinstance(child, _DropoutNd) and child.p > 0 for child in children)
        if drops and any(parameter.requires_grad for parameter in each.parameters()):
            return True
        if isinstance(each, _BatchNorm) and each.track_running_stats and any(p.requires_grad for p in each.parameters()):
            return True
        if isinstance(each, nn.RNNBase) and each.dropout > 0:
            return True
    return False


def in_evaluation(module: nn.Module) -> bool:
    """Whether the whole model is in evaluation mode; a part alone may be there on purpose."""
    return not any(each.training for each in module.modules())


def check_settings(module: nn.Module, tallies: Tallies) -> None:
    """Settings of modules, once."""
    high = [(name, float(each.p)) for name, each in _dropouts(module) if each.p >= _DROPPED]
    if high:
        tallies.seen("dropout-high", where=tuple(name for name, _ in high), evidence={"share dropped": max(p for _, p in high)})
    still = [
        (name, float(each.momentum))
        for name, each in module.named_modules()
        if isinstance(each, _BatchNorm) and each.track_running_stats and each.training and each.momentum is not None
        if each.momentum < _STILL
    ]
    if still:
        tallies.seen("batch-norm-frozen", where=tuple(name for name, _ in still), evidence={"momentum": min(m for _, m in still)})


def _dropouts(module: nn.Module) -> Iterator[tuple[str, _DropoutNd]]:
    for name, each in module.named_modules():
        if isinstance(each, _DropoutNd):
            yield name, each
