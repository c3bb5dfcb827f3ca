"""What belongs to DeepSpeed is refused by that name unless it is the engine. The package is not needed: classes of its modules stand in."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor

OF_PARAMETERS = "make the optimizer after that"


class _Flat:
    """Steps flat copies, in an optimizer of torch; DeepSpeed's class is none."""

    __module__ = "deepspeed.runtime.zero.stage_1_and_2"

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.optimizer = base

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups


class _Wrapper(torch.optim.Optimizer):
    """As Accelerate puts one around DeepSpeed's."""

    def __init__(self, optimizer: _Flat) -> None:
        self.optimizer = optimizer


Engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})


def net(marks: bool) -> nn.Module:
    model = nn.Linear(3, 2)
    for parameter in model.parameters() if marks else ():
        parameter._hp_mapping = None
    return model


def taken(model: nn.Module) -> torch.optim.SGD:
    """The optimizer of the user, whose parameters DeepSpeed has replaced by flat ones."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.zeros(8))]
    return optimizer


@pytest.mark.parametrize(
    ("marks", "around"),
    [(True, lambda base: base), (True, _Flat), (False, _Flat), (False, lambda base: _Wrapper(_Flat(base)))],
    ids=["the user's own", "ZeRO", "fp16", "Accelerate"],
)
@pytest.mark.parametrize("way", ["watch", "attach"])
def test_an_optimizer_under_deepspeed_is_refused_for_what_it_is(way: str, marks: bool, around: Callable[[Any], Any]) -> None:
    model = net(marks)
    optimizer = around(taken(model))
    with pytest.raises(ValueError, match=r"an optimizer under DeepSpeed cannot be followed: .*gradmon\.watch\(engine\)") as error:
        gradmon.watch(model, optimizer) if way == "watch" else ModuleMonitor(model).attach(optimizer)
    assert OF_PARAMETERS not in str(error.value)


def test_an_engine_that_does_not_train_is_refused() -> None:
    engine = Engine()
    engine.module = net(True)
    engine.optimizer = _Flat(taken(engine.module))
    with pytest.raises(ValueError, match="this DeepSpeed engine has no optimizer, so it does not train"):
        gradmon.watch(engine)


@pytest.mark.parametrize("imported", [False, True])
def test_where_it_may_be_deepspeed_that_is_said_beside_the_rest(imported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if imported:
        monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", types.ModuleType("deepspeed.runtime.engine"))
    with pytest.raises(ValueError, match=OF_PARAMETERS) as error:
        gradmon.watch(net(False), taken(net(False)))
    assert ("If DeepSpeed has taken the optimizer" in str(error.value)) == imported


def test_an_optimizer_of_its_package_that_steps_the_model_itself_is_followed() -> None:
    kind = type("FusedAdam", (torch.optim.Adam,), {"__module__": "deepspeed.ops.adam.fused_adam"})
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    monitor = gradmon.watch(model, optimizer)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert monitor.last_record.step == 0
