"""Prometheus and OpenTelemetry: real scrapes and collections give what the monitor gives."""

from __future__ import annotations

import math
import socket
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.core.records import SpikeEvent
from torch_gradmon.sinks import OpenTelemetrySink, PrometheusSink
from torch_gradmon.sinks.prometheus import families

pytestmark = pytest.mark.extra


def train(*sinks: Any, steps: int = 45) -> tuple[dict[str, float], list[torch.Tensor]]:
    """The last step's values, and the parameters at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monitor = gradmon.watch(model, optimizer, on_spike=None)
        monitor.add_gradient_metric("norm")
        monitor.add_gradient_metric("mine", lambda gradient: gradient.abs().mean())
        for sink in sinks:
            monitor.add_sink(sink)
        for step in range(steps):
            optimizer.zero_grad()
            loss = (model(torch.randn(16, 4)) * (1e4 if step == 40 else 1)).square().mean()
            loss.backward()
            monitor.log_scalar("train/loss", loss.detach())
            optimizer.step()
        values = monitor.get_step_metrics()
        monitor.detach()
    return values, [parameter.detach().clone() for parameter in model.parameters()]


def scraped(address: str) -> dict[tuple[str, str], float]:
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(address, timeout=20) as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            found[sample.name, "".join(sample.labels.values())] = sample.value
    return found


def check(found: Mapping[tuple[str, str], float], values: Mapping[str, float], separator: str) -> None:
    """Every value is there, and is equal."""
    for key, value in values.items():
        source, _, rest = key.partition("/")
        name, _, metric = rest.rpartition("/")
        if key == "train/loss":
            place = (f"gradmon{separator}logged", "train/loss")
        elif source == "gradmon":
            place = (f"gradmon{separator}model{separator}{rest}", "")
        else:
            place = (f"gradmon{separator}{source}{separator}{metric}", name)
        assert found[place] == pytest.approx(value, nan_ok=True), key


def test_a_scrape_has_the_values_of_the_last_step() -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    sink = PrometheusSink(None, registry=registry)
    seen: dict[tuple[str, str], float] = {}

    class Before:
        """Scrapes before the sink is closed."""

        def log(self, values: Mapping[str, float], step: int) -> None:
            if step == 44:
                seen.update(scraped(f"http://127.0.0.1:{server.server_port}/metrics"))

    server, _ = start_http_server(0, "127.0.0.1", registry)
    begin = time.time()
    values, parameters = train(sink, Before())
    server.shutdown()
    server.server_close()
    check(seen, values, "_")
    assert seen["gradmon_gradient_mine", "0.weight"] == values["gradient/0.weight/mine"]
    assert seen["gradmon_step", ""] == 44
    assert begin <= seen["gradmon_last_step_timestamp_seconds", ""] <= time.time()
    assert seen["gradmon_spikes_total", "grad_norm"] == 1
    assert all(torch.equal(a, b) for a, b in zip(parameters, train()[1], strict=True))


def test_the_sink_serves_itself_until_it_is_closed() -> None:
    pytest.importorskip("prometheus_client")
    sink = PrometheusSink(0)
    assert sink.port is None
    sink.log({"gradmon/grad_norm": math.nan, 'gradient/a"b\\c\nd/norm': math.inf, "loss": 2.0}, step=3)
    address = f"http://127.0.0.1:{sink.port}/metrics"
    found = scraped(address)
    assert math.isnan(found["gradmon_model_grad_norm", ""])
    assert found["gradmon_gradient_norm", 'a"b\\c\nd'] == math.inf
    assert (found["gradmon_step", ""], found["gradmon_logged", "loss"]) == (3, 2.0)
    sink.close()
    sink.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=5)
    sink.log({"gradmon/grad_norm": 1.0}, step=4)  # attached again
    assert scraped(f"http://127.0.0.1:{sink.port}/metrics")["gradmon_step", ""] == 4
    sink.close()


def test_a_name_that_no_protocol_can_send_breaks_no_scrape() -> None:
    pytest.importorskip("prometheus_client")
    sink = PrometheusSink(0)
    sink.log({"gradmon/grad_norm": 1.0, "\ud800": 2.0, "gradient/\udfff/norm": 3.0, "gradient/a/\ud800": 4.0}, step=3)
    sink.log_spike(SpikeEvent(3, "\ud800", 1.0, 1.0, 1.0, ""), "")
    found = scraped(f"http://127.0.0.1:{sink.port}/metrics")
    sink.close()
    assert found["gradmon_model_grad_norm", ""] == 1.0
    assert found["gradmon_logged", r"\ud800"] == 2.0
    assert found["gradmon_gradient_norm", r"\udfff"] == 3.0
    assert found["gradmon_spikes_total", r"\ud800"] == 1.0


def test_keys_of_another_style_and_names_that_clash() -> None:
    found = families(
        {"mon/gradient_norm/fc.weight": 1.0, "mon/gradmon/grad_norm": 2.0, "mon/x": 3.0}, "_", "metric_first", "mon/"
    )
    assert {name: of_label for name, (_, of_label) in found.items()} == {
        "gradmon_gradient_norm": {"fc.weight": 1.0},
        "gradmon_model_grad_norm": {"": 2.0},
        "gradmon_logged": {"x": 3.0},
    }
    clashing = families({"gradient/a/abs<1": 1.0, "gradient/a/abs>1": 2.0, "gradmon/update_norm": 3.0, "update/a/norm": 4.0}, "_")
    assert {name: of_label for name, (_, of_label) in clashing.items()} == {
        "gradmon_gradient_abs_1": {"a": 1.0},
        "gradmon_gradient_abs_1_2": {"a": 2.0},
        "gradmon_model_update_norm": {"": 3.0},
        "gradmon_update_norm": {"a": 4.0},
    }


def test_what_prometheus_cannot_have_is_refused() -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    PrometheusSink(None, registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        PrometheusSink(None, registry=registry)
    for port in (-1, 70000, "9400", True):
        with pytest.raises(ValueError, match="from 0 to 65535"):
            PrometheusSink(port)  # type: ignore[arg-type]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        sink = PrometheusSink(taken.getsockname()[1])  # as on a rank that gets no values
        with pytest.raises(OSError, match="in use"):
            sink.log({"gradmon/grad_norm": 1.0}, step=0)
        sink.close()


def collected(reader: Any) -> dict[tuple[str, str], float]:
    found = {}
    for resource in reader.get_metrics_data().resource_metrics:
        for scope in resource.scope_metrics:
            assert scope.scope.name == "torch_gradmon"
            for metric in scope.metrics:
                assert metric.description
                assert metric.unit
                for point in metric.data.data_points:
                    found[metric.name, "".join(map(str, point.attributes.values()))] = point.value
    return found


def test_a_collection_has_the_values_of_the_last_step() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    begin = time.time()
    values, parameters = train(OpenTelemetrySink(provider))
    found = collected(reader)
    check(found, values, ".")
    assert found["gradmon.step", ""] == 44
    assert begin <= found["gradmon.last_step.time", ""] <= time.time()
    assert found["gradmon.spikes", "grad_norm"] == 1
    assert all(torch.equal(a, b) for a, b in zip(parameters, train()[1], strict=True))
    provider.shutdown()


def test_gauges_follow_the_keys_of_each_step() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    sink = OpenTelemetrySink(MeterProvider([reader]))
    assert reader.get_metrics_data() is None
    sink.log({"gradmon/grad_norm": 1.0}, 0)
    assert ("gradmon.update.norm", "a") not in collected(reader)
    sink.log({"gradmon/grad_norm": 2.0, "update/a/norm": 3.0}, 1)
    assert collected(reader)["gradmon.update.norm", "a"] == 3.0
    sink.log({"update/b/norm": 4.0}, 2)
    found = collected(reader)
    assert found["gradmon.update.norm", "b"] == 4.0
    assert ("gradmon.update.norm", "a") not in found
    assert ("gradmon.model.grad_norm", "") not in found


def test_families_have_the_meaning_of_the_registry() -> None:
    named = families({"gradmon/overhead_fraction": 1.0, "update/a/ratio": 2.0, "gradient/a/mine": 3.0}, "_")
    found = {name: family for name, (family, _) in named.items()}
    assert found["gradmon_model_overhead_fraction"].unit == "1"
    assert found["gradmon_update_ratio"].help.startswith("norm of the update over the norm of the parameter")
    assert found["gradmon_gradient_mine"].help == "mine of gradient"
