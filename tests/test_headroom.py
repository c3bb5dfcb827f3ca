"""How far the learning rate is from the critical one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_gradmon as gradmon
from examples.plugins.headroom import Headroom, critical_step
from tests.ranks import on_ranks
from torch_gradmon.analysis.plots import charts
from torch_gradmon.analysis.plots.charts import PanelSet
from torch_gradmon.analysis.run import read_run

pytestmark = pytest.mark.thorough

KEY = "gradmon/lr_over_critical"


@pytest.mark.parametrize("critical", [0.003, 0.3, 0.99, 1.01, 2.0, 17.0, 600.0])
@pytest.mark.parametrize("guess", [1.0, 0.01, 64.0])
def test_a_parabola_rises_at_twice_its_minimum(critical: float, guess: float) -> None:
    found = critical_step(lambda s: (s - critical / 2) ** 2, guess, evaluations=40)
    assert found.low <= critical <= found.high <= found.low * 2**0.25 * 1.0001
    assert found.evaluations <= 20


def test_few_evaluations_are_enough_from_a_good_guess() -> None:
    for critical in (0.5, 0.8, 1.0, 1.4, 2.0):
        found = critical_step(lambda s: (s - critical / 2) ** 2, 1.0, evaluations=8)  # noqa: B023
        assert found.evaluations <= 8
        assert found.size == pytest.approx(critical, rel=0.2)


def test_a_loss_that_always_rises_or_never_does() -> None:
    assert critical_step(lambda s: s, evaluations=30).low == 0
    found = critical_step(lambda s: -s, evaluations=30)
    assert (found.high, found.size) == (math.inf, 1024.0)
    assert critical_step(lambda s: math.nan if s > 3 else -s, evaluations=30).high == pytest.approx(3, rel=0.2)


def model_of(kind: str) -> nn.Module:
    """With dropout and batch norm, or without."""
    layers: list[nn.Module] = [nn.Linear(6, 24), nn.Tanh()]
    layers += [nn.BatchNorm1d(24), nn.Dropout(0.2)] if kind == "random" else []
    return nn.Sequential(*layers, nn.Linear(24, 3))


def train(
    make: Callable[[Any], torch.optim.Optimizer],
    kind: str = "plain",
    watched: bool = True,
    steps: int = 21,
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
    run_dir: Path | None = None,
    **options: Any,
) -> tuple[nn.Module, Headroom, list[float | None], Tensor]:
    """The values of each step, and the state of the generator."""
    torch.manual_seed(0)
    model, x, y = model_of(kind), torch.empty(0), torch.empty(0)
    optimizer, values = make(model.parameters()), list[float | None]()
    headroom = Headroom(lambda: (loss_of or plain)(model, x, y), **{"every": 10, **options})
    monitor = gradmon.watch(model, optimizer, plugins=[headroom], run_dir=run_dir) if watched else None
    for _ in range(steps):
        x = torch.randn(32, 6)
        y = x[:, :3].argmax(1)
        optimizer.zero_grad()
        plain(model, x, y).backward()
        optimizer.step()
        values.append(None if monitor is None else monitor.get_step_metrics().get(KEY))
    if monitor is not None:
        monitor.detach()
    return model, headroom, values, torch.get_rng_state()


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of the loop."""
    return F.cross_entropy(model(x), y)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Of a usual rate."""
    return torch.optim.Adam(parameters, 1e-2)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Of a high rate."""
    return torch.optim.SGD(parameters, 0.5, momentum=0.9)


@pytest.mark.parametrize("make", [adam, momentum])
@pytest.mark.parametrize("kind", ["plain", "random"])
def test_the_training_keeps_its_bits(make: Callable[[Any], torch.optim.Optimizer], kind: str) -> None:
    watched, headroom, values, state = train(make, kind)
    alone, _, _, untouched = train(make, kind, watched=False)
    assert all(torch.equal(value, alone.state_dict()[name]) for name, value in watched.state_dict().items())
    assert torch.equal(state, untouched)
    assert [step for step, value in enumerate(values) if value is not None] == [0, 10, 20]
    assert headroom.last is not None
    assert values[-1] == 1 / headroom.last.size


