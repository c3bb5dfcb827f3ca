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
    with gradmon.watch(model, optimizer, checks=gradmon.Checks(replicas_every=0)) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            batch = torch.randint(5, (4,))
            loss = _loss(model, batch)
            if replays:  # between forward and backward pass, where most could go wrong
                assert gradmon.check_determinism(model, lambda model, batch=batch: _loss(model, batch)).verdict == "equal"
            loss.backward()
            if replays:
                assert (
                    gradmon.check_determinism(model, lambda model, batch=batch: _loss(model, batch), times=2).verdict == "equal"
                )
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
    found = gradmon.check_determinism(model, _odd_in(lambda number: number == 1))
    assert (found.verdict, found.odd, len(found.losses)) == ("one-off", (1,), 6)
    assert found.differing[0] == "loss"
    assert "down.bias" in found.differing
    assert "unused.weight" not in found.differing
    assert found.compared == 7
    assert "of 6 passes over one batch number 1 gave other bits than all before and after it: loss and " in str(found)
    assert "suspect this device" in str(found)


def test_passes_that_differ_again_and_again_tell_nothing_of_the_device() -> None:
    model = Net()
    for numbers in (lambda number: bool(number % 2), lambda number: number in (2, 4)):
        found = gradmon.check_determinism(model, _odd_in(numbers))
        assert (found.verdict, found.odd) == ("non-deterministic", ())
        assert "use_deterministic_algorithms" in str(found)


@pytest.mark.parametrize("numbers", [lambda number: number < 2, lambda number: number > 1, lambda number: number == 0])
def test_passes_that_change_once_tell_nothing_of_the_device_either(numbers: Callable[[int], bool]) -> None:
    model = Net()
    found = gradmon.check_determinism(model, _odd_in(numbers))
    assert (found.verdict, found.odd, len(found.losses)) == ("changed", (), 6)
    assert "gave two results, one after the other: loss" in str(found)


