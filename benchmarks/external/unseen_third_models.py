"""Trainings whose model is put together wrongly, as people asked about them, each with its twin of the right model."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..faults.training import last
from .case import Case, Watch
from .data_localisers import batches, digits, reviews, shapes, step_and_log, topics
from .data_questions import figures, spirals, table

DEPTH = 24


class Block(nn.Module):
    """A residual block of a normalisation, two linear layers and an activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The input plus what the layers make of it."""
        out: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm(x))))
        return out


class ResidualNet(nn.Module):
    """Blocks between a layer that widens the input and one that gives the classes; ``hold`` keeps the blocks."""

    def __init__(self, hold: Callable[[list[nn.Module]], list[nn.Module] | nn.ModuleList]) -> None:
        super().__init__()
        self.enter = nn.Linear(2, 32)
        self.blocks = hold([Block(32) for _ in range(4)])
        self.leave = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the arms."""
        h = self.enter(x)
        for block in self.blocks:
            h = block(h)
        out: Tensor = self.leave(h)
        return out


def plain_list(watch: Watch, seed: int, healed: bool) -> float:
    """Residual blocks in a plain list or in a module list, on two spirals."""
    torch.manual_seed(seed)
    points, arms = spirals(2000, torch.Generator().manual_seed(seed))
    model = ResidualNet(nn.ModuleList if healed else list)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor, losses = watch(model, optimizer), []
    for x, y in batches(points, arms, 64, 300):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
    return last(losses)


class LateHead(nn.Module):
    """Convolutions and a linear layer that the first call makes for the size of its input, or each call with ``again``."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 12, 3)
        self.conv2 = nn.Conv2d(12, 24, 3)
        self.head: nn.Linear | None = None
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the shapes."""
        h = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2).flatten(1)
        if self.head is None or self.again:
            self.head = nn.Linear(h.shape[1], 6)
        out: Tensor = self.head(h)
        return out


def head_in_forward(watch: Watch, seed: int, healed: bool) -> float:
    """A head that each call makes anew, or that a trial image makes before there is an optimizer."""
    torch.manual_seed(seed)
    images, labels = shapes(2000)
    x, y = (images - 0.22) / 0.28, labels
    model = LateHead(again=not healed)
    model(x[:1])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor, losses = watch(model, optimizer), []
    for inputs, targets in batches(x, y, 64, 200):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
    return last(losses)


