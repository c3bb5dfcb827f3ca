"""Models with parts that rest, begin at zero, are shared or are rarely used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import data
from ..families import RATE, Residual, Task, he, layers, mlp, task
from ..training import Training, Watch, train


def _of(name: str, family: str, change: Callable[[Task], None], options: dict[str, Any] | None = None, **how: Any) -> Training:
    """A training with AdamW of a task that ``change`` has changed."""

    def run(watch: Watch, seed: int, healed: bool) -> float:
        job = task(family, seed, **(options or {}))
        change(job)
        trained = [parameter for parameter in job.model.parameters() if parameter.requires_grad]
        return train(job, watch, torch.optim.AdamW(trained, lr=how.get("rate", RATE)), steps=how.get("steps", 150))

    return Training(f"{name}/{family}", "", family, run)


class _LowRank(nn.Module):
    """A frozen layer and a product of two thin matrices; the second begins at zero (LoRA)."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, layer.in_features) * layer.in_features**-0.5)
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + F.linear(F.linear(x, self.a), self.b)


def _low_rank(job: Task) -> None:
    for index in (0, 2, 4):
        job.model[index] = _LowRank(job.model[index])


def _frozen_backbone(job: Task) -> None:
    job.model[0].requires_grad_(False)


def _zero_branches(job: Task) -> None:
    """The last layer of each residual branch begins at zero, so that the one before it has no gradient in the first step."""
    for module in job.model.modules():
        if isinstance(module, Residual):
            nn.init.zeros_(list(module.inner.children())[-1].weight)


def _zero_branches_vit(job: Task) -> None:
    for module in job.model.modules():
        if isinstance(module, Residual):
            end = list(module.inner.children())[-1]
            nn.init.zeros_(end.weight if isinstance(end, nn.Linear) else end.out.weight)


class _Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def _checkpointed(job: Task) -> None:
    for index, block in enumerate(list(job.model.blocks)):
        job.model.blocks[index] = _Checkpointed(block)


class _Drop(nn.Module):
    """A residual block that is left out now and then (LayerDrop)."""

    def __init__(self, block: nn.Module, share: float = 0.3) -> None:
        super().__init__()
        self.block, self.share = block, share

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and float(torch.rand(())) < self.share else self.block(x)


def _layer_drop(job: Task) -> None:
    for index in range(1, 7):
        job.model[index] = _Drop(job.model[index])


class _Experts(nn.Module):
    """Four experts; each input goes to one; the last is hardly ever chosen."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(data.FEATURES, width), nn.Linear(width, data.CLASSES)
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(layers([width, width, width]) for _ in range(4))
        with torch.no_grad():
            self.gate.bias[3] = -1.5

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return self.head(x + out)


def _replace(make: Callable[[], nn.Module]) -> Callable[[Task], None]:
    def change(job: Task) -> None:
        job.model = make()

    return change


def _dropout() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10)
    )


def _group_norm() -> nn.Module:
    convs = [
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
    ]
    return nn.Sequential(*convs, nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(32, data.SHAPES))


def _parametrised(norm: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = mlp()
        for module in list(model):
            if isinstance(module, nn.Linear):
                norm(module)
        return model

    return make


class _MLPOfReLU(nn.Module):
    """About half of all activations are zero, as they are with ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(depth=5, width=48)
        he(self.body)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def _sparse(watch: Watch, seed: int, healed: bool) -> float:
    """An embedding whose gradient is sparse, with SGD, which can take it."""
    job = task("embedding", seed, sparse=True)
    return train(job, watch, torch.optim.SGD(job.model.parameters(), lr=2.0), steps=300)


def _plain(job: Task) -> None:
    """The task as it is."""


TRAININGS: list[Training] = [
    _of("low-rank-from-zero", "mlp", _low_rank, rate=1e-2),
    _of("frozen-first-layer", "mlp", _frozen_backbone),
    _of("frozen-first-layer", "cnn", _frozen_backbone, steps=250),
    _of("zero-branches", "resnet", _zero_branches),
    _of("zero-branches", "vit", _zero_branches_vit),
    _of("checkpointed", "gpt", _checkpointed),
    _of("checkpointed", "vit", _checkpointed, rate=2e-3),
    _of("tied", "rnn", _plain, {"tied": True}),
    _of("untied-from-the-start", "gpt", _plain, {"tied": False}),
    _of("norm-on-queries-and-keys", "gpt", _plain, {"qk_norm": True}),
    _of("layer-drop", "resnet", _layer_drop),
    _of("rare-expert", "mlp", _replace(_Experts)),
    _of("dropout", "mlp", _replace(_dropout)),
    _of("batch-norm", "cnn", _plain, {"norm": True}),
    _of("group-norm", "cnn", _replace(_group_norm)),
    _of("weight-norm", "mlp", _replace(_parametrised(nn.utils.parametrizations.weight_norm))),
    _of("spectral-norm", "mlp", _replace(_parametrised(nn.utils.parametrizations.spectral_norm))),
    _of("half-zeros-by-relu", "mlp", _replace(_MLPOfReLU)),
    _of("relu-in-blocks", "gpt", _plain, {"activation": nn.ReLU}),
    _of("deep-residual", "resnet", _plain, {"depth": 20}, rate=1e-3),
    _of("lstm", "rnn", _plain, {"kind": nn.LSTM}, rate=1e-2),
    _of("two-layers-of-lstm", "rnn", _plain, {"kind": nn.LSTM, "num_layers": 2}, rate=1e-2, steps=200),
    _of("tanh", "mlp", _plain, {"activation": nn.Tanh}),
    _of("gelu", "autoencoder", _plain, {"activation": nn.GELU}),
    _of("padding-index", "embedding", _plain, {"padding_idx": 0}),
    Training("sparse-gradients/embedding", "", "embedding", _sparse),
]
