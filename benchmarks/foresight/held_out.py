"""Trainings that no threshold was chosen on: other models, optimizers and causes than those of :mod:`.families`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..faults import data
from ..faults.data import Batch
from ..faults.families import Residual, Task, classify, layers, reproduce
from .families import BEGIN, Family, Optimizers, Rate, adamw, sgd

Loss = Callable[[nn.Module, Batch], Tensor]
Stream = Callable[[torch.Generator], Iterator[Batch]]


def _task(seed: int, make: Callable[[], nn.Module], stream: Stream, loss: Loss) -> Task:
    torch.manual_seed(seed)
    return Task(make(), stream(torch.Generator().manual_seed(seed + 1)), loss)


class Lion(torch.optim.Optimizer):
    """The sign of a mean of gradients (Chen et al. 2023)."""

    def __init__(self, parameters: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step; the closure is not called."""
        for group in self.param_groups:
            fast, slow = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    parameter.sub_(torch.lerp(parameter.grad, mean, fast).sign_(), alpha=group["lr"])
                    mean.lerp_(parameter.grad, 1 - slow)


class Muon(torch.optim.Optimizer):
    """The momentum of each matrix made orthogonal (Jordan et al. 2024); the sign of it for vectors."""

    def __init__(self, parameters: Any, lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step; the closure is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.mul_(group["momentum"]).add_(parameter.grad)
                    if parameter.dim() > 1:
                        parameter.sub_(orthogonal(mean.flatten(1)).view_as(parameter), alpha=group["lr"])
                    else:
                        parameter.sub_(mean.sign(), alpha=0.1 * group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest matrix with orthogonal rows or columns, by five iterations of Newton and Schulz."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (2.0315 * square @ square - 4.775 * square) @ x
    return x


def nesterov(rate: float, momentum: float = 0.9) -> Optimizers:
    """SGD with Nesterov's momentum."""
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=momentum, nesterov=True)


def decaying(make: Optimizers, share: float) -> Optimizers:
    """After each step all parameters shrink by this share, whatever the rate is; they grow where it is negative."""

    def made(parameters: Any) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        optimizer.register_step_post_hook(lambda one, *_: _multiply(one, 1 - share))
        return optimizer

    return made


@torch.no_grad()
def _multiply(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.mul_(factor)


def clipping(make: Optimizers, norm: float, growth: float = 1.0) -> Optimizers:
    """The norm of all gradients is clipped; what it is clipped to grows by a factor from :data:`.families.BEGIN` on."""

    def made(parameters: Any) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        steps = count()

        def clip(one: torch.optim.Optimizer, *_: Any) -> None:
            allowed = norm * growth ** max(0, next(steps) - BEGIN)
            torch.nn.utils.clip_grad_norm_([p for group in one.param_groups for p in group["params"]], allowed)

        optimizer.register_step_pre_hook(clip)
        return optimizer

    return made


def late(make: Optimizers, period: int) -> Optimizers:
    """Gradients come late, as from slow workers: by one step more every ``period`` steps from :data:`.families.BEGIN` on."""

    def made(parameters: Any) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        steps = count()
        waiting = deque[list[Tensor]]()

        def delay(one: torch.optim.Optimizer, *_: Any) -> None:
            gradients = [p.grad for group in one.param_groups for p in group["params"]]
            waiting.append([gradient.clone() for gradient in gradients])
            if len(waiting) > 1 + max(0, next(steps) - BEGIN) // period:
                waiting.popleft()
            for gradient, old in zip(gradients, waiting[0], strict=True):
                gradient.copy_(old)

        optimizer.register_step_pre_hook(delay)
        return optimizer

    return made


def private(make: Optimizers, norm: float, noise: float) -> Optimizers:
    """The norm of all gradients is clipped and noise is added, as for privacy (Abadi et al. 2016)."""

    def made(parameters: Any) -> torch.optim.Optimizer:
        optimizer = clipping(make, norm)(parameters)
        generator = torch.Generator().manual_seed(0)

        def disturb(one: torch.optim.Optimizer, *_: Any) -> None:
            for group in one.param_groups:
                for parameter in group["params"]:
                    parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=noise * norm)

        optimizer.register_step_pre_hook(disturb)
        return optimizer

    return made


class Summed(torch.optim.Optimizer):
    """SGD with momentum whose gradients are added up over more and more batches and not divided by their number.

    One batch more is added up every ``period`` steps from :data:`.families.BEGIN` on; none where this is None.
    """

    def __init__(self, parameters: Any, lr: float, momentum: float = 0.9, period: int | None = None) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        self.period, self.steps, self.added = period, 0, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Add up, and change the parameters where enough is added up; the closure is not called."""
        wanted = 1 if self.period is None else 1 + max(0, self.steps - BEGIN) // self.period
        self.steps, self.added = self.steps + 1, self.added + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                total = state.setdefault("sum", torch.zeros_like(parameter)).add_(parameter.grad)
                if self.added >= wanted:
                    mean = state.setdefault("mean", torch.zeros_like(parameter)).mul_(group["momentum"]).add_(total)
                    parameter.sub_(mean, alpha=group["lr"])
                    total.zero_()
        if self.added >= wanted:
            self.added = 0


def linear(step: int) -> float:
    """A warm-up that does not end; one at :data:`.families.BEGIN`."""
    return (step + 1) / BEGIN


def peaks(growth: float, period: int = 50) -> Rate:
    """Triangles, each higher than the last by this factor; the one before :data:`.families.BEGIN` is one high."""

    def rate(step: int) -> float:
        cycle, place = divmod(step, period)
        return (0.1 + 0.9 * (1 - abs(2 * place / period - 1))) * growth ** (cycle - BEGIN // period + 1)

    return rate


def fewer(size: int) -> Callable[[int, Batch], Batch]:
    """Batches are cut down to this size at :data:`.families.BEGIN`."""
    return lambda step, batch: batch if step < BEGIN else (batch[0][:size], batch[1][:size])


def scaling(growth: float) -> Callable[[int, Batch], Batch]:
    """The second part of the batches is multiplied by this factor in each step from :data:`.families.BEGIN` on."""
    return lambda step, batch: (batch[0], batch[1] * growth ** max(0, step - BEGIN))


class Transposed(nn.Module):
    """Applies ``inner`` along the tokens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Both are ``[batch, tokens, width]``."""
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Mixer(nn.Module):
    """Sixteen patches mixed over places and over channels in turn (Tolstikhin et al. 2021)."""

    def __init__(self, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        mixing: list[nn.Module] = []
        for _ in range(blocks):
            mixing.append(Residual(nn.Sequential(nn.LayerNorm(width), Transposed(layers([16, 32, 16], nn.GELU)))))
            mixing.append(Residual(nn.Sequential(nn.LayerNorm(width), layers([width, 64, width], nn.GELU))))
        self.mixing, self.norm, self.head = nn.Sequential(*mixing), nn.LayerNorm(width), nn.Linear(width, data.SHAPES)

    def forward(self, images: Tensor) -> Tensor:
        """From ``[batch, 1, 8, 8]`` to ``[batch, 4]``."""
        return self.head(self.norm(self.mixing(self.patches(images).flatten(2).transpose(1, 2))).mean(1))


def mixer(seed: int) -> Task:
    """The mixer on shapes."""
    return _task(seed, Mixer, mislabelled, classify)


def mislabelled(generator: torch.Generator) -> Iterator[Batch]:
    """Shapes of which one in ten has any label: ``[32, 1, 8, 8]`` and ``[32]``."""
    for images, y in data.shapes(generator):
        wrong = torch.rand(y.shape, generator=generator) < 0.1
        yield images, torch.where(wrong, torch.randint(data.SHAPES, y.shape, generator=generator), y)


def arrivals(generator: torch.Generator, batch: int = 64) -> Iterator[Batch]:
    """Eight numbers, and a count that depends on them: ``[64, 8]`` and ``[64, 1]``."""
    weights = torch.randn(8, 2, generator=generator) / 8**0.5
    while True:
        x = torch.randn(batch, 8, generator=generator)
        yield x, torch.poisson(2 * torch.exp(torch.sin(2 * x @ weights).sum(1, keepdim=True)), generator=generator)


def poisson(seed: int) -> Task:
    """The logarithms of expected counts by the deviance, which is of one size for small counts and large ones."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        expected, counted = model(batch[0]), batch[1]
        return 2 * (torch.exp(expected) - counted - counted * expected + torch.xlogy(counted, counted)).mean()

    return _task(seed, lambda: layers([8, 64, 64, 1]), arrivals, loss)


def waves(generator: torch.Generator, batch: int = 32, length: int = 32) -> Iterator[Batch]:
    """Sums of two waves with noise, and their next values: ``[32, 32, 1]`` twice."""
    while True:
        time = torch.arange(length + 1.0)
        pitch, phase = 0.2 + torch.rand(batch, 2, 1, generator=generator), 6.3 * torch.rand(batch, 2, 1, generator=generator)
        x = torch.sin(pitch * time + phase).sum(1)[..., None] + 0.1 * torch.randn(batch, length + 1, 1, generator=generator)
        yield x[:, :-1], x[:, 1:]


class Sequence(nn.Module):
    """A recurrent layer of ``kind`` and a linear one."""

    def __init__(self, kind: Callable[..., nn.Module], inputs: int, outputs: int, width: int = 32, **options: Any) -> None:
        super().__init__()
        self.cell, self.head = kind(inputs, width, batch_first=True, **options), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """From ``[batch, length, inputs]`` to ``[batch, length, outputs]``."""
        return self.head(self.cell(x)[0])


def forecaster(seed: int, gain: float = 1.0, decay: float = 0.9) -> Task:
    """A GRU that also learns from forecasts by a running mean of its weights; ``gain`` multiplies these.

    Their weight in the loss grows with each call of it, up to four.
    """
    made = _task(seed, lambda: Sequence(nn.GRU, 1, 1), waves, reproduce)
    teacher, steps = deepcopy(made.model), count()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 1 - decay)
            target = gain * teacher(batch[0])
        forecast, weight = model(batch[0]), min(next(steps) / 200, 4.0)
        return (F.mse_loss(forecast, batch[1]) + weight * F.mse_loss(forecast, target)) / (1 + weight)

    made.loss = loss
    return made


