"""The terms of the refined coordinate check for one call of one module, and their keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...core import keys as n
from ...core.records import Metric
from ...statistics.request import accumulator_dtype, refusal
from ...step.buffer import StepBuffer
from ...step.plan import BuiltIn
from ..measurer import Measurer
from ..modules.structure import rest_of

_NOT_OF_INDICES = "an embedding takes indices, which have no difference"


def l2norm(x: Tensor) -> Tensor:
    """Euclidean norm over the last dimension, computed in float64: ``[..., n]`` to ``[...]``."""
    wide = torch.promote_types(x.dtype, accumulator_dtype(x.device))
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=wide)
    return norm


def rms(x: Tensor) -> Tensor:
    """:func:`l2norm` over the square root of the size, which does not grow with the width."""
    return l2norm(x) / math.sqrt(x.shape[-1] if x.dim() else 1)


def _built_ins(subject: str) -> dict[str, BuiltIn]:
    return {
        "l2norm": BuiltIn(frozenset(), "1", f"Euclidean norm over the last dimension of {subject}, mean over the rest", l2norm),
        "rms": BuiltIn(frozenset(), "1", f"root mean square over the last dimension of {subject}, mean over the rest", rms),
    }


#: Built-in metrics of the check.
RCC_BUILT_INS = {
    n.RCC_UPDATE: _built_ins("what the change of the weights does to the output, f(x_t; W_t) - f(x_t; W_0)"),
    n.RCC_PROPAGATED: _built_ins(
        "what the change of the input does to the output at the first weights, f(x_t; W_0) - f(x_0; W_0)"
    ),
    n.RCC_INPUT: _built_ins("the input"),
    n.RCC_INPUT_DIFFERENCE: _built_ins("the difference to the reference's input"),
}


class CheckTerms:
    """Puts the terms of calls into a step's buffer.

    Args:
        measurer: runs the metric functions.
    """

    def __init__(self, measurer: Measurer) -> None:
        self._measurer = measurer
        self._buffer: StepBuffer | None = None
        self._metrics: tuple[Metric, ...] = ()
        self._modules: Mapping[str, Callable[[], nn.Module | None]] = {}

    def begin(
        self, buffer: StepBuffer, metrics: tuple[Metric, ...], modules: Mapping[str, Callable[[], nn.Module | None]]
    ) -> None:
        """Start a step with the metrics of the check that are due in it; ``modules`` by name."""
        self._buffer, self._metrics, self._modules = buffer, metrics, modules

    def end(self) -> None:
        """End the step."""
        self._buffer = None

    def wants(self, name: str) -> bool:
        """Whether a metric matches the module ``name``."""
        return any(metric.matches(name) for metric in self._metrics)

    def set_absent(self, name: str, reason: str, sources: tuple[str, ...] = n.RCC_SOURCES) -> None:
        """Set why a module has no values."""
        assert self._buffer is not None
        for source in sources:
            self._buffer.absent[source, name] = reason

    def of_inputs(self, name: str, module: nn.Module, now: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> None:
        """Measure the inputs of a call and of the reference, by path: |x_t| and |x_t - x_0|."""
        if isinstance(module, nn.Embedding):
            return self.set_absent(name, _NOT_OF_INDICES, (n.RCC_PROPAGATED, n.RCC_INPUT, n.RCC_INPUT_DIFFERENCE))
        for path, x in now.items():
            self._put(n.RCC_INPUT, name, path, x)
            self._put(n.RCC_INPUT_DIFFERENCE, name, path, x, start.get(path))
        if isinstance(module, nn.LayerNorm):
            # the weight of a layer norm multiplies the normalised input
            normalised = [_normalised(each.get(""), module) for each in (now, start)]
            self._put(n.RCC_UPDATE, name, ".weight/x_t", normalised[0])
            self._put(n.RCC_PROPAGATED, name, ".weight/x_t-x_0", *normalised)
        return None

    def of_outputs(
        self,
        name: str,
        module: nn.Module,
        part: nn.Module,
        now: Mapping[str, Tensor],
        moved: Mapping[str, Tensor],
        start: Mapping[str, Tensor],
    ) -> None:
        """Measure the outputs of a call, by path: ``now`` f(x_t; W_t), ``moved`` f(x_t; W_0) and ``start`` f(x_0; W_0) of ``part``."""
        for path, output in now.items():
            self._put(n.RCC_UPDATE, name, path, output, moved.get(path))
            if not isinstance(module, nn.Embedding):
                self._put(n.RCC_PROPAGATED, name, path, moved.get(path), start.get(path))
        if not isinstance(module, (nn.Linear, nn.LayerNorm)) or now.keys() != {""}:
            return
        weight = [_without(now.get(""), module), _without(moved.get(""), part), _without(start.get(""), part)]
        self._put(n.RCC_UPDATE, name, ".weight", weight[0], weight[1])
        self._put(n.RCC_PROPAGATED, name, ".weight", weight[1], weight[2])
        self._put(n.RCC_UPDATE, name, ".weight/W_t x_t", weight[0])
        self._put(n.RCC_PROPAGATED, name, ".weight/W_0 x_0", weight[2])

    def _put(self, source: str, name: str, path: str, tensor: Tensor | None, *minus: Tensor | None) -> None:
        """Measure ``tensor``, minus another one, under ``name`` and its path."""
        assert self._buffer is not None
        metrics = [metric for metric in self._metrics if metric.source == source and metric.matches(name)]
        if not metrics:
            return
        key = name + (path if path.startswith(".weight") else rest_of(name + path, name, self._modules))
        value = self._difference(tensor, *minus)
        if isinstance(value, str):
            self._buffer.absent[source, key] = value
        else:
            self._measurer.functions.run(self._buffer, source, key, metrics, [value], merging=True)

    @staticmethod
    def _difference(*tensors: Tensor | None) -> Tensor | str:
        """The first tensor, minus the second if given, in float32 or wider; or the reason why that is not possible."""
        found: list[Tensor] = []
        for tensor in tensors:
            if tensor is None:
                return "the reference module has no such tensor"
            reason = refusal(tensor)
            if reason is None and not (tensor.is_floating_point() or tensor.is_complex()):
                reason = f"a tensor of dtype {tensor.dtype}, which has no difference"
            if reason is None and tensor.layout != torch.strided:
                reason = f"a tensor of layout {tensor.layout}"
            if reason is None and not tensor.numel():
                reason = "it has no elements"
            if reason is not None:
                return reason
            found.append(tensor.to(torch.promote_types(tensor.dtype, torch.float32)))
        if len(found) == 1:
            return found[0]
        if found[0].shape != found[1].shape:
            return f"it has another shape in the reference module, {tuple(found[1].shape)}"
        return found[0] - found[1].to(found[0].device)


def _normalised(x: Tensor | None, module: nn.LayerNorm) -> Tensor | None:
    if x is None or refusal(x) is not None or x.shape[-len(module.normalized_shape) :] != module.normalized_shape:
        return None
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.nn.functional.layer_norm(wide, module.normalized_shape, None, None, module.eps)


def _without(output: Tensor | None, module: nn.Module) -> Tensor | None:
    """The output of a linear layer or layer norm without its bias."""
    bias: Any = getattr(module, "bias", None)
    if output is None or not isinstance(bias, Tensor):
        return output
    if refusal(bias) is not None:
        return None
    wide = torch.promote_types(output.dtype, torch.float32)  # no rounding before the next subtraction
    return output.to(wide) - bias.detach().to(output.device)
