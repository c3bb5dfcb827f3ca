"""Sound trainings of ten kinds that look unusual."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..faults.training import last
from .case import Case, Watch
from .data_localisers import batches, digits, sentences, shapes, spirals, step_and_log, topics


class LoRALinear(nn.Module):
    """A frozen linear layer plus a product of two thin matrices; the second one begins at zero."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """The output of the frozen layer plus that of the thin matrices."""
        out: Tensor = self.base(x) + 2 * (x @ self.down.T) @ self.up.T
        return out


def lora(watch: Watch, seed: int, healed: bool) -> float:
    """A network that knows digits learns them in negative by low-rank changes of its frozen layers."""
    torch.manual_seed(seed)
    images, labels = digits(3000)
    x = ((images - 0.17) / 0.28).flatten(1)
    first, second, third = nn.Linear(100, 96), nn.Linear(96, 96), nn.Linear(96, 10)
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)
    before = torch.optim.Adam(model.parameters(), lr=2e-3)
    for inputs, targets in batches(x, labels, 64, 250):
        before.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        before.step()
    model.requires_grad_(False)
    for place, layer in ((0, first), (2, second), (4, third)):
        model[place] = LoRALinear(layer)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.0)
    monitor, losses = watch(model, optimizer), []
    for inputs, targets in batches(-x, labels, 64, 300):
        loss = F.cross_entropy(model(inputs), targets)
        losses.append(step_and_log(monitor, optimizer, loss))
    return last(losses)


class Experts(nn.Module):
    """Four small networks; a router picks two of them for each point."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(2, 32)
        self.router = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(4))
        self.norm = nn.LayerNorm(32)
        self.leave = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the arms, and how unevenly the router spreads the points."""
        h = torch.tanh(self.enter(x))
        chances = self.router(h).softmax(1)
        weights, picked = chances.topk(2, dim=1)
        weights = weights / weights.sum(1, keepdim=True)
        mixed = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows, slot = (picked == number).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, rows, weights[rows, slot, None] * expert(h[rows]))
        share = F.one_hot(picked[:, 0], 4).float().mean(0)
        return self.leave(self.norm(h + mixed)), 4 * (share * chances.mean(0)).sum()


def mixture_of_experts(watch: Watch, seed: int, healed: bool) -> float:
    """Three spirals learned by experts with top-two routing and a term that balances their load."""
    torch.manual_seed(seed)
    points, arms = spirals(4000)
    model = Experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    monitor, losses = watch(model, optimizer), []
    for x, y in batches(points, arms, 128, 350):
        output, balance = model(x)
        right = F.cross_entropy(output, y)
        loss = right + 0.02 * balance
        step_and_log(monitor, optimizer, loss)
        losses.append(right.detach())
    return last(losses)


class Policy(nn.Module):
    """The chances of a step to the left or to the right."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, state: Tensor) -> torch.distributions.Categorical:
        """The distribution of the steps."""
        return torch.distributions.Categorical(logits=self.net(state))


def reinforce(watch: Watch, seed: int, healed: bool) -> float:
    """Policy gradients with normalised returns for a cart in wind that has to reach a spot; the measure is the mean distance."""
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    monitor, distances = watch(policy, optimizer), []
    for _episode in range(150):
        place, speed, goal = torch.randn(24), torch.zeros(24), torch.randn(24)
        logs, rewards = [], []
        for _ in range(20):
            chances = policy(torch.stack([place, speed, goal, goal - place], 1))
            action = chances.sample()
            logs.append(chances.log_prob(action))
            speed = 0.7 * speed + 0.15 * (2 * action - 1) + 0.05 * torch.randn(24)
            place = place + speed
            rewards.append(-(place - goal).abs())
        returns: list[Tensor] = []
        total = torch.zeros(24)
        for reward in reversed(rewards):
            total = reward + 0.9 * total
            returns.insert(0, total)
        gained = torch.stack(returns)
        advantage = (gained - gained.mean(1, keepdim=True)) / (gained.std() + 1e-8)
        loss = -(torch.stack(logs) * advantage).mean()
        step_and_log(monitor, optimizer, loss)
        distances.append(-rewards[-1].mean())
    return last(distances)


