"""Trainings with a wrong number in the optimizer or its schedule: rates, units of a schedule, decay, moments, epsilon."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..faults.training import last
from .case import Case, Watch
from .data_localisers import batches, blobs, digits, fit, houses, sentences, shapes, waves

WORDS = 24


def shape_cnn() -> nn.Sequential:
    """A small convolutional network for six shapes in colour."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(288, 6),
    )


def scheduler_per_batch(watch: Watch, seed: int, healed: bool) -> float:
    """Shapes, with a decay that is meant for each epoch and comes with each batch."""
    torch.manual_seed(seed)
    images, labels = shapes(800)
    model = shape_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    monitor, losses = watch(model, optimizer), []
    for _ in range(10):
        for rows in torch.randperm(len(images)).split(40):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[rows]), labels[rows])
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            optimizer.step()
            if not healed:
                scheduler.step()
            losses.append(loss.detach())
        if healed:
            scheduler.step()
    return last(losses)


class WordModel(nn.Module):
    """A language model of a GRU."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.gru = nn.GRU(width, 48, batch_first=True)
        self.output = nn.Linear(48, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """The logits of the next word at each place."""
        states, _ = self.gru(self.embedding(words))
        out: Tensor = self.output(states)
        return out


def rate_returned_as_factor(watch: Watch, seed: int, healed: bool) -> float:
    """A language model of a GRU whose schedule returns the rate itself, by which the rate is then multiplied."""
    torch.manual_seed(seed)
    text = sentences(1500)
    model, rate, steps = WordModel(), 5e-3, 250
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)

    def schedule(step: int) -> float:
        """What the scheduler multiplies the rate by."""
        return (1.0 if healed else rate) * (1 - 0.9 * step / steps)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    monitor, losses = watch(model, optimizer), []
    for words, following in batches(text[:, :-1], text[:, 1:], 32, steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words).flatten(0, 1), following.flatten())
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
    return last(losses)


def plateau_of_wrong_sign(watch: Watch, seed: int, healed: bool) -> float:
    """Prices of houses, with a scheduler that waits for the loss to rise and cuts the rate while it falls."""
    torch.manual_seed(seed)
    x, y = houses(800)
    x = (x - x.mean(0)) / x.std(0)
    model = nn.Sequential(nn.Linear(5, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min" if healed else "max", factor=0.1, patience=1)
    monitor, losses = watch(model, optimizer), []
    for _ in range(20):
        epoch = []
        for rows in torch.randperm(len(x)).split(40):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x[rows]), y[rows])
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            optimizer.step()
            epoch.append(loss.detach())
        scheduler.step(float(torch.stack(epoch).mean()))
        losses += epoch
    return last(losses)


class WordTransformer(nn.Module):
    """A language model of two blocks that look back only."""

    def __init__(self, length: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        block = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.output = nn.Linear(width, WORDS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, words: Tensor) -> Tensor:
        """The logits of the next word at each place."""
        out: Tensor = self.output(self.blocks(self.embedding(words) + self.places, mask=self.mask, is_causal=True))
        return out


def warmup_longer_than_training(watch: Watch, seed: int, healed: bool) -> float:
    """A language model of a transformer that trains for fewer steps than its rate needs to warm up."""
    torch.manual_seed(seed)
    text = sentences(1500)
    model, warmup = WordTransformer(16), 20 if healed else 20000
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    monitor, losses = watch(model, optimizer), []
    for words, following in batches(text[:, :-1], text[:, 1:], 32, 220):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words).flatten(0, 1), following.flatten())
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
    return last(losses)


def decay_of_one_half(watch: Watch, seed: int, healed: bool) -> float:
    """Digits in a convolutional network that answers the same for all, as its decay is a thousand times too strong."""
    torch.manual_seed(seed)
    images, labels = digits(1500)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(96, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4 if healed else 0.5)
    return fit(watch, model, optimizer, F.cross_entropy, batches((images - 0.3) / 0.3, labels, 64, 200))


def epsilon_of_one(watch: Watch, seed: int, healed: bool) -> float:
    """An autoencoder of waves with an epsilon of one, beside which its gradients are nothing."""
    torch.manual_seed(seed)
    sequences = waves(1500, 32)
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 6), nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 32))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-8 if healed else 1.0)
    return fit(watch, model, optimizer, F.mse_loss, batches(sequences, sequences, 64, 350))


def betas_from_one(watch: Watch, seed: int, healed: bool) -> float:
    """Noisy blobs in a plain network, with betas as one minus what the optimizer takes."""
    torch.manual_seed(seed)
    x, y = blobs(2000, 8, 20, apart=2.5)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.9, 0.999) if healed else (0.1, 0.001))
    return fit(watch, model, optimizer, F.cross_entropy, batches(x, y, 32, 300))


class GraphNetwork(nn.Module):
    """Two rounds of means over the neighbours, then a linear layer for each node."""

    def __init__(self, features: int, width: int = 32, classes: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2 * features, width), nn.Linear(2 * width, width)
        self.output = nn.Linear(width, classes)

    def forward(self, nodes: Tensor, links: Tensor) -> Tensor:
        """The logits of the nodes; each one is linked at least to itself."""
        neighbours = links / links.sum(1, keepdim=True)
        nodes = torch.relu(self.first(torch.cat([nodes, neighbours @ nodes], 1)))
        nodes = torch.relu(self.second(torch.cat([nodes, neighbours @ nodes], 1)))
        out: Tensor = self.output(nodes)
        return out


def communities(count: int, features: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes of four communities, linked inside them for the most part: noisy features, links and communities."""
    kinds = torch.randint(4, (count,))
    same = kinds[:, None] == kinds
    links = (torch.rand(count, count) < torch.where(same, 0.08, 0.01)).float()
    links = ((links + links.T) > 0).float() + torch.eye(count)
    nodes = torch.randn(4, features)[kinds] + 1.5 * torch.randn(count, features)
    return nodes, links, kinds


