"""What the user has declared: which parameters are frozen and which are trained, dtypes of outputs, and batches that differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ...capture.hooks import Handles, ModuleHook
from ...capture.modules.structure import tensors_of
from ...core.errors import display
from ...core.keys import compile_pattern
from ...core.loop_mistakes import EXPECTATION
from ...core.records import StatsTable
from ...step.planner import Planner
from ..tallies import Tallies

#: Monitored steps after which a parameter that should train must have had a gradient.
_PATIENCE = 8


class Expectations:
    """Declared once, and checked in monitored steps.

    Args:
        tallies: receive what does not hold.

    Attributes:
        batch_varies: whether batches should differ; None if that was not declared.
        is_declared: anything was declared about parameters.
    """

    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies
        self._frozen: re.Pattern[str] | None = None
        self._trains: re.Pattern[str] | None = None
        self._dtypes: dict[re.Pattern[str], torch.dtype] = {}
        self.batch_varies: bool | None = None
        self.is_declared = False
        self._planner: Planner | None = None
        self._handles = Handles()
        self._versions: dict[str, int] = {}  # of frozen parameters, at the last look
        self._reached: set[str] = set()
        self._steps = 0

    def declare(
        self,
        planner: Planner,
        frozen: str | re.Pattern[str] | None,
        trains: str | re.Pattern[str] | None,
        dtype: Mapping[str | re.Pattern[str], torch.dtype] | None,
        batch_varies: bool | None,
        is_watched: bool,
    ) -> None:
        """Check the arguments against the model, and replace what was declared before, argument by argument. ``is_watched``: a loop is
        followed.

        Raises:
            TypeError, ValueError: an argument is of a wrong type, or a pattern fits nothing.
        """
        inventory = planner.inventory
        parameters, modules = ([], []) if inventory is None else (inventory.names, [*inventory.kinds])
        wanted = {name: _pattern(name, value, parameters) for name, value in (("frozen", frozen), ("trains", trains))}
        dtypes = _dtypes(dtype, modules)
        if batch_varies is not None and not isinstance(batch_varies, bool):
            raise TypeError(f"batch_varies={display(batch_varies)} must be True, False or None")
        self._frozen, self._trains = wanted["frozen"] or self._frozen, wanted["trains"] or self._trains
        self._dtypes.update(dtypes)
        self.is_declared = self._frozen is not None or self._trains is not None
        self.batch_varies = self.batch_varies if batch_varies is None else batch_varies
        self._versions.clear()
        self._reached.clear()
        self._steps = 0
        if is_watched:
            self.begin(planner)

    def begin(self, planner: Planner) -> None:
        """Look at the model from now on."""
        self._planner = planner
        self._handles.remove()
        inventory = planner.inventory
        for name, reference in () if inventory is None else inventory.modules.items():
            wanted = next((dtype for pattern, dtype in self._dtypes.items() if pattern.search(name)), None)
            if wanted is not None and (each := reference()) is not None:
                self._handles.of_module(each.register_forward_hook(ModuleHook(self._called, name, wanted)))

    def end(self) -> None:
        """Take the hooks away."""
        self._handles.remove()
        self._planner = None

    def _called(self, name: str, wanted: torch.dtype, module: nn.Module, args: object, output: Any) -> None:
        for _, tensor in tensors_of(output, name):
            if module.training and torch.is_floating_point(tensor) and tensor.dtype != wanted:
                self._tallies.seen(EXPECTATION, ("dtype", name), (f"{name} gives {tensor.dtype}, expected {wanted}",))
                return

    def look(self, owned: Callable[[], set[int]], gradients: StatsTable | None) -> None:
        """Look at the parameters after a monitored step.

        Args:
            owned: gives the ids of the tensors that optimizers have.
            gradients: those of the step.
        """
        inventory = None if self._planner is None else self._planner.inventory
        if inventory is None or self._planner is None:
            return
        self._steps += 1
        optimized = owned()
        self._reached.update(() if gradients is None else gradients.names)
        moving, unowned = [], []
        for name, place in zip(inventory.names, inventory.references, strict=True):
            if (parameter := place()) is None:
                continue
            stepped = self._planner.source.stepped(parameter)
            is_owned = id(stepped) in optimized
            if self._frozen is not None and self._frozen.search(name):
                before = self._versions.get(name)
                self._versions[name] = parameter._version
                if before is not None and before != parameter._version:
                    moving.append(name)
            is_late = not is_owned or (self._steps == _PATIENCE and name not in self._reached)
            if is_late and self._trains is not None and self._trains.search(name):
                unowned.append(name)
        if moving:
            self._tallies.seen(
                EXPECTATION, "frozen", tuple(moving), {"parameters that change, declared frozen": float(len(moving))}
            )
        if unowned and self._steps in (1, _PATIENCE):
            evidence = {"parameters without optimizer or gradient, declared to train": float(len(unowned))}
            self._tallies.seen(EXPECTATION, "trains", tuple(unowned), evidence)


def _pattern(name: str, value: str | re.Pattern[str] | None, names: Iterable[str]) -> re.Pattern[str] | None:
    if value is None:
        return None
    pattern = compile_pattern(value, name)
    known = list(names)
    if known and not any(map(pattern.search, known)):
        raise ValueError(f"{name}={display(value)} fits no parameter; the first ones are {known[:5]}")
    return pattern


def _dtypes(dtype: object, modules: Iterable[str]) -> dict[re.Pattern[str], torch.dtype]:
    if dtype is None:
        return {}
    if not isinstance(dtype, Mapping):
        raise TypeError(
            f"dtype={display(dtype)} must be a dict of dtypes by pattern of modules, such as {{'attn': torch.bfloat16}}"
        )
    found, known = {}, list(modules)
    for key, value in dtype.items():
        if not isinstance(value, torch.dtype):
            raise TypeError(f"dtype={{{key!r}: {display(value)}}} must have a torch.dtype, such as torch.bfloat16")
        pattern = compile_pattern(key, "dtype")
        if known and not any(map(pattern.search, known)):
            raise ValueError(f"the pattern {display(key)} in dtype= fits no module; the first ones are {known[:5]}")
        found[pattern] = value
    return found
