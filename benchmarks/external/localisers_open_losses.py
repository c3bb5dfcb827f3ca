"""Losses and last layers that do not belong together, and scales of the logits that leave nothing to learn from."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Case, Watch
from .data_localisers import (
    DEEPFD,
    HUMBATOVA,
    NEURALINT,
    TAXONOMY,
    UMLAUT,
    batches,
    dense,
    digits,
    fit,
    houses,
    rings,
    spirals,
    topics,
)


def convolutions(*end: nn.Module) -> nn.Sequential:
    """Two convolutions with pooling, as for MNIST, and a classifier that ends in these modules."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
        *end,
    )


def absolute_error(watch: Watch, seed: int, healed: bool) -> float:
    """Topics of short texts were learned by the mean absolute error of probabilities, which is flat where they are even."""
    torch.manual_seed(seed)
    x, y = topics(3000, classes=20)
    model = nn.Sequential(nn.Linear(300, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 20))

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        if healed:
            return functional.cross_entropy(logits, labels)
        return functional.l1_loss(logits.softmax(1), functional.one_hot(labels, 20).float())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return fit(watch, model, optimizer, criterion, batches(x, y, 32, 300))


def softmax_then_cross_entropy(watch: Watch, seed: int, healed: bool) -> float:
    """The net ended in a softmax, as Keras wants it, and CrossEntropyLoss took another softmax of that."""
    torch.manual_seed(seed)
    x, y = digits(3000)
    model = convolutions() if healed else convolutions(nn.Softmax(dim=1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return fit(watch, model, optimizer, nn.CrossEntropyLoss(), batches(x, y, 32, 200))


def sigmoid_then_logits(watch: Watch, seed: int, healed: bool) -> float:
    """A binary classifier ended in a sigmoid, and its loss took a sigmoid of what is never below zero."""
    torch.manual_seed(seed)
    x, y = rings(2000)
    model = dense([2, 32, 32, 1], nn.ReLU)
    if not healed:
        model.append(nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return fit(watch, model, optimizer, nn.BCEWithLogitsLoss(), batches(x, y[:, None].float(), 32, 300))


def relu_ends_regression(watch: Watch, seed: int, healed: bool) -> float:
    """Prices were standardised, so that half of them are negative, and the last layer was a ReLU like those before it."""
    torch.manual_seed(seed)
    x, y = houses(2000)
    model = dense([5, 48, 48, 1], nn.ReLU)
    model.append(nn.Identity() if healed else nn.ReLU())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return fit(watch, model, optimizer, nn.MSELoss(), batches((x - x.mean(0)) / x.std(0), y, 32, 300))


def relu_before_cross_entropy(watch: Watch, seed: int, healed: bool) -> float:
    """The last layer of a classifier had a ReLU too: a class whose logit is cut off gets no gradient."""
    torch.manual_seed(seed)
    x, y = digits(3000)
    model = convolutions() if healed else convolutions(nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return fit(watch, model, optimizer, nn.CrossEntropyLoss(), batches(x, y, 32, 300))


def without_activations(watch: Watch, seed: int, healed: bool) -> float:
    """Four linear layers with nothing between them are one linear layer, which cannot follow a spiral."""
    torch.manual_seed(seed)
    x, y = spirals(1500)
    model = dense([2, 48, 48, 48, 3], nn.ReLU if healed else nn.Identity)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return fit(watch, model, optimizer, nn.CrossEntropyLoss(), batches(x, y, 32, 400))


def lukewarm_logits(watch: Watch, seed: int, healed: bool) -> float:
    """Logits were divided by a temperature of a thousand: all classes are as likely, and the gradient is a thousandth."""
    torch.manual_seed(seed)
    x, y = digits(3000)
    model = convolutions()
    temperature = 1.0 if healed else 1000.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits / temperature, labels)

    return fit(watch, model, optimizer, criterion, batches(x, y, 32, 250))


def scorching_logits(watch: Watch, seed: int, healed: bool) -> float:
    """Logits were multiplied by a hundred before the loss, so each step overshot a hundredfold."""
    torch.manual_seed(seed)
    x, y = digits(3000)
    model = dense([100, 64, 10], nn.ReLU)
    sharpness = 1.0 if healed else 100.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(sharpness * logits, labels)

    return fit(watch, model, optimizer, criterion, batches(x.flatten(1), y, 32, 300))


CASES = [
    Case(
        "wrong-loss/absolute-error-of-probabilities",
        "localisers",
        f"{HUMBATOVA}, mutant R4 (loss changed, LCH) of the Reuters model; 'inappropriate loss' in {DEEPFD}",
        ("loss-at-chance", "loss-plateau"),
        absolute_error,
        "l1_loss(softmax, one hot)",
        "cross_entropy",
    ),
    Case(
        "softmax-before-cross-entropy/digits-cnn",
        "localisers",
        f"{UMLAUT}, heuristic 'last model layer has nonlinear activation'; {NEURALINT}, rule checkWrongLossInputs",
        ("softmax-before-loss",),
        softmax_then_cross_entropy,
        "nn.Softmax before nn.CrossEntropyLoss",
        "logits",
    ),
    Case(
        "sigmoid-before-bce-with-logits/rings",
        "localisers",
        f"{NEURALINT}, rule checkBinWrongLastLayerActivation",
        ("softmax-before-loss",),
        sigmoid_then_logits,
        "nn.Sigmoid before nn.BCEWithLogitsLoss",
        "logits",
    ),
    Case(
        "relu-ends-regression/houses",
        "localisers",
        f"{UMLAUT}, heuristic 'last model layer has nonlinear activation'; 'inappropriate activation' in {DEEPFD}",
        ("dead-units", "loss-plateau", "relu-before-loss"),
        relu_ends_regression,
        "nn.ReLU behind the output",
        "nn.Identity",
    ),
    Case(
        "relu-before-cross-entropy/digits-cnn",
        "localisers",
        f"{UMLAUT}, heuristic 'last model layer has nonlinear activation'",
        ("dead-units", "relu-before-loss"),
        relu_before_cross_entropy,
        "nn.ReLU behind the logits",
        "logits",
    ),
    Case(
        "missing-activations/spirals",
        "localisers",
        f"{UMLAUT}, heuristic 'missing activation functions'; {NEURALINT}, rule checkMissingRelus",
        ("loss-plateau", "loss-at-chance"),
        without_activations,
        "nothing between the linear layers",
        "nn.ReLU between them",
    ),
    Case(
        "logits-divided/digits-cnn",
        "localisers",
        f"{TAXONOMY}, wrong loss function calculation: a temperature far too high",
        ("loss-scale", "loss-at-chance"),
        lukewarm_logits,
        "logits / 1000",
        "logits",
    ),
    Case(
        "logits-multiplied/digits-mlp",
        "localisers",
        f"{TAXONOMY}, wrong loss function calculation: a temperature far too low",
        ("loss-scale", "learning-rate-high", "exploding-gradients"),
        scorching_logits,
        "100 * logits",
        "logits",
    ),
]
