"""Decides before an optimizer steps whether the step is a spike, and how to handle it: one decision on all ranks."""

from __future__ import annotations

import copy
import math
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ..core import keys as n
from ..core.errors import SpikeError, WarningLog
from ..core.keys import SUMMARY, Key
from ..core.moments import Column, identity
from ..core.records import SpikeEvent, StepRecord
from ..spikes.detector_set import DetectorSet
from ..step.active_step import ActiveStep, Mode
from ..step.buffer import StepBuffer
from ..step.exchange import RankExchange
from ..step.model_index import parameters_of
from ..step.plan import SourcePlan
from ..step.planner import Planner
from ..step.plugin import OptimizerContext, Plugin
from ..step.ranks import Ranks, local_part
from ..step.summary import gradient_values
from .reactions import Policy, Rollback, RollbackResult

# --- The model's buffers before a batch: a skipped batch must not change running statistics ---


#: The most bytes of buffers to copy in every step, the smallest first: statistics are small, masks are not.
COPIED = 32 << 20


@dataclass
class _Buffer:
    """One buffer at the start of the step; None if the name had none yet."""

    module: weakref.ref[nn.Module]
    name: str
    buffer: Tensor | None
    version: int
    copy: Tensor | None = None
    is_moving: bool = False  # its counter has changed from one step to another


class Buffers:
    """The model's buffers as they were before the batch of the open step. Does not keep the model alive.

    It copies the buffers of normalisation layers, those whose version counter has changed before, and the smallest others up to
    :data:`COPIED` bytes. The counter alone is not sufficient: kernels of normalisation layers and writes to ``.data`` bypass it.
    """

    def __init__(self) -> None:
        self._modules: list[weakref.ref[nn.Module]] = []
        self._version: int | None = None
        self._seen: dict[tuple[int, str], _Buffer] = {}  # by the module's number and their names
        self.is_known = False  # remembered since the last attempt

    def remember(self, model: nn.Module, version: int) -> None:
        """Remember the buffers at the start of a step. ``version`` changes with the model's modules. Does not synchronise."""
        if self._version != version:
            self._modules, self._version, self._seen = [weakref.ref(module) for module in model.modules()], version, {}
        before, self._seen, left = self._seen, {}, COPIED
        found: list[tuple[bool, int, _Buffer, Tensor]] = []  # whether its copy is optional, and its size
        for number, reference in enumerate(self._modules):
            module = reference()
            for name, buffer in module._buffers.items() if module is not None else ():
                counter = -1 if buffer is None or buffer.is_inference() else buffer._version
                seen = before.get((number, name)) or _Buffer(reference, name, buffer, counter)
                seen.is_moving |= seen.version != counter
                seen.buffer, seen.version, seen.copy = buffer, counter, None
                self._seen[number, name] = seen
                if buffer is None or is_fixed(buffer):
                    continue
                # kernels of normalisation layers write without a count; so may any TorchScript module
                is_statistics = isinstance(module, (_NormBase, torch.jit.ScriptModule)) and getattr(module, "training", False)
                found.append((not (is_statistics or seen.is_moving), buffer.nbytes, seen, buffer))
        for is_optional, nbytes, seen, buffer in sorted(found, key=itemgetter(0, 1)):
            left -= nbytes
            if is_optional and left < 0:
                break
            seen.copy = buffer.detach().clone()

    def put_back(self) -> list[str]:
        """Restore the buffers after a skipped step; may be called repeatedly. Returns the names of those that could not be."""
        failed = []
        with torch.no_grad():
            for seen in self._seen.values():
                module = seen.module()
                if module is None or seen.name not in module._buffers:
                    continue
                module._buffers[seen.name] = seen.buffer  # the forward may have replaced it
                try:
                    if seen.copy is not None and seen.buffer is not None:
                        seen.buffer.copy_(seen.copy)
                        seen.version = seen.buffer._version
                    elif seen.buffer is not None and seen.version >= 0 and seen.buffer._version != seen.version:
                        failed.append(seen.name)  # it is large, and changed for the first time
                except RuntimeError:
                    failed.append(seen.name)
        return failed

    def forget(self) -> None:
        self._seen = {}


