"""What to measure in which step: the registry and the summary's needs, compiled for the current model."""

from __future__ import annotations

import contextlib
import re
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch.optim import Optimizer

from ..core import keys as n
from ..core import validation as check
from ..core.errors import WarningLog
from ..core.moments import SQUARES
from ..core.records import Metric
from ..core.torch_modes import outside_dispatch_modes
from .buffer import StepBuffer
from .model_index import PLAIN_GRADIENTS, GradientSource, MainGradSource, ModelIndex, checked
from .plan import Registry, SourcePlan, compile_plan
from .ranks import CADENCE, EMPTY_SLOT, METRICS, NAMES, Ranks
from .summary import MINIMAL, STANDARD, Summary

if TYPE_CHECKING:
    from .exchange import RankExchange
    from .model_index import WholeModel


# --- Predefined selections of metrics ---

PresetName = Literal["minimal", "standard", "full"]


@dataclass(frozen=True)
class Preset:
    """Whole-model keys, and per-layer metrics for the run directory: source, name, and interval in steps."""

    keys: tuple[str, ...]
    layer_metrics: tuple[tuple[str, str, int], ...] = ()


#: The entropy needs the attention weights, which fused kernels never store; it costs as much as attention itself.
_ATTENTION_EVERY = 10
_LAYER_VIEWS = ("norm", "mean", "std", "max", "sparsity", "nonfinite_count")

PRESETS: dict[str, Preset] = {
    "minimal": Preset(MINIMAL),
    "standard": Preset(STANDARD),
    "full": Preset(
        STANDARD,
        (
            *((n.GRADIENT, name, 1) for name in _LAYER_VIEWS),
            *((n.ACTIVATION, name, 1) for name in _LAYER_VIEWS),
            *((n.OPTIMIZER, name, 1) for name in ("exp_avg_norm", "exp_avg_sq_norm", "grad_momentum_cosine")),
            *((n.ATTENTION_SOURCES[name], name, _ATTENTION_EVERY) for name in ("entropy_normalized", "max_logit")),
        ),
    ),
}


#: Sources of inputs and outputs of modules.
OF_MODULES = frozenset({*n.MODULE_SOURCES, *n.RCC_SOURCES, *n.ATTENTION_SOURCES.values()})


def source_for(model: nn.Module, named: object = None) -> GradientSource:
    if (source := checked(named)) is not None:
        return source
    fsdp1 = sys.modules.get("torch.distributed.fsdp")
    if fsdp1 is not None and any(isinstance(module, fsdp1.FullyShardedDataParallel) for module in model.modules()):
        from .exchange import Fsdp1Source

        return Fsdp1Source(model)
    has_buffers = any(hasattr(parameter, "main_grad") for parameter in model.parameters())
    return MainGradSource() if has_buffers else PLAIN_GRADIENTS


