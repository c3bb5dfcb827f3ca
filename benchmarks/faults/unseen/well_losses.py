"""Healthy trainings with other losses: of ranks, quantiles, survival, densities and slopes, and some that reach zero."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..training import Training
from .others import curve
from .well_models import well
from .worlds import World, adam, begin, dense, gratings, nesterov


def _smoothed(seed: int) -> World:
    """Label smoothing of a fifth: the loss ends far above zero."""
    g = begin(seed)
    model = nn.Sequential(nn.Flatten(), dense(64, 64, 4))

    def loss(step: int) -> Tensor:
        x, y = gratings(g)
        return F.cross_entropy(model(x), y, label_smoothing=0.2)

    return World(model, loss)


def _focal(seed: int) -> World:
    """One positive in twenty, and easy ones count next to nothing."""
    g = begin(seed)
    model = dense(8, 32, 32, 1)

    def loss(step: int) -> Tensor:
        x = torch.randn(128, 8, generator=g)
        y = (torch.rand(128, generator=g) < 0.05).float()
        logits = model(x + 1.5 * y[:, None]).squeeze(-1)
        each = F.binary_cross_entropy_with_logits(logits, y, reduction="none")
        return (each * (1 - (-each).exp()) ** 2).mean() * 10

    return World(model, loss)


def _hinge(seed: int) -> World:
    """A linear machine with a margin that all reach: loss and gradient are 0 in many steps at the end, and nothing is wrong."""
    g = begin(seed)
    model = nn.Linear(10, 1)
    normal = torch.randn(10, generator=g)

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 10, generator=g)
        side = (x @ normal).sign()
        x = x + 0.1 * side[:, None] * normal / normal.norm()
        return F.relu(1 - side * model(x).squeeze(-1)).mean()

    return World(model, loss)


def _ranked(seed: int) -> World:
    """RankNet: of two documents the better one shall have the higher score."""
    g = begin(seed)
    model, worth = dense(8, 32, 1), torch.randn(8, generator=g)

    def loss(step: int) -> Tensor:
        x = torch.randn(2, 64, 8, generator=g)
        better = ((x @ worth).tanh() + 0.1 * torch.randn(2, 64, generator=g)).diff(dim=0).sign()
        return F.softplus(-better * model(x).squeeze(-1).diff(dim=0)).mean()

    return World(model, loss)


def _quantiles(seed: int) -> World:
    """Three quantiles at once; the gradient is made of signs and never fades."""
    g = begin(seed)
    model, levels = dense(4, 48, 48, 3), torch.tensor([0.1, 0.5, 0.9])

    def loss(step: int) -> Tensor:
        x, y = curve(g)
        off = y[:, None] + 0.3 * torch.randn(64, 1, generator=g) - model(x)
        return torch.maximum(levels * off, (levels - 1) * off).mean()

    return World(model, loss)


def _survival(seed: int) -> World:
    """Cox's partial likelihood; no batch is without events."""
    g = begin(seed)
    model, slopes = dense(6, 32, 1), torch.randn(6, generator=g)

    def loss(step: int) -> Tensor:
        x = torch.randn(64, 6, generator=g)
        times = torch.empty(64).exponential_(generator=g) * (-(x @ slopes)).exp()
        event = torch.rand(64, generator=g) < 0.6
        order = times.argsort(descending=True)
        risk, event = model(x).squeeze(-1)[order], event[order]
        return ((risk.logcumsumexp(0) - risk) * event).sum() / event.sum()

    return World(model, loss)


class _Coupling(nn.Module):
    """One half is moved and stretched by the other (Dinh et al. 2017)."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.inner, self.turned = dense(1, 32, 2, act=nn.Tanh), turned
        nn.init.zeros_(self.inner[-1].weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.flip(1).chunk(2, 1) if self.turned else x.chunk(2, 1)
        stretch, shift = self.inner(a).chunk(2, 1)
        stretch = 1.5 * stretch.tanh()
        y = torch.cat([a, b * stretch.exp() + shift], 1)
        return y.flip(1) if self.turned else y, stretch.squeeze(1)


def _flow(seed: int) -> World:
    """A normalising flow; its loss, a logarithm of a density, may be below zero."""
    g = begin(seed)
    model = nn.ModuleList(_Coupling(index % 2 == 1) for index in range(4))

    def loss(step: int) -> Tensor:
        angle = math.pi * torch.rand(128, 1, generator=g)
        x = torch.cat([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(128, 2, generator=g)
        total = torch.zeros(128)
        for layer in model:
            x, stretch = layer(x)
            total = total + stretch
        return (0.5 * x.square().sum(1) - total).mean()

    return World(model, loss)


def _heat(seed: int) -> World:
    """A network that solves u'' = -u with u(0) = 0 and u'(0) = 1: the loss has second derivatives."""
    g = begin(seed)
    model = dense(1, 32, 32, 1, act=nn.Tanh)

    def loss(step: int) -> Tensor:
        t = (3 * torch.rand(48, 1, generator=g)).requires_grad_()
        first = torch.autograd.grad(model(t).sum(), t, create_graph=True)[0]
        second = torch.autograd.grad(first.sum(), t, create_graph=True)[0]
        start = torch.zeros(1, 1, requires_grad=True)
        slope = torch.autograd.grad(model(start).sum(), start, create_graph=True)[0]
        return (second + model(t)).square().mean() + 3 * model(start).square().sum() + 3 * (slope - 1).square().sum()

    return World(model, loss)