class Writing(nn.Module):
    """Writes to its parameter, its list and its tensor in the forward pass, and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.seen = nn.Parameter(torch.randn(3, 3)), []
        self.largest, self.generator = torch.zeros(()), torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        """Forced weight normalisation, and a history."""
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True) * 1.01)
        self.seen.append(len(self.seen))
        self.largest.copy_(x.abs().max())
        return (x @ self.weight) * torch.rand(3, generator=self.generator)


def _like_nanogpt(autocast: torch.autocast, forward: Callable[[], Tensor]) -> Tensor:
    with autocast:
        return forward().float().square().mean()


@pytest.mark.parametrize("place", ["forward", "backward", "step", "end"])
@pytest.mark.parametrize("kind", ["writing", "autocast", "sparse", "checkpoint"])
def test_programs_of_all_kinds_train_the_same_wherever_they_replay(kind: str, place: str) -> None:
    def train(replays: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model: nn.Module = Writing() if kind == "writing" else nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
        if kind == "sparse":
            model = nn.Sequential(nn.Embedding(5, 3, sparse=True, max_norm=0.5), nn.Linear(3, 3))
        once = torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def compute(model: nn.Module) -> Tensor:
            x = torch.arange(4) if kind == "sparse" else torch.ones(2, 3)
            if kind == "checkpoint":
                x = x.requires_grad_()
                return _like_nanogpt(once, lambda: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True))
            return _like_nanogpt(once, lambda: model(x))

        def maybe(here: str) -> None:
            if replays and here == place:
                found = gradmon.check_determinism(model, compute)
                assert (found.verdict, found.compared > 0) == ("equal", True)

        for _ in range(3):
            maybe("forward")
            loss = compute(model)
            maybe("backward")
            loss.backward()
            maybe("step")
            optimizer.step()
            maybe("end")
            optimizer.zero_grad()
        return [*map(Tensor.detach, model.parameters()), compute(model).detach()]

    for ours, theirs in zip(train(True), train(False), strict=True):
        assert torch.equal(ours, theirs)


def test_equal_passes_say_what_was_compared() -> None:
    model = Net()
    found = gradmon.check_determinism(model, _odd_in(lambda number: False), times=4)
    assert (found.verdict, found.odd, found.differing, len(set(found.losses))) == ("equal", (), (), 1)
    assert str(found) == "4 passes over one batch gave the same bits: the loss and 7 gradients"


def test_bad_arguments_are_refused_before_anything_changes() -> None:
    model = Net()
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"check_determinism\(times=1\) compares nothing"):
        gradmon.check_determinism(model, _odd_in(lambda number: False), times=1)
    with pytest.raises(TypeError, match=r"a tensor of one element; got a tensor of shape \(4, 3\)"):
        gradmon.check_determinism(model, lambda model: model(torch.arange(4)))
    with pytest.raises(TypeError, match=r"got 3\.0"):
        gradmon.check_determinism(model, lambda model: 3.0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="no graph"):
        gradmon.check_determinism(model, lambda model: model(torch.arange(4)).mean().detach())
    with pytest.raises(ZeroDivisionError):
        gradmon.check_determinism(model, lambda model: model(torch.arange(4)).mean() * (1 / 0))
    with pytest.raises(TypeError, match="takes a function of the model that returns the loss, got 5"):
        gradmon.check_determinism(model, 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gives a copy of the model to its function, which called the model itself"):
        gradmon.check_determinism(model, lambda _: model(torch.arange(4)).mean())
    with pytest.raises(ValueError, match="has no gradient of any parameter of the model that its function was given"):
        gradmon.check_determinism(model, lambda _: torch.ones((), requires_grad=True) * 2)
    assert torch.equal(before, torch.get_rng_state())
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        gradmon.check_determinism(frozen, lambda model: model(torch.ones(2)).mean())
    model.last = model.up(torch.ones(6))  # with a graph
    with pytest.raises(TypeError, match=r"cannot be made .* call it between two steps"):
        gradmon.check_determinism(model, _odd_in(lambda number: False))
    del model.last
    assert model.calls == 0


def _replay_on(rank: int, make: Callable[..., runs.Training], on_all: bool) -> str:
    training = make(rank)
    monitor = gradmon.watch(training.model, training.optimizer)
    batch = torch.randn(4, training.width, generator=torch.Generator().manual_seed(0))
    found = ""
    if rank == 0 or on_all:
        try:
            found = str(gradmon.check_determinism(training.model, lambda model: model(batch).square().mean()))
        except TypeError as error:
            found = str(error)
    torch.distributed.barrier()
    monitor.detach()
    return found


@pytest.mark.ranks
def test_a_rank_replays_by_itself() -> None:
    first, other = on_ranks(2, _replay_on, runs.ddp, False)
    assert first == "3 passes over one batch gave the same bits: the loss and 4 gradients"
    assert other == ""


def _replay_of_the_wrapper(rank: int, kind: str) -> str:
    training = runs.ddp(rank)
    outer: nn.Module = torch.compile(training.model, backend="eager") if kind == "compiled" else training.model
    outer = nn.Sequential(outer) if kind == "inside" else outer
    batch = torch.ones(4, 6)
    found = ""
    if rank == 0:
        try:
            of_copy = kind == "compiled"
            found = str(gradmon.check_determinism(outer, lambda model: (model if of_copy else outer)(batch).square().mean()))
        except (TypeError, ValueError) as error:
            found = str(error)
    torch.distributed.barrier()
    outer(batch).square().mean().backward()  # together: nothing is left behind
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("closure", "check_determinism() gives a copy of the model to its function, which called the model itself"),
        ("compiled", "3 passes over one batch gave the same bits"),
        ("inside", "check_determinism() runs a pass on one rank by itself, and DistributedDataParallel inside of the model"),
    ],
)
def test_one_rank_that_replays_never_waits_for_another(kind: str, expected: str) -> None:
    first, _ = on_ranks(2, _replay_of_the_wrapper, kind)
    assert first.startswith(expected)


@pytest.mark.ranks
def test_parts_of_a_tensor_parallel_model_are_replayed_together() -> None:
    expected = "3 passes over one batch gave the same bits: the loss and 8 gradients"
    assert on_ranks(2, _replay_on, runs.tensor_parallel, True) == [expected] * 2


@pytest.mark.ranks
def test_a_sharded_model_is_refused() -> None:
    for found in on_ranks(4, _replay_on, runs.hsdp, True):
        assert found.startswith(
            "check_determinism() runs a pass on one rank by itself, and a model in parts (fully_shard(), FSDP1, ZeRO 3"
        )
