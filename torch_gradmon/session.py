"""One training run under watch: what happens at each moment of a step.

A session is told what the loop does, by hooks or by hand, and takes the values of a step along the straight line: captures
measure into a :class:`StepBuffer`, one flush brings them to the host, and the record goes to detectors, run directory, sinks.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from . import names as n
from .assembly import Facts, assemble, describe, missing
from .capture.activations import ActivationCapture
from .capture.attachment import Attachment, is_unscaled, scale_of
from .capture.gradients import GradientCapture
from .capture.hooks import Hook
from .capture.measuring import Measurer
from .capture.parameters import ParameterCapture
from .errors import GradmonWarning, SpikeError
from .layers import Layers
from .names import Key
from .planner import Planner
from .record import Event, StepRecord
from .registry import SourcePlan
from .sinks.outbox import Outbox
from .spikes.detector import SpikeDetector
from .step import Aggregation, StepBuffer, to_float
from .summary import Summary

#: After so many steps the smallest number of backward passes in a step counts as known, and earlier ones are not measured.
_LEARNING = 100

F = TypeVar("F", bound=Callable[..., Any])


def guarded(method: F) -> F:
    """For what hooks call: takes its time, and turns any failure of ours into one warning."""

    @functools.wraps(method)
    def run(self: Session, *args: Any) -> Any:
        if self.inert or self._busy:
            return None
        self._busy = True
        start = time.perf_counter()
        try:
            with torch.no_grad():
                return method(self, *args)
        except SpikeError:
            raise
        except Exception as error:
            message = f"{method.__name__} failed in step {self.step}, some values of it are lost; training goes on"
            self.complaints.add(f"internal:{method.__name__}", message, error)
        finally:
            self._busy = False
            self._own_seconds += time.perf_counter() - start

    return run  # type: ignore[return-value]


@dataclass
class Options:
    """What a session is asked to be; :class:`torch_gradmon.ModuleMonitor` explains each."""

    is_step_monitored: Callable[[int], bool]
    show: Callable[[Mapping[Key, float]], dict[str, float]]
    history: int = 1000
    on_spike: str | Callable[[Event], Any] | None = None
    inert: bool = False


class Session:
    """The state of one run under watch. :class:`torch_gradmon.ModuleMonitor` is its public face."""

    def __init__(self, options: Options, planner: Planner, measurer: Measurer, outbox: Outbox, update_sample: Any) -> None:
        self.options = options
        self.inert = options.inert
        self.planner = planner
        self.complaints = measurer.complaints
        self.outbox = outbox
        self.summary = Summary()
        self.layers = Layers(None)
        self.detectors: list[SpikeDetector] = []
        self.gradients = GradientCapture(measurer)
        self.parameters = ParameterCapture(measurer, update_sample)
        self.activations = ActivationCapture(measurer)
        self.attachment: Attachment | None = None
        self.scaler: torch.amp.GradScaler | None = None
        self.step: int | None = None
        self.next_step = 0
        self.by_hand = False
        self.open = False
        self.monitored = False
        self.last: StepRecord | None = None
        self.records: OrderedDict[int, StepRecord] = OrderedDict()
        self.absent: dict[tuple[str, str], str] = {}
        self.plans: dict[str, SourcePlan] = {}
        self._buffer: StepBuffer | None = None
        self._early: list[tuple[Key, Any, Aggregation]] = []
        self._tags: dict[str, Any] = {}
        self._armed_for = -1
        self._owned: dict[int, list[int]] = {}
        self._unowned: list[int] = []
        self._attempted = self._refused = False
        self._done: set[int] = set()
        self._backwards = self._learned = 0
        self._fewest: int | None = None
        self._busy = False
        self._own_seconds = 0.0
        self._since = time.perf_counter()

    # --- the step ------------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> bool:
        """Open ``step``; a step still open ends first. Returns whether it is monitored."""
        if self.open:
            self.end()
        self.settle()
        self.outbox.publish()
        if self.step is not None and step <= self.step:
            self.complaints.add("back", f"step {step} comes after step {self.step}; a new segment begins in the run directory")
        self.step, self.next_step = step, step + 1
        self.open = True
        self._attempted = self._refused = False
        self._done, self._backwards = set(), 0
        self.absent = {}
        self.monitored = not self.inert and self.planner.module is not None and self.options.is_step_monitored(step)
        if self.monitored:
            self._prepare(step)
        elif self._armed_for >= 0:
            self._disarm()
        return self.monitored

    def _prepare(self, step: int) -> None:
        self.planner.refresh()
        assert self.planner.inventory is not None
        self.plans = self.planner.plans(step, self.summary)
        self._buffer = StepBuffer(step, self.complaints)
        self.gradients.begin(self._buffer, self.plans, self.planner.inventory.references)
        self.parameters.begin(self._buffer, self.plans, self.planner.inventory.references)
        self.activations.begin(self._buffer, self.planner.activation_metrics(step))
        for key, value, aggregation in self._early:
            self._buffer.merge_value(key, value, aggregation)
        self._early = []
        self._arm()

    def _arm(self) -> None:
        """Hang the hooks that monitored steps need, where they do not hang already."""
        module = self.planner.module
        if self._armed_for == self.planner.version or module is None or self.planner.inventory is None:
            return
        self._armed_for = self.planner.version
        self.activations.install(module, self.planner.inventory, self.planner.registry.of(n.ACTIVATION))
        if self.attachment is not None:
            optimizers = [optimizer for reference in self.attachment.optimizers if (optimizer := reference()) is not None]
            self._owned, self._unowned = self.planner.positions(optimizers)
            references = self.planner.inventory.references
            self.attachment.arm(
                [parameter for reference in references if (parameter := reference()) is not None],
                [
                    (parameter, Hook(self.gradient_came, position), Hook(self.gradient_accumulated, position))
                    for position in self.planner.local_positions()
                    if (parameter := references[position]()) is not None
                ],
            )

    def _disarm(self) -> None:
        self._armed_for = -1
        self.activations.remove()
        if self.attachment is not None:
            self.attachment.disarm()

    def end(self) -> None:
        """Close the open step. On CPU its record is made at once, elsewhere when somebody asks or the next step begins."""
        if not self.open:
            return
        self.open = False
        if not self.monitored:
            self.last = None
            self.summary.not_applied += self._refused
        for capture in (self.gradients, self.parameters, self.activations):
            capture.end()
        if self._backwards:
            self._learned += 1
            self._fewest = min(self._backwards, self._fewest or self._backwards)
        module = self.planner.module
        first = None if module is None else next(module.parameters(), None)
        if first is None or first.device.type == "cpu":
            self.settle()
        if (
            self.attachment is not None
            and not self.by_hand
            and self._armed_for < 0
            and self.options.is_step_monitored(self.next_step)
        ):
            self._arm()  # the first thing seen of the next step may be its backward pass

    def settle(self) -> None:
        """Make the record of the step that has ended, if it was not made yet. Synchronises the device."""
        buffer, self._buffer = (None, self._buffer) if self.open else (self._buffer, None)
        if buffer is None:
            return
        tables, custom, flags = buffer.flush()
        self.absent = buffer.absent
        inventory = self.planner.inventory
        assert inventory is not None
        activations = self.activations.evaluate(tables[n.ACTIVATION]) if n.ACTIVATION in tables else {}
        facts = Facts(
            buffer.step,
            applied=not self._refused and not flags.get("found_inf", False),
            edited=flags.get("edited"),
            trainable=inventory.trainable,
            matrices=inventory.matrices,
            groups=self._groups(),
            context=self._context(),
        )
        custom.update(self._cost())
        record = assemble(facts, tables, custom, self.plans, activations, self.summary, self.layers, self.detectors, self.absent)
        self._keep(record)
        self._tell(record)

    def _keep(self, record: StepRecord, amend: bool = False) -> None:
        self.last = record
        self.records[record.step] = replace(record, tables={})
        while len(self.records) > self.options.history:
            self.records.popitem(last=False)
        self.outbox.put(record, self.options.show(record.values), amend)

    def _tell(self, record: StepRecord) -> None:
        for event in record.events:
            words = describe(event, record)
            if callable(self.options.on_spike):
                try:
                    self.options.on_spike(event)
                except Exception as error:
                    self.complaints.add("on_spike", "the function on_spike failed; training goes on", error)
            elif self.options.on_spike == "raise":
                raise SpikeError(words)
            elif self.options.on_spike == "warn":
                warnings.warn(f"torch_gradmon: {words}", GradmonWarning, stacklevel=2)

    def _cost(self) -> dict[Key, float]:
        now = time.perf_counter()
        share = 100 * self._own_seconds / max(now - self._since, 1e-9)
        self._own_seconds, self._since = 0.0, now
        return {Key(n.SUMMARY, "", "overhead_pct"): share} if "overhead_pct" in self.summary.keys else {}

    def _context(self) -> dict[str, Any]:
        context: dict[str, Any] = {}
        if self.attachment is not None:
            optimizers = [optimizer for reference in self.attachment.optimizers if (optimizer := reference()) is not None]
            context["lr"] = [to_float(group["lr"], "lr") for o in optimizers for group in o.param_groups if "lr" in group]
        if (scale := scale_of(self.scaler)) is not None:
            context["amp_scale"] = to_float(scale, "amp_scale")
        if self._tags:
            context["tags"], self._tags = self._tags, {}
        return context

    def _groups(self) -> list[tuple[str, frozenset[str]]]:
        if self.attachment is None or self.planner.inventory is None or self.layers.choice != "blocks":
            return []
        names = self.planner.inventory.names
        groups: list[tuple[str, frozenset[str]]] = []
        for reference in self.attachment.optimizers:
            optimizer = reference()
            for group in [] if optimizer is None else optimizer.param_groups:
                members = frozenset(names[position] for position in self.planner.inventory.positions(group["params"]))
                groups.append((f"group_{len(groups)}", members))
        return groups

    # --- values by hand ------------------------------------------------------------------------------------------------------

    def log(self, key: Key, value: Any, aggregation: Aggregation) -> None:
        """A value for the step in flight or, between its end and the next forward, for the step that just ended."""
        if self.inert:
            return
        if self.open:
            if self._buffer is not None:
                self._buffer.merge_value(key, value, aggregation)
        elif self._buffer is not None:
            self._buffer.merge_value(key, value, aggregation)
        elif self.last is not None and self.last.step == self.step:
            added = to_float(value, "/".join(part for part in key if part))
            self._keep(replace(self.last, values={**self.last.values, key: added}), amend=True)
        elif self.step is None:
            self._early.append((key, value, aggregation))

    def tag(self, tags: Mapping[str, Any]) -> None:
        """Facts about the step in flight for the run directory."""
        self._tags.update(tags)

    # --- what hooks tell -----------------------------------------------------------------------------------------------------

    @property
    def _follows(self) -> bool:
        """Whether steps open and close by what the hooks see."""
        return not self.by_hand and not self.activations.paused

    @guarded
    def forward_began(self) -> None:
        """A training forward: the next step begins with it, unless one is open."""
        if self._follows:
            if self.open and self._attempted:
                self.end()
            if not self.open:
                self.begin(self.next_step)

    @guarded
    def backward_ended(self) -> None:
        """Measure gradients before clipping, since this may have been the last backward pass of the step."""
        if self.activations.paused:
            return
        if not self.open and self._follows:
            self.begin(self.next_step)
        self._backwards += 1
        if self._buffer is None or (self._learned >= _LEARNING and self._fewest is not None and self._backwards < self._fewest):
            return
        assert self.attachment is not None
        by_scale: dict[bool, list[int]] = {}
        scales: dict[bool, torch.Tensor | None] = {}
        for optimizer, positions in self._shares():
            if optimizer is None or id(optimizer) not in self._done:
                scale = self.attachment.inverse_scale(optimizer)
                by_scale.setdefault(scale is None, []).extend(positions)
                scales[scale is None] = scale
        for is_plain, positions in by_scale.items():
            self.gradients.before_clip(sorted(positions), scales[is_plain])

    def _shares(self) -> Iterable[tuple[Optimizer | None, list[int]]]:
        assert self.attachment is not None
        for reference in self.attachment.optimizers:
            optimizer = reference()
            if optimizer is not None:
                yield optimizer, self._owned.get(id(optimizer), [])
        yield None, self._unowned

    @guarded
    def gradient_came(self, position: int, gradient: torch.Tensor | None) -> None:
        """One backward pass brought a gradient for the parameter at ``position``."""
        if self.attachment is not None and not self.activations.paused:
            if not self.open and self._follows:
                self.begin(self.next_step)
            self.gradients.local(position, gradient, self.attachment.inverse_scale(None))

    @guarded
    def gradient_accumulated(self, position: int, parameter: torch.Tensor) -> None:
        """That gradient was accumulated."""
        self.gradients.commit_local(position)

    @guarded
    def step_began(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Measure parameters, and gradients unless the closure has yet to compute them."""
        if not self.open and self._follows:
            self.begin(self.next_step)
        if self._buffer is None or self.attachment is None:
            return
        positions = self._positions_at(optimizer)
        self.parameters.measure(positions)
        self.parameters.before_step(positions)
        if not has_closure:
            self.gradients.after_clip(positions, self.attachment.inverse_scale(optimizer))
            self._done.add(id(optimizer))

    def _positions_at(self, optimizer: Optimizer) -> list[int]:
        assert self.attachment is not None
        own = self._owned.get(id(optimizer), [])
        return sorted([*own, *self._unowned]) if self._is_last(optimizer) else own

    def _is_last(self, optimizer: Optimizer) -> bool:
        return self.attachment is not None and self.attachment.optimizers[-1]() is optimizer

    @guarded
    def closure_ended(self, optimizer: Optimizer) -> None:
        """The optimizer's gradients are there now. A closure that is called several times leaves its last ones."""
        if self.attachment is not None:
            self.gradients.after_clip(self._positions_at(optimizer), self.attachment.inverse_scale(optimizer))

    @guarded
    def step_ended(self, optimizer: Optimizer, found_inf: torch.Tensor | None) -> None:
        """Measure the update; the step ends with the last optimizer, under a scaler with its update."""
        self._done.add(id(optimizer))
        if self._buffer is not None and self.open:
            self.parameters.after_step(self._owned.get(id(optimizer), []), optimizer)
            if found_inf is not None:
                seen = self._buffer.flags.get("found_inf")
                flag = found_inf.clone() > 0
                self._buffer.flags["found_inf"] = flag if seen is None else flag | seen
        self._attempt_over(optimizer)

    @guarded
    def step_refused(self, optimizer: Optimizer) -> None:
        """The scaler found infinite gradients: they are measured all the same, and the step is labelled not applied."""
        if not self.open and self._follows:
            self.begin(self.next_step)
        self._refused = True
        self.gradients.after_clip(self._positions_at(optimizer), None)
        self._attempt_over(optimizer)

    def _attempt_over(self, optimizer: Optimizer) -> None:
        if self._is_last(optimizer):
            self._attempted = True
            if self._follows and not (self.attachment is not None and self.attachment.in_scaler_step):
                self.end()

    @guarded
    def scaler_updated(self) -> None:
        """The scaler ends the attempt."""
        if self.open and self._attempted and self._follows:
            self.end()

    @guarded
    def scaler_noticed(self, scaler: torch.amp.GradScaler) -> None:
        """Until now scaled gradients were taken for true ones: drop them."""
        self.scaler = scaler
        reason = "a GradScaler was noticed only in this step; pass scaler= to attach() or watch()"
        self.gradients.forget_before_clip(reason)
        self.complaints.add("scaler", f"{reason}, so that steps which it refuses are counted from the start")

    # --- by hand -------------------------------------------------------------------------------------------------------------

    @guarded
    def begin_step(self, step: int) -> bool:
        """From now on steps begin and end by hand."""
        self.by_hand = True
        return self.begin(step)

    @guarded
    def end_step(self) -> None:
        """End the step and send it out."""
        self.end()
        self.settle()
        self.outbox.publish()

    @guarded
    def measure_gradients(self, before_clip: bool, positions: list[int] | None = None) -> None:
        """Measure the gradients as they are now."""
        if self._buffer is None or not self.open or self.planner.inventory is None:
            return
        if positions is None:
            positions = list(range(len(self.planner.inventory.names)))
        scale = None if is_unscaled(self.scaler, None) else scale_of(self.scaler)
        inverse = None if scale is None else scale.double().reciprocal().float()
        (self.gradients.before_clip if before_clip else self.gradients.after_clip)(positions, inverse)

    def measure_before_clip(self, parameters: Iterable[torch.Tensor]) -> None:
        """Measure these parameters' gradients before they are clipped, where that was not done at the end of backward."""
        if self.planner.inventory is not None:
            positions = self.planner.inventory.positions(parameters)
            self.measure_gradients(True, [p for p in positions if not self.gradients.is_measured(p)])

    def measure_after_clip(self) -> None:
        """Measure the clipped gradients, where no optimizer's hook will."""
        if self.attachment is None:
            self.measure_gradients(False)

    @guarded
    def measure_parameters(self) -> None:
        """Measure the parameters as they are now."""
        if self._buffer is not None and self.open and self.planner.inventory is not None:
            self.parameters.measure(range(len(self.planner.inventory.names)))

    @guarded
    def capture_activation(self, name: str, activations: Any) -> None:
        """Measure a value that is no module's output."""
        self.activations.capture(name, activations)

    # --- values of the step that ended ---------------------------------------------------------------------------------------

    @property
    def is_monitoring(self) -> bool:
        """Whether a monitored step is open and not paused."""
        return self.open and self._buffer is not None and not self.activations.paused

    @guarded
    def settle_now(self) -> StepRecord | None:
        """The record of the step that ended last, None where it was not monitored."""
        self.settle()
        return self.last

    def shown(self) -> dict[str, float]:
        """Its values, by key."""
        record = self.settle_now()
        return {} if record is None else self.options.show(record.values)

    def missing(self) -> dict[Key, str]:
        """Why each key that was asked for has no value in it."""
        record = self.settle_now()
        if record is None or self.planner.inventory is None:
            return {}
        return missing(record, self.planner.registry.metrics, self.planner.matchable() or {}, self.summary.keys, self.absent)

    # --- resume --------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        self.settle_now()
        detectors = [detector.state_dict() for detector in self.detectors]
        return {"next_step": self.next_step, "summary": self.summary.state_dict(), "detectors": detectors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.next_step = int(state["next_step"])
        self.summary.load_state_dict(state["summary"])
        for detector, saved in zip(self.detectors, state["detectors"], strict=True):
            detector.load_state_dict(saved)

    # --- life cycle ----------------------------------------------------------------------------------------------------------

    def attach(self, module: nn.Module, optimizers: list[Optimizer], scaler: torch.amp.GradScaler | None) -> None:
        """Follow the loop by hooks from now on."""
        self.scaler = scaler
        self.attachment = Attachment(self, module, optimizers, scaler)
        self._armed_for = -1
        if self.options.is_step_monitored(self.next_step):
            self._arm()
        self._since = time.perf_counter()

    def detach(self) -> None:
        """End the step, send what waits, and take every hook away."""
        self.end()
        self.settle()
        self._disarm()
        if self.attachment is not None:
            self.attachment.remove()
            self.attachment = None
        self.outbox.close()
