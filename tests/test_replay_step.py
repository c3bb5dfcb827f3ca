"""A pass that is repeated: what differs is named, and the training stays as it is, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon

from . import replica_runs as runs
from .ranks import on_ranks


class Net(nn.Module):
    """With everything that a pass may change: running statistics, random numbers, a counter, and an embedding that renormalises."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(5, 6, max_norm=0.5)
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Plain."""
        self.calls += 1
        return self.down(nn.functional.dropout(torch.relu(self.norm(self.up(self.tokens(x)))), 0.5, self.training))


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def _train(replays: bool) -> tuple[dict[str, Any], list[dict[str, float]]]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    steps = 0

    def count(parameter: Tensor) -> None:
        nonlocal steps
        steps += 1

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    values = []
    with gradmon.watch(model, optimizer, check_replicas=0) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            batch = torch.randint(5, (4,))
            loss = _loss(model, batch)
            if replays:  # between forward and backward pass, where most could go wrong
                assert monitor.replay_step(lambda model, batch=batch: _loss(model, batch)).verdict == "equal"
            loss.backward()
            if replays:
                assert monitor.replay_step(lambda model, batch=batch: _loss(model, batch), times=2).verdict == "equal"
            optimizer.step()
            taken = monitor.get_step_metrics()
            values.append({key: value for key, value in taken.items() if "overhead" not in key})
        state = {**model.state_dict(), "rng": torch.get_rng_state(), "calls": model.calls, "steps": steps}
    return state, values


def test_the_training_is_unchanged_and_so_is_what_is_measured() -> None:
    (plain, values), (replayed, their_values) = _train(replays=False), _train(replays=True)
    assert plain.keys() == replayed.keys()
    for name, value in plain.items():
        assert torch.equal(value, replayed[name]) if isinstance(value, Tensor) else value == replayed[name], name
    assert values == their_values


def _odd_in(numbers: Callable[[int], bool]) -> Callable[[nn.Module], Tensor]:
    """A pass that computes otherwise where ``numbers`` says so: one bit of one output."""
    passes = itertools.count()

    def compute(model: nn.Module) -> Tensor:
        out = model(torch.arange(4))
        if numbers(next(passes)):
            out = out * (1 + 2.0**-20)
        return out.square().mean()

    return compute


def test_one_pass_that_differs_is_named_with_what_differs() -> None:
    model = Net()
    monitor = gradmon.ModuleMonitor(model)
    found = monitor.replay_step(_odd_in(lambda number: number == 1))
    assert (found.verdict, found.odd, len(found.losses)) == ("one-off", (1,), 6)
    assert found.differing[0] == "loss"
    assert "down.bias" in found.differing
    assert "unused.weight" not in found.differing
    assert found.compared == 9
    assert "pass 1 of 6 over one batch gave other bits than the rest: loss and " in str(found)
    assert "suspect this device" in str(found)


def test_passes_that_differ_again_and_again_tell_nothing_of_the_device() -> None:
    model = Net()
    monitor = gradmon.ModuleMonitor(model)
    for numbers in (lambda number: bool(number % 2), lambda number: number in (2, 4)):
        found = monitor.replay_step(_odd_in(numbers))
        assert (found.verdict, found.odd) == ("non-deterministic", ())
        assert "use_deterministic_algorithms" in str(found)


def test_equal_passes_say_what_was_compared() -> None:
    model = Net()
    found = gradmon.ModuleMonitor(model).replay_step(_odd_in(lambda number: False), times=4)
    assert (found.verdict, found.odd, found.differing, len(set(found.losses))) == ("equal", (), (), 1)
    assert str(found) == "4 passes over one batch gave the same bits: the loss and 9 gradients"


def test_bad_arguments_are_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    monitor = gradmon.ModuleMonitor(model)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"replay_step\(times=1\) compares nothing"):
        monitor.replay_step(_odd_in(lambda number: False), times=1)
    with pytest.raises(TypeError, match=r"a tensor of one element; got a tensor of shape \(4, 3\)"):
        monitor.replay_step(lambda model: model(torch.arange(4)))
    with pytest.raises(TypeError, match=r"got 3\.0"):
        monitor.replay_step(lambda model: 3.0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="no graph"):
        monitor.replay_step(lambda model: model(torch.arange(4)).mean().detach())
    with pytest.raises(ZeroDivisionError):
        monitor.replay_step(lambda model: model(torch.arange(4)).mean() * (1 / 0))
    with pytest.raises(ValueError, match="no module to watch"):
        gradmon.ModuleMonitor().replay_step(_odd_in(lambda number: False))
    assert torch.equal(before, torch.get_rng_state())
    assert model.calls == 0
    monkeypatch.setenv("GRADMON_DISABLE", "1")
    found = gradmon.ModuleMonitor(model).replay_step(_odd_in(lambda number: False))
    assert str(found) == "nothing was run: GRADMON_DISABLE is set"


def _replay_on(rank: int, make: Callable[..., runs.Training], on_all: bool) -> str:
    training = make(rank)
    monitor = gradmon.watch(training.model, training.optimizer)
    batch = torch.randn(4, training.width, generator=torch.Generator().manual_seed(0))
    found = ""
    if rank == 0 or on_all:
        try:
            found = str(monitor.replay_step(lambda model: model(batch).square().mean()))
        except TypeError as error:
            found = str(error)
    torch.distributed.barrier()
    monitor.detach()
    return found


def test_a_rank_replays_by_itself() -> None:
    first, other = on_ranks(2, _replay_on, runs.ddp, False)
    assert first == "3 passes over one batch gave the same bits: the loss and 4 gradients"
    assert other == ""


def test_parts_of_a_tensor_parallel_model_are_replayed_together() -> None:
    expected = "3 passes over one batch gave the same bits: the loss and 8 gradients"
    assert on_ranks(2, _replay_on, runs.tensor_parallel, True) == [expected] * 2


def test_a_sharded_model_is_refused() -> None:
    for found in on_ranks(4, _replay_on, runs.hsdp, True):
        assert found.startswith("replay_step() runs a pass on one rank by itself")
