"""Does a learning rate that suits a narrow model suit a wide one? The same perceptron in the standard parametrisation and in muP.

With Adam, every weight of a hidden layer moves by about the learning rate, all in step with the layer's inputs: the more inputs there
are, the more the outputs move. muP divides the learning rates of hidden and output layers by the width, and starts with smaller output
weights (Yang et al. 2022, arXiv 2203.03466).

gradmon width-sweep examples/width_sweep.py:standard --data examples/width_sweep.py:data --optimizer adam --lr 3e-3
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from torch_gradmon.analysis.width_sweep import width_sweep

WIDTHS = (64, 128, 256, 512)
LR = 3e-3


def data(seed: int) -> tuple[Tensor, Tensor]:
    """One batch for each seed, the same for all widths."""
    return torch.randn(16, 32), torch.randint(16, (16,))


def standard(width: int) -> nn.Sequential:
    """Weights of size 1 / sqrt(fan-in)."""
    sizes = (32, width, width, 16)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs, bias=False), nn.Tanh()]
        nn.init.normal_(layers[-2].weight, std=1.5 / math.sqrt(inputs))
    return nn.Sequential(*layers[:-1])


def mup(width: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """The same with smaller output weights, and an optimizer with a learning rate for each kind of layer."""
    model = standard(width)
    nn.init.normal_(model[4].weight, std=1 / width)
    wide = [*model[2].parameters(), *model[4].parameters()]  # their inputs grow with the width
    groups = [{"params": model[0].parameters(), "lr": LR}, {"params": wide, "lr": LR * WIDTHS[0] / width}]
    return model, torch.optim.Adam(groups)


def main() -> None:
    """Sweep both, and print tables and verdicts."""
    for name, factory in (("standard parametrisation", standard), ("muP", mup)):
        sweep = width_sweep(factory, data, widths=WIDTHS, seeds=3, optimizer="adam", lr=LR)
        print(f"== {name}\n\n{sweep.table()}\n\n{sweep.words()}\n")


if __name__ == "__main__":
    main()
