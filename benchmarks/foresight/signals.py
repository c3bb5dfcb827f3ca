"""The signals that are compared, each as a score by step: how far it has left its own past, or its level."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from examples.plugins.foresight import AcceleratedGrowth, Growth, RecordHigh
from torch_gradmon.core import keys as n
from torch_gradmon.core.keys import Key
from torch_gradmon.core.moments import VIEWS
from torch_gradmon.core.records import StepRecord

#: Steps between two measurements of a signal.
EVERY = 5
_Values = tuple[Sequence[str], Tensor]


class Level:
    """The median of the last values, whatever they were before."""

    def __init__(self, values: int = 5) -> None:
        self._values = values
        self._logs: list[Tensor] = []

    def update(self, step: int, names: Sequence[str], logs: Tensor) -> Growth | None:
        """As of the other two."""
        self._logs = [*self._logs[1 - self._values :], logs] if not self._logs or len(self._logs[-1]) == len(logs) else [logs]
        if len(self._logs) < self._values:
            return None
        middle = torch.stack(self._logs).median(dim=0).values
        place = int(middle.argmax())
        return Growth(names[place], float(middle[place]), 0.0)


@dataclass(frozen=True)
class Signal:
    """One signal.

    Attributes:
        name: in the table.
        read: names and logarithms of the values in a record; None if it has none. What warns by falling is negated.
        watch: what the scores are compared with.
        source: where the field has it from; empty for ours.
    """

    name: str
    read: Callable[[StepRecord], _Values | None]
    watch: Callable[[], Any]
    source: str = ""


def _whole(name: str) -> Callable[[StepRecord], _Values | None]:
    def read(record: StepRecord) -> _Values | None:
        value = record.values.get(Key(n.SUMMARY, "", name))
        return None if value is None else ((name,), torch.tensor([value], dtype=torch.float64).log())

    return read


def _keys(source: str, metric: str, falls: bool = False, rarer: bool = False) -> Callable[[StepRecord], _Values | None]:
    def read(record: StepRecord) -> _Values | None:
        found = {key.name: value for key, value in record.values.items() if key.source == source and key.metric == metric}
        if rarer:  # of two shares, the one that vanishes
            return _logs({name: min(value, 1 - value) for name, value in found.items()}, falls=True)
        return _logs(found, falls)

    return read


def _rows(source: str, metric: str, wanted: Callable[[str], bool] = bool) -> Callable[[StepRecord], _Values | None]:
    def read(record: StepRecord) -> _Values | None:
        table = record.tables.get(source)
        if table is None or not table.has(metric):
            return None
        values = VIEWS[metric].compute(table.rows).tolist()
        return _logs({name: value for name, value in zip(table.names, values, strict=True) if wanted(name)})

    return read


def _logs(values: Mapping[str, float], falls: bool = False) -> _Values | None:
    if not values:
        return None
    logs = torch.tensor(list(values.values()), dtype=torch.float64).clamp(min=1e-30).log()
    return tuple(values), -logs if falls else logs


def _is_weight(name: str) -> bool:
    return "weight" in name


def _is_whole(name: str) -> bool:
    return name.startswith(n.ROOT)


_LOGITS, _ENTROPY = n.ATTENTION_SOURCES["max_logit"], n.ATTENTION_SOURCES["entropy"]
SIGNALS = (
    Signal("growth of a weight's norm, faster than before", _rows(n.PARAMETER, "norm", _is_weight), AcceleratedGrowth),
    Signal("output, root mean square above its highest", _rows(n.ACTIVATION, "rms", _is_whole), RecordHigh),
    Signal("any layer's output, the same", _rows(n.ACTIVATION, "rms"), RecordHigh),
    Signal("norm of the gradient above its highest", _whole("grad_norm"), RecordHigh),
    Signal("one layer's gradient, the same", _rows(n.GRADIENT_BEFORE_CLIP, "norm", _is_weight), RecordHigh),
    Signal("one weight's update over its norm, the same", _keys(n.UPDATE, "ratio"), RecordHigh),
    Signal("angle of an update above its highest", _keys(n.UPDATE, "angle"), RecordHigh, "arXiv 2305.17212"),
    Signal("Adam out of step, level", _keys(n.OPTIMIZER, "second_moment_ratio"), Level, "arXiv 2304.13013"),
    Signal("Adam out of step above its highest", _keys(n.OPTIMIZER, "second_moment_ratio"), RecordHigh, "arXiv 2304.13013"),
    Signal("learning rate over the critical one, level", _whole("lr_over_critical"), Level, "arXiv 2601.16979"),
    Signal("spectral norm, growth faster than before", _keys(n.PARAMETER, "spectral_norm"), AcceleratedGrowth),
    Signal(
        "stable rank, fall faster than before", _keys(n.PARAMETER, "stable_rank", True), AcceleratedGrowth, "arXiv 2602.01734"
    ),
    Signal(
        "inputs on one side of a singular vector",
        _keys(n.ACTIVATION, "spectral_alignment", rarer=True),
        RecordHigh,
        "arXiv 2510.04202",
    ),
    Signal("participation ratio below its lowest", _keys(n.ACTIVATION, "participation_ratio", True), RecordHigh),
    Signal("largest logit of attention above its highest", _keys(_LOGITS, "max"), RecordHigh, "arXiv 2507.20534"),
    Signal("entropy of attention below its lowest", _keys(_ENTROPY, "min", True), RecordHigh, "arXiv 2303.06296"),
    Signal("logsumexp of the logits above its highest", _keys(n.ACTIVATION, "logsumexp_square"), RecordHigh, "arXiv 2309.14322"),
)


class Scores:
    """The scores of all signals in one training, by :meth:`update` with each record."""

    def __init__(self) -> None:
        self._watches = {signal.name: signal.watch() for signal in SIGNALS}
        self.by_signal: dict[str, list[tuple[int, float]]] = {signal.name: [] for signal in SIGNALS}

    def update(self, record: StepRecord) -> None:
        """Take a record."""
        if record.step % EVERY:
            return
        for signal in SIGNALS:
            if (found := signal.read(record)) is None:
                continue
            growth = self._watches[signal.name].update(record.step, *found)
            if growth is not None:
                self.by_signal[signal.name].append((record.step, growth.excess))


def episodes(steps: Iterable[int], apart: int = 50) -> list[int]:
    """The first steps of episodes: a step belongs to the one before if it is less than fifty steps later."""
    found: list[int] = []
    last = -apart
    for step in steps:
        if step - last >= apart:
            found.append(step)
        last = step
    return found
