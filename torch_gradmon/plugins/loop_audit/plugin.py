"""The audit of a training loop: passes the events of hooks to the checks."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from ...capture.hooks import Handles, Hook
from ...core.errors import WarningLog
from ...core.loop_findings import LoopFinding
from ...step.planner import Planner
from ...step.plugin import Plugin
from .optimizer_state import Watched
from .ownership import Survey
from .probe import Probe
from .sampling import Rest
from .tallies import Tallies
from .unused_gradients import Idle

#: The most optimizers that get a probe. More are usually those of single parameters, which step within the backward pass.
_OPTIMIZERS = 3
#: The number of consecutive steps without a gradient after which a probe is replaced.
_PATIENCE = 3
#: The number of parameters of an optimizer without steps that are compared, and the largest size of one.
_PLACES, _LARGEST = 4, 2**20


class LoopAudit(Plugin):
    """Observes a loop; it measures nothing and changes nothing.

    Args:
        planner: knows the model.
        complaints: receives a warning about each certain mistake.
        note: writes facts about the run to the run directory.

    Attributes:
        paused: events are not part of training at the moment.
    """

    name = "loop_audit"
    stops_on_failure = True

    def __init__(self, planner: Planner, complaints: WarningLog, note: Callable[..., None]) -> None:
        self.paused = False
        self._planner = planner
        self._tallies = Tallies(complaints, self._step, note)
        self._watched: dict[int, Watched] = {}
        self._probed: list[Watched] = []
        self._handles = Handles()
        self._survey: Survey | None = None
        self._idle, self._rest = Idle(), Rest()
        self._ddp: weakref.ref[nn.Module] | None = None
        self._clock = self._forwards = self._forwards_at_step = self._most_forwards = 0
        self._has_ranks = False
        self._settling: set[int] = set()
        self._is_hung = True

    def _step(self) -> int:
        return self.context.step or 0

    def facts(self) -> list[LoopFinding]:
        """The mistakes that were seen often enough."""
        return self._tallies.facts()

    def sees_alternation(self) -> bool:
        """Whether the optimizers have gradients of different numbers of backward passes since their last steps."""
        return len({watched.probe.fired for watched in self._watched.values() if watched.probe is not None}) > 1

    def on_leave(self, last: int | None) -> None:
        """Write the facts to the run directory, if they are new."""
        self._tallies.tell()

    # --- life cycle ----------------------------------------------------------------------------------------------------------

    def on_attach(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Begin to audit a loop."""
        self.on_detach()
        self._watched = {id(optimizer): Watched(optimizer, self._tallies) for optimizer in optimizers}
        references = [weakref.ref(optimizer) for optimizer in optimizers]
        self._survey = Survey(self._planner, self._tallies, lambda: [o for ref in references if (o := ref()) is not None])
        self._ddp, self._has_ranks = _ddp_in(module), _has_ranks()
        self._clock = 0
        self._tallies.retract("unattached-optimizer")  # others are attached now
        self._tallies.tell(begins=True)
        self._probed = list(self._watched.values())[:_OPTIMIZERS]
        for watched in self._probed:
            self._choose(watched)
        self._hang()

    def on_pause(self, is_paused: bool) -> None:
        """Pause or resume: events are part of training only outside a pause."""
        self.paused = is_paused

    def on_detach(self) -> None:
        """Remove all hooks, and keep only the facts."""
        self._handles.remove()
        self._watched, self._survey, self._idle, self._rest, self._ddp = {}, None, Idle(), Rest(), None
        self._probed = []
        self._settling.clear()

    def _choose(self, watched: Watched, with_gradient: bool = False) -> None:
        """Probe the smallest parameter of an optimizer; ``with_gradient``: the smallest that has a gradient now."""
        optimizer, inventory = watched.optimizer(), self._planner.now()
        watched.absent, watched.probe, watched.silent, self._is_hung = 0, None, 0, False
        if optimizer is None or inventory is None:
            return
        watched.owned = owned = frozenset(id(p) for group in optimizer.param_groups for p in group["params"])
        found = [
            (parameter.numel(), number)
            for number, place in enumerate(inventory.references)
            if (parameter := place()) is not None
            and id(parameter) in owned
            and parameter.requires_grad
            and (parameter.grad is not None or not with_gradient)
        ]
        if found:
            _, number = min(found)
            place = inventory.references[number]
            others = [each for size, each in found if size <= _LARGEST and each != number]
            chosen = others[:: max(1, len(others) // (_PLACES - 1))][: _PLACES - 1]
            watched.places = [place, *(inventory.references[each] for each in chosen)]
            if (parameter := place()) is not None:
                watched.probe = Probe(inventory.names[number], place, parameter)

    def _hang(self) -> None:
        """Register one hook on each probe, a second one while writes to its gradient are unexplained, and none during a pause."""
        self._is_hung = True
        self._handles.remove()
        if self._rest.is_on:
            return
        for key, watched in self._watched.items():
            if watched.probe is not None and not watched.probe.is_offloaded:
                self._handles.on_accumulate(watched.probe.place, Hook(self._accumulated_hook, key))
                if watched.writes.is_curious or watched.writes.is_doubtful:
                    self._handles.on_gradient(watched.probe.place, Hook(self._incoming_hook, key))

    # --- forward and backward --------------------------------------------------------------------------------------------------

    def on_forward(self) -> None:
        """Count a training forward of the model."""
        self._forwards += 1
        if self._rest.is_on and self._forwards - self._forwards_at_step > self._most_forwards + _PATIENCE:
            self._rest, self._is_hung = Rest(), False  # no optimizer steps any more
        if not self._is_hung:  # not from within a hook on the same parameter
            self._hang()

    def _accumulated_hook(self, key: int, parameter: Tensor) -> None:
        if not torch.compiler.is_compiling():  # as compiled autograd does
            self.context.call(self._accumulated, key, parameter)

    def _accumulated(self, key: int, parameter: Tensor) -> None:
        watched = self._watched[key]
        probe = watched.probe
        if probe is None:
            return
        if self.paused:
            probe.doubtful = probe.is_paused = True
            return
        probe.accumulated(parameter, self._clock)
        if watched.stepped_in != torch._C._current_graph_task_id():
            self._passed(watched)
        if probe.late >= 0 or watched.is_unscaled:
            watched.accumulated(probe)
        if probe.writes and watched.writes.begin():
            self._is_hung = False
        if self._ddp is not None or probe.is_sharded:
            self._note_sync(probe)
        if self._has_ranks:
            self._settle_later(key)
        if not self._clock and self._idle.goes_on(parameter, probe, watched.writes.clears):
            self._tallies.seen("never-stepped", key, evidence={"backward passes": float(probe.fired)})

    def _passed(self, watched: Watched) -> None:
        # within a closure it is the attached optimizer that moves the parameters
        if any(other.is_unknown for other in self._probed):
            return
        if watched.elsewhere.passed(watched.places):
            passes = {"backward passes": float(watched.elsewhere.passes)}
            self._tallies.seen("unattached-optimizer", watched.key, evidence=passes)

    def on_backward_ended(self) -> None:
        """Replace a probe that took part in no backward pass, at the end of one in a monitored step."""
        for watched in self._probed:
            if watched.probe is not None and not watched.probe.has_fired and not self.paused:
                watched.silent += 1
                self._passed(watched)
                if watched.silent >= _PATIENCE:
                    self._choose(watched, with_gradient=True)

    def on_optimizers_lost(self) -> None:
        """Record that all optimizers were garbage-collected; the loop has warned about it."""
        self._tallies.seen("unattached-optimizer", warns=False)

    def is_stale(self, in_step: bool) -> bool:
        """Whether the model has been trained since the last step of an attached optimizer, whose values would look current.

        Args:
            in_step: whether a step is open in which no optimizer has stepped.
        """
        return any(
            watched.elsewhere.has_moved or (in_step and (watched.probe.was_written() or watched.elsewhere.has_changed))
            for watched in self._probed
            if watched.probe is not None and watched.elsewhere.passes > 0
        )

    def _note_sync(self, probe: Probe) -> None:
        ddp = None if self._ddp is None else self._ddp()
        probe.synced += probe.is_sharded or (ddp is not None and bool(getattr(ddp, "require_backward_grad_sync", False)))

    def _settle_later(self, key: int) -> None:
        """Look again when DDP has copied the reduced gradients back, which it does in such a callback."""
        if key not in self._settling:
            self._settling.add(key)
            engine = Variable._execution_engine
            settle = functools.partial(self.context.call, self._settled, key)
            engine.queue_callback(lambda: engine.queue_callback(settle))

    def _settled(self, key: int) -> None:
        self._settling.discard(key)
        watched = self._watched.get(key)
        if watched is not None and watched.probe is not None and (parameter := watched.probe.place()) is not None:
            watched.probe.settled(parameter)

    def _incoming_hook(self, key: int, gradient: Tensor | None) -> None:
        self.context.call(self._incoming, key, gradient)

    def _incoming(self, key: int, gradient: Tensor | None) -> None:
        probe = self._watched[key].probe
        parameter = None if probe is None else probe.place()
        if probe is not None and parameter is not None:
            writes = self._watched[key].writes
            writes.look(probe, parameter, gradient)
            writes.look_at_carried(probe, parameter, gradient)
            self._is_hung &= writes.is_curious or writes.is_doubtful

    # --- steps -----------------------------------------------------------------------------------------------------------------

    def on_optimizer_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Evaluate the probe before an optimizer steps or calls its closure."""
        watched = self._watched.get(id(optimizer))
        if watched is None or self._survey is None:
            return
        self._clock += 1
        if self._clock == 1:
            self._tallies.retract("never-stepped")
        if not self._rest.is_on:
            watched.is_unknown = has_closure or self.paused
            if watched.probe is not None and not watched.is_unknown:
                self._judge(watched, watched.probe, optimizer)
        if self._survey.step_began():
            self._has_ranks = _has_ranks()

    def _judge(self, watched: Watched, probe: Probe, optimizer: Optimizer) -> None:
        parameter = probe.place()
        if parameter is None or id(parameter) != probe.identity:  # it was replaced
            self._choose(watched, with_gradient=True)
            return
        if getattr(optimizer, "grad_scale", None) is not None:  # a fused one, that unscales as it steps
            watched.unscaling(parameter, probe, optimizer)
        gradient = probe.look(parameter)
        if gradient is not None:
            since = self._forwards != self._forwards_at_step
            watched.step_with_gradient(probe, gradient, since)
            if probe.carried and watched.writes.doubt():
                self._is_hung = False
        elif watched.step_without_gradient(probe, optimizer) and (watched.absent >= _PATIENCE or not watched.had_gradients):
            self._choose(watched, with_gradient=True)

    def on_optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Finish the evaluation after the optimizer's step."""
        watched = self._watched.get(id(optimizer))
        if watched is not None and self._survey is not None:
            self._survey.step_ended()
            watched.stepped_in = torch._C._current_graph_task_id()
            is_clean = self._is_clean(watched)
            self._over(watched)
            if self._rest.step_ended(is_clean):
                self._turn(watched)
            if watched.writes.is_doubtful and not self._is_hung:
                self._hang()

    def on_optimizer_overflowed(self, optimizer: Optimizer) -> None:
        """Finish the evaluation after the scaler prevented the optimizer's step."""
        self._clock += 1
        if (watched := self._watched.get(id(optimizer))) is not None:
            self._over(watched)

    def _over(self, watched: Watched) -> None:
        self._most_forwards = max(self._most_forwards, self._forwards - self._forwards_at_step)
        self._forwards_at_step = self._forwards
        for other in self._probed:
            if other is watched or not other.owned.isdisjoint(watched.owned):
                other.elsewhere.stepped()
                if not self._tallies.is_empty:
                    self._tallies.retract("unattached-optimizer", other.key)
        if not self._rest.is_on:
            watched.over()

    def _is_clean(self, watched: Watched) -> bool:
        """Whether this loop has no findings and no open questions.

        With several optimizers the gradients of one are evidence about the others. In a loop without visible forwards only the
        probe's hook shows backward passes without steps. Such loops never count as clean.
        """
        is_open = watched.writes.is_curious or watched.writes.is_doubtful or watched.probe is None
        is_seen = self._forwards > self._forwards_at_step
        return self._tallies.is_empty and len(self._watched) == 1 and is_seen and not (is_open or self._has_ranks)

    def _turn(self, watched: Watched) -> None:
        """Begin or end a pause: the next forward adds or removes the hooks, and the probe starts without a history."""
        self._is_hung = False
        if watched.probe is not None:
            watched.probe.forget()

    # --- scaler ----------------------------------------------------------------------------------------------------------------

    def on_unscaling(self, optimizer: Optimizer) -> None:
        """Evaluate the probe before the scaler unscales the optimizer's gradients."""
        watched = self._watched.get(id(optimizer))
        if watched is not None and watched.probe is not None and (parameter := watched.probe.place()) is not None:
            watched.unscaling(parameter, watched.probe, optimizer)

    def on_unscaled(self, optimizer: Optimizer) -> None:
        """Record that the optimizer's gradients are unscaled."""
        if (watched := self._watched.get(id(optimizer))) is not None:
            watched.unscaled()

    def on_loss_scaled(self) -> None:
        """Record that the scaler has scaled a loss."""
        for watched in self._watched.values():
            watched.scaled()

    def on_scaler_updated(self) -> None:
        """End the scaler's attempt."""
        for watched in self._watched.values():
            watched.attempt_over()


def _has_ranks() -> bool:
    """Whether gradients may be exchanged between ranks."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def _ddp_in(module: nn.Module) -> weakref.ref[nn.Module] | None:
    """The wrapper whose flag shows whether a backward pass exchanges gradients."""
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    kind = getattr(parallel, "DistributedDataParallel", ())
    return next((weakref.ref(child) for child in module.modules() if isinstance(child, kind)), None)
