"""The largest singular value and the stable rank against a full decomposition in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon.statistics.spectrum import first_left_vector, participation_ratio, spectral_norm, stable_rank


def draw(*shape: int, seed: int = 1) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


MATRICES = {
    "random": draw(512, 512),
    "wide": draw(100, 700),
    "tall": draw(2000, 64),
    "of rank 3": draw(200, 3) @ draw(3, 300),
    "one large value": draw(256, 256) + 0.2 * draw(256, 1) @ draw(1, 256),
    "a convolution": draw(64, 32, 3, 3),
    "bfloat16": draw(128, 128).bfloat16(),
    "float64": draw(128, 128).double(),
    "one row": draw(1, 50),
    "ones": torch.ones(64, 64),
    "the identity": torch.eye(64),
    "copies of columns": torch.eye(64)[:, :8].repeat(1, 4),
    "tiny": 1e-25 * draw(64, 64),
    "huge": 1e25 * draw(64, 64),
    "not contiguous": draw(64, 128).t()[:, ::2],
}


@pytest.mark.parametrize("name", MATRICES)
def test_against_all_singular_values(name: str) -> None:
    matrix = MATRICES[name]
    values = torch.linalg.svdvals(matrix.double().reshape(len(matrix), -1))
    size, rank = spectral_norm(matrix), stable_rank(matrix)
    assert size is not None
    assert rank is not None
    assert 0.995 <= float(size / values[0]) <= 1 + 1e-6
    assert float(rank) == pytest.approx(float(values.square().sum() / values[0] ** 2), rel=0.01)


@pytest.mark.parametrize("name", sorted(MATRICES.keys() - {"a convolution"}))
def test_the_participation_ratio_against_all_singular_values(name: str) -> None:
    values = torch.linalg.svdvals(MATRICES[name].double())
    found = participation_ratio(MATRICES[name])
    assert float(found) == pytest.approx(
        float((values / values[0]).square().sum() ** 2 / (values / values[0]).pow(4).sum()), rel=1e-4
    )


def test_features_of_more_dimensions_have_rows_of_the_last() -> None:
    features = draw(3, 5, 7)
    assert participation_ratio(features) == participation_ratio(features.reshape(15, 7))
    assert participation_ratio(torch.zeros(4, 4)) == 0
    assert participation_ratio(torch.ones(4)) is None
    assert participation_ratio(torch.full((4, 4), math.nan)).isnan()


@pytest.mark.parametrize("name", ["one large value", "of rank 3", "one row", "ones", "tiny", "huge", "copies of columns"])
def test_the_first_vector_reaches_the_largest_singular_value(name: str) -> None:
    matrix = MATRICES[name].double()
    found = first_left_vector(MATRICES[name])
    assert float(found.norm()) == pytest.approx(1, rel=1e-5)
    assert float((found.double() @ matrix).norm() / torch.linalg.svdvals(matrix)[0]) == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("seed", range(20))
def test_random_matrices_are_the_hardest(seed: int) -> None:
    matrix = draw(300, 300, seed=seed)
    assert 0.98 <= float(spectral_norm(matrix) / torch.linalg.svdvals(matrix.double())[0]) <= 1 + 1e-6


def test_what_has_no_spectrum() -> None:
    assert spectral_norm(torch.ones(3)) is None
    assert stable_rank(torch.ones(())) is None
    assert spectral_norm(torch.ones(3, 0)) is None
    assert spectral_norm(torch.zeros(4, 4)) == 0
    assert stable_rank(torch.zeros(4, 4)) == math.inf
    assert spectral_norm(torch.full((4, 4), math.nan)).isnan()


def test_two_calls_agree_and_leave_the_generator_alone() -> None:
    state = torch.get_rng_state()
    assert spectral_norm(MATRICES["random"]) == spectral_norm(MATRICES["random"])
    assert torch.equal(state, torch.get_rng_state())


def test_in_a_loop() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3))
    nn.init.zeros_(model[2].weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gradmon.ModuleMonitor(model, on_metric_error="raise")
    for metric in ("spectral_norm", "stable_rank"):
        monitor.add_parameter_metric(metric)
        monitor.add_gradient_metric(metric)
        monitor.add_update_metric(metric)
    monitor.attach(optimizer)
    before = model[0].weight.detach().clone()
    model(torch.randn(8, 12)).square().sum().backward()
    model[2].weight.grad = draw(3, 24)
    optimizer.step()
    found = monitor.get_step_metrics()
    values = torch.linalg.svdvals(before.double())
    assert found["parameter/0.weight/spectral_norm"] == pytest.approx(float(values[0]), rel=1e-4)
    assert found["parameter/0.weight/stable_rank"] == pytest.approx(float(values.square().sum() / values[0] ** 2), rel=1e-4)
    assert found["update/2.weight/stable_rank"] == pytest.approx(found["gradient/2.weight/stable_rank"], rel=1e-4)
    assert "all its elements are zero" in monitor.missing()["parameter/2.weight/stable_rank"]
    assert "parameter/0.bias/spectral_norm" not in found
    monitor.detach()
