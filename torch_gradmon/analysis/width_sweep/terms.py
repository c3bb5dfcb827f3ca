"""The two terms of the refined coordinate check, and the plain check beside them, in float64.

Haas et al. 2025 (arXiv 2505.22491) split the change of a layer's output after t steps, on one and the same batch, into

    W_t x_t - W_0 x_0 = (W_t - W_0) x_t + W_0 (x_t - x_0)

the part of the layer's own update and the part that comes in from below. For any module f this is f(W_t, x_t) - f(W_0, x_t) and
f(W_0, x_t) - f(W_0, x_0), where W stands for all of its parameters, a bias too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ...capture.reference.isolated_call import call_isolated
from ...capture.reference.source import frozen_copy
from ...core.torch_modes import rng_states

_PARAMETRIZATIONS = "parametrizations"  # what torch.nn.utils.parametrize calls them
_COPYABLE = (
    "the terms are measured on copies: the factory must make a model with values, none of them computed from others "
    "(torch.nn.utils.parametrizations.weight_norm can be copied, torch.nn.utils.weight_norm and pruning cannot)"
)


@dataclass(frozen=True)
class Terms:
    """What one module has on one batch; None where it does not apply.

    Attributes:
        update: root mean square over all elements of (W_t - W_0) x_t; None in a module without parameters of its own.
        propagated: the same of W_0 (x_t - x_0).
        input: root mean square of x_t; None where it is no floating-point tensor.
        output: mean of ``|W_t x_t|``, as in the coordinate check of microsoft/mup.
    """

    update: float | None
    propagated: float | None
    input: float | None
    output: float


@dataclass(frozen=True)
class _Call:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    numbers: dict[str, Tensor]  # the states of the generators when it began


class Probe:
    """Measures a model against what it was when the probe was made, on copies: the model itself is never run or changed.

    The copies are of ``dtype``. In float32 the difference of two outputs is noise below a relative 1e-7, and noise has an exponent
    of its own: with large widths and small learning rates it would hide one that vanishes.

    Raises:
        ValueError: the model cannot be copied.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float64) -> None:
        self._dtype = dtype
        self._reference, self._twin = (_of_dtype(frozen_copy(model, _COPYABLE), dtype) for _ in range(2))

    def measure(self, model: nn.Module, run: Callable[[nn.Module], object]) -> dict[str, Terms]:
        """The terms of ``model`` as it is now; ``run`` runs a model on the batch, whose floating-point tensors are of the probe's dtype."""
        with torch.no_grad():
            for kept, live in zip(_state(self._twin), _state(model), strict=True):
                kept.copy_(live)
        for part, twin, reference in zip(model.modules(), self._twin.modules(), self._reference.modules(), strict=True):
            twin.training = reference.training = part.training
        return terms(self._twin, self._reference, run)


