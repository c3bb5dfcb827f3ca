"""The audit of a training loop: passes the events of hooks to the checks."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from ..capture.hooks import Handles, Hook
from ..capture.measurer import version_of
from ..core.torch_modes import has_group
from ..step.model_index import PLAIN_GRADIENTS, ModelIndex, Place, parameters_of
from ..step.planner import Planner
from ..step.ranks import is_dtensor, local_part
from .loop_checks import LARGEST, PATIENCE, Probe, ProbedOptimizer, UnusedGradients
from .tallies import Check, Tallies

#: The steps of the first checks.
_EARLY = (2, 8, 16)
#: The least number of steps between two later checks; models with many parameters have more, so that the cost per step is small.
_LEAST = 16
#: The number of comparisons that confirm a finding.
_COMPARED = 3
#: The total number of comparisons of frozen parameters with a gradient; most of them do not move.
_SUSPECTED = 12
_NEARLY_ALL = 0.9

#: Parameters by name, with their places.
Found = Mapping[str, tuple[Tensor, Place]]


class OwnershipChecks:
    """Checks all parameters of the model: which ones an optimizer has, which are frozen, and what has become of those at the beginning."""

    def __init__(self, planner: Planner, tallies: Tallies, optimizers: Sequence[Optimizer]) -> None:
        assert planner.inventory is not None
        self._planner, self._tallies, self._inventory = planner, tallies, planner.inventory
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._aliases = {name: tuple(others) for name, others in self._inventory.aliases.items()}
        self._initial = {name: _identity(parameter) for name, parameter, _ in self._inventory.there()}
        # gradients that an earlier phase of training has left
        there = self._inventory.there()
        self._old = {name: (weakref.ref(g), version_of(g)) for name, p, _ in there if (g := p.grad) is not None}
        self._hooked: set[str] = set()  # of the initial ones, those with hooks that are none of a monitor's
        self._unowned: Sample | None = None
        self._frozen: Sample | None = None  # some steps compare it before and after
        self._compared = 0  # of these steps
        self._cleared: tuple[ModelIndex | None, list[int]] = (None, [])
        self.next_step = self._next = 0  # the next one to report, unless the model changes, and the next one that is checked
        self.version = planner.version  # of the model, at the last check
        self.is_comparing = False  # the end of the step has to be reported, too
        self._note_hooks()

    def step_began(self, step: int) -> bool:
        """Check the model before ``step``, from 1 on, while gradients exist. Returns whether a check was due."""
        if self._frozen is not None:
            self._frozen.take()
        has_changed = self.version != self._planner.version
        is_due = step >= self._next or has_changed or step in _EARLY
        if is_due:
            self.version = self._planner.version
            self._check()
            if step >= self._next:
                self._next = step + max(_LEAST, len(self._initial) // 2)
            if has_changed:
                self._next = min(self._next, step + 4)
        self.is_comparing = self._frozen is not None
        self.next_step = step + 1 if self.is_comparing else min(n for n in (*_EARLY, self._next) if n > step)
        return is_due

    def step_ended(self) -> None:
        if (sample := self._frozen) is None or sample.value is None:
            return
        self._tallies.check("frozen-but-moving", sample.moved(), where=sample.names)
        self._compared += 1
        if sample.looks >= _COMPARED:
            self._frozen = None

    def _check(self) -> None:
        if not self._inventory.is_current():
            self._inventory = self._planner.now() or self._inventory
        self._note_hooks()
        inventory, optimizers = self._inventory, [o for reference in self._optimizers if (o := reference()) is not None]
        sizes = [len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups]
        if (inventory, sizes) == self._cleared:
            return
        found = {name: (parameter, place) for name, parameter, place in inventory.there()}
        owned = {id(parameter): parameter for parameter in parameters_of(*optimizers)}
        of_all = (self._are_unowned, self._are_frozen, self._are_replaced)
        suspicions = [self._are_untied(), *(are_so(found, owned) for are_so in of_all)]
        # no check is needed until the model or the optimizers change
        self._cleared = (None, []) if any(suspicions) else (inventory, sizes)

    def _note_hooks(self) -> None:
        """Note which of the initial parameters that are still there have hooks of the loop's own."""
        for name, parameter, _ in self._inventory.there():
            if self._initial.get(name) == _identity(parameter):
                (self._hooked.add if _has_hooks(parameter) else self._hooked.discard)(name)

    def _are_untied(self) -> bool:
        names = set(self._inventory.names)
        apart = [(other, name) for name, others in self._aliases.items() for other in others if {name, other} <= names]
        self._tallies.check("weights-untied", bool(apart), where=apart[0] if apart else (), evidence={"pairs": len(apart)})
        return bool(apart)

    def _are_replaced(self, found: Found, owned: Mapping[int, Tensor]) -> bool:
        """Whether nearly all are other tensors now, and hooks of the loop were lost with them. A few are replaced deliberately, all by a
        checkpoint or a conversion.
        """
        now = {name: parameter for name, (parameter, _) in found.items()}
        known = {name: self._initial.get(name, (0, None)) for name in now}
        replaced = [name for name, p in now.items() if known[name][1] == p.shape and known[name] != _identity(p)]
        lost = [name for name in replaced if id(now[name]) in owned and name in self._hooked and not _has_hooks(now[name])]
        is_so = bool(lost) and len(replaced) > _NEARLY_ALL * len(found)
        self._tallies.check("dead-hooks", is_so, where=tuple(lost), evidence={"parameters": len(lost)})
        return is_so

    def _are_unowned(self, found: Found, owned: Mapping[int, Tensor]) -> bool:
        """Whether parameters have no optimizer; those with a gradient that nothing moves are a mistake."""
        live = {id(parameter) for parameter, _ in found.values()}
        old = [p for key, p in owned.items() if key not in live]
        sharded = bool(old) and any(is_dtensor(p) for p, _ in found.values()) and not any(is_dtensor(p) for p in old)
        others = {name: p for name, p in found.items() if id(p[0]) not in owned and p[0].requires_grad}
        outside = {name: p for name, p in others.items() if sharded or self._has_gradient(name, p[0])}
        rule, other = "not-in-optimizer", "optimizer-before-sharding"
        if sharded and any(is_dtensor(p) for p, _ in outside.values()):
            rule, other = other, rule
        self._tallies.retract(other)
        sample = self._unowned
        if outside and (sample is None or sample.names[0] not in outside):
            self._unowned = Sample(outside)
        elif outside and sample is not None and (sample.looks >= _COMPARED or not sample.moved()):
            evidence = {"parameters": float(len(outside))}
            if old:
                evidence["old parameters in the optimizer"] = float(len(old))
            self._tallies.seen(rule, where=tuple(outside), evidence=evidence)
        else:  # there are none, or something else trains them
            self._tallies.retract(rule)
            self._unowned = None
        return bool(others)

    def _has_gradient(self, name: str, parameter: Tensor) -> bool:
        gradient, known = parameter.grad, self._old.get(name)
        return gradient is not None and (known is None or known[0]() is not gradient or known[1] != version_of(gradient))

    def _are_frozen(self, found: Found, owned: Mapping[int, Tensor]) -> bool:
        """Whether frozen parameters have a gradient, by which an optimizer may move them, or a comparison is under way."""
        if self._frozen is not None:
            return True
        frozen = {name: p for name, p in found.items() if not p[0].requires_grad and p[0].grad is not None and id(p[0]) in owned}
        if frozen and self._tallies.of("frozen-but-moving").is_fact:
            self._tallies.seen("frozen-but-moving", where=tuple(frozen))
        elif frozen and self._compared < _SUSPECTED:
            self._frozen = Sample(frozen)
        return bool(frozen)


