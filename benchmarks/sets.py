"""The gradients of all measurements: real modules with random numbers in ``.grad``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .models import GPT, GPT2_124M, GPT_1B3, GPT_10M

#: Share of the rows of an embedding whose gradient is exactly zero, as for tokens and positions absent from a batch.
UNSEEN = 0.2
SMALL_TENSORS = 1000
#: 8 vectors and 8 matrices, no two with the same number of elements: 975 to 1,038 and 900 to 1,152.
SMALL_SHAPES = [*((975 + 9 * i,) for i in range(8)), *((36, 25 + i) for i in range(8))]


@dataclass(frozen=True)
class GradientSet:
    """One set.

    Attributes:
        title: its name in tables.
        build: makes the model, on torch's default device.
        dtype: of the parameters and so of the gradients.
        gpu_only: too large to be of interest on a CPU.
        patience: factor on the number of rounds, because one is short.
    """

    title: str
    build: Callable[[], nn.Module]
    dtype: torch.dtype = torch.float32
    gpu_only: bool = False
    patience: int = 1


class Tensors(nn.Module):
    """Parameters of given shapes, without a forward."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.zeros(shape) for shape in shapes)


def _few_shapes() -> nn.Module:
    return Tensors([SMALL_SHAPES[i % len(SMALL_SHAPES)] for i in range(SMALL_TENSORS)])


def _distinct_shapes() -> nn.Module:
    # 617 has no factor in common with 1,000, so sizes come in a mixed order
    return Tensors([(524 + 617 * i % SMALL_TENSORS,) for i in range(SMALL_TENSORS)])


SETS = {
    "gpt2_124m": GradientSet("GPT-2 124M", lambda: GPT(GPT2_124M)),
    "gpt_10m": GradientSet("10M GPT", lambda: GPT(GPT_10M), patience=3),
    "small_16_shapes": GradientSet("1,000 small tensors, 16 shapes", _few_shapes, patience=3),
    "small_distinct": GradientSet("1,000 small tensors, all distinct", _distinct_shapes, patience=3),
    "gpt_1b3_bf16": GradientSet("GPT 1.3B, bf16", lambda: GPT(GPT_1B3), dtype=torch.bfloat16, gpu_only=True),
}


def build(which: GradientSet, device: torch.device, seed: int = 0) -> nn.Module:
    """The model of a set on ``device``, with gradients."""
    with device:
        model = which.build()
    model.to(which.dtype)
    fill_gradients(model, seed)
    return model


def fill_gradients(model: nn.Module, seed: int) -> None:
    """Normal numbers of about 1e-3, with one scale for each tensor, and some rows of embeddings exactly zero."""
    on_host = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for parameter in model.parameters():
        generator = torch.Generator(parameter.device).manual_seed(int(torch.randint(2**62, (), generator=on_host)))
        scale = 1e-3 * math.exp(float(torch.randn((), generator=on_host)))
        gradient = torch.empty_like(parameter).normal_(0.0, scale, generator=generator)
        if id(parameter) in embeddings:
            rows = torch.rand(len(gradient), device=gradient.device, generator=generator) < UNSEEN
            gradient[rows] = 0
        parameter.grad = gradient


def gradients(model: nn.Module) -> list[Tensor]:
    """All gradients, in the order of the parameters."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
