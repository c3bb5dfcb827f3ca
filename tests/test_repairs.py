"""The outside judge's results, and the scripted mechanic: its repairs, and how its trainings are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.external import CASES, judging
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


def _repaired(name: str, model: nn.Module, **settings: float) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 1.0, **settings})
    REPAIRS[name](model, [optimizer])
    return optimizer


def test_clipping_takes_gradients_of_any_size() -> None:
    model = nn.Linear(4, 1, bias=False)
    optimizer = _repaired("clipping at 1", model)
    for gradient, norm in ((30.0, 1.0), (0.0, 0.0)):
        before = model.weight.detach().clone()
        model.weight.grad = torch.full((1, 4), gradient)
        optimizer.step()
        assert (model.weight - before).norm().item() == pytest.approx(norm, abs=1e-5)


def test_spoiled_steps_are_left_out() -> None:
    model = nn.Linear(4, 1)
    optimizer, before = _repaired("spoiled steps left out", model), nn.Linear(4, 1)
    before.load_state_dict(model.state_dict())
    model.weight.grad, model.bias.grad = torch.full((1, 4), torch.nan), torch.ones(1)
    optimizer.step()
    assert torch.equal(model.bias, before.bias)
    model.weight.grad, model.bias.grad = torch.ones(1, 4), torch.ones(1)
    optimizer.step()
    assert not torch.equal(model.bias, before.bias)


def test_inputs_are_normalised() -> None:
    seen = []
    model = nn.Sequential(nn.Linear(4, 2))
    _repaired("normalised inputs", model)
    model[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(100 + 50 * torch.randn(64, 4))
    assert seen[0].mean().item() == pytest.approx(0, abs=1e-4)
    assert seen[0].std().item() == pytest.approx(1, abs=1e-3)


def test_what_a_model_was_built_with_is_made_usual() -> None:
    model = _model().eval()
    nn.init.constant_(model[0].weight, 7.0)
    model[1].momentum = 0.0
    for name in ("the usual initialisation", "the usual batch norm", "train mode"):
        _repaired(name, model)
    model(torch.randn(6, 4))
    assert model[0].weight.abs().max() <= 0.5
    assert model[1].momentum == 0.1
    assert model.training


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


def test_results_of_other_seeds_are_added() -> None:
    def result(seed: int, named: int) -> dict[str, Any]:
        counts = {"all": {"named": [named, 10], "false alarms": [0, 5]}}
        return {
            "machine": {"cores": 2},
            "seeds": [seed],
            "trainings": 15,
            "counts": counts,
            "wrong": [str(seed)],
            "outcomes": [seed],
            "date": "today",
        }

    found = judging.merged(result(1, 9), result(0, 7))
    assert (found["seeds"], found["trainings"], found["counts"]["all"]["named"]) == ([0, 1], 30, [16, 20])
    assert (found["wrong"], found["outcomes"]) == (["1", "0"], [1, 0])
    with pytest.raises(ValueError, match="do not go together"):
        judging.merged(result(1, 9), result(1, 9))
