"""Runs the operations of a program, and tells an observer what it does."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor, nn

from . import edits, models, optimizers, surroundings
from .observer import Observer
from .optimizers import inner as inside
from .plan import Op, iterations
from .program import Program

_AUTOCAST = {"autocast": torch.bfloat16, "autocast_f16": torch.float16}


class Deliberate(Exception):
    """Raised by a program in its own forward or backward pass, and caught by it."""


class Loop:
    """A training loop. Its methods are the operations of :mod:`tests.fuzz.plan`."""

    def __init__(self, p: Program, observer: Observer) -> None:
        self.p, self.observer = p, observer
        self.model = models.build(p)
        self.optimizers = optimizers.build(p, self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3) if p.scaler else None
        self.schedulers = [_scheduler(p, o) for o in self.optimizers] if p.scheduler else []
        self.ema: nn.Module | None = None
        self.losses: list[Tensor] = []
        self.number = 0
        self.loss = torch.zeros(())
        torch.manual_seed(p.seed + 1)
        self._hang_hooks()
        if p.edit_at == "hook_before":
            self._hang_edit()
        if p.players == "in_backward":
            self._step_in_backward()
        self.model.train(not p.trains_in_eval)
        observer.built(self)
        if p.edit_at == "hook_after":
            self._hang_edit()

    def run(self) -> dict[str, Any]:
        """Run to the end; everything that training leaves."""
        with self.around():
            for ops in iterations(self.p):
                self._do(ops)
        self.observer.over()
        return self.left()

    def around(self) -> Any:
        """The context in which it runs."""
        cast = surroundings.autocast_set() if self.p.dtype == "autocast_set" else contextlib.nullcontext()
        return surroundings.both(surroundings.around(self.p.surroundings), cast)

    def left(self) -> dict[str, Any]:
        """Everything that training has left so far."""
        return {
            "parameters": dict(self.model.named_parameters()),
            "buffers": dict(self.model.named_buffers()),
            "gradients": {name: q.grad for name, q in self.model.named_parameters()},
            "optimizers": [o.state_dict() for o in self.optimizers],
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "ema": self.ema.state_dict() if self.ema else None,
            "rng": torch.get_rng_state(),
            "losses": self.losses,
        }

    def _do(self, ops: list[Op]) -> None:
        for each in ops:
            method = getattr(self, each.name)
            method(*([each.inner] if each.inner else []), **each.args)

    def _autocast(self) -> Any:
        dtype = _AUTOCAST.get(self.p.dtype)
        return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)

    # --- forward and backward ------------------------------------------------------------------------------------------------

    def iteration(self, number: int) -> None:
        self.number = number
        torch.clear_autocast_cache()  # as loops have to that use no context manager
        self.observer.iteration(number)

    def forward(
        self, batch: int, player: int = 0, share: int = 1, spoil: str = "", fails: bool = False, fails_back: bool = False
    ) -> None:
        x = models.batch(self.p, batch)
        hook = _raises if fails else _raises_back if fails_back else None
        handle = None if hook is None else next(reversed(list(self.model.modules()))).register_forward_hook(hook)
        try:
            with self.observer.forward(trains=True), self._autocast():
                loss = self._loss(x, player) / share
        except Deliberate:
            return
        finally:
            if handle is not None:
                handle.remove()
        self.loss = loss * float(spoil) if spoil else loss
        self.losses.append(self.loss.detach().clone())

    def _loss(self, x: models.Batch, player: int) -> Tensor:
        if self.p.players == "gan":
            fake = self.model.generator(x[0][:, :3])
            if player == 0:
                return models.mean_square(self.model.critic(x[0]), 1.0) + models.mean_square(
                    self.model.critic(fake.detach()), 0.0
                )
            return models.mean_square(self.model.critic(fake), 1.0)
        return models.mean_square(self.model(*x), 0.5 if player == 0 else -0.5)

    def penalise(self, by: str) -> None:
        first = next(q for q in self.model.parameters() if q.requires_grad)
        (gradient,) = torch.autograd.grad(self.loss, [first], create_graph=by == "graph", retain_graph=True, allow_unused=True)
        if by == "graph" and gradient is not None:
            self.loss = self.loss + 0.1 * gradient.square().sum()

    def backward(self, twice: str = "", fails: str = "") -> None:
        loss = self.loss if self.scaler is None else self.scaler.scale(self.loss)
        first = next(q for q in self.model.parameters() if q.requires_grad)
        registers = {"loss": loss.register_hook, "parameter": first.register_post_accumulate_grad_hook}
        handle = registers[fails](_raises) if fails in registers else None
        try:
            with self.observer.backward():
                loss.backward(retain_graph=bool(twice))
            if twice:
                with self.observer.backward():
                    loss.backward(inputs=[first] if twice == "one" else None)
        except Deliberate:
            self.zero_grad(set_to_none=True)
        finally:
            if handle is not None:
                handle.remove()

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def unscale(self, index: int) -> None:
        assert self.scaler is not None
        self.scaler.unscale_(self.optimizers[index])
        self.observer.unscaled(index)

    def edit(self, how: str) -> None:
        self.losses += edits.apply(how, list(self.model.parameters()), self.observer.clip)
        self.observer.edited()

    def step(self, index: int) -> None:
        with self.observer.stepping(index):
            if self.scaler is not None:
                self.scaler.step(self.optimizers[index])
            else:
                self.optimizers[index].step()

    def step_by_closure(self, inner: list[Op], fails: bool = False) -> None:
        def closure() -> Tensor:
            self._do(inner)
            if fails:
                raise Deliberate
            return self.loss

        try:
            with self.observer.stepping(0):
                self.optimizers[0].step(lambda: self.observer.closure(0, closure))
        except Deliberate:
            return
        self.observer.step_over()

    def _step_in_backward(self) -> None:
        for index, optimizer in enumerate(self.optimizers):

            def hook(parameter: Tensor, index: int = index, optimizer: Any = optimizer) -> None:
                with self.observer.stepping(index):
                    optimizer.step()
                optimizer.zero_grad()

            optimizer.param_groups[0]["params"][0].register_post_accumulate_grad_hook(hook)

    def update_scale(self) -> None:
        assert self.scaler is not None
        self.scaler.update()

    def attempt_over(self) -> None:
        self.observer.step_over()

    def zero_grad(self, set_to_none: bool) -> None:
        self.model.zero_grad(set_to_none=set_to_none)

    def schedule(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    # --- beside training -----------------------------------------------------------------------------------------------------

    def log(self, when: str) -> None:
        value = self.loss.detach() if when in ("forward", "backward") else float(self.number)
        self.observer.log("loss" if when == "backward" else f"{when}_value", value)

    def evaluate(self, how: str) -> None:
        self.model.train(how.startswith("train"))
        context = contextlib.nullcontext() if how.endswith("_grad") else torch.no_grad()
        # a look without a backward pass counts where it is made as forwards of training are
        trains = how == "train_grad" or (how == "eval_grad" and self.p.trains_in_eval)
        with self.observer.forward(trains=trains), context, self._autocast():
            self.losses.append(self._loss(models.batch(self.p, 9_000), 0).detach().clone())
        self.model.train(not self.p.trains_in_eval)

    def follow(self) -> None:
        """A moving average in a copy of the model, which is called too."""
        if self.ema is None:
            self.ema = copy.deepcopy(self.model)
        with torch.no_grad():
            for own, other in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                own.lerp_(other, 0.5)
        mine, self.model = self.model, self.ema
        try:
            with torch.no_grad(), self._autocast():
                self.losses.append(self._loss(models.batch(self.p, 9_001), 0).clone())
        finally:
            self.model = mine

    def freeze(self) -> None:
        next(self.model.parameters()).requires_grad_(False)

    def thaw(self) -> None:
        next(self.model.parameters()).requires_grad_(True)

    def reload(self) -> None:
        self.model.load_state_dict(copy.deepcopy(self.model.state_dict()))
        for optimizer in self.optimizers:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def save(self) -> None:
        self.observer.save(self.model)

    def monitor(self, what: str) -> None:
        self.observer.act(what)

    def poll(self) -> None:
        self.observer.poll()

    # --- hooks of the user ---------------------------------------------------------------------------------------------------

    def _hang_edit(self) -> None:
        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            own = [q for g in optimizer.param_groups for q in g["params"]]
            self.losses.extend(edits.apply(self.p.edit, own, torch.nn.utils.clip_grad_norm_))
            self.observer.edited()

        for optimizer in self.optimizers:
            inside(optimizer).register_step_pre_hook(hook)

    def _hang_hooks(self) -> None:
        first = next(q for q in self.model.parameters() if q.requires_grad)
        if self.p.hooks == "gradient":
            first.register_hook(lambda gradient: 2 * gradient)
        elif self.p.hooks == "accumulated":
            first.register_post_accumulate_grad_hook(_halved)
        elif self.p.hooks == "forward":
            part = next(m for m in self.model.modules() if isinstance(m, (nn.Linear, nn.Conv2d)))
            part.register_forward_hook(_enlarged)
        elif self.p.hooks == "step":
            for optimizer in self.optimizers:
                inside(optimizer).register_step_post_hook(lambda *_: self.losses.append(torch.rand(())))


def _raises(*_: Any) -> None:
    raise Deliberate


def _raises_back(module: nn.Module, args: Any, output: Any) -> None:
    for tensor in output if isinstance(output, tuple) else (output,):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(_raises)


def _halved(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)  # type: ignore[union-attr]


def _enlarged(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 1.5 * output


def _scheduler(p: Program, optimizer: Any) -> Any:
    if p.scheduler == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(inside(optimizer), T_max=10)
    return torch.optim.lr_scheduler.StepLR(inside(optimizer), step_size=2, gamma=0.5)