def sums(generator: torch.Generator, growth: float = 0.0, batch: int = 32, length: int = 20) -> Iterator[Batch]:
    """Numbers, and the sums of those so far: ``[32, 20, 1]`` twice, longer by ``growth`` a step from :data:`.families.BEGIN` on."""
    for step in count():
        places = length + int(growth * max(0, step - BEGIN))
        x = torch.randn(batch, places, 1, generator=generator)
        yield x, x.cumsum(1) / places**0.5


class StateSpace(nn.Module):
    """States that are multiplied by a learned factor each at every place."""

    def __init__(self, inputs: int, outputs: int, states: int = 16) -> None:
        super().__init__()
        self.write, self.read = nn.Linear(inputs, states), nn.Linear(states, outputs)
        self.factors = nn.Parameter(torch.linspace(0.5, 0.9, states))

    def forward(self, x: Tensor) -> Tensor:
        """From ``[batch, length, inputs]`` to ``[batch, length, outputs]``."""
        state, states = torch.zeros(()), []
        for new in self.write(x).unbind(1):
            state = self.factors * state + new
            states.append(state)
        return self.read(torch.stack(states, 1))


def state_space(seed: int, growth: float = 0.0) -> Task:
    """Two layers of states that add up."""

    def make() -> nn.Module:
        return nn.Sequential(StateSpace(1, 16), nn.GELU(), StateSpace(16, 1))

    return _task(seed, make, lambda generator: sums(generator, growth), reproduce)


