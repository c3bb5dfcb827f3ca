"""The scripted mechanic of the benchmark: its repairs, and how its trainings are counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.external import CASES
from benchmarks.external.repairing import Outcome, summary
from benchmarks.external.repairs import OF_RULE, REPAIRS, guided


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.9), nn.Linear(8, 2))


@pytest.mark.parametrize("name", REPAIRS)
def test_a_repaired_model_trains(name: str) -> None:
    model = _model()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[4].parameters(), lr=0.1, betas=(0.1, 0.2), weight_decay=9.0)
    REPAIRS[name](model, [optimizer])
    before = model[4].weight.detach().clone()
    for _ in range(2):
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
    assert not torch.equal(before, model[4].weight)
    (group, *more) = optimizer.param_groups
    shown = {
        "a tenth of the learning rate": group["lr"] == pytest.approx(0.01),
        "ten times the learning rate": group["lr"] == pytest.approx(1.0),
        "no weight decay": group["weight_decay"] == 0,
        "the usual betas and epsilon": group["betas"] == (0.9, 0.999),
        "little dropout": model[3].p == 0.1,
        "LeakyReLU": isinstance(model[2], nn.LeakyReLU),
        "all parameters in the optimizer": len(more) == 1 and not model[0].weight.requires_grad,
        "all parameters trained": len(more) == 1 and model[0].weight.requires_grad,
        "gradients cleared after each step": all(parameter.grad is None for parameter in model[4].parameters()),
    }
    assert {each for each, is_so in shown.items() if is_so} == {name} & shown.keys()


def test_rules_and_repairs_exist() -> None:
    assert OF_RULE.keys() <= {rule for case in CASES for rule in case.rules}
    assert {repair for repairs in OF_RULE.values() for repair in repairs} <= REPAIRS.keys()


def test_what_findings_ask_for_comes_first() -> None:
    order = guided(["softmax-before-loss", "eval-mode", "learning-rate-high"])
    assert order[:3] == ["train mode", "a tenth of the learning rate", "ten times the learning rate"]
    assert sorted(order) == sorted(REPAIRS)


def test_trainings_are_counted() -> None:
    names = list(REPAIRS)
    outcomes = [
        Outcome("a", 2.0, 1.0, ("eval-mode",), 0, ("train mode",)),
        Outcome("b", 2.0, 1.0, ("loss-plateau", "softmax-before-loss"), 1, ()),
        Outcome("c", float("inf"), 1.0, (), None, tuple(names)),
        Outcome("d", 1.0, 0.99, ("eval-mode",), 0, ("train mode",)),  # nothing to see in the loss
    ]
    found = summary(outcomes)
    place = names.index("train mode") + 1
    assert found["as people try"] == {"cases": 3, "mended": 2, "soon": 1, "trainings": (place + len(names) + 1) / 3}
    assert found["with the diagnosis"] == {"cases": 3, "mended": 2, "soon": 2, "trainings": (1 + len(names) + 1) / 3}
    assert found["with the diagnosis, and the line"] == {"cases": 3, "mended": 3, "soon": 3, "trainings": (1 + 2 + 1) / 3}
    assert found["in any order"]["soon"] == pytest.approx(5 / len(names) + 1)
    assert found["in any order"]["trainings"] == pytest.approx(((len(names) + 1) / 2 + len(names) + 1) / 3)
