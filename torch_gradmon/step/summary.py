"""Whole-model values for the dashboard: a few keys in one section, ``gradmon/``, from the statistics of all layers."""

from __future__ import annotations

import math
import re
import statistics
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence, Set
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import keys as n
from ..core.errors import nearest, warn_user
from ..core.keys import Key, blocks_of, compile_pattern, shared_key
from ..core.moments import ALL_COLUMNS, SQUARES, VIEWS, Column, merge_by_group
from ..core.records import ASKED_LATE, Block, StatsTable, are_others, brings_others, views_of

TOP = 10
SHARE = "share"


class LayerSelection:
    """Chooses which per-layer values a dashboard gets in addition to the metrics requested individually.

    ``choice``: None; ``"all"``; ``"blocks"``: norms over blocks (``h.0``) and optimizer parameter groups; ``"top"``: the ten parameters
    with the largest share of the squared norm; else a pattern for parameter names. The values are the norm before clipping, and the update
    ratio on steps that measure updates for a preset or a metric.
    """

    def __init__(self, choice: str | re.Pattern[str] | None) -> None:
        self.choice = choice
        self._pattern = compile_pattern(choice, "layers") if choice not in (None, "all", "blocks", "top") else None
        self._labels: tuple[Sequence[str], Mapping[str, str]] = (), {}  # of the last names

    def warn_of_idle(self, names: Iterable[str]) -> None:
        names = list(names)
        if self._pattern is not None and not any(self._pattern.search(name) for name in names):
            pattern = self._pattern.pattern
            warn_user(f"layers={pattern!r} matches no parameter of the model{nearest(pattern, names)}")

    @property
    def needs(self) -> dict[str, frozenset[Column]]:
        """The statistics of all parameters that the values of every step need, by source."""
        return {} if self.choice is None else {n.GRADIENT_BEFORE_CLIP: SQUARES}

    def _label_of(self, names: Sequence[str]) -> Mapping[str, str]:
        """The label of each parameter that belongs to a value which is always requested: its block, or its own name."""
        if names is not self._labels[0]:  # the same until the model changes
            labels = {name: name for name in names if self._pattern is None or self._pattern.search(name)}
            self._labels = names, blocks_of(names) if self.choice == "blocks" else labels
        return self._labels[1]

    def members(self, names: Sequence[str]) -> dict[str, list[str]]:
        """The parameters of each value that is always requested: single parameters, those of a pattern, or blocks."""
        found: dict[str, list[str]] = {}
        for name, label in self._label_of(names).items() if self.choice not in (None, "top") else ():
            found.setdefault(label, []).append(name)
        return found

    def values(
        self,
        tables: Mapping[str, StatsTable],
        base: StatsTable | None,
        groups: Sequence[tuple[str, frozenset[str]]],
        names: Sequence[str],
    ) -> list[Block]:
        """The chosen values of one step; ``groups`` are the optimizers' parameter groups by name, ``names`` all parameters."""
        tables = {source: table for source, table in tables.items() if table.has("norm")}
        gradients, updates = tables.get(n.GRADIENT_BEFORE_CLIP), tables.get(n.UPDATE)
        if self.choice == "top":
            return [_block(n.GRADIENT_BEFORE_CLIP, SHARE, top_shares(gradients, TOP))]
        found = []
        if gradients is not None:
            labels, squares = self._squares(gradients, groups, names)
            norms = list(zip(labels, squares.sqrt().tolist(), strict=True))
            tensors = gradients.row_of  # a block may be a single one
            views, sums = [one for one in norms if one[0] in tensors], [one for one in norms if one[0] not in tensors]
            found += [_block(n.GRADIENT_BEFORE_CLIP, "norm", views, are_views=True), _block(n.GRADIENT_BEFORE_CLIP, "norm", sums)]
        if updates is not None and base is not None:
            (labels, squares), (_, before) = (self._squares(table, groups, names) for table in (updates, base))
            changes = zip(labels, (squares / before).sqrt().tolist(), before.tolist(), strict=True)
            ratios = [(label, ratio) for label, ratio, old in changes if old > 0]
            found.append(_block(n.UPDATE, "ratio", ratios))
        return [block for block in found if block.keys]

    def _squares(
        self, table: StatsTable, groups: Sequence[tuple[str, frozenset[str]]], names: Sequence[str]
    ) -> tuple[list[str], Tensor]:
        """The sum of squares of each label, in the order of the table, and of each group that has elements."""
        labels, rows = _sums(table, self._label_of(names))
        known, of_groups = _sums(table, {name: label for label, members in groups for name in members})
        places = [known.index(label) for label, _ in groups if label in known]
        places = [place for place in places if of_groups[place, Column.COUNT] > 0]
        return [*labels, *(known[place] for place in places)], torch.cat([rows, of_groups[places]])[:, Column.SQUARE_SUM]


