"""Silent errors of TrainCheck (OSDI 2025, arXiv 2506.14813) in loops of one process: what is stepped, and on which data."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_gradmon import Checks

from .case import Case, Watch
from .data_traincheck import DIGITS, SIDE, digits, generator, last, shuffled

HALTED = 120
WORKERS = 4
BATCHES = 5  # of each worker in an epoch


class Efficient(nn.Module):
    """A small relative of EfficientNet: strided convolutions with batch norms, squeeze and excitation, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False)
        self.bn0 = nn.BatchNorm2d(16)
        self.expand = nn.Conv2d(16, 64, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False)
        self.bn2 = nn.BatchNorm2d(64)
        self.squeeze = nn.Linear(64, 8)
        self.excite = nn.Linear(8, 64)
        self.fc = nn.Linear(64 * 9, DIGITS)

    def forward(self, x: Tensor) -> Tensor:
        """Digits' logits."""
        x = functional.silu(self.bn0(self.stem(x)))
        x = functional.silu(self.bn2(self.depthwise(functional.silu(self.bn1(self.expand(x))))))
        gates = torch.sigmoid(self.excite(functional.silu(self.squeeze(x.mean(dim=(2, 3))))))
        logits: Tensor = self.fc(functional.avg_pool2d(x * gates[:, :, None, None], 2).flatten(1))
        return logits


def _frozen_head(watch: Watch, seed: int, healed: bool) -> float:
    """The optimizer was given the new head, then everything but the batch norms was frozen, the head with it.

    The backward pass still works, since batch norms are trainable, but the optimizer holds nothing that it reaches.
    """
    torch.manual_seed(seed)
    source = generator(seed)
    batches = shuffled(*digits(1024, source), 64, source)
    model = Efficient()
    optimizer = torch.optim.Adam(model.fc.parameters(), lr=0.005)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith("fc.") if healed else name.startswith("bn")
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(400):
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


def convolutions() -> nn.Sequential:
    """The convolutional network of the MNIST example, narrower."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (SIDE // 2 - 2) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, DIGITS),
    )


def _never_zeroed(watch: Watch, seed: int, healed: bool) -> float:
    """The line that clears gradients was left out of a loop for MNIST, so each step adds to the sum of all steps before."""
    torch.manual_seed(seed)
    source = generator(seed)
    batches = shuffled(*digits(2048, source), 64, source)
    model = convolutions()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(300):
        images, labels = next(batches)
        if healed:
            optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


def _stale_none(watch: Watch, seed: int, healed: bool) -> float:
    """A step without a backward pass is compiled as one without gradients, and that code is used ever after.

    In the original a missing guard of the compiler did it. Here later gradients stay in a list that the optimizer never sees.
    """
    torch.manual_seed(seed)
    source = generator(seed)
    batches = shuffled(*digits(2048, source), 32, source)
    model = convolutions()
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=2e-3)
    monitor = watch(model, optimizer)
    losses: list[Tensor] = []
    for step in range(300):
        images, labels = next(batches)
        optimizer.zero_grad()
        if step != HALTED:  # the author pauses for one step, which should change nothing
            loss = functional.cross_entropy(model(images), labels)
            if healed or step < HALTED:
                loss.backward()
            else:
                torch.autograd.grad(loss, parameters)
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


def _loaded(seed: int, healed: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """What four workers of a loader make: each draws examples by random numbers of its own, or all by those of the parent."""
    epoch = 0
    while True:
        sources = [generator(seed, 1 + epoch * WORKERS + worker if healed else 0) for worker in range(WORKERS)]
        for _ in range(BATCHES):
            yield from (digits(32, source) for source in sources)
        epoch += 1


def _same_workers(watch: Watch, seed: int, healed: bool) -> float:
    """Workers inherit the state of NumPy's generator, so all draw the same random numbers, in each epoch again.

    The data set draws digit, place and noise when it is asked for an example. The loss on the few batches becomes too good.
    """
    torch.manual_seed(seed)
    model = convolutions()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = _loaded(seed, healed)
    fresh_images, fresh_labels = digits(512, generator(seed, 999))
    monitor = watch(model, optimizer, checks=Checks(batch_varies=True))
    losses = []
    for step in range(240):
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        if step % 40 == 39:
            with monitor.no_monitor(), torch.no_grad():
                validation = functional.cross_entropy(model(fresh_images), fresh_labels)
            monitor.log_scalar("validation_loss", validation)
    return last(losses)


CASES: list[Case] = [
    Case(
        "pytorch-forum-84911",
        "traincheck",
        "https://discuss.pytorch.org/t/obtaining-abnormal-changes-in-loss-and-accuracy/84911",
        ("not-in-optimizer", "step-without-gradients"),
        _frozen_head,
        bug="all but the batch norms are frozen, also the head that the optimizer has",
        fix="all but the head are frozen",
    ),
    Case(
        "stackoverflow-60335387",
        "traincheck",
        "https://stackoverflow.com/questions/60335387/pytorch-mnist-example-not-converge",
        ("missing-zero-grad",),
        _never_zeroed,
        bug="no zero_grad()",
        fix="optimizer.zero_grad() in each step",
    ),
    Case(
        "pytorch-115607",
        "traincheck",
        "https://github.com/pytorch/pytorch/issues/115607",
        ("step-without-gradients", "gradient-dropped-to-zero"),
        _stale_none,
        bug="after a pause the optimizer steps with gradients that are None",
        fix="gradients reach the optimizer again",
    ),
    Case(
        "stackoverflow-67180955",
        "traincheck",
        "https://tanelp.github.io/posts/a-bug-that-plagues-thousands-of-open-source-ml-projects/",
        ("repeated-batch", "expectation-broken"),
        _same_workers,
        bug="all workers and epochs have the seed of the parent",
        fix="a seed for each worker and epoch",
    ),
]