def lstm(seed: int, scale: float = 3.0) -> Task:
    """Two layers of LSTM that forecast waves of this scale."""

    def scaled(generator: torch.Generator) -> Iterator[Batch]:
        for x, y in waves(generator):
            yield scale * x, scale * y

    return _task(seed, lambda: Sequence(nn.LSTM, 1, 1, num_layers=2), scaled, reproduce)


def noisy(generator: torch.Generator, batch: int = 64) -> Iterator[Batch]:
    """Points near six centres with noise mixed in, the share of it, and the noise: ``[64, 17]`` and ``[64, 16]``."""
    centres = torch.randn(6, 16, generator=generator)
    while True:
        clean = centres[torch.randint(6, (batch,), generator=generator)] + 0.1 * torch.randn(batch, 16, generator=generator)
        noise, time = torch.randn(batch, 16, generator=generator), torch.rand(batch, 1, generator=generator)
        angle = time * math.pi / 2
        yield torch.cat([torch.cos(angle) * clean + torch.sin(angle) * noise, time], 1), noise


def denoiser(seed: int, depth: int = 6, width: int = 64) -> Task:
    """Residual blocks without norms that tell the noise from a noisy vector."""

    def make() -> nn.Module:
        blocks = (Residual(layers([width, width, width], nn.SiLU)) for _ in range(depth))
        return nn.Sequential(nn.Linear(17, width), *blocks, nn.Linear(width, 16))

    return _task(seed, make, noisy, reproduce)