def _block(source: str, metric: str, values: Sequence[tuple[str, float]], are_views: bool = False) -> Block:
    keys = tuple(shared_key(source, name, metric) for name, _ in values)
    return Block(keys, array("d", [value for _, value in values]), source if are_views else "")


def _sums(table: StatsTable, label_of: Mapping[str, str]) -> tuple[list[str], Tensor]:
    """The labels of parameters, in the order of the table, and one merged row for each. Exact, since rows are additive."""
    rows = [row for row, name in enumerate(table.names) if name in label_of]
    labels = [label_of[table.names[row]] for row in rows]
    number = {label: index for index, label in enumerate(dict.fromkeys(labels))}
    return list(number), merge_by_group(table.rows[rows], [number[label] for label in labels], len(number))


def top_shares(table: StatsTable | None, count: int) -> list[tuple[str, float]]:
    """The parameters with the largest share of the model's squared norm, largest first; empty if that is unknown, zero or not finite."""
    if table is None or table.is_part or not table.has("norm"):
        return []
    squares = table.rows[:, Column.SQUARE_SUM]
    total = float(squares.sum())
    if not 0 < total < float("inf"):
        return []
    best = squares.topk(min(count, len(squares)))
    return [(table.names[i], s / total) for s, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)]


# --- Why a parameter has no value in a step, as text on request ---


def not_applied(context: Mapping[str, Any]) -> str:
    """Why what the optimizer would have changed has no value; ``context`` is that of the record."""
    why = context.get("interrupted")
    return f"the step was not applied: {why}" if why else "the step was not applied"


#: What makes gradients before clipping known where no hook sees them: those of a backward pass, and those that the optimizer got otherwise.
CLIP_SEEN = "clip with monitor.clip_grad_norm_, or call monitor.monitor_gradients(before_clip=True) before you clip"
SET_BY_HAND = (
    "if the loop sets gradients itself, call monitor.monitor_gradients(before_clip=True) once they are set, before any clip"
)
OTHERS = (
    "the optimizer used other gradients than those of the last backward pass, and no multiple of them: the loop has set them itself; call "
    "monitor.monitor_gradients(before_clip=True) once they are set, before any clip"
)


# --- Whole-model values that need only the gradients before clipping ---

#: Views of the elements of all gradients together; only on request, since they need more columns.
DISTRIBUTION = {"grad_mean": "mean", "grad_std": "std", "grad_sparsity": "sparsity"}
_VIEWS_OF_GRADIENTS = {**DISTRIBUTION, "grad_max": "max"}


def gradient_values(before: StatsTable, wanted: Collection[str], absent: dict[str, str]) -> dict[str, float]:
    """The values by name; ``wanted``: names in :data:`DISTRIBUTION` to compute as well; ``absent`` gets reasons for missing ones."""
    totals, norm, known = before.totals, math.sqrt(before.totals[Column.SQUARE_SUM]), views_of(before.columns)
    for name, metric in _VIEWS_OF_GRADIENTS.items():
        if metric not in known:
            absent[name] = ASKED_LATE
    values = {"grad_norm": norm, "grad_nonfinite_count": totals[Column.NONFINITE]}
    if "max" in known:
        largest = max(totals[Column.MAX], -totals[Column.MIN])
        if largest >= 0:  # else it is that of no element
            values["grad_max"] = abs(largest)  # 0 for -0
        else:
            absent.update(dict.fromkeys(("grad_max", "grad_sparsity"), "no gradient has a finite element"))
    if 0 < norm < float("inf"):
        values["grad_top_fraction"] = max(before.rows.select(1, Column.SQUARE_SUM).tolist()) / norm**2
    else:
        absent["grad_top_fraction"] = f"the gradient norm is {norm}"
    if not DISTRIBUTION.keys().isdisjoint(wanted):
        row = merge_by_group(before.rows, [0] * len(before.names), 1)  # rows are additive, so this is that of all elements
        for name, view in ((name, VIEWS[view]) for name, view in DISTRIBUTION.items() if name in wanted):
            if view.columns <= before.columns and bool(view.defined(row).all()):
                values[name] = view.compute(row).item()
    return values


# --- The gradients of single micro-batches: which one stands out, and how noisy they are ---