def citations(count: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Words of papers, which favour their field; the normalised matrix of who cites whom, mostly within a field; and the fields."""
    fields = torch.randint(classes, (count,))
    alike = fields[:, None] == fields
    cites = torch.triu(torch.rand(count, count) < torch.where(alike, 0.05, 0.006), 1).float()
    joined = cites + cites.T + torch.eye(count)
    root = joined.sum(1).rsqrt()
    favours = torch.randn(classes, 24)
    return favours[fields] + 1.5 * torch.randn(count, 24), root[:, None] * joined * root, fields


class DeepGCN(nn.Module):
    """Many graph convolutions, with or without the input of each added to its output."""

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(24, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(DEPTH))
        self.leave = nn.Linear(32, 5)
        self.residual = residual

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        """Logits of the fields."""
        h = F.relu(self.enter(x))
        for layer in self.layers:
            passed = F.relu(layer(graph @ h))
            h = h + 0.3 * passed if self.residual else passed
        out: Tensor = self.leave(h)
        return out


def deep_graph(watch: Watch, seed: int, healed: bool) -> float:
    """The field of a paper from its words and its citations, by many layers without or with residual connections."""
    torch.manual_seed(seed)
    words, graph, fields = citations(400, 5)
    model = DeepGCN(residual=healed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor, losses = watch(model, optimizer), []
    known = torch.rand(400) < 0.6
    for _epoch in range(150):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words, graph)[known], fields[known])
        loss.backward()
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
    return last(losses)


class AttentionPool(nn.Module):
    """The opinion of a text by one learned query that attends to its words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.position = nn.Parameter(0.1 * torch.randn(16, 32))
        self.query = nn.Parameter(torch.randn(1, 1, 32))
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.out = nn.Linear(32, 2)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        """Logits of praise and blame."""
        h = self.embed(words) + self.position
        pooled, _ = self.attention(self.query.expand(len(words), -1, -1), h, h, key_padding_mask=mask)
        out: Tensor = self.out(self.norm(pooled[:, 0]))
        return out


def mask_inverted(watch: Watch, seed: int, healed: bool) -> float:
    """A padding mask that is true at the words, or at the padding as the layer expects."""
    torch.manual_seed(seed)
    texts, liked = reviews(3000)
    model = AttentionPool()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    monitor, losses = watch(model, optimizer), []
    for words, y in batches(texts, liked, 64, 300):
        mask = words == 0 if healed else words != 0
        loss = F.cross_entropy(model(words, mask), y)
        losses.append(step_and_log(monitor, optimizer, loss))
    return last(losses)


class Rhythm(nn.Module):
    """Which of four paces a series has, by an LSTM whose input has time first, where ``turn`` puts it."""

    def __init__(self, turn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 32)
        self.out = nn.Linear(32, 4)
        self.turn = turn

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the paces."""
        outputs, _ = self.lstm(self.turn(x))
        out: Tensor = self.out(outputs[-1])
        return out


def motions(count: int, length: int = 20) -> tuple[Tensor, Tensor]:
    """Two sensors that swing at one of four paces, from a random phase, with noise; and which pace."""
    kinds, time = torch.randint(4, (count,)), torch.arange(length)
    pace, phase = 0.3 + 0.3 * kinds, 2 * torch.pi * torch.rand(count)
    angle = pace[:, None] * time + phase[:, None]
    return torch.stack([angle.sin(), angle.cos()], 2) + 0.2 * torch.randn(count, length, 2), kinds


def view_for_transpose(watch: Watch, seed: int, healed: bool) -> float:
    """A batch of series whose first two dimensions are exchanged by a reshape, which mixes the series, or by a transpose."""
    torch.manual_seed(seed)
    series, kinds = motions(3000)
    model = Rhythm((lambda x: x.transpose(0, 1)) if healed else (lambda x: x.reshape(x.shape[1], x.shape[0], -1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor, losses = watch(model, optimizer), []
    for x, y in batches(series, kinds, 64, 250):
        loss = F.cross_entropy(model(x), y)
        losses.append(step_and_log(monitor, optimizer, loss))
    return last(losses)


class Recall(nn.Module):
    """The first sign of a line by a cell that reads it sign by sign; ``forget`` clears the state before each."""

    def __init__(self, forget: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 16)
        self.cell = nn.GRUCell(16, 48)
        self.out = nn.Linear(48, 8)
        self.forget = forget

    def forward(self, signs: Tensor) -> Tensor:
        """Logits of the first sign."""
        state = torch.zeros(len(signs), 48)
        for step in range(signs.shape[1]):
            if self.forget:
                state = torch.zeros(len(signs), 48)
            state = self.cell(self.embed(signs[:, step]), state)
        out: Tensor = self.out(state)
        return out


def state_cleared(watch: Watch, seed: int, healed: bool) -> float:
    """A line of signs whose first one is the target, with a state that is cleared before each sign or only before the first."""
    torch.manual_seed(seed)
    model = Recall(forget=not healed)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    monitor, losses = watch(model, optimizer), []
    for _step in range(300):
        signs = torch.randint(8, (64, 7))
        loss = F.cross_entropy(model(signs), signs[:, 0])
        losses.append(step_and_log(monitor, optimizer, loss))
    return last(losses)


class OrderNet(nn.Module):
    """Which of two marked words of a line comes first, by a transformer with or without positions."""

    place: Tensor

    def __init__(self, positions: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        angle = torch.arange(12)[:, None] / 10 ** torch.linspace(0, 2, 16)
        self.register_buffer("place", torch.cat([angle.sin(), angle.cos()], 1))
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.out = nn.Linear(32, 2)
        self.positions = positions

    def forward(self, words: Tensor) -> Tensor:
        """Logits of the two orders."""
        h = self.embed(words)
        if self.positions:
            h = h + self.place
        out: Tensor = self.out(self.encoder(h).mean(1))
        return out


def no_positions(watch: Watch, seed: int, healed: bool) -> float:
    """Lines in which one word stands before or after another, read without or with positions."""
    torch.manual_seed(seed)
    model = OrderNet(positions=healed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor, losses = watch(model, optimizer), []
    for _step in range(220):
        words, rows = torch.randint(2, 20, (64, 12)), torch.arange(64)
        spots = torch.rand(64, 12).argsort(1)[:, :2]
        words[rows, spots[:, 0]], words[rows, spots[:, 1]] = 0, 1
        first = (spots[:, 0] < spots[:, 1]).long()
        loss = F.cross_entropy(model(words), first)
        losses.append(step_and_log(monitor, optimizer, loss))
    return last(losses)


class Commands(nn.Module):
    """Which command a line begins with, by an RNN over the line and the padding behind it."""

    def __init__(self, at_end: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 24, padding_idx=0)
        self.rnn = nn.RNN(24, 48, batch_first=True)
        self.out = nn.Linear(48, 6)
        self.at_end = at_end

    def forward(self, words: Tensor) -> Tensor:
        """Logits of the commands, from the last word or the last place."""
        outputs, _ = self.rnn(self.embed(words))
        ends = (words != 0).sum(1) - 1 if self.at_end else torch.full((len(words),), -1)
        out: Tensor = self.out(outputs[torch.arange(len(words)), ends])
        return out


def last_is_padding(watch: Watch, seed: int, healed: bool) -> float:
    """Short lines in long rows of padding, classified by the output at the last place or at the last word."""
    torch.manual_seed(seed)
    count = 3000
    commands, lengths = torch.randint(6, (count,)), torch.randint(3, 8, (count, 1))
    words = torch.randint(7, 12, (count, 60))
    words[:, 0] = 1 + commands
    words = words.masked_fill(torch.arange(60) >= lengths, 0)
    model = Commands(at_end=healed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor, losses = watch(model, optimizer), []
    for x, y in batches(words, commands, 64, 250):
        loss = F.cross_entropy(model(x), y)
        losses.append(step_and_log(monitor, optimizer, loss))
    return last(losses)


class Denoiser(nn.Module):
    """An autoencoder that makes a clean figure of a noisy one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 16))
        self.decoder = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 256))


