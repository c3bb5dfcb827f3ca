"""How the model of a width, its optimizer, its data and its loss are made."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ...capture.reference import call_isolated, frozen_copy
from ...core.errors import display
from ...core.torch_modes import rng_states, set_rng_states

# --- The two terms of the refined coordinate check, and the plain check, in float64 ---

_PARAMETRIZATIONS = "parametrizations"  # what torch.nn.utils.parametrize calls them
_COPYABLE = (
    "the terms are measured on copies, so no tensor of the model may be computed from others "
    "(torch.nn.utils.parametrizations.weight_norm can be copied, torch.nn.utils.weight_norm and pruning cannot)"
)


@dataclass(frozen=True)
class LayerTerms:
    """The terms of one module on one batch; None for terms that do not apply.

    Attributes:
        update: root mean square over all elements of (W_t - W_0) x_t; None in a module without its own parameters.
        propagated: the same of W_0 (x_t - x_0).
        input: root mean square of x_t; None if it is no floating-point tensor.
        output: mean of ``|W_t x_t|``, as in the coordinate check of microsoft/mup.
    """

    update: float | None
    propagated: float | None
    input: float | None
    output: float


@dataclass(frozen=True)
class _RecordedCall:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    generators: dict[str, Tensor]  # the states of the random generators at its start


class TermProbe:
    """Compares a model with its state at the creation of the probe, on copies: the model itself is never run or changed.

    The copies are of ``dtype``. In float32 the difference of two outputs is noise below a relative 1e-7, and noise has its own exponent: at
    large widths and small learning rates it would hide a vanishing term.

    Raises:
        ValueError: the model cannot be copied.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float64) -> None:
        self._dtype = dtype
        self._reference, self._twin = (_of_dtype(frozen_copy(model, _COPYABLE), dtype) for _ in range(2))

    def measure(self, model: nn.Module, run: Callable[[nn.Module], object]) -> dict[str, LayerTerms]:
        """The terms of ``model`` as it is now; ``run`` runs a model on the batch, whose floating-point tensors have the probe's
        dtype.
        """
        with torch.no_grad():
            for kept, live in zip(_state(self._twin), _state(model), strict=True):
                kept.copy_(live)
        for part, twin, reference in zip(model.modules(), self._twin.modules(), self._reference.modules(), strict=True):
            twin.training = reference.training = part.training
        return terms(self._twin, self._reference, run)


def terms(model: nn.Module, reference: nn.Module, run: Callable[[nn.Module], object]) -> dict[str, LayerTerms]:
    """The terms of all modules that return one tensor, by name, in the order of their first calls.

    A module that returns a tuple is measured by the first item. One that is called several times has the root mean square over all calls.
    Both models see the same random numbers, and are left as they were, with their buffers. Gradients can be taken with respect to values
    that ``run`` creates, as in the loss of a differential equation, but not with respect to parameters.

    Args:
        model: W_t.
        reference: W_0, of the same class.
        run: runs a model on the batch; its result is not used.
    """
    with torch.no_grad():
        now, before = _record_calls(model, run), _record_calls(reference, run)
        parts = dict(reference.named_modules())
        found = {}
        for name, calls in now.items():
            update = propagated = None
            shapes = [[call.output.shape for call in each] for each in (calls, before.get(name, []))]
            if _has_terms(name, parts[name]) and shapes[0] == shapes[1]:  # an expert may get other tokens than at first
                mixed = [_moved_output(parts[name], call) for call in calls]
                update = _rms(call.output - output for call, output in zip(calls, mixed, strict=True))
                propagated = _rms(output - call.output for output, call in zip(mixed, before[name], strict=True))
            inputs = [tensor for call in calls if (tensor := _first(call.args)) is not None]
            entered = _rms(inputs) if inputs else None
            found[name] = LayerTerms(update, propagated, entered, _mean((call.output for call in calls), torch.abs))
    return found


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module but not of its submodules, by name; also those behind its parametrizations."""
    found = {name: value for name, value in module._parameters.items() if value is not None}
    inner = module._modules.get(_PARAMETRIZATIONS)
    if inner is not None:
        found |= {f"{_PARAMETRIZATIONS}.{name}": value for name, value in inner.named_parameters()}
    return found


def _has_terms(name: str, module: nn.Module) -> bool:
    """Whether a module has its own parameters; the whole model only if it is one layer.

    A parametrization is not a layer: its output is a weight, which should not keep its size when the width grows.
    """
    whole = name == "" and not module._modules.keys() <= {_PARAMETRIZATIONS}
    return bool(own_parameters(module)) and not whole and _PARAMETRIZATIONS not in name.split(".")


def _moved_output(module: nn.Module, call: _RecordedCall) -> Tensor:
    """The module's output for the inputs of a call, with the random numbers of the call."""
    with call_isolated(module):
        set_rng_states(call.generators)
        output = _first((module(*mapped(call.args, torch.clone), **mapped(call.kwargs, torch.clone)),))
    assert output is not None, "gave a tensor before"
    return output


