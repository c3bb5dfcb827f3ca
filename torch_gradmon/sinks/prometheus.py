"""Sinks for Prometheus and OpenTelemetry, which have metrics with labels."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, ItemsView, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from ..core import keys as n
from ..core.errors import display
from ..core.keys import parse_key
from ..core.records import SpikeEvent
from ..step.plan import VIEW_BUILT_INS
from ..step.summary import KEY_DOCUMENTATION, ON_REQUEST
from .delivery import require

# --- Values as families of metrics with labels, as Prometheus and OpenTelemetry know them ---

_WHOLE = {**KEY_DOCUMENTATION, **ON_REQUEST}
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]+")


class Family(NamedTuple):
    """Metrics of one kind."""

    parts: tuple[str, ...]  # of the name, such as ("gradient", "norm")
    label: str  # by which its values differ: tensor or key; empty for a single value
    help: str  # its meaning
    unit: str  # 1 for a number without one

    def name(self, separator: str) -> str:
        """The whole name, in characters that both systems allow."""
        return separator.join(("gradmon", *(_NOT_IN_NAMES.sub("_", part).strip("_") for part in self.parts)))


def families(
    values: Mapping[str, float], separator: str, key_order: str = "name_first", prefix: str = ""
) -> dict[str, tuple[Family, dict[str, float]]]:
    """The values by label, by the name of their family, whose parts ``separator`` joins. Logged values are one family, ``logged``, with
    their keys as labels; a name that two families would have gets a number.
    """
    found: dict[Family, dict[str, float]] = {}
    for text, value in values.items():
        key = parse_key(encodable(text), key_order, prefix)
        if key.source == n.SUMMARY:
            found.setdefault(Family(("model", key.metric), "", _WHOLE.get(key.metric, key.metric), "1"), {})[""] = value
        elif key.source and key.metric:
            built_in = VIEW_BUILT_INS.get(key.source, {}).get(key.metric)
            meaning = f"{key.metric} of {key.source}" if built_in is None else built_in.documentation
            family = Family((key.source, key.metric), "tensor", meaning, "1" if built_in is None else built_in.unit)
            found.setdefault(family, {})[key.name] = value
        else:
            found.setdefault(Family(("logged",), "key", "values that the script logged", "1"), {})[key.name] = value
    named: dict[str, tuple[Family, dict[str, float]]] = {}
    for family, of_label in sorted(found.items()):
        name = family.name(separator)
        number = sum(
            known == name or (known.rpartition("_")[0] == name and known.rpartition("_")[2].isdigit()) for known in named
        )
        named[f"{name}_{number + 1}" if number else name] = family, of_label
    return named


def encodable(text: str) -> str:
    """The same with escapes for half characters, which no protocol can send."""
    return text.encode("utf-8", "backslashreplace").decode()


# --- OpenTelemetry: gauges that its readers collect ---


class OpenTelemetrySink:
    """Gives the last step's values to OpenTelemetry as observable gauges.

    A value such as ``gradient/0.weight/norm`` is ``gradmon.gradient.norm`` with the attribute ``tensor``, one of the whole model
    ``gradmon.model.grad_norm``, a logged one ``gradmon.logged`` with the attribute ``key``; in addition ``gradmon.step``,
    ``gradmon.last_step.time`` (Unix time) and the counter ``gradmon.spikes`` with the attribute ``signal``. What exports them, and how
    often, is up to the provider, such as a ``PeriodicExportingMetricReader`` with an ``OTLPMetricExporter``.

    Args:
        provider: a meter provider of the SDK; by default the one that ``opentelemetry.metrics.set_meter_provider`` has set.
        key_order, prefix: those of the monitor, if it has others than the default.

    Raises:
        ImportError: opentelemetry is not installed.
    """

    def __init__(self, provider: Any = None, key_order: str = "name_first", prefix: str = "") -> None:
        require("opentelemetry", self)
        metrics = import_module("opentelemetry.metrics")
        self._observation = metrics.Observation
        self._meter = (provider or metrics.get_meter_provider()).get_meter("torch_gradmon")
        self._values: Mapping[str, float] = {}
        self._keys = key_order, prefix
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


# --- Prometheus, whose server scrapes the last step ---


class PrometheusSink:
    """Shows the last step's values to a Prometheus server.

    A value such as ``gradient/0.weight/norm`` is ``gradmon_gradient_norm{tensor="0.weight"}``, one of the whole model
    ``gradmon_model_grad_norm``, a logged one ``gradmon_logged{key="loss"}``. In addition there are ``gradmon_step``,
    ``gradmon_last_step_timestamp_seconds``, which shows a training that stalls, and the counter ``gradmon_spikes_total`` by signal. Values
    become metrics when they are scraped, in the thread that serves them; a step costs a reference.

    Args:
        port: of a new HTTP server, which begins with the first values and ends with :meth:`close`; 0 for any free one. None for none, where
            something else serves the registry.
        address: it listens at.
        registry: by default one of its own if ``port`` is given, else the registry of the process, which several sinks cannot share.
        key_order, prefix: those of the monitor, if it has others than the default.

    Attributes:
        port: the real one; None while there is no server.

    Raises:
        ImportError: prometheus_client is not installed.
        ValueError: the port is none, or the registry has these metrics already. A port that is taken is a failure of the sink with the
            first values: of many ranks only those that report need one.
    """

    def __init__(
        self,
        port: int | None = 9400,
        address: str = "127.0.0.1",
        registry: Any = None,
        key_order: str = "name_first",
        prefix: str = "",
    ) -> None:
        require("prometheus_client", self)
        if port is not None and (not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 65536):
            raise ValueError(f"port= takes a number from 0 to 65535, or None for no server, got {display(port)}")
        self._client = import_module("prometheus_client")
        self._core = import_module("prometheus_client.core")
        self._registry = registry or (self._client.REGISTRY if port is None else self._client.CollectorRegistry())
        self._last: tuple[int, float] | None = None
        self._held: dict[str, float] = {}
        self._spikes: Counter[str] = Counter()
        self._keys, self._asked, self._address = (key_order, prefix), port, address
        self._server: Any = None
        self._is_registered = False
        self.port: int | None = None
        if port is None:
            self._begin()

    def _begin(self) -> None:
        """For the first time, or again after :meth:`close`."""
        if not self._is_registered:
            self._registry.register(self)
            self._is_registered = True
        if self._server is None and self._asked is not None:
            self._server, _ = self._client.start_http_server(self._asked, self._address, self._registry)
            self.port = int(self._server.server_port)

    def __repr__(self) -> str:
        return f"PrometheusSink(port={self._asked if self.port is None else self.port})"

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Keep the values until the next ones come, which for some is every tenth step.

        Raises:
            OSError: the port is taken.
        """
        self._begin()
        self._held.update(values)
        self._last = step, time.time()

    def log_spike(self, event: SpikeEvent, text: str) -> None:
        """Count it."""
        self._spikes[encodable(event.signal)] += 1

    def describe(self) -> list[Any]:
        """The names that are known from the beginning, so that no two sinks share a registry."""
        return [self._core.GaugeMetricFamily("gradmon_step", "the last monitored step")]

    def collect(self) -> Iterator[Any]:
        """The metrics of a scrape."""
        spikes = self._core.CounterMetricFamily("gradmon_spikes", "spikes so far", labels=["signal"])
        for signal, count in sorted(self._spikes.copy().items()):
            spikes.add_metric([signal], count)
        yield spikes
        if (last := self._last) is None:
            return
        gauge_of = self._core.GaugeMetricFamily
        yield gauge_of("gradmon_step", "the last monitored step", value=last[0])
        yield gauge_of("gradmon_last_step_timestamp_seconds", "when its values came, in Unix time", value=last[1])
        for name, (family, of_label) in families(self._held.copy(), "_", *self._keys).items():
            gauge = gauge_of(name, family.help, labels=[family.label] if family.label else [])
            for label, value in of_label.items():
                gauge.add_metric([label] if family.label else [], value)
            yield gauge

    def close(self) -> None:
        """End the server, and leave the registry."""
        server, self._server, self.port = self._server, None, None
        if server is not None:
            server.shutdown()
            server.server_close()
        if self._is_registered:
            self._registry.unregister(self)
            self._is_registered = False