def encoder_cut_off(watch: Watch, seed: int, healed: bool) -> float:
    """An autoencoder whose code is detached, so that the encoder stays random, or not."""
    torch.manual_seed(seed)
    images, _, pixels = figures(3000, torch.Generator().manual_seed(seed))
    noisy, clean = images.flatten(1), pixels.flatten(1).float()
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor, losses = watch(model, optimizer), []
    for x, y in batches(noisy, clean, 64, 350):
        code = model.encoder(x) if healed else model.encoder(x).detach()
        loss = F.binary_cross_entropy_with_logits(model.decoder(code), y)
        losses.append(step_and_log(monitor, optimizer, loss))
    return last(losses)


class NormedCNN(nn.Module):
    """Convolutions with batch norm, dropout, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((1, 8), (8, 12), (12, 12), (12, 16), (16, 16)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.features = nn.Sequential(*layers, nn.MaxPool2d(2))
        self.classify = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 25, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the digits."""
        out: Tensor = self.classify(self.features(x))
        return out


def left_in_eval(watch: Watch, seed: int, healed: bool) -> float:
    """An evaluation every 20 steps, after which the model is set back to training or not; the measure is the last evaluation."""
    torch.manual_seed(seed)
    images, labels = digits(2000)
    x, y = (images - 0.17) / 0.28, labels
    model = NormedCNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    monitor, losses = watch(model, optimizer), []
    for step, (inputs, targets) in enumerate(batches(x[:1600], y[:1600], 50, 160)):
        if step % 20 == 0:
            model.eval()
            with torch.no_grad():
                losses.append(F.cross_entropy(model(x[1600:]), y[1600:]))
            model.train(healed)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
    return float(losses[-1])


class Topics(nn.Module):
    """The topic of a text from which words occur in it, with dropout after each hidden layer."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(300, 64), nn.Linear(64, 64), nn.Linear(64, 8)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the topics."""
        h = self.drop(F.relu(self.fc1(x)))
        out: Tensor = self.fc3(self.drop(F.relu(self.fc2(h))))
        return out


def dropout_for_keep(watch: Watch, seed: int, healed: bool) -> float:
    """The chance of keeping a unit, 0.9, as the chance of dropping it; the measure is the loss in evaluation."""
    torch.manual_seed(seed)
    texts, labels = topics(4000)
    model = Topics(0.1 if healed else 0.9)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = watch(model, optimizer)
    for x, y in batches(texts[:3000], labels[:3000], 64, 250):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
    model.eval()
    with torch.no_grad():
        return float(F.cross_entropy(model(texts[3000:]), labels[3000:]))


class Chances(nn.Module):
    """A yes or no from a table, by three hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [12, 128, 128, 128]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.out = nn.Linear(128, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The logit of yes for each row."""
        for layer in self.hidden:
            x = F.relu(layer(x))
        out: Tensor = self.out(x)[:, 0]
        return out


def normal_weights(watch: Watch, seed: int, healed: bool) -> float:
    """Weights that all have a deviation of one, or that of He et al.; the measure is the loss on new rows."""
    torch.manual_seed(seed)
    rows, answers = table(4000, 12, torch.Generator().manual_seed(seed))
    model = Chances()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight) if healed else nn.init.normal_(layer.weight)
            nn.init.zeros_(layer.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = watch(model, optimizer)
    for x, y in batches(rows[:3000], answers[:3000], 64, 250):
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(x), y)
        loss.backward()
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
    with torch.no_grad():
        return float(F.binary_cross_entropy_with_logits(model(rows[3000:]), answers[3000:]))


