"""Graphs, fused and capturable optimizers on the simulated accelerator: ``python -m tests.simulated_graphs NAME`` prints JSON."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from tests.simulated import AT, DEVICE, Programs, without
from torch_gradmon.capture.hooks import PassTracker
from torch_gradmon.core.fence import Fence
from torch_gradmon.testing.simulated import SimulatedGraph

torch.set_num_threads(1)
case = Programs()
WARM_UP, REPLAYS, MAX_NORM = 3, 30, 0.5


class Captured:
    """A loop that warms up, captures a part of a step, and replays it, as torch's tutorial on CUDA graphs does.

    Args:
        is_whole: the optimizer's step is part of the graph.
        options: of ``watch``; None for no monitor.
        ours: clip by the monitor's method.
    """

    def __init__(self, is_whole: bool, options: dict[str, Any] | None, ours: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(AT)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2, foreach=False)
        self.monitor = None if options is None else gradmon.watch(self.model, self.optimizer, **options)
        if self.monitor is not None:
            self.monitor.add_gradient_metric("norm", metric_regex="0.weight")
            self.monitor.add_activation_metric("norm")
            self.monitor.add_update_metric("norm", every=1)
        self.inputs = torch.zeros(16, 4, device=AT)
        self.is_whole, self.ours = is_whole, ours
        self.norms: list[float] = []
        self.totals: list[float] = []
        self.shown: list[dict[str, float]] = []

    def clip(self) -> Tensor:
        """Clip all gradients."""
        if self.ours and self.monitor is not None:
            return self.monitor.clip_grad_norm_(MAX_NORM)
        return nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM, foreach=False)

    def work(self) -> Tensor:
        """Forward and backward, and all else if the graph has it."""
        loss = (self.model(self.inputs) - self.inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        if self.is_whole:
            self.clip()
            self.optimizer.step()
        return loss.detach()

    def see(self) -> None:
        """What the monitor shows after a step."""
        if self.monitor is not None:
            self.shown.append(self.monitor.get_step_metrics())

    def run(self) -> Captured:
        """All steps."""
        data = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).to(AT)
        for _ in range(WARM_UP):
            self.inputs.copy_(data)
            self.optimizer.zero_grad(set_to_none=True)
            self.work()
            if not self.is_whole:
                self.clip()
                self.optimizer.step()
            self.see()
        self.optimizer.zero_grad(set_to_none=True)
        with DEVICE.captured() as graph:
            self.work()
        for number in range(REPLAYS):
            self.replay(graph, data * (1 + number / REPLAYS))
        return self

    def replay(self, graph: SimulatedGraph, data: Tensor) -> None:
        """One more step."""
        self.inputs.copy_(data)
        graph.replay()
        if not self.is_whole:
            parameter = next(self.model.parameters())
            self.totals.append(float(self.clip()))
            assert parameter.grad is not None
            self.norms.append(float(parameter.grad.norm()))
            self.optimizer.step()
        self.see()

    def parameters(self) -> list[Tensor]:
        """Their values."""
        return [parameter.detach().cpu() for parameter in self.model.parameters()]


def _result(is_whole: bool, ours: bool = False) -> Any:
    bare = Captured(is_whole, None).run()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        watched = Captured(is_whole, {"preset": "full", "on_spike": "skip"}, ours).run()
    assert watched.monitor is not None
    found = {
        "same_bits": all(map(torch.equal, bare.parameters(), watched.parameters())),
        "warnings": [str(each.message) for each in warned if issubclass(each.category, gradmon.GradmonWarning)],
        "findings": [finding.rule for finding in watched.monitor.diagnose().findings],
        "shown": watched.shown[WARM_UP:],
        "norms": bare.norms,
        "totals": bare.totals,
        "missing": watched.monitor.missing(),
    }
    watched.monitor.detach()
    return found


@case
def gradients_in_a_graph() -> Any:
    """Forward and backward are replayed; clip and step are called."""
    return _result(is_whole=False)


@case
def gradients_in_a_graph_with_our_clip() -> Any:
    """The same with the monitor's clip."""
    return _result(is_whole=False, ours=True)


