"""Trainings whose loop does its steps in the wrong place: clearing, stepping, clipping, accumulating, detaching, modes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..faults.training import last
from .case import Case, Watch
from .data_localisers import PAD, batches, digits, fit, houses, reviews, waves
from .data_questions import figures, flowers


class ReviewReader(nn.Module):
    """Word vectors, a GRU over them, and praise or blame from its last state."""

    def __init__(self, words: int = 40, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=PAD)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.output = nn.Linear(width, 2)

    def forward(self, words: Tensor) -> Tensor:
        """The logits of the two answers."""
        _, state = self.gru(self.embedding(words))
        out: Tensor = self.output(state[-1])
        return out


def cleared_before_step(watch: Watch, seed: int, healed: bool) -> float:
    """A GRU that separates praise from blame, with gradients that are cleared right after backward."""
    torch.manual_seed(seed)
    words, labels = reviews(1500)
    model = ReviewReader()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor, losses = watch(model, optimizer), []
    for x, y in batches(words, labels, 32, 250):
        if healed:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        if not healed:
            optimizer.zero_grad()
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


class Summer(nn.Module):
    """A plain recurrent network with ReLU, whose last state gives one number."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.rnn = nn.RNN(2, width, nonlinearity="relu", batch_first=True)
        self.output = nn.Linear(width, 1)
        nn.init.eye_(self.rnn.get_parameter("weight_hh_l0"))
        nn.init.zeros_(self.rnn.get_parameter("bias_hh_l0"))

    def forward(self, sequence: Tensor) -> Tensor:
        """The number that the whole sequence leads to."""
        states, _ = self.rnn(sequence)
        out: Tensor = self.output(states[:, -1])[:, 0]
        return out


def balances(count: int, length: int) -> tuple[Tensor, Tensor]:
    """Rows of payments in and out, some marked as cancelled, and a quarter of the sum of the others."""
    payments, cancelled = torch.randn(count, length), (torch.rand(count, length) < 0.1).float()
    return torch.stack([payments, cancelled], 2), (payments * (1 - cancelled)).sum(1) / 4


def clipped_after_step(watch: Watch, seed: int, healed: bool) -> float:
    """A recurrent network that keeps the balance of payments, with the clip behind the step."""
    torch.manual_seed(seed)
    x, y = balances(2000, 16)
    model = Summer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    monitor, losses = watch(model, optimizer), []
    for sequence, target in batches(x, y, 32, 400):
        optimizer.zero_grad()
        loss = F.mse_loss(model(sequence), target)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        if healed:
            nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        optimizer.step()
        if not healed:
            nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        losses.append(loss.detach())
    return last(losses)


class SmallUNet(nn.Module):
    """One level down and up again with a bridge, which gives a logit for each pixel."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU())
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.leave = nn.Sequential(nn.Conv2d(2 * width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """The logits of the pixels."""
        entered = self.enter(images)
        out: Tensor = self.leave(torch.cat([entered, self.up(self.down(entered))], 1))[:, 0]
        return out


def clipped_before_unscale(watch: Watch, seed: int, healed: bool) -> float:
    """A U-Net in mixed precision whose gradients are clipped while they still carry the scale."""
    torch.manual_seed(seed)
    images, _, pixels = figures(400, torch.Generator().manual_seed(seed))
    model = SmallUNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    monitor, losses = watch(model, optimizer, scaler=scaler), []
    for x, y in batches(images, pixels.float(), 8, 120):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)
        loss = F.binary_cross_entropy_with_logits(logits.float(), y)
        scaler.scale(loss).backward()
        monitor.log_scalar("loss", loss.detach())
        if healed:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return last(losses)


def digit_cnn() -> nn.Sequential:
    """Convolutions with batch norm, then dropout and a linear layer, for ten digits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, stride=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(288, 10),
    )


