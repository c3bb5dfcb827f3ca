"""The gradients of single micro-batches: which one a spike came from, and the gradient noise scale."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import ModuleMonitor, SpikeDetector
from torch_gradmon.analysis.run import read_run
from torch_gradmon.analysis.spike_report import explain
from torch_gradmon.spikes.attribution import rank_norms_text

from .rank_runs import FEATURES, MEAN, SPREAD, batches_of, noisy
from .ranks import on_ranks


def _watched(
    micro: int, spoiled: float = 1.0, steps: int = 40, **arguments: Any
) -> tuple[ModuleMonitor, list[Any], list[list[float]]]:
    """A run whose third micro-batch goes wrong in step 30; the true norms of that step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    events: list[Any] = []
    monitor = gradmon.watch(model, optimizer, on_spike=events.append, **arguments)
    monitor.add_micro_batch_metrics(batch_size=5)
    true = []
    for step in range(steps):
        optimizer.zero_grad()
        true.append([])
        for number in range(micro):
            loss = model(torch.randn(5, 4)).square().mean() / micro * (spoiled if (step, number) == (30, 2) else 1.0)
            gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            true[-1].append(math.sqrt(sum(float(g.double().square().sum()) for g in gradients)))
            loss.backward()
        optimizer.step()
    return monitor, events, true


def test_each_micro_batch_has_its_norm() -> None:
    monitor, _, true = _watched(4)
    context = monitor._runtime.pipeline.last.context  # type: ignore[union-attr]
    assert context["batch_norms"] == {"0": pytest.approx(true[-1], rel=1e-6)}
    assert monitor.get_step_metrics()["gradmon/micro_batch_grad_norm_max"] == pytest.approx(max(true[-1]), rel=1e-6)


def test_a_spike_names_the_micro_batch_that_it_came_from(tmp_path: Path) -> None:
    monitor, events, true = _watched(4, spoiled=300.0, run_dir=tmp_path)
    (event,) = [event for event in events if event.step == 30]
    assert "micro-batch 2 of rank 0 has " in event.where
    assert "the norm of the 3 others" in event.where
    line = next(line for line in monitor.why(30).splitlines() if line.startswith("  norms of the micro-batches of rank 0: "))
    assert line.endswith(", ".join(f"{norm:.4g}" for norm in true[30]))
    monitor.detach()
    assert line in explain(read_run(tmp_path), 30)


def test_nan_names_the_first_micro_batch_that_has_it() -> None:
    _, events, _ = _watched(4, spoiled=math.nan)
    assert "of 4 micro-batches 1 brought NaN or Inf, first number 2 of rank 0" in events[0].where


@pytest.mark.parametrize(
    ("norms", "words"),
    [
        ({"0": [1.0]}, ""),
        ({"0": [1.0, 1.1], "1": [0.9, 1.2]}, "all 4 micro-batches are alike"),
        ({"0": [1.0, 1.1], "1": [9.0, 1.2]}, "micro-batch 0 of rank 1 has 8.18 times the norm of the 3 others"),
        ({"0": [0.0, 0.0]}, "all 2 micro-batches are alike"),
        (
            {"0": [1.0, math.nan], "1": [1.0, 1.0], "2": [1.0, math.inf]},
            "of 6 micro-batches 2 brought NaN or Inf, first number 1 of rank 0",
        ),
    ],
)
def test_the_words_say_which_stands_out(norms: dict[str, list[float]], words: str) -> None:
    assert rank_norms_text(norms) == words


def test_one_micro_batch_has_no_noise_scale_and_that_is_said() -> None:
    monitor, _, _ = _watched(1, steps=3)
    assert "gradmon/noise_scale" not in monitor.get_step_metrics()
    assert "only one micro-batch" in monitor.missing()["gradmon/noise_scale"]
    assert "gradient noise scale" in monitor.describe()["gradmon/noise_scale"]


#: Of a gradient that is ``MEAN`` in each of ``FEATURES`` directions, with the standard deviation ``SPREAD`` from example to example.
TRUE_SCALE = FEATURES * SPREAD**2 / (FEATURES * MEAN**2)


@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize(("micro", "size"), [(4, 8), (2, 3)])
def test_the_noise_scale_is_that_of_a_known_noise(micro: int, size: int, divided: bool) -> None:
    found = noisy(0, micro, size, divided)
    assert found == pytest.approx(TRUE_SCALE, rel=0.08)


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "micro"), [(2, 1), (2, 2), (4, 1)])
def test_ranks_are_small_batches_too(ranks: int, micro: int) -> None:
    found = on_ranks(ranks, noisy, micro, 8, True)
    assert found == [found[0]] * ranks
    assert found[0] == pytest.approx(TRUE_SCALE, rel=0.08)


def test_the_scale_goes_on_where_a_state_is_loaded() -> None:
    monitor, _, _ = _watched(4)
    state = monitor.state_dict()
    other = ModuleMonitor(nn.Linear(1, 1))
    other.add_micro_batch_metrics(batch_size=5)
    other.add_detector(SpikeDetector())
    other.load_state_dict(state)
    assert other.state_dict()["summary"]["batches"] == state["summary"]["batches"]


@pytest.mark.ranks
def test_a_spike_names_the_rank() -> None:
    for events, norms, true in on_ranks(2, batches_of, "ddp"):
        assert "micro-batch 1 of rank 1 has " in events[0]
        assert norms == {rank: pytest.approx(each, rel=1e-6) for rank, each in true.items()}


@pytest.mark.ranks
def test_gradients_that_exist_only_reduced_are_said_to() -> None:
    for _, norms, _ in on_ranks(2, batches_of, "fsdp2"):
        assert norms == (
            "not every rank has reported its micro-batches: where ranks have parts of the model, gradients are measured only once they "
            "are reduced"
        )


@pytest.mark.parametrize("size", [0, 1.5, True])
def test_what_is_no_size_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match=rf"batch_size={size!r} must be a positive int"):
        ModuleMonitor().add_micro_batch_metrics(size)