@case
def a_whole_step_in_a_graph() -> Any:
    """Nothing is called."""
    return _result(is_whole=True)


@case
def a_whole_step_in_a_graph_with_our_clip() -> Any:
    """The monitor's clip is captured."""
    return _result(is_whole=True, ours=True)


@case
def spoiled_graphs() -> Any:
    """What happens to the graph when the monitor does not stop measuring."""

    def error_of(program: Callable[[], Any]) -> str:
        try:
            program()
        except RuntimeError as error:
            return str(error)
        return ""

    def watched() -> Any:
        return Captured(is_whole=True, options={"preset": "full"}).run()

    right = error_of(watched)
    init = Fence.__init__

    def blind(self: Any, *args: Any) -> None:
        init(self, *args)
        self._captures = None

    with without(Fence, "__init__", blind), without(PassTracker, "paused", property(lambda self: False)):
        wrong = error_of(watched)

    def exact() -> None:
        model = nn.Linear(2, 2).to(AT)
        monitor = gradmon.ModuleMonitor(model)
        with DEVICE.captured():
            monitor.clip_grad_norm_(1.0, exact=True)

    try:
        exact()
    except ValueError as error:
        return {"right": right, "blind": wrong, "exact clip": str(error)}


# --- optimizers that decide on the device ------------------------------------------------------------------------------------------


def _scaled(fused: bool, watched: bool) -> dict[str, Any]:
    """A loop with a GradScaler, whose fourth step overflows; with ``fused`` the optimizer finds out on the device."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(AT)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, **({"fused": True} if fused else {"foreach": False}))
    scaler = torch.amp.GradScaler(AT.type, init_scale=8.0, growth_interval=2)
    monitor = gradmon.watch(model, optimizer, scaler=scaler) if watched else None
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).to(AT)
    reads = []
    for step in range(8):
        with DEVICE.counted() as work:
            loss = model(inputs).square().mean() * (torch.inf if step == 3 else 1.0)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        reads.append(work.waits)
    found: dict[str, Any] = {"reads": reads, "parameters": [p.detach().cpu().tolist() for p in model.parameters()]}
    if monitor is not None:
        monitor.detach()
        history = monitor.get_all_metrics()
        found["not applied"] = [values["gradmon/steps_not_applied"] for values in history.values()]
        found["norms"] = [values.get("gradmon/grad_norm") for values in history.values()]
    return found


@case
def fused_with_a_scaler() -> Any:
    """The scaler of a fused optimizer never waits, and neither does the monitor."""
    with DEVICE.lazy():
        return {
            name: _scaled(*how) for name, how in {"fused": (True, True), "bare": (True, False), "plain": (False, True)}.items()
        }


@case
def a_rate_on_the_device() -> Any:
    """A capturable optimizer, whose learning rate is a tensor on the device, changed in place by the loop."""
    torch.manual_seed(0)
    model, rate = nn.Linear(4, 2).to(AT), torch.tensor(1e-2).to(AT)
    optimizer = torch.optim.AdamW(model.parameters(), rate, capturable=True, foreach=False)
    monitor = gradmon.watch(model, optimizer)
    reads = []
    inputs = torch.ones(5, 4).to(AT)
    with DEVICE.lazy():
        for _ in range(4):
            with DEVICE.counted() as work:
                loss = model(inputs).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                running = loss.detach()
                monitor.log_scalar("loss", running)
                running.zero_()  # a loop that reuses its buffer
                rate.mul_(0.5)
            reads.append(work.waits)
        monitor.detach()
        rates = [record.context["lr"] for record in monitor._runtime.pipeline.history.records()]
    return {"rates": rates, "reads": reads, "losses": [values["loss"] for values in monitor.get_all_metrics().values()]}


if __name__ == "__main__":
    case.main()
