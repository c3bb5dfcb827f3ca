"""Parameters that the optimizer, a freeze or a tie has lost."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..training import Training, Watch
from .order import in_steps
from .others import contrast, two_tasks
from .worlds import World, adam, begin, gratings, nesterov, waves


def _forgotten_scale(watch: Watch, seed: int, healed: bool) -> float:
    """The temperature of a contrastive loss belongs to the model, but the optimizer was given the two towers."""
    world = contrast(seed)
    with torch.no_grad():
        world.model.log_scale.zero_()
    chosen = [*world.model.left.parameters(), *world.model.right.parameters()]
    optimizer = torch.optim.Adam([*chosen, world.model.log_scale] if healed else chosen, lr=1e-2)

    def one(step: int) -> Tensor:
        optimizer.zero_grad()
        loss = world.loss(step)
        loss.backward()
        return loss

    return in_steps(watch, world, optimizer, one, 150)


def _made_later(watch: Watch, seed: int, healed: bool) -> float:
    """A projection that the trunk gets after the optimizer was made: it has gradients and no step."""
    g = begin(seed)
    model = nn.Sequential(nn.Conv1d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv1d(16, 16, 5, padding=2), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))
    if healed:
        model.extend(head)
    optimizer = adam(model)
    if not healed:
        model.extend(head)

    def one(step: int) -> Tensor:
        optimizer.zero_grad()
        x, y = waves(g)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    def nothing(step: int) -> Tensor:
        raise NotImplementedError

    return in_steps(watch, World(model, nothing), optimizer, one, 180, "train/loss")


def _still_moving(watch: Watch, seed: int, healed: bool) -> float:
    """From step 60 on the trunk is frozen, but its gradients stay at 0: momentum first and weight decay always go on."""
    model, draw = two_tasks(seed)
    optimizer = nesterov(model, 0.03, weight_decay=0.03)

    def one(step: int) -> Tensor:
        if step == 60:
            model.trunk.requires_grad_(False)
            for p in model.trunk.parameters():
                p.grad = None if healed else torch.zeros_like(p)
        optimizer.zero_grad(set_to_none=step < 60)
        x, number, kind = draw()
        a, b = model(x)
        loss = F.mse_loss(a, number) + F.cross_entropy(b, kind)
        loss.backward()
        return loss

    return in_steps(watch, World(model, one), optimizer, one, 180)


class _Tied(nn.Module):
    """Down by a matrix and up by the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)
        nn.init.normal_(self.down.weight, std=0.2)
        self.up.weight = self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x @ self.down.weight)


def _untied(watch: Watch, seed: int, healed: bool) -> float:
    """An adapter is merged into the decoder by making a new parameter, which is no longer the encoder's."""
    g = begin(seed)
    model = _Tied()
    optimizer = adam(model, 5e-3)

    def one(step: int) -> Tensor:
        if step == 60 and not healed:
            model.up.weight = nn.Parameter(model.up.weight.detach() * 1.02)
            optimizer.add_param_group({"params": [model.up.weight]})
        elif step == 60:
            with torch.no_grad():
                model.up.weight.mul_(1.02)
        optimizer.zero_grad()
        x, _ = gratings(g)
        loss = F.mse_loss(model(x.flatten(1)), x.flatten(1))
        loss.backward()
        return loss

    return in_steps(watch, World(model, one), optimizer, one, 180)


TRAININGS: list[Training] = [
    Training("forgotten-scale", "not-in-optimizer", "contrast", _forgotten_scale, advice="the scale to the optimizer"),
    Training("head-made-later", "not-in-optimizer", "series", _made_later, advice="the optimizer after the head"),
    Training("trunk-still-moving", "frozen-but-moving", "heads", _still_moving, advice="grad = None when freezing"),
    Training("merged-into-decoder", "weights-untied", "tied-autoencoder", _untied, advice="change the weight in place"),
]
