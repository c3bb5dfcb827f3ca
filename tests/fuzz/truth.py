"""What truly happened in one step, as the recorder saw it: tensors before they are turned into numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Tensors = dict[str, Tensor]
Lists = dict[str, list[Tensor]]
Counts = dict[tuple[str, str], int]
#: What passes measure in modules.
OF_BACKWARD = ("output_gradients",)
OF_PASSES = ("outputs", "inputs", "calls", "differences", "attention", *OF_BACKWARD)


@dataclass
class Truth:
    """One step.

    Attributes:
        number: that the monitor must give it.
        used: the gradients that the optimizers used, by parameter, unscaled.
        before: the same at the end of the step's last backward pass.
        local: those of each micro-batch by itself.
        parameters: before the first optimizer stepped.
        base, updated: the parameters of each optimizer before and after its own step.
        states: what the optimizer keeps for a parameter after its step, and ``grad`` and ``param``.
        outputs, inputs, output_gradients: of training forwards, by the path of the tensor.
        calls: the outputs, each call of a forward under a path of its own.
        differences: pairs of an output and that of the reference.
        attention: arguments and result (``activation``) of each call by name, by the module that makes it.
        logged: values by key, in order.
        edited: whether the loop has called something that edits gradients after its last backward pass.
        applied: whether every optimizer that was called has stepped.
        frozen: names of the parameters that were frozen when the first optimizer stepped.
        stepped: numbers of the optimizers that have stepped.
        tuned: the preset that a live change has put in the place of the program's.
        iteration: of the loop, in which it began.
        lost: a pass raised, so that what it measured was dropped.
        mixed: the same, in a step with other passes.
        kept: see :meth:`measured`, when the last backward pass ended.
    """

    number: int
    used: Tensors = field(default_factory=dict)
    before: Tensors = field(default_factory=dict)
    local: Lists = field(default_factory=dict)
    parameters: Tensors = field(default_factory=dict)
    base: Tensors = field(default_factory=dict)
    updated: Tensors = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    outputs: Lists = field(default_factory=dict)
    inputs: Lists = field(default_factory=dict)
    output_gradients: Lists = field(default_factory=dict)
    calls: Lists = field(default_factory=dict)
    differences: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    attention: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    logged: dict[str, list[float]] = field(default_factory=dict)
    edited: bool = False
    applied: bool = True
    frozen: set[str] = field(default_factory=set)
    stepped: list[int] = field(default_factory=list)
    tuned: str = ""
    iteration: int = 0
    lost: bool = False
    mixed: bool = False
    kept: Counts = field(default_factory=dict)

    def measured(self) -> Counts:
        """How many tensors passes have measured by now, by kind and path."""
        return {(kind, path): len(tensors) for kind in OF_PASSES for path, tensors in getattr(self, kind).items()}

    def drop(self, kept: Counts, kinds: Sequence[str] = OF_PASSES) -> None:
        """A pass raised: of these kinds only what is ``kept`` counts."""
        for kind in kinds:
            lists = getattr(self, kind)
            for path in list(lists):
                del lists[path][kept.get((kind, path), 0) :]
                if not lists[path]:
                    del lists[path]
        self.lost = True
        self.mixed |= any(getattr(self, kind) for kind in kinds)


@dataclass
class Record:
    """A whole run.

    Attributes:
        steps: those that have ended, by number.
        unfinished: the one that has not, if any.
        polls: which step had ended last at each poll, None for none, and what was logged for it by then.
        names: of the parameters, in order, with their number of dimensions.
        modules: the type of each module by its name, in order.
        owners: names of each optimizer's parameters.
        frozen_for_good: names of parameters that were never trained.
        reference: the parameters when the monitor was made.
    """

    steps: dict[int, Truth] = field(default_factory=dict)
    unfinished: Truth | None = None
    polls: list[tuple[int | None, dict[str, list[float]]]] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)
    owners: list[set[str]] = field(default_factory=list)
    frozen_for_good: set[str] = field(default_factory=set)
    reference: Tensors = field(default_factory=dict)
