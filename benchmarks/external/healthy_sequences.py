"""Sound trainings on sequences: a translation with attention, names letter by letter, and a sum over a long time."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Watch
from .data_healthy import TUTORIALS, batches, healthy, last

# what a decoder begins with, behind ten digits
START = 10
ENDINGS = (
    ("son", "ton", "ley", "ford"),
    ("ini", "ello", "ucci", "ano"),
    ("ov", "sky", "enko", "in"),
    ("moto", "ura", "aki", "ishi"),
)


class Encoder(nn.Module):
    """Embeds symbols and reads them with a GRU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(10, width), nn.GRU(width, width, batch_first=True)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """All states, and the last one."""
        states, final = self.gru(self.dropout(self.embedding(x)))
        return states, final


class Decoder(nn.Module):
    """Writes one symbol after the other and looks at the encoder's states by additive attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(11, width), nn.GRU(2 * width, width, batch_first=True)
        self.query, self.key, self.score = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)
        self.dropout, self.out = nn.Dropout(0.1), nn.Linear(width, 10)

    def forward(self, states: Tensor, hidden: Tensor, target: Tensor | None) -> Tensor:
        """Log-probabilities of each symbol, from the symbols wanted before it or, without these, from its own."""
        word, outputs = torch.full((len(states), 1), START), []
        for place in range(states.shape[1]):
            scores = self.score(torch.tanh(self.query(hidden.transpose(0, 1)) + self.key(states)))
            context = (scores.softmax(1) * states).sum(1, keepdim=True)
            output, hidden = self.gru(torch.cat([self.dropout(self.embedding(word)), context], 2), hidden)
            outputs.append(self.out(output))
            word = outputs[-1].argmax(2).detach() if target is None else target[:, place : place + 1]
        return F.log_softmax(torch.cat(outputs, 1), -1)


def translation(watch: Watch, seed: int, healed: bool) -> float:
    """Digits are written backwards, each plus one; encoder and decoder have an optimizer each, half the batches are forced."""
    torch.manual_seed(seed)
    source = torch.randint(10, (3000, 6))
    wanted = (source.flip(1) + 1) % 10
    encoder, decoder = Encoder(48), Decoder(48)
    opt_encoder = torch.optim.Adam(encoder.parameters(), lr=5e-3)
    opt_decoder = torch.optim.Adam(decoder.parameters(), lr=5e-3)
    criterion = nn.NLLLoss()
    monitor_encoder, monitor_decoder = watch(encoder, opt_encoder), watch(decoder, opt_decoder)
    losses = []
    for x, y in batches(300, 32, source, wanted):
        opt_encoder.zero_grad()
        opt_decoder.zero_grad()
        states, hidden = encoder(x)
        forced = bool(torch.rand(()) < 0.5)
        loss = criterion(decoder(states, hidden, y if forced else None).flatten(0, 1), y.flatten())
        loss.backward()
        monitor_encoder.log_scalar("loss", loss.detach())
        monitor_decoder.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        opt_encoder.step()
        opt_decoder.step()
    return last(losses)


class Letters(nn.Module):
    """A recurrent net over letters that names a language."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.h2o, self.softmax = nn.RNN(26, 64), nn.Linear(64, 4), nn.LogSoftmax(dim=1)

    def forward(self, line: Tensor) -> Tensor:
        """Log-probabilities of the languages."""
        out: Tensor = self.softmax(self.h2o(self.rnn(line)[1][0]))
        return out


def names(watch: Watch, seed: int, healed: bool) -> float:
    """Names from made-up endings of four languages, eight summed to a batch, as the tutorial does it, under its clip at 3."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    lines: list[tuple[Tensor, Tensor]] = []
    for _ in range(1200):
        language = draw.randrange(4)
        stem = "".join(draw.choice("bdfglmnprst") + draw.choice("aeiou") for _ in range(draw.randint(1, 2)))
        letters = torch.tensor([ord(letter) - ord("a") for letter in stem + draw.choice(ENDINGS[language])])
        lines.append((F.one_hot(letters, 26).float().unsqueeze(1), torch.tensor([language])))
    model = Letters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15)
    criterion = nn.NLLLoss()
    monitor = watch(model, optimizer)
    losses = []
    for (rows,) in batches(300, 8, torch.arange(1200)):
        total = torch.zeros(())
        for row in rows.tolist():
            line, language = lines[row]
            total = total + criterion(model(line), language)
        loss = total / len(rows)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 3)
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


class Past(nn.Module):
    """A convolution over time that sees no future, twice, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, step: int) -> None:
        super().__init__()
        self.reach = 2 * step
        self.conv1 = nn.utils.parametrizations.weight_norm(nn.Conv1d(inputs, outputs, 3, dilation=step))
        self.conv2 = nn.utils.parametrizations.weight_norm(nn.Conv1d(outputs, outputs, 3, dilation=step))
        self.shortcut = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The sequence behind the block."""
        y = F.relu(self.conv1(F.pad(x, (self.reach, 0))))
        y = F.relu(self.conv2(F.pad(y, (self.reach, 0))))
        return F.relu(y + self.shortcut(x))


class Adder(nn.Module):
    """Blocks of growing reach, and a layer behind their last moment."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Past(2 if step == 1 else width, width, step) for step in (1, 2, 4)])
        self.linear = nn.Linear(width, 1)
        nn.init.normal_(self.linear.weight, 0, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        """One number for each sequence."""
        out: Tensor = self.linear(self.blocks(x)[:, :, -1]).squeeze(1)
        return out


def adding(watch: Watch, seed: int, healed: bool) -> float:
    """The sum of the two numbers in a sequence that are marked, by convolutions with weight norm."""
    torch.manual_seed(seed)
    numbers = torch.rand(3000, 24)
    first, second = torch.randint(12, (3000, 1)), torch.randint(12, 24, (3000, 1))
    marks = torch.zeros(3000, 24).scatter(1, first, 1.0).scatter(1, second, 1.0)
    model = Adder()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    monitor = watch(model, optimizer)
    losses = []
    for x, y in batches(400, 32, torch.stack([numbers, marks], 1), (numbers * marks).sum(1)):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


CASES = healthy(
    ("translation-attention", f"{TUTORIALS}/intermediate/seq2seq_translation_tutorial.html", translation),
    ("names-letter-by-letter", f"{TUTORIALS}/intermediate/char_rnn_classification_tutorial.html", names),
    ("adding-problem-tcn", "https://github.com/locuslab/TCN", adding),
)
