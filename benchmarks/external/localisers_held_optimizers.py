"""Optimizers with a number too large, too small or in another's place once more, in language models and forecasts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_gradmon import Checks

from .case import Case, Watch
from .data_localisers import (
    DEEPCRIME,
    DEEPFD,
    HUMBATOVA,
    PAD,
    TAXONOMY,
    UMLAUT,
    batches,
    descend,
    last,
    reviews,
    sentences,
    waves,
)
from .localisers_held_gradients import Forecaster
from .localisers_held_losses import Writer


def surprise(net: nn.Module, text: Tensor) -> Tensor:
    """How surprising each next word of the texts is to the model."""
    return functional.cross_entropy(net(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def half_as_rate(watch: Watch, seed: int, healed: bool) -> float:
    """A language model under AdamW with a learning rate of one half, as if it were plain descent."""
    torch.manual_seed(seed)
    text = sentences(2000)
    net = Writer(normalised=False)
    adamw = torch.optim.AdamW(net.parameters(), lr=5e-3 if healed else 0.5)
    return descend(watch(net, adamw), adamw, lambda x, _: surprise(net, x), batches(text, text, 32, 200))


def halved_each_step(watch: Watch, seed: int, healed: bool) -> float:
    """A schedule meant for epochs was stepped with every batch, and the rate was gone before the first epoch was over."""
    torch.manual_seed(seed)
    series = waves(2000, 31)
    net = Forecaster(nn.GRU(1, 32, batch_first=True))
    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(adam, gamma=0.5)
    losses, monitor = [], watch(net, adam)
    for step, (x, y) in enumerate(batches(series[:, :-1], series[:, 1:], 32, 250)):
        loss = functional.mse_loss(net(x), y)
        adam.zero_grad()
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        adam.step()
        losses.append(loss.detach())
        if step % 62 == 61 or not healed:
            schedule.step()
    return last(losses)


def swapped_in_configuration(watch: Watch, seed: int, healed: bool) -> float:
    """The two decays of AdamW came out of a configuration file in the wrong order."""
    torch.manual_seed(seed)
    text = sentences(2000)
    net = Writer(normalised=False)
    betas = {"slow": 0.999, "fast": 0.9}
    order = ("fast", "slow") if healed else ("slow", "fast")
    adamw = torch.optim.AdamW(net.parameters(), lr=3e-3, betas=(betas[order[0]], betas[order[1]]))
    return descend(watch(net, adamw), adamw, lambda x, _: surprise(net, x), batches(text, text, 32, 200))


def epsilon_above_gradients(watch: Watch, seed: int, healed: bool) -> float:
    """Targets of a few hundredths made small gradients, and an epsilon of a tenth was what Adam divided them by."""
    torch.manual_seed(seed)
    series = waves(2000, 21)
    past, following = series[:, :-1], 0.05 * series[:, -1:]
    net = nn.Sequential(nn.Linear(20, 48), nn.Tanh(), nn.Linear(48, 1))
    nn.init.normal_(net.get_parameter("2.weight"), std=0.01)
    nn.init.zeros_(net.get_parameter("2.bias"))
    adam = torch.optim.Adam(net.parameters(), lr=1e-3, eps=1e-8 if healed else 1e-1)
    return descend(watch(net, adam), adam, lambda x, y: functional.mse_loss(net(x), y), batches(past, following, 32, 300))


class Critic(nn.Module):
    """An encoder for the words of a review, and a judge of what it says."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Embedding(40, 24), nn.Flatten(), nn.Linear(384, 48), nn.ReLU(), nn.Linear(48, 16))
        self.judge = nn.Sequential(nn.ReLU(), nn.Linear(16, 2))

    def forward(self, text: Tensor) -> Tensor:
        """Logits of blame and praise."""
        result: Tensor = self.judge(self.encoder(text))
        return result


def rate_printed_short(watch: Watch, seed: int, healed: bool) -> float:
    """The encoder's rate was written to a file with three places, as 0.000, though the encoder was meant to train."""
    torch.manual_seed(seed)
    texts, labels = reviews(3000)
    net = Critic()
    written = f"{0.0004:.4f}" if healed else f"{0.0004:.3f}"
    groups: list[dict[str, Any]] = [
        {"params": net.encoder.parameters(), "lr": float(written)},
        {"params": net.judge.parameters()},
    ]
    adam = torch.optim.Adam(groups, lr=2e-3)
    monitor = watch(net, adam, checks=Checks(trained=r"^encoder\."))
    return descend(monitor, adam, lambda x, y: functional.cross_entropy(net(x), y), batches(texts, labels, 32, 300))


