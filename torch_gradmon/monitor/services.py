"""What the methods of the facade do."""

from __future__ import annotations

import re
import shlex
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..capture.compiled import unwrapped
from ..capture.gradients import is_unscaled, reciprocal, scale_of
from ..capture.reference import frozen_copy
from ..core import keys as n
from ..core import validation as check
from ..core.errors import display, nearest, warn_user
from ..core.fence import fenced
from ..core.keys import SUMMARY, Key
from ..core.loop_mistakes import LoopFinding
from ..core.moments import identity
from ..core.records import Metric, ModelOrder, StepRecord
from ..core.torch_modes import outside_dispatch_modes
from ..plugins.clipping import AdaptiveClip, AdaptiveClips, DeviceValue, clip
from ..plugins.spike_policy.policy import Counts
from ..runs.detail_request import DetailRequest, detail_request, request_text
from ..spikes.detector import SpikeDetector
from ..statistics.histogram import NORM_COLUMNS, rows_of
from ..statistics.request import accumulator_dtype
from ..step.model_index import PLAIN_GRADIENTS
from ..step.plan import checked_aggregation
from ..step.planner import PRESETS
from ..step.ranks import is_dtensor, is_sharded
from ..step.summary import BATCH_DOCUMENTATION as BATCHES
from ..step.summary import KEY_DOCUMENTATION, ON_REQUEST, MicroBatchStats, top_shares
from .builder import BUILT_IN_PLUGINS
from .records import RunDirectory
from .runtime import Runtime, at_exit
from .steps import MODEL_GONE, link, linkable, unlink

if TYPE_CHECKING:
    from ..analysis.diagnosis import Diagnosis
    from ..plugins.replica_check.replay import Replay


# --- Measurements that the script requests explicitly, in addition to the hooks or instead of them ---


