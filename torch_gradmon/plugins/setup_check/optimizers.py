"""The optimizers: what each group trains and with which settings, and settings that cannot be meant."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..tallies import Tallies


class Followed:
    """The optimizers that a monitor follows, as long as this object lives. All monitors of the process know them, to find parameters that
    two of them have.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        with _lock:
            _followed.add(self)

    @staticmethod
    def by_any() -> list[Optimizer]:
        """Those that any monitor follows, in whatever thread."""
        with _lock:  # a set that grows meanwhile cannot be iterated over
            everybody = list(_followed)
        found = (reference() for each in everybody for reference in each._optimizers)
        return [optimizer for optimizer in found if optimizer is not None]


_followed: weakref.WeakSet[Followed] = weakref.WeakSet()
_lock = threading.RLock()


def card(optimizers: Sequence[Optimizer], names: Mapping[int, Any]) -> list[dict[str, Any]]:
    """One entry for each group: class of the optimizer, settings, and names of the parameters that the model has.

    Args:
        optimizers: in the order of their steps.
        names: of the model's parameters, by id.
    """
    groups = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            settings = {key: found for key, value in group.items() if (found := _plain(value)) is not None}
            parameters = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
            groups.append({"optimizer": type(optimizer).__name__, "settings": settings, "parameters": parameters})
    return groups


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):  # of a capturable optimizer: reading it would wait for the device
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(each, (bool, int, float)) for each in value):
        return list(value)
    return None


def check_optimizers(optimizers: Sequence[Optimizer], names: Mapping[int, str], tallies: Tallies) -> None:
    """Settings that cannot be meant, and parameters that two optimizers have."""
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            betas = _plain(group.get("betas"))
            if isinstance(betas, list) and len(betas) >= 2 and betas[0] > betas[1]:
                evidence = {"first beta": float(betas[0]), "second beta": float(betas[1])}
                tallies.seen("betas-swapped", where=(f"group {number} of {type(optimizer).__name__}",), evidence=evidence)
    check_shared(optimizers, names, tallies)


def check_shared(optimizers: Sequence[Optimizer], names: Mapping[int, str], tallies: Tallies) -> None:
    """Parameters of the model that several optimizers have, of whatever monitor."""
    owners: dict[int, set[int]] = {}
    for optimizer in {*optimizers, *Followed.by_any()}:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owners.setdefault(id(parameter), set()).add(id(optimizer))
    own = set(map(id, optimizers))
    shared = [name for key, name in names.items() if len(by := owners.get(key, set())) > 1 and by & own]
    if shared:
        tallies.seen("parameter-in-two-optimizers", where=tuple(shared), evidence={"parameters": float(len(shared))})