def eval_mode_kept(watch: Watch, seed: int, healed: bool) -> float:
    """A validation before each epoch leaves the model in evaluation mode; the measure is the validation loss."""
    torch.manual_seed(seed)
    images, labels = digits(1200)
    x, y, held_x, held_y = images[:400], labels[:400], images[400:], labels[400:]
    model = digit_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    monitor = watch(model, optimizer)
    model.train()

    def validate() -> float:
        """The loss of the images that are held out."""
        model.eval()
        with torch.no_grad():
            return float(F.cross_entropy(model(held_x), held_y))

    for _ in range(12):
        with monitor.no_monitor():
            validate()
        if healed:
            model.train()
        for images, labels in batches(x, y, 32, 12):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            optimizer.step()
    with monitor.no_monitor():
        return validate()


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers of these sizes with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Critic(nn.Module):
    """The value of a push at a place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(4, 48, 48, 1)

    def forward(self, places: Tensor, pushes: Tensor) -> Tensor:
        """One value for each pair."""
        out: Tensor = self.layers(torch.cat([places, pushes], 1))[:, 0]
        return out


def actor_without_its_action(watch: Watch, seed: int, healed: bool) -> float:
    """An actor has to push a point to the origin, but its loss uses the stored pushes; the measure is its mean cost."""
    torch.manual_seed(seed)
    actor, critic = nn.Sequential(mlp(2, 48, 2), nn.Tanh()), Critic()
    optimizer_actor = torch.optim.Adam(actor.parameters(), lr=1e-3)
    optimizer_critic = torch.optim.Adam(critic.parameters(), lr=3e-3)
    monitor_actor, monitor_critic = watch(actor, optimizer_actor), watch(critic, optimizer_critic)
    memory = 2 * torch.rand(3000, 2) - 1
    pushes = 2 * torch.rand(3000, 2) - 1
    costs = (memory + pushes).square().sum(1)
    for places, pushed_and_cost in batches(memory, torch.cat([pushes, costs[:, None]], 1), 64, 350):
        pushed, reward = pushed_and_cost[:, :2], -pushed_and_cost[:, 2]
        loss_critic = F.mse_loss(critic(places, pushed), reward)
        optimizer_critic.zero_grad()
        loss_critic.backward()
        monitor_critic.log_scalar("loss", loss_critic.detach())
        optimizer_critic.step()
        loss_actor = -critic(places, actor(places) if healed else pushed).mean()
        optimizer_actor.zero_grad()
        loss_actor.backward()
        monitor_actor.log_scalar("loss", loss_actor.detach())
        optimizer_actor.step()
    with torch.no_grad():
        return float((memory + actor(memory)).square().sum(1).mean())


def accumulation_longer_than_epoch(watch: Watch, seed: int, healed: bool) -> float:
    """Irises in nine batches an epoch, with a step after sixteen batches and gradients that each epoch clears."""
    torch.manual_seed(seed)
    x, y = flowers(144, torch.Generator().manual_seed(seed))
    x = (x - x.mean(0)) / x.std(0)
    model = mlp(4, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    monitor, losses, accumulate = watch(model, optimizer), [], 16
    for _ in range(40):
        optimizer.zero_grad()
        groups = torch.randperm(len(x)).split(16)
        for index, rows in enumerate(groups):
            loss = F.cross_entropy(model(x[rows]), y[rows])
            (loss / min(accumulate, len(groups))).backward()
            monitor.log_scalar("loss", loss.detach())
            if (index + 1) % accumulate == 0 or (healed and index + 1 == len(groups)):
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    return last(losses)


def optimizer_made_each_epoch(watch: Watch, seed: int, healed: bool) -> float:
    """Prices of houses in short epochs, each of them with a new Adam."""
    torch.manual_seed(seed)
    x, y = houses(600)
    x = (x - x.mean(0)) / x.std(0)
    model = mlp(5, 48, 48, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor = watch(model, optimizer)
    for _ in range(150):
        if not healed:
            optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        for rows, prices in batches(x, y, 16, 2):
            optimizer.zero_grad()
            loss = F.mse_loss(model(rows), prices)
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            optimizer.step()
    with torch.no_grad():
        return float(F.mse_loss(model(x), y))


def discriminator_never_cleared(watch: Watch, seed: int, healed: bool) -> float:
    """A GAN of flowers whose discriminator never has its gradients cleared; the measure is the distance of the means."""
    torch.manual_seed(seed)
    real, _ = flowers(2000, torch.Generator().manual_seed(seed))
    real = (real - real.mean(0)) / real.std(0) + 0.5
    generator, discriminator = mlp(8, 32, 32, 4), mlp(4, 32, 32, 1)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=3e-3, betas=(0.5, 0.999))
    monitor_g, monitor_d = watch(generator, optimizer_g), watch(discriminator, optimizer_d)
    ones, zeros, distances = torch.ones(64, 1), torch.zeros(64, 1), []
    for flower, _ in batches(real, real, 64, 400):
        fake = generator(torch.randn(64, 8))
        if healed:
            optimizer_d.zero_grad()
        loss_real = F.binary_cross_entropy_with_logits(discriminator(flower), ones)
        loss_d = loss_real + F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
        loss_d.backward()
        monitor_d.log_scalar("loss", loss_d.detach())
        optimizer_d.step()
        optimizer_g.zero_grad()
        loss_g = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
        loss_g.backward()
        monitor_g.log_scalar("loss", loss_g.detach())
        optimizer_g.step()
        distances.append((fake.detach().mean(0) - real.mean(0)).norm())
    return float(torch.stack(distances[-40:]).mean())


def head_not_in_groups(watch: Watch, seed: int, healed: bool) -> float:
    """A body that knows five of the digits gets a head for ten, whose parameters are in no group of the optimizer."""
    torch.manual_seed(seed)
    images, labels = digits(2000)
    body = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    old = nn.Linear(96, 5)
    known = labels < 5
    before = torch.optim.Adam([*body.parameters(), *old.parameters()], lr=3e-3)
    for x, y in batches(images[known], labels[known], 64, 120):
        before.zero_grad()
        F.cross_entropy(old(body(x)), y).backward()
        before.step()
    model = nn.Sequential(body, nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 10))
    groups: list[dict[str, Any]] = [{"params": list(model[0].parameters()), "lr": 3e-4}]
    head = {"params": [*model[1].parameters(), *model[3].parameters()], "lr": 3e-3}
    if healed:
        groups.append(head)
    optimizer = torch.optim.Adam(groups)
    return fit(watch, model, optimizer, F.cross_entropy, batches(images, labels, 64, 150))


class Forecaster(nn.Module):
    """A convolution over the past of a wave and a linear layer to its next value."""

    def __init__(self, length: int, width: int = 16) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, width, 5, padding=2)
        self.hidden = nn.Linear(width * length, 32)
        self.output = nn.Linear(32, 1)

    def forward(self, past: Tensor) -> Tensor:
        """The value that comes next."""
        features = torch.relu(self.convolution(past[:, None])).flatten(1)
        out: Tensor = self.output(torch.relu(self.hidden(features)))
        return out


def accumulated_sum(watch: Watch, seed: int, healed: bool) -> float:
    """Forecasts of waves with gradients of sixteen small batches, whose losses are not divided by sixteen."""
    torch.manual_seed(seed)
    sequences = waves(1500, 25)
    model, accumulate = Forecaster(24), 16
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    monitor, losses = watch(model, optimizer), []
    optimizer.zero_grad()
    for index, (past, following) in enumerate(batches(sequences[:, :-1], sequences[:, -1:], 8, 1600)):
        loss = F.mse_loss(model(past), following)
        (loss / accumulate if healed else loss).backward()
        monitor.log_scalar("loss", loss.detach())
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return float(torch.stack(losses[-160:]).mean())


class ClipReader(nn.Module):
    """A small convolutional network for each frame and a GRU over the frames."""

    def __init__(self, learn_frames: bool) -> None:
        super().__init__()
        self.learn_frames = learn_frames
        self.frames = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(108, 8),
        )
        self.gru = nn.GRU(8, 24, batch_first=True)
        self.output = nn.Linear(24, 10)

    def forward(self, clips: Tensor) -> Tensor:
        """The logits of the digit that the clip shows."""
        with torch.set_grad_enabled(self.learn_frames and torch.is_grad_enabled()):
            seen = self.frames(clips.flatten(0, 1)).view(*clips.shape[:2], -1)
        _, state = self.gru(seen)
        out: Tensor = self.output(state[-1])
        return out


def frames_without_gradient(watch: Watch, seed: int, healed: bool) -> float:
    """Clips of one digit in four frames, whose encoder runs under no_grad though it was never trained."""
    torch.manual_seed(seed)
    images, labels = digits(6000)
    order = labels.argsort()
    count = len(order) // 4
    clips, shown = images[order].view(count, 4, 1, 10, 10), labels[order].view(count, 4)[:, 0]
    model = ClipReader(learn_frames=healed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return fit(watch, model, optimizer, F.cross_entropy, batches(clips, shown, 32, 200))


CASES: list[Case] = [
    Case(
        name="cleared-between-backward-and-step/reviews",
        judge="questions",
        source="https://velog.io/@rhss10/기본-optimizer.zerograd는-어디에-넣어주어야-할까",
        rules=("gradients-cleared", "step-without-gradients"),
        run=cleared_before_step,
        bug="optimizer.zero_grad() after loss.backward()",
        fix="optimizer.zero_grad() before the forward pass",
    ),
    Case(
        name="clip-behind-the-step/balance-rnn",
        judge="questions",
        source="https://github.com/VGraphRNN/VGRNN/issues/4",
        rules=("clip-after-step",),
        run=clipped_after_step,
        bug="clip_grad_norm_ after optimizer.step()",
        fix="clip_grad_norm_ before optimizer.step()",
    ),
    Case(
        name="clip-without-unscale/figure-unet",
        judge="questions",
        source="https://github.com/milesial/Pytorch-UNet/issues/468",
        rules=("clipped-while-scaled",),
        run=clipped_before_unscale,
        bug="clip_grad_norm_ without scaler.unscale_(optimizer)",
        fix="scaler.unscale_(optimizer) before the clip",
    ),
    Case(
        name="validation-leaves-eval-mode/digit-cnn",
        judge="questions",
        source="https://github.com/wkentaro/pytorch-fcn/issues/57",
        rules=("eval-mode",),
        run=eval_mode_kept,
        bug="no model.train() after the validation",
        fix="model.train() after the validation",
    ),
    Case(
        name="actor-loss-of-stored-actions/ddpg",
        judge="questions",
        source="https://github.com/floodsung/DDPG/issues/14",
        rules=("no-gradient", "step-without-gradients"),
        run=actor_without_its_action,
        bug="actor loss of critic(places, pushed)",
        fix="actor loss of critic(places, actor(places))",
    ),
    Case(
        name="accumulation-longer-than-epoch/flowers",
        judge="questions",
        source="https://github.com/huggingface/transformers/issues/2995",
        rules=("never-stepped",),
        run=accumulation_longer_than_epoch,
        bug="if (index + 1) % accumulate == 0, with fewer batches than accumulate",
        fix="if (index + 1) % accumulate == 0 or index + 1 == len(groups)",
    ),
    Case(
        name="adam-made-anew-each-epoch/houses",
        judge="questions",
        source="https://github.com/alan-turing-institute/deepsensor/issues/47",
        rules=("unattached-optimizer",),
        run=optimizer_made_each_epoch,
        bug="optimizer = Adam(...) in the loop of the epochs",
        fix="optimizer = Adam(...) once, before the loop",
    ),
    Case(
        name="discriminator-never-cleared/flower-gan",
        judge="questions",
        source="https://github.com/Hsintien-Ng/idinvert_pytorch-reproduced/issues/1",
        rules=("missing-zero-grad",),
        run=discriminator_never_cleared,
        bug="no optimizer_d.zero_grad()",
        fix="optimizer_d.zero_grad() before the discriminator's loss",
    ),
    Case(
        name="new-head-in-no-group/finetuned-digits",
        judge="questions",
        source="https://github.com/zjunlp/HVPNeT/issues/5",
        rules=("not-in-optimizer",),
        run=head_not_in_groups,
        bug="the group of the head is made, but not appended",
        fix="groups.append(head)",
    ),
    Case(
        name="accumulated-loss-not-divided/wave-forecast",
        judge="questions",
        source="https://github.com/fastai/fastai/issues/3023",
        rules=("loss-scale", "learning-rate-high"),
        run=accumulated_sum,
        bug="loss.backward()",
        fix="(loss / accumulate).backward()",
    ),
    Case(
        name="encoder-under-no-grad/digit-clips",
        judge="questions",
        source="https://github.com/rll-research/cic/issues/5",
        rules=("no-gradient",),
        run=frames_without_gradient,
        bug="with torch.no_grad() around the encoder of the frames",
        fix="no torch.no_grad() there",
    ),
]
