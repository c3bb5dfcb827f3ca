"""What a monitor measures: metrics, presets and live changes of detail."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...core import keys as n
from ...core import validation as check
from ...core.errors import display, nearest, warn_user
from ...core.records import Metric
from ...runs.detail_request import DetailRequest, detail_request
from ...spikes.detector import SpikeDetector
from ...step.planner import PRESETS
from ...step.summary import BATCH_DOCUMENTATION as BATCHES
from ...step.summary import KEY_DOCUMENTATION, ON_REQUEST, MicroBatchStats
from ..links import linkable
from ..runtime import Runtime

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