class ManualLoop:
    """Carries out the explicit measurements of a training loop."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.fence = runtime.fence
        self._measured: set[int] = set()  # positions of the parameters whose gradients were just measured before clipping

    @property
    def clips(self) -> AdaptiveClips:
        """Adaptive clips by name."""
        clips: AdaptiveClips = self.runtime.plugin("clipping")
        return clips

    @fenced
    def capture_activation(self, name: str, activations: Any) -> None:
        """Measure a value that is no module's output."""
        self.runtime.captures.modules.capture(name, activations)

    @fenced
    def record_attention(self, name: str, named: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> None:
        """Measure one call of attention, unless the monitor has recognised it."""
        with outside_dispatch_modes():
            self.runtime.captures.modules.attention.report(
                name, named, {"query": named["query"], "key": named["key"], **arguments}
            )

    @fenced
    def measure_gradients(self, before_clip: bool) -> None:
        """Measure the gradients as they are now."""
        if before_clip:
            self._open_unseen()
        if self.runtime.planner.inventory is not None:
            self._measure_gradients(before_clip, list(range(len(self.runtime.planner.inventory.names))))

    def _open_unseen(self) -> None:
        """Where a graph runs forward and backward, and calls no hooks, the clip is the first that is seen of a step."""
        patterns = self.runtime.state.patterns
        had_no_backward = not patterns.is_first and patterns.backwards_at_step == 0
        if (self.fence.is_captured or had_no_backward) and self.runtime.loop is not None:
            self.runtime.cycle.ensure_open(hides_forward=False)

    def _measure_gradients(self, before_clip: bool, positions: list[int]) -> None:
        if not self.runtime.lifecycle.has_values:
            return
        measure = self.runtime.captures.gradients.before_clip if before_clip else self.runtime.captures.gradients.after_clip
        for some, inverse_scale in self._by_scale(positions):
            measure(some, inverse_scale)

    def _by_scale(self, positions: list[int]) -> list[tuple[list[int], Tensor | None]]:
        return [(positions, self._inverse_scale())] if self.runtime.loop is None else self.runtime.loop.by_scale(positions)

    def _inverse_scale(self) -> Tensor | None:
        scale = None if is_unscaled(self.runtime.connection.scaler, None) else scale_of(self.runtime.connection.scaler)
        return None if scale is None else reciprocal(scale)

    @fenced
    def measure_before_clip(self, parameters: Iterable[Tensor]) -> None:
        """Measure these parameters' gradients before clipping, unless they were clipped before or an optimizer has used them."""
        self._open_unseen()
        if self.runtime.planner.inventory is None or not self.runtime.lifecycle.has_values:
            return
        positions, loop = self.runtime.planner.inventory.positions(parameters), self.runtime.loop
        positions = self.runtime.captures.gradients.not_clipped(positions if loop is None else loop.to_step(positions))
        self._measured = set(positions)
        self._measure_gradients(
            True, self.runtime.captures.gradients.there(positions)
        )  # a parameter without a gradient has nothing to clip

    @fenced
    def was_clipped(self, parameters: Iterable[Tensor]) -> None:
        """These parameters' gradients have just been clipped."""
        if self.runtime.lifecycle.has_values and self.runtime.planner.inventory is not None:
            self.runtime.captures.gradients.clipped(self.runtime.planner.inventory.positions(parameters))

    def names_of(self, parameters: Sequence[Tensor]) -> list[str]:
        """The canonical name of each parameter, or ``parameters[index]`` outside the watched model."""
        self.runtime.planner.refresh()
        inventory, places = self.runtime.planner.inventory, self._positions()
        return [
            inventory.names[places[id(p)]] if inventory is not None and id(p) in places else f"parameters[{index}]"
            for index, p in enumerate(parameters)
        ]

    def _positions(self) -> dict[int, int]:
        inventory = self.runtime.planner.inventory
        return {} if inventory is None else inventory.places()

    def spread_among(self, parameters: Sequence[Tensor]) -> list[int]:
        """Indices of the parameters that differ between ranks: sharded ones and ones that only some ranks have. All ranks call this.

        Raises:
            ValueError: there are some, and not every rank is known to join the exchange.
        """
        inventory, ranks = self.runtime.planner.inventory, self.runtime.captures.measurer.ranks
        distinct = set() if inventory is None or ranks.count == 1 else inventory.spread
        names = self.names_of(parameters) if distinct else []
        found = [i for i, p in enumerate(parameters) if is_sharded(p) or (distinct and names[i] in distinct)]
        if found and ranks.count == 1:
            raise ValueError(
                "the exact norm of gradients that are spread over ranks takes a monitor of these ranks, and process_group= names this "
                "one alone; name them all, or use a number for max_norm and exact=False, which clips as torch does"
            )
        if (
            ranks.count > 1
            and (found or any(map(is_dtensor, parameters)))
            and not self.runtime.lifecycle.planning.exchange.ranks_take_part()
        ):
            raise ValueError(
                "the exact norm of gradients that are spread over ranks takes a monitor of the same model and metrics on every rank; make "
                "one on each of them, or use a number for max_norm and exact=False, which clips as torch does"
            )
        return found

    def rows(self, parameters: Sequence[Tensor], norm_type: float, spread: Sequence[int]) -> Tensor:
        """Rows ``[len(parameters), 8]`` of the gradients with the ``NORM_COLUMNS`` of this order, on the first gradient's device.

        A parameter without a gradient has the row of an empty tensor. The rows that :meth:`measure_before_clip` measured are reused
        if it measured all gradients. With ``spread`` this is a collective, and each rank gets the rows of the whole tensors.

        Raises:
            ValueError: a gradient cannot be measured.
        """
        ranks, apart = self.runtime.captures.measurer.ranks, set(spread)
        gradients = {place: p.grad for place, p in enumerate(parameters) if p.grad is not None}
        found = self._rows_now(parameters, norm_type) if gradients else None
        if found is None:
            parts = [ranks.own_part(gradient, place in apart) for place, gradient in gradients.items()]
            found = rows_of(parts, norm_type, self.runtime.captures.measurer.built_in)
        if len(gradients) < len(parameters):
            device = next(iter(gradients.values())).device if gradients else parameters[0].device
            known, found = found, identity(len(parameters), device, accumulator_dtype(device))
            if gradients:
                found[list(gradients)] = known
        if spread:
            places = list(spread)
            merged = ranks.merged(found[places].to(ranks.device, accumulator_dtype(ranks.device)), NORM_COLUMNS[norm_type])
            found[places] = merged.to(found)
        return found

    @fenced
    def _rows_now(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor | None:
        if not self.runtime.lifecycle.has_values:
            return None
        places = self._positions()
        positions = [places[id(p)] for p in parameters if id(p) in places]
        if len(set(positions)) != len(parameters) or not self._measured.issuperset(positions):
            return None  # a parameter is outside the model, given twice (torch counts it twice), or not measured just now
        return self.runtime.captures.gradients.rows_now(positions, NORM_COLUMNS[norm_type])

    @fenced
    def put(self, values: Sequence[DeviceValue]) -> None:
        """Add whole-model values to the current step; they stay on the device until the step ends."""
        self.runtime.lifecycle.values.put({Key(SUMMARY, "", one.name): one for one in values})

    def measure_after_clip(self) -> None:
        """Measure the clipped gradients if no optimizer has a hook."""
        if self.runtime.loop is None:
            self.measure_gradients(False)

    @fenced
    def measure_parameters(self) -> None:
        """Measure the parameters as they are now."""
        if self.runtime.lifecycle.has_values and self.runtime.planner.inventory is not None:
            self.runtime.captures.parameters.measure(range(len(self.runtime.planner.inventory.names)))


# --- What a monitor measures: metrics, presets and live changes of detail ---


MetricFunction = Callable[..., Any] | None
Pattern = str | re.Pattern[str]
AggregationFunction = str | Callable[..., Any] | None

#: Suffixes that the tensors of an attention module add to its name.
_SUFFIXES = {n.ACTIVATION: ("", *(f"{head}.{of}" for head in ("", ".head_0") for of in ("query", "key", "value", "activation")))}


def gradient_sources(stages: str | Iterable[str]) -> list[str]:
    """The sources of keys for stages of a gradient.

    Raises:
        ValueError: no stage, or an unknown one.
    """
    named = (stages,) if isinstance(stages, str) else tuple(stages)
    for stage in named:
        if stage not in n.GRADIENT_STAGES:
            raise ValueError(f"stages={stage!r} is no stage of a gradient{nearest(str(stage), n.GRADIENT_STAGES)}")
    if not named:
        raise ValueError("stages is empty; name at least one of local, before_clip, after_clip")
    return [n.GRADIENT_STAGES[stage] for stage in named]


def module_sources(of: str | Iterable[str]) -> list[str]:
    """The sources of keys for kinds of a module's tensors.

    Raises:
        TypeError: neither a name nor several.
        ValueError: no kind, or an unknown one.
    """
    if not isinstance(of, (str, Iterable)):
        raise TypeError(f"of must name one or several of {', '.join(n.MODULE_KINDS)}, got {display(of)}")
    kinds = (of,) if isinstance(of, str) else tuple(of)
    for kind in kinds:
        if kind not in n.MODULE_KINDS:
            raise ValueError(f"of={kind!r} is nothing that a module has{nearest(str(kind), n.MODULE_KINDS)}")
    if not kinds:
        raise ValueError(f"of is empty; name at least one of {', '.join(n.MODULE_KINDS)}")
    return [n.MODULE_KINDS[kind] for kind in kinds]


def attention_source(metric_name: str) -> str:
    """The source of keys for a statistic of attention.

    Raises:
        ValueError: an unknown one.
    """
    if metric_name not in n.ATTENTION_SOURCES:
        raise ValueError(f"there is no attention metric {metric_name!r}{nearest(str(metric_name), n.ATTENTION_SOURCES)}")
    return n.ATTENTION_SOURCES[metric_name]


@dataclass(slots=True)
class MetricsService:
    """Adds metrics to a runtime, and describes them."""

    runtime: Runtime

    def add(
        self,
        sources: Sequence[str],
        name: str,
        function: MetricFunction,
        regex: Pattern,
        aggregation: AggregationFunction,
        every: int,
        **flags: bool,
    ) -> None:
        """Add one metric for each of ``sources``, all or none."""
        for flag, value in flags.items():
            check.flag(**{flag: value})
        check.positive_int("every", every)
        planner = self.runtime.planner
        made = [planner.registry.make(source, name, function, regex, aggregation, every=every, **flags) for source in sources]
        planner.registry.add(made, planner.matchable())
        planner.changed()
        self.runtime.replan()
        self.warn_of_idle(made[:1])

    def warn_of_idle(self, metrics: Iterable[Metric]) -> None:
        """Warn about each metric whose pattern matches nothing in the model, at the line that called the monitor."""
        planner = self.runtime.planner
        names = planner.matchable()
        # modules with MonitorMixin log activations under names of their own, which only the first forward shows
        if planner.module is not None and linkable(planner.module):
            metrics = [metric for metric in metrics if metric.source not in n.MODULE_SOURCES]
        for metric in metrics if names is not None else ():
            known = names[metric.source]  # type: ignore[index]
            if not any(metric.matches(name + suffix) for name in known for suffix in _SUFFIXES.get(metric.source, ("",))):
                pattern = metric.pattern.pattern
                warn_user(
                    f"the pattern {pattern!r} of the {metric.source} metric {metric.name!r} matches nothing "
                    f"in the model{nearest(pattern, known)}"
                )

    def add_batch_metrics(self, batch_size: int) -> None:
        """Measure the gradient of each micro-batch."""
        check.positive_int("batch_size", batch_size)
        self.runtime.factory.summary.add_batches(MicroBatchStats(batch_size))
        self.runtime.planner.measure_each_batch()
        self.runtime.planner.changed()

    def add_summary_metric(self, metric_name: str) -> None:
        """Show one more whole-model value."""
        check.one_of("metric_name", metric_name, tuple(KEY_DOCUMENTATION))
        self.runtime.factory.summary.choice.add(metric_name)
        self.runtime.planner.changed()

    def add_preset(self, name: str) -> None:
        """Select the metrics of a preset."""
        check.one_of("preset", name, tuple(PRESETS))
        preset, registry, pipeline = PRESETS[name], self.runtime.planner.registry, self.runtime.pipeline
        registry.replace_hidden(
            [registry.make(source, metric, every=every, shown=False) for source, metric, every in preset.layer_metrics]
        )
        self.runtime.factory.summary.choice.use(preset.keys)
        pipeline.detection.add(SpikeDetector(), of_preset=True)
        pipeline.directory.annotate(preset=name)
        self.runtime.planner.changed()

    def describe(self) -> dict[str, str]:
        """Documentation by key, with patterns in the place of names."""
        known = {**KEY_DOCUMENTATION, **BATCHES, **ON_REQUEST}
        record, registry = self.runtime.pipeline.last, self.runtime.planner.registry
        # some whole-model values are switched on by other calls than add_*; the last record shows which
        last = () if record is None else record.values
        on_request = [key.metric for key in last if key.source == n.SUMMARY and key.metric in ON_REQUEST]
        texts = {f"{n.SUMMARY}/{name}": known[name] for name in (*self.runtime.factory.summary.choice.shown, *on_request)}
        for metric in registry.metrics:
            unit = "" if metric.unit == "1" else f" [{metric.unit}]"
            often = "" if metric.every == 1 else f", on every {metric.every}th step"
            texts[f"{metric.source}/{metric.pattern.pattern}/{metric.name}"] = f"{metric.documentation}{unit}{often}"
        if (sample := self.runtime.captures.parameters.sample_description()) is not None:
            for key in texts:
                if key.startswith((f"{n.SUMMARY}/update_", f"{n.UPDATE}/")):
                    texts[key] += f"; {sample}"
        return texts

    def set_detail(self, every: int | None, preset: str | None, steps: int | None, from_step: int | None, reset: bool) -> None:
        """Request a live change of detail."""
        change = detail_request(every, preset, steps, from_step)
        if reset and change != DetailRequest():
            raise ValueError("reset=True goes back to the settings of the script, and takes no other argument")
        if change.is_reset and not reset:
            raise ValueError("nothing to change; give every= or preset=, or reset=True to go back to the settings of the script")
        if not self.runtime.fence.inert:
            self.runtime.plugin("live_detail").request(change)

    def detail(self) -> DetailRequest | None:
        """The live change in force, with the number of steps that are left."""
        tuning = self.runtime.plugin("live_detail")
        return None if tuning.in_force is None else replace(tuning.in_force, steps=tuning.left)


# --- The watched model, its reference, and the names of its modules ---


@dataclass(slots=True)
class ModelService:
    """Sets the model and the reference model of a runtime."""

    runtime: Runtime

    def set(self, module: nn.Module) -> None:
        """Watch ``module``."""
        check.module(module)
        watched = self.runtime.planner.module
        if watched is not None:
            raise ValueError(
                f"this monitor is one of a {type(watched).__name__} already; make another ModuleMonitor for another model"
            )
        self.runtime.planner.watch(module)

    def introduce(self, monitor: object) -> None:
        """Connect the runtime, and the model where there is one, with the ``monitor`` that users call."""
        runtime, planner = self.runtime, self.runtime.planner
        runtime.owner = monitor  # an attached runtime keeps the monitor for modules with MonitorMixin
        if planner.module is None:
            return
        MetricsService(runtime).warn_of_idle(planner.registry.metrics)
        assert planner.inventory is not None
        assert planner.representative is not None  # as the module
        runtime.factory.layers.warn_of_idle(planner.inventory.names)
        if not runtime.fence.inert:
            self.link()
            model = planner.representative
            runtime.pipeline.directory.annotate(model=type(model if model is None else unwrapped(model)).__name__)
            runtime.factory.model.update(planner.inventory.facts)

    def link(self) -> None:
        """Link the modules that ask for their monitor."""
        assert self.runtime.planner.module is not None
        for module in linkable(self.runtime.planner.module):
            link(module, self.runtime.owner)

    def expect(
        self,
        frozen: Pattern | None,
        trains: Pattern | None,
        dtype: Mapping[Pattern, torch.dtype] | None,
        batch_varies: bool | None,
    ) -> None:
        """Declare what is meant."""
        runtime = self.runtime
        if runtime.planner.module is None:
            raise ValueError("there is no module yet; pass it to ModuleMonitor(model) or call set_module(model) first")
        setup = runtime.plugin("setup_check")
        if setup is not None:
            setup.expectations.declare(runtime.planner, frozen, trains, dtype, batch_varies, is_watched=runtime.loop is not None)

    def names(self) -> dict[nn.Module, str]:
        """The canonical name of each watched module that is alive."""
        inventory = self.runtime.planner.inventory
        known = {} if inventory is None else inventory.modules
        return {module: name for name, reference in known.items() if (module := reference()) is not None}

    def name(self, module: str | nn.Module) -> str:
        """The canonical name of one watched module."""
        if isinstance(module, str):
            return module
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected a module of the watched model or a name for it, got {display(module)}")
        inventory = self.runtime.planner.inventory
        for name, reference in () if inventory is None else inventory.modules.items():
            if reference() is module:
                return name
        what = type(module).__name__
        raise ValueError(f"this {what} is not part of the watched model; pass its name as a str, or watch its model")

    def set_reference(self, module: nn.Module | str) -> None:
        """Compare with ``module``, or with a copy of the model as it is now."""
        watched = self.runtime.planner.module
        if isinstance(module, str):
            check.one_of("module", module, ("init",))
            if watched is None:
                raise ValueError("there is no module to copy; pass it to ModuleMonitor(model) or call set_module(model) first")
            with outside_dispatch_modes():
                self.runtime.set_reference(frozen_copy(watched), follows=True)
            return
        check.module(module)
        if watched is not None and unwrapped(module) is unwrapped(watched):
            raise ValueError("the reference is the watched model itself; pass a copy, or 'init' for one as it is now")
        self.runtime.set_reference(module, follows=False)


# --- The training loop: followed by hooks, or calling the monitor by hand ---


_NO_MODULE = "there is no module to watch; pass it to ModuleMonitor(model) or call set_module(model) first"


@dataclass(slots=True)
class LoopService:
    """Connects a runtime with a training loop."""

    runtime: Runtime

    def attach(
        self,
        optimizers: Sequence[Any],
        scaler: torch.amp.GradScaler | None,
        start_step: int | None,
        before: Callable[[nn.Module], object] = lambda module: None,
    ) -> None:
        """Follow the loop by hooks. ``before`` is called after all checks, and before the first hook is installed."""
        runtime, module = self.runtime, self.runtime.planner.module
        if module is None:
            raise ValueError(_NO_MODULE)
        if runtime.loop is not None:
            raise ValueError("already attached; name all optimizers in one attach() call, or call detach() first")
        check.grad_scaler(scaler)
        if start_step is not None:
            check.step_number("start_step", start_step)
        bare = check.optimizers(module, optimizers, runtime.planner.source)
        source = runtime.planner.source
        if (source.outer is not None or source.is_pipeline) and runtime.plugin("spike_policy") is not None:
            raise ValueError(
                "on_spike= of this monitor skips or undoes steps. An engine that steps by itself does not allow that, and the stages of "
                'a pipeline would have to do it together; use on_spike="warn" or "raise"'
            )
        # the user's function may raise, so it runs before anything is installed
        runtime.lifecycle.planning.cadence.asked(runtime.state.clock.next_step if start_step is None else start_step)
        if runtime.fence.inert:
            return
        before(module)
        if start_step is not None:
            runtime.connection.continue_at(start_step)
        ModelService(runtime).link()
        known = (scaler, runtime.connection.scaler, check.scaler_around(optimizers))
        chosen = next((each for each in known if each is not None), None)
        around = check.wrappers(optimizers)
        if (outer := runtime.planner.source.outer) is not None:
            around += [(outer, optimizer) for optimizer in bare]
        runtime.connection.follow(runtime, module, bare, chosen, around)

    def detach(self) -> None:
        """End the step in flight and remove everything from the model."""
        self.runtime.mark = None
        self.runtime.detach()
        module = self.runtime.planner.module
        if module is not None:
            for child in module.modules():
                unlink(child)

    def begin_step(self, step: int) -> bool:
        """Open ``step`` by hand."""
        check.step_number("step", step)
        if self.runtime.planner.inventory is None:
            raise ValueError(_NO_MODULE)
        return bool(self.runtime.begin_step(step))

    def replay(self, compute: Callable[[nn.Module], Tensor], times: int) -> Replay:
        """Run a pass of the model several times, and compare."""
        from ..plugins.replica_check.replay import Replay, replay

        check.positive_int("times", times)
        if times < 2:
            raise ValueError(f"replay_step(times={times}) compares nothing; give at least 2")
        module = self.runtime.planner.module
        if module is None:
            raise ValueError(_NO_MODULE)
        if self.runtime.fence.inert:
            return Replay((), (), (), 0, "equal")
        with self.runtime.lifecycle.paused():
            return replay(module, compute, times)

    def clip(
        self,
        parameters: Any,
        max_norm: float | str | AdaptiveClip,
        norm_type: float,
        error_if_nonfinite: bool,
        exact: bool | None,
    ) -> Tensor:
        """Measure and clip gradients."""
        source, inventory = self.runtime.planner.source, self.runtime.planner.inventory
        if source.outer is not None or (
            not source.is_pipeline and source is not PLAIN_GRADIENTS and inventory and inventory.spread
        ):
            raise ValueError(
                "monitor.clip_grad_norm_ does not know the norm of gradients that an engine has in parts: clip as the engine does, by "
                "model.clip_grad_norm_ of FSDP1 or gradient_clipping in DeepSpeed's configuration; the monitor measures before and after"
            )
        if source.is_pipeline:
            raise ValueError(
                "the stages of a pipeline are clipped by a norm of all of them, which monitor.clip_grad_norm_ does not know; clip as "
                "without a monitor: it measures before and after"
            )
        if parameters is None:
            module = self.runtime.planner.module
            if module is None:
                raise ValueError("there is no module whose gradients to clip; pass parameters=, or watch a module first")
            # as the optimizer has them
            parameters = list(dict.fromkeys(map(self.runtime.planner.source.stepped, module.parameters())))
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        return clip(ManualLoop(self.runtime), parameters, max_norm, norm_type, error_if_nonfinite, exact)


# --- queries ---


_GONE = "the attached optimizers are gone; call monitor.detach(), then monitor.attach() with the new ones"
_UNATTACHED = (
    "the parameters have changed since the attached optimizer stepped last: another optimizer steps them, or the loop itself; call "
    "monitor.detach(), then monitor.attach() with the optimizer whose step() the loop calls"
)
_CAPTURED = "the loop was captured into a graph, whose replays call no hooks; call optimizer.step() outside of the graph"


class Queries:
    """Answers for one runtime.

    Args:
        runtime: answers the queries. No other object holds it for longer than a call.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self.fence = runtime, runtime.fence

    def would_monitor(self, step: int) -> bool:
        """Whether ``step`` is monitored by the cadence, or as one of the steps after a spike or under a live change."""
        clock, cadence, active = (
            self._runtime.state.clock,
            self._runtime.lifecycle.planning.cadence,
            self._runtime.lifecycle.active,
        )
        if clock.step is not None and step <= clock.step:
            is_open = self._runtime.state.is_open and step == clock.step and active is not None and active.is_monitored
            is_known = self._runtime.lifecycle.queue.newest(step) is not None or step in self._runtime.pipeline.history
            return is_open or is_known or cadence.foretells(step, None)
        ahead = step - clock.next_step if clock.step is None else (step - clock.step - 1) // clock.stride
        return cadence.foretells(step, ahead)

    def findings(self) -> list[LoopFinding]:
        """What the plugins have found so far."""
        of = self._runtime.lifecycle.plugins.built_in
        found = [fact for check in (of.audit, of.replicas, of.setup, of.data) if check is not None for fact in check.facts()]
        return [*found, *map(LoopFinding.of_dict, self._runtime.pipeline.directory.facts.get("foresight", ()))]

    @property
    def is_listening(self) -> bool:
        """Whether a value from inside of a forward counts."""
        return self._runtime.lifecycle.values.is_listening(self._may_be_forward)

    def _may_be_forward(self) -> bool:
        """Whether, though no step is open, this may be the forward of the next one: no hook saw the last one's, or this is the first,
        or only its backward pass shows it.
        """
        state = self._runtime.state
        may_be = state.patterns.hides_forward or state.patterns.is_undecided or state.clock.ended is None
        leads = self._runtime.loop is not None and not state.is_manual and torch.is_grad_enabled()
        return may_be and leads and self._runtime.lifecycle.planning.would_measure(state.clock.next_step)

    @property
    def stale_reason(self) -> str:
        """Why values of the last step would be stale; empty where they are not."""
        if self.fence.is_captured:
            return _CAPTURED
        if self._runtime.loop is None or self._runtime.state.is_manual:
            return ""
        if self._runtime.loop.is_orphaned:
            return _GONE
        in_step = self._runtime.state.is_open and not self._runtime.state.progress.has_stepped
        with outside_dispatch_modes():
            plugins = self._runtime.lifecycle.plugins
            is_stale = plugins.call_one(plugins.built_in.audit, plugins.built_in.audit.is_stale, in_step)
        return _UNATTACHED if is_stale else ""

    def counts(self) -> Counts:
        """Of the steps so far, as far as their values have come."""
        summary, policy, attempts = (
            self._runtime.factory.summary,
            self._runtime.plugin("spike_policy"),
            self._runtime.state.clock.attempts,
        )
        skipped, rollbacks = (0, 0) if policy is None else (policy.skipped, policy.rollbacks)
        applied, overflowed = attempts - summary.not_applied, summary.not_applied - skipped - summary.interrupted
        return Counts(attempts, applied, skipped, overflowed, summary.nonfinite, rollbacks, summary.interrupted)

    def settle_now(self) -> StepRecord | None:
        """The record of the last step, None where it was not monitored. Waits for the device."""
        self._flush_fenced()  # does nothing inside a fenced call, such as on_spike
        return None if self.stale_reason else self._runtime.pipeline.last

    @fenced
    def judge_now(self) -> None:
        """Make the record of the last step, and judge already now what was logged since."""
        self._runtime.cycle.release()
        self._runtime.lifecycle.flush_pending()
        self._runtime.pipeline.detect_late()

    @fenced
    def _flush_fenced(self) -> None:
        self._runtime.cycle.release()
        self._runtime.lifecycle.flush_pending()


# --- Where the values of a monitor go: sinks and spike detectors ---


@dataclass(slots=True)
class OutputsService:
    """Adds sinks and detectors to a runtime, and removes sinks."""

    runtime: Runtime

    def add_sink(
        self, sink: Any, keys: str | re.Pattern[str] | None, every: int, deferred: bool, thread: bool, on_all_ranks: bool
    ) -> None:
        """Send the values of each step to ``sink``."""
        from ..sinks.filtered_sink import FilteredSink, adapted, logged_anyhow
        from ..sinks.wandb import WandbSink

        pipeline, complaints = self.runtime.pipeline, self.runtime.fence.complaints
        for each in adapted(sink):
            if thread and isinstance(each, WandbSink):
                raise ValueError(
                    "W&B takes rows without delay, and those of another thread would come between; leave thread=True out"
                )
            kept = _Kept(weakref.ref(pipeline.directory))
            filtered = FilteredSink(each, keys, every, complaints, deferred, thread, kept, logged_anyhow(sink))
            filtered.stand_for(sink, on_all_ranks)
            if callable(before_finish := getattr(each, "before_finish", None)):
                before_finish(partial(at_exit, weakref.ref(self.runtime)))
            pipeline.publisher.add(filtered)

    def add_alert(self, target: str | Callable[[Any], object], on: Iterable[str]) -> None:
        """Call ``target`` about spikes and findings."""
        from ..sinks.alerts import AlertSink

        place = self.runtime.pipeline.directory.path
        sink = AlertSink(target, on, "" if place is None else str(place), partial(_findings, weakref.ref(self.runtime)))
        self.add_sink(sink, None, 1, deferred=True, thread=False, on_all_ranks=False)

    def remove_sink(self, sink: Any) -> None:
        """Send waiting rows to ``sink``, and close it."""
        Queries(self.runtime).settle_now()
        publisher = self.runtime.pipeline.publisher
        own = [filtered for filtered in publisher.sinks if filtered.given == sink]
        if not own:
            raise ValueError(f"this sink was not added, got {display(sink)}")
        publisher.publish()
        for filtered in own:
            publisher.remove(filtered)

    def add_detector(self, detector: SpikeDetector) -> None:
        """Feed ``detector`` with its signal."""
        if not isinstance(detector, SpikeDetector):
            raise TypeError(f"expected a SpikeDetector, got {display(detector)}; a rule goes into one: SpikeDetector(rule)")
        self.runtime.pipeline.detection.add(detector)
        self.runtime.planner.changed()


@dataclass(frozen=True)
class _Kept:
    """The run directory as text, while it has all rows and its monitor lives."""

    directory: Callable[[], RunDirectory | None]

    def __str__(self) -> str:
        directory = self.directory()
        return "" if directory is None or directory.has_lost else directory.description


def _findings(runtime: Callable[[], Runtime | None]) -> list[LoopFinding]:
    """What the plugins of a runtime have found, while it lives."""
    return [] if (alive := runtime()) is None else Queries(alive).findings()


# --- The state that a resumed run needs, and a monitor in one line of text ---


#: Parts that are absent from states of monitors without a spike policy, and of earlier versions.
_OPTIONAL_PARTS = {"attempted", "acting", "clipping", "plugins"}
#: Parts of plugins that a monitor brings, with their names; those of the user's are in the part ``plugins`` by name.
_PARTS = {"acting": "spike_policy", "clipping": "clipping"}


@dataclass(slots=True)
class StateService:
    """Saves and loads the state of a runtime."""

    runtime: Runtime

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers and lists."""
        runtime = self.runtime
        Queries(runtime).settle_now()
        runtime.lifecycle.hooks.wake()  # so that plugins have seen all steps
        records = {"summary": runtime.factory.summary.state_dict(), "detectors": runtime.pipeline.detection.state_dict()}
        steps = {"next_step": runtime.state.next_attempt, "attempted": runtime.state.clock.attempts}
        parts = {part: plugin.state_dict() for part, name in _PARTS.items() if (plugin := runtime.plugin(name)) is not None}
        states = {plugin.name: plugin.state_dict() for plugin in runtime.plugins if plugin.name not in BUILT_IN_PLUGINS}
        own = {name: state for name, state in states.items() if state is not None}
        return {**steps, **records, **parts, **({"plugins": own} if own else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, or leave everything as it was and raise."""
        self._check(state)
        before, part = self.state_dict(), ""
        try:
            for part in before:
                if part in state or part not in _OPTIONAL_PARTS:
                    self._load(part, state[part])
        except Exception as error:  # a checkpoint may be of somebody else
            for each, value in before.items():
                self._load(each, value)
            raise ValueError(
                f"state[{part!r}] is not what ModuleMonitor.state_dict() gives, got {display(state.get(part))}; nothing was loaded"
            ) from error

    def _check(self, state: object) -> None:
        if not isinstance(state, Mapping):
            raise TypeError(f"expected the dict of ModuleMonitor.state_dict(), got {display(state)}")
        absent = {"next_step", "summary", "detectors"} - state.keys()
        if absent:
            raise ValueError(f"this is no state of a ModuleMonitor: it lacks {', '.join(sorted(absent))}; it has {sorted(state)}")
        mine = self.runtime.pipeline.detection.detector_set.detectors
        if not isinstance(state["detectors"], Mapping) or set(state["detectors"]) != set(mine):
            raise ValueError(
                f"state['detectors'] has {display(state['detectors'])} and this monitor detectors of {sorted(mine)}; "
                "add detectors of the same signals before loading"
            )

    def _load(self, part: str, value: Any) -> None:
        runtime = self.runtime
        if part == "next_step":
            runtime.connection.continue_at(int(value))
        elif part == "attempted":
            runtime.state.clock.count_from(int(value))
        elif part in _PARTS:
            runtime.plugin(_PARTS[part]).load_state_dict(value)
        elif part == "plugins":
            for plugin in runtime.plugins:
                if plugin.name in value:
                    plugin.load_state_dict(value[plugin.name])
        elif part == "summary":
            runtime.factory.summary.load_state_dict(value)
        else:
            runtime.pipeline.detection.load_state_dict(value)

    def text(self) -> str:
        """The ``repr`` of the monitor."""
        return f"ModuleMonitor({', '.join(self._words())})"

    def table(self) -> str:
        """The monitor in one line, and a line for each part of the model that trains, is frozen, or has no optimizer."""
        setup = self.runtime.plugin("setup_check")
        return "\n  ".join([self.text(), *map(str, [] if setup is None else setup.parts())])

    def _words(self) -> Iterator[str]:
        runtime, module = self.runtime, self.runtime.planner.module
        count = len(runtime.planner.registry.metrics)
        yield "nothing" if module is None else type(module).__name__
        yield "1 metric" if count == 1 else f"{count} metrics"
        yield "no step yet" if runtime.state.clock.step is None else f"step {runtime.state.clock.step}"
        if spikes := len({event.step for event in runtime.pipeline.history.recent().events}):
            yield f"{spikes} of the last steps with spikes"
        if (detail := MetricsService(runtime).detail()) is not None:
            yield f"for now {request_text(detail.facts())}"
        if runtime.fence.inert:
            yield "disabled by GRADMON_DISABLE"
        elif runtime.loop is None and not runtime.state.is_manual:
            yield "not attached to an optimizer"
        if place := runtime.pipeline.directory.description:
            yield place


# --- Values into a monitor, values out of it, and what follows from them ---


_DISABLED = {"everything": "GRADMON_DISABLE is set in the environment: nothing is measured"}


@dataclass(slots=True)
class ValuesService:
    """Logs values into a runtime and reads its records. Getters do not communicate, and synchronise at most once a step."""

    runtime: Runtime

    # --- in ------------------------------------------------------------------------------------------------------------------

    def log_scalar(self, key: str, value: Any, aggregation_fn: str | Callable[..., Any] | None, reduce: str | None) -> None:
        """Log one number."""
        check.log_key(key)
        if reduce is not None:
            check.one_of("reduce", reduce, ("mean", "sum", "min", "max"))
        with outside_dispatch_modes():
            if isinstance(value, Tensor) and value.numel() != 1:
                shape = tuple(value.shape)
                raise ValueError(f"log_scalar({key!r}) takes one number, got a tensor of shape {shape}; use log_tensor")
            if isinstance(value, Tensor) and value.is_complex():
                raise TypeError(f"log_scalar({key!r}) takes a real number, got a complex one, {display(value)}; log its abs()")
        if not isinstance(value, (int, float, Tensor)) and not hasattr(value, "__float__"):
            raise TypeError(f"log_scalar({key!r}) takes a number, got {display(value)}")
        self.log_key(Key("", key, ""), value, aggregation_fn, reduce or "")

    def log_scalars(self, values: Mapping[str, Any]) -> None:
        """Log several numbers."""
        if not isinstance(values, Mapping):
            raise TypeError(f"log_scalars takes a dict of numbers by key, got {display(values)}")
        for key, value in values.items():
            self.log_scalar(key, value, None, None)

    def log_tensor(self, key: str, tensor: Tensor, aggregation_fn: str | Callable[..., Any] | None) -> None:
        """Log a tensor as one number."""
        check.log_key(key)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"log_tensor({key!r}) takes a tensor, got {display(tensor)}; use log_scalar")
        with outside_dispatch_modes():
            if tensor.is_complex():
                raise TypeError(f"log_tensor({key!r}) takes real numbers, got dtype {tensor.dtype}; log its abs()")
        if Queries(self.runtime).is_listening:
            aggregation = checked_aggregation(aggregation_fn, "aggregation_fn")
            self.runtime.lifecycle.values.log(Key("", key, ""), tensor, aggregation, is_measured=True)

    def log_rows(self, ids: Any, losses: Any) -> None:
        """Log the loss of each row."""
        if not isinstance(losses, Tensor) or losses.is_complex() or losses.dtype == torch.bool:
            raise TypeError(f"log_rows takes the losses as a tensor of real numbers, got {display(losses)}")
        if losses.layout is not torch.strided or losses.ndim != 1 or not len(losses):
            raise ValueError(
                f"log_rows takes one loss for each row, a dense tensor [rows], got {display(losses)}; reduce other dimensions"
            )
        if isinstance(ids, Tensor):
            is_list = ids.ndim == 1 and not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
        else:
            ids = ids.tolist() if hasattr(ids, "tolist") else ids  # of numpy
            is_list = isinstance(ids, Sequence) and not isinstance(ids, (str, bytes))
        if not is_list:
            raise TypeError(f"log_rows takes ids as a tensor of whole numbers, [rows], or as a list, got {display(ids)}")
        if len(ids) != len(losses):
            raise ValueError(f"log_rows takes one id for each of the {len(losses)} losses, got {display(ids)}")
        self.runtime.log_rows(ids, losses)

    def log_key(self, key: Key, value: Any, aggregation_fn: str | Callable[..., Any] | None, reducer: str) -> None:
        """Log a value under a key in parts."""
        if not isinstance(key, Key):
            raise TypeError(f"log_key takes a Key(source, name, metric), and log_scalar a text; got {key!r}")
        self.runtime.lifecycle.values.log(key, value, checked_aggregation(aggregation_fn, "aggregation_fn"), reducer)

    # --- out -----------------------------------------------------------------------------------------------------------------

    def missing(self) -> dict[str, str]:
        """Why keys have no value in the last step."""
        record, planner = Queries(self.runtime).settle_now(), self.runtime.planner
        why = self._why_nothing(record)
        if record is None and not why:
            return {}
        follower = self.runtime.loop
        owned = None if follower is None else planner.owned(follower.optimizers)
        factory, pipeline, names = self.runtime.factory, self.runtime.pipeline, planner.matchable() or {}
        if record is None or why:
            reasons = dict.fromkeys(factory.requested(names), why)
        else:
            reasons = factory.missing(record, pipeline.absent, names, owned)
        # the keys are made as those of the values are
        return dict(zip(pipeline.publisher.format_keys(dict.fromkeys(reasons, 0.0)), reasons.values(), strict=True))

    def _why_nothing(self, record: StepRecord | None) -> str:
        """Why no key has a value in the last step, whose record this is; empty where there are values, or was no step yet."""
        why, state = Queries(self.runtime).stale_reason, self.runtime.state
        ended = state.clock.ended
        if record is None and not why and ended is None and state.is_open and state.progress.times:
            steps = max(state.progress.times.values())
            return (
                f"step {state.clock.step} is open until all attached optimizers have stepped; one of them has stepped {steps} "
                f"time{'s' * (steps > 1)} so far, and from its eleventh step on the others are not waited for"
            )
        if record is not None or why or ended is None:
            return why
        return MODEL_GONE if self.runtime.planner.has_lost_model else f"step {ended} was not monitored"

    def all_metrics(self) -> dict[int, dict[str, float]]:
        """The values of the last monitored steps, by step and key."""
        Queries(self.runtime).settle_now()
        pipeline = self.runtime.pipeline
        return {record.step: pipeline.publisher.shown(record) for record in pipeline.history.records()}

    def top_parameters(self, count: int) -> list[tuple[str, float]]:
        """The parameters with the largest shares of the squared gradient norm."""
        check.positive_int("count", count)
        record = Queries(self.runtime).settle_now()
        with outside_dispatch_modes():
            return [] if record is None else top_shares(record.tables.get(n.GRADIENT_BEFORE_CLIP), count)

    # --- analysis ------------------------------------------------------------------------------------------------------------

    def diagnose(self) -> Diagnosis:
        """The findings about the training so far."""
        from ..analysis.diagnosis import Diagnosis
        from ..analysis.diagnosis.diagnose import diagnose_history
        from ..analysis.diagnosis.history import History

        record = Queries(self.runtime).settle_now()
        if self.runtime.fence.inert:
            return Diagnosis((), None, _DISABLED)
        pipeline, model = self.runtime.pipeline, self.runtime.factory.model
        facts = Queries(self.runtime).findings()
        data, setup = self.runtime.plugin("data_check"), self.runtime.plugin("setup_check")
        place, recent = pipeline.directory.path, pipeline.history.recent()
        history = History(
            pipeline.history.sample.records(),
            recent.events,
            facts,
            model.matrices,
            model.kinds,
            "" if place is None else shlex.quote(str(place)),
            recent.steps,
            recent.suspects,
            {} if data is None else data.chance,
            [] if setup is None else setup.groups,
            [] if setup is None else setup.frozen,
            data is not None and data.acts,
            model.parameters,
            pipeline.directory.facts.get("trainer", ""),
            clip_bound=pipeline.directory.facts.get("clip_bound"),
        )
        with outside_dispatch_modes():
            found = diagnose_history(history)
        why = "" if history.records else self._why_nothing(record)
        return replace(found, unseen={"everything": why}) if why else found

    def plot(self, kind: str, engine: str, options: Mapping[str, Any]) -> Any:
        """A figure of the steps that are remembered."""
        from ..analysis.plots.charts import plot
        from ..analysis.plots.sources import ValueSource

        Queries(self.runtime).settle_now()
        inventory, sample = self.runtime.planner.inventory, self.runtime.pipeline.history.sample
        order = None if inventory is None else ModelOrder(inventory.names, inventory.kinds)
        return plot(ValueSource.of_records(sample.records(), order, sample.is_whole), kind, engine, dict(options))

    def why(self, step: int | None) -> str:
        """The text about a step, by default about the largest spike."""
        from ..analysis.spike_report import explain

        if step is not None:
            check.step_number("step", step)
        elif not self.runtime.pipeline.detection.detector_set.detectors:
            raise ValueError("nothing looks for spikes: call add_preset() or add_detector(SpikeDetector()), or name a step")
        Queries(self.runtime).settle_now()
        self.runtime.backfill()
        return explain(self.runtime.pipeline.history.recent(), step)
