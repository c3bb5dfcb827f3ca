"""Sound trainings of image nets: residual and plain ones, a transformer, mixed images, and masks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Watch
from .data_healthy import EXAMPLES, Block, batches, digits, healthy, last, normalised, shapes


class Residual(nn.Module):
    """Two convolutions with batch norm, added to what came in."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Images behind the block."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def tiny_resnet(classes: int, channels: int = 3) -> nn.Sequential:
    """Three residual blocks, with the initialisation of torchvision's ResNet."""
    model = nn.Sequential(
        nn.Conv2d(channels, 12, 3, 1, 1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        Residual(12, 12, 1),
        Residual(12, 24, 2),
        Residual(24, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, classes),
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def resnet(watch: Watch, seed: int, healed: bool) -> float:
    """A residual net with momentum at rate 0.1, warmed up and then lowered by ten twice."""
    torch.manual_seed(seed)
    images, labels = digits(2400)
    images = normalised(images)
    model = tiny_resnet(10, channels=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    decay = torch.optim.lr_scheduler.MultiStepLR(optimizer, [80, 110])
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], [20])
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(4):
        model.train()
        for x, y in batches(35, 32, images[:2000], labels[:2000]):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            losses.append(loss.detach())
            optimizer.step()
            scheduler.step()
        model.eval()
        with monitor.no_monitor(), torch.no_grad():
            F.cross_entropy(model(images[2000:]), labels[2000:])
    return last(losses)


def label_smoothing(watch: Watch, seed: int, healed: bool) -> float:
    """A small VGG with random shifts and flips, label smoothing, momentum and a cosine schedule."""
    torch.manual_seed(seed)
    images, labels, _ = shapes(1600)
    images = normalised(images)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 48)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(192, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    monitor = watch(model, optimizer)
    losses = []
    for x, y in batches(200, 64, images, labels):
        left, up = torch.randint(5, (2,)).tolist()
        x = F.pad(x, (2, 2, 2, 2))[:, :, up : up + 16, left : left + 16]
        x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        scheduler.step()
    return last(losses)


def mixup(watch: Watch, seed: int, healed: bool) -> float:
    """Each image is mixed with another one and has to be named as both, each by its part."""
    torch.manual_seed(seed)
    images, labels = digits(2000)
    images = normalised(images)
    model = tiny_resnet(10, channels=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [100, 130])
    share = torch.distributions.Beta(1.0, 1.0)
    monitor = watch(model, optimizer)
    losses = []
    for x, y in batches(150, 32, images, labels):
        part, other = float(share.sample()), torch.randperm(len(x))
        output = model(part * x + (1 - part) * x[other])
        loss = part * F.cross_entropy(output, y) + (1 - part) * F.cross_entropy(output, y[other])
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        scheduler.step()
    return last(losses)


class VisionTransformer(nn.Module):
    """Patches and a class token with learnt places, through blocks of attention."""

    def __init__(self, width: int = 32, patch: int = 4, classes: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, (16 // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*[Block(width, 4, 0.1) for _ in range(2)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the classes."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.places
        out: Tensor = self.head(self.blocks(tokens)[:, 0])
        return out


def vision_transformer(watch: Watch, seed: int, healed: bool) -> float:
    """A vision transformer with AdamW, a warm-up and a cosine schedule."""
    torch.manual_seed(seed)
    images, labels, _ = shapes(2000)
    images = normalised(images)
    model = VisionTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    steps, warm = 250, 25
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm))),
    )
    monitor = watch(model, optimizer)
    losses = []
    for x, y in batches(steps, 32, images, labels):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        scheduler.step()
    return last(losses)


class UNet(nn.Module):
    """Down twice and up twice, with what was there on the way down put beside what comes up."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2, self.low = self.pair(3, width), self.pair(width, 2 * width), self.pair(2 * width, 4 * width)
        self.up2, self.mix2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), self.pair(4 * width, 2 * width)
        self.up1, self.mix1 = nn.ConvTranspose2d(2 * width, width, 2, 2), self.pair(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    @staticmethod
    def pair(inputs: int, outputs: int) -> nn.Sequential:
        """Two convolutions."""
        return nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        """A logit for each pixel."""
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        low = self.low(F.max_pool2d(second, 2))
        second = self.mix2(torch.cat([second, self.up2(low)], 1))
        out: Tensor = self.out(self.mix1(torch.cat([first, self.up1(second)], 1)))
        return out


def unet(watch: Watch, seed: int, healed: bool) -> float:
    """Masks of shapes from half a cross-entropy on logits and half a Dice loss on their sigmoid."""
    torch.manual_seed(seed)
    images, _, masks = shapes(800)
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=150, gamma=0.1)
    monitor = watch(model, optimizer)
    losses = []
    for x, y in batches(200, 16, normalised(images), masks):
        logits = model(x)
        share = logits.sigmoid()
        dice = 1 - (2 * (share * y).sum((2, 3)) + 1) / (share.sum((2, 3)) + y.sum((2, 3)) + 1)
        loss = 0.5 * F.binary_cross_entropy_with_logits(logits, y) + 0.5 * dice.mean()
        optimizer.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        scheduler.step()
    return last(losses)


CASES = healthy(
    ("resnet", f"{EXAMPLES}/imagenet", resnet),
    ("vgg-label-smoothing", "https://github.com/kuangliu/pytorch-cifar", label_smoothing),
    ("mixup", "https://github.com/facebookresearch/mixup-cifar10", mixup),
    ("vision-transformer", f"{EXAMPLES}/vision_transformer", vision_transformer),
    ("unet-dice", "https://github.com/usuyama/pytorch-unet", unet),
)