class Sample:
    """The smallest of some parameters, with its name first, and its value at one moment."""

    def __init__(self, parameters: Found) -> None:
        name = min(parameters, key=lambda name: parameters[name][0].numel())
        parameter, place = parameters[name]
        self.names = (name, *(other for other in parameters if other != name))
        self._place = place if parameter.numel() <= LARGEST else None
        self.looks = 0
        self.take()

    def take(self) -> None:
        self.value = None if (now := self._now()) is None else now.clone()

    def moved(self) -> bool:
        """Whether the value has changed or cannot be compared. Synchronises, so callers use it a few times only."""
        self.looks += 1
        now, before = self._now(), self.value
        return before is None or now is None or now.shape != before.shape or not torch.equal(now, before)

    def _now(self) -> Tensor | None:
        parameter = None if self._place is None else self._place()
        return None if parameter is None else local_part(parameter).detach()


def _has_hooks(parameter: Tensor) -> bool:
    """Whether the parameter has a hook that is none of a monitor's."""
    kinds = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return any(not isinstance(hook, Hook) for hooks in kinds if hooks for hook in [*hooks.values()])


def _identity(parameter: Tensor) -> tuple[int, torch.Size]:
    return id(parameter), parameter.shape


# --- Sampling of steps: a loop without findings for a long time is audited only in some of its steps ---