class Motion(nn.Module):
    """The place of a mass on a spring as a function of time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, time: Tensor) -> Tensor:
        """The place at each time."""
        out: Tensor = self.net(2 * time / 3 - 1)
        return out


def physics_informed(watch: Watch, seed: int, healed: bool) -> float:
    """A damped swing from its equation and its start; the measure is the mean error against the exact solution."""
    torch.manual_seed(seed)
    model = Motion()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = watch(model, optimizer)
    for _step in range(400):
        time = (3 * torch.rand(64, 1)).requires_grad_()
        place = model(time)
        speed = torch.autograd.grad(place.sum(), time, create_graph=True)[0]
        change = torch.autograd.grad(speed.sum(), time, create_graph=True)[0]
        start = torch.zeros(1, 1, requires_grad=True)
        begin = model(start)
        begin_speed = torch.autograd.grad(begin.sum(), start, create_graph=True)[0]
        residual = change + 0.6 * speed + 4 * place
        loss = 0.1 * residual.square().mean() + 5 * (begin - 1).square().sum() + 0.5 * begin_speed.square().sum()
        step_and_log(monitor, optimizer, loss)
    time, pace = torch.linspace(0, 3, 100)[:, None], (4 - 0.09) ** 0.5
    exact = torch.exp(-0.3 * time) * (torch.cos(pace * time) + 0.3 / pace * torch.sin(pace * time))
    with torch.no_grad():
        return float((model(time) - exact).abs().mean())


def moons(count: int) -> Tensor:
    """Points of two half circles that reach into each other, with noise, about the origin."""
    angle, second = torch.pi * torch.rand(count), torch.rand(count) < 0.5
    across = torch.where(second, 1 - angle.cos(), angle.cos()) - 0.5
    up = torch.where(second, 0.5 - angle.sin(), angle.sin()) - 0.25
    return torch.stack([across / 0.87, up / 0.5], 1) + 0.06 * torch.randn(count, 2)


class Coupling(nn.Module):
    """One coordinate, scaled and moved by a network of the other."""

    def __init__(self, kept: int) -> None:
        super().__init__()
        self.kept = kept
        final = nn.Linear(32, 2)
        nn.init.zeros_(final.weight)
        nn.init.zeros_(final.bias)
        self.net = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), final)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The new points, and the logarithm of the scale."""
        kept, moved = x[:, self.kept], x[:, 1 - self.kept]
        scale, shift = self.net(kept[:, None]).unbind(1)
        scale = torch.tanh(scale)
        moved = moved * scale.exp() + shift
        pair = (kept, moved) if self.kept == 0 else (moved, kept)
        return torch.stack(pair, 1), scale