def terms(model: nn.Module, reference: nn.Module, run: Callable[[nn.Module], object]) -> dict[str, Terms]:
    """The terms of all modules that give one tensor, by name, in the order in which they are first called.

    A module that gives a tuple is measured by the first item. One that is called several times has the root mean square over all
    calls. Both models see the same random numbers, and are left as they were, with their buffers. Gradients can be taken with
    respect to what ``run`` makes, as by the loss of a differential equation, but not with respect to parameters.

    Args:
        model: W_t.
        reference: W_0, of the same class.
        run: runs a model on the batch; what it returns is not used.
    """
    with torch.no_grad():
        now, before = _listen(model, run), _listen(reference, run)
        parts = dict(reference.named_modules())
        found = {}
        for name, calls in now.items():
            update = propagated = None
            if _has_terms(name, parts[name]) and _alike(calls, before.get(name, [])):
                mixed = [_mixed(parts[name], call) for call in calls]
                update = _rms(call.output - output for call, output in zip(calls, mixed, strict=True))
                propagated = _rms(output - call.output for output, call in zip(mixed, before[name], strict=True))
            inputs = [tensor for call in calls if (tensor := _first(call.args)) is not None]
            entered = _rms(inputs) if inputs else None
            found[name] = Terms(update, propagated, entered, _size(call.output for call in calls))
    return found


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a module does not leave to its parts, by name; also those out of which a parametrization makes its weights."""
    found = {name: value for name, value in module._parameters.items() if value is not None}
    inner = module._modules.get(_PARAMETRIZATIONS)
    if inner is not None:
        found |= {f"{_PARAMETRIZATIONS}.{name}": value for name, value in inner.named_parameters()}
    return found


def _has_terms(name: str, module: nn.Module) -> bool:
    """Whether a module has parameters of its own; the whole model only where it is one layer.

    What makes the weights of a layer is no layer: its output is a weight, and shall not keep its size when the width grows.
    """
    whole = name == "" and not module._modules.keys() <= {_PARAMETRIZATIONS}
    return bool(own_parameters(module)) and not whole and _PARAMETRIZATIONS not in name.split(".")


def _alike(calls: list[_Call], others: list[_Call]) -> bool:
    """Whether there is a difference: not where an expert is given other tokens than at first."""
    return [call.output.shape for call in calls] == [call.output.shape for call in others]


def _mixed(module: nn.Module, call: _Call) -> Tensor:
    """What the module gives for the inputs of a call, with the random numbers that the call had."""
    with call_isolated(module):
        for device, state in call.numbers.items():
            if device == "cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, device)
        output = _first((module(*mapped(call.args, torch.clone), **mapped(call.kwargs, torch.clone)),))
    assert output is not None, "gave a tensor before"
    return output


def _listen(model: nn.Module, run: Callable[[nn.Module], object]) -> dict[str, list[_Call]]:
    """What every module was called with and gave: copies, since what comes after may write in place."""
    heard: dict[str, list[_Call]] = {}
    # of the modules that are running, the innermost last: arguments, before the module writes to them, and generators
    begun: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], dict[str, Tensor]]] = []

    def listener(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def keep(module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
            while begun[-1][0] is not module:
                begun.pop()  # it raised, and the module around it went on
            args, kwargs, numbers = begun.pop()[1:]
            tensor = _first((output,))
            if tensor is not None:
                call = _Call(args, kwargs, _kept(tensor), numbers)
                heard.setdefault(name, []).append(call)

        return keep

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        begun.append((module, mapped(args, _kept), mapped(kwargs, _kept), rng_states()))

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(listener(name)).remove)
        stack.enter_context(call_isolated(model))
        torch.manual_seed(0)  # for dropout to fall on the same elements
        with torch.enable_grad():
            run(model)
    return heard


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``change`` applied to every tensor in its tuples, lists and dicts; anything else is left as it is."""
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
    """The floating-point tensor that stands first, alone or as first item of a tuple, or of a tuple in it as a packed sequence is."""
    first = values[0] if values else None
    while isinstance(first, (tuple, list)) and first:
        first = first[0]
    return first if isinstance(first, Tensor) and first.is_floating_point() and first.numel() else None


def _rms(tensors: Iterable[Tensor]) -> float:
    total, count = 0.0, 0
    for tensor in tensors:
        total += tensor.to(torch.float64).square().sum().item()
        count += tensor.numel()
    return math.sqrt(total / count) if total >= 0 else math.nan


def _size(tensors: Iterable[Tensor]) -> float:
    total, count = 0.0, 0
    for tensor in tensors:
        total += tensor.to(torch.float64).abs().sum().item()
        count += tensor.numel()
    return total / count


def _state(model: nn.Module) -> Iterator[Tensor]:
    return chain(model.parameters(), model.buffers())


def _of_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``model`` in ``dtype``: also what is complex, such as the angles of rotary embeddings, of which nn.Module.to keeps the real part."""

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(torch.promote_types(dtype, tensor.dtype))
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return model._apply(cast)  # type: ignore[no-any-return, no-untyped-call]
