"""All that looks at a training from outside or calls somebody, at once: the training ends with the same bits."""

from __future__ import annotations

import threading
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from tests.receivers import receiver

for package in ("plotly", "jinja2", "prometheus_client", "opentelemetry.sdk"):
    pytest.importorskip(package)
from torch_gradmon.server.serve import Server  # noqa: E402
from torch_gradmon.sinks import OpenTelemetrySink, PrometheusSink  # noqa: E402

pytestmark = pytest.mark.extra


def train(each_step: Any = lambda monitor, step: None, watch: Any = lambda model, optimizer: None) -> list[torch.Tensor]:
    """Parameters, state of the optimizer and of the random generator after a training with dropout and one bad batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    monitor = watch(model, optimizer)
    for step in range(80):
        x = torch.randn(32, 8) * (1000 if step == 40 else 1)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        each_step(monitor, step)
    if monitor is not None:
        monitor.detach()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [*(parameter.detach().clone() for parameter in model.parameters()), *states, torch.get_rng_state()]


def test_training_is_the_same_with_the_server_alerts_and_both_sinks(tmp_path: Path) -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader, pages = InMemoryMetricReader(), list[bytes]()
    with receiver() as hook, receiver(failures=1000) as broken, Server(tmp_path, port=0, token="") as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        prometheus = PrometheusSink(0)

        def watch(model: nn.Module, optimizer: torch.optim.Optimizer) -> gradmon.ModuleMonitor:
            monitor = gradmon.watch(model, optimizer, run_dir=tmp_path / "run", preset="full", on_spike=None)
            for sink in (prometheus, OpenTelemetrySink(MeterProvider([reader]))):
                monitor.add_sink(sink)
            for each in (hook, broken):
                monitor.add_sink(gradmon.sinks.AlertSink(each.address))
            return monitor

        def look(monitor: gradmon.ModuleMonitor, step: int) -> None:
            if step % 20 == 10:
                for address in (
                    f"{server.address}runs.json",
                    f"{server.address}run?name=run",
                    f"http://127.0.0.1:{prometheus.port}/metrics",
                ):
                    with urllib.request.urlopen(address, timeout=60) as answer:
                        pages.append(answer.read())
                reader.get_metrics_data()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = train(look, watch)
        server.shutdown()
    plain = train()
    assert len(found) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert b'data-run="run"' in pages[1]
    assert b"gradmon_model_grad_norm" in pages[-1]
    assert [alert["step"] for alert in hook.got if alert["kind"] == "spike"] == [40]
    assert broken.requests >= 1
