"""The training loop: followed by hooks, or calling the monitor by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...core import validation as check
from ...plugins.clipping.adaptive import AdaptiveClip
from ...plugins.clipping.clip import clip
from ...step.model_index import PLAIN_GRADIENTS
from ..links import unlink
from ..manual_loop import ManualLoop
from ..runtime import Runtime
from .model_service import ModelService

if TYPE_CHECKING:
    from ...plugins.replica_check.replay import Replay

_NO_MODULE = "there is no module to watch; pass it to ModuleMonitor(model) or call set_module(model) first"


@dataclass(slots=True)
class LoopService:
    """Connects a runtime with a training loop."""

    runtime: Runtime

    def attach(
        self,
        optimizers: Sequence[Any],
        scaler: torch.amp.GradScaler | None,
        start_step: int | None,
        before: Callable[[nn.Module], object] = lambda module: None,
    ) -> None:
        """Follow the loop by hooks. ``before`` is called after all checks, and before the first hook is installed."""
        runtime, module = self.runtime, self.runtime.planner.module
        if module is None:
            raise ValueError(_NO_MODULE)
        if runtime.loop is not None:
            raise ValueError("already attached; name all optimizers in one attach() call, or call detach() first")
        check.grad_scaler(scaler)
        if start_step is not None:
            check.step_number("start_step", start_step)
        bare = check.optimizers(module, optimizers, runtime.planner.source)
        source = runtime.planner.source
        if (source.outer is not None or source.is_pipeline) and runtime.plugin("spike_policy") is not None:
            raise ValueError(
                "on_spike= of this monitor skips or undoes steps. An engine that steps by itself does not allow that, and the stages of "
                'a pipeline would have to do it together; use on_spike="warn" or "raise"'
            )
        # the user's function may raise, so it runs before anything is installed
        runtime.lifecycle.planning.cadence.asked(runtime.state.clock.next_step if start_step is None else start_step)
        if runtime.fence.inert:
            return
        before(module)
        if start_step is not None:
            runtime.connection.continue_at(start_step)
        ModelService(runtime).link()
        known = (scaler, runtime.connection.scaler, check.scaler_around(optimizers))
        chosen = next((each for each in known if each is not None), None)
        around = check.wrappers(optimizers)
        if (outer := runtime.planner.source.outer) is not None:
            around += [(outer, optimizer) for optimizer in bare]
        runtime.connection.follow(runtime, module, bare, chosen, around)

    def detach(self) -> None:
        """End the step in flight and remove everything from the model."""
        self.runtime.mark = None
        self.runtime.detach()
        module = self.runtime.planner.module
        if module is not None:
            for child in module.modules():
                unlink(child)

    def begin_step(self, step: int) -> bool:
        """Open ``step`` by hand."""
        check.step_number("step", step)
        if self.runtime.planner.inventory is None:
            raise ValueError(_NO_MODULE)
        return bool(self.runtime.begin_step(step))

    def replay(self, compute: Callable[[nn.Module], Tensor], times: int) -> Replay:
        """Run a pass of the model several times, and compare."""
        from ...plugins.replica_check.replay import Replay, replay

        check.positive_int("times", times)
        if times < 2:
            raise ValueError(f"replay_step(times={times}) compares nothing; give at least 2")
        module = self.runtime.planner.module
        if module is None:
            raise ValueError(_NO_MODULE)
        if self.runtime.fence.inert:
            return Replay((), (), (), 0, "equal")
        with self.runtime.lifecycle.paused():
            return replay(module, compute, times)

    def clip(
        self,
        parameters: Any,
        max_norm: float | str | AdaptiveClip,
        norm_type: float,
        error_if_nonfinite: bool,
        exact: bool | None,
    ) -> Tensor:
        """Measure and clip gradients."""
        source, inventory = self.runtime.planner.source, self.runtime.planner.inventory
        if source.outer is not None or (
            not source.is_pipeline and source is not PLAIN_GRADIENTS and inventory and inventory.spread
        ):
            raise ValueError(
                "monitor.clip_grad_norm_ does not know the norm of gradients that an engine has in parts: clip as the engine does, by "
                "model.clip_grad_norm_ of FSDP1 or gradient_clipping in DeepSpeed's configuration; the monitor measures before and after"
            )
        if source.is_pipeline:
            raise ValueError(
                "the stages of a pipeline are clipped by a norm of all of them, which monitor.clip_grad_norm_ does not know; clip as "
                "without a monitor: it measures before and after"
            )
        if parameters is None:
            module = self.runtime.planner.module
            if module is None:
                raise ValueError("there is no module whose gradients to clip; pass parameters=, or watch a module first")
            # as the optimizer has them
            parameters = list(dict.fromkeys(map(self.runtime.planner.source.stepped, module.parameters())))
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        return clip(ManualLoop(self.runtime), parameters, max_norm, norm_type, error_if_nonfinite, exact)
