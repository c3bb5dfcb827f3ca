"""The two terms of the refined coordinate check, and the plain check, in float64.

Haas et al. 2025 (arXiv 2505.22491) split the change of a layer's output after t steps, on one and the same batch, into

    W_t x_t - W_0 x_0 = (W_t - W_0) x_t + W_0 (x_t - x_0)

the part of the layer's own update and the part from below. For any module f these are f(W_t, x_t) - f(W_0, x_t) and
f(W_0, x_t) - f(W_0, x_0), where W stands for all of its parameters, including biases.
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
from ...core.torch_modes import rng_states, set_rng_states

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
            if _has_terms(name, parts[name]) and _same_shapes(calls, before.get(name, [])):
                mixed = [_moved_output(parts[name], call) for call in calls]
                update = _rms(call.output - output for call, output in zip(calls, mixed, strict=True))
                propagated = _rms(output - call.output for output, call in zip(mixed, before[name], strict=True))
            inputs = [tensor for call in calls if (tensor := _first(call.args)) is not None]
            entered = _rms(inputs) if inputs else None
            found[name] = LayerTerms(update, propagated, entered, _mean_size(call.output for call in calls))
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


def _same_shapes(calls: list[_RecordedCall], others: list[_RecordedCall]) -> bool:
    """Whether the calls can be compared; an expert may get other tokens than at first."""
    return [call.output.shape for call in calls] == [call.output.shape for call in others]


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


def _rms(tensors: Iterable[Tensor]) -> float:
    total, count = 0.0, 0
    for tensor in tensors:
        total += tensor.to(torch.float64).square().sum().item()
        count += tensor.numel()
    return math.sqrt(total / count) if total >= 0 else math.nan


def _mean_size(tensors: Iterable[Tensor]) -> float:
    total, count = 0.0, 0
    for tensor in tensors:
        total += tensor.to(torch.float64).abs().sum().item()
        count += tensor.numel()
    return total / count


def _state(model: nn.Module) -> Iterator[Tensor]:
    return chain(model.parameters(), model.buffers())


def _of_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``model`` in ``dtype``. Complex tensors such as rotary embeddings stay complex; nn.Module.to would drop the imaginary part."""

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(torch.promote_types(dtype, tensor.dtype))
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return model._apply(cast)  # type: ignore[no-any-return, no-untyped-call]