class Flow(nn.Module):
    """Six couplings from data to a normal distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(number % 2) for number in range(6))

    def forward(self, x: Tensor) -> Tensor:
        """The log likelihood of each point."""
        volume = torch.zeros(len(x))
        for coupling in self.couplings:
            x, scale = coupling(x)
            volume = volume + scale
        return volume - 0.5 * x.square().sum(1) - math.log(2 * math.pi)


def normalising_flow(watch: Watch, seed: int, healed: bool) -> float:
    """A flow of couplings whose last layers begin at zero, fitted to two moons by likelihood; the loss may go below zero."""
    torch.manual_seed(seed)
    model = Flow()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor, losses = watch(model, optimizer), []
    for _step in range(400):
        loss = -model(moons(256)).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 20.0)
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
    return last(losses)


class NoiseNet(nn.Module):
    """The noise in a point of the plane, from the point and the time."""

    paces: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 64), nn.SiLU())
        self.enter = nn.Linear(2, 64)
        self.middle = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.leave = nn.Linear(64, 2)
        self.register_buffer("paces", 2.0 ** torch.arange(8))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """The noise in each point."""
        angle = time[:, None] * self.paces
        h = self.enter(x) + self.time(torch.cat([angle.sin(), angle.cos()], 1))
        for layer in self.middle:
            h = h + F.silu(layer(h))
        out: Tensor = self.leave(h)
        return out


def diffusion(watch: Watch, seed: int, healed: bool) -> float:
    """A denoiser of two moons, with an average of the weights; most of the noise cannot be predicted, so the loss stays high."""
    torch.manual_seed(seed)
    model, average = NoiseNet(), NoiseNet()
    average.load_state_dict(model.state_dict())
    average.requires_grad_(False)
    kept = torch.cumprod(1 - torch.linspace(1e-3, 0.12, 50), 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    monitor, losses = watch(model, optimizer), []
    for _step in range(400):
        clean, noise, time = moons(128), torch.randn(128, 2), torch.randint(50, (128,))
        share = kept[time][:, None]
        loss = F.mse_loss(model(share.sqrt() * clean + (1 - share).sqrt() * noise, time / 50), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.02)
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
    return last(losses)


def wide(width: int) -> nn.Sequential:
    """A network for the topic of a text."""
    return nn.Sequential(nn.Linear(300, width), nn.ReLU(), nn.Linear(width, 8))


def distillation(watch: Watch, seed: int, healed: bool) -> float:
    """A small student of a frozen teacher: the divergence of softened chances and a little of the labels; the measure is the error."""
    torch.manual_seed(seed)
    texts, labels = topics(4000)
    teacher, student = wide(128), wide(12)
    before = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for x, y in batches(texts, labels, 128, 150):
        before.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        before.step()
    teacher.eval().requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=4e-3)
    monitor, wrong = watch(student, optimizer), []
    for x, y in batches(texts, labels, 64, 400):
        with torch.no_grad():
            soft = (teacher(x) / 4).softmax(1)
        logits = student(x)
        divergence = 16 * F.kl_div((logits / 4).log_softmax(1), soft, reduction="batchmean")
        loss = 0.8 * divergence + 0.2 * F.cross_entropy(logits, y)
        step_and_log(monitor, optimizer, loss)
        wrong.append((logits.argmax(1) != y).float().mean())
    return last(wrong)


class Likes(nn.Module):
    """How much a user likes a film, by a vector and an offset of each, with sparse gradients."""

    def __init__(self, users: int, films: int) -> None:
        super().__init__()
        self.user, self.film = nn.Embedding(users, 8, sparse=True), nn.Embedding(films, 8, sparse=True)
        self.offset = nn.Embedding(films, 1, sparse=True)
        for vectors in (self.user, self.film):
            nn.init.normal_(vectors.weight, std=0.1)
        nn.init.zeros_(self.offset.weight)

    def forward(self, users: Tensor, films: Tensor) -> Tensor:
        """How much each user likes the film."""
        out: Tensor = (self.user(users) * self.film(films)).sum(1) + self.offset(films)[:, 0]
        return out


def recommender(watch: Watch, seed: int, healed: bool) -> float:
    """Films that users saw, a few of them often and most seldom, against films drawn at random, with sparse Adam."""
    torch.manual_seed(seed)
    users, films = 400, 600
    taste, kind = torch.randn(users, 3), torch.randn(films, 3)
    chance = (1.2 * taste @ kind.T + 1.5 * torch.randn(films)).softmax(1)
    seen = torch.multinomial(chance, 40, replacement=True)
    model = Likes(users, films)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.02)
    monitor, losses = watch(model, optimizer), []
    for _step in range(400):
        who = torch.randint(users, (256,))
        liked, other = seen[who, torch.randint(40, (256,))], torch.randint(films, (256,))
        loss = -F.logsigmoid(model(who, liked) - model(who, other)).mean()
        losses.append(step_and_log(monitor, optimizer, loss))
    return last(losses)


class Coloured(nn.Module):
    """A convolutional network with group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16)
        self.conv2, self.norm2 = nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32)
        self.fc = nn.Linear(32 * 9, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the shapes."""
        h = F.relu(self.norm1(self.conv1(x)))
        h = F.relu(self.norm2(self.conv2(h)))
        out: Tensor = self.fc(h.flatten(1))
        return out


def sharpness_aware(watch: Watch, seed: int, healed: bool) -> float:
    """Two passes for each step: one climbs to worse weights nearby, one gives the gradient there, which moves the original weights."""
    torch.manual_seed(seed)
    images, labels = shapes(2500)
    model = Coloured()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    monitor, losses = watch(model, optimizer), []
    for x, y in batches((images - 0.22) / 0.28, labels, 64, 250):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            slopes = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.stack([slope.norm() for slope in slopes]).norm()
            climbs = [0.05 * slope / (norm + 1e-12) for slope in slopes]
            for parameter, climb in zip(model.parameters(), climbs, strict=True):
                parameter.add_(climb)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter, climb in zip(model.parameters(), climbs, strict=True):
                parameter.sub_(climb)
        optimizer.step()
        optimizer.zero_grad()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
    return last(losses)


class TinyGPT(nn.Module):
    """A transformer for the next word, whose last layer shares the weights of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(24, 32), nn.Embedding(16, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 96, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 24, bias=False)
        nn.init.normal_(self.embed.weight, std=0.05)
        nn.init.normal_(self.place.weight, std=0.05)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        """Logits of the next word at each place."""
        length = words.shape[1]
        h = self.embed(words) + self.place(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        out: Tensor = self.head(self.norm(self.body(h, mask=mask, is_causal=True)))
        return out


def accumulated(watch: Watch, seed: int, healed: bool) -> float:
    """A small language model: four passes for a step, a bound on the gradient, a warm-up and a cosine to a rate of zero."""
    torch.manual_seed(seed)
    text = sentences(3000)
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / 120))
    )
    monitor, losses = watch(model, optimizer), []
    for _step in range(120):
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for _ in range(4):
            rows = text[torch.randint(3000, (16,))]
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()) / 4
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        monitor.log_scalar("loss", total)
        losses.append(total)
    return last(losses)


