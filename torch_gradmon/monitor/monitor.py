"""ModuleMonitor: the methods that users call, with their documentation."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ..capture.hooks import unwrapped
from ..core import keys as n
from ..core import validation as check
from ..core.errors import display, nearest
from ..core.fence import is_disabled
from ..core.keys import Key, Pattern
from ..core.records import Chart, Engine, ModelOrder, StepView
from ..core.torch_modes import is_compiling, is_muted, outside_dispatch_modes
from ..plugins.reactions import StepCounts
from ..plugins.setup_check import Checks
from ..spikes.detector import SpikeDetector
from ..statistics.request import DEFAULT_EPS
from ..step.model_index import GradientSource
from ..step.plan import checked_aggregation
from ..step.planner import PresetName
from ..step.plugin import Plugin
from ..step.ranks import Ranks
from ..step.summary import KEY_DOCUMENTATION, MicroBatchStats
from .builder import build, run_dir_of
from .options import Distributed, Layers, LogTarget, MonitorOptions, OnSpike, SpikeCapture
from .runtime import NO_MODULE, Aggregation, AggregationFunction, MetricFunction, Runtime, at_exit
from .steps import unlink

if TYPE_CHECKING:
    from ..analysis.diagnosis import Diagnosis
    from ..plugins.clipping import AdaptiveClip
    from ..sinks.delivery import FilteredSink
    from .manual_loop import ManualLoop


def sources(argument: str, given: str | Iterable[str], known: Mapping[str, str]) -> list[str]:
    """The sources of keys of the kinds that are named: stages of a gradient, or tensors of a module."""
    if not isinstance(given, (str, Iterable)):
        raise TypeError(f"{argument} must name one or several of {', '.join(known)}, got {display(given)}")
    kinds = (given,) if isinstance(given, str) else tuple(given)
    for kind in kinds:
        if kind not in known:
            raise ValueError(f"{argument}={kind!r} is none of {', '.join(known)}{nearest(str(kind), known)}")
    if not kinds:
        raise ValueError(f"{argument} is empty; name at least one of {', '.join(known)}")
    return [known[kind] for kind in kinds]


Stage = Literal["before_clip", "after_clip", "local"]
TensorOf = Literal["output", "output_gradient", "input", "input_gradient"]
AttentionMetric = Literal["entropy", "entropy_normalized", "first_key", "max_logit"]


def _made(target: LogTarget, is_silent: bool) -> list[Any]:
    """The sinks for ``target``, checked; none for a tracker's name on a rank that sends nothing, which need not have a run of it."""
    if is_disabled() or (is_silent and isinstance(target, str)):
        return []
    from ..sinks import adapters, delivery

    made = adapters.adapted(target)
    for each in made:
        delivery.sender(each)
    return made


