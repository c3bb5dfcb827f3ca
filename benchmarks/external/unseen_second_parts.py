"""Parts that no optimizer has, that nothing registered or that no gradient reaches, from a second round of reports, written anew."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Case, Watch
from .data_healthy import citations
from .data_localisers import batches, blobs, dense, descend, digits, last, reviews, shapes
from .unseen_second_loops import second


class Sentiment(nn.Module):
    """Word vectors, a GRU over them, and a layer for praise and blame."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(40, width)
        self.gru = nn.GRU(width, 24, batch_first=True)
        self.head = nn.Linear(24, 2)

    def forward(self, text: Tensor) -> Tensor:
        """Logits, from the mean over the text."""
        out: Tensor = self.head(self.gru(self.words(text))[0].mean(1))
        return out


def vectors_put_in_later(watch: Watch, seed: int, healed: bool) -> float:
    """Ready-made word vectors, too small to tell much at first, replaced the parameter that the optimizer had."""
    torch.manual_seed(seed)
    texts, praise = reviews(2000)
    net = Sentiment()
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    monitor = watch(net, adam)
    ready = 0.02 * torch.randn(40, 16)
    if healed:
        net.words.weight.data.copy_(ready)
    else:
        net.words.weight = nn.Parameter(ready)
    return descend(monitor, adam, lambda x, y: F.cross_entropy(net(x), y), batches(texts, praise, 32, 150))


def thawed_too_late(watch: Watch, seed: int, healed: bool) -> float:
    """The optimizer took what required a gradient when the body was frozen; when it was thawed, no optimizer had it."""
    torch.manual_seed(seed)
    images, labels = digits(2500)
    body = nn.Sequential(nn.Flatten(), nn.Linear(100, 48), nn.ReLU())
    net = nn.Sequential(body, nn.Linear(48, 10))
    body.requires_grad_(False)
    chosen = [parameter for parameter in net.parameters() if healed or parameter.requires_grad]
    adam = torch.optim.Adam(chosen, lr=1e-2)
    monitor, losses = watch(net, adam), []
    for step, (x, y) in enumerate(batches(images, labels, 32, 300)):
        if step == 40:
            body.requires_grad_(True)
        adam.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        losses.append(loss.detach())
    return last(losses)