def test_it_is_the_rate_at_which_the_loss_rises_by_a_search_on_a_grid() -> None:
    torch.manual_seed(0)
    model = model_of("plain").double()
    x = torch.randn(256, 6, dtype=torch.float64)
    y = x[:, :3].argmax(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    headroom = Headroom(lambda: plain(model, x, y), every=1, evaluations=12)
    monitor = gradmon.watch(model, optimizer, plugins=[headroom])
    for _ in range(5):
        before = copy.deepcopy(model)
        optimizer.zero_grad()
        plain(model, x, y).backward()
        optimizer.step()

        def loss_after(multiple: float, before: nn.Module = before) -> float:
            probe = copy.deepcopy(before)
            with torch.no_grad():
                for p, q in zip(probe.parameters(), model.parameters(), strict=True):
                    p += multiple * (q - p)
                return plain(probe, x, y).item()

        begin = loss_after(0.0)
        rising = next(2 ** (k / 32) for k in range(-320, 321) if loss_after(2 ** (k / 32)) > begin)
        assert headroom.last is not None
        assert headroom.last.low <= rising <= headroom.last.high * 2 ** (1 / 32)
    monitor.detach()


def test_a_step_with_a_closure_is_left_out() -> None:
    torch.manual_seed(0)
    model, x = model_of("plain"), torch.randn(32, 6)
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
    headroom = Headroom(lambda: plain(model, x, x[:, :3].argmax(1)), every=1)
    monitor = gradmon.watch(model, optimizer, plugins=[headroom])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = plain(model, x, x[:, :3].argmax(1))
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert headroom.last is None
    assert KEY not in monitor.get_step_metrics()
    monitor.detach()


def test_a_step_that_is_skipped_is_left_out() -> None:
    torch.manual_seed(0)
    model, x = model_of("plain"), torch.randn(32, 6)
    optimizer, scaler = adam(model.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0**126)
    headroom = Headroom(lambda: plain(model, x, x[:, :3].argmax(1)), every=1)
    monitor = gradmon.watch(model, optimizer, scaler=scaler, plugins=[headroom], on_spike=None)
    scaler.scale(1e3 * plain(model, x, x[:, :3].argmax(1))).backward()
    scaler.step(optimizer)
    scaler.update()
    assert headroom.last is None
    monitor.detach()


def test_a_loss_that_fails_costs_one_warning_and_no_bits() -> None:
    calls = []

    def broken(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 2:
            raise KeyError("batch")
        return plain(model, x, y)

    with pytest.warns(gradmon.GradmonWarning, match="headroom") as caught:
        watched, _, values, _ = train(adam, loss_of=broken)
    assert len(caught) == 1
    alone = train(adam, watched=False)[0]
    assert all(torch.equal(value, alone.state_dict()[name]) for name, value in watched.state_dict().items())
    assert set(values) == {None}


def test_no_more_forwards_than_are_allowed() -> None:
    calls = []

    def counted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return plain(model, x, y)

    train(adam, loss_of=counted, evaluations=5, steps=20)
    assert 4 <= len(calls) <= 10
    assert not any(calls)


def test_one_step_is_measured_when_it_is_asked_for() -> None:
    torch.manual_seed(0)
    model, x = model_of("plain"), torch.randn(32, 6)
    optimizer = adam(model.parameters())
    headroom = Headroom(lambda: plain(model, x, x[:, :3].argmax(1)), every=None)
    monitor = gradmon.watch(model, optimizer, plugins=[headroom], every=1000)
    measured = []
    for step in range(60):
        if step == 41:
            headroom.ask()
            assert monitor.is_step_monitored(41)
            assert not monitor.is_step_monitored(42)
        optimizer.zero_grad()
        plain(model, x, x[:, :3].argmax(1)).backward()
        optimizer.step()
        if KEY in monitor.get_step_metrics():
            measured.append(step)
    assert measured == [41]
    monitor.detach()


def test_what_is_asked_for_in_a_step_with_a_closure_is_not_asked_for_for_ever() -> None:
    torch.manual_seed(0)
    model, x = model_of("plain"), torch.randn(32, 6)
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=2)
    headroom = Headroom(lambda: plain(model, x, x[:, :3].argmax(1)), every=None)
    monitor = gradmon.watch(model, optimizer, plugins=[headroom], every=1000)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = plain(model, x, x[:, :3].argmax(1))
        loss.backward()
        return loss

    monitored = []
    for step in range(20):
        if step == 5:
            headroom.ask()
        monitored.append(monitor.is_step_monitored(step))
        optimizer.step(closure)
    assert [step for step, is_so in enumerate(monitored) if is_so] == [0, 5]
    monitor.detach()


def test_the_picture_has_the_critical_rate(tmp_path: Path) -> None:
    train(adam, run_dir=tmp_path)
    chart = charts.norm(PanelSet(read_run(tmp_path)))
    drawn = next(subplot for subplot in chart.subplots if subplot.title == "learning rate / critical")
    assert list(drawn.guides.values()) == [1.0]
    assert drawn.lines[0].series.steps == (0, 10, 20)


@pytest.mark.parametrize("options", [{"every": 0}, {"evaluations": 2}, {"loss": 3.0}])
def test_bad_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(options.values())))):
        Headroom(**{"loss": lambda: torch.zeros(()), **options})


def of_two_ranks(rank: int) -> tuple[float | None, float]:
    """What a rank finds, whose batches differ from those of the other."""
    torch.manual_seed(0)
    net = model_of("plain")
    model = nn.parallel.DistributedDataParallel(net)
    optimizer, x, y = momentum(model.parameters()), torch.empty(0), torch.empty(0)
    headroom = Headroom(lambda: plain(model, x, y), every=5)
    monitor = gradmon.watch(model, optimizer, plugins=[headroom])
    torch.manual_seed(rank)
    for _ in range(11):
        x = torch.randn(16, 6)
        y = x[:, :3].argmax(1)
        optimizer.zero_grad()
        plain(model, x, y).backward()
        optimizer.step()
    value = monitor.get_step_metrics().get(KEY)
    monitor.detach()
    return value, float(sum(p.double().sum() for p in net.parameters()))


@pytest.mark.ranks
def test_ranks_agree() -> None:
    (value, total), other = on_ranks(2, of_two_ranks)
    assert value is not None
    assert other == (value, total)