def _record_calls(model: nn.Module, run: Callable[[nn.Module], object]) -> dict[str, list[_RecordedCall]]:
    """The arguments and the output of every module call: copies, because later code may write in place."""
    recorded: dict[str, list[_RecordedCall]] = {}
    # of the running modules, the innermost last: copied arguments and generator states
    running: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], dict[str, Tensor]]] = []

    def listener(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def keep(module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
            while running[-1][0] is not module:
                running.pop()  # it raised, and the module around it continued
            args, kwargs, generators = running.pop()[1:]
            tensor = _first((output,))
            if tensor is not None:
                call = _RecordedCall(args, kwargs, _copy(tensor), generators)
                recorded.setdefault(name, []).append(call)

        return keep

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.append((module, mapped(args, _copy), mapped(kwargs, _copy), rng_states()))

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(listener(name)).remove)
        stack.enter_context(call_isolated(model))
        torch.manual_seed(0)  # so that dropout selects the same elements
        with torch.enable_grad():
            run(model)
    return recorded


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``change`` applied to every tensor in its tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, change) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)([mapped(item, change) for item in value])
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    return value


def _first(values: tuple[Any, ...]) -> Tensor | None:
    """The first floating-point tensor, possibly nested in tuples, as in a packed sequence."""
    first = values[0] if values else None
    while isinstance(first, (tuple, list)) and first:
        first = first[0]
    return first if isinstance(first, Tensor) and first.is_floating_point() and first.numel() else None


def _mean(tensors: Iterable[Tensor], of: Callable[[Tensor], Tensor]) -> float:
    total, count = 0.0, 0
    for tensor in tensors:
        total += of(tensor.to(torch.float64)).sum().item()
        count += tensor.numel()
    return total / count


def _rms(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(_mean(tensors, torch.square))  # NaN stays NaN


def _state(model: nn.Module) -> Iterator[Tensor]:
    return chain(model.parameters(), model.buffers())


def _of_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``model`` in ``dtype``. Complex tensors such as rotary embeddings stay complex; nn.Module.to would drop the imaginary part."""

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(torch.promote_types(dtype, tensor.dtype))
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return model._apply(cast)  # type: ignore[no-any-return, no-untyped-call]


#: The optimizers that have a name.
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@dataclass(frozen=True)
class Recipe:
    """Makes everything of one run from its width and its seed; see :func:`width_sweep` for the arguments.

    Attributes:
        base: the smallest width.
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
        """A new model, and its optimizer if the factory returns one; each width and seed has its own start of the torch generators.

        A model given to torch.compile is trained uncompiled: a few steps are not worth the compilation.
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
        if given is not None:
            return given
        if isinstance(self.optimizer, str):
            return OPTIMIZERS[self.optimizer](model.parameters(), lr=self.lr * (width / self.base) ** self.lr_exponent)
        return self.optimizer(model, width)

    def batches(self, seed: int, steps: int) -> list[Any]:
        """At most ``steps`` batches of a seed, the same for all widths."""
        torch.manual_seed(seed)
        remedy = "give a batch, a list of them, or a function of the seed that returns either"
        with failing_at(f"seed {seed}", f"the data of seed {seed} cannot be loaded", remedy):
            return self._batches(seed, steps)

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
    """The loss of common models: their own if they return one, else cross-entropy for integer targets and squared error for others.

    ``model`` is called with the inputs of a pair, all items of a dict by name, or the batch itself.
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


@contextlib.contextmanager
def failing_at(place: str, what: str, remedy: str) -> Iterator[None]:
    """Add the width or seed to an error of the user's code; our own errors have it already."""
    try:
        yield
    except Exception as error:
        if place in str(error):
            raise
        raise ValueError(f"{what}: {type(error).__name__}: {error}; {remedy}") from error


def failing_at_width(width: int, what: str, remedy: str) -> contextlib.AbstractContextManager[None]:
    return failing_at(f"width {width}", f"at width {width} {what}", remedy)


def placed(batch: Any, model: nn.Module, dtype: torch.dtype | None = None) -> Any:
    """A copy of a batch on the device of ``model``; with ``dtype``, its floating-point tensors have that dtype."""
    device = next((parameter.device for parameter in model.parameters()), None)

    def place(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype, copy=True)

    return mapped(dict(batch) if isinstance(batch, Mapping) else batch, place)


# --- One run of the sweep: a few steps of training, measured after each ---


@dataclass(frozen=True)
class SweepRun:
    width: int
    seed: int
    losses: list[float]
    steps: list[dict[str, LayerTerms]]


def train(recipe: Recipe, batches: Sequence[Any], width: int, seed: int, steps: int, dtype: torch.dtype) -> SweepRun:
    """Train a new model and measure it after every step, on the first batch.

    A loss that is not finite does not end the run; the measurements are then not finite either.
    """
    model, given = recipe.model(width, seed)
    optimizer = recipe.optimizer_of(model, width, given)
    probe = TermProbe(model, dtype)
    measured = placed(batches[0], model, dtype)
    found = SweepRun(width, seed, [], [])
    for step in range(steps):
        with failing_at_width(width, f"step {step + 1} with seed {seed} failed", "earlier runs and steps were made"):
            optimizer.zero_grad()
            loss = recipe.loss(model, placed(batches[step % len(batches)], model))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            found.losses.append(loss.item())
            found.steps.append(probe.measure(model, lambda copy: recipe.loss(copy, measured)))
    return found


def run_all(
    recipe: Recipe, widths: Sequence[int], seeds: Sequence[int], steps: int, dtype: torch.dtype, advance: Callable[[], object]
) -> Iterator[SweepRun]:
    """All runs, seed by seed; ``advance`` is called after each."""
    for seed in seeds:
        batches = recipe.batches(seed, steps)
        for width in widths:
            yield train(recipe, batches, width, seed, steps, dtype)
            advance()