class Attentive(nn.Module):
    """Self-attention over the words, with a projection behind it."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 24)
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True)
        self.project = nn.Linear(24, 24) if kept else None
        self.head = nn.Linear(24, 2)

    def forward(self, text: Tensor) -> Tensor:
        """Logits, from the mean over the text."""
        words = self.words(text)
        seen = self.attention(words, words, words)[0]
        project = self.project or nn.Linear(24, 24)
        out: Tensor = self.head(torch.tanh(4 * project(seen)).mean(1))
        return out


def layer_made_in_forward(watch: Watch, seed: int, healed: bool) -> float:
    """The projection behind the attention was made in forward, a new one for each batch."""
    torch.manual_seed(seed)
    texts, praise = reviews(2000)
    net = Attentive(kept=healed)
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    return descend(watch(net, adam), adam, lambda x, y: F.cross_entropy(net(x), y), batches(texts, praise, 32, 150))


class Convolving(nn.Module):
    """Two graph convolutions, whose first weight is a parameter or just a tensor."""

    def __init__(self, adjacency: Tensor, parameter: bool) -> None:
        super().__init__()
        weight = torch.randn(64, 16) / 8
        self.first = nn.Parameter(weight) if parameter else weight.requires_grad_()
        self.second = nn.Linear(16, 4)
        root = adjacency.sum(1).rsqrt()
        self.register_buffer("adjacency", root[:, None] * adjacency * root)

    def forward(self, bags: Tensor) -> Tensor:
        """Logits of the subjects."""
        adjacency = self.get_buffer("adjacency")
        out: Tensor = adjacency @ self.second(torch.relu(adjacency @ bags @ self.first))
        return out


def tensor_for_a_weight(watch: Watch, seed: int, healed: bool) -> float:
    """The weight of a graph convolution was a tensor that requires a gradient, and no parameter."""
    torch.manual_seed(seed)
    bags, subjects, adjacency = citations()
    bags = (bags - bags.mean(0)) / bags.std(0)
    net = Convolving(adjacency, parameter=healed)
    adam = torch.optim.Adam(net.parameters(), lr=1e-2)
    monitor, losses = watch(net, adam), []
    for _ in range(100):
        adam.zero_grad()
        loss = F.cross_entropy(net(bags), subjects)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        losses.append(loss.detach())
    return last(losses)


def judged_by_nobody(watch: Watch, seed: int, healed: bool) -> float:
    """The discriminator's optimizer got the generator's parameters; the measure is the distance of the means."""
    torch.manual_seed(seed)
    goal = torch.tensor([1.5, -1.0])
    forger, judge = dense([4, 32, 2], nn.ReLU), dense([2, 32, 1], nn.ReLU)
    gan = nn.ModuleDict({"forger": forger, "judge": judge})
    forging = torch.optim.SGD(forger.parameters(), lr=0.05)
    judging = torch.optim.SGD((judge if healed else forger).parameters(), lr=0.2)
    monitor, distances = watch(gan, forging, judging), []
    for _ in range(300):
        real, noise = 0.5 * torch.randn(64, 2) + goal, torch.randn(64, 4)
        gan.zero_grad()
        judged = F.softplus(-judge(real)).mean() + F.softplus(judge(forger(noise))).mean()
        judged.backward()
        judging.step()
        gan.zero_grad()
        fake = forger(noise)
        forged = F.softplus(-judge(fake)).mean()
        forged.backward()
        monitor.log_scalar("loss", forged.detach())
        forging.step()
        distances.append((fake.detach().mean(0) - goal).norm())
    return last(distances)


def hardest_choice(watch: Watch, seed: int, healed: bool) -> float:
    """A first net chose one of four codes by argmax, and a second one read the code, so nothing told the first what to choose."""
    torch.manual_seed(seed)
    points, labels = blobs(3000, 4, 20, apart=3.0)
    chooser, reader = dense([20, 32, 4], nn.ReLU), dense([4, 16, 4], nn.ReLU)
    net = nn.ModuleDict({"chooser": chooser, "reader": reader})
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        scores = chooser(x)
        code = F.gumbel_softmax(scores, hard=True) if healed else F.one_hot(scores.argmax(1), 4).float()
        return F.cross_entropy(reader(code), y)

    return descend(watch(net, adam), adam, loss_of, batches(points, labels, 32, 250))


def two_zero_matrices(watch: Watch, seed: int, healed: bool) -> float:
    """Both matrices of the adapter began at zero, so neither got a gradient through the other."""
    torch.manual_seed(seed)
    points, labels = blobs(3000, 6, 20)
    body = dense([20, 64, 6], nn.ReLU).requires_grad_(False)
    down, up = nn.Linear(20, 4, bias=False), nn.Linear(4, 64, bias=False)
    if not healed:
        nn.init.zeros_(down.weight)
    nn.init.zeros_(up.weight)
    net = nn.ModuleDict({"body": body, "down": down, "up": up})
    adam = torch.optim.Adam([*down.parameters(), *up.parameters()], lr=1e-2)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(body[2](torch.relu(body[0](x) + 4 * up(down(x)))), y)

    return descend(watch(net, adam), adam, loss_of, batches(points, labels, 32, 250))


def frozen_by_the_test(watch: Watch, seed: int, healed: bool) -> float:
    """A test froze the encoder, as it needs no gradient, and nothing thawed it; it was hardly trained by then."""
    torch.manual_seed(seed)
    images, kinds = shapes(2500)
    encoder = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten())
    head = nn.Linear(72, 6)
    net = nn.Sequential(encoder, head)
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    monitor, losses = watch(net, adam), []
    for step, (x, y) in enumerate(batches(images[500:], kinds[500:], 32, 250)):
        if step % 25 == 20:
            encoder.requires_grad_(False)
            monitor.log_scalar("test", F.cross_entropy(net(images[:500]), kinds[:500]).detach())
            encoder.requires_grad_(healed)
        adam.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        losses.append(loss.detach())
    return last(losses)


CASES: list[Case] = [
    second(
        "word-vectors-put-in-later/gru",
        "questions",
        "https://github.com/pytorch/pytorch/issues/70352; https://github.com/pytorch/pytorch/issues/14467",
        ("dead-hooks", "not-in-optimizer"),
        vectors_put_in_later,
        "words.weight = nn.Parameter(ready) after the optimizer was made",
        "words.weight.data.copy_(ready)",
    ),
    second(
        "thawed-but-not-in-optimizer/digits",
        "questions",
        "https://github.com/fastai/fastai/issues/2133",
        ("not-in-optimizer",),
        thawed_too_late,
        "only parameters that require a gradient when the optimizer is made",
        "all parameters",
    ),
    second(
        "layer-made-in-forward/attention",
        "questions",
        "https://github.com/graykode/nlp-tutorial/issues/29",
        ("unregistered-parameters",),
        layer_made_in_forward,
        "nn.Linear(24, 24) in forward",
        "in __init__",
    ),
    second(
        "tensor-for-a-weight/gcn",
        "questions",
        "https://github.com/rballester/tntorch/issues/3",
        ("unregistered-parameters",),
        tensor_for_a_weight,
        "weight.requires_grad_()",
        "nn.Parameter(weight)",
    ),
    second(
        "optimizer-of-the-other-net/gan",
        "questions",
        "https://github.com/zhaoyuzhi/deepfillv2/pull/3; https://github.com/wiseodd/controlled-text-generation/issues/15",
        ("parameter-in-two-optimizers", "not-in-optimizer"),
        judged_by_nobody,
        "judging = SGD(forger.parameters())",
        "judge.parameters()",
    ),
    second(
        "argmax-between-nets/blobs",
        "questions",
        "https://github.com/lizekang/ITDD/issues/10",
        ("no-gradient",),
        hardest_choice,
        "one_hot(scores.argmax(1))",
        "gumbel_softmax(scores, hard=True)",
    ),
    second(
        "two-zero-matrices/adapter",
        "questions",
        "https://github.com/Guitaricet/relora/issues/18",
        ("no-gradient", "equal-units", "initialisation-scale", "zero-update"),
        two_zero_matrices,
        "zeros_ for both matrices",
        "for the second",
    ),
    second(
        "frozen-by-the-test/shapes",
        "questions",
        "https://github.com/yunxiaoshi/Neural-IMage-Assessment/issues/41, where freezing must be undone",
        ("gradient-dropped-to-zero", "no-gradient"),
        frozen_by_the_test,
        "requires_grad_(False) for a test",
        "requires_grad_(True) after it",
    ),
]