def _variational(seed: int) -> World:
    """The divergence's weight rises from 0, so that the loss goes up again after it went down."""
    g = begin(seed)
    model = nn.ModuleDict({"encoder": dense(64, 48, 12), "decoder": dense(6, 48, 64)})

    def loss(step: int) -> Tensor:
        x = gratings(g)[0].flatten(1)
        mean, log = model["encoder"](x).chunk(2, 1)
        z = mean + (0.5 * log).exp() * torch.randn(mean.shape, generator=g)
        divergence = 0.5 * (mean.square() + log.exp() - log - 1).sum(1).mean()
        return (model["decoder"](z) - x).square().sum(1).mean() + min(1.0, step / 120) * divergence

    return World(model, loss)


def _gumbel(seed: int) -> World:
    """Choices by Gumbel's trick, whose temperature falls."""
    g = begin(seed)
    model = nn.ModuleDict({"encoder": dense(10, 32, 8), "decoder": nn.Linear(8, 10)})
    centres = torch.randn(6, 10, generator=g)

    def loss(step: int) -> Tensor:
        x = centres[torch.randint(6, (64,), generator=g)] + 0.1 * torch.randn(64, 10, generator=g)
        return F.mse_loss(model["decoder"](F.gumbel_softmax(model["encoder"](x), max(0.4, 0.99**step))), x)

    return World(model, loss)


def _energy(seed: int) -> World:
    """Energies of data against noise; the logged loss goes down to a level that is not zero."""
    g = begin(seed)
    model = dense(2, 48, 48, 1, act=nn.SiLU)

    def loss(step: int) -> Tensor:
        angle = 6.28 * torch.rand(96, 1, generator=g)
        real = torch.cat([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(96, 2, generator=g)
        energy = model(torch.cat([real, torch.randn(96, 2, generator=g)])).squeeze(1)
        return F.softplus(energy[:96]).mean() + F.softplus(-energy[96:]).mean() + 1e-3 * energy.square().mean()

    return World(model, loss)


def _margins(seed: int) -> World:
    """Siamese pairs: those of two kinds have no gradient once they are a margin apart."""
    g = begin(seed)
    model, centres = dense(12, 32, 4), 1.5 * torch.randn(5, 12, generator=g)

    def loss(step: int) -> Tensor:
        y = torch.randint(5, (64,), generator=g)
        z = model(centres[y] + 0.5 * torch.randn(64, 12, generator=g))
        square = (z[:32] - z[32:]).square().sum(1)
        return torch.where(y[:32] == y[32:], square, F.relu(1 - (square + 1e-6).sqrt()).square()).mean()

    return World(model, loss)


TRAININGS: list[Training] = [
    well("smoothed-labels", "mlp", _smoothed, name="train/loss"),
    well("focal", "mlp", _focal, lambda m: adam(m, 5e-3), steps=200),
    well("hinge-to-zero", "linear", _hinge, lambda m: nesterov(m, 0.05), steps=250),
    well("ranked-pairs", "ranknet", _ranked, lambda m: adam(m, 5e-3), steps=200),
    well("quantiles", "mlp", _quantiles, lambda m: adam(m, 3e-3), steps=200, name="train_loss"),
    well("survival", "survival", _survival, lambda m: adam(m, 5e-3)),
    well("flow", "flow", _flow, lambda m: adam(m, 5e-3), steps=200),
    well("second-derivatives", "pinn", _heat, lambda m: adam(m, 5e-3), steps=200),
    well("divergence-by-and-by", "vae", _variational, lambda m: adam(m, 3e-3), steps=200),
    well("gumbel", "codes", _gumbel, lambda m: adam(m, 1e-2), steps=200),
    well("energies", "energy", _energy, lambda m: adam(m, 5e-3), steps=200),
    well("margins", "siamese", _margins, lambda m: adam(m, 3e-3), steps=200),
]
