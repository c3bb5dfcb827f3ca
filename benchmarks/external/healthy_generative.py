"""Sound trainings of nets that make things: codes and images, images from noise, points by steps and by a flow."""

from __future__ import annotations

import math
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Watch
from .data_healthy import EXAMPLES, batches, digits, healthy, last, moons


class VAE(nn.Module):
    """An image to a mean and a log-variance, and a sample of these back to an image."""

    def __init__(self, pixels: int = 256, hidden: int = 96, codes: int = 8) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(pixels, hidden), nn.Linear(hidden, codes), nn.Linear(hidden, codes)
        self.fc3, self.fc4 = nn.Linear(codes, hidden), nn.Linear(hidden, pixels)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The image again, and the distribution of its code."""
        hidden = F.relu(self.fc1(x))
        mean, log_variance = self.fc21(hidden), self.fc22(hidden)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return torch.sigmoid(self.fc4(F.relu(self.fc3(code)))), mean, log_variance


def vae(watch: Watch, seed: int, healed: bool) -> float:
    """Both terms are summed over pixels, codes and images, as the example has it, so the loss is in the thousands."""
    torch.manual_seed(seed)
    images = digits(3000, noise=0.0)[0].flatten(1)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = watch(model, optimizer)
    losses = []
    for epoch in range(20):
        model.train()
        for (x,) in batches(20, 128, images[:2560]):
            optimizer.zero_grad()
            again, mean, log_variance = model(x)
            divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
            loss = F.binary_cross_entropy(again, x, reduction="sum") + divergence
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            losses.append(loss.detach())
            optimizer.step()
        if epoch % 5 == 4:
            model.eval()
            with monitor.no_monitor(), torch.no_grad():
                model(images[2560:])
    return last(losses)


def small_weights(module: nn.Module) -> None:
    """The start of a DCGAN: matrices with deviation 0.02."""
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def dcgan(watch: Watch, seed: int, healed: bool) -> float:
    """A generator and a discriminator, each with its own Adam and a monitor; what the fake images give is detached first."""
    torch.manual_seed(seed)
    images = 2 * digits(1280, noise=0.02)[0] - 1
    generator = nn.Sequential(
        *(nn.ConvTranspose2d(32, 32, 4, 1, 0, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False), nn.Tanh()),
    )
    discriminator = nn.Sequential(
        *(nn.Conv2d(1, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(16, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(32, 1, 4, 1, 0, bias=False), nn.Sigmoid(), nn.Flatten(0)),
    )
    generator.apply(small_weights)
    discriminator.apply(small_weights)
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion = nn.BCELoss()
    monitor_g, monitor_d = watch(generator, opt_g), watch(discriminator, opt_d)
    ones, zeros = torch.ones(32), torch.zeros(32)
    losses = []
    for (real,) in batches(300, 32, images):
        discriminator.zero_grad()
        loss_real = criterion(discriminator(real), ones)
        loss_real.backward()
        fake = generator(torch.randn(32, 32, 1, 1))
        loss_fake = criterion(discriminator(fake.detach()), zeros)
        loss_fake.backward()
        monitor_d.log_scalar("loss", (loss_real + loss_fake).detach())
        opt_d.step()
        generator.zero_grad()
        loss = criterion(discriminator(fake), ones)
        loss.backward()
        monitor_g.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        opt_g.step()
    return last(losses)


class Denoiser(nn.Module):
    """The noise in a point, from the point and the time."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.register_buffer("rates", torch.exp(torch.linspace(0, math.log(100), 8)))
        self.net = nn.Sequential(nn.Linear(18, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """The noise."""
        angles = time.unsqueeze(1) * self.get_buffer("rates")
        out: Tensor = self.net(torch.cat([x, angles.sin(), angles.cos()], 1))
        return out


def diffusion(watch: Watch, seed: int, healed: bool) -> float:
    """A net finds the noise that was added to points at random times; a moving mean of its weights is kept for sampling."""
    torch.manual_seed(seed)
    points = 2 * moons(4000)
    kept = (1 - torch.linspace(1e-4, 0.1, 100)).cumprod(0)
    model = Denoiser()
    mean = deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = watch(model, optimizer)
    losses = []
    for (x,) in batches(400, 128, points):
        time = torch.randint(100, (len(x),))
        noise, share = torch.randn_like(x), kept[time].unsqueeze(1)
        optimizer.zero_grad()
        loss = F.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, time / 100), noise)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(mean.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
    return last(losses)


class Coupling(nn.Module):
    """One coordinate is scaled and moved by what a net makes of the other one; at first nothing changes."""

    def __init__(self, flipped: bool, width: int = 32) -> None:
        super().__init__()
        self.flipped = flipped
        self.net = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
        for parameter in self.net[4].parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The new points, and the logarithm of what volumes grow by."""
        fixed, moved = (x[:, 1:], x[:, :1]) if self.flipped else (x[:, :1], x[:, 1:])
        scale, shift = self.net(fixed).chunk(2, 1)
        scale = scale.tanh()
        moved = moved * scale.exp() + shift
        return torch.cat([moved, fixed] if self.flipped else [fixed, moved], 1), scale.squeeze(1)


class Flow(nn.Module):
    """Six coupling layers, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Coupling(bool(index % 2)) for index in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        """The logarithm of each point's likelihood."""
        volume = torch.zeros(len(x))
        for layer in self.layers:
            x, grown = layer(x)
            volume = volume + grown
        return volume - 0.5 * x.square().sum(1) - math.log(2 * math.pi)


def flow(watch: Watch, seed: int, healed: bool) -> float:
    """Coupling layers turn two moons into a normal distribution, by the likelihood of points that are drawn anew."""
    torch.manual_seed(seed)
    model = Flow()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(400):
        optimizer.zero_grad()
        loss = -model(moons(128)).mean()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


CASES = healthy(
    ("vae", f"{EXAMPLES}/vae", vae),
    ("dcgan", f"{EXAMPLES}/dcgan", dcgan),
    ("diffusion", "https://arxiv.org/abs/2006.11239", diffusion),
    ("normalising-flow", "https://arxiv.org/abs/1605.08803", flow),
)