class Probed(Critic):
    """The same with a probe of what the encoder says about the text's length."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(16, 1)


def probe_moves_encoder(watch: Watch, seed: int, healed: bool) -> float:
    """A probe should only read a text's length from what the encoder says; its optimizer had the encoder too."""
    torch.manual_seed(seed)
    texts, labels = reviews(3000)
    net = Probed()
    main = torch.optim.Adam([*net.encoder.parameters(), *net.judge.parameters()], lr=2e-3)
    aside = torch.optim.Adam((net.probe if healed else net).parameters(), lr=0.05)
    monitor, losses = watch(net, main, aside), []
    for x, y in batches(texts, labels, 32, 250):
        loss = functional.cross_entropy(net(x), y)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        main.step()
        net.zero_grad()
        length = (x != PAD).float().mean(1, keepdim=True)
        functional.mse_loss(net.probe(net.encoder(x)), length).backward()
        aside.step()
        net.zero_grad()
    return last(losses)


def clipped_to_milli(watch: Watch, seed: int, healed: bool) -> float:
    """The limit of the norm was given in thousandths, and read as it stood."""
    torch.manual_seed(seed)
    text = sentences(2000)
    net = Writer(normalised=False)
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    limit = 1.0 if healed else 1.0 / 1000
    losses, monitor = [], watch(net, sgd)
    for batch, _ in batches(text, text, 32, 200):
        net.zero_grad(set_to_none=True)
        loss = surprise(net, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=limit)
        monitor.log_scalar("loss", loss.detach())
        sgd.step()
        losses.append(loss.detach())
    return last(losses)


CASES = [
    Case(
        "learning-rate-high/adamw-of-one-half",
        "localisers",
        f"{HUMBATOVA}, mutants R3 and M3 (learning rate, HLR); 'learning rate' among the fault types of {DEEPFD}",
        ("learning-rate-high", "update-ratio-high"),
        half_as_rate,
        "AdamW(lr=0.5)",
        "lr=5e-3",
    ),
    Case(
        "learning-rate-low/halved-each-step",
        "localisers",
        f"{UMLAUT}, heuristic 'learning rate is low'; {TAXONOMY}, hyperparameters: suboptimal learning rate",
        ("learning-rate-low", "loss-plateau", "zero-update"),
        halved_each_step,
        "schedule.step() in each step",
        "in each epoch",
    ),
    Case(
        "betas-swapped/words",
        "localisers",
        f"{DEEPFD}, fault type 'inappropriate optimizer': its settings; {TAXONOMY}, hyperparameters",
        ("betas-swapped",),
        swapped_in_configuration,
        "betas=(0.999, 0.9)",
        "betas=(0.9, 0.999)",
    ),
    Case(
        "epsilon-above-gradients/small-targets",
        "localisers",
        "https://sifal.social/posts/The-Epsilon-Trap-When-Adam-Stops-Being-Adam",
        ("epsilon-dominates", "learning-rate-low"),
        epsilon_above_gradients,
        "Adam(eps=1e-1)",
        "eps=1e-8",
    ),
    Case(
        "rate-rounds-to-zero/configuration",
        "localisers",
        f"{TAXONOMY}, hyperparameters: suboptimal learning rate, here of one group",
        ("zero-update", "expectation-broken", "update-ratio-low"),
        rate_printed_short,
        'f"{rate:.3f}"',
        'f"{rate:.4f}"',
    ),
    Case(
        "optimizers-share-parameters/probe",
        "localisers",
        "https://github.com/Improbable-AI/walk-these-ways/issues/68",
        ("parameter-in-two-optimizers",),
        probe_moves_encoder,
        "second optimizer of net.parameters()",
        "of net.probe.parameters()",
    ),
    Case(
        "clipped-to-a-thousandth/words",
        "localisers",
        f"{DEEPCRIME}, operator OCG (gradient clip changed)",
        ("always-clipped", "learning-rate-low"),
        clipped_to_milli,
        "max_norm=1.0 / 1000",
        "max_norm=1.0",
    ),
]
