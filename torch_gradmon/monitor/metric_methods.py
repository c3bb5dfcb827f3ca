"""The ``add_*`` methods: one line each over the registry."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..core import keys as n
from ..core import validation as check
from ..core.errors import GradmonWarning, display, nearest
from ..core.metric import Metric
from ..spikes.detector import SpikeDetector
from ..step.micro_batches import DOCUMENTATION as BATCHES
from ..step.micro_batches import MicroBatchStats
from ..step.planner import Planner
from ..step.presets import PRESETS
from ..step.registry import Registry
from ..step.summary_keys import DOCUMENTATION, ON_REQUEST
from .mixin import has_mixin
from .session import Session

MetricFunction = Callable[..., Any] | None
Pattern = str | re.Pattern[str]
AggregationFunction = str | Callable[..., Any] | None


#: What may stand behind the name of a module that attends.
_PARTS_OF = {n.ACTIVATION: ("", *(f"{head}.{of}" for head in ("", ".head_0") for of in ("query", "key", "value", "activation")))}


def _adder(source: str, documentation: str) -> Callable[..., None]:
    """The method that adds metrics of ``source``."""

    def add(
        self: MetricMethods,
        metric_name: str,
        metric_fn: MetricFunction = None,
        metric_regex: Pattern = ".*",
        metric_aggregation_fn: AggregationFunction = None,
        *,
        every: int = 1,
        shardwise: bool = False,
    ) -> None:
        options = {"shardwise": check.flag(shardwise=shardwise)} if shardwise is not False else {}
        self._add([source], metric_name, metric_fn, metric_regex, metric_aggregation_fn, every, **options)

    add.__doc__ = documentation
    return add


class MetricMethods:
    """What can be asked for.

    All methods share their first four arguments:

    * ``metric_name``: last part of the key, without a slash.
    * ``metric_fn``: a function of the tensor that returns a number, or a tensor whose elements are then reduced. None takes
      the built-in of that name: ``norm``, ``rms``, ``mean``, ``std``, ``max``, ``min_value``, ``max_value``, ``l1``,
      ``sparsity``, ``zeros``, ``nonfinite``, ``log2_histogram`` (counts by power of two, under ``log2_histogram.-12`` and the
      like; much dearer than the others, so give it ``every``), and what the method's own text adds.
    * ``metric_regex``: searched (``re.search``) in the canonical name of the tensor.
    * ``metric_aggregation_fn``: how the values of micro-batches and elements become one: ``"mean"`` (by elements), ``"sum"``,
      ``"min"``, ``"max"``, or a function of all values as one flat tensor that returns a number or a dict of numbers.

    and ``every``: computed only on steps that are divisible by it. Where a tensor is spread over ranks, a function gives no value,
    unless it was declared ``shardwise``: then it is called for each rank's part, and the values are merged by
    ``metric_aggregation_fn``, ``"mean"`` weighted by the elements of the parts. That is right for a share or a largest
    magnitude, and wrong for a quantile.

    All raise ``TypeError`` or ``ValueError`` before anything is changed: a name that is empty, has a slash or names no
    built-in, a pattern that does not compile, a function that cannot be called, the same name twice on one tensor.
    """

    _registry: Registry
    _planner: Planner
    _session: Session

    def add_gradient_metric(
        self,
        metric_name: str,
        metric_fn: MetricFunction = None,
        metric_regex: Pattern = ".*",
        metric_aggregation_fn: AggregationFunction = None,
        *,
        stages: Iterable[str] = ("before_clip", "after_clip"),
        every: int = 1,
        shardwise: bool = False,
    ) -> None:
        """Of the gradient: ``gradient_before_clip/{param}/{metric}`` and, as the optimizer uses it, ``gradient/{param}/{metric}``.

        The stage ``"local"`` is ``gradient_local/{param}/{metric}``: the gradients of this process's micro-batches, one by one,
        before they are accumulated or reduced; it costs a hook per parameter.
        """
        if isinstance(stages, str):
            stages = (stages,)
        sources = []
        for stage in stages:
            if stage not in n.GRADIENT_STAGES:
                raise ValueError(f"stages={stage!r} is no stage of a gradient{nearest(str(stage), n.GRADIENT_STAGES)}")
            sources.append(n.GRADIENT_STAGES[stage])
        if not sources:
            raise ValueError("stages is empty; name at least one of local, before_clip, after_clip")
        options = {"shardwise": check.flag(shardwise=shardwise)}
        self._add(sources, metric_name, metric_fn, metric_regex, metric_aggregation_fn, every, **options)

    add_parameter_metric = _adder(
        n.PARAMETER,
        """Of the parameter before the optimizer's step: ``parameter/{param}/{metric}``.""",
    )
    add_update_metric = _adder(
        n.UPDATE,
        """Of what the optimizer changed, parameter after minus before: ``update/{param}/{metric}``.

    Built-in besides: ``ratio``, the norm of the update over that of the parameter before it, absent for a zero parameter.
    Costs a copy of the parameters of an optimizer while it steps, on the steps that measure it; ``every`` spaces those,
    and ``update_sample`` of the monitor bounds the copy. Needs :meth:`attach`.
    """,
    )
    add_optimizer_metric = _adder(
        n.OPTIMIZER,
        """Of the optimizer's state for a parameter, after its step: ``optimizer/{param}/{metric}``.

    Built-in, instead of the usual ones: ``exp_avg_norm``, ``exp_avg_sq_norm``, ``grad_momentum_cosine``. A function gets a
    dict: the state, and ``param`` and ``grad``; None from it gives no key. Needs :meth:`attach`.
    """,
    )

    def add_activation_metric(
        self,
        metric_name: str,
        metric_fn: MetricFunction = None,
        metric_regex: Pattern = ".*",
        metric_aggregation_fn: AggregationFunction = None,
        *,
        every: int = 1,
        of: str | Iterable[str] = "output",
        split_calls: bool = False,
    ) -> None:
        """Of a module's output in training: ``activation/{module}/{metric}``; tensors in containers are named by their path, as
        in ``activation/encoder[0]/norm``.

        Built-in besides: ``dead``, the share of units (the last dimension; for convolutions, norms of channels, and outputs of
        four dimensions the second) with ``|output| <= eps`` for every sample of the last 100 monitored steps, and
        ``saturation``, the share of the outputs of a ``Sigmoid``, ``Hardsigmoid`` or ``Tanh`` within 0.05 of a bound.

        Args:
            metric_name, metric_fn, metric_regex, metric_aggregation_fn, every: see the class.
            of: one or several of ``"output"``, ``"output_gradient"`` (``activation_gradient/{module}/{metric}``), ``"input"``
                (``input/...``) and ``"input_gradient"`` (``input_gradient/...``). Gradients are those that backward passes
                bring, divided by the scale of a GradScaler, of each micro-batch by itself.
            split_calls: a module that is called several times in a forward has a key for each call, ``{module}@0`` and so on;
                otherwise its calls merge.

        Inside ``torch.compile`` built-ins of outputs that are views of the statistics are measured, and nothing else.
        """
        if not isinstance(of, (str, Iterable)):
            raise TypeError(f"of must name one or several of {', '.join(n.MODULE_KINDS)}, got {display(of)}")
        kinds = (of,) if isinstance(of, str) else tuple(of)
        for kind in kinds:
            if kind not in n.MODULE_KINDS:
                raise ValueError(f"of={kind!r} is nothing that a module has{nearest(str(kind), n.MODULE_KINDS)}")
        if not kinds:
            raise ValueError(f"of is empty; name at least one of {', '.join(n.MODULE_KINDS)}")
        sources = [n.MODULE_KINDS[kind] for kind in kinds]
        self._add(
            sources,
            metric_name,
            metric_fn,
            metric_regex,
            metric_aggregation_fn,
            every,
            split_calls=check.flag(split_calls=split_calls),
        )

    add_activation_difference_metric = _adder(
        n.ACTIVATION_DIFFERENCE,
        """Of a module's output and that of the same module of the reference: ``activation_difference/{module}/{metric}``.

    A function gets both; a built-in is that of their difference. On the steps that measure it the reference runs once before
    the model does, on the same inputs and with the same random numbers; see :meth:`ModuleMonitor.set_reference_module`.
    """,
    )

    def add_coordinate_metric(
        self,
        metric_name: str = "l2norm",
        metric_fn: MetricFunction = None,
        metric_regex: Pattern = ".*",
        metric_aggregation_fn: AggregationFunction = None,
        *,
        every: int = 1,
    ) -> None:
        """Of the terms of the refined coordinate check; see :class:`torch_gradmon.RefinedCoordinateCheck`.

        A function gets a term, ``[..., n]``; built-in are ``l2norm`` and ``rms``, over the last dimension.
        """
        self._add(n.RCC_SOURCES, metric_name, metric_fn, metric_regex, metric_aggregation_fn, every)

    def add_attention_metric(
        self, metric_name: str, metric_regex: Pattern = ".*", *, heads: bool = False, every: int = 1
    ) -> None:
        """Of every call of ``F.scaled_dot_product_attention`` that the model makes in training, with no edit of the model:
        ``attention_{metric}/{module}/min`` and ``/mean`` over the heads, named after the module that makes the call.

        Args:
            metric_name: ``"entropy"`` (nats), ``"entropy_normalized"`` (over the logarithm of the number of keys that a query
                sees), ``"max_logit"`` (which has ``/max`` too) or ``"first_key"`` (share of the weights on the first key).
            metric_regex: searched in the name of the module.
            heads: show ``attention_{metric}/{module}.head_{i}`` too, which otherwise goes to the run directory only, and let
                activation metrics whose patterns match have ``{module}.head_{i}.query``, ``.key``, ``.value`` and
                ``.activation``; without it these are ``{module}.query`` and so on, all heads together.
            every: only on steps that are divisible by it.

        While the model's training forward runs, a function that passes calls on stands in for torch's, in every module that has
        it among its globals; what keeps it elsewhere, such as in an attribute, calls it unseen. It costs about as much as
        attention itself; see :mod:`torch_gradmon.statistics.attention` for memory. Calls inside ``torch.compile`` are not seen,
        and ``nn.MultiheadAttention`` makes none where ``need_weights`` is True.
        """
        if metric_name not in n.ATTENTION_SOURCES:
            raise ValueError(f"there is no attention metric {metric_name!r}{nearest(str(metric_name), n.ATTENTION_SOURCES)}")
        source = n.ATTENTION_SOURCES[metric_name]
        self._add([source], metric_name, None, metric_regex, None, every, per_head=check.flag(heads=heads))

    add_parameter_difference_metric = _adder(
        n.PARAMETER_DIFFERENCE,
        """Of a parameter and that of the reference module: ``parameter_difference/{param}/{metric}``.

    A function gets both; a built-in is that of their difference.
    """,
    )

    def _add(
        self,
        sources: Sequence[str],
        name: str,
        function: MetricFunction,
        regex: Pattern,
        aggregation: AggregationFunction,
        every: int,
        **options: bool,
    ) -> None:
        check.positive_int("every", every)
        made = [self._registry.make(source, name, function, regex, aggregation, every=every, **options) for source in sources]
        self._registry.add(made, self._planner.matchable())
        self._planner.changed()
        self._session.rearm()
        self._warn_of_idle(made[:1])

    def _warn_of_idle(self, metrics: Iterable[Metric]) -> None:
        names = self._planner.matchable()
        # modules with the mixin log activations under names of their own, which only the first forward tells
        module = self._planner.module
        if module is not None and has_mixin(module):
            metrics = [metric for metric in metrics if metric.source not in n.MODULE_SOURCES]
        for metric in metrics if names is not None else ():
            known = names[metric.source]  # type: ignore[index]
            if not any(metric.matches(name + part) for name in known for part in _PARTS_OF.get(metric.source, ("",))):
                pattern = metric.pattern.pattern
                warnings.warn(
                    f"torch_gradmon: the pattern {pattern!r} of the {metric.source} metric {metric.name!r} matches nothing "
                    f"in the model{nearest(pattern, known)}",
                    GradmonWarning,
                    stacklevel=4,
                )

    def describe(self) -> dict[str, str]:
        """What was asked for, with its unit and meaning: documentation by key, patterns in the place of names."""
        known = {**DOCUMENTATION, **BATCHES, **ON_REQUEST}
        told = self._session.ledger.last  # what is asked for by other means than a metric shows there
        on_request = (
            [] if told is None else [key.metric for key in told.values if key.source == n.SUMMARY and key.metric in ON_REQUEST]
        )
        texts = {f"{n.SUMMARY}/{name}": known[name] for name in (*self._session.ledger.summary.shown, *on_request)}
        for metric in self._registry.metrics:
            unit = "" if metric.unit == "1" else f" [{metric.unit}]"
            often = "" if metric.every == 1 else f", on every {metric.every}th step"
            texts[f"{metric.source}/{metric.pattern.pattern}/{metric.name}"] = f"{metric.documentation}{unit}{often}"
        if (sample := self._session.parameters.sample_description()) is not None:
            for key in texts:
                if key.startswith((f"{n.SUMMARY}/update_", f"{n.UPDATE}/")):
                    texts[key] += f"; {sample}"
        return texts

    def add_batch_metrics(self, batch_size: int = 1) -> None:
        """Measure the gradient of each micro-batch on each rank by itself, before it is accumulated and reduced.

        That gives ``gradmon/batch_norm_max`` and the gradient noise scale ``gradmon/noise_scale``
        (:class:`torch_gradmon.step.micro_batches.MicroBatchStats` has the formula). The text of a spike names the rank and
        the micro-batch. It costs a hook and a pass for each parameter and micro-batch. Not for gradients that exist only
        reduced, as under FSDP2.

        Args:
            batch_size: examples in a micro-batch of one rank, the unit of the noise scale; by default it is in micro-batches.

        Raises:
            ValueError: ``batch_size`` is no positive int.
        """
        check.positive_int("batch_size", batch_size)
        self._session.ledger.summary.batches = MicroBatchStats(batch_size)
        self._planner.measures_each_batch = True
        self._planner.changed()

    def add_summary_metric(self, metric_name: str) -> None:
        """Show one more whole-model value, as ``gradmon/{metric_name}``: one of a preset, or ``grad_mean``, ``grad_std`` or
        ``grad_sparsity``, which are of all gradient elements before clipping together.

        Raises:
            ValueError: no such value, or it was added already.
        """
        check.one_of("metric_name", metric_name, tuple(DOCUMENTATION))
        summary = self._session.ledger.summary
        if metric_name in summary.more:
            raise ValueError(f"the whole-model value {metric_name!r} was added already")
        summary.more = (*summary.more, metric_name)
        self._planner.changed()

    def add_preset(self, name: str) -> None:
        """Whole-model values under ``gradmon/``: ``"cheap"`` (nine, of gradients only), ``"standard"`` (fourteen), or ``"full"``
        (the same, and per-layer values for the run directory). A later preset replaces an earlier one's selection.

        Raises:
            ValueError: no such preset.
        """
        check.one_of("preset", name, tuple(PRESETS))
        preset = PRESETS[name]
        made = [self._registry.make(source, metric, every=every, shown=False) for source, metric, every in preset.layer_metrics]
        self._registry.replace_hidden(made)
        self._session.ledger.summary.keys = preset.keys
        self._session.ledger.add_detector(SpikeDetector(), of_preset=True)
        self._session.ledger.outbox.note(preset=name)
        self._planner.changed()