CASES: list[Case] = [
    Case(
        name="healthy-lora/digits-in-negative",
        judge="examples",
        source="https://place55.com/2023/12/13/implementing-lora-from-scratch/",
        rules=(),
        run=lora,
    ),
    Case(
        name="healthy-mixture-of-experts/spirals",
        judge="examples",
        source="https://soveshmohapatra.com/projects/moe-live-code",
        rules=(),
        run=mixture_of_experts,
    ),
    Case(
        name="healthy-reinforce/cart-in-wind",
        judge="examples",
        source="https://datascience.stackexchange.com/questions/57114/understanding-reinforce-loss",
        rules=(),
        run=reinforce,
    ),
    Case(
        name="healthy-physics-informed/damped-swing",
        judge="examples",
        source="https://allamaprabhuani.github.io/tutorials/05-pinns/",
        rules=(),
        run=physics_informed,
    ),
    Case(
        name="healthy-normalising-flow/moons",
        judge="examples",
        source="https://notesoncomputing.com/normalizing-flows/two-moons",
        rules=(),
        run=normalising_flow,
    ),
    Case(
        name="healthy-diffusion/moons",
        judge="examples",
        source="https://deeplearning.edutva.com/projects-diffusion",
        rules=(),
        run=diffusion,
    ),
    Case(
        name="healthy-distillation/topics",
        judge="examples",
        source="https://gist.github.com/VictorSanh/db90644aae5094654db87f9769c2e5ae",
        rules=(),
        run=distillation,
    ),
    Case(
        name="healthy-sparse-recommender/films",
        judge="examples",
        source="https://docs.pytorch.org/docs/stable//generated/torch.optim.SparseAdam.html",
        rules=(),
        run=recommender,
    ),
    Case(
        name="healthy-sharpness-aware/shapes-cnn",
        judge="examples",
        source="https://github.com/davda54/sam/issues/8",
        rules=(),
        run=sharpness_aware,
    ),
    Case(
        name="healthy-accumulated-and-clipped/small-gpt",
        judge="examples",
        source="https://kader-xai.github.io/mini-courses/transformers/lesson08.html",
        rules=(),
        run=accumulated,
    ),
]