#: The number of consecutive steps without a finding after which a loop is trusted.
TRUSTED = 300
#: A trusted loop alternates between skipped and audited steps, with enough audited ones for any mistake to become a fact.
RESTED, LOOKED = 48, 16
#: Each pause is twice as long as the one before, and shorter than three quarters of the clean steps until then, up to this many steps.
MOST_RESTED = 16 * RESTED


class Rest:
    """Counts steps."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.is_on = False  # the next step is skipped
        self.clean, self._until, self._length = 0, TRUSTED, RESTED

    @property
    def left(self) -> int:
        return self._until - self.clean if self.is_on else 0

    def step_ended(self, is_clean: bool) -> bool:
        """Count a step, ``is_clean`` if it has no finding. Returns whether a pause begins or ends here."""
        was = self.is_on
        if not is_clean:
            self._begin()
            return was
        self.clean += 1
        if self.clean == self._until:
            self.is_on = not was
            self._until += self._length if self.is_on else LOOKED
            if was:
                self._length = min(2 * self._length, MOST_RESTED)
        return self.is_on != was


# --- The audit of a training loop: hooks on the probes, whose events it passes to the checks ---


#: The most optimizers that get a probe. More are usually those of single parameters, which step within the backward pass.
_OPTIMIZERS = 3
#: Steps of others after which an optimizer that has never stepped is told of: a part that begins later does so sooner as a rule.
_MANY = 100


class LoopAudit(Check):
    """Observes a loop; it measures nothing and changes nothing."""

    name, part = "loop_audit", "audit"

    def __init__(self, planner: Planner) -> None:
        super().__init__()
        self._planner, self._handles = planner, Handles()
        self._is_paused = False  # events are no part of training at the moment
        self._steps = 0  # since the audit began, without those that a scaler has prevented
        self.forwards = self.most_forwards = 0  # since the last step of any optimizer, and the most between two
        self._end()

    def sees_alternation(self) -> bool:
        """Whether the optimizers have gradients of different numbers of backward passes since their last steps."""
        probes = [probed.probe for probed in self._optimizers.values()]
        return len(probes) > 1 and len({probe.interval.fired for probe in probes if probe is not None}) > 1

    def is_stale(self, in_step: bool) -> bool:
        """Whether the model has been trained since the last step of an attached optimizer, whose values would look current. ``in_step``: a
        step is open in which no optimizer has stepped.
        """
        return any(probed.is_stale(in_step) for probed in self._probed)

    # --- life cycle ----------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self._handles.remove()
        self._optimizers: dict[int, ProbedOptimizer] = {}
        self._probed: list[ProbedOptimizer] = []  # those that may have a probe
        self._ownership: OwnershipChecks | None = None
        self._rest, self._unused = Rest(), UnusedGradients()
        # in a pause, the steps that need not be seen, but only counted, if each has forwards, and not more than usual; and those to come
        self._unseen = self.left = 0
        self._clock = 0  # counts the steps of all optimizers, also prevented ones, while there are hooks
        self._is_current = True  # False where other hooks are needed, which cannot be registered within one of these
        # the wrapper whose flag shows whether a backward pass exchanges gradients
        self._ddp: weakref.ref[nn.Module] | None = None
        self._has_ranks = False  # gradients may be exchanged
        self._settling = set[Probe]()

    def on_attach(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Begin to audit a loop. Its mistakes show in ``.grad``, so none where an engine has gradients elsewhere."""
        self._end()
        if self._planner.source is not PLAIN_GRADIENTS:
            return
        self._ownership = OwnershipChecks(self._planner, self.tallies, optimizers)
        self._steps = 0
        self.tallies.retract("unattached-optimizer")  # others are attached now
        self.tallies.write_facts(begins=True)
        is_alone = len(set(optimizers)) == 1
        self._optimizers = {id(optimizer): ProbedOptimizer(optimizer, self.tallies, is_alone) for optimizer in optimizers}
        self._probed = list(self._optimizers.values())[:_OPTIMIZERS]
        kind = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", ())
        self._ddp = next((weakref.ref(child) for child in module.modules() if isinstance(child, kind)), None)
        self._has_ranks = has_group()
        for probed in self._probed:
            probed.choose_probe(self._planner.now())
        self._register()

    def _register(self) -> None:
        """Register one hook on each probe, a second one while values of its gradient are needed, and none in a pause."""
        self._is_current = True
        self._handles.remove()
        for key, probed in self._optimizers.items():
            if probed.probe is not None and not probed.probe.is_offloaded and not self._rest.is_on:
                self._handles.on_accumulate(probed.probe.place, Hook(self._probe_hook, "_accumulated", key, probed.probe))
                if probed.writes.needs_values:
                    self._handles.on_gradient(probed.probe.place, Hook(self._probe_hook, "_incoming", key, probed.probe))

    def _replace(self, probed: ProbedOptimizer) -> None:
        probed.choose_probe(self._planner.now(), with_gradient=True)
        self._is_current = False

    def on_pause(self, is_paused: bool) -> None:
        self._is_paused = is_paused

    def on_optimizers_lost(self) -> None:
        """Record that all optimizers were garbage-collected; the loop has warned about it."""
        self.tallies.seen("unattached-optimizer", warns=False)

    @property
    def may_miss(self) -> int:  # type: ignore[override]
        """The steps of a pause, until the next check of all parameters."""
        if self._unseen:
            self.on_missed()
        ownership = self._ownership
        if ownership is None or not (self._rest.is_on and self._is_current and self.tallies.is_empty):
            return 0
        return max(0, min(self._rest.left, ownership.next_step - self._steps) - 1)

    def count_only(self, steps: int) -> None:
        """So many of the next steps need not be seen: who sees them counts ``left`` and ``forwards``, or calls as ever."""
        self._unseen = self.left = steps

    def on_missed(self) -> None:
        """Some steps may only have been counted. From now on all have to be seen."""
        missed, self._unseen, self.left = self._unseen - self.left, 0, 0
        self._steps += missed
        self._rest.clean += missed

    # --- forward and backward --------------------------------------------------------------------------------------------------

    def on_forward(self) -> None:
        if self._unseen:
            self.on_missed()
        self.forwards += 1
        if self._rest.is_on and self.forwards > self.most_forwards + PATIENCE:
            self._rest = Rest()  # no optimizer steps any more
            self._register()
        elif not self._is_current:
            self._register()

    def _probe_hook(self, method: str, key: int, probe: Probe, tensor: Tensor | None) -> None:
        probed = self._optimizers.get(key)  # another probe may have taken its place, whose hook is yet to come
        if probed is not None and probe is probed.probe:
            self.context.call(getattr(self, method), probed, probe, tensor)

    def _accumulated(self, probed: ProbedOptimizer, probe: Probe, parameter: Tensor) -> None:
        interval, writes = probe.interval, probed.writes
        if self._is_paused:
            interval.doubtful = interval.is_paused = True
            return
        probe.accumulated(parameter, self._clock)
        if probed.stepped_in != torch._C._current_graph_task_id():
            self._backward_ended(probed)
        probed.accumulated(probe)
        if interval.writes and writes.begin():
            self._is_current = False
        if writes.is_unclear:
            writes.keep(probe)
        if self._has_ranks or self._ddp is not None or probe.is_sharded:
            self._exchanged(probe)
        if not self._clock and self._unused.are_certain(parameter, probe, writes.clears):
            self.tallies.seen("never-stepped", probed.key, evidence={"backward passes": float(interval.fired)})

    def _exchanged(self, probe: Probe) -> None:
        """Count the exchange of a gradient between ranks within the backward pass, if there is any, and learn when it has ended."""
        ddp = None if self._ddp is None else self._ddp()
        if probe.is_sharded or (ddp is not None and bool(getattr(ddp, "require_backward_grad_sync", False))):
            probe.interval.synced += 1
        if self._has_ranks and probe not in self._settling:
            # look again when DDP has copied the reduced gradients back, which it does in such a callback
            self._settling.add(probe)
            engine = Variable._execution_engine
            settle = functools.partial(self.context.call, self._settled, probe)
            engine.queue_callback(lambda: engine.queue_callback(settle))

    def _settled(self, probe: Probe) -> None:
        self._settling.discard(probe)
        probe.settled()

    def _backward_ended(self, probed: ProbedOptimizer) -> None:
        for other in self._probed:
            if other.is_unknown:  # within a closure it is the attached optimizer that moves the parameters
                return
        if probed.unattached.backward_ended():
            passes = {"backward passes": float(probed.unattached.passes)}
            self.tallies.seen("unattached-optimizer", probed.key, evidence=passes)

    def on_backward_ended(self) -> None:
        """Replace a probe that took part in no backward pass, at the end of one in a monitored step."""
        for probed in self._probed:
            if probed.probe is not None and not probed.probe.has_fired and not self._is_paused:
                self._backward_ended(probed)
                probed.silent += 1
                if probed.silent >= PATIENCE:
                    self._replace(probed)

    def _incoming(self, probed: ProbedOptimizer, probe: Probe, gradient: Tensor | None) -> None:
        if (parameter := probe.place()) is not None:
            probed.writes.read_written(probe, parameter, gradient)
            probed.writes.read_carried(probe, parameter, gradient)
            self._is_current &= probed.writes.needs_values

    # --- steps -----------------------------------------------------------------------------------------------------------------

    def on_optimizer_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        if self._unseen:
            self.on_missed()
        probed, ownership = self._optimizers.get(id(optimizer)), self._ownership
        if probed is None or ownership is None:
            return
        self._steps += 1
        probed.is_late = has_closure and probed.calls_closure_once
        if not (self._rest.is_on or probed.is_late):
            self._step_began(probed, optimizer, has_closure)
        is_due = self._steps >= ownership.next_step or ownership.version != self._planner.version
        if is_due and ownership.step_began(self._steps):
            self._has_ranks = has_group()
        if is_due and self._steps >= _MANY * (len(self._optimizers) - 1) > 0:
            self._judge_resting()

    def _step_began(self, probed: ProbedOptimizer, optimizer: Optimizer, has_closure: bool) -> None:
        """Judge an optimizer's step, and replace the probe if it has shown nothing."""
        self._clock += 1
        if self._clock == 1:
            self.tallies.retract("never-stepped")
        needed = probed.writes.needs_values
        if probed.step_began(optimizer, self.forwards, has_closure or self._is_paused):
            self._replace(probed)
            return
        if probed.probe is not None and probed.probe.interval.carried:
            probed.writes.suspect_carried()
        self._is_current &= needed or not probed.writes.needs_values

    def _judge_resting(self) -> None:
        if (index := self._planner.inventory) is None:
            return
        for probed in self._optimizers.values():
            if probed.rests():
                steps = {"steps of the others": float(self._steps)}
                self.tallies.seen("optimizer-never-steps", probed.key, probed.names(index), steps)

    def on_optimizer_stepped(self, optimizer: Optimizer, may_count: bool = False) -> None:
        """``may_count``: the caller goes on as ``left`` says."""
        if self._unseen:  # the beginning of the step was only counted
            self.on_missed()
            self._steps += 1
        probed, ownership = self._optimizers.get(id(optimizer)), self._ownership
        if probed is None or ownership is None:
            return
        if ownership.is_comparing:
            ownership.step_ended()
        if probed.is_late and not self._rest.is_on:
            self._step_began(probed, optimizer, has_closure=False)
        if not probed.has_stepped:
            self.tallies.retract("optimizer-never-steps", probed.key)  # it only began late
        # With several optimizers the gradients of one are evidence about the others. In a loop without visible forwards only the
        # probe's hook shows backward passes without steps. Such loops never count as clean, nor do those with open questions.
        is_clean = self.tallies.is_empty and self.forwards > 0 and len(self._optimizers) == 1 and not self._has_ranks
        is_clean = is_clean and probed.probe is not None and not probed.writes.needs_values
        if not (self._rest.is_on and is_clean) or probed.unattached.passes:
            self._interval_ended(probed, has_stepped=True)
        self.most_forwards, self.forwards = max(self.most_forwards, self.forwards), 0
        if self._rest.step_ended(is_clean):
            self._is_current = False  # the next forward adds or removes the hooks
            if probed.probe is not None:
                probed.probe.forget()
        # nor will a forward register them where the parts of the model are called alone
        no_forward = not self.most_forwards and probed.stepped_in == -1
        if not self._is_current and (probed.writes.needs_values or no_forward):
            self._register()
        if may_count and self._rest.is_on and is_clean and probed.probe is not None and probed.probe.has_fired:
            self.count_only(self.may_miss)

    def on_optimizer_overflowed(self, optimizer: Optimizer) -> None:
        self._clock += 1
        if (probed := self._optimizers.get(id(optimizer))) is not None:
            self._interval_ended(probed, has_stepped=False)
            self.most_forwards, self.forwards = max(self.most_forwards, self.forwards), 0

    def _interval_ended(self, probed: ProbedOptimizer, has_stepped: bool) -> None:
        for other in self._probed:
            if other is probed or not other.owned.isdisjoint(probed.owned):
                other.unattached.step_ended()
                if not self.tallies.is_empty:
                    self.tallies.retract("unattached-optimizer", other.key)
        if not self._rest.is_on:
            probed.step_ended(has_stepped)

    # --- scaler ----------------------------------------------------------------------------------------------------------------

    def on_unscaling(self, optimizer: Optimizer) -> None:
        if (probed := self._optimizers.get(id(optimizer))) is not None:
            probed.unscaling(optimizer)

    def on_unscaled(self, optimizer: Optimizer) -> None:
        if (probed := self._optimizers.get(id(optimizer))) is not None:
            probed.unscaled()

    def on_loss_scaled(self) -> None:
        for probed in self._optimizers.values():
            probed.is_scaled = True

    def on_scaler_updated(self) -> None:
        for probed in self._optimizers.values():
            probed.end_attempt()
