"""Prometheus: the values of the last step, for a server that scrapes them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from ..core.errors import display
from ..core.records import SpikeEvent
from .metric_families import families
from .optional import require


class PrometheusSink:
    """Shows the last step's values to a Prometheus server.

    A value such as ``gradient/0.weight/norm`` is ``gradmon_gradient_norm{tensor="0.weight"}``, one of the whole model
    ``gradmon_grad_norm``, a logged one ``gradmon_logged{key="loss"}``. In addition there are ``gradmon_step``,
    ``gradmon_last_step_timestamp_seconds``, which shows a training that stalls, and the counter ``gradmon_spikes_total`` by signal. Values
    become metrics when they are scraped, in the thread that serves them; a step costs a reference.

    Args:
        port: of a new HTTP server, closed by :meth:`close`; 0 for any free one. None for none, where something else serves the registry.
        address: it listens at.
        registry: by default one of its own if ``port`` is given, else the registry of the process, which several sinks cannot share.

    Attributes:
        port: the real one; None without a server.

    Raises:
        ImportError: prometheus_client is not installed.
        OSError: the port is taken.
        ValueError: the registry has these metrics already.
    """

    def __init__(self, port: int | None = 9400, address: str = "127.0.0.1", registry: Any = None) -> None:
        require("prometheus_client", self)
        if port is not None and (not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 65536):
            raise ValueError(f"port= takes a number from 0 to 65535, or None for no server, got {display(port)}")
        self._client = import_module("prometheus_client")
        self._core = import_module("prometheus_client.core")
        self._registry = registry or (self._client.REGISTRY if port is None else self._client.CollectorRegistry())
        self._last: tuple[int, float, Mapping[str, float]] | None = None
        self._spikes: Counter[str] = Counter()
        self._registry.register(self)
        self._server: Any = None
        if port is not None:
            try:
                self._server, _ = self._client.start_http_server(port, address, self._registry)
            except OSError:
                self._registry.unregister(self)
                raise
        self.port = None if self._server is None else int(self._server.server_port)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Keep the values until the next ones come."""
        self._last = step, time.time(), values

    def log_spike(self, event: SpikeEvent, text: str) -> None:
        """Count it."""
        self._spikes[event.signal] += 1

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
        step, when, values = last
        yield self._core.GaugeMetricFamily("gradmon_step", "the last monitored step", value=step)
        yield self._core.GaugeMetricFamily(
            "gradmon_last_step_timestamp_seconds", "when its values came, in Unix time", value=when
        )
        for family, of_label in families(values).items():
            gauge = self._core.GaugeMetricFamily(family.name("_"), family.help, labels=[family.label] if family.label else [])
            for label, value in of_label.items():
                gauge.add_metric([label] if family.label else [], value)
            yield gauge

    def close(self) -> None:
        """End the server, and leave the registry."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        try:
            self._registry.unregister(self)
        except KeyError:  # it is closed already
            pass
