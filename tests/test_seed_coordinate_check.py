"""The refined coordinate check beside that of torch-module-monitor 0.1.0: the same loop, the same keys, the same values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(7, 4), nn.ModuleList([Block()]), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _filled(model: nn.Module) -> nn.Module:
    """Weights that need no random numbers."""
    with torch.no_grad():
        for number, parameter in enumerate(model.double().parameters(), 1):
            waves = torch.sin(torch.arange(1, parameter.numel() + 1, dtype=torch.float64) * number * 0.7)
            parameter.copy_(0.5 * waves.reshape(parameter.shape))
    return model


def _tokens(number: int) -> Tensor:
    return (torch.arange(10).reshape(2, 5) * (number // 2 + 2) + number) % 7


def _numbers(number: int) -> Tensor:
    return torch.cos(torch.arange(12, dtype=torch.float64).reshape(4, 3) * (number + 1))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


CASES: dict[str, Any] = {"mlp": (_mlp, _numbers), "block": (Net, _tokens)}


def _loop(module: Any, case: str) -> dict[str, float]:
    """What the loop of its documentation has logged after the second step, with the classes of either package."""
    make, batch = CASES[case]
    model = _filled(make())
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    monitor = module.ModuleMonitor(monitor_step_fn=lambda step: step % 1 == 0)
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    check = module.RefinedCoordinateCheck(monitor)
    for step in range(2):
        monitor.begin_step(step)
        for micro_batch in range(2):
            inputs = batch(2 * step + micro_batch)
            with torch.no_grad():
                reference(inputs)
            output = model(inputs)
            check.refined_coordinate_check()
            output.square().mean().backward()
            monitor.after_micro_batch()
        optimizer.step()
        optimizer.zero_grad()
        monitor.end_step()
    return {key: float(value) for key, value in monitor.get_step_metrics().items() if key.startswith("RCC")}


@pytest.mark.parametrize("case", CASES)
def test_keys_and_values_are_those_that_it_gave(case: str) -> None:
    assert _loop(gradmon, case) == pytest.approx(RECORDED[case], rel=1e-6, abs=1e-12)


@pytest.mark.extra
@pytest.mark.parametrize("case", CASES)
def test_keys_and_values_are_those_that_it_gives(case: str) -> None:
    theirs = _loop(pytest.importorskip("torch_module_monitor"), case)
    assert theirs == pytest.approx(RECORDED[case], rel=1e-6, abs=1e-12)
    assert _loop(gradmon, case) == pytest.approx(theirs, rel=1e-6, abs=1e-12)


@pytest.mark.extra
def test_what_it_fails_at() -> None:
    """Tuples, keyword arguments and dropout, of which this package's own tests say what is right."""
    theirs: Any = pytest.importorskip("torch_module_monitor")

    class Pair(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return super().forward(input), None

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(input=x)

    for model, error in ((nn.Sequential(Pair(3, 3)), AttributeError), (nn.Sequential(Named(), nn.Linear(3, 3)), TypeError)):
        ours = gradmon.ModuleMonitor(own := copy.deepcopy(model))
        ours.set_reference_module("init")
        gradmon.RefinedCoordinateCheck(ours)
        ours.begin_step(0)
        own(torch.ones(2, 3))
        ours.end_step()
        terms = {key: value for key, value in ours.get_step_metrics().items() if key.count("/") == 2}
        absolute = {key for key in terms if key.startswith("RCC x_t")}
        assert {key for key, value in terms.items() if value == 0} == terms.keys() - absolute != set()
        with pytest.raises(error):
            _one_check(theirs, model)


def _one_check(module: Any, model: nn.Module) -> None:
    reference = copy.deepcopy(model)
    monitor = module.ModuleMonitor()
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    check = module.RefinedCoordinateCheck(monitor)
    monitor.begin_step(0)
    for each in (reference, model):
        each(torch.ones(2, 3))
    check.refined_coordinate_check()


#: After the second step of the loop with torch-module-monitor 0.1.0 and torch 2.13 on a CPU, in float64.
RECORDED: dict[str, dict[str, float]] = {
    "mlp": {
        "RCC (W_t-W_0)x_t/0/l2norm": 0.267405158,
        "RCC W_0(x_t-x_0)/0/l2norm": 0,
        "RCC x_t/0/l2norm": 1.192724322,
        "RCC (x_t-x_0)/0/l2norm": 0,
        "RCC (W_t-W_0)x_t/0.weight/l2norm": 0.122954311,
        "RCC W_0(x_t-x_0)/0.weight/l2norm": 0,
        "RCC (W_t-W_0)x_t/0.weight/W_t x_t/l2norm": 0.3134491161,
        "RCC W_0(x_t-x_0)/0.weight/W_0 x_0/l2norm": 0.2924984668,
        "RCC (W_t-W_0)x_t/1/l2norm": 0,
        "RCC W_0(x_t-x_0)/1/l2norm": 0.2195460327,
        "RCC x_t/1/l2norm": 0.828162787,
        "RCC (x_t-x_0)/1/l2norm": 0.267405158,
        "RCC (W_t-W_0)x_t/2/l2norm": 0.8486708507,
        "RCC W_0(x_t-x_0)/2/l2norm": 0.1953732096,
        "RCC x_t/2/l2norm": 0.7559211866,
        "RCC (x_t-x_0)/2/l2norm": 0.2195460327,
        "RCC (W_t-W_0)x_t/2.weight/l2norm": 0.3242563918,
        "RCC W_0(x_t-x_0)/2.weight/l2norm": 0.1953732096,
        "RCC (W_t-W_0)x_t/2.weight/W_t x_t/l2norm": 0.2919093016,
        "RCC W_0(x_t-x_0)/2.weight/W_0 x_0/l2norm": 0.291622769,
    },
    "block": {
        "RCC (W_t-W_0)x_t/embed/l2norm": 0.07796437158,
        "RCC (W_t-W_0)x_t/blocks.0/l2norm": 0.3687140722,
        "RCC W_0(x_t-x_0)/blocks.0/l2norm": 0.1093914601,
        "RCC x_t/blocks.0/l2norm": 0.6757682716,
        "RCC (x_t-x_0)/blocks.0/l2norm": 0.07796437158,
        "RCC (W_t-W_0)x_t/blocks.0.norm/l2norm": 0.04561568409,
        "RCC W_0(x_t-x_0)/blocks.0.norm/l2norm": 0.114414071,
        "RCC x_t/blocks.0.norm/l2norm": 0.6757682716,
        "RCC (x_t-x_0)/blocks.0.norm/l2norm": 0.07796437158,
        "RCC (W_t-W_0)x_t/blocks.0.norm.weight/l2norm": 0.008498405932,
        "RCC W_0(x_t-x_0)/blocks.0.norm.weight/l2norm": 0.114414071,
        "RCC (W_t-W_0)x_t/blocks.0.norm.weight/W_t x_t/l2norm": 0.8417487963,
        "RCC W_0(x_t-x_0)/blocks.0.norm.weight/W_0 x_0/l2norm": 0.8351382716,
        "RCC (W_t-W_0)x_t/blocks.0.norm.weight/x_t/l2norm": 1.99965328,
        "RCC W_0(x_t-x_0)/blocks.0.norm.weight/x_t-x_0/l2norm": 0.3370087307,
        "RCC (W_t-W_0)x_t/blocks.0.mlp/l2norm": 0.3456956574,
        "RCC W_0(x_t-x_0)/blocks.0.mlp/l2norm": 0.06198152349,
        "RCC x_t/blocks.0.mlp/l2norm": 1.020838849,
        "RCC (x_t-x_0)/blocks.0.mlp/l2norm": 0.1100278703,
        "RCC (W_t-W_0)x_t/blocks.0.mlp.0/l2norm": 0.1168453173,
        "RCC W_0(x_t-x_0)/blocks.0.mlp.0/l2norm": 0.08645842854,
        "RCC x_t/blocks.0.mlp.0/l2norm": 1.020838849,
        "RCC (x_t-x_0)/blocks.0.mlp.0/l2norm": 0.1100278703,
        "RCC (W_t-W_0)x_t/blocks.0.mlp.0.weight/l2norm": 0.05000009041,
        "RCC W_0(x_t-x_0)/blocks.0.mlp.0.weight/l2norm": 0.08645842854,
        "RCC (W_t-W_0)x_t/blocks.0.mlp.0.weight/W_t x_t/l2norm": 0.7881423159,
        "RCC W_0(x_t-x_0)/blocks.0.mlp.0.weight/W_0 x_0/l2norm": 0.7936328059,
        "RCC (W_t-W_0)x_t/blocks.0.mlp.1/l2norm": 0,
        "RCC W_0(x_t-x_0)/blocks.0.mlp.1/l2norm": 0.1498096306,
        "RCC x_t/blocks.0.mlp.1/l2norm": 1.372884392,
        "RCC (x_t-x_0)/blocks.0.mlp.1/l2norm": 0.1733119854,
        "RCC (W_t-W_0)x_t/blocks.0.mlp.2/l2norm": 0.3153052274,
        "RCC W_0(x_t-x_0)/blocks.0.mlp.2/l2norm": 0.1463394626,
        "RCC x_t/blocks.0.mlp.2/l2norm": 0.8855818608,
        "RCC (x_t-x_0)/blocks.0.mlp.2/l2norm": 0.1498096306,
        "RCC (W_t-W_0)x_t/blocks.0.mlp.2.weight/l2norm": 0.3153052274,
        "RCC W_0(x_t-x_0)/blocks.0.mlp.2.weight/l2norm": 0.1463394626,
        "RCC (W_t-W_0)x_t/blocks.0.mlp.2.weight/W_t x_t/l2norm": 0.6202886193,
        "RCC W_0(x_t-x_0)/blocks.0.mlp.2.weight/W_0 x_0/l2norm": 0.504203354,
        "RCC (W_t-W_0)x_t/head/l2norm": 0.4688737228,
        "RCC W_0(x_t-x_0)/head/l2norm": 0.4382628147,
        "RCC x_t/head/l2norm": 0.5816290588,
        "RCC (x_t-x_0)/head/l2norm": 0.4506755447,
        "RCC (W_t-W_0)x_t/head.weight/l2norm": 0.08068670977,
        "RCC W_0(x_t-x_0)/head.weight/l2norm": 0.4382628147,
        "RCC (W_t-W_0)x_t/head.weight/W_t x_t/l2norm": 0.4316993516,
        "RCC W_0(x_t-x_0)/head.weight/W_0 x_0/l2norm": 0.4414033268,
    },
}
