"""Repairs that need no change of a script: each acts on a model and its optimizers before the training, as a mechanic would try it.

They are what people try on a training that does not learn, and what the advice of the diagnosis asks for where that is no change of a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Repair = Callable[[nn.Module, Sequence[torch.optim.Optimizer]], None]


def _groups(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[dict[str, Any]]:
    for optimizer in optimizers:
        yield from optimizer.param_groups


def _lower_rate(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for group in _groups(optimizers):
        group["lr"] *= 0.1


def _raise_rate(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for group in _groups(optimizers):
        group["lr"] *= 10


def _clip(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    def clip(optimizer: torch.optim.Optimizer, *_: object) -> None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(clip)


def _leave_out_spoiled_steps(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    def clear(optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not all(p.grad.isfinite().all() for p in parameters):
            for parameter in parameters:
                parameter.grad = None

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(clear)


def _clear_gradients(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda this, *_: this.zero_grad())


def _give_all_parameters(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    known = {id(p) for group in _groups(optimizers) for p in group["params"]}
    missing = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    if missing:
        optimizers[0].add_param_group({"params": missing})


def _train_all_parameters(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    model.requires_grad_(True)
    _give_all_parameters(model, optimizers)


def _no_weight_decay(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for group in _groups(optimizers):
        if "weight_decay" in group:
            group["weight_decay"] = 0.0


def _usual_adam(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for group in _groups(optimizers):
        group.update({name: value for name, value in (("betas", (0.9, 0.999)), ("eps", 1e-8)) if name in group})


def _train_mode(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    model.register_forward_pre_hook(lambda module, _: module.train() and None)


def _little_dropout(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for part in model.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = min(part.p, 0.1)


def _usual_batch_norm(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.momentum, part.eps = 0.1, 1e-5
            part.train()


def _usual_initialisation(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for part in model.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()


def _leaky(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for part in list(model.modules()):
        for name, child in part.named_children():
            if isinstance(child, (nn.ReLU, nn.Sigmoid, nn.Tanh)):
                setattr(part, name, nn.LeakyReLU(0.1))


def _normalised_inputs(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    def normalise(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple((x - x.mean()) / (x.std() + 1e-6) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)

    model.register_forward_pre_hook(normalise)


#: In the order in which people try them.
REPAIRS: dict[str, Repair] = {
    "a tenth of the learning rate": _lower_rate,
    "ten times the learning rate": _raise_rate,
    "clipping at 1": _clip,
    "normalised inputs": _normalised_inputs,
    "the usual initialisation": _usual_initialisation,
    "LeakyReLU": _leaky,
    "no weight decay": _no_weight_decay,
    "little dropout": _little_dropout,
    "the usual betas and epsilon": _usual_adam,
    "gradients cleared after each step": _clear_gradients,
    "all parameters in the optimizer": _give_all_parameters,
    "all parameters trained": _train_all_parameters,
    "train mode": _train_mode,
    "the usual batch norm": _usual_batch_norm,
    "spoiled steps left out": _leave_out_spoiled_steps,
}
#: What the advice of a rule asks for, as far as a repair does it.
OF_RULE: dict[str, tuple[str, ...]] = {
    "learning-rate-high": ("a tenth of the learning rate",),
    "update-ratio-high": ("a tenth of the learning rate",),
    "loss-divergence": ("a tenth of the learning rate", "clipping at 1"),
    "spike": ("clipping at 1",),
    "exploding-gradients": ("clipping at 1", "the usual initialisation"),
    "learning-rate-low": ("ten times the learning rate",),
    "update-ratio-low": ("ten times the learning rate",),
    "zero-update": ("ten times the learning rate",),
    "inputs-not-normalised": ("normalised inputs",),
    "initialisation-scale": ("the usual initialisation",),
    "equal-units": ("the usual initialisation",),
    "saturated-units": ("the usual initialisation", "LeakyReLU"),
    "dead-units": ("LeakyReLU", "a tenth of the learning rate"),
    "vanishing-gradients": ("LeakyReLU", "the usual initialisation"),
    "weight-decay-high": ("no weight decay",),
    "weight-growth": ("a tenth of the learning rate",),
    "dropout-high": ("little dropout",),
    "betas-swapped": ("the usual betas and epsilon",),
    "epsilon-dominates": ("the usual betas and epsilon",),
    "missing-zero-grad": ("gradients cleared after each step",),
    "not-in-optimizer": ("all parameters in the optimizer",),
    "never-stepped": ("all parameters in the optimizer",),
    "unattached-optimizer": ("all parameters in the optimizer",),
    "no-gradient": ("all parameters trained",),
    "eval-mode": ("train mode",),
    "batch-norm-frozen": ("the usual batch norm",),
    "non-finite-gradient": ("spoiled steps left out",),
    "non-finite-loss": ("spoiled steps left out",),
    "non-finite-activation": ("spoiled steps left out",),
}


def guided(found: Sequence[str]) -> list[str]:
    """All repairs: those for the rules ``found`` first, in their order, the others as people try them."""
    first = [repair for rule in found for repair in OF_RULE.get(rule, ())]
    return list(dict.fromkeys([*first, *REPAIRS]))
