"""How the model of a width, its optimizer, its data and its loss are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ...core.errors import display
from .terms import mapped

#: The optimizers that have a name.
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@dataclass(frozen=True)
class Recipe:
    """Makes everything of one run from its width and its seed.

    Attributes:
        factory: called with a width, returns a new model, or a pair of a model and its optimizer.
        data: one batch, a list of batches (or another iterable, such as a DataLoader), or a function of the seed that returns
            either.
            A list of two tensors is one batch, as from a DataLoader. If there are fewer batches than steps, they are repeated.
        optimizer: a name in ``OPTIMIZERS``, or a function of the model and the width; unused if the factory returns one.
        lr: learning rate at the width ``base``, for a named optimizer.
        lr_exponent: the learning rate at width n is ``lr * (n / base) ** lr_exponent``.
        base: the smallest width.
        loss: a function of the model and a batch that returns a scalar.
        made: by id, the parameters of earlier models that still exist.
    """

    factory: Callable[[int], Any]
    data: Any
    optimizer: str | Callable[[nn.Module, int], Any]
    lr: float
    lr_exponent: float
    base: int
    loss: Callable[[nn.Module, Any], Tensor] = field(default_factory=lambda: usual_loss)
    made: WeakValueDictionary[int, nn.Parameter] = field(default_factory=WeakValueDictionary, compare=False, repr=False)

    def model(self, width: int, seed: int) -> tuple[nn.Module, Any]:
        """A new model, and its optimizer if the factory returns one; each width and seed has its own start of the torch
        generators.

        A model given to torch.compile is trained uncompiled: a few steps are not worth the compilation.

        Raises:
            ValueError: the factory raised, or returned parameters of an earlier model; with the width.
            TypeError: it returned no model.
        """
        torch.manual_seed(1_000_003 * seed + width)
        try:
            made = self.factory(width)
        except Exception as error:
            raise ValueError(
                f"the factory cannot make a model of width {width}: {type(error).__name__}: {error}; leave that width out, or choose "
                "widths that it can make, such as multiples of the number of heads"
            ) from error
        model, optimizer = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"the factory must return a torch.nn.Module, or a pair of one and its optimizer, but at width {width} it returned "
                f"{display(made)}"
            )
        model = model._modules.get("_orig_mod") or model
        self._check_new(model, width)
        return model, optimizer

    def _check_new(self, model: nn.Module, width: int) -> None:
        for name, parameter in model.named_parameters():
            if is_lazy(parameter):
                raise ValueError(
                    f"at width {width} {name} is not initialised before the first forward; let the factory run the model once"
                )
            if parameter.requires_grad and self.made.get(id(parameter)) is parameter:
                raise ValueError(
                    f"at width {width} the factory returned {name} of an earlier model, which may be trained already; make a new model in "
                    "every call, and freeze parameters that all models share"
                )
            self.made[id(parameter)] = parameter

    def optimizer_of(self, model: nn.Module, width: int, given: Any) -> Any:
        """The optimizer of a model: that of the factory, or the one that ``optimizer`` specifies."""
        if given is not None:
            return given
        if isinstance(self.optimizer, str):
            return OPTIMIZERS[self.optimizer](model.parameters(), lr=self.lr * (width / self.base) ** self.lr_exponent)
        return self.optimizer(model, width)

    def batches(self, seed: int, steps: int) -> list[Any]:
        """At most ``steps`` batches of a seed, the same for all widths.

        Raises:
            ValueError: there is none, loading them raised, or they come from an iterator, which yields them only once.
        """
        torch.manual_seed(seed)
        try:
            return self._batches(seed, steps)
        except Exception as error:
            if f"seed {seed}" in str(error):
                raise
            raise ValueError(
                f"the data of seed {seed} cannot be loaded: {type(error).__name__}: {error}; give a batch, a list of them, or a function "
                "of the seed that returns either"
            ) from error

    def _batches(self, seed: int, steps: int) -> list[Any]:
        made = self.data(seed) if callable(self.data) else self.data
        pair = isinstance(made, list) and len(made) == 2 and all(isinstance(item, Tensor) for item in made)
        if pair or isinstance(made, (Tensor, Mapping, tuple)) or not isinstance(made, Iterable):
            return [made]
        if made is self.data and isinstance(made, Iterator):
            raise ValueError(
                f"data is an iterator, which is empty after the first seed {seed}; give a list, or a function of the seed"
            )
        batches = list(islice(made, steps))
        if not batches:
            raise ValueError(f"the data of seed {seed} has no batch")
        return batches


def usual_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss of common models: their own if they return one, else cross-entropy for integer targets and squared error for
    others.

    Args:
        model: called with the inputs of a pair, all items of a dict by name, or the batch itself.
        batch: a pair of inputs and targets; a dict, as of transformers; or inputs of a model that returns its loss.

    Raises:
        TypeError: there is no target, and the model returns no loss.
    """
    inputs, targets = batch if isinstance(batch, (tuple, list)) and len(batch) == 2 else (batch, None)
    output = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    if isinstance(output, Mapping) and "loss" in output:
        output = output["loss"]
    if targets is None:
        if isinstance(output, Tensor) and output.numel() == 1:
            return output
        raise TypeError(
            f"there are no targets, and the model returns no loss but {display(output)}; give batches of a pair (inputs, targets), or loss="
        )
    if not isinstance(output, Tensor):
        raise TypeError(f"the model must return a tensor to compare with the targets, got {display(output)}; give loss=")
    if targets.is_floating_point():
        return F.mse_loss(output, targets)
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


@contextmanager
def failing_at(width: int, what: str, remedy: str) -> Iterator[None]:
    """Add the width to an error of the user's code; our own errors have it already.

    Raises:
        ValueError: for any error of the block, with ``what`` and ``remedy``.
    """
    try:
        yield
    except Exception as error:
        if f"width {width}" in str(error):
            raise
        raise ValueError(f"at width {width} {what}: {type(error).__name__}: {error}; {remedy}") from error


def placed(batch: Any, model: nn.Module, dtype: torch.dtype | None = None) -> Any:
    """A copy of a batch on the device of ``model``; with ``dtype``, its floating-point tensors have that dtype."""
    device = next((parameter.device for parameter in model.parameters()), None)

    def place(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype, copy=True)

    return mapped(dict(batch) if isinstance(batch, Mapping) else batch, place)
