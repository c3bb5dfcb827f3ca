"""What trains: the groups of the optimizers, with what is frozen and what no optimizer has."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .formatting import listed, percent
from .keys import ROOT, blocks_of

#: Blocks, and kinds of modules, that are named.
_NAMED, _KINDS = 3, 6


@dataclass(frozen=True)
class TrainedPart:
    """A part of a model's parameters.

    Attributes:
        what: such as ``"AdamW, group 0"``, ``"frozen"`` or ``"in no optimizer"``.
        tensors: number of parameters.
        elements: number of their elements.
        share: of all elements of the model.
        settings: learning rate and weight decay of the group, where it has them.
        blocks: names of the parameters without their last part, each once.
    """

    what: str
    tensors: int
    elements: int
    share: float
    settings: Mapping[str, float]
    blocks: Sequence[str]

    def __str__(self) -> str:
        settings = "".join(f", {name} {value:g}" for name, value in self.settings.items())
        where = f": {listed(self.blocks, _NAMED)}" if self.blocks else ""
        tensors = "1 tensor" if self.tensors == 1 else f"{self.tensors} tensors"
        return f"{self.what}{settings}, {tensors} of {self.elements:,} elements ({percent(self.share)}){where}"


def model_text(model: str, parameters: Mapping[str, Mapping[str, Any]], kinds: Mapping[str, str]) -> str:
    """A model in one line; its class alone where nothing is known of its parameters.

    Args:
        model: its class.
        parameters: all of them, by name, with their ``"shape"`` and ``"dtype"``.
        kinds: the classes of its modules, by name.

    >>> model_text("Sequential", {"0.weight": {"shape": [2, 3], "dtype": "torch.float32"}}, {"[root module]": "Sequential", "0": "Linear"})
    'Sequential, 6 elements in 1 tensor, float32; 1 Linear'
    """
    if not parameters:
        return model
    elements = sum(math.prod(about["shape"]) for about in parameters.values())
    dtypes = dict.fromkeys(str(about["dtype"]).removeprefix("torch.") for about in parameters.values() if "dtype" in about)
    tensors = "1 tensor" if len(parameters) == 1 else f"{len(parameters):,} tensors"
    parts = Counter(kind for name, kind in kinds.items() if name != ROOT).most_common()
    of = f"; {listed((f'{count:,} {kind}' for kind, count in parts), _KINDS)}" if parts else ""
    return f"{', '.join([model, f'{elements:,} elements in {tensors}', *dtypes])}{of}"


def before_schedule(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a group with the learning rate that a schedule multiplies, not that of a first step of a warm-up."""
    return {**settings, "lr": settings["initial_lr"]} if settings.get("initial_lr") is not None else settings


def trained_parts(
    parameters: Mapping[str, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], frozen: Collection[str]
) -> Iterator[TrainedPart]:
    """The parts of a model: groups in their order, then frozen parameters, then the rest.

    Args:
        parameters: all of them, by name, with their ``"shape"``.
        groups: of the optimizers, with ``"optimizer"``, ``"settings"`` and ``"parameters"``.
        frozen: names of those that do not require a gradient.
    """
    sizes = {name: math.prod(about["shape"]) for name, about in parameters.items()}
    whole = max(sum(sizes.values()), 1)
    block_of = blocks_of(sizes)

    def part(what: str, names: Sequence[str], settings: Mapping[str, Any]) -> TrainedPart:
        shown = {"lr": settings.get("lr"), "weight decay": settings.get("weight_decay") or None}
        known = {name: float(value) for name, value in shown.items() if value is not None}
        elements = sum(sizes[name] for name in names)
        blocks = list(dict.fromkeys(block_of[name] for name in names))
        return TrainedPart(what, len(names), elements, elements / whole, known, blocks)

    owned: set[str] = set()
    for number, group in enumerate(groups):
        names = [name for name in group["parameters"] if name in sizes and name not in frozen]
        owned.update(names)
        yield part(f"{group['optimizer']}, group {number}", names, group["settings"])
    if still := [name for name in sizes if name in frozen]:
        yield part("frozen", still, {})
    if rest := [name for name in sizes if name not in frozen and name not in owned]:
        yield part("in no optimizer", rest, {})