#: What each whole-model value means.
BATCH_DOCUMENTATION = {
    "noise_scale": (
        "gradient noise scale: the batch size, in examples, from which on larger batches bring less than they cost; smoothed over "
        "some hundred steps"
    ),
    "micro_batch_grad_norm_max": "largest L2 norm among the gradients of single micro-batches, of all ranks",
}
#: Decay of the running means whose quotient is the noise scale.
_DECAY = 0.99
_NOT_SEEN = (
    "no gradient of a micro-batch was seen: it takes a backward pass, the hooks that attach() installs, and the whole model on "
    "each rank"
)
_NOT_REPORTED = (
    "not every rank has reported its micro-batches: where ranks have parts of the model, gradients are measured only once they are "
    "reduced"
)


class MicroBatchStats:
    """Compares the gradients of micro-batches, of ``batch_size`` examples of one rank, with that of the whole batch.

    From the squared gradient norms of a batch of ``b`` examples, as a mean, and of one of ``B``, unbiased estimates are
    ``G2 = (B norm2(B) - b norm2(b)) / (B - b)`` of the squared norm of the true gradient and
    ``S = (norm2(b) - norm2(B)) / (1 / b - 1 / B)`` of the trace of the covariance of single examples' gradients. Both are averaged over
    steps, and ``S / G2`` is the noise scale (McCandlish and others 2018, An Empirical Model of Large-Batch Training, arXiv 1812.06162,
    appendix A). The small batches are the micro-batches of all ranks, the large one is all of them together.
    """

    def __init__(self, batch_size: int) -> None:
        self._size = batch_size
        self._signal = self._noise = self._weight = 0.0

    def compute(
        self, norms: Mapping[str, Sequence[float]], whole: float | None, ranks: int, absent: MutableMapping[str, str]
    ) -> dict[str, float]:
        """The values of one step by name, from the norms by rank and that of the ``whole`` gradient; ``absent`` gets reasons."""
        every = [norm for each in norms.values() for norm in each]
        if len(norms) != ranks or not every:
            reason = _NOT_SEEN if ranks == 1 else _NOT_REPORTED
            absent.update(dict.fromkeys(BATCH_DOCUMENTATION, reason))
            return {}
        values = {"micro_batch_grad_norm_max": max(every) if not any(map(math.isnan, every)) else math.nan}
        if len(every) == 1:
            absent["noise_scale"] = "there is only one micro-batch, and nothing smaller to compare with"
        elif whole is None or not math.isfinite(whole) or not all(map(math.isfinite, every)):
            absent["noise_scale"] = "a gradient is not finite, or was not measured"
        else:
            # the whole gradient is the mean over ranks of the sums over micro-batches, whatever the loss is divided by
            share = len(every) / ranks
            self._learn(statistics.fmean((share * norm) ** 2 for norm in every), whole**2, len(every))
            if self._signal > 0:
                values["noise_scale"] = self._noise / self._signal
            else:
                absent["noise_scale"] = "so far the noise of the micro-batches hides the gradient"
        return values

    def _learn(self, small: float, large: float, count: int) -> None:
        few, many = self._size, self._size * count
        signal = (many * large - few * small) / (many - few)
        noise = (small - large) / (1 / few - 1 / many)
        self._weight = _DECAY * self._weight + (1 - _DECAY)
        step = (1 - _DECAY) / self._weight
        self._signal += step * (signal - self._signal)
        self._noise += step * (noise - self._noise)

    def state_dict(self) -> dict[str, Any]:
        return {"signal": self._signal, "noise": self._noise, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._signal, self._noise, self._weight = (float(state[name]) for name in ("signal", "noise", "weight"))


def norms_by_rank(table: StatsTable) -> dict[str, list[float]]:
    """The norms of each rank in the order of its micro-batches, from rows named by rank and number, such as ``1/0``."""
    found: dict[str, list[float]] = {}
    squares = zip(table.names, table.rows[:, Column.SQUARE_SUM].tolist(), strict=True)
    for rank, _, square in sorted((*map(int, name.split("/")), square) for name, square in squares):
        found.setdefault(str(rank), []).append(math.sqrt(square) if square == square else math.nan)
    return found


# --- The whole-model keys, and the facts about a step that their values need ---

#: Number of steps over which clipping is counted.
WINDOW = 100
#: The meaning of each key, in the order of display.
KEY_DOCUMENTATION = {
    "grad_norm": "L2 norm of all gradients before clipping",
    "grad_norm_after_clip": "L2 norm of the gradients that the optimizer uses; absent where nothing clips or edits what backward brought",
    "clip_fraction": f"share of the last {WINDOW} steps in which the gradient norm was reduced after backward, as by a clip; absent where "
    "the loop does not edit gradients, or only scales them by one factor",
    "grad_max": "largest |x| of the finite gradient elements before clipping",
    "grad_nonfinite_count": "number of NaN and infinite gradient elements before clipping",
    "grad_top_fraction": "largest share of the squared gradient norm that one parameter holds",
    "param_norm": "L2 norm of all trainable parameters, before the update",
    "update_norm": "L2 norm of the change that the optimizer made",
    "update_ratio": "update_norm over the norm of the same parameters before the update",
    "update_ratio_p10": "10th percentile of the update ratio over parameters of two or more dimensions",
    "update_ratio_p90": "90th percentile of the update ratio over parameters of two or more dimensions",
    "spike_score": "how far grad_norm lies above normal, in robust standard deviations of its logarithm",
    "steps_not_applied": "steps so far that were not applied (infinite gradients under a GradScaler, skipped after a spike, or "
    "left by an error)",
    "grad_mean": "mean of all gradient elements before clipping",
    "grad_std": "population standard deviation of all gradient elements before clipping",
    "grad_sparsity": "share of the finite gradient elements before clipping with |x| <= zero_threshold",
    "overhead_fraction": "time spent in the monitor's own code, as a share of the time since the last monitored step",
}
#: Keys of features that are not part of a preset; present if in use.
ON_REQUEST = {
    "steps_skipped": "steps so far that were skipped because of a spike",
    "lr_over_critical": "learning rate over the smallest one at which this step would raise the loss of its batch",
    "clip_limit": "norm above which an adaptive clip of the total norm clips this step; absent in its warm-up",
    "clipped_parameters": "parameters whose gradients an adaptive clip has scaled down in this step",
}
STANDARD = tuple(k for k in KEY_DOCUMENTATION if k not in DISTRIBUTION)
MINIMAL = tuple(k for k in STANDARD if not k.startswith(("param_", "update_")))
#: The update keys need a copy of the parameters, so they are measured on every tenth step.
UPDATE_EVERY = 10
OF_GRADIENTS = ("grad_norm", "grad_max", "grad_nonfinite_count", "grad_top_fraction", "spike_score", *DISTRIBUTION)
UPDATE_KEYS = tuple(k for k in KEY_DOCUMENTATION if k.startswith("update_"))


@cache
def key(name: str) -> Key:
    return Key(n.SUMMARY, "", name)


class StepFacts(NamedTuple):
    step: int
    applied: bool
    edited: bool  # the gradients were written to between backward and the optimizer; if not, their values can show it
    used: set[str]  # names of the parameters whose gradients an optimizer has used, or would have if they had existed
    trainable: set[str]
    matrices: Set[str]  # names of the parameters of two or more dimensions
    refused: Mapping[str, str]  # a reason by source if some of its tensors could not be measured
    context: Mapping[str, Any]  # learning rates and the like, for the record
    ranks: int
    nonfinite: bool  # a gradient holds NaN or Inf, before clipping or as the optimizer uses it, or a GradScaler says so
    attached: bool  # hooks on optimizers took part
    rounding: float  # relative rounding of the gradients that the optimizer uses, if larger than in float32
    rounds: bool  # they were rounded once more in between, as a GradScaler does when it unscales them


# --- Which whole-model values are shown or needed, and which statistics of tensors that takes ---


class SummaryChoice:
    """The whole-model values of one monitor: those of a preset, others that were added, and those that detectors need."""

    def __init__(self, keys: Iterable[str] = (), of_layers: Mapping[str, frozenset[Column]] | None = None) -> None:
        self._keys = tuple(keys)
        self._instead: tuple[str, ...] | None = None
        self._more: tuple[str, ...] = ()
        self._signals: set[str] = set()
        self._all_columns = self._with_batches = False
        self._of_layers = dict(of_layers or {})
        self._changed()

    def _changed(self) -> None:
        # of a preset: the script's, or those of an override
        self.keys = keys = self._keys if self._instead is None else self._instead
        batches = BATCH_DOCUMENTATION if self._with_batches else ()
        self.shown = (*keys, *(name for name in self._more if name not in keys), *batches)
        self.wanted = self._signals.union(keys, self._more).intersection(KEY_DOCUMENTATION)
        self.update_every = UPDATE_EVERY if self._signals.isdisjoint(UPDATE_KEYS) else 1
        self.needs = {is_update_step: self._needed(is_update_step) for is_update_step in (False, True)}

    def use(self, keys: Iterable[str]) -> None:
        self._keys = tuple(keys)
        self._changed()

    def add(self, name: str) -> None:
        """Show one more value; ValueError if it was added before."""
        if name in self._more:
            raise ValueError(f"the whole-model value {name!r} was added already")
        self._more = (*self._more, name)
        self._changed()

    def add_batches(self) -> None:
        self._with_batches = True
        self._changed()

    def require(self, *signals: str) -> None:
        """Compute these values in any case, because a detector or a decision needs them."""
        self._signals.update(signals)
        self._changed()

    def store_all_columns(self) -> None:
        """Measure every statistic of the gradients, and of the rest on every tenth step."""
        if not self._all_columns:
            self._all_columns = True
            self._changed()

    def override_keys(self, keys: Iterable[str] | None) -> None:
        self._instead = None if keys is None else tuple(keys)
        self._changed()

    def needs_of_gradients(self) -> dict[str, frozenset[Column]]:
        views = ["max", *(view for name, view in DISTRIBUTION.items() if name in self.wanted)]
        return {
            n.GRADIENT_BEFORE_CLIP: ALL_COLUMNS if self._all_columns else SQUARES.union(*(VIEWS[view].columns for view in views)),
            # sums and squares show a run directory that gradients are unchanged, so it stores them once
            n.GRADIENT: SQUARES | {Column.SUM} if self._all_columns else SQUARES,
        }

    def _needed(self, is_update_step: bool) -> dict[str, frozenset[Column]]:
        needs = dict(self._of_layers)
        if self.wanted or self._with_batches:
            needs |= self.needs_of_gradients()
        if self._with_batches:
            needs[n.GRADIENT_LOCAL] = SQUARES
        if "param_norm" in self.wanted:
            needs[n.PARAMETER] = SQUARES
        if is_update_step and not self.wanted.isdisjoint(UPDATE_KEYS):
            needs[n.UPDATE] = SQUARES
        if self._all_columns:
            stored = (n.PARAMETER, n.UPDATE, n.GRADIENT_BEFORE_CLIP) if is_update_step else (n.GRADIENT_BEFORE_CLIP,)
            needs.update({source: ALL_COLUMNS for source in stored if source in needs})
        return needs


# --- Whole-model values of updates, and comparisons of the statistics of two moments ---


def update_values(update: StatsTable, base: StatsTable, matrices: Set[str], absent: dict[str, str]) -> dict[str, float]:
    """The values of updates by name; ``base`` has the updated parameters before the update, ``absent`` gets reasons for missing values."""
    values = {"update_norm": math.sqrt(update.totals[Column.SQUARE_SUM])}
    if (norm := math.sqrt(base.totals[Column.SQUARE_SUM])) > 0:
        values["update_ratio"] = values["update_norm"] / norm
    else:
        absent["update_ratio"] = f"the norm of the updated parameters was {norm} before the update"
    changed, there = (table.rows.select(1, Column.SQUARE_SUM).tolist() for table in (update, base))
    ratios = [
        math.sqrt(new / old) for name, new, old in zip(update.names, changed, there, strict=True) if name in matrices and old > 0
    ]
    if ratios:
        # to the bit what torch.quantile finds, which takes four times as long in a cold cache
        ordered = [math.nan] * len(ratios) if any(map(math.isnan, ratios)) else sorted(ratios)
        places = [share * (len(ratios) - 1) for share in (0.1, 0.9)]
        below, above = [ordered[math.floor(place)] for place in places], [ordered[math.ceil(place)] for place in places]
        weighed = torch.tensor([below, above, [place % 1 for place in places]], dtype=torch.float64, device="cpu")
        values["update_ratio_p10"], values["update_ratio_p90"] = torch.lerp(*weighed.unbind()).tolist()
    else:
        reason = "no updated parameter of two or more dimensions has a norm above zero"
        absent.update({"update_ratio_p10": reason, "update_ratio_p90": reason})
    return values


def rows_of(table: StatsTable, names: set[str]) -> StatsTable:
    if names.issuperset(table.names):
        return table
    kept = [row for row, name in enumerate(table.names) if name in names]
    return StatsTable(tuple(table.names[row] for row in kept), table.rows[kept], table.columns)


def differ(before: StatsTable, after: StatsTable, rounding: float = 0.0) -> bool:
    """Whether any statistic that both have differs by more than rounding: that of each element by ``rounding``, of its square by twice as
    much, and that of the sums.
    """
    slack = 1e-6 + 2.5 * rounding
    then = before.rows if before.names == after.names else before.rows[[before.row_of[name] for name in after.names]]
    now = after.rows
    if then.equal(now):  # as in most loops that do not clip
        return False
    for column in (before.columns & after.columns) - {Column.NEAR_ZERO}:
        # a sum may cancel; by Cauchy-Schwarz this bounds the sum of its terms
        scale = (then[:, Column.COUNT] * then[:, Column.SQUARE_SUM]).sqrt() if column is Column.SUM else then[:, column].abs()
        same = (now[:, column] - then[:, column]).abs() <= slack * scale
        same |= (now[:, column] == then[:, column]) | (now[:, column].isnan() & then[:, column].isnan())
        if not bool(same.all()):
            return True
    return False


#: Relative difference below which factors are equal. Rounding of float32 gradients is far smaller, that of narrow ones larger.
_SAME = 1e-5
#: Relative difference above which norms are different, even if a clip has rounded both of them and its factor.
_DIFFERENT, _ROUNDINGS = 1e-3, 8
#: A single step's factor is taken for a division by a whole number up to this one, if it is this close to its reciprocal.
_MOST, _EXACT = 64, 1e-6
#: Smallest share of the edited steps for a constant factor.
_OFTEN = 0.1


class _Step(NamedTuple):
    edited: bool  # gradients were written to between backward and the optimizer's step
    norm: float  # before
    factor: float  # norm after over norm before
    slack: float = _SAME  # relative error of the factor


_EDITED, _NORM, _FACTOR, _SLACK = map(attrgetter, _Step._fields)


class ClipWindow:
    """The last :data:`WINDOW` steps whose gradients were seen before and after clipping.

    A clip by norm scales by ``max_norm / norm``: two steps with equal factors have equal norms. So a factor below 1 that steps of
    different norms share is not a clip but a scaling, such as a division by the number of micro-batches. A single step shows only the
    reciprocal of a whole number, which is taken for a division until other factors come. So are steps with narrow gradients, whose
    rounding makes factors alike.
    """

    def __init__(self) -> None:
        self.load([])

    def add(self, edited: bool, before: float, after: float, rounding: float = 0.0) -> None:
        """Add a step; ``edited``: its gradients were written to between these norms, with this relative ``rounding``."""
        factor = after / before if 0 < before < float("inf") else 1.0
        rounds_nothing = abs(factor - 1) <= _SAME
        self._steps.append(_Step(edited, before, factor, _SAME if rounds_nothing else max(_SAME, rounding)))
        self.has_edits = any(map(_EDITED, self._steps))
        self.has_scaled: bool = (edited and factor != 1.0) or (self.has_scaled and self._are_scaled())  # else nothing was clipped

    def __len__(self) -> int:
        return len(self._steps)

    def _are_scaled(self) -> bool:
        return not {*map(_FACTOR, filter(_EDITED, self._steps))} <= {1.0}

    def share(self) -> tuple[float | None, float | None]:
        """Share of clipped steps. None if gradients were only scaled; then also the largest factor."""
        edited = sorted(filter(_EDITED, self._steps), key=_FACTOR)
        factors = _scalings(edited)
        limit = max(factors, default=1.0) * (1 - _SAME)
        clipped = 0
        for _, _, factor, slack in edited:
            if factor < limit:
                for known in factors:
                    if abs(factor - known) <= (_SAME if abs(known - 1) <= _SAME else slack) * known:
                        break
                else:
                    clipped += 1
        if not clipped and min(factors, default=1.0) < 1 - _SAME:
            return None, max(factor for factor in factors if factor < 1 - _SAME)
        return clipped / len(self._steps) if self._steps else 0.0, None

    def state(self) -> list[list[float]]:
        return [[int(step.edited), step.norm, step.factor, step.slack] for step in self._steps]

    def load(self, state: Iterable[Sequence[float]]) -> None:
        self._steps = deque((_Step(bool(edited), *map(float, rest)) for edited, *rest in state), maxlen=WINDOW)
        self.has_edits = any(map(_EDITED, self._steps))
        self.has_scaled = self._are_scaled()


def _scalings(steps: Sequence[_Step]) -> list[float]:
    """Constant factors of gradients, whatever their norm, ascending, as ``steps`` are. 1 is one of them if a clip does not always act."""
    runs: list[list[_Step]] = []
    start = math.nan  # of the last run
    for step in steps:
        _, _, factor, slack = step
        if factor - start <= slack * factor:
            runs[-1].append(step)
        else:
            start = factor
            runs.append([step])
    fewest = max(2, _OFTEN * len(steps))
    found = []
    for run in runs:
        if len(run) >= fewest:
            factor, slack, norms = run[len(run) // 2].factor, max(map(_SLACK, run)), [*map(_NORM, run)]
            is_scaling = factor > 0 and (slack <= _SAME or _is_reciprocal(factor, slack))
            # norms that are alike have one factor in a clip, too
            if is_scaling and max(norms) > min(norms) * (1 + max(_DIFFERENT, _ROUNDINGS * slack)):
                found.append(factor)
    if found:
        return found
    reduced = [step.factor for step in steps if step.factor < 1 - _SAME]
    return [max(reduced)] if reduced and all(map(_is_reciprocal, reduced)) else []


def _is_reciprocal(factor: float, slack: float = _EXACT) -> bool:
    """Of a whole number, as for a mean over micro-batches or ranks. One clipped step in 10,000 is by chance."""
    number = round(1 / factor) if factor > 0 else 0
    return 2 <= number <= _MOST and abs(factor * number - 1) <= slack


_CLIP_KEYS = ("grad_norm_after_clip", "clip_fraction")


# --- Values of attention heads, and their minimum, mean and maximum over each layer ---

_HEAD = re.compile(r"\.head_\d+$")


def head_values(tables: dict[str, StatsTable], unshown: Set[tuple[str, str]]) -> tuple[dict[Key, float], frozenset[Key]]:
    """The values of all attention metrics, whose tables are removed, and the keys of heads that are ``unshown`` on a dashboard."""
    values: dict[Key, float] = {}
    layers: dict[tuple[str, str], list[float]] = {}
    for source in n.ATTENTION_SOURCES.values():
        table = tables.pop(source, None)
        if table is None:
            continue
        counts = table.rows[:, Column.COUNT]
        # means are over queries, which weight them when calls merge; the largest logit is the largest finite one
        some = torch.where(counts > table.rows[:, Column.NONFINITE], table.rows[:, Column.MAX], torch.nan)
        numbers = some if source == n.ATTENTION_MAX_LOGIT else table.rows[:, Column.SUM] / counts
        for name, count, number in zip(table.names, counts.tolist(), numbers.tolist(), strict=True):
            if count:
                values[Key(source, name, "")] = number
                layers.setdefault((source, _HEAD.sub("", name)), []).append(number)
    for (source, layer), heads in layers.items():
        found = torch.tensor(heads, dtype=torch.float64, device="cpu")
        values[Key(source, layer, "min")] = found.min().item()
        values[Key(source, layer, "mean")] = found.mean().item()
        if source == n.ATTENTION_MAX_LOGIT:
            values[Key(source, layer, "max")] = found.max().item()
    return values, frozenset(key for key in values if not key.metric and (key.source, key.name) in unshown)


#: For so many steps whose gradients stayed in their tensors it is known what the loop did to them: before, after, and with what rounding.
_REMEMBERED = 8


class Summary:
    def __init__(self, choice: SummaryChoice) -> None:
        self.choice = choice
        self.not_applied = 0  # steps
        self.interrupted = 0  # those of them that the loop left by an error
        self.nonfinite = 0  # steps whose gradients held NaN or Inf
        self._batches: MicroBatchStats | None = None
        self._clips = ClipWindow()
        self._sets_others = False
        self.plain: deque[tuple[StatsTable, StatsTable, float]] = deque(maxlen=_REMEMBERED)

    def add_batches(self, batches: MicroBatchStats) -> None:
        self._batches = batches
        self.choice.add_batches()

    def of_one_step(self) -> Summary:
        found = Summary(SummaryChoice(name for name in MINIMAL if name.startswith("grad_")))
        found._clips.load(self._clips.state())
        return found

    def count_rejected(self, steps: int, interrupted: int = 0) -> None:
        """Count unmeasured steps that were not applied: by a GradScaler, or ``interrupted`` by an error in the loop."""
        self.not_applied += steps
        self.interrupted += interrupted
        self.nonfinite += steps - interrupted

    def sets_others(self, before: StatsTable | None, after: StatsTable | None, rounding: float, is_assigned: bool) -> bool:
        """Whether the gradients that the loop has put in the place of those of the backward passes are its own, see :func:`are_others`:
        in other tensors (``is_assigned``), or in the same ones after it has dropped those of an earlier pass, so that the last one's are
        perhaps only a part.
        """
        if before is None or after is None:
            return self._sets_others
        found = are_others(before, after, rounding, self._sets_others)
        if found and not is_assigned and any(are_others(*plain) for plain in self.plain):
            return False  # the loop writes to its gradients so where it drops none, as one that adds noise
        self._sets_others = found
        return found

    def compute(
        self,
        facts: StepFacts,
        tables: Mapping[str, StatsTable],
        base: StatsTable | None,
        absent: dict[str, str],
        batch_norms: Mapping[str, Sequence[float]] | None = None,
    ) -> dict[str, float]:
        """The values of one step by name, including those that are not shown. ``tables``: of all parameters or not at all; ``base``: the
        updated parameters before the update; ``absent`` gets reasons; ``batch_norms``: of micro-batches, by rank.
        """
        clips, before, after = self._clips, tables.get(n.GRADIENT_BEFORE_CLIP), tables.get(n.GRADIENT)
        self.not_applied += not facts.applied
        self.interrupted += "interrupted" in facts.context
        self.nonfinite += facts.nonfinite
        values = {"steps_not_applied": float(self.not_applied)}
        used_all = before is None or facts.used.issuperset(before.names)
        if before is None or (after is not None and after.names != before.names and brings_others(before, after)):
            advice = SET_BY_HAND if facts.attached and after is not None else CLIP_SEEN
            if before is None and after is None and facts.used:
                advice = "no parameter had a gradient when the optimizers stepped"
            reason = f"the gradients before clipping were not seen: no backward pass ran through the parameters' hooks; {advice}"
            absent.update(dict.fromkeys(OF_GRADIENTS, facts.refused.get(n.GRADIENT_BEFORE_CLIP, reason)))
        else:
            values |= gradient_values(before, self.choice.wanted, absent)
            if facts.applied and after is not None and used_all:
                edited = facts.edited or (not after.same_as and differ(before, after, facts.rounding if facts.rounds else 0.0))
                kept = before if before.names == after.names else rows_of(before, set(after.names))  # without removed ones
                norms = math.sqrt(kept.totals[Column.SQUARE_SUM]), math.sqrt(after.totals[Column.SQUARE_SUM])
                clips.add(edited, *norms, facts.rounding)
        if after is not None and used_all and clips.has_edits:
            values["grad_norm_after_clip"] = math.sqrt(after.totals[Column.SQUARE_SUM])
            share, factor = clips.share() if clips.has_scaled else (0.0, None)
            if share is None:
                absent["clip_fraction"] = (
                    f"gradients are multiplied by {factor:.4g} after backward, whatever their norm, which is no clip"
                )
            else:
                values["clip_fraction"] = share
        else:
            values |= self._without_clip(before, after, facts, used_all, absent)
        if self._batches is not None:
            values |= self._batches.compute(batch_norms or {}, values.get("grad_norm"), facts.ranks, absent)
        if (table := tables.get(n.PARAMETER)) is not None:
            trained = table if facts.trainable.issuperset(table.names) else rows_of(table, facts.trainable)
            values["param_norm"] = math.sqrt(trained.totals[Column.SQUARE_SUM])
        else:
            reason = "the parameters were not measured: attach the optimizer, or call monitor.monitor_parameters()"
            absent["param_norm"] = facts.refused.get(n.PARAMETER, reason)
        if facts.step % self.choice.update_every:  # a user's metric may have measured updates of some layers
            absent.update(dict.fromkeys(UPDATE_KEYS, f"updates are measured on every {UPDATE_EVERY}th step"))
        elif not facts.applied:
            absent.update(dict.fromkeys(UPDATE_KEYS, not_applied(facts.context)))
        elif (update := tables.get(n.UPDATE)) is None or base is None:
            reason = "no attached optimizer changed a parameter"
            absent.update(dict.fromkeys(UPDATE_KEYS, facts.refused.get(n.UPDATE, reason)))
        else:
            values |= update_values(rows_of(update, facts.trainable), rows_of(base, facts.trainable), facts.matrices, absent)
        return values

    def _without_clip(
        self, before: StatsTable | None, after: StatsTable | None, facts: StepFacts, used_all: bool, absent: dict[str, str]
    ) -> dict[str, float]:
        if after is None and facts.used and used_all:
            reason = facts.refused.get(n.GRADIENT, "all gradients were gone when the optimizers stepped")
        elif after is None and not len(self._clips):
            reason = (
                "the gradients that the optimizer uses were not measured: attach the optimizer, or call monitor.monitor_gradients() "
                "after you clip"
            )
            reason = facts.refused.get(n.GRADIENT, reason)
        elif not self._clips.has_edits:
            steps = len(self._clips)
            reason = f"nothing clipped in {f'the last {WINDOW}' if steps >= WINDOW else steps} step{'s' * (steps > 1)}"
            reason = reason if steps else "no step so far had gradients that were seen before a clip and after it"
            if after is not None and facts.attached and facts.used >= facts.trainable and brings_others(before, after):
                absent["clip_fraction"] = reason
                trained = rows_of(after, facts.trainable)
                return {"grad_norm_after_clip": math.sqrt(trained.totals[Column.SQUARE_SUM])}
        else:
            reason = not_applied(facts.context) if "interrupted" in facts.context else "not every attached optimizer stepped"
        absent.update(dict.fromkeys(_CLIP_KEYS, reason))
        return {}

    def state_dict(self) -> dict[str, Any]:
        batches = {} if self._batches is None else {"batches": self._batches.state_dict()}
        counts = {"not_applied": self.not_applied, "interrupted": self.interrupted, "nonfinite": self.nonfinite}
        return {**counts, "clips": self._clips.state(), **batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.not_applied, self.nonfinite = int(state["not_applied"]), int(state.get("nonfinite", 0))
        self.interrupted = int(state.get("interrupted", 0))
        self._clips.load(state["clips"])
        if self._batches is not None and "batches" in state:
            self._batches.load_state_dict(state["batches"])