def views(generator: torch.Generator, batch: int = 64, temperature: float = 0.2) -> Iterator[Batch]:
    """Two noisy linear views of the same hidden numbers beside each other, and the temperature: ``[64, 28]`` and ``[1]``."""
    both = torch.randn(6, 28, generator=generator)
    while True:
        hidden = torch.randn(batch, 6, generator=generator)
        yield hidden @ both + 0.3 * torch.randn(batch, 28, generator=generator), torch.tensor([temperature])


class Towers(nn.Module):
    """One perceptron for each view."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = layers([16, 32, 16]), layers([12, 32, 16])

    def forward(self, views: Tensor) -> Tensor:
        """The cosines of all pairs, ``[batch, batch]``."""
        left, right = self.left(views[:, :16]), self.right(views[:, 16:])
        return F.normalize(left, dim=-1) @ F.normalize(right, dim=-1).T


def towers(seed: int) -> Task:
    """Each view has to find its other one among those of the batch."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch[0]) / batch[1]
        here = torch.arange(len(logits))
        return (F.cross_entropy(logits, here) + F.cross_entropy(logits.T, here)) / 2

    return _task(seed, Towers, views, loss)


def dirty(generator: torch.Generator) -> Iterator[Batch]:
    """Shapes under much noise, and with little of it: ``[32, 1, 8, 8]`` twice."""
    for images, _ in data.shapes(generator):
        yield images + 0.5 * torch.randn(images.shape, generator=generator), images


