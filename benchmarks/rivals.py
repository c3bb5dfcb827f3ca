"""The same work by other packages, each through its public interface."""

from __future__ import annotations

import importlib
import itertools
import os
import tempfile
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from .timing import Run

#: Torch multiplies by one then, so the gradients stay as they are.
NEVER_CLIPS = 1e30
EPS = 1e-8


class LeftOut(Exception):
    """A contender cannot take part; the message has the reason."""


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise LeftOut(f"not installed ({error})") from error


def near_zero_share(x: Tensor) -> Tensor:
    """The sparsity of torch_gradmon."""
    return (x.abs() <= EPS).float().mean()


def naive_loop(model: nn.Module, _: ExitStack) -> Run:
    """Six values of each gradient, in the usual form."""

    def run() -> dict[str, float]:
        values: dict[str, float] = {}
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            values[f"{name}/norm"] = gradient.norm().item()
            values[f"{name}/mean"] = gradient.mean().item()
            values[f"{name}/std"] = gradient.std().item()
            values[f"{name}/max"] = gradient.abs().max().item()
            values[f"{name}/near_zero"] = near_zero_share(gradient).item()
            values[f"{name}/finite"] = float(torch.isfinite(gradient).all().item())
        return values

    return run


def torch_clip(model: nn.Module, _: ExitStack) -> Run:
    """Norm and multiplication."""
    parameters = list(model.parameters())
    return lambda: torch.nn.utils.clip_grad_norm_(parameters, NEVER_CLIPS)


def step_by_hand(monitor: Any) -> Run:
    """A step with the calls that torch-module-monitor and torch_gradmon have in common."""
    steps = itertools.count()

    def run() -> object:
        monitor.begin_step(next(steps))
        monitor.monitor_gradients()
        monitor.end_step()
        return monitor.get_step_metrics()

    return run


def torch_module_monitor(model: nn.Module, _: ExitStack) -> Run:
    """Its step by hand, as in its README: each value goes to the host separately, and the loop reads the step's dict."""
    monitor = _package("torch_module_monitor").ModuleMonitor(monitor_step_fn=lambda step: True)
    monitor.set_module(model)
    monitor.add_gradient_metric("norm", lambda x: x.norm())
    monitor.add_gradient_metric("mean", lambda x: x.mean())
    monitor.add_gradient_metric("std", lambda x: x.std())
    monitor.add_gradient_metric("max", lambda x: x.abs().max())
    monitor.add_gradient_metric("sparsity", near_zero_share)
    return step_by_hand(monitor)


def wandb_watch(model: nn.Module, stack: ExitStack) -> Run:
    """The hooks that ``wandb.watch`` installs on the parameters are called with their gradients, as autograd would.

    Each makes a histogram and sends it to wandb's own process. The step's ``wandb.log``, which every user of wandb calls
    anyway, is not part of it; neither are statistics of the machine, which are switched off.
    """
    folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
    places = {f"WANDB_{kind}_DIR": folder for kind in ("CACHE", "CONFIG", "DATA", "ARTIFACT")}
    os.environ.update({"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", **places})
    wandb = _package("wandb")
    settings = wandb.Settings(
        silent=True, console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True, disable_code=True
    )
    run = wandb.init(mode="offline", dir=folder, project="benchmark", settings=settings)
    stack.callback(run.finish)
    before = {id(p): set(p._backward_hooks or ()) for p in model.parameters()}
    run.watch(model, log="gradients", log_freq=1)
    stack.callback(run.unwatch, model)
    hooks = [
        (hook, gradient)
        for parameter in model.parameters()
        if (gradient := parameter.grad) is not None
        for number, hook in (parameter._backward_hooks or {}).items()
        if number not in before[id(parameter)]
    ]

    def all_hooks() -> None:
        for hook, gradient in hooks:
            hook(gradient)

    return all_hooks


def lightning(model: nn.Module, _: ExitStack) -> Run:
    """The norm of every gradient and of all together, still tensors."""
    module = _package("lightning.pytorch").LightningModule()
    module.model = model
    grad_norm = _package("lightning.pytorch.utilities").grad_norm
    return lambda: grad_norm(module, norm_type=2)