class Planner:
    """Compiles plans once, and again when a metric is added or parameters appear, thaw, freeze or are replaced."""

    def __init__(
        self,
        registry: Registry,
        excluded: re.Pattern[str] | None,
        format_name: Callable[[str], str] | None,
        distinct: re.Pattern[str] | None = None,
        source: GradientSource | None = None,
        fits: Callable[[ModelIndex], object] = lambda _: None,
    ) -> None:
        self.registry, self._fits, self.rename = registry, fits, str if format_name is None else format_name
        self.inventory: ModelIndex | None = None
        self.module: Callable[[], nn.Module | None] = lambda: None
        self._excluded, self._distinct = excluded, distinct
        self._named_source, self.source = source, source or PLAIN_GRADIENTS  # source: where they are, once a model is watched
        self.whole: WholeModel | None = None  # the model that the watched module is a part of
        self._cache: dict[Any, tuple[dict[str, SourcePlan], tuple[Metric, ...]]] = {}
        self.version = 0
        self.measures_each_batch = False  # the gradients of each micro-batch separately

    @property
    def has_lost_model(self) -> bool:
        return isinstance(self.module, weakref.ref) and self.module() is None

    @property
    def representative(self) -> nn.Module | None:
        """The watched model, or the first part of a pipeline on this rank."""
        module = self.module()
        return next(module.children(), None) if module is not None and self.source.is_pipeline else module

    def watch(self, module: nn.Module) -> None:
        """ValueError if metrics of one name overlap on ``module``, or a pattern of the options fits nothing in it."""
        check.measurable(module)
        check.initialised(module)
        self.source = source_for(module, self._named_source)
        inventory = self._index_of(module)
        self.registry.check(_matchable(inventory))
        self._fits(inventory)
        self.module, self.inventory = weakref.ref(module), inventory
        self.changed()

    def use(self, source: GradientSource) -> None:
        if self._named_source is None:
            self._named_source = source
            if (module := self.module()) is not None:
                self.watch(module)

    def matchable(self) -> dict[str, Sequence[str]] | None:
        return None if self.inventory is None else _matchable(self.inventory)

    def changed(self) -> None:
        self._cache.clear()
        self.version += 1

    def refresh(self) -> None:
        is_current = self.inventory is None or self.inventory.is_current()
        if not is_current and (module := self.module()) is not None and self.inventory is not None:
            before, self.inventory = self.inventory, self._index_of(module)
            self.inventory.trainable.inherit_from(before.trainable, self.inventory.names)
            self.changed()

    def now(self) -> ModelIndex | None:
        """The index of the current model, which steps may not be planned with yet; None without a model."""
        module = self.module()
        if module is None or self.inventory is None or self.inventory.is_current():
            return None if module is None else self.inventory
        return self._index_of(module)

    def _index_of(self, module: nn.Module) -> ModelIndex:
        with outside_dispatch_modes():
            return ModelIndex(module, self._excluded, self.rename, self._distinct, self.source, self.whole)

    def plans(
        self, step: int, summary: Summary, gradients_only: bool = False
    ) -> tuple[dict[str, SourcePlan], tuple[Metric, ...]]:
        """The plan of each parameter source for ``step``, and the metrics of modules that are measured in it; ``gradients_only``: without
        metrics, only what the summary needs of gradients.
        """
        assert self.inventory is not None
        choice = summary.choice
        needs = choice.needs_of_gradients() if gradients_only else choice.needs[step % choice.update_every == 0]
        due = []
        for metric in self.registry.metrics:
            due.append(metric.due(step) and not gradients_only)
        key = tuple(due), *needs.items()
        found = self._cache.get(key)
        if found is None:
            metrics = [metric for metric, is_due in zip(self.registry.metrics, due, strict=True) if is_due]
            plans = {
                source: compile_plan(
                    source, [m for m in metrics if m.source == source], self.inventory, needs.get(source, frozenset())
                )
                for source in n.PARAMETER_SOURCES
            }
            found = self._cache[key] = plans, tuple(metric for metric in metrics if metric.source in OF_MODULES)
        return found

    def module_metrics(self) -> list[Metric]:
        """The metrics of modules' inputs and outputs, and of attention, in the order of addition."""
        return [metric for metric in self.registry.metrics if metric.source in OF_MODULES]

    @property
    def measures_batches(self) -> bool:
        """Whether anything is measured of a rank's own batches, except temporary metrics after a spike."""
        return self.measures_each_batch or any(metric.source in OF_MODULES for metric in self.registry.own)

    def local_positions(self) -> list[int]:
        """Positions of the parameters whose micro-batch gradients are requested in any step; sharded ones exist only reduced."""
        if self.inventory is None:
            return []
        metrics, inventory = [m for m in self.registry.metrics if m.source == n.GRADIENT_LOCAL], self.inventory

        def is_wanted(name: str) -> bool:
            return self.measures_each_batch or (name not in inventory.excluded and any(m.matches(name) for m in metrics))

        return [p for p, name in enumerate(inventory.names) if name not in inventory.spread and is_wanted(name)]

    def positions(self, optimizers: Iterable[Optimizer]) -> tuple[dict[Hashable, list[int]], list[int]]:
        """Positions of each optimizer's parameters by its id, and those of parameters without optimizer."""
        assert self.inventory is not None
        owned: dict[Hashable, list[int]] = {id(o): self.inventory.positions(self.source.tensors_of(o)) for o in optimizers}
        taken = {position for positions in owned.values() for position in positions}
        return owned, [position for position in range(len(self.inventory.names)) if position not in taken]


