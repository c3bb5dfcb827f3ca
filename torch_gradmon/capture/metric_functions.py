"""Run metric functions on tensors; a function that fails is switched off, and training continues."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import accelerator
from ..core.errors import WarningLog
from ..core.keys import PARAMETER_SOURCES, Key
from ..core.metric import Metric
from ..core.torch_modes import no_autocast
from ..statistics.tensor_access import refusal
from ..step.buffer import StepBuffer

#: The reason for a missing value of an optimizer's state.
NO_STATE = "the optimizer keeps no such state for it"


class MetricFunctions:
    """Runs metric functions safely.

    Args:
        complaints: gets failures.
    """

    def __init__(self, complaints: WarningLog) -> None:
        self._complaints = complaints
        self._proven: set[Key] = set()
        self._off: dict[Key, str] = {}
        self._answering: set[str] = set()  # metrics with any value so far
        self._silent: dict[str, Key] = {}  # the first without one, by metric

    def run(
        self,
        buffer: StepBuffer,
        source: str,
        name: str,
        metrics: Sequence[Metric],
        inputs: Sequence[Any],
        merging: bool = False,
        weight: int = 1,
    ) -> None:
        """Store the value of each metric function of ``inputs``; ``weight``: of a single value in a mean."""
        for metric in metrics:
            key, cause = Key(source, name, metric.name), f"metric:{source}:{metric.name}"
            if key in self._off:
                self._complaints.counts[cause] += 1
                buffer.absent[key.source, f"{name}/{metric.name}"] = self._off[key]
                continue
            try:
                value = self._call(metric, key, inputs)
                if value is None:
                    buffer.absent[key.source, f"{name}/{metric.name}"] = _why_nothing(metric, inputs[0])
                    self._note_nothing(metric, key, cause)
                else:
                    self._answering.add(cause)
                    (buffer.merge_value if merging else buffer.put_value)(key, value, metric.aggregation, weight)
            except Exception as error:
                self._off[key] = f"its function raised {type(error).__name__}: {error}"
                buffer.absent[key.source, f"{name}/{metric.name}"] = self._off[key]
                message = f"the {metric.source} metric {metric.name!r} failed on {name} and is off for it; training continues"
                self._complaints.add(cause, message, error)

    def _note_nothing(self, metric: Metric, key: Key, cause: str) -> None:
        """A function may have no value of some tensors. If the first comes round again before it had one of any, that is a mistake."""
        if metric.built_in or cause in self._answering:
            return
        if cause not in self._silent:
            self._silent[cause] = key
        elif self._silent[cause] == key:
            message = f"the function of the metric {metric.name!r} has returned None each time so far: is its return missing?"
            self._complaints.add(f"nothing:{metric.name}", message)

    def _call(self, metric: Metric, key: Key, inputs: Sequence[Any]) -> Any:
        """The value of the metric's function. Rejects in-place functions; the first call on each tensor runs on a copy."""
        assert callable(metric.function)
        first = key not in self._proven
        given = [each_tensor(x, (lambda t: t.detach().clone()) if first else (lambda t: t.detach())) for x in inputs]
        tensors = tensors_in(given)
        versions = [_version(t) for t in tensors]
        with torch.no_grad(), no_autocast(_device_type(inputs)):
            value = metric.function(*given)
        moved = versions != [_version(t) for t in tensors]
        # NumPy and the like write without moving a version counter; on the copy the values show it
        moved = moved or (first and not all(_equal(a, b) for a, b in zip(tensors, tensors_in(inputs), strict=True)))
        if moved:
            raise ValueError("it changes its input in place, which would change the training; use abs() instead of abs_()")
        self._proven.add(key)
        return value


def _why_nothing(metric: Metric, value: Any) -> str:
    """Why the function of a metric returns None for this value."""
    if metric.built_in and not isinstance(value, Tensor):
        return NO_STATE
    if metric.built_in and metric.source in PARAMETER_SOURCES:
        return metric.why_nothing(f"for a tensor of shape {list(value.shape)}")
    return metric.why_nothing()


def unscaled(tensor: Tensor, inverse_scale: Tensor) -> Tensor:
    """``tensor`` times ``inverse_scale``, in float32 or wider, since a narrow dtype cannot hold every inverse scale."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * inverse_scale.to(tensor.device)


def tensors_in(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among ``values``, and those in mappings among them."""
    return [t for x in values for t in (x.values() if isinstance(x, Mapping) else [x]) if isinstance(t, Tensor)]


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.layout != torch.strided or refusal(a) is not None:
        return True  # only the version counter can show a change
    return torch.equal(a, b) or (torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))


def each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with its tensors, or those in a mapping, changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: change(item) if isinstance(item, Tensor) else item for name, item in value.items()}
    return value


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _device_type(inputs: Sequence[Any]) -> str:
    return next((tensor.device.type for tensor in tensors_in(inputs)), "cpu")


@contextlib.contextmanager
def untouched_rng() -> Iterator[None]:
    """Restore all random generators afterwards, so training draws the same numbers as without."""
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    numpy_state = None if numpy is None else numpy.get_state()
    python_state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]), accelerator.untouched_generators([accelerator.in_use()]):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.set_state(numpy_state)