def rate_of_the_checkpoint(watch: Watch, seed: int, healed: bool) -> float:
    """A graph network that trains further on a second graph, where the loaded state of the optimizer restores the decayed rate."""
    torch.manual_seed(seed)
    model = GraphNetwork(8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    nodes, links, kinds = communities(400)
    for _ in range(150):
        rows = torch.randperm(400)[:200]
        optimizer.zero_grad()
        F.cross_entropy(model(nodes[rows], links[rows][:, rows]), kinds[rows]).backward()
        optimizer.step()
        scheduler.step()
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    nodes, links, kinds = communities(400)
    model = GraphNetwork(8)
    model.load_state_dict(checkpoint["model"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    optimizer.load_state_dict(checkpoint["optimizer"])
    if healed:
        optimizer.param_groups[0]["lr"] = 0.005
    monitor, losses = watch(model, optimizer), []
    for _ in range(200):
        rows = torch.randperm(400)[:200]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(nodes[rows], links[rows][:, rows]), kinds[rows])
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


def rate_of_adam_too_high(watch: Watch, seed: int, healed: bool) -> float:
    """Shapes in a deeper convolutional network, with an Adam whose rate is that of plain descent."""
    torch.manual_seed(seed)
    images, labels = shapes(1200)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(288, 64),
        nn.ReLU(),
        nn.Linear(64, 6),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3 if healed else 0.05)
    return fit(watch, model, optimizer, F.cross_entropy, batches((images - 0.3) / 0.3, labels, 32, 200))


def clip_far_below_the_gradient(watch: Watch, seed: int, healed: bool) -> float:
    """Prices of houses, by descent with a clip that leaves little of the gradient."""
    torch.manual_seed(seed)
    x, y = houses(1200)
    x, y = (x - x.mean(0)) / x.std(0), 5 * y
    model = nn.Sequential(nn.Linear(5, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    monitor, losses = watch(model, optimizer), []
    for rows, prices in batches(x, y, 64, 350):
        optimizer.zero_grad()
        loss = F.mse_loss(model(rows), prices)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 10.0 if healed else 0.1)
        optimizer.step()
        losses.append(loss.detach())
    return last(losses)


CASES: list[Case] = [
    Case(
        name="scheduler-per-batch/shape-cnn",
        judge="questions",
        source="https://runebook.dev/en/docs/pytorch/generated/torch.optim.lr_scheduler.lrscheduler/torch.optim.lr_scheduler.LRScheduler.step",
        rules=("learning-rate-low", "update-ratio-low", "zero-update"),
        run=scheduler_per_batch,
        bug="scheduler.step() in the loop of the batches",
        fix="scheduler.step() once an epoch",
    ),
    Case(
        name="schedule-returns-the-rate/gru-language-model",
        judge="questions",
        source="https://runebook.dev/en/docs/pytorch/generated/torch.optim.lr_scheduler.lambdalr",
        rules=("learning-rate-low", "update-ratio-low"),
        run=rate_returned_as_factor,
        bug="LambdaLR of rate * (1 - 0.9 * step / steps)",
        fix="LambdaLR of 1 - 0.9 * step / steps",
    ),
    Case(
        name="plateau-mode-max-of-a-loss/houses",
        judge="questions",
        source="https://github.com/FunctionLab/selene/issues/115",
        rules=("learning-rate-low", "update-ratio-low", "zero-update"),
        run=plateau_of_wrong_sign,
        bug='ReduceLROnPlateau(mode="max") of the loss',
        fix='ReduceLROnPlateau(mode="min")',
    ),
    Case(
        name="warmup-longer-than-training/transformer-language-model",
        judge="questions",
        source="https://github.com/Morizeyao/GPT2-Chinese/issues/60",
        rules=("learning-rate-low", "update-ratio-low"),
        run=warmup_longer_than_training,
        bug="warmup = 20000, for 220 steps",
        fix="warmup = 20",
    ),
    Case(
        name="weight-decay-one-half/digit-cnn",
        judge="questions",
        source="https://github.com/BVLC/caffe/issues/1396",
        rules=("weight-decay-high",),
        run=decay_of_one_half,
        bug="weight_decay=0.5",
        fix="weight_decay=5e-4",
    ),
    Case(
        name="adam-epsilon-one/wave-autoencoder",
        judge="questions",
        source="https://devpeace.com/machine-learning/43221065/how-does-the-epsilon-hyperparameter-affect-tf-train-adamoptimizer",
        rules=("epsilon-dominates", "learning-rate-low", "update-ratio-low"),
        run=epsilon_of_one,
        bug="eps=1.0",
        fix="eps=1e-8",
    ),
    Case(
        name="betas-as-one-minus-beta/blobs",
        judge="questions",
        source="https://github.com/mila-iqia/blocks/issues/1159",
        rules=("betas-swapped",),
        run=betas_from_one,
        bug="betas=(0.1, 0.001)",
        fix="betas=(0.9, 0.999)",
    ),
    Case(
        name="checkpoint-brings-back-the-rate/graph-network",
        judge="questions",
        source="https://github.com/pytorch/pytorch/issues/156846",
        rules=("learning-rate-low", "update-ratio-low"),
        run=rate_of_the_checkpoint,
        bug="optimizer.load_state_dict(...) after the new rate was set",
        fix="the rate set again after optimizer.load_state_dict(...)",
    ),
    Case(
        name="adam-with-a-rate-of-descent/shape-cnn",
        judge="questions",
        source="https://github.com/keras-team/keras/issues/4066",
        rules=("learning-rate-high", "update-ratio-high"),
        run=rate_of_adam_too_high,
        bug="Adam(lr=0.05)",
        fix="Adam(lr=2e-3)",
    ),
    Case(
        name="clip-far-below-the-gradient/houses",
        judge="questions",
        source="https://github.com/wandb/senpai/pull/978",
        rules=("always-clipped", "learning-rate-low", "update-ratio-low"),
        run=clip_far_below_the_gradient,
        bug="clip_grad_norm_(model.parameters(), 0.1)",
        fix="clip_grad_norm_(model.parameters(), 10.0)",
    ),
]