CASES: list[Case] = [
    Case(
        name="blocks-in-plain-list/spirals",
        judge="questions",
        source="https://www.engineermaxxing.com/micro/lessons/pytorch-internals.html",
        rules=("unregistered-parameters",),
        run=plain_list,
        bug="self.blocks = [Block(32), ...]",
        fix="self.blocks = nn.ModuleList([Block(32), ...])",
    ),
    Case(
        name="head-made-in-forward/shapes-cnn",
        judge="questions",
        source="https://discuss.pytorch.org/t/can-i-instantiate-layers-in-forward-function/105054",
        rules=("not-in-optimizer", "dead-hooks", "unregistered-parameters"),
        run=head_in_forward,
        bug="self.head = nn.Linear(h.shape[1], 6) in each forward",
        fix="if self.head is None: self.head = nn.Linear(h.shape[1], 6)",
    ),
    Case(
        name="deep-without-residual/citations",
        judge="localisers",
        source="SkipNode, https://arxiv.org/html/2112.11628v4, on over-smoothing and vanishing gradients",
        rules=("vanishing-gradients", "loss-at-chance", "loss-plateau"),
        run=deep_graph,
        bug="h = passed",
        fix="h = h + 0.3 * passed",
    ),
    Case(
        name="padding-mask-inverted/reviews-attention",
        judge="questions",
        source="https://github.com/mlwithme/TransformerTranslation/issues/2",
        rules=("loss-at-chance", "loss-plateau"),
        run=mask_inverted,
        bug="mask = words != 0",
        fix="mask = words == 0",
    ),
    Case(
        name="view-for-transpose/motions-lstm",
        judge="questions",
        source="https://discuss.pytorch.org/t/lstm-change-batch-first-true-loss-does-not-decrease/62364",
        rules=("loss-at-chance", "loss-plateau"),
        run=view_for_transpose,
        bug="x.reshape(x.shape[1], x.shape[0], -1)",
        fix="x.transpose(0, 1)",
    ),
    Case(
        name="state-cleared-at-each-step/recall-gru-cell",
        judge="questions",
        source="https://www.codegenes.net/blog/pytorch-lstm-reset-hidden-state",
        rules=("no-gradient",),
        run=state_cleared,
        bug="state = torch.zeros(len(signs), 48) in the loop",
        fix="state = torch.zeros(len(signs), 48) before the loop",
    ),
    Case(
        name="no-positions/word-order-transformer",
        judge="questions",
        source="https://thecodeforge.io/ml-ai/attention-is-all-you-need/",
        rules=("loss-at-chance", "loss-plateau"),
        run=no_positions,
        bug="h = self.embed(words)",
        fix="h = self.embed(words) + self.place",
    ),
    Case(
        name="last-output-is-of-padding/commands-rnn",
        judge="questions",
        source="https://codemia.io/knowledge-hub/path/how_lstm_deal_with_variable_length_sequence",
        rules=("vanishing-gradients", "loss-at-chance", "loss-plateau"),
        run=last_is_padding,
        bug="outputs[:, -1]",
        fix="outputs[rows, lengths - 1]",
    ),
    Case(
        name="code-detached/denoising-autoencoder",
        judge="questions",
        source="https://www.cnblogs.com/ljf-0/p/14015601.html",
        rules=("no-gradient",),
        run=encoder_cut_off,
        bug="code = model.encoder(x).detach()",
        fix="code = model.encoder(x)",
    ),
    Case(
        name="not-back-to-training/digits-cnn",
        judge="questions",
        source="https://network-perspective.github.io/OpenShrike/library/checks/pytorch/"
        "pytorch-rel-001-correct-train-eval-mode-switching/",
        rules=("eval-mode",),
        run=left_in_eval,
        bug="model.eval() and no model.train() after it",
        fix="model.train() after the evaluation",
    ),
    Case(
        name="kept-share-as-dropout/topics",
        judge="questions",
        source="https://discuss.pytorch.org/t/the-p-in-dropout/10698",
        rules=("dropout-high",),
        run=dropout_for_keep,
        bug="nn.Dropout(0.9)",
        fix="nn.Dropout(0.1)",
    ),
    Case(
        name="weights-of-deviation-one/table",
        judge="questions",
        source="https://runebook.dev/en/docs/pytorch/nn.init/torch.nn.init.normal_",
        rules=("initialisation-scale", "exploding-gradients"),
        run=normal_weights,
        bug="nn.init.normal_(layer.weight)",
        fix="nn.init.kaiming_normal_(layer.weight)",
    ),
]
