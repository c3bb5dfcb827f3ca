"""The largest singular value and the stable rank against a full decomposition in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon.statistics import histogram
from torch_gradmon.statistics.histogram import first_left_vector, participation_ratio, spectral_norm, stable_rank


def draw(*shape: int, seed: int = 1) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spectra(stack: Tensor) -> tuple[float, float]:
    """The largest singular value of any matrix, and the smallest stable rank, from decompositions in float64."""
    values = [torch.linalg.svdvals(matrix.double()) for matrix in stack]
    return max(float(v[0]) for v in values), min(float((v / v[0]).square().sum()) for v in values if v[0])


def watching(model: nn.Module, optimizer: torch.optim.Optimizer) -> gradmon.ModuleMonitor:
    """Both values of parameters, gradients and updates."""
    monitor = gradmon.ModuleMonitor(model, on_metric_error="raise")
    for metric in ("spectral_norm", "stable_rank"):
        monitor.add_parameter_metric(metric)
        monitor.add_gradient_metric(metric)
        monitor.add_update_metric(metric)
    monitor.attach(optimizer)
    return monitor


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
    largest, least = spectra(matrix.flatten(1)[None])
    size, rank = spectral_norm(matrix), stable_rank(matrix)
    assert size is not None
    assert rank is not None
    assert 0.995 <= float(size) / largest <= 1 + 1e-6
    assert float(rank) == pytest.approx(least, rel=0.01)


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
    monitor = watching(model, optimizer)
    before = model[0].weight.detach().clone()
    model(torch.randn(8, 12)).square().sum().backward()
    model[2].weight.grad = draw(3, 24)
    optimizer.step()
    found = monitor.get_step_metrics()
    size, rank = spectra(before[None])
    assert found["parameter/0.weight/spectral_norm"] == pytest.approx(size, rel=1e-4)
    assert found["parameter/0.weight/stable_rank"] == pytest.approx(rank, rel=1e-4)
    assert found["update/2.weight/stable_rank"] == pytest.approx(found["gradient/2.weight/stable_rank"], rel=1e-4)
    assert "all its elements are zero" in monitor.missing()["parameter/2.weight/stable_rank"]
    assert "parameter/0.bias/spectral_norm" not in found
    monitor.detach()


def test_spectrum_on_another_default_device() -> None:
    histogram._start.cache_clear()
    with torch.device("meta"):
        found = spectral_norm(MATRICES["wide"])
    histogram._start.cache_clear()
    assert found == spectral_norm(MATRICES["wide"])


STACKS = {
    "experts": draw(8, 40, 60) * torch.linspace(0.2, 3, 8).view(8, 1, 1),
    "one of rank 1": torch.cat([draw(5, 32, 48), draw(1, 32, 1) @ draw(1, 1, 48)]),
    "one of zeros": torch.cat([draw(3, 24, 24), torch.zeros(1, 24, 24)]),
    "of very different sizes": draw(3, 30, 20) * torch.tensor([1e-20, 1.0, 1e15]).view(3, 1, 1),
    "a single matrix": draw(1, 50, 30),
    "of rows": draw(4, 1, 30),
    "bfloat16": draw(4, 64, 64).bfloat16(),
    "not contiguous": draw(30, 20, 6).permute(2, 0, 1),
}


@pytest.mark.parametrize("name", STACKS)
def test_spectrum_of_stack_against_each_matrix(name: str) -> None:
    size, rank = spectra(STACKS[name])
    assert 0.98 <= float(spectral_norm(STACKS[name])) / size <= 1 + 1e-6
    assert float(stable_rank(STACKS[name])) == pytest.approx(rank, rel=0.04)


def test_spectrum_of_stack_without_values() -> None:
    zeros, broken = torch.zeros(3, 4, 5), draw(3, 4, 5).index_fill(0, torch.tensor(1), math.nan)
    assert spectral_norm(zeros) == 0
    assert stable_rank(zeros) == math.inf
    assert spectral_norm(broken).isnan()
    assert stable_rank(broken).isnan()
    assert spectral_norm(torch.ones(0, 4, 5)) is None


class CausalConv1d(nn.Module):
    """A convolution of its own, with the kernel of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(draw(6, 6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv1d(nn.functional.pad(x, (2, 0)), self.kernel)


class Convolutions(nn.Module):
    """Kernels of three dimensions, and stacks of matrices: of a layer of experts, of a bilinear layer, and of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.back, self.own = nn.Conv1d(4, 6, 3, padding=1), nn.ConvTranspose1d(6, 6, 3, padding=1), CausalConv1d()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Conv1d(6, 6, 3, padding=1))
        self.experts = nn.Module()
        self.experts.weight = nn.Parameter(draw(5, 6, 8) * torch.linspace(1, 4, 5).view(5, 1, 1))
        self.pairs, self.stack = nn.Bilinear(8, 8, 3), nn.Parameter(draw(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.normed(self.own(self.back(self.plain(x)))).mT
        x = torch.einsum("bti,eio->beto", x, self.experts.weight).sum(1)
        return self.pairs(x, torch.einsum("bti,eio->bto", x, self.stack))


KERNELS = ("plain.weight", "back.weight", "own.kernel", "normed.parametrizations.weight.original1")


def test_spectrum_of_stacks_and_kernels_in_a_model() -> None:
    torch.manual_seed(0)
    model = Convolutions()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    monitor = watching(model, optimizer)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(torch.randn(2, 4, 9)).square().mean().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    found = monitor.get_step_metrics()
    for name in ("experts.weight", "pairs.weight", "stack", *KERNELS):
        for source, tensors in (("parameter", before), ("gradient", gradients), ("update", gradients)):
            tensor = tensors[name]
            size, rank = spectra(tensor.flatten(1)[None] if name in KERNELS else tensor)
            size *= 0.01 if source == "update" else 1
            assert found[f"{source}/{name}/spectral_norm"] == pytest.approx(size, rel=0.02), (source, name)
            assert found[f"{source}/{name}/stable_rank"] == pytest.approx(rank, rel=0.04), (source, name)
    monitor.detach()
