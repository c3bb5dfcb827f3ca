"""A run layer by layer: a row for each parameter, or for each block of them."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...analysis.diagnosis.series import lower_median
from ...analysis.plots.charts import blocks
from ...analysis.spike_report import SpikeSummary
from ...core import keys as n
from ...core.errors import nearest
from ...core.formatting import printable
from ...core.keys import SUMMARY, Key
from ...core.moments import Column
from ...core.records import SpikeEvent, StepRecord, TrainedPart, loss_among
from ...runs.reader import RunReader, StatsSeries, most_cells
from ...spikes.signals import Episode, episodes, largest
from ...step.summary import KEY_DOCUMENTATION
from ..catalogue import MOST

#: Counters, which are shown as numbers of steps.
_TOTALS = frozenset({"steps_not_applied", "steps_skipped"})
_ORDER = {name: place for place, name in enumerate(KEY_DOCUMENTATION)}


def is_of_whole_model(key: Key) -> bool:
    return key.source in (SUMMARY, "")


@dataclass(frozen=True)
class ValueSummary:
    name: str  # of the value, without ``gradmon/``
    is_logged: bool  # whether the script logged it
    count: int  # number of steps that have it
    first: float  # earliest value
    median: float | None  # lower median of the finite values; None without any, as for ``largest`` and ``at``
    last: float  # latest value
    largest: float | None  # largest finite value
    at: int | None  # the first step with it
    nonfinite: int  # number of values that are NaN or infinite
    since: int | None  # the first step with such a value

    @classmethod
    def of(cls, key: Key, steps: array[int], values: array[float]) -> ValueSummary:
        finite = [value for value in values if math.isfinite(value)]
        largest = max(finite, default=None)
        since = next((step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)), None)
        at = None if largest is None else steps[values.index(largest)]
        name, is_logged = (key.metric, False) if key.source == SUMMARY else (key.name, True)
        ends, spoiled = (values[0], _known(lower_median(finite)), values[-1]), len(values) - len(finite)
        return cls(name, is_logged, len(values), *ends, largest, at, spoiled, since)

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self).items()
        return {name: str(value) if isinstance(value, float) and not math.isfinite(value) else value for name, value in found}


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


@dataclass
class Overview:
    steps: int = 0  # number of steps
    first: int | None = None  # first, last: the first and the last of them; None without any
    last: int | None = None
    began: float = math.nan  # began, ended: when these two steps ended, in seconds since the epoch
    ended: float = math.nan
    # the smallest, the largest and the latest learning rate; of several parameter groups, the latest largest one
    rates: tuple[float, float, float] | None = None
    not_applied: int = 0  # number of steps that the optimizer did not apply
    skipped: int = 0  # number of these that were skipped because of a spike
    events: list[SpikeEvent] = field(default_factory=list)  # the spikes
    _values: dict[Key, tuple[array[int], array[float]]] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[StepRecord]) -> Overview:
        found = cls()
        for record in records:
            if not found.steps:
                found.first, found.began = record.step, record.time
            found.steps += 1
            found.last, found.ended = record.step, record.time
            found.not_applied += not record.applied
            found.skipped += bool(record.skipped)
            found.events += record.events
            if rates := rates_in(record.context):
                low, high = (math.inf, -math.inf) if found.rates is None else found.rates[:2]
                found.rates = min(low, *rates), max(high, *rates), max(rates)
            for key, value in record.values.items():
                if is_of_whole_model(key) and key.metric not in _TOTALS:
                    steps, values = found._values.setdefault(key, (array("q"), array("d")))
                    steps.append(record.step)
                    values.append(value)
        return found

    @property
    def lines(self) -> list[ValueSummary]:
        """The loss, then the values of the whole model in the order of their documentation, then other logged values."""
        loss = loss_among(self._values)
        keys = sorted(self._values, key=lambda key: (key != loss, key.source != SUMMARY, _ORDER.get(key.metric, len(_ORDER))))
        return [ValueSummary.of(key, *self._values[key]) for key in keys]


def rates_in(context: Mapping[str, Any]) -> list[float]:
    rates = context.get("lr", [])
    return [float(rate) for rate in (rates if isinstance(rates, list) else [rates]) if isinstance(rate, (int, float))]


# --- rows of layers ---

#: So many rows are never too many for the steps.
_FEW = 160


@dataclass(frozen=True)
class LayerRow:
    """A parameter, or a block of them, over the steps. Unknown values are None."""

    name: str  # of the parameter or block
    parameters: int  # number of parameters
    norm: float | None  # median of the finite gradient norms, before clipping if they are known
    largest: float | None  # largest finite norm
    at: int | None  # the first step with it
    share: float | None  # of the squared norm of the whole gradient, mean over the steps
    clipped: float | None  # median norm of the gradient after clipping
    update: float | None  # median norm of the update over that of the weights before it
    zeros: float | None  # median share of near-zero gradient elements
    nonfinite: int  # number of steps whose gradient has NaN or infinite elements
    since: int | None  # the first of these


def sort_rows(rows: Sequence[LayerRow], column: str) -> list[LayerRow]:
    """Sorted by a column, the largest first, or by ``"name"``; rows without a value come last."""
    if column == "name":
        return sorted(rows, key=lambda row: row.name)
    return sorted(rows, key=lambda row: -math.inf if (value := getattr(row, column)) is None else value, reverse=True)


class Groups(NamedTuple):
    titles: tuple[str, ...]
    place: Mapping[str, int]  # number of each parameter's row

    def merged(self, stack: StatsSeries) -> StatsSeries:
        names = tuple(name for name in stack.names if name in self.place)
        return stack.of(names).merged(self.titles, [self.place[name] for name in names])


def groups(names: Sequence[str], depth: int | None = None, everything: bool = False) -> Groups:
    """A row for each of ``names``, or for blocks if they are many; with ``depth``, for that many parts of their paths.

    >>> groups(["h.0.a.weight", "h.0.b.weight", "head.weight"], depth=2).titles
    ('h.0', 'head.weight')
    """
    if depth is None:
        by_block = blocks(names, len(names) if everything else MOST)
        title_of = {place: title for title, places in by_block.items() for place in places}
        titles = [title_of[place] for place in range(len(names))]
    else:
        titles = [".".join(name.split(".")[:depth]) for name in names]
    members = Counter(titles)
    titles = [name if members[title] == 1 else title for name, title in zip(names, titles, strict=True)]
    order = {title: number for number, title in enumerate(dict.fromkeys(titles))}
    return Groups(tuple(order), {name: order[title] for name, title in zip(names, titles, strict=True)})


def layer_rows(run: RunReader, grouped: Groups, since: int | None = None) -> list[LayerRow]:
    """A row for each group, from the statistics of the steps from ``since`` on; empty if no gradient was measured.

    Raises ValueError if a table of these steps and groups would be far larger than the run, as nearly all of its cells are empty.
    """
    source, titles = gradient_source(run), grouped.titles
    if source is None or not titles:
        return []
    if len(titles) > _FEW:
        _check_size(run, source, grouped, since)
    steps, parts = list[int](), []
    for whole in run.stacks(source, since):
        stack, total = grouped.merged(whole), whole.values("norm").square().nansum(1, keepdim=True)
        is_known = (total > 0) & total.isfinite() & ~whole.values("nonfinite_count").any(1, keepdim=True)
        norm = _values(stack, "norm")
        share = torch.where(is_known, (norm.square() / total).nan_to_num(nan=0.0), torch.nan)
        steps += stack.steps
        parts.append(torch.stack([norm, _values(stack, "sparsity"), stack.values("nonfinite_count"), share], -1))
    if not steps:
        return []
    norms, zeros, nonfinite, shares = torch.cat(parts).unbind(-1)  # [steps, groups]
    clipped = [grouped.merged(stack) for stack in run.stacks(n.GRADIENT, since)] if source == n.GRADIENT_BEFORE_CLIP else []
    after = [_values(stack, "norm") for stack in clipped]
    if after and _same(steps, norms, [step for stack in clipped for step in stack.steps], torch.cat(after)):  # nothing is clipped
        after = []
    ratios = []
    for updates in run.stacks(n.UPDATE, since):
        for weights in run.stacks(n.PARAMETER, among=updates.steps):
            there = set(weights.names)
            both = tuple(name for name in updates.names if name in there)
            before, moved = (_values(grouped.merged(each.of(both)), "norm") for each in (weights, updates.at(weights.steps)))
            ratios.append(torch.where(before > 0, moved / before, torch.nan))
    members, count, bad = Counter(grouped.place.values()), len(titles), (nonfinite > 0).int()
    finite, spoiled = norms.isfinite(), bad.sum(0).tolist()
    largest, at = torch.where(finite, norms, -math.inf).max(0)
    columns = zip(
        titles,
        [members[row] for row in range(count)],
        _medians([norms], count),
        torch.where(finite.any(0), largest, torch.nan).tolist(),
        [steps[place] if is_known else None for place, is_known in zip(at.tolist(), finite.any(0).tolist(), strict=True)],
        shares.nanmean(0).tolist(),
        _medians(after, count),
        _medians(ratios, count),
        _medians([zeros], count),
        spoiled,
        [steps[place] if is_bad else None for place, is_bad in zip(bad.argmax(0).tolist(), spoiled, strict=True)],
        strict=True,
    )
    return [LayerRow(*map(_known, each)) for each in columns]


def _check_size(run: RunReader, source: str, grouped: Groups, since: int | None) -> None:
    if len(grouped.titles) * len(run.steps) <= most_cells(0):
        return
    steps = values = 0
    for stack in run.stacks(source, since):
        steps += len(stack.steps)
        values += len(stack.steps) * len(stack.names)
    if len(grouped.titles) * steps > most_cells(values):
        raise ValueError(
            f"a table of {len(grouped.titles):,} rows is too large for {steps:,} steps that have {values / steps:,.1f} layers "
            "on average: use --keys, --depth or --tail"
        )


def gradient_source(run: RunReader) -> str | None:
    """The gradients before clipping if they were measured, otherwise those after it; None without any."""
    return next((source for source in (n.GRADIENT_BEFORE_CLIP, n.GRADIENT) if source in run.sources), None)


def _values(stack: StatsSeries, metric: str) -> Tensor:
    """A metric of merged rows; NaN for groups without values in these steps."""
    return torch.where(stack.rows[..., Column.COUNT] > 0, stack.values(metric), torch.nan)


def _medians(parts: list[Tensor], count: int) -> list[float]:
    """Of the finite values of each of ``count`` groups, from ``[steps, groups]``; NaN without any."""
    values = torch.cat(parts) if parts else torch.full((1, count), torch.nan)
    found: list[float] = torch.where(values.isinf(), torch.nan, values).nanmedian(dim=0).values.tolist()
    return found


def _same(steps: Sequence[int], before: Tensor, others: Sequence[int], after: Tensor) -> bool:
    """Whether the norms are equal in all steps that have both."""
    place = {step: number for number, step in enumerate(steps)}
    there = [number for number, step in enumerate(others) if step in place]
    rows = before[[place[others[number]] for number in there]]
    return torch.allclose(rows, after[there], rtol=1e-6, atol=0.0, equal_nan=True)


# --- the summary of a run ---

#: Spikes and logged values that are shown.
_SPIKES, _LOGGED = 8, 8


@dataclass(frozen=True)
class RunSummary:
    name: str  # of the run, as given
    overview: Overview  # its steps, times and learning rates
    segments: Sequence[tuple[int, int]]  # the first and the last step of each part that was written without interruption
    lines: Sequence[ValueSummary]  # values of the whole model
    unshown: int  # number of logged values that are not among them
    rows: Sequence[LayerRow]  # parameters or blocks
    spikes: Sequence[SpikeSummary]  # the largest ones, in order
    spiked: Sequence[Episode]  # all of them
    model: str  # the model in one line
    parts: Sequence[TrainedPart]  # what trained when the optimizers were attached

    def to_dict(self) -> dict[str, Any]:
        """The summary for JSON: unknown values are None, values that are not finite are strings, as in the sinks."""
        found = self.overview
        return {
            "run": self.name,
            "steps": {
                "count": found.steps,
                "first": found.first,
                "last": found.last,
                "segments": [list(part) for part in self.segments],
            },
            "time": None if not found.steps else {"first": found.began, "last": found.ended},
            "lr": None if found.rates is None else dict(zip(("smallest", "largest", "last"), found.rates, strict=True)),
            "model": self.model,
            "trains": [asdict(part) for part in self.parts],
            "not_applied": found.not_applied,
            "skipped": found.skipped,
            "values": [line.to_dict() for line in self.lines],
            "layers": [asdict(row) for row in self.rows],
            "spikes": [spike._asdict() for spike in self.spikes],
            "spikes_in_all": len(self.spiked),
            "steps_with_spikes": sum(len(spike.steps) for spike in self.spiked),
        }


def summarize(
    run: RunReader,
    name: str,
    *,
    last: int | None = None,
    pattern: re.Pattern[str] | None = None,
    depth: int | None = None,
    everything: bool = False,
    sort: str | None = None,
) -> RunSummary:
    """The summary of the run ``name``, of its ``last`` steps or all.

    ``pattern`` selects parameters, ``depth`` groups them by that many parts of their paths; ``everything`` gives each its own row, however
    many there are, and shows all logged values; ``sort`` is a column, by default parameters are in model order. Raises ValueError if
    ``pattern`` matches no parameter.
    """
    steps = run.steps
    since = steps[-last] if last is not None and last < len(steps) else None
    overview = Overview.of(run.records(since, is_of_whole_model))
    source = gradient_source(run)
    names = [] if source is None else run.tensors(source)
    kept = [each for each in names if pattern is None or pattern.search(each)]
    if pattern is not None and not kept:
        raise ValueError(f"--keys {pattern.pattern!r} matches no parameter of the run{nearest(pattern.pattern, names)}")
    rows = layer_rows(run, groups(kept, depth, everything), since)
    lines = overview.lines
    hidden = [] if everything else [line for line in lines if line.is_logged][_LOGGED:]
    spiked = episodes(overview.events, [step for step in steps if since is None or step >= since])
    return RunSummary(
        printable(name),
        overview,
        [(max(first, since or first), end) for first, end in run.segments if since is None or end >= since],
        [line for line in lines if line not in hidden],
        len(hidden),
        rows if sort is None else sort_rows(rows, sort),
        [SpikeSummary.of(run, spike) for spike in largest(spiked, len(spiked) if everything else _SPIKES)],
        spiked,
        run.model_text,
        run.trained_parts,
    )