def is_fixed(buffer: Tensor) -> bool:
    """Whether in-place writes to it are impossible."""
    return buffer.is_inference() or any(
        stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)
    )


class _Kept(NamedTuple):
    """A snapshot: after which step and how many batches it was taken, and its content."""

    step: int
    batches: int
    load: Callable[[], Mapping[str, Any]]


class Snapshots:
    """The last snapshots of a model and its optimizers, of this rank's part of each tensor."""

    def __init__(self, policy: Rollback, ranks: Ranks, complaints: WarningLog) -> None:
        self._policy, self._ranks, self._complaints = policy.without_others(), ranks, complaints
        self._extra_state = [_weakly(each) for each in policy.extra_state]
        self._kept: list[_Kept] = []  # oldest first
        self._loaded: Mapping[str, Any] = {}
        self._batches = 0  # that came, or were passed over
        self.due: int | None = None  # the step before, if a snapshot is due after it
        self._since: int | None = None  # the step after which the last one was taken, or at which it was gone back to one
        self._used: int | None = None  # the one gone back to last, if none was taken since

    def attempt_ended(self, step: int, is_sound: bool) -> None:
        """Count the batch of ``step``; ``is_sound``: the step was applied, and is no spike."""
        self._batches += 1
        if is_sound and (self._since is None or step - self._since >= self._policy.every):
            self.due = step

    def take_due(self, model: nn.Module | None, optimizers: Sequence[Optimizer]) -> bool:
        """Copy everything to the host if a snapshot is due, which waits for the device. Returns whether one was, and the model is there."""
        last, self.due = self.due, None
        if last is None or model is None:
            return False
        self._since, self._used = last, None  # even if it fails, so that it is not tried again in every step
        try:
            taken = {
                "tensors": [_on_host(tensor) for tensor in _tensors(model, optimizers)],
                "optimizers": [[_copied(each.state.get(p)) for p in parameters_of(each)] for each in optimizers],
                "options": [[{k: _copied(v) for k, v in g.items() if k != "params"} for g in o.param_groups] for o in optimizers],
                "also": [_copied(each.state_dict()) for each in self._others()],
            }
            self._kept.append(_Kept(last, self._batches, self._stored(taken)))
            del self._kept[: -self._policy.keep]
        except Exception as error:  # a full disk, or what cannot be copied
            self._complaints.add("snapshot", f"no snapshot could be taken after step {last}", error)
        return True

    def _stored(self, taken: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]]:
        """How to get it back, from a file if the policy has a directory."""
        if (directory := self._policy.directory) is None:
            return lambda: taken
        Path(directory).mkdir(parents=True, exist_ok=True)
        # it has no name, so nobody can change it, and the system removes it even if the process is killed
        file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        leaves, shape = tree_flatten(taken)
        others = [None if type(leaf) is Tensor else leaf for leaf in leaves]

        def load() -> Mapping[str, Any]:
            file.seek(0)
            tensors = torch.load(file, map_location="cpu", weights_only=True)
            kept: Mapping[str, Any] = tree_unflatten([tensors.get(place, leaf) for place, leaf in enumerate(others)], shape)
            return kept

        weakref.finalize(load, file.close)
        torch.save({place: leaf for place, leaf in enumerate(leaves) if type(leaf) is Tensor}, file)
        return load

    def go_back(self, step: int, model: nn.Module, optimizers: Sequence[Optimizer]) -> RollbackResult | None:
        """Go back after a spike in ``step``; None without a snapshot that all ranks have and can restore."""
        steps = [kept.step for kept in self._kept]
        to = self._choose(step, sorted(set(steps).intersection(*self._ranks.gathered(steps))))
        if to is None:
            return None
        if failures := self._on_all(lambda: self.load(to, model, optimizers)):  # all go back, or none
            self.forget()
            message = f"step {step} is skipped, but the model could not go back to step {to}: {failures[0]}"
            self._complaints.add("rollback", message)
            return None
        before, skipped = self._kept[-1].batches, self._policy.skip_batches
        if failures := self._on_all(lambda: self.restore(step, model, optimizers)):
            message = f"not all of the model went back to step {to}, and what it is now is of no use: {failures[0]}"
            self._complaints.add("rollback:partly", message)
        seen = self._batches - before
        self._batches += skipped
        return RollbackResult(step, to, seen, skipped)

    def _choose(self, step: int, steps: list[int]) -> int | None:
        """The step of the snapshot among ``steps``, ascending, to restore after a spike in ``step``; None without any.

        It is the newest one that is old enough, else the oldest. If one was restored since the last snapshot was taken, only older
        ones qualify, or the oldest if there are none.
        """
        if self._used is not None:
            steps = [taken for taken in steps if taken < self._used] or steps[:1]
        old = [taken for taken in steps if step - taken >= self._policy.age]
        return max(old) if old else min(steps, default=None)

    def _on_all(self, action: Callable[[], object]) -> list[str]:
        """Do it on each rank; what went wrong, on any of them."""
        failure = ""
        try:
            action()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        return list(filter(None, self._ranks.gathered(failure)))

    def load(self, to: int, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Load the snapshot of step ``to`` for :meth:`restore`. Drops later ones. Raises where other tensors are there now; then nothing
        is changed.
        """
        while self._kept[-1].step > to:
            del self._kept[-1]
        saved = self._kept[-1].load()
        shapes = [local_part(tensor).shape for tensor in _tensors(model, optimizers)]
        counts = [len(parameters_of(optimizer)) for optimizer in optimizers]
        if shapes != [t.shape for t in saved["tensors"]] or counts != [*map(len, saved["optimizers"])]:
            raise ValueError("parameters or buffers have come, gone or changed their shape since")
        self._loaded = saved

    def restore(self, step: int, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Restore the loaded snapshot after a spike in ``step``. An error of ``extra_state`` comes after everything else is restored."""
        saved, self._loaded = self._loaded, {}
        self._since = step  # the usual number of steps remains until the next snapshot
        self._used = self._kept[-1].step
        written: set[int] = set()
        with torch.no_grad():
            for tensor, value in zip(_tensors(model, optimizers), saved["tensors"], strict=True):
                local_part(tensor).detach().copy_(value)
            for optimizer, states in zip(optimizers, saved["optimizers"], strict=True):
                for parameter, state in zip(parameters_of(optimizer), states, strict=True):
                    if state is None:
                        optimizer.state.pop(parameter, None)
                    else:
                        optimizer.state[parameter] = _restored(optimizer.state.get(parameter), state, parameter, written)
        if self._extra_state:
            for optimizer, groups in zip(optimizers, saved["options"], strict=True):
                for group, options in zip(optimizer.param_groups, groups, strict=True):
                    for name, value in options.items():
                        group[name] = _restored(group.get(name), value, None, written)
            for each, state in zip(self._others(), saved["also"], strict=True):
                each.load_state_dict(_copied(state))

    def _others(self) -> list[Any]:
        found = [reference() for reference in self._extra_state]
        if any(each is None for each in found):
            raise ValueError("an object of extra_state= is gone; keep it in a variable of the loop")
        return found

    def forget(self) -> None:
        self._kept.clear()
        self._used = self._since = self.due = None


def _tensors(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """The tensors that training changes, except the optimizers' state; each once.

    The parameters are those of the optimizers: during a forward of FSDP2 the model has others.
    """
    buffers = (buffer for buffer in model.buffers() if not is_fixed(buffer))
    return list({id(tensor): tensor for tensor in (*parameters_of(*optimizers), *buffers)}.values())


def _weakly(thing: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:  # some take no references
        return lambda: thing


def _on_host(tensor: Tensor) -> Tensor:
    return local_part(tensor).detach().to("cpu", copy=True)


def _copied(value: Any) -> Any:
    """A copy on the host that shares nothing."""
    return tree_map(lambda each: _on_host(each) if isinstance(each, Tensor) else copy.deepcopy(each), value)


def _restored(now: Any, saved: Any, parameter: Tensor | None, written: set[int]) -> Any:
    """What has the saved value in the place of ``now``: the same tensors and dicts where there are such.

    Those in ``written`` get no second value: they stood for two that were one when the snapshot was taken, or two.
    """
    if isinstance(saved, dict):
        there = now if isinstance(now, dict) else {}
        found = {name: _restored(there.get(name), each, parameter, written) for name, each in saved.items()}
        if not isinstance(now, dict):
            return found
        now.clear()
        now.update(found)
        return now
    if type(saved) in (list, tuple):
        old = now if isinstance(now, (list, tuple)) and len(now) == len(saved) else [None] * len(saved)
        return type(saved)(_restored(before, each, parameter, written) for before, each in zip(old, saved, strict=True))
    if not isinstance(saved, Tensor):
        return copy.deepcopy(saved)
    if isinstance(now, Tensor) and id(now) not in written:
        local = local_part(now).detach()
        if local.shape == saved.shape and local.dtype == saved.dtype:
            local.copy_(saved)
            written.add(id(now))
            return now
    # of a state that has changed its shape since, such as the history of L-BFGS
    return saved.clone() if parameter is None or saved.dim() == 0 else saved.to(parameter.device, copy=True)


_STEPS_SKIPPED = Key(SUMMARY, "", "steps_skipped")
#: The sources that have values before the optimizer steps.
_SOURCES = (n.GRADIENT_BEFORE_CLIP, n.GRADIENT)
#: A rank's vote: no spike, a spike, or NaN or Inf that the optimizer would use.
CALM, SPIKE, NONFINITE = 0.0, 1.0, 2.0


class Act(NamedTuple):
    """The action on a step that is a spike: which one, whether the step was not applied, and how many spikes in a row these are."""

    reason: str
    words: str
    skipped: bool
    in_a_row: int


class SpikePolicy(Plugin):
    """Handles the spikes of one run. The detectors predict them, and learn nothing here, only later from the step's record.

    ``parts``: what ranks must have in common to exchange tensors.
    """

    name = "spike_policy"

    def __init__(
        self,
        policy: Policy,
        planner: Planner,
        detectors: DetectorSet,
        exchange: RankExchange,
        complaints: WarningLog,
        parts: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.policy = policy.without_others() if isinstance(policy, Rollback) else policy
        self._settings = policy.settings  # with the number of the others
        self._planner = planner
        self._detectors, self._exchange, self._complaints, self._parts = detectors, exchange, complaints, parts
        self._model_buffers = Buffers()
        self._snapshots = Snapshots(policy, exchange.ranks, complaints) if isinstance(policy, Rollback) else None
        self.known: tuple[StepRecord, dict[str, float]] | None = None  # the values at the decision
        self.act: Act | None = None  # on the current step, or on the last one that ended
        self.rolled_back: RollbackResult | None = None  # of that step
        self.overrules_scaler = False  # ranks' scalers disagreed about the step: it is skipped, and leaves the scale as it was
        self.skipped = self.rollbacks = self._in_a_row = 0

    # --- the model's buffers -------------------------------------------------------------------------------------------------

    def on_attach(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.requires_gradients = True
        self._model_buffers.remember(module, self._planner.version)

    def before_forward(self, module: nn.Module) -> None:
        """Remember them at the first call since the last attempt."""
        if not self._model_buffers.is_known:
            self._model_buffers.remember(module, self._planner.version)
            self._model_buffers.is_known = True

    def step_dropped(self) -> None:
        self._model_buffers.is_known = False

    def _put_buffers_back(self) -> None:
        if failed := self._model_buffers.put_back():
            names = ", ".join(failed[:3])
            message = f"buffers of the model ({names}) could not be made what they were before a step that was skipped"
            self._complaints.add("buffers", message)

    # --- the step ------------------------------------------------------------------------------------------------------------

    def on_step_open(self, step: ActiveStep) -> None:
        """The loop has done all that belongs to the step before: the time for a snapshot of it, which waits for the device."""
        self.act = self.rolled_back = None
        self.known, self.overrules_scaler = None, False
        if self._snapshots is not None and self._snapshots.take_due(self.context.module, self.context.optimizers):
            self._in_a_row = 0

    @property
    def is_skipped(self) -> bool:
        return self.act is not None and self.act.skipped

    def before_optimizer_step(self, step: ActiveStep, optimizer: OptimizerContext) -> None:
        """Decide whether the optimizer must change nothing; SpikeError stops the run. Synchronises; one or two collectives."""
        assert step.buffer is not None
        try:
            if not self.is_skipped:  # else all ranks know
                if not self._exchange.all_take_part("decisions", self._common, step.number):
                    return
                severity, reason = self._vote(step.buffer, step.plans, optimizer)
                if severity == CALM or not self._answer(step.number, severity, reason, optimizer.stepped):
                    return
            self._put_buffers_back()
        finally:
            if self.act is not None:
                step.mode = Mode.MONITORED  # what is done about a step is recorded, whatever the cadence
            step.is_skipped = self.is_skipped

    def annotate(self, step: ActiveStep) -> None:
        if self.act is not None:
            step.annotations.update(action=self.act.words, in_a_row=self.act.in_a_row)
            if self.act.skipped:
                step.annotations["skipped"] = self.act.reason
        step.values[_STEPS_SKIPPED] = float(self.skipped)

    def _answer(self, step: int, severity: float, reason: str, stepped: str) -> bool:
        policy = self.policy
        if self.act is not None and severity < NONFINITE:
            return False  # it was accepted when an earlier optimizer stepped
        self._in_a_row += self.act is None
        is_over, row = self._in_a_row > (policy.limit or math.inf), f"the {_ordinal(self._in_a_row)} spike in a row"
        stops = is_over and policy.on_limit == "stop"
        if is_over and not stops and severity < NONFINITE:
            self.act = Act(reason, f"accepted, since it is {row}", False, self._in_a_row)
            return False
        words = f"skipped, {self._in_a_row} in a row" if self._in_a_row > 1 else "skipped"
        words += "; a step with NaN or Inf is never accepted" if is_over else ""
        words += f", but {stepped} had stepped before" if stepped else ""
        self.act = Act(reason, f"stopped, since it is {row}" if stops else words, True, self._in_a_row)
        self.skipped += 1
        if stops:
            self._put_buffers_back()
            raise SpikeError(f"step {step}: {reason}; this is {row}, and {policy!r} stops the run")
        return True

    def _common(self) -> dict[str, Any]:
        return {**self._parts(), "on_spike=": self._settings, "detectors": self._detectors.signals}

    def _vote(self, buffer: StepBuffer, plans: Mapping[str, SourcePlan], optimizer: OptimizerContext) -> tuple[float, str]:
        """The severity of the step according to all ranks, and the reason. Synchronises; one or two collectives.

        This rank votes even after a failure, since the others wait for it.
        """
        part = buffer.part(_SOURCES)
        for source in _SOURCES if optimizer.ignored else ():
            part.clear(source, optimizer.ignored)
        spread = {source: (plans[source].exchanged, plans[source].columns) for source in _SOURCES if plans[source].exchanged}
        self._exchange.run(part, spread, self._detectors.watches_values, self._detectors.watches, what="decisions")
        events: list[SpikeEvent] = []
        count, refused = 0, optimizer.is_overflowed
        try:
            tables, values, _ = part.flush()  # waits for the device
            without = {*part.refused, *(source for (source, name) in part.absent if not name)}
            before = tables.get(n.GRADIENT_BEFORE_CLIP)
            whole = {} if before is None or n.GRADIENT_BEFORE_CLIP in without else gradient_values(before, (), {})
            record = StepRecord(part.step, 0.0, True, values, tables)
            self.known = record, whole
            # of the gradients that the optimizer will use, or, if unknown, before clipping
            table = record.tables.get(n.GRADIENT, record.tables.get(n.GRADIENT_BEFORE_CLIP))
            count = 0 if table is None else int(table.rows[:, Column.NONFINITE].sum())
            refused |= bool(count) and optimizer.has_scaler
            if not refused:  # the scaler handles infinite gradients itself
                events = self._detectors.predict(record, whole)
        except Exception as error:
            self._complaints.add("internal:vote", f"whether step {buffer.step} is a spike could not be determined", error)
        reasons = [event.reason for event in events]
        if count and not refused and all(math.isfinite(event.value) for event in events):
            reasons.append(f"{count:,} elements of the gradients are NaN or infinite")
        if optimizer.is_stale:
            reasons.append("the gradients are those of a step that was skipped, and were not zeroed since")
        severity = CALM if not reasons else NONFINITE if count and not refused else SPIKE
        vote = self._together(severity, "; ".join(reasons), refused)
        self._detectors.warn_of_failures()
        return vote

    def _together(self, severity: float, reason: str, refused: bool) -> tuple[float, str]:
        ranks = self._exchange.ranks
        if ranks.count == 1:
            return severity, reason
        row = identity(2, ranks.device)
        row[0, Column.MAX] = severity
        row[1, [Column.MIN, Column.MAX]] = float(refused)
        votes, refusals = ranks.merged(row, frozenset({Column.MIN, Column.MAX})).tolist()
        worst, split = votes[Column.MAX], bool(refusals[Column.MAX] and not refusals[Column.MIN])
        self.overrules_scaler |= split
        if worst == CALM and not split:
            return CALM, ""
        if refused and split:
            reason = "the scaler did not let the optimizer step"
        told = {rank: words for rank, words in enumerate(ranks.gathered(reason)) if words}
        if len(told) == ranks.count and len(set(told.values())) == 1:
            return worst, next(iter(told.values()))
        words = "; ".join(f"rank {rank}: {words}" for rank, words in list(told.items())[:3])
        return NONFINITE if split else worst, words + (f"; and {len(told) - 3} more ranks" if len(told) > 3 else "")

    # --- after the step --------------------------------------------------------------------------------------------------------

    def after_attempt(self, step: ActiveStep, applied: bool) -> None:
        model = self.context.module
        if model is None:
            return
        if self.is_skipped:
            self._put_buffers_back()  # a forward may have followed the decision
        snapshots, act = self._snapshots, self.act
        if snapshots is not None:
            snapshots.attempt_ended(step.number, is_sound=applied and act is None)
        if applied and (snapshots is None or act is not None):
            self._in_a_row = 0  # with rollbacks, a step that is no spike leaves this to the next snapshot
        elif not applied and snapshots is not None and act is not None and act.skipped:
            done = snapshots.go_back(step.number, model, self.context.optimizers)
            if done is not None:
                self.rollbacks, self.rolled_back = self.rollbacks + 1, done
                self.act = Act(act.reason, f"went back to the state after step {done.to_step}", True, act.in_a_row)
        self.before_forward(model)  # now if no call of the model was seen, as when only its parts are called
        self._model_buffers.is_known = False

    def on_rewind(self, step: int) -> None:
        """The loop has gone back by itself: snapshots are of another branch, and none is due after the step before."""
        if self._snapshots is not None:
            self._snapshots.forget()

    def on_detach(self) -> None:
        self.requires_gradients = False
        self._exchange.end()
        self.end_run()

    def end_run(self) -> None:
        self._model_buffers.forget()
        self.on_rewind(0)

    # --- resume ----------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers. Snapshots are no part of it."""
        return {"in_a_row": self._in_a_row, "skipped": self.skipped, "rollbacks": self.rollbacks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._in_a_row, self.skipped, self.rollbacks = int(state["in_a_row"]), int(state["skipped"]), int(state["rollbacks"])
        self.on_rewind(0)


def _ordinal(number: int) -> str:
    kind = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{kind}"
