"""Layers that begin as copies of each other, lack a bias or units, drop nearly everything, never move, or stay in eval mode."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Case, Watch
from .data_localisers import (
    DEEPCRIME,
    HUMBATOVA,
    NEURALINT,
    TAXONOMY,
    UMLAUT,
    batches,
    blobs,
    dense,
    digits,
    fit,
    houses,
    last,
    shapes,
    topics,
)


def zero_weights(watch: Watch, seed: int, healed: bool) -> float:
    """All weights began at zero, so no layer passed anything on or back, and only the last bias learned."""
    torch.manual_seed(seed)
    x, y = digits(3000)
    model = dense([100, 64, 64, 10], nn.ReLU)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight) if healed else nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x.flatten(1), y, 32, 300))


def one_constant(watch: Watch, seed: int, healed: bool) -> float:
    """All weights of a layer began at one constant, so its units got the same gradient and stayed the same for ever."""
    torch.manual_seed(seed)
    x, y = blobs(2000, 8, 32)
    model = dense([32, 64, 64, 8], nn.Tanh)
    for layer in (model[0], model[2]):
        assert isinstance(layer, nn.Linear)
        nn.init.xavier_normal_(layer.weight) if healed else nn.init.constant_(layer.weight, 0.1)
        nn.init.zeros_(layer.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x, y, 32, 250))


def no_bias(watch: Watch, seed: int, healed: bool) -> float:
    """No layer had a bias: every boundary went through the origin, on the one side of which all the data lies."""
    torch.manual_seed(seed)
    x, y = blobs(2000, 2, 2, apart=0.0)
    x[:, 0] = 4 + 0.6 * x[:, 0] + 0.9 * y
    x[:, 1] = 0.6 * x[:, 1]
    model = nn.Linear(2, 2, bias=healed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x, y, 32, 400))


def statistics_at_rest(watch: Watch, seed: int, healed: bool) -> float:
    """Momentum of zero meant that no batch counts: batch norm trained well and was evaluated as on its first day."""
    torch.manual_seed(seed)
    x, y = shapes(2300)
    held_x, held_y, x, y = x[:300], y[:300], x[300:], y[300:]
    momentum = 0.1 if healed else 0.0
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16, momentum=momentum),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32, momentum=momentum),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 6),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor, losses = watch(model, optimizer), []
    for step, (images, labels) in enumerate(batches(x, y, 32, 200)):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        optimizer.step()
        losses.append(loss.detach())
        if step % 50 == 49:
            model.eval()
            with monitor.no_monitor(), torch.no_grad():
                held_out = functional.cross_entropy(model(held_x), held_y)
            model.train()
            monitor.log_scalar("held-out loss", held_out)
    return last(losses)


def too_few_units(watch: Watch, seed: int, healed: bool) -> float:
    """A hidden layer of two units was to tell ten digits apart."""
    torch.manual_seed(seed)
    x, y = digits(3000)
    model = dense([100, 64 if healed else 2, 10], nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x.flatten(1), y, 32, 400))


def dropping_nearly_all(watch: Watch, seed: int, healed: bool) -> float:
    """Dropout was given what to drop and taken for what to keep: nineteen of twenty units were silent."""
    torch.manual_seed(seed)
    x, y = digits(3000)
    rate = 0.05 if healed else 0.95
    model = nn.Sequential(nn.Linear(100, 96), nn.ReLU(), nn.Dropout(rate), nn.Linear(96, 96), nn.ReLU(), nn.Dropout(rate))
    model.append(nn.Linear(96, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return fit(watch, model, optimizer, functional.cross_entropy, batches(x.flatten(1), y, 32, 300))


def left_in_eval(watch: Watch, seed: int, healed: bool) -> float:
    """The validation before each epoch put the net in eval mode, and nothing put it back."""
    torch.manual_seed(seed)
    x, y = houses(1800)
    x = 3 * (x - x.mean(0)) / x.std(0) + 5
    held_x, held_y, x, y = x[:300], y[:300], x[300:], y[300:]
    model = nn.Sequential(nn.Linear(5, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    monitor, losses = watch(model, optimizer), []
    for _ in range(6):
        model.eval()
        with monitor.no_monitor(), torch.no_grad():
            held_out = functional.mse_loss(model(held_x), held_y)
        if healed:
            model.train()
        monitor.log_scalar("held-out loss", held_out)
        for inputs, price in batches(x, y, 32, 40):
            optimizer.zero_grad()
            loss = functional.mse_loss(model(inputs), price)
            loss.backward()
            monitor.log_scalar("loss", loss.detach())
            optimizer.step()
            losses.append(loss.detach())
    return last(losses)


def crushed_by_penalty(watch: Watch, seed: int, healed: bool) -> float:
    """The sum of all absolute weights went into the loss with a factor that leaves none of them."""
    torch.manual_seed(seed)
    x, y = topics(3000)
    model = nn.Sequential(nn.Linear(300, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 8))
    factor = 1e-5 if healed else 1e-2

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits, labels) + factor * sum(p.abs().sum() for p in model.parameters())

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return fit(watch, model, optimizer, criterion, batches(x, y, 32, 300))


CASES = [
    Case(
        "zero-initialisation/digits-mlp",
        "localisers",
        f"{HUMBATOVA}, mutants M1 and R6 (weights initialisation, WCI); {NEURALINT}, TF_lenet_zeros_init",
        ("equal-units", "initialisation-scale", "dead-units", "no-gradient"),
        zero_weights,
        "nn.init.zeros_",
        "nn.init.kaiming_normal_",
    ),
    Case(
        "constant-initialisation/tanh-mlp",
        "localisers",
        f"{NEURALINT}, rule checkConstantInit",
        ("equal-units",),
        one_constant,
        "nn.init.constant_(weight, 0.1)",
        "nn.init.xavier_normal_",
    ),
    Case(
        "bias-missing/logistic-regression",
        "localisers",
        f"{DEEPCRIME}, operator WRB (bias removed); {TAXONOMY}, layer properties: missing bias",
        ("loss-at-chance",),
        no_bias,
        "bias=False",
        "bias=True",
    ),
    Case(
        "batch-norm-momentum-zero/shapes-cnn",
        "localisers",
        f"{TAXONOMY}, layer properties; https://brainreview.org/blog/batchnormalization-mismatch-between-pytorch-and-2",
        ("batch-norm-frozen",),
        statistics_at_rest,
        "momentum=0.0",
        "momentum=0.1",
    ),
    Case(
        "too-few-units/digits-mlp",
        "localisers",
        f"{TAXONOMY}, layer properties: wrong number of neurons in layer",
        (),
        too_few_units,
        "2 hidden units",
        "64 hidden units",
        out_of_sight="A small model learns what it can; nothing tells its floor from that of a hard task.",
    ),
    Case(
        "dropout-of-nearly-all/digits-mlp",
        "localisers",
        f"{UMLAUT}, heuristic 'high dropout rate'; {DEEPCRIME}, operator RCD (dropout rate changed)",
        ("dropout-high",),
        dropping_nearly_all,
        "nn.Dropout(0.95)",
        "nn.Dropout(0.05)",
    ),
    Case(
        "left-in-eval-mode/batch-norm-regression",
        "localisers",
        "https://karpathy.github.io/2019/04/25/recipe/ and the common mistakes it begins with",
        ("eval-mode", "batch-norm-frozen"),
        left_in_eval,
        "no model.train() after model.eval()",
        "model.train()",
    ),
    Case(
        "penalty-too-strong/topics",
        "localisers",
        f"{HUMBATOVA}, mutant R1 (weights regularisation added, RAW): l1 on the Reuters model",
        ("weight-decay-high", "loss-at-chance"),
        crushed_by_penalty,
        "0.01 * sum of absolute weights",
        "1e-5 *",
    ),
]