def _matchable(inventory: ModelIndex) -> dict[str, Sequence[str]]:
    parameters = [name for name in inventory.names if name not in inventory.excluded]
    modules = list(inventory.modules)
    found: dict[str, Sequence[str]] = dict.fromkeys(n.PARAMETER_SOURCES, parameters)
    # the root, which comes first, gets the same inputs as the reference, so the check does not apply to it
    return {**found, **dict.fromkeys(OF_MODULES, modules), **dict.fromkeys(n.RCC_SOURCES, modules[1:])}


# --- Which values of a step ranks exchange, and what all ranks must have in common for that ---


class ExchangePolicy:
    """Merges the values of a step over ranks. The plan determines which, not what this rank has seen."""

    def __init__(
        self, ranks: Ranks, complaints: WarningLog, planner: Planner, summary: Summary, detectors: Any, every: int | None = 1
    ) -> None:
        self.ranks, self._complaints, self._every = ranks, complaints, every
        self.takes_place = False  # there was any exchange
        self.shares_values = False  # ranks have exchanged values of their batches
        self.sent = self.received = EMPTY_SLOT  # by and from the first rank with the next exchange of a monitored step
        self.reduces = self._is_leaving = False  # a value was logged to be merged over ranks; the run ends here
        self._planner, self._summary, self._detectors = planner, summary, detectors  # the last is the DetectorSet of a room above

    @cached_property
    def between(self) -> RankExchange:
        """The exchange itself, where there are other ranks."""
        from .exchange import RankExchange

        return RankExchange(self.ranks, self._complaints)

    @contextlib.contextmanager
    def without_others(self) -> Iterator[None]:
        """The run ends on this rank, perhaps within a step, so other ranks may not come to the exchange."""
        self._is_leaving = True
        try:
            yield
        finally:
            self._is_leaving = False

    def end(self) -> None:
        if "between" in vars(self):
            self.between.end()

    def ranks_take_part(self, step: int | None = None) -> bool:
        """Whether every rank exchanges rows of tensors, of the same model and metrics. Waits for the others the first time."""
        if self.ranks.count == 1:
            return True
        return self.between.all_take_part("tensors", self.parts, step) and self.between.are_equal("tensors")

    def parts(self) -> dict[str, object]:
        """What all ranks must have in common to exchange values, and rows of tensors, as JSON."""
        return {CADENCE: self._every, **self.parts_of_tensors()}

    def parts_of_tensors(self) -> dict[str, object]:
        """What all ranks must have in common to exchange rows of tensors in one step, as JSON."""
        inventory = self._planner.inventory
        if inventory is None or not inventory.spread:  # perhaps no model is watched, but gradients are clipped
            return {}
        metrics = [(m.source, m.name, m.pattern.pattern, m.every) for m in self._planner.registry.own]
        of_model = inventory.spread, inventory.excluded, inventory.trainable.names
        names = [(name, *(name in some for some in of_model)) for name in inventory.names]
        return {METRICS: [metrics, sorted(self._summary.choice.shown)], NAMES: names}

    @property
    def _what(self) -> str:
        return "tensors" if self._planner.inventory is not None and self._planner.inventory.spread else "values"

    @property
    def _has_values(self) -> bool:
        """Whether values are exchanged. The plan decides, since a rank cannot know whether the others have any."""
        return self._what == "tensors" or self.reduces or self._planner.measures_batches or bool(self._detectors.watches_values)

    @property
    def exchanges_values(self) -> bool:
        return self.ranks.count > 1 and self._has_values and not self.between.is_refused(self._what)

    def run(self, buffer: StepBuffer, plans: Mapping[str, SourcePlan], may_extend: bool) -> None:
        """Exchange the values of a step that ends with other ranks; ``may_extend``: the list of shared values may grow, and the first
        rank broadcast.
        """
        wanted = {source: (plan.exchanged, plan.columns) for source, plan in plans.items() if plan.exchanged}
        if self._is_leaving:
            for source in wanted:
                buffer.refuse_all(source, "the run ended in the middle of the step")
            return
        if n.UPDATE in wanted:
            wanted[n.UPDATE_BASE] = wanted[n.UPDATE][0], SQUARES
        has_values, watches = self._has_values, self._detectors.watches
        received = self.between.run(buffer, wanted, has_values, watches, may_extend, self._what, self.parts, self.sent)
        if received is not None:
            self.takes_place, self.shares_values = True, self.shares_values or has_values
            if received is not EMPTY_SLOT:
                self.sent, self.received = EMPTY_SLOT, received
        self._detectors.accepts_late_values = not self.shares_values
