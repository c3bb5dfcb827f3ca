"""Several streams of the simulated accelerator: ``python -m tests.simulated_streams NAME`` prints JSON."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from tests.simulated import AT, DEVICE, Programs, races_of, without
from torch_gradmon.core.errors import WarningLog
from torch_gradmon.core.moments import ALWAYS
from torch_gradmon.statistics import on_device
from torch_gradmon.statistics.eager import measure_precisely
from torch_gradmon.statistics.on_device import DeviceStatistics
from torch_gradmon.statistics.request import Batch, Request
from torch_gradmon.step.buffer import PendingReadback, StepBuffer
from torch_gradmon.testing.simulated import SimulatedTensor

torch.set_num_threads(1)
STREAMS = torch.get_device_module(AT)
case = Programs()


class Branches(nn.Module):
    """Two branches, of which one runs on a stream of its own, as in models that overlap them."""

    def __init__(self, side: Any = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        if self.side is None:
            return self.first(x).tanh() + self.second(x)
        here = STREAMS.current_stream()
        self.side.wait_stream(here)
        x.record_stream(self.side)
        with STREAMS.stream(self.side):
            beside = self.first(x).tanh()
        found = self.second(x)
        here.wait_stream(self.side)
        beside.record_stream(here)
        return found + beside


def _activations(has_side: bool = True) -> dict[str, float]:
    torch.manual_seed(0)
    model = Branches(STREAMS.Stream() if has_side else None).to(AT)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    monitor = gradmon.watch(model, optimizer, preset="full")
    monitor.add_activation_metric("norm")
    monitor.add_activation_metric("median", lambda output: output.median())
    inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).to(AT)
    for _ in range(3):
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    monitor.detach()
    return {key: value for key, value in monitor.get_step_metrics().items() if key.startswith("activation")}


@case
def branches() -> Any:
    """Rows of a branch are read when the current stream has waited for its stream, and keep their memory until then."""
    with DEVICE.lazy():
        found = _activations()
    with without(StepBuffer, "join_streams", lambda self: None):
        no_wait = races_of(_activations)
    return {"equal": found == _activations(has_side=False), "without the wait": no_wait}


@case
def a_step_that_is_dropped() -> Any:
    """Rows of another stream, whose copy to the host nobody waits for, keep their memory until the copy has read it."""

    def dropped() -> None:
        buffer, side = StepBuffer(0, WarningLog()), STREAMS.Stream()
        with STREAMS.stream(side):
            buffer.put_rows("gradient", ["w"], measure_precisely(Batch.read([torch.ones(5, device=AT)], None), Request()), ALWAYS)
        PendingReadback(buffer)

    right = races_of(dropped)
    with without(SimulatedTensor, "record_stream", lambda self, stream: None):
        wrong = races_of(dropped)
    return {"right": right, "without the record": wrong}


@case
def layouts() -> Any:
    """The constants of a layout are written and read on one stream."""

    def measured() -> None:
        statistics, side = DeviceStatistics(), STREAMS.Stream()
        statistics.rows(Batch.read([torch.ones(5, device=AT)], None), Request())
        with STREAMS.stream(side):
            statistics.rows(Batch.read([torch.ones(5, device=AT)], None), Request())

    right = races_of(measured)
    with without(on_device, "stream_number", lambda device: None):
        wrong = races_of(measured)
    return {"right": right, "with one layout": wrong}


@case
def a_loop_that_moves() -> Any:
    """Warm-up steps on a side stream, as before a graph is captured, and then steps on the usual one."""

    def norms(moves: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(8, 8).to(AT)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
        monitor = gradmon.watch(model, optimizer)
        inputs, side, here = torch.ones(5, 8).to(AT), STREAMS.Stream(), STREAMS.current_stream()

        def step() -> None:
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.log_scalar("loss", loss.detach())

        side.wait_stream(here)
        with STREAMS.stream(side) if moves else STREAMS.stream(here):
            step()
            step()
        here.wait_stream(side)
        step()
        step()
        monitor.detach()
        return [value for values in monitor.get_all_metrics().values() for value in (values["gradmon/grad_norm"], values["loss"])]

    with DEVICE.lazy():
        found = norms(moves=True)
    return {"equal": found == norms(moves=False), "values": len(found)}


if __name__ == "__main__":
    case.main()
