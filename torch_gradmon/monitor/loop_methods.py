"""The loop, by hand: when a step begins and ends, what is measured when, and clipping that measures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core import validation as check
from ..core.errors import display
from ..plugins.clipping.adaptive import AdaptiveClip
from ..plugins.clipping.clip import clip
from ..plugins.spike_policy.policy import Counts, RolledBack
from ..step.planner import Planner
from .manual_loop import Hand
from .session import Session


class LoopMethods:
    """What a training loop calls where it is written by hand; beside :meth:`ModuleMonitor.attach` none of it is needed."""

    _planner: Planner
    _session: Session

    def begin_step(self, step: int) -> bool:
        """Open step number ``step``; a step that is still open ends first. Returns whether the step is monitored.

        From here on steps end with :meth:`end_step`, also when attached. What is measured of modules in such a step is what they do in
        training mode, also without gradients.

        Raises:
            TypeError, ValueError: not a whole number of at least 0, or no module is set.
        """
        check.step_number("step", step)
        if self._planner.inventory is None:
            raise ValueError("there is no module to watch; pass it to ModuleMonitor(model) or call set_module(model) first")
        return bool(self._session.begin_step(step))

    def end_step(self) -> None:
        """End the step and send its values out. Synchronises the device. Without a step it does nothing."""
        self._session.end_step()

    def monitor_parameters(self) -> None:
        """Measure the parameters as they are now."""
        Hand(self._session).measure_parameters()

    def monitor_gradients(self, before_clip: bool = False) -> None:
        """Measure the gradients as they are now, as those before clipping or as those that the optimizer will use.

        Call it after the last backward pass of the step. Gradients that a scaler has not unscaled yet are divided by its scale.
        """
        Hand(self._session).measure_gradients(before_clip)

    def module_name(self, module: str | nn.Module) -> str:
        """The canonical name of a watched module; a name is returned as it is.

        Raises:
            TypeError: neither a module nor a name.
            ValueError: the module is not part of the watched model.
        """
        if isinstance(module, str):
            return module
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected a module of the watched model or a name for it, got {display(module)}")
        if self._planner.inventory is not None:
            for name, reference in self._planner.inventory.modules.items():
                if reference() is module:
                    return name
        what = type(module).__name__
        raise ValueError(f"this {what} is not part of the watched model; pass its name as a str, or watch its model")

    def monitor_activations(self, module: str | nn.Module, activations: Any) -> None:
        """Measure a tensor, or a container of tensors, as the activation of ``module``, a module or a name of your choice."""
        self._session.capture_activation(self.module_name(module), activations)

    def record_attention(self, name: str, named: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> None:
        """What :func:`monitor_scaled_dot_product_attention` does, for tensors of a module by what they are to it."""
        self._session.record_attention(name, named, arguments)

    def after_micro_batch(self) -> None:
        """Does nothing: micro-batches are told apart by themselves. It is here for loops written for torch-module-monitor."""

    @contextlib.contextmanager
    def no_monitor(self) -> Iterator[None]:
        """Nothing is measured inside: for evaluation in training mode and other passes that are no training."""
        activations, audit = self._session.activations, self._session.audit
        before, activations.paused, audit.paused = activations.paused, True, True
        try:
            yield
        finally:
            activations.paused = audit.paused = before

    def is_monitoring(self) -> bool:
        """Whether a monitored step is open and not paused, and this is neither an evaluation pass nor recomputation."""
        return not torch.compiler.is_compiling() and self._session.listens

    def is_step_monitored(self, step: int) -> bool:
        """Whether values are, were or would be taken on ``step``."""
        return not self._session.guard.inert and self._session.would_monitor(step)

    @property
    def step_skipped(self) -> bool:
        """Whether the last step was skipped because of a spike, with ``on_spike="skip"``; known once ``optimizer.step()`` returns.

        For what the loop does besides, such as ``if not monitor.step_skipped: scheduler.step()``. A GradScaler that refuses a step
        is no skip.
        """
        return self._session.skips

    @property
    def rolled_back(self) -> RolledBack | None:
        """Where the last step took the model back to, with ``on_spike=Rollback()``; None where it did not."""
        actor = self._session.actor
        return None if actor is None else actor.rolled_back

    @property
    def counts(self) -> Counts:
        """How many steps were attempted, applied, skipped or overflowed, and how many had NaN or Inf. Synchronises at most once a step."""
        self._session.settle_now()
        return self._session.counts()

    @property
    def step(self) -> int | None:
        """Number of the step in flight, else of the one that ended last; None before the first."""
        return self._session.step

    @property
    def current_step(self) -> int | None:
        """The same as :attr:`step`, by the name that it has in torch-module-monitor."""
        return self._session.step

    @property
    def last_step(self) -> int | None:
        """Number of the step that ended last, which :meth:`ModuleMonitor.get_step_metrics` tells of; None before there was one."""
        return self._session.last_ended

    def clip_grad_norm_(
        self,
        max_norm: float | str | AdaptiveClip,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        parameters: Any = None,
        *,
        exact: bool | None = None,
    ) -> Tensor:
        """Measure the gradients, then clip them: bit for bit what ``torch.nn.utils.clip_grad_norm_`` does and returns.

        With a GradScaler after ``scaler.unscale_``, as there. Waits for the device only with ``error_if_nonfinite``, and
        where gradients that are spread over ranks travel by a backend of the CPU.

        Args:
            max_norm: as there; or ``"zclip"``, ``"adagc"``, a :class:`ZClip` or an :class:`AdaGC`, which follow the gradients and
                clip by exact norms. What those by name have learned is part of :meth:`ModuleMonitor.state_dict`; an object of
                yours has one of its own, and is meant for the same parameters in every step. They add ``gradmon/clip_limit``
                (ZClip: the norm above which this step is clipped) or ``gradmon/clipped_parameters`` (AdaGC: how many were scaled
                down) to the record of the step.
            norm_type, error_if_nonfinite: as there.
            parameters: whose gradients to clip; by default those of the watched model.
            exact: clip by, and return, the exact norm: torch's is 0.16 % low at 3e7 elements on CPU. For the norms 1, 2, inf. Where
                gradients are spread over ranks, every rank has to call this. By default only adaptive clips do so.

        Raises:
            TypeError: ``max_norm`` is none of these.
            ValueError: no module is watched and no ``parameters`` are given, a ``max_norm`` of an unknown name, an adaptive one
                with another ``norm_type`` than 2 or ``exact=False``, an ``exact`` norm of another order, or one of gradients that
                cannot be measured or are spread over ranks of which not all have a monitor. Nothing is changed then.
            RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
        """
        module = self._planner.module
        if parameters is None:
            if module is None:
                raise ValueError("there is no module whose gradients to clip; pass parameters=, or watch a module first")
            parameters = list(module.parameters())
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        return clip(Hand(self._session), parameters, max_norm, norm_type, error_if_nonfinite, exact)
