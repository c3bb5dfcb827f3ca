"""Sound trainings that begin with a net that can do something: a frozen backbone, additions, a second training."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_gradmon import Checks

from .case import Watch
from .data_healthy import STOP, TUTORIALS, WORDS, Block, batches, digits, healthy, last, normalised, padded, sentences


def backbone(images: Tensor, labels: Tensor) -> nn.Sequential:
    """A convolutional net that was trained on the first five digits, without its last layer."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 8), (8, 24), (24, 48)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    trunk, head = nn.Sequential(*layers, nn.Flatten()), nn.Linear(192, 5)
    optimizer = torch.optim.Adam([*trunk.parameters(), *head.parameters()], lr=2e-3)
    known = labels < 5
    for x, y in batches(80, 64, images[known], labels[known]):
        optimizer.zero_grad()
        F.cross_entropy(head(trunk(x)), y).backward()
        optimizer.step()
    return trunk


class Transfer(nn.Module):
    """A backbone that stays in eval mode if it is frozen, and a new last layer."""

    def __init__(self, trunk: nn.Module, frozen: bool) -> None:
        super().__init__()
        self.backbone, self.head, self.frozen = trunk, nn.Linear(192, 5), frozen
        if frozen:
            self.backbone.requires_grad_(False)

    def train(self, mode: bool = True) -> Transfer:
        """Train mode for the head; the running statistics of a frozen backbone have to stay."""
        super().train(mode)
        if self.frozen:
            self.backbone.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the last five digits."""
        out: Tensor = self.head(self.backbone(x))
        return out


def frozen_backbone(watch: Watch, seed: int, healed: bool) -> float:
    """Only the new last layer trains, by momentum at the tutorial's rate of 0.001, and this is declared."""
    torch.manual_seed(seed)
    images, labels = digits(3000)
    images, new = normalised(images), labels >= 5
    model = Transfer(backbone(images, labels), frozen=True)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.001, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
    monitor = watch(model, optimizer, checks=Checks(frozen=r"^backbone\.", trained=r"^head\."))
    x_train, y_train = images[new][:1200], labels[new][:1200] - 5
    x_valid, y_valid = images[new][1200:], labels[new][1200:] - 5
    losses = []
    for _ in range(10):
        model.train()
        for x, y in batches(30, 32, x_train, y_train):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            losses.append(loss.detach())
            optimizer.step()
        scheduler.step()
        model.eval()
        with monitor.no_monitor(), torch.no_grad():
            F.cross_entropy(model(x_valid), y_valid)
    return last(losses)


def two_rates(watch: Watch, seed: int, healed: bool) -> float:
    """The whole net trains on new classes, the backbone at a tenth of the head's rate."""
    torch.manual_seed(seed)
    images, labels = digits(3000)
    images, new = normalised(images), labels >= 5
    model = Transfer(backbone(images, labels), frozen=False)
    groups = [{"params": model.backbone.parameters(), "lr": 1e-3}, {"params": model.head.parameters(), "lr": 1e-2}]
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=1e-4)
    monitor = watch(model, optimizer)
    losses = []
    for x, y in batches(150, 32, images[new], labels[new] - 5):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


class Reader(nn.Module):
    """A small transformer over the words of a sentence, and a layer that names what the whole is about."""

    def __init__(self, width: int = 32, length: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(Block(width, 4, 0.1), Block(width, 4, 0.1))
        self.norm, self.classifier = nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, words: Tensor) -> Tensor:
        """Logits of four classes."""
        x = self.blocks(self.words(words) + self.places(torch.arange(words.shape[1])))
        out: Tensor = self.classifier(self.norm(x).mean(1))
        return out


def texts(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sentences, their topics, and another property: how many words they have, in four classes."""
    words, topics = sentences(count)
    lengths = torch.tensor([len(text) for text in words])
    return padded(words, 12), torch.tensor(topics), torch.bucketize(lengths, torch.tensor([6, 7, 9]))


def reader(words: Tensor, topics: Tensor, steps: int) -> Reader:
    """A transformer that knows topics."""
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for x, y in batches(steps, 32, words, topics):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def fine_tuning(watch: Watch, seed: int, healed: bool) -> float:
    """A transformer that knows topics gets a few short epochs on sentences that lack words, at a small rate."""
    torch.manual_seed(seed)
    words, topics, _ = texts(3000)
    model = reader(words[:1700], topics[:1700], steps=120)
    fewer = words[1700:].masked_fill(torch.rand(1300, 12) < 0.4, STOP)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
    steps = 120
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 12, (steps - step) / (steps - 12)))
    monitor = watch(model, optimizer)
    losses = []
    for x, y in batches(steps, 32, fewer, topics[1700:]):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        scheduler.step()
    return last(losses)


class LoRA(nn.Module):
    """A frozen layer, and beside it a product of two thin matrices, of which the second is zero at first."""

    def __init__(self, layer: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.layer, self.scale = layer, alpha / rank
        self.lora_a = nn.Parameter(torch.empty(rank, layer.in_features))
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """What the layer gives, and a little more."""
        out: Tensor = self.layer(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.scale
        return out


def lora(watch: Watch, seed: int, healed: bool) -> float:
    """A transformer that knows topics learns lengths by adapters and a new classifier, and this is declared."""
    torch.manual_seed(seed)
    words, topics, lengths = texts(3000)
    model = reader(words, topics, steps=120)
    model.requires_grad_(False)
    for block in model.blocks:
        if isinstance(block, Block):
            block.mlp = nn.Sequential(*[LoRA(layer) if isinstance(layer, nn.Linear) else layer for layer in block.mlp])
    model.classifier = nn.Linear(32, 4)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3)
    monitor = watch(
        model, optimizer, checks=Checks(frozen=r"^words|^places|attention|norm|\.layer\.", trained=r"lora_|^classifier")
    )
    losses = []
    for x, y in batches(250, 24, words, lengths):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


CASES = healthy(
    ("transfer-frozen-backbone", f"{TUTORIALS}/beginner/transfer_learning_tutorial.html", frozen_backbone),
    ("transfer-two-rates", f"{TUTORIALS}/beginner/transfer_learning_tutorial.html", two_rates),
    ("fine-tuning-small-rate", "https://arxiv.org/abs/1810.04805", fine_tuning),
    ("lora", "https://github.com/microsoft/LoRA", lora),
)