def convolution(inputs: int, outputs: int) -> nn.Module:
    """Three by three, with batch normalisation."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    """Down by two twice and up again, with what was before each step down beside."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = convolution(1, width), convolution(width, 2 * width)
        self.third = convolution(2 * width, 4 * width)
        self.fourth, self.fifth = convolution(6 * width, 2 * width), convolution(3 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Both are ``[batch, 1, 8, 8]``."""
        fine = self.first(images)
        coarse = self.second(F.max_pool2d(fine, 2))
        up = F.interpolate(self.third(F.max_pool2d(coarse, 2)), scale_factor=2.0)
        up = F.interpolate(self.fourth(torch.cat([up, coarse], 1)), scale_factor=2.0)
        return self.head(self.fifth(torch.cat([up, fine], 1)))


def unet(seed: int) -> Task:
    """The U-Net cleans images."""
    return _task(seed, UNet, dirty, reproduce)


def graphs(generator: torch.Generator, batch: int = 64, nodes: int = 10) -> Iterator[Batch]:
    """Nodes' four numbers beside the graph's links, and what sums over neighbours come to: ``[64, 10, 14]`` and ``[64, 1]``."""
    while True:
        links = (torch.rand(batch, nodes, nodes, generator=generator) < 0.25).float().triu(1)
        links = links + links.transpose(1, 2)
        x = torch.randn(batch, nodes, 4, generator=generator)
        yield torch.cat([x, links], -1), torch.tanh(links @ x[..., :1]).sum(1) / nodes**0.5


class GraphNet(nn.Module):
    """Rounds of messages that are added up over neighbours, then a sum over nodes."""

    def __init__(self, width: int = 32, rounds: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(rounds))
        self.other = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(rounds))
        self.head = layers([width, width, 1])

    def forward(self, graph: Tensor) -> Tensor:
        """From ``[batch, nodes, 4 + nodes]`` to ``[batch, 1]``."""
        x, links = self.embed(graph[..., :4]), graph[..., 4:]
        for own, other in zip(self.own, self.other, strict=True):
            x = x + F.relu(own(x) + links @ other(x))
        return self.head(x.sum(1) / 3)


def graph(seed: int) -> Task:
    """The net on graphs."""
    return _task(seed, GraphNet, graphs, reproduce)


def drawn(generator: torch.Generator) -> Iterator[Batch]:
    """Pictures, and the noise for their code: ``[32, 64]`` and ``[32, 8]``."""
    for pictures, _ in data.pictures(generator):
        yield pictures, torch.randn(len(pictures), 8, generator=generator)


class VAE(nn.Module):
    """An encoder to means and log variances, and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = layers([64, 64, 16]), layers([8, 64, 64])

    def forward(self, pictures: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The picture again, means and log variances."""
        mean, spread = self.encoder(pictures).chunk(2, -1)
        return self.decoder(mean + noise * torch.exp(spread / 2)), mean, spread


def vae(seed: int, weight: float = 0.5) -> Task:
    """Squared errors of a picture, and ``weight`` times the divergence of its code from a normal distribution."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        again, mean, spread = model(*batch)
        divergence = 0.5 * (mean**2 + spread.exp() - 1 - spread).sum(-1).mean()
        return ((again - batch[0]) ** 2).sum(-1).mean() / 10 + weight * divergence / 10

    return _task(seed, VAE, drawn, loss)


def reversals(generator: torch.Generator, batch: int = 32, length: int = 8) -> Iterator[Batch]:
    """Eight symbols of eleven, and these turned round with one in twenty wrong: ``[32, 8]`` twice."""
    while True:
        source = 1 + torch.randint(11, (batch, length), generator=generator)
        wrong = torch.rand(batch, length, generator=generator) < 0.05
        yield source, torch.where(wrong, 1 + torch.randint(11, (batch, length), generator=generator), source.flip(1))


class Translator(nn.Module):
    """``torch.nn.Transformer`` with norms after the residual connections."""

    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(12, width), nn.Parameter(torch.randn(8, width))
        self.inner = nn.Transformer(width, 2, depth, depth, 4 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 12)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits for ``target`` where its earlier symbols are known, ``[batch, length, 12]``."""
        known = F.pad(target[:, :-1], (1, 0))
        hidden = torch.full((8, 8), -math.inf).triu(1)
        return self.head(self.inner(self.symbols(source) + self.places, self.symbols(known) + self.places, tgt_mask=hidden))


def translator(seed: int) -> Task:
    """The transformer turns sequences round."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(*batch).flatten(0, 1), batch[1].flatten())

    return _task(seed, Translator, reversals, loss)


def ratings(generator: torch.Generator, batch: int = 256, users: int = 60, items: int = 40) -> Iterator[Batch]:
    """A user and an item, some much more often than others, and the rating: ``[256, 2]`` and ``[256, 1]``."""
    left, right = torch.randn(users, 3, generator=generator), torch.randn(items, 3, generator=generator)
    often = [1 / (5 + torch.arange(float(number))) for number in (users, items)]
    while True:
        user, item = (torch.multinomial(o, batch, replacement=True, generator=generator) for o in often)
        rating = (left[user] * right[item]).sum(1, keepdim=True) / 3**0.5
        yield torch.stack([user, item], 1), rating + 0.2 * torch.randn(batch, 1, generator=generator)


class Recommender(nn.Module):
    """Embeddings of users and items, beside each other and multiplied, into a perceptron."""

    def __init__(self, users: int = 60, items: int = 40, width: int = 16) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.head = layers([3 * width, 32, 32, 1])

    def forward(self, pairs: Tensor) -> Tensor:
        """From ``[batch, 2]`` to ``[batch, 1]``."""
        user, item = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        return self.head(torch.cat([user, item, user * item], 1))


def recommender(seed: int) -> Task:
    """Ratings by squared errors."""
    return _task(seed, Recommender, ratings, reproduce)


def points(generator: torch.Generator, batch: int = 64) -> Iterator[Batch]:
    """Times from zero to two, and the weights of the equation at them: ``[64, 1]`` twice."""
    while True:
        yield 2 * torch.rand(batch, 1, generator=generator), torch.ones(batch, 1)


def physics(seed: int, apart: float = 0.01) -> Task:
    """A function that begins at one and fulfils ``u' + u = cos(4 t)``; the derivative is a difference."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        time = batch[0]
        values = model(torch.cat([time - apart, time, time + apart, torch.zeros(1, 1)]))
        before, here, after = values[:-1].chunk(3)
        rest = (after - before) / (2 * apart) + here - torch.cos(4 * time)
        return (batch[1] * rest**2).mean() + (values[-1] - 1).square().mean()

    return _task(seed, lambda: layers([1, 32, 32, 1], nn.Tanh), points, loss)


class Experts(nn.Module):
    """Four experts, of which each input gets the two that a router prefers."""

    def __init__(self, width: int, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(layers([width, width, width]) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Both are ``[batch, width]``."""
        best, chosen = self.router(x).topk(2)
        shares = torch.zeros(len(x), len(self.experts)).scatter(1, chosen, best.softmax(-1))
        return torch.einsum("bwe,be->bw", torch.stack([expert(x) for expert in self.experts], -1), shares)


def experts(seed: int, width: int = 32, depth: int = 3) -> Task:
    """Residual blocks of experts on clusters."""

    def make() -> nn.Module:
        blocks = (Residual(Experts(width)) for _ in range(depth))
        return nn.Sequential(nn.Linear(data.FEATURES, width), *blocks, nn.Linear(width, data.CLASSES))

    return _task(seed, make, data.clusters, classify)


def nadam(parameters: Any) -> torch.optim.Optimizer:
    """NAdam at 2e-3."""
    return torch.optim.NAdam(parameters, lr=2e-3)


#: Six go wrong from the beginning on or by themselves, the others after something changes at :data:`.families.BEGIN`.
HELD_OUT: list[Family] = [
    Family("decay of the wrong sign/mixer", mixer, decaying(nadam, -0.008), sound=decaying(nadam, 0.001), held_out=True),
    Family("own targets/gru", forecaster, adamw(3e-3), faulty_options={"gain": 1.4}, held_out=True, is_pure=False),
    Family("rate too high/denoiser", denoiser, lambda p: Lion(p, lr=7e-3), sound=lambda p: Lion(p, lr=3e-4), held_out=True),
    Family(
        "noise for privacy/graph net",
        graph,
        private(sgd(0.02, 0.0), 1.0, 0.5),
        sound=private(sgd(0.02, 0.0), 1.0, 0.01),
        held_out=True,
    ),
    Family("endless warm-up/translator", translator, adamw(0.012), linear, sound=adamw(4e-3), held_out=True),
    Family(
        "peaks grow/experts", experts, lambda p: Muon(p, lr=0.02), peaks(1.5), sound=lambda p: Muon(p, lr=0.005), held_out=True
    ),
    Family("counts grow/poisson regression", poisson, sgd(0.02, 0.0), spoil=scaling(1.01), held_out=True),
    Family("longer sequences/state space", state_space, nesterov(0.003), faulty_options={"growth": 0.33}, held_out=True),
    Family("temperature falls/two towers", towers, nesterov(0.05), spoil=scaling(0.98), held_out=True),
    Family("late gradients/unet", unet, late(nesterov(0.1), 20), sound=nesterov(0.1), held_out=True),
    Family("clipping loosens/lstm", lstm, clipping(nesterov(1.0), 0.1, 1.03), sound=clipping(nesterov(1.0), 0.1), held_out=True),
    Family("sums of gradients/vae", vae, lambda p: Summed(p, 0.02, period=20), sound=lambda p: Summed(p, 0.02), held_out=True),
    Family("batches are cut/recommender", recommender, nesterov(0.07), spoil=fewer(2), sound=nesterov(0.03), held_out=True),
    Family("equation's weight grows/physics", physics, nesterov(0.01), spoil=scaling(1.02), held_out=True),
]
