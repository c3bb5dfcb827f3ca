"""Prometheus: the values of the last step, for a server that scrapes them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from ..core.errors import display
from ..core.records import SpikeEvent
from .metric_families import encodable, families
from .optional import require


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
        key_style, prefix: those of the monitor, if it has others than the default.

    Attributes:
        port: the real one; None while there is no server.

    Raises:
        ImportError: prometheus_client is not installed.
        ValueError: the port is none, or the registry has these metrics already. A port that is taken is a failure of the sink with the
            first values: of many ranks only those that report need one.
    """

    def __init__(
        self, port: int | None = 9400, address: str = "127.0.0.1", registry: Any = None, key_style: str = "seed", prefix: str = ""
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
        self._keys, self._asked, self._address = (key_style, prefix), port, address
        self._server: Any = None
        self._is_registered = False
        self.port: int | None = None
        if port is None:
            self._register()

    def _register(self) -> None:
        if not self._is_registered:
            self._registry.register(self)
            self._is_registered = True

    def _serve(self) -> None:
        """Begin, for the first time or again after :meth:`close`."""
        self._register()
        if self._server is None and self._asked is not None:
            self._server, _ = self._client.start_http_server(self._asked, self._address, self._registry)
            self.port = int(self._server.server_port)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Keep the values until the next ones come, which for some is every tenth step.

        Raises:
            OSError: the port is taken.
        """
        self._serve()
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
        step, when = last
        values = self._held.copy()
        yield self._core.GaugeMetricFamily("gradmon_step", "the last monitored step", value=step)
        yield self._core.GaugeMetricFamily(
            "gradmon_last_step_timestamp_seconds", "when its values came, in Unix time", value=when
        )
        for name, (family, of_label) in families(values, "_", *self._keys).items():
            gauge = self._core.GaugeMetricFamily(name, family.help, labels=[family.label] if family.label else [])
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
