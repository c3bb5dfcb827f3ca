"""OpenTelemetry: gauges that its readers collect."""

from __future__ import annotations

import time
from collections.abc import Callable, ItemsView, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from ..core.records import SpikeEvent
from .metric_families import Family, encodable, families
from .optional import require


class OpenTelemetrySink:
    """Gives the last step's values to OpenTelemetry as observable gauges.

    A value such as ``gradient/0.weight/norm`` is ``gradmon.gradient.norm`` with the attribute ``tensor``, one of the whole model
    ``gradmon.model.grad_norm``, a logged one ``gradmon.logged`` with the attribute ``key``; in addition ``gradmon.step``,
    ``gradmon.last_step.time`` (Unix time) and the counter ``gradmon.spikes`` with the attribute ``signal``. What exports them, and how
    often, is up to the provider, such as a ``PeriodicExportingMetricReader`` with an ``OTLPMetricExporter``.

    Args:
        provider: a meter provider of the SDK; by default the one that ``opentelemetry.metrics.set_meter_provider`` has set.
        key_style, prefix: those of the monitor, if it has others than the default.

    Raises:
        ImportError: opentelemetry is not installed.
    """

    def __init__(self, provider: Any = None, key_style: str = "seed", prefix: str = "") -> None:
        require("opentelemetry", self)
        metrics = import_module("opentelemetry.metrics")
        self._observation = metrics.Observation
        self._meter = (provider or metrics.get_meter_provider()).get_meter("torch_gradmon")
        self._values: Mapping[str, float] = {}
        self._keys = key_style, prefix
        self._grouped: tuple[Mapping[str, float], dict[str, tuple[Family, dict[str, float]]]] = ({}, {})
        self._known: set[str] = set()
        self._last: tuple[int, float] | None = None
        self._spikes = self._meter.create_counter("gradmon.spikes", unit="1", description="spikes so far")
        self._add("gradmon.step", "1", "the last monitored step", lambda: () if self._last is None else (("", self._last[0]),))
        what = "when the values of the last step came, in Unix time"
        self._add("gradmon.last_step.time", "s", what, lambda: () if self._last is None else (("", self._last[1]),))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Keep the values until the next ones come; what is new among them becomes a gauge."""
        before, self._values, self._last = self._values, values, (step, time.time())
        if values.keys() == before.keys():
            return
        for name, (family, _) in self._families().items():
            if name not in self._known:
                self._add(name, family.unit, family.help, partial(self._values_of, name), family.label)

    def _values_of(self, name: str) -> ItemsView[str, float]:
        found = self._families().get(name)
        return ({} if found is None else found[1]).items()

    def _families(self) -> dict[str, tuple[Family, dict[str, float]]]:
        """Of the last values, grouped once for all gauges that are collected."""
        values, (grouped, found) = self._values, self._grouped
        if grouped is not values:
            found = families(values, ".", *self._keys)
            self._grouped = values, found
        return found

    def log_spike(self, event: SpikeEvent, text: str) -> None:
        """Count it."""
        self._spikes.add(1, {"signal": encodable(event.signal)})

    def _add(self, name: str, unit: str, help: str, values: Callable[[], Any], label: str = "") -> None:
        def observed(options: Any) -> Iterator[Any]:
            for of, value in list(values()):
                yield self._observation(value, {label: of} if label else {})

        self._known.add(name)
        self._meter.create_observable_gauge(name, callbacks=[observed], unit=unit, description=help)