class Handle:
    """What was added, or changed, until :meth:`remove` or the end of a ``with`` block."""

    def __init__(self, remove: Callable[[], object]) -> None:
        self._remove: Callable[[], object] | None = remove

    def remove(self) -> None:
        """Undo it. May be called twice."""
        remove, self._remove = self._remove, None
        if remove is not None:
            remove()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class ModuleMonitor:
    """Monitors a module while it trains.

    With ``GRADMON_DISABLE=1`` in the environment, a monitor does nothing.

    **Metrics.** The methods ``add_*_metric`` share these arguments:

    * ``metric_name``: last part of the key, without a slash.
    * ``metric_fn``: a function of the tensor that returns a number, or a tensor whose elements are then reduced. None takes the
      built-in of that name: ``norm``, ``rms``, ``mean``, ``std``, ``max`` (the largest magnitude), ``min_value``, ``max_value``,
      ``l1_norm``, ``sparsity``, ``zero_count``, ``nonfinite_count``, ``log2_histogram`` (counts by power of two, with keys such as
      ``log2_histogram.-12``; it costs much more than the others, so set ``every``), and those that the method lists.
    * ``metric_regex``: searched (``re.search``) in the canonical name of the tensor.
    * ``metric_aggregation_fn``: merges the values of micro-batches and elements: ``"mean"`` (weighted by elements), ``"sum"``,
      ``"min"``, ``"max"``, or a function of all values, as one flat tensor, that returns a number or a dict of numbers. A function
      cannot merge ranks: where they exchange values of their batches, an activation metric that has one is absent, with the reason.
    * ``every``: compute the metric only on steps that are divisible by it.
    * ``shardwise``: call the function on each rank's part of a sharded tensor and merge the values with
      ``metric_aggregation_fn``; ``"mean"`` weighs them by the elements of the parts. This is correct for a share or a largest
      magnitude, and wrong for a quantile. By default a function gives no value for a sharded tensor.

    They raise ``TypeError`` or ``ValueError`` before anything changes: for a name that is empty, has a slash or names no built-in, a
    pattern that does not compile, a function that is not callable, or the same name twice on one tensor.

    Args:
        module: the model; or call :meth:`set_module` later. The monitor neither keeps it alive nor changes it. A function here is
            ``monitor_step_fn``, as in torch-module-monitor.
        every, preset, layers, log_to, run_dir, prefix, on_spike, checks, scaler, max_overhead, distributed, plugins: see
            :func:`torch_gradmon.watch`, whose defaults of ``preset`` and ``on_spike`` are others.
        monitor_step_fn: instead of ``every``, a function of the step number that returns whether to monitor the step.
        excluded_modules_regex: searched in the names of modules and parameters; metrics leave out those that match. Whole-model
            values still cover all parameters.
        spike_capture: a :class:`SpikeCapture`: which steps around a spike are measured that the cadence leaves out.
        key_order: ``"name_first"`` gives ``source/name/metric``, ``"metric_first"`` gives ``source_metric/name``.
        format_module_name_fn: maps each canonical name to the one in keys.
        on_metric_error: ``"warn"`` warns once and continues; ``"raise"`` raises, for tests.
        zero_threshold: an element counts as near zero when ``|x| <= zero_threshold``.
        max_update_rows: limits the copy that update metrics need to this many rows of each parameter, evenly spaced slices of the
            first dimension, of each rank's part where the parameter is sharded; update values are then those of the sample. By default
            the optimizer's step holds one copy of all parameters with an update metric.
        update_regex: limits that copy to the parameters whose names match.
        history: number of steps that :meth:`get_all_metrics` returns; each built-in value of a gradient, parameter, update,
            input or output takes 8 bytes of host memory.
        gradient_source: where gradients are, if not in ``.grad``: an instance of a subclass of
            :class:`torch_gradmon.plugins.GradientSource`. By default what fits the model: ``.grad``, or ``.main_grad`` where its
            parameters have that.
        logger, cpu_offload: accepted for loops written for torch-module-monitor, without an effect.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value; the message has the value and the remedy.
        OSError: ``run_dir`` cannot be written.
    """

    def __init__(
        self,
        module: nn.Module | Callable[[int], bool] | None = None,
        *,
        preset: PresetName | None = None,
        layers: Layers | None = None,
        excluded_modules_regex: Pattern | None = None,
        every: int | Callable[[int], bool] | None = None,
        monitor_step_fn: Callable[[int], bool] | None = None,
        log_to: LogTarget | Sequence[LogTarget] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        prefix: str = "",
        on_spike: OnSpike = None,
        checks: bool | Checks = True,
        scaler: torch.amp.GradScaler | None = None,
        max_overhead: float | None = None,
        distributed: Distributed | None = None,
        plugins: Sequence[Plugin] = (),
        spike_capture: SpikeCapture | None = None,
        key_order: Literal["name_first", "metric_first"] = "name_first",
        format_module_name_fn: Callable[[str], str] | None = None,
        on_metric_error: Literal["warn", "raise"] = "warn",
        zero_threshold: float = DEFAULT_EPS,
        max_update_rows: int | None = None,
        update_regex: Pattern | None = None,
        history: int = 1000,
        gradient_source: GradientSource | None = None,
        logger: object = None,
        cpu_offload: bool = False,
    ) -> None:
        if callable(module) and not isinstance(module, (nn.Module, type)) and monitor_step_fn is None:
            module, monitor_step_fn = None, module
        spike_capture = SpikeCapture() if spike_capture is None else spike_capture
        given = dict(locals())
        options = MonitorOptions(**{each.name: given[each.name] for each in fields(MonitorOptions)})
        self._log_on_all_ranks = options.ranks.log_on_all_ranks
        sinks = self._sinks_of(log_to, Ranks(options.ranks.process_group))  # before the run directory exists
        self._runtime = build(options, module)  # type: ignore[arg-type]
        if preset is not None:
            self._runtime.use_preset(preset)
        self._introduce()
        for target, made in sinks:
            self._add_sinks(target, made)

    def _sinks_of(self, log_to: LogTarget | Sequence[LogTarget] | None, ranks: Ranks) -> list[tuple[LogTarget, list[Any]]]:
        targets: list[Any] = list(log_to) if isinstance(log_to, (list, tuple)) else [] if log_to is None else [log_to]
        return [(target, _made(target, is_muted(ranks.group, self._log_on_all_ranks))) for target in targets]

    def _begin_run(self, run_dir: str | os.PathLike[str] | None, log_to: LogTarget | Sequence[LogTarget] | None) -> None:
        """Keep and send the values there: for a trainer's callback, whose monitor is made before the processes and trackers of a run."""
        runtime = self._runtime
        ranks = runtime.captures.measurer.ranks
        sinks = self._sinks_of(log_to, ranks)
        if (place := run_dir_of(run_dir, self._log_on_all_ranks, ranks)) is not None and not runtime.fence.inert:
            runtime.pipeline.directory.keep_in(place)
            runtime.run_began()
        for target, made in sinks:
            self._add_sinks(target, made)

    def _introduce(self) -> None:
        runtime, planner = self._runtime, self._runtime.planner
        runtime.owner = self  # an attached runtime keeps the monitor for modules with MonitorMixin
        if planner.module() is None:
            return
        runtime.warn_of_idle(planner.registry.metrics)
        assert planner.inventory is not None
        assert planner.representative is not None  # as the module
        runtime.factory.layers.warn_of_idle(planner.inventory.names)
        if not runtime.fence.inert:
            runtime.link()
            runtime.pipeline.directory.annotate(model=type(unwrapped(planner.representative)).__name__)
            runtime.factory.know(planner.inventory.facts)

    # --- modules -------------------------------------------------------------------------------------------------------------

    def set_module(self, module: nn.Module) -> None:
        """Watch ``module``. Warns about metrics whose pattern matches nothing in it.

        Raises:
            TypeError: it is no ``nn.Module``.
            ValueError: there is a module already, or metrics of one name overlap on this one.
        """
        check.module(module)
        watched = self._runtime.planner.module()
        if watched is not None:
            raise ValueError(
                f"this monitor is one of a {type(watched).__name__} already; make another ModuleMonitor for another model"
            )
        self._runtime.planner.watch(module)
        self._introduce()

    @property
    def module(self) -> nn.Module | None:
        """The watched model while it is alive; None before :meth:`set_module`."""
        return self._runtime.planner.module()

    @property
    def module_names(self) -> dict[nn.Module, str]:
        """The names of the watched modules, as in keys."""
        inventory = self._runtime.planner.inventory
        known = {} if inventory is None else inventory.modules
        return {module: name for name, reference in known.items() if (module := reference()) is not None}

    @property
    def reference_module(self) -> nn.Module | None:
        """The reference module, without wrappers of DDP and torch.compile."""
        reference = self._runtime.reference
        return None if reference is None else reference.module

    def set_reference_module(self, module: nn.Module | Literal["init"]) -> None:
        """Compare parameters and outputs with those of ``module``, by name, for the difference metrics. It is read live.

        On steps with a due metric of :meth:`add_activation_difference_metric`, the reference runs before each training forward of the
        watched model: without gradients, on the same inputs, with the same random numbers, in its own mode. Its state, buffers
        included, is restored. It may be on another device, and the outputs to compare stay there until the comparison.

        In a step that :meth:`begin_step` began, the loop may run the reference itself, before the model and on other inputs. The
        monitor then compares with that run and makes none of its own. Runs after the model's first forward of the step do not count.

        Args:
            module: the reference, or ``"init"`` for a frozen copy of the watched model as it is now, which then follows the training or
                evaluation mode of the watched model.

        Raises:
            TypeError: neither a module nor ``"init"``.
            ValueError: the watched model itself, no model to copy, or a model that cannot be copied.
        """
        watched = self._runtime.planner.module()
        if isinstance(module, str):
            check.one_of("module", module, ("init",))
            if watched is None:
                raise ValueError("there is no module to copy; pass it to ModuleMonitor(model) or call set_module(model) first")
            from ..capture.reference import frozen_copy

            with outside_dispatch_modes():
                self._runtime.set_reference(frozen_copy(watched), follows=True)
            return
        check.module(module)
        if watched is not None and unwrapped(module) is unwrapped(watched):
            raise ValueError("the reference is the watched model itself; pass a copy, or 'init' for one as it is now")
        self._runtime.set_reference(module, follows=False)

    def remove_reference_module(self) -> None:
        """Remove the reference module."""
        self._runtime.set_reference(None, follows=False)

    def has_reference_module(self) -> bool:
        """Whether a reference module is set."""
        return bool(self._runtime.reference)

    # --- metrics -------------------------------------------------------------------------------------------------------------

    def add_gradient_metric(
        self,
        metric_name: str,
        metric_fn: MetricFunction = None,
        metric_regex: Pattern = ".*",
        metric_aggregation_fn: AggregationFunction = None,
        *,
        stages: Stage | Iterable[Stage] = ("before_clip", "after_clip"),
        every: int = 1,
        shardwise: bool = False,
    ) -> None:
        """Of the gradient: ``gradient_before_clip/{param}/{metric}`` and, as the optimizer uses it, ``gradient/{param}/{metric}``.

        The stage ``"local"`` is ``gradient_local/{param}/{metric}``: the gradient of each micro-batch of this process, before
        accumulation and reduction. It costs a hook per parameter.

        Args:
            metric_name, metric_fn, metric_regex, metric_aggregation_fn, every, shardwise: see the class.
            stages: one or several of ``"before_clip"``, ``"after_clip"`` and ``"local"``.

        Raises:
            TypeError, ValueError: an argument is wrong, see the class.
        """
        self._runtime.add_metrics(
            sources("stages", stages, n.GRADIENT_STAGES),
            metric_name,
            metric_fn,
            metric_regex,
            metric_aggregation_fn,
            every,
            shardwise=shardwise,
        )

    def add_parameter_metric(
        self,
        metric_name: str,
        metric_fn: MetricFunction = None,
        metric_regex: Pattern = ".*",
        metric_aggregation_fn: AggregationFunction = None,
        *,
        every: int = 1,
        shardwise: bool = False,
    ) -> None:
        """Of the parameter before the optimizer's step: ``parameter/{param}/{metric}``.

        Args:
            metric_name, metric_fn, metric_regex, metric_aggregation_fn, every, shardwise: see the class.
        """
        self._runtime.add_metrics(
            [n.PARAMETER], metric_name, metric_fn, metric_regex, metric_aggregation_fn, every, shardwise=shardwise
        )

    def add_update_metric(
        self,
        metric_name: str,
        metric_fn: MetricFunction = None,
        metric_regex: Pattern = ".*",
        metric_aggregation_fn: AggregationFunction = None,
        *,
        every: int = 1,
        shardwise: bool = False,
    ) -> None:
        """Of the optimizer's change, parameter after minus before: ``update/{param}/{metric}``. Needs :meth:`attach`.

        Further built-in: ``ratio``, the norm of the update over that of the parameter before it, ``angle`` in radians between the parameter
        before and after, and ``growth`` of its norm; all absent for a zero parameter.
        On the steps that measure it, the parameters of an optimizer are copied while it steps. ``every`` makes these steps rarer, and
        ``max_update_rows`` or ``update_regex`` of the monitor limits the copy.

        Args:
            metric_name, metric_fn, metric_regex, metric_aggregation_fn, every, shardwise: see the class.
        """
        self._runtime.add_metrics(
            [n.UPDATE], metric_name, metric_fn, metric_regex, metric_aggregation_fn, every, shardwise=shardwise
        )

    def add_optimizer_metric(
        self,
        metric_name: str,
        metric_fn: MetricFunction = None,
        metric_regex: Pattern = ".*",
        metric_aggregation_fn: AggregationFunction = None,
        *,
        every: int = 1,
        shardwise: bool = False,
    ) -> None:
        """Of the optimizer's state for a parameter, after its step: ``optimizer/{param}/{metric}``. Needs :meth:`attach`.

        Built-in, instead of the usual ones: ``exp_avg_norm``, ``exp_avg_sq_norm``, ``grad_momentum_cosine``, ``second_moment_ratio``. A
        function gets a dict: the state, ``param``, ``grad``, and ``group``, the settings of the parameter's group. If it returns None,
        there is no key.

        Args:
            metric_name, metric_fn, metric_regex, metric_aggregation_fn, every, shardwise: see the class.
        """
        self._runtime.add_metrics(
            [n.OPTIMIZER], metric_name, metric_fn, metric_regex, metric_aggregation_fn, every, shardwise=shardwise
        )

    def add_activation_metric(
        self,
        metric_name: str,
        metric_fn: MetricFunction = None,
        metric_regex: Pattern = ".*",
        metric_aggregation_fn: AggregationFunction = None,
        *,
        every: int = 1,
        of: TensorOf | Iterable[TensorOf] = "output",
        split_calls: bool = False,
    ) -> None:
        """Of a module's output in training: ``activation/{module}/{metric}``. Tensors in containers have their path in the name, as
        in ``activation/encoder[0]/norm``.

        Further built-ins: ``dead``, the share of units (the last dimension; for convolutions, norms of channels, and outputs of
        four dimensions the second) with ``|output| <= zero_threshold`` for every sample of the last 100 monitored steps, and
        ``saturation``, the share of the outputs of a ``Sigmoid``, ``Hardsigmoid`` or ``Tanh`` within 0.05 of a bound.

        Args:
            metric_name, metric_fn, metric_regex, metric_aggregation_fn, every: see the class.
            of: one or several of ``"output"``, ``"output_gradient"`` (``activation_gradient/{module}/{metric}``), ``"input"``
                (``input/...``) and ``"input_gradient"`` (``input_gradient/...``). Gradients are those of each backward pass, per
                micro-batch, divided by the scale of a GradScaler.
            split_calls: give each call of a module in one forward its own key, ``{module}@0`` and so on; by default calls merge.

        Inside ``torch.compile`` only built-ins of outputs that are views of the statistics are measured.
        """
        self._runtime.add_metrics(
            sources("of", of, n.MODULE_KINDS),
            metric_name,
            metric_fn,
            metric_regex,
            metric_aggregation_fn,
            every,
            split_calls=split_calls,
        )

    def add_activation_difference_metric(
        self,
        metric_name: str,
        metric_fn: MetricFunction = None,
        metric_regex: Pattern = ".*",
        metric_aggregation_fn: AggregationFunction = None,
        *,
        every: int = 1,
        shardwise: bool = False,
    ) -> None:
        """Of a module's output and that of the same module of the reference: ``activation_difference/{module}/{metric}``.

        A function gets both outputs; a built-in measures their difference. On the steps that measure it the reference runs once before
        the model, on the same inputs and with the same random numbers; see :meth:`set_reference_module`.

        Args:
            metric_name, metric_fn, metric_regex, metric_aggregation_fn, every, shardwise: see the class.
        """
        self._runtime.add_metrics(
            [n.ACTIVATION_DIFFERENCE], metric_name, metric_fn, metric_regex, metric_aggregation_fn, every, shardwise=shardwise
        )

    def add_parameter_difference_metric(
        self,
        metric_name: str,
        metric_fn: MetricFunction = None,
        metric_regex: Pattern = ".*",
        metric_aggregation_fn: AggregationFunction = None,
        *,
        every: int = 1,
        shardwise: bool = False,
    ) -> None:
        """Of a parameter and that of the reference module: ``parameter_difference/{param}/{metric}``.

        A function gets both parameters; a built-in measures their difference.

        Args:
            metric_name, metric_fn, metric_regex, metric_aggregation_fn, every, shardwise: see the class.
        """
        self._runtime.add_metrics(
            [n.PARAMETER_DIFFERENCE], metric_name, metric_fn, metric_regex, metric_aggregation_fn, every, shardwise=shardwise
        )

    def add_attention_metric(
        self, metric_name: AttentionMetric, metric_regex: Pattern = ".*", *, heads: bool = False, every: int = 1
    ) -> None:
        """Of every call of ``F.scaled_dot_product_attention`` in training, without an edit of the model:
        ``attention_{metric}/{module}/min`` and ``/mean`` over the heads, named after the calling module.

        During the model's training forward, a wrapper replaces torch's function in every module that has it among its globals, once for
        all threads, and each monitor sees the calls of its own thread. A model that keeps the wrapper is saved with torch's function.
        Calls through other references, such as an attribute, are not measured. The cost is about that of attention itself; for memory see
        :mod:`torch_gradmon.statistics.attention`. Calls inside ``torch.compile`` are not measured, and ``nn.MultiheadAttention``
        makes none where ``need_weights`` is True.

        Args:
            metric_name: ``"entropy"`` (nats), ``"entropy_normalized"`` (over the logarithm of the number of keys that a query
                attends to), ``"max_logit"`` (also with ``/max``) or ``"first_key"`` (weight on the first key that a query attends to).
            metric_regex: searched in the name of the module.
            heads: also show ``attention_{metric}/{module}.head_{i}``, which otherwise goes to the run directory only. Activation
                metrics whose patterns match then measure ``{module}.head_{i}.query``, ``.key``, ``.value`` and
                ``.activation``; by default they measure ``{module}.query`` and so on, for all heads together.
            every: only on steps that are divisible by it.
        """
        if metric_name not in n.ATTENTION_SOURCES:
            raise ValueError(f"there is no attention metric {metric_name!r}{nearest(str(metric_name), n.ATTENTION_SOURCES)}")
        source = n.ATTENTION_SOURCES[metric_name]
        self._runtime.add_metrics([source], metric_name, None, metric_regex, None, every, per_head=check.flag(heads=heads))

    def add_micro_batch_metrics(self, batch_size: int = 1) -> None:
        """Measure the gradient of each micro-batch on each rank, before accumulation and reduction.

        This gives ``gradmon/micro_batch_grad_norm_max`` and the gradient noise scale ``gradmon/noise_scale``
        (:class:`torch_gradmon.step.summary.Batches` has the formula). The text of a spike then names the rank and the
        micro-batch that caused it. It costs a hook and a pass for each parameter and micro-batch. Not for gradients that exist only
        in reduced form, as under FSDP2.

        Args:
            batch_size: examples in a micro-batch of one rank, the unit of the noise scale; by default the unit is a micro-batch.

        Raises:
            ValueError: ``batch_size`` is no positive int.
        """
        check.positive_int("batch_size", batch_size)
        self._runtime.factory.summary.add_batches(MicroBatchStats(batch_size))
        self._runtime.planner.measures_each_batch = True
        self._runtime.planner.changed()

    def add_model_metric(self, metric_name: str) -> None:
        """Show one more whole-model value, as ``gradmon/{metric_name}``: one of a preset, or ``grad_mean``, ``grad_std`` or
        ``grad_sparsity``, each over all gradient elements before clipping.

        Raises:
            ValueError: no such value, or it was added already.
        """
        check.one_of("metric_name", metric_name, tuple(KEY_DOCUMENTATION))
        self._runtime.factory.summary.choice.add(metric_name)
        self._runtime.planner.changed()

    def describe(self) -> dict[str, str]:
        """The meaning and unit of each value that is shown, by key; keys of metrics have the pattern in the place of a name."""
        from .inspection import describe

        return describe(self._runtime)

    def set_detail(
        self,
        *,
        every: int | None = None,
        preset: PresetName | None = None,
        steps: int | None = None,
        first: int | None = None,
        reset: bool = False,
    ) -> Handle:
        """Measure more, or less, from the next step on; after ``steps`` steps the script's settings return.

        ``with monitor.set_detail(preset="full"):`` goes back at the end of the block, as ``remove()`` of the returned handle does.
        The command ``gradmon detail`` does the same from outside. This method only records the request, so it may be called between
        two steps, from another thread, or in a signal handler. It replaces an earlier change. Parameters end as the same bits.
        ``on_spike=`` acts in the steps that are monitored, and the change alters which these are.

        Args:
            every: monitor the steps that are divisible by it. It overrides ``every``, ``monitor_step_fn`` and ``max_overhead`` of the
                script. ``monitor_step_fn`` is still called for each step, and ``max_overhead`` later resumes where it was. None keeps all
                three in charge.
            preset: ``"minimal"``, ``"standard"`` or ``"full"``, instead of the script's preset; None for that one. Metrics of
                ``add_*`` and detectors stay. In a compiled model, metrics of modules and of attention stay those of the script, because
                hooks installed after its first call do not run, or recompile it.
            steps: the number of steps; None until the next change.
            first: begin with this step, or with the next one if it is over.
            reset: go back to the script's settings.

        Only the call on the first rank counts. Ranks that exchange values (sharded tensors, activations, values logged with
        ``dist_reduce=``) change together: the request travels in the exchange of the next step of the current cadence, which may be far
        away, and the step after that is the first. Where ranks exchange nothing, as under DDP with ``"minimal"`` and ``"standard"``,
        the request is refused with a reason.

        :meth:`state_dict` does not contain the change: a resumed run uses the settings of its script.

        Raises:
            ValueError: nothing to change, or an argument has a wrong value.
        """
        from ..runs.detail_request import DetailRequest, detail_request  # most runs are not changed while they run

        change = detail_request(every, preset, steps, first)
        if reset and change != DetailRequest():
            raise ValueError("reset=True goes back to the settings of the script, and takes no other argument")
        if change.is_reset and not reset:
            raise ValueError("nothing to change; give every= or preset=, or reset=True to go back to the settings of the script")
        if not self._runtime.fence.inert:
            self._runtime.built_in.detail.request(change)
        return Handle(lambda: None if reset else self.set_detail(reset=True))

    # --- the loop, by hooks --------------------------------------------------------------------------------------------------

    def attach(
        self, *optimizers: Any, scaler: torch.amp.GradScaler | None = None, start_step: int | None = None
    ) -> ModuleMonitor:
        """Follow the training loop by hooks; the loop needs no change.

        Steps are numbered by attempts. A step ends when the last of ``optimizers`` steps, or with a scaler in
        ``scaler.update()``, so pass them in stepping order.

        Several monitors may be attached to one model. Each measures, and costs, separately, and needs its own run directory. Only
        :func:`torch_gradmon.watch` and the trainer adapters replace an earlier monitor, one that either of them made.

        Args:
            optimizers: those that step the watched model; a trainer's wrapper around one is fine.
            scaler: the GradScaler that drives them; by default the one in such a wrapper, as in Accelerate's.
            start_step: number of the first step; by default 0, or the next one of a loaded state.

        Raises:
            ValueError: no module, no optimizer, already attached, or no optimizer holds a parameter of the model.
            TypeError: not an optimizer, or not a scaler.
        """
        self._runtime.attach(optimizers, scaler, start_step)
        return self

    def detach(self) -> None:
        """End the step in flight, send waiting rows, close the sinks, and remove all hooks. May be called twice.

        The metrics stay; :meth:`attach` may follow.
        """
        self._runtime.mark = None
        _SENDERS.discard(self._runtime)
        self._runtime.detach()
        module = self._runtime.planner.module()
        for child in () if module is None else module.modules():
            unlink(child)

    def __enter__(self) -> ModuleMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    # --- the loop, by hand ---------------------------------------------------------------------------------------------------

    @property
    def _by_hand(self) -> ManualLoop:
        from .manual_loop import ManualLoop  # most loops have no need of it

        return ManualLoop(self._runtime)

    def begin_step(self, step: int) -> bool:
        """Open step number ``step``; a step that is still open ends first. Returns whether the step is monitored.

        From then on steps end with :meth:`end_step`, also when attached. In such a step, modules are measured whenever they are in
        training mode, also without gradients.

        Raises:
            TypeError, ValueError: not a whole number of at least 0, or no module is set.
        """
        check.step_number("step", step)
        if self._runtime.planner.inventory is None:
            raise ValueError(NO_MODULE)
        return bool(self._runtime.begin_step(step))

    def end_step(self) -> None:
        """End the step and publish its values. Synchronises the device. Without an open step it does nothing."""
        self._runtime.end_step()

    def monitor_parameters(self) -> None:
        """Measure the parameters as they are now."""
        self._by_hand.measure_parameters()

    def monitor_gradients(self, before_clip: bool = False) -> None:
        """Measure the gradients as they are now, as those before clipping or as those that the optimizer will use.

        Call it after the last backward pass of the step. Gradients that are still scaled are divided by the scaler's scale.
        """
        self._by_hand.measure_gradients(before_clip)

    def monitor_activations(self, module: str | nn.Module, activations: Any, is_reference: bool = False) -> None:
        """Measure a tensor, or a container of tensors, as the activation of ``module``, a module or any name.

        With ``is_reference``, as loops for torch-module-monitor call it in the forward of the reference module, it does nothing: the
        monitor measures the reference by itself.
        """
        if is_reference:
            return
        from .inspection import name_of

        self._by_hand.capture_activation(name_of(self._runtime, module), activations)

    def after_micro_batch(self) -> None:
        """Does nothing, because the monitor detects micro-batches. It is here for loops written for torch-module-monitor."""

    def no_monitor(self) -> AbstractContextManager[None]:
        """Measure nothing inside the ``with`` block: for evaluation in training mode and other passes that are not training."""
        return self._runtime.lifecycle.paused()

    def is_monitoring(self) -> bool:
        """Whether a monitored step is open and not paused, and this is neither an evaluation pass nor recomputation."""
        return not is_compiling() and self._runtime.is_listening

    def is_step_monitored(self, step: int) -> bool:
        """Whether ``step`` was monitored, or will be by the current settings."""
        return not self._runtime.fence.inert and self._runtime.would_monitor(step)

    @property
    def current_step(self) -> int | None:
        """Number of the step in flight, or else of the last one; None before the first."""
        return self._runtime.state.step

    @property
    def last_record(self) -> StepView | None:
        """What is known of the step that ended last: ``step``, ``metrics``, ``spikes``, ``rollback``, ``detail``,
        ``context``, ``top_gradients(10)``. None before the first step.

        Nothing is read before it is asked for; the first values synchronise once.
        """
        from .inspection import last_record

        return last_record(self._runtime)

    @property
    def step_was_skipped(self) -> bool:
        """Whether a spike made the last step a skip (``on_spike="skip"``); known once ``optimizer.step()`` returns.

        Use it for the rest of the loop: ``if not monitor.step_was_skipped: scheduler.step()``. An overflow that makes a GradScaler leave
        out a step is no skip.
        """
        return self._runtime.lifecycle.is_skipped

    def get_step_counts(self) -> StepCounts:
        """Numbers of steps that were attempted, applied, skipped, overflowed, or had NaN or Inf. Synchronises at most once a step."""
        self._runtime.settle_now()
        return self._runtime.counts()

    def clip_grad_norm_(
        self,
        max_norm: float | Literal["zclip", "adagc"] | AdaptiveClip,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        parameters: Any = None,
        *,
        exact: bool | None = None,
    ) -> Tensor:
        """Measure the gradients, then clip them: bit for bit as ``torch.nn.utils.clip_grad_norm_`` does and returns.

        With a GradScaler call it after ``scaler.unscale_``, as torch's function. It waits for the device only with
        ``error_if_nonfinite``, or where sharded gradients are exchanged by a CPU backend.

        Args:
            max_norm: a number, as for torch's function; or ``"zclip"``, ``"adagc"``, a :class:`ZClip` or an :class:`AdaGC`, which
                adapt to the gradients and clip by exact norms. The state of those named by a str is part of :meth:`state_dict`. An
                object keeps its own state and needs the same parameters in every step. They add ``gradmon/clip_limit``
                (ZClip: the norm above which this step is clipped) or ``gradmon/clipped_parameters`` (AdaGC: the number scaled down)
                to the record of the step.
            norm_type, error_if_nonfinite: as for torch's function.
            parameters: whose gradients to clip; by default those of the watched model.
            exact: clip by, and return, the exact norm: torch's is 0.16 % low at 3e7 elements on CPU. For the norms 1, 2, inf. With
                sharded gradients every rank has to make this call. By default only adaptive clips are exact.

        Raises:
            TypeError: ``max_norm`` is none of these.
            ValueError: no module is watched and ``parameters`` is None; ``max_norm`` is an unknown name; an adaptive clip has a
                ``norm_type`` other than 2 or ``exact=False``; an ``exact`` norm is of another order, of gradients that cannot be
                measured, or of sharded gradients while a rank has no monitor. Nothing is changed then.
            RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
        """
        from .manual_loop import clip_gradients

        return clip_gradients(self._runtime, parameters, max_norm, norm_type, error_if_nonfinite, exact)

    # --- values --------------------------------------------------------------------------------------------------------------

    def get_step_metrics(self) -> dict[str, float]:
        """Values of the step that ended last, plain floats by key; empty when it was not monitored. Synchronises once."""
        record = self._runtime.settle_now()
        return {} if record is None else self._runtime.pipeline.publisher.shown(record)

    def get_all_metrics(self) -> dict[int, dict[str, float]]:
        """The same for the last ``history`` monitored steps, by step."""
        self._runtime.settle_now()
        pipeline = self._runtime.pipeline
        return {record.step: pipeline.publisher.shown(record) for record in pipeline.history.records()}

    def log_scalar(
        self, key: str, value: Any, aggregation_fn: AggregationFunction = None, *, dist_reduce: Aggregation | None = None
    ) -> None:
        """Log one number under ``key``, merged over micro-batches by ``aggregation_fn`` (by default the mean).

        It belongs to the step in flight, or, between two steps, to the one that just ended. Without a hook on the forward (a model
        that is called by its parts), a key that was logged before the first backward pass belongs to the next step.
        A tensor stays on its device until the step ends.

        Args:
            key: the key.
            value: the number, or a tensor of one element.
            aggregation_fn: see the class; the same for all values of a key in one step, since others are lost with a warning.
            dist_reduce: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"`` merges the value over the ranks that log it, in the exchange at
                the end of the step, so log it before the optimizer steps: a later one is lost if ranks have merged earlier ones.
                By default a value stays on its rank, except a value with a detector, which is averaged.

        Raises:
            TypeError: ``key`` is no str, or the value no number.
            ValueError: a tensor of several elements; :meth:`log_tensor` takes those. Or an unknown ``dist_reduce``.
        """
        if aggregation_fn is None and dist_reduce is None and self._runtime.lifecycle.values.keep(key, value):
            return
        check.log_key(key)
        if dist_reduce is not None:
            check.one_of("dist_reduce", dist_reduce, ("mean", "sum", "min", "max"))
        with outside_dispatch_modes():
            if isinstance(value, Tensor) and value.numel() != 1:
                shape = tuple(value.shape)
                raise ValueError(f"log_scalar({key!r}) takes one number, got a tensor of shape {shape}; use log_tensor")
            if isinstance(value, Tensor) and value.is_complex():
                raise TypeError(f"log_scalar({key!r}) takes a real number, got a complex one, {display(value)}; log its abs()")
        if not isinstance(value, (int, float, Tensor)) and not hasattr(value, "__float__"):
            raise TypeError(f"log_scalar({key!r}) takes a number, got {display(value)}")
        aggregation = checked_aggregation(aggregation_fn, "aggregation_fn")
        self._runtime.lifecycle.values.log(Key("", key, ""), value, aggregation, dist_reduce or "")

    def log_scalars(self, values: Mapping[str, Any]) -> None:
        """Log several numbers by key, see :meth:`log_scalar`."""
        if not isinstance(values, Mapping):
            raise TypeError(f"log_scalars takes a dict of numbers by key, got {display(values)}")
        for key, value in values.items():
            self.log_scalar(key, value)

    def log_tensor(self, key: str, tensor: Tensor, aggregation_fn: AggregationFunction = None) -> None:
        """Log a tensor as one number: its elements from all calls in the step, merged by ``aggregation_fn`` (by default the mean
        over elements). Outside of a monitored step it does nothing.

        Raises:
            TypeError: ``key`` is no str, or ``tensor`` no tensor.
        """
        check.log_key(key)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"log_tensor({key!r}) takes a tensor, got {display(tensor)}; use log_scalar")
        with outside_dispatch_modes():
            if tensor.is_complex():
                raise TypeError(f"log_tensor({key!r}) takes real numbers, got dtype {tensor.dtype}; log its abs()")
        if self._runtime.is_listening:
            aggregation = checked_aggregation(aggregation_fn, "aggregation_fn")
            self._runtime.lifecycle.values.log(Key("", key, ""), tensor, aggregation, is_measured=True)

    def log_sample_losses(self, ids: Sequence[int | str] | Tensor, losses: Tensor) -> None:
        """The loss of each row of the batch, before ``optimizer.step()``; again for each micro-batch. Only in monitored steps.

        The eight largest losses of a step are kept with their ids: a spike names the rows that hold the loss, :meth:`why` and the
        run directory (``run.record(step).context["rows"]``) have them. The rows are those of this rank. Nothing waits for the device.

        Args:
            ids: what identifies each row in the data, ``[rows]``: integers, strings, or a tensor of integers. Of a
                closure that is evaluated several times, the last rows count; a row that is logged twice has the sum.
            losses: a tensor of real numbers, ``[rows]``.

        Raises:
            TypeError, ValueError: wrong types, or other shapes.
        """
        from .inspection import checked_ids

        self._runtime.log_sample_losses(checked_ids(ids, losses), losses)

    def log_context(self, **facts: Any) -> None:
        """Facts about the step in flight, such as ``batch_ids=[...]``, for the run directory and the report on a spike.

        Between two steps they belong to the one that just ended. A name that was first used before any forward, as in a loop
        that tags each batch as it arrives, belongs to the next step.
        """
        self._runtime.lifecycle.values.tag(facts)

    def missing(self) -> dict[str, str]:
        """The reason why each requested key has no value in the step that ended last, by key. Synchronises once."""
        from .inspection import missing

        return missing(self._runtime)

    def warning_counts(self) -> dict[str, int]:
        """Number of times that each problem occurred, by cause; only the first of each gives a warning.

        ``sink:JsonlSink`` counts steps that the sink lost, ``store`` steps that the run directory lost, ``metric:...`` values
        of a metric function that raised, ``internal:...`` failures of the monitor itself.
        """
        return {cause: count for cause, count in self._runtime.fence.complaints.counts.items() if count}

    # --- analysis ------------------------------------------------------------------------------------------------------------

    def diagnose(self) -> Diagnosis:
        """What is wrong with the training so far, where, and what to do: print it, or read ``findings`` and ``exit_code``.

        It uses some hundred of the monitored steps: both ends, those with spikes, and an even choice between. Most rules need the
        loss: ``log_scalar("loss", loss)`` before the optimizer steps. ``preset="full"`` measures what rules about activations,
        saturation and attention need; ``unseen`` lists the rules that lacked a value. Takes about a second for a thousand
        parameters. Synchronises once.
        """
        from .inspection import diagnose

        return diagnose(self._runtime)

    def why(self, step: int | None = None) -> str:
        """The report on a step, by default on the worst step of the largest spike, on one screen, to print: its reasons, the
        signals around it, the parameters that moved and since when, and the steps after it. Consecutive spikes count as one.
        Without a spike it says so.

        It covers the signals of the last ``history`` steps and of those around earlier spikes, and the gradients of 64 steps and of
        the 100 largest spikes. The command ``gradmon why`` covers every step of a run directory.

        Raises:
            TypeError, ValueError: ``step`` is no step number, or no longer in memory; or no detector looks for spikes.
        """
        from ..analysis.spike_report import explain

        if step is not None:
            check.step_number("step", step)
        elif not self._runtime.pipeline.detectors.detectors:
            raise ValueError("nothing looks for spikes: give preset= or call add_detector(SpikeDetector()), or name a step")
        self._runtime.settle_now()
        self._runtime.backfill()
        return explain(self._runtime.pipeline.history.recent(), step)

    def plot(self, kind: Chart = "heatmap", *, engine: Engine = "plotly", **options: Any) -> Any:
        """A figure of the run so far, for a notebook or a dashboard: ``wandb.log({"heatmap": monitor.plot()})``.

        It shows at most 400 of the monitored steps: both ends, those with spikes, and an even choice between. :meth:`Run.plot`
        of a run directory shows all of them. Synchronises once.

        Args:
            kind: ``"heatmap"`` layers over steps; ``"norm"`` loss, gradient norm before and after clipping, share of clipped steps;
                ``"update"`` update over parameter beside those of most healthy runs; ``"depth"`` one step over the layers;
                ``"layers"`` single layers side by side.
            engine: ``"plotly"``, or ``"matplotlib"`` for a static picture: ``.savefig("heatmap.png")``.
            **options: ``view="gradient"``, ``"clipped"``, ``"update"``, ``"sparsity"``, ``"activation"`` or ``"parameter"`` for
                ``heatmap``, ``depth`` and ``layers``; ``rows=48`` for ``heatmap`` and ``depth``: more layers are shown by blocks;
                ``columns=1000`` for ``heatmap``, and ``relative=`` for its colours: True for each value relative to the median of its
                row, False for the values, None for the default of the view; ``step=`` for ``depth``; ``names=[...]`` for ``layers``.

        Returns:
            A ``plotly.graph_objects.Figure`` or a ``matplotlib.figure.Figure``.

        Raises:
            ValueError: no such kind, engine, view, step or layer, or its values were not measured.
            TypeError: this kind has no such option.
            ImportError: the engine is not installed.
        """
        from ..analysis.plots.charts import ValueSource, plot

        self._runtime.settle_now()
        inventory, history = self._runtime.planner.inventory, self._runtime.pipeline.history
        order = None if inventory is None else ModelOrder(inventory.names, inventory.kinds)
        return plot(ValueSource(history.sampled(), order, history.is_whole), kind, engine, options)

    # --- outputs -------------------------------------------------------------------------------------------------------------

    def add_sink(
        self,
        sink: LogTarget,
        *,
        keys: Pattern | None = None,
        every: int = 1,
        deferred: bool = False,
        thread: bool = False,
        on_all_ranks: bool = False,
    ) -> Handle:
        """Send the values of each monitored step to ``sink``. A failing sink never stops the training.

        A W&B or Trackio run, a ``SummaryWriter``, a Comet experiment, the modules ``wandb``, ``trackio`` and ``mlflow`` (for the
        active run), and the trackers of an ``Accelerator`` get the matching sink of :mod:`torch_gradmon.sinks`. With a
        ``GradmonTracker`` among the trackers, keys that ``accelerator.log`` sends to them already are left out.

        A step's values are sent when the next step begins, which waits for the end of the step on the GPU. A row that a sink fails to
        take is sent again with the next one. After three failures in a row, or three rows that took longer than training itself, the
        sink is dropped with a warning. A sink runs with gradients, wherever it is called from, so it may train another model.

        Args:
            sink: an object with ``log(dict, step=)`` or ``log_metrics(dict, step=)``, or a function with these arguments; ``"wandb"``,
                ``"trackio"`` or ``"mlflow"`` for the active run.
            keys: send only keys in which this pattern is found.
            every: send only steps that are divisible by it.
            deferred: values may arrive one step later, so that training does not wait; no difference on the CPU.
            thread: call a slow sink in its own thread.
            on_all_ranks: each rank's sink gets the values of its rank; by default only the first rank sends.

        Returns:
            A handle: ``remove()`` sends waiting rows to ``sink``, closes it and removes it.

        Raises:
            TypeError: ``sink`` is none of these.
            ValueError: ``keys`` is no valid pattern, ``every`` no positive int, ``thread`` is set for a W&B run, or a tracker that is
                named has no active run.
            ImportError: a tracker that is named is not installed.
        """
        group = self._runtime.captures.measurer.ranks.group
        made = _made(sink, not on_all_ranks and is_muted(group, self._log_on_all_ranks))
        return self._add_sinks(sink, made, keys, every, deferred, thread, on_all_ranks)

    def _add_sinks(
        self,
        given: LogTarget,
        sinks: Sequence[Any],
        keys: Pattern | None = None,
        every: int = 1,
        deferred: bool = False,
        thread: bool = False,
        on_all_ranks: bool = False,
    ) -> Handle:
        from ..sinks import adapters, delivery, wandb

        if isinstance(given, str) and sinks:  # its run of now is what two monitors share, and not the name
            given = getattr(sinks[0], "run", sinks[0])
        pipeline, complaints = self._runtime.pipeline, self._runtime.fence.complaints
        place, runtime, directory = pipeline.directory.path, weakref.ref(self._runtime), weakref.ref(pipeline.directory)
        added: list[FilteredSink] = []

        def kept() -> str:
            """The run directory as text, while it has all rows and its monitor lives."""
            return "" if (alive := directory()) is None or alive.has_lost else alive.description

        for each in sinks:
            if thread and isinstance(each, wandb.WandbSink):
                raise ValueError(
                    "W&B takes rows without delay, and those of another thread would come between; leave thread=True out"
                )
            if callable(connect := getattr(each, "connect", None)):
                connect("" if place is None else str(place), lambda: [] if (alive := runtime()) is None else alive.findings())
            is_deferred = deferred or not getattr(each, "takes_values", True)
            without = adapters.logged_anyhow(given)
            filtered = delivery.FilteredSink(
                each, keys, every, complaints, is_deferred, thread, kept, without, given, on_all_ranks
            )
            if callable(before_finish := getattr(each, "before_finish", None)):
                before_finish(partial(at_exit, runtime))
            pipeline.publisher.add(filtered)
            added.append(filtered)
        if keys is None and _send_the_same(self._runtime, given):
            complaints.add(
                "sink:shared",
                f"another monitor sends the same keys to this {delivery.name_of(given)}: give one of the two a prefix=, such as 'D/'",
            )
        _SENDERS.add(self._runtime)
        return Handle(partial(_remove_sinks, runtime, added))

    def add_detector(self, detector: SpikeDetector) -> Handle:
        """Feed ``detector`` with the whole-model value, or the logged scalar, that its ``signal`` names.

        Raises:
            TypeError: it is no :class:`SpikeDetector`.
            ValueError: its signal has a detector already. A detector of a preset is replaced instead.

        Returns:
            A handle, whose ``remove()`` ends this.
        """
        if not isinstance(detector, SpikeDetector):
            raise TypeError(f"expected a SpikeDetector, got {display(detector)}; a rule goes into one: SpikeDetector(rule)")
        detectors = self._runtime.pipeline.detectors
        detectors.add(detector)
        self._runtime.planner.changed()
        return Handle(partial(detectors.remove, detector))

    # --- state ---------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Step number, counters, and the state of detectors and of adaptive clips by name, as plain numbers and lists."""
        return self._runtime.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict`: the next step has the number after its last one.

        Raises:
            TypeError, ValueError: not such a state.
        """
        self._runtime.load_state_dict(state)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy watches nothing, so objects that hold their monitor, the model included, can be copied and saved."""
        return ModuleMonitor, ()

    def __repr__(self) -> str:
        from .inspection import words

        return f"ModuleMonitor({', '.join(words(self._runtime))})"

    def __str__(self) -> str:
        return "\n  ".join([repr(self), *map(str, self._runtime.built_in.setup.parts())])


#: Of monitors with sinks.
_SENDERS: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _send_the_same(runtime: Runtime, sink: Any) -> bool:
    """Whether another monitor that lives sends its whole-model values to ``sink`` under the same keys."""
    form = runtime.pipeline.publisher.format_keys.form
    shown = set(runtime.factory.summary.choice.shown)
    return any(
        each.given is sink and each.keys is None
        for other in _SENDERS
        if other is not runtime
        and other.pipeline.publisher.format_keys.form == form
        and shown & set(other.factory.summary.choice.shown)
        for each in other.pipeline.publisher.sinks
    )


def _remove_sinks(runtime: Callable[[], Runtime | None], sinks: Sequence[FilteredSink]) -> None:
    """Send waiting rows to these sinks, close and remove them."""
    if (alive := runtime()) is None:
        return
    alive.settle_now()
    publisher = alive.pipeline.publisher
    publisher.publish()
    for sink in sinks:
        if sink in publisher.sinks:
            publisher.remove(sink)
