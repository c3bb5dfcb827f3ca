"""Sound trainings on text: language models with recurrence and with attention, masked words, and topics."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Watch
from .data_healthy import EXAMPLES, STOP, TUTORIALS, WORDS, Block, batches, causal, corpus, healthy, last, padded, sentences

State = tuple[Tensor, Tensor]


class Recurrent(nn.Module):
    """Two layers of LSTM with dropout, whose last matrix is the embedding."""

    def __init__(self, width: int = 48, dropout: float = 0.2) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(WORDS, width)
        self.rnn = nn.LSTM(width, width, 2, dropout=dropout)
        self.decoder = nn.Linear(width, WORDS)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, words: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Log-probabilities of the next words, and the state behind the last one."""
        output, state = self.rnn(self.drop(self.encoder(words)), state)
        return F.log_softmax(self.decoder(self.drop(output)), -1).flatten(0, 1), state


def lstm_words(watch: Watch, seed: int, healed: bool) -> float:
    """Tied embeddings, a state carried over batches, SGD at rate 20 under a clip at 0.25, annealed when it stops helping."""
    torch.manual_seed(seed)
    train = corpus(16 * 1200).view(16, -1).T.contiguous()
    valid = corpus(8 * 200).view(8, -1).T.contiguous()
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=20)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.25, patience=0)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(4):
        model.train()
        state: State | None = None
        for start in range(0, len(train) - 1, 20):
            words, targets = train[start : start + 20][: len(train) - 1 - start], train[start + 1 : start + 21].flatten()
            if state is not None:
                state = (state[0].detach(), state[1].detach())
            optimizer.zero_grad()
            output, state = model(words, state)
            loss = F.nll_loss(output, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            monitor.log_scalar("loss", loss.detach())
            losses.append(loss.detach())
            optimizer.step()
        model.eval()
        with monitor.no_monitor(), torch.no_grad():
            held_out = F.nll_loss(model(valid[:-1], None)[0], valid[1:].flatten())
        scheduler.step(float(held_out))
    return last(losses)


class Words(nn.Module):
    """A transformer over words with learnt places, and a matrix at its end, tied to the embedding or not."""

    def __init__(self, length: int, width: int, depth: int, dropout: float, tied: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS + 1, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(width, 4, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS + 1, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits of each place."""
        x = self.drop(self.words(words) + self.places(torch.arange(words.shape[1])))
        for block in self.blocks:
            x = block(x, mask)
        out: Tensor = self.head(self.norm(x))
        return out


def transformer_words(watch: Watch, seed: int, healed: bool) -> float:
    """A causal transformer with dropout, SGD at rate 5 under a clip at 0.25, annealed when it stops helping."""
    torch.manual_seed(seed)
    rows = corpus(1200 * 21).view(-1, 21)
    model = Words(20, 48, 2, dropout=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.25, patience=0)
    mask = causal(20)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(5):
        model.train()
        for (row,) in batches(50, 20, rows[:1000]):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(row[:, :-1], mask).flatten(0, 1), row[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            monitor.log_scalar("loss", loss.detach())
            losses.append(loss.detach())
            optimizer.step()
        model.eval()
        with monitor.no_monitor(), torch.no_grad():
            held_out = F.cross_entropy(model(rows[1000:, :-1], mask).flatten(0, 1), rows[1000:, 1:].flatten())
        scheduler.step(float(held_out))
    return last(losses)


def accumulation(watch: Watch, seed: int, healed: bool) -> float:
    """A small GPT: four micro-batches, their losses divided by four, warm-up and cosine, decay for matrices, a clip."""
    torch.manual_seed(seed)
    rows = corpus(2000 * 17).view(-1, 17)
    model = Words(16, 32, 2, dropout=0.0, tied=True)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    steps, warm, mask = 120, 10, causal(16)
    monitor = watch(model, optimizer)
    stream = batches(4 * steps, 12, rows)
    losses = []
    for step in range(steps):
        part = (step - warm) / (steps - warm)
        rate = 3e-3 * (step + 1) / (warm + 1) if step < warm else 3e-4 + 2.7e-3 * 0.5 * (1 + math.cos(math.pi * part))
        for group in optimizer.param_groups:
            group["lr"] = rate
        total = torch.zeros(())
        for _ in range(4):
            (row,) = next(stream)
            loss = F.cross_entropy(model(row[:, :-1], mask).flatten(0, 1), row[:, 1:].flatten()) / 4
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        monitor.log_scalar("loss", total)
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return last(losses)


def masked_words(watch: Watch, seed: int, healed: bool) -> float:
    """A fifth of all words is hidden and guessed from both sides, with AdamW and a rate that falls in a line after warm-up."""
    torch.manual_seed(seed)
    rows = corpus(2000 * 16).view(-1, 16)
    model = Words(16, 48, 2, dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    steps, warm = 300, 30
    line = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / warm, (steps - step) / (steps - warm)))
    monitor = watch(model, optimizer)
    losses = []
    for (row,) in batches(steps, 24, rows):
        hidden = torch.rand(row.shape) < 0.2
        optimizer.zero_grad()
        logits = model(row.masked_fill(hidden, WORDS))
        loss = F.cross_entropy(logits.flatten(0, 1), row.masked_fill(~hidden, -100).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
        line.step()
    return last(losses)


def topics(watch: Watch, seed: int, healed: bool) -> float:
    """The topic of a sentence from the mean of its words, with SGD at rate 5 and a clip at 0.1, as the tutorial has it."""
    torch.manual_seed(seed)
    texts, labels = sentences(2000)
    words, classes = padded(texts, 14), torch.tensor(labels)
    model = nn.Sequential(nn.EmbeddingBag(WORDS, 16, padding_idx=STOP), nn.Linear(16, 4))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    monitor = watch(model, optimizer)
    losses = []
    for _ in range(3):
        for x, y in batches(100, 16, words[:1600], classes[:1600]):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            monitor.log_scalar("loss", loss.detach())
            losses.append(loss.detach())
            optimizer.step()
        scheduler.step()
    return last(losses)


CASES = healthy(
    ("word-language-model-lstm", f"{EXAMPLES}/word_language_model", lstm_words),
    ("word-language-model-transformer", f"{EXAMPLES}/word_language_model", transformer_words),
    ("gpt-gradient-accumulation", "https://github.com/karpathy/nanoGPT", accumulation),
    ("masked-language-model", "https://github.com/OrderLab/TrainCheck (RoBERTa)", masked_words),
    ("topic-classification", f"{TUTORIALS}/beginner/text_sentiment_ngrams_tutorial.html", topics),
)
