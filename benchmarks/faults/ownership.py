"""Parameters that the optimizer, a freeze, a tie or a hook has lost."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from .families import Task, adamw, head_of, task
from .training import STEPS, Training, Watch, last, over, train

WHEN = 50


def _head_replaced(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """The head is exchanged for one with other classes after the optimizer was made, which keeps the old one."""
    job = task(family, seed)
    optimizer = adamw(job.model)
    old = head_of(job.model)
    new = nn.Linear(old.in_features, old.out_features)
    if hasattr(job.model, "head"):
        job.model.head = new
    else:
        job.model[-1] = new
    if healed:
        optimizer = adamw(job.model)
    return train(job, watch, optimizer)


def _part_forgotten(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """The optimizer is given the parameters of two parts out of three."""
    job = task(family, seed)
    forgotten = {"gpt": "blocks", "autoencoder": "2"}[family]
    chosen = [p for name, p in job.model.named_parameters() if healed or not name.startswith(forgotten)]
    return train(job, watch, torch.optim.AdamW(chosen, lr=3e-3))


def _frozen(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """The trunk is frozen for fine tuning, but its gradients are set to 0 and not to None: momentum and decay go on."""
    job = task(family, seed)
    optimizer = adamw(job.model, weight_decay=0.1)
    head = {id(parameter) for parameter in head_of(job.model).parameters()}
    trunk = [parameter for parameter in job.model.parameters() if id(parameter) not in head]

    monitor = watch(job.model, optimizer)
    losses = []
    for step in range(STEPS):
        if step == WHEN:
            for parameter in trunk:
                parameter.requires_grad_(False)
                if healed:
                    parameter.grad = None
        optimizer.zero_grad(set_to_none=False)
        loss = job.loss(job.model, next(job.batches))
        loss.backward()
        monitor.log_scalar("loss", loss.detach())
        losses.append(loss.detach())
        optimizer.step()
    return last(losses)


def _untied(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """In the middle of the training the head gets a weight of its own, as when a vocabulary is changed."""
    job = task(family, seed, tied=True)
    optimizer = adamw(job.model)
    embedding = job.model.tokens if family == "gpt" else job.model.embed

    def before(step: int) -> None:
        if step == WHEN:
            job.model.head.weight = embedding.weight if healed else nn.Parameter(embedding.weight.detach().clone())
            if not healed:
                optimizer.add_param_group({"params": [job.model.head.weight]})

    return train(job, watch, optimizer, before=before)


def _assigned(family: str, watch: Watch, seed: int, healed: bool) -> float:
    """A checkpoint is loaded with ``assign=True``, which makes other parameters; the optimizer gets these, hooks do not."""
    job = task(family, seed)
    for parameter in job.model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e3, 1e3))
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.05, momentum=0.9)
    return train(job, watch, optimizer, before=_load_at(WHEN, job, optimizer, assign=not healed))


def _load_at(when: int, job: Task, optimizer: torch.optim.Optimizer, assign: bool) -> Callable[[int], None]:
    def before(step: int) -> None:
        if step == when:
            state = {name: value.detach() for name, value in copy.deepcopy(job.model.state_dict()).items()}
            job.model.load_state_dict(state, assign=assign)
            if assign:
                optimizer.param_groups[0]["params"] = list(job.model.parameters())

    return before


TRAININGS: list[Training] = [
    *over(
        ["mlp", "vit"], "head-replaced", "not-in-optimizer", _head_replaced, "make the optimizer after the head", held_back="vit"
    ),
    *over(["gpt", "autoencoder"], "part-forgotten", "not-in-optimizer", _part_forgotten, "all parameters to the optimizer"),
    *over(
        ["mlp", "cnn", "gpt"],
        "frozen-with-zeros",
        "frozen-but-moving",
        _frozen,
        "grad = None when freezing",
        held_back="cnn",
    ),
    *over(["gpt", "rnn"], "head-of-its-own", "weights-untied", _untied, "tie the head again", held_back="rnn"),
    *over(["mlp", "cnn"], "assigned-checkpoint", "dead-hooks", _assigned, "load_state_dict without assign", held_back="cnn"),
]
