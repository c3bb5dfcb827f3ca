"""Checks of one probed optimizer: what the loop does to its gradients, losses and scaler between two steps."""

from __future__ import annotations

import math
import os.path
import weakref
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..capture.loss_graph import (
    OUTPUT,
    inputs_of,
    is_made_by,
    is_move,
    losses_going_backward,
    mixes_classes,
    nodes_of,
    nodes_to,
    notes_of,
    operation_of,
    pairs_rows,
    reaches_input,
)
from ..capture.measurer import version_of
from ..step.model_index import FsdpParameterRef, ModelIndex, Place, parameters_of
from ..step.ranks import local_part
from .tallies import Tallies

if TYPE_CHECKING:
    from torch.autograd.graph import Node


#: The most elements of a gradient that is held between two observations, so that the memory is negligible.
LARGEST = 2**20


def is_plain(gradient: Tensor) -> bool:
    """Whether identity and version counter of a gradient are meaningful.

    They are not for DTensors, views of a DDP bucket, sparse gradients, whose sums are new tensors, and gradients with a graph.
    """
    return (
        type(gradient) is Tensor
        and not gradient.requires_grad
        and not gradient._is_view()
        and gradient.layout is torch.strided
        and gradient.numel() <= LARGEST
    )


@dataclass(slots=True)
class Interval:
    """What happened to a gradient since the last step of its optimizer."""

    after_step: bool = False  # whether the gradient is known since a step
    was_touched: bool = False  # the loop wrote to it before that step
    fired: int = 0  # the number of accumulations
    drops: int = 0  # of drops between two accumulations, with nothing else in between
    writes: int = 0  # of intervals between two accumulations with a write, and nothing else in between
    synced: int = 0  # of backward passes that exchanged gradients between ranks
    late: int = -1  # of writes to the previous step's gradient between that step and its drop; -1 if unknown
    dropped: Tensor | None = None  # that gradient, if there were any writes
    carried: bool = False  # all accumulations were added to the previous step's gradient, which the loop had not changed
    touched: bool = False  # the loop wrote to it between the last accumulation and the step
    doubtful: bool = False  # nothing follows from this interval
    is_paused: bool = False  # there were backward passes outside training

    def cleared(self, clears: bool) -> int:
        """The number of sums of gradients that were cleared. ``clears``: writes set them to zero."""
        return self.drops + (self.writes if clears else 0)


class Probe:
    """Observes one parameter's gradient. ``name``: of the parameter in findings; empty if they need none."""

    def __init__(self, name: str, place: Place, parameter: Tensor) -> None:
        self.name, self.place, self.identity, self.tensor = name, place, id(parameter), parameter._cdata
        self.is_sharded = type(place) is FsdpParameterRef
        self.gradient: Tensor | None = None  # at the last observation, held; None without one or if it is not plain
        self._last: Tensor | None = None  # of a sharded parameter, plain or not
        self.interval = Interval()
        self.has_fired = False
        self.version = self._value_version = self._clock = 0  # of the gradient, of the parameter, and of all steps, at that time

    @property
    def is_offloaded(self) -> bool:
        """Whether ``fully_shard`` copies gradients to the host during the backward pass, unless a hook follows their accumulation."""
        return isinstance(self.place, FsdpParameterRef) and self.place.is_offloaded

    def forget(self) -> None:
        self.interval = Interval()
        self.gradient = self._last = None

    def accumulated(self, parameter: Tensor, clock: int) -> None:
        """Observe the gradient after a backward pass added to it. ``clock`` counts the steps of all optimizers."""
        gradient, before, interval = parameter.grad, self.gradient, self.interval
        self.has_fired = True
        if self.is_sharded:
            if gradient is not self._last and interval.fired:
                interval.synced = 0  # the loop has dropped the sum; the next one starts from zero
            self._last = _held(gradient)
        interval.fired += 1
        if gradient is None or not is_plain(gradient):
            interval.doubtful = True
            self.gradient = None
            return
        if before is not None and not interval.doubtful:
            is_same = gradient is before  # what came was added to it
            writes = before._version - self.version - is_same  # others
            # a loop that moves the parameter or steps in between, as sharpness-aware minimisation does, clears it on purpose
            is_alone = clock == self._clock and parameter._version == self._value_version
            if interval.fired == 1 and interval.after_step:
                interval.carried = is_same and not writes
                if not is_same and not interval.was_touched:
                    interval.late, interval.dropped = writes, before if writes else None
            elif not is_same or writes:
                interval.carried = False
                interval.drops += is_alone and not is_same
                interval.writes += is_alone and is_same
        self.gradient, self.version = gradient, gradient._version
        self._clock, self._value_version = clock, parameter._version

    def was_written(self) -> bool:
        """Whether its parameter was written to since the last accumulation, according to its version."""
        parameter = self.place()
        return self.interval.fired > 0 and parameter is not None and parameter._version != self._value_version

    def settled(self) -> None:
        """Note the version after a backward pass: writes by DDP are not writes by the loop."""
        parameter = self.place()
        if self.gradient is not None and parameter is not None and parameter.grad is self.gradient:
            self.version = self.gradient._version

    def look(self, parameter: Tensor) -> Tensor | None:
        """The gradient before the optimizer's step. Notes whether it was written to since the last accumulation."""
        gradient = parameter.grad
        if gradient is not None and gradient is self.gradient and self.interval.fired and gradient._version != self.version:
            self.interval.touched = True
        return gradient

    def stepped(self, parameter: Tensor | None) -> None:
        """Begin an interval after a step, even a prevented one. ``parameter`` is None if the gradient cannot be followed."""
        gradient = None if parameter is None else parameter.grad
        if self.is_sharded:
            self._last = _held(gradient)
        if gradient is not None and (gradient is self.gradient or is_plain(gradient)):
            self.interval = Interval(True, self.interval.touched or self.interval.doubtful)
            self.gradient, self.version = gradient, gradient._version
        else:
            self.interval, self.gradient = Interval(), None


def _held(gradient: Tensor | None) -> Tensor | None:
    return gradient if gradient is not None and gradient.numel() <= LARGEST and not gradient.requires_grad else None


#: The number of norms that are compared, and the largest number that is read.
_COMPARED, _MOST = 3, 9
#: The tolerance for equal norms: a clip is exact up to rounding and torch's 1e-6 in the denominator.
_SAME = 1e-2


def _norm_and_largest(optimizer: Optimizer) -> tuple[float, float]:
    found = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
    # of any size, unlike probes
    gradients = [g for g in found if type(g) is Tensor and g.layout is torch.strided and not g.requires_grad]
    if not gradients or not any(map(is_plain, gradients)):
        return math.nan, math.nan
    norms = [torch.linalg.vector_norm(g) for g in gradients]
    largest = [torch.linalg.vector_norm(g, math.inf) for g in gradients if g.numel()]
    return float(torch.stack([x.to(norms[0].device, torch.float64) for x in norms]).norm()), max(map(float, largest))


#: The number of times that its values are read.
_LOOKS = 3
#: The number of times that its values have to be zero to be proof of clearing: a gradient may be zero by itself.
_DOUBTS = 9
#: The most elements whose factor shows whether a write multiplies, and its deviation in units of the precision of the gradient, and at
#: least.
_ELEMENTS, _UNITS, _EXACT = 1 << 14, 4, 1e-3


class GradientWrites:
    def __init__(self) -> None:
        self.is_unclear = self._is_settled = False  # there are some between accumulations, whose kind is not known yet, or known
        self.clears = False  # those writes set gradients to zero
        self.clips = False  # they do neither that nor keep the mean of k micro-batches, by the factor (k - 1) / k before each
        self.is_doubtful = self.stays = False  # gradients seem to be carried over between steps; their values have confirmed it
        self._zeros = self._others = self._late = self._doubts = 0
        self._accumulated: Tensor | None = None  # the first elements after the last accumulation
        self._are_means = True  # so far

    @property
    def needs_values(self) -> bool:
        return self.is_unclear or self.is_doubtful

    def begin(self) -> bool:
        """Record a write. Returns whether the values must be read from now on."""
        begins = not (self.is_unclear or self._is_settled)
        self.is_unclear |= begins
        return begins

    def keep(self, probe: Probe) -> None:
        self._accumulated = None if probe.gradient is None else probe.gradient.flatten()[:_ELEMENTS].clone()

    def read_written(self, probe: Probe, parameter: Tensor, incoming: Tensor | None) -> None:
        """Read the gradient just before another one is added to it. Synchronises only if the loop has written to it."""
        gradient = parameter.grad
        if not self.is_unclear or not probe.interval.fired or gradient is None or gradient is not probe.gradient:
            return
        # where all is zero anyway, nothing follows from it
        if gradient._version == probe.version or incoming is None or not bool(incoming.any()):
            return
        if bool(gradient.any()):
            self._others += 1
            count = probe.interval.fired
            exact = max(_EXACT, _UNITS * torch.finfo(gradient.dtype).eps)
            self._are_means &= abs(_factor(self._accumulated, gradient, exact) * (count + 1) / count - 1) < exact
        else:
            self._zeros += 1
        if self._others + self._zeros >= _LOOKS:
            self.is_unclear, self._is_settled = False, True
            self.clears = self._zeros > self._others
            self.clips = not (self.clears or self._are_means)

    def read_carried(self, probe: Probe, parameter: Tensor, incoming: Tensor | None) -> None:
        """Read a gradient that seems to be carried over: ``.data.zero_()`` does not change its version. Synchronises."""
        gradient, interval = parameter.grad, probe.interval
        if not self.is_doubtful or interval.fired or not interval.after_step:
            return
        if gradient is None or gradient is not probe.gradient or gradient._version != probe.version or incoming is None:
            return
        self._doubts += 1
        self.stays = bool(gradient.any())
        self.is_doubtful = not self.stays and self._doubts < _DOUBTS

    def suspect_carried(self) -> None:
        """Record that a gradient's version indicates carrying over, so that its values must be read from now on."""
        self.is_doubtful |= not (self.stays or self._doubts)

    def is_late_clip(self, dropped: Tensor) -> bool:
        """Whether a gradient that was written to after its step, then dropped, is not zero. Synchronises a few times."""
        if self._late < _LOOKS:
            self._late = self._late + 1 if bool(dropped.any()) else 0
        return self._late > 0


def _factor(before: Tensor | None, after: Tensor, exact: float) -> float:
    """By what a gradient was multiplied, all elements alike; NaN if it was not. Synchronises."""
    if before is None:
        return math.nan
    now = after.detach().flatten()[:_ELEMENTS].double()
    old = before.double()
    factor = (now * old).sum() / old.square().sum()
    return factor.item() if bool((now - factor * old).norm() < exact * now.norm()) else math.nan


#: Steps before losses are looked at, in a row where they have more accumulations than forwards; the number of backward passes in which
#: these are, and how many have to be from an old loss.
_STEPS, _LOSSES, _OLD_LOSSES = 5, 8, 3
#: The most nodes of a loss that are visited.
_NODES = 32
#: Operations whose outputs lie between 0 and 1, and those that take logits.
_SQUASHES = frozenset(("Sigmoid", "Softmax", "Hardsigmoid"))
_TAKE_LOGITS = frozenset(("LogSoftmax", "LogSigmoid", "Logsumexp", "BinaryCrossEntropyWithLogits"))
#: Operations that take logarithms of probabilities, and those that give them.
_TAKE_LOGARITHMS = frozenset(("NllLoss", "NllLoss2D", "NllLossNd"))
_GIVE_LOGARITHMS = frozenset(("Log", "Log1P", "LogSigmoid", "LogSoftmax", "Logaddexp", "Sub"))
#: Operations that add losses, that make another multiple of one, and that make one number of many.
_SUMS = frozenset(("Add", "Sub"))
_MULTIPLES = frozenset(("Div", "Mul", "Neg", "Squeeze", "ToCopy", "View"))
_REDUCTIONS = frozenset(("Mean", "Sum"))


class LossChecks:
    """Looks at the losses of a few backward passes of one optimizer.

    A loss that goes backward again is recognised by a mark at its nodes: equal gradients would prove nothing, those of an absolute error
    are equal for many targets. ``is_alone``: no other optimizer is attached, of whose losses the forwards may be.
    """

    def __init__(self, tallies: Tallies, key: int, is_alone: bool) -> None:
        self.is_looking = False  # at the losses of the next backward passes
        self.is_idle = False  # there are none to look at, and none went backward again and again
        self._tallies, self._key, self._is_alone = tallies, key, is_alone
        self._steps = self._counting = self._looks = self._same = 0
        self._mark, self._visited = f"torch_gradmon loss {id(self)}", f"torch_gradmon step {id(self)}"

    def step_began(self, forwards: int, fired: int, name: str) -> None:
        """Count the forwards and the accumulations since the last step; there were some of the latter. ``name``: of the probe."""
        self._steps += 1
        self._counting = self._counting + 1 if self._is_alone and forwards < fired else 0
        if self._counting == _STEPS:
            self._looks = 0  # whatever earlier passes were
        is_certain = self._is_alone and self._same >= _OLD_LOSSES
        self._tallies.check("backward-twice", is_certain, self._key, name)
        self.is_looking = self._steps >= _STEPS and self._looks < _LOSSES and not is_certain
        self.is_idle = self._looks >= _LOSSES and not is_certain

    def accumulated(self, interval: Interval, parameters: Container[int]) -> None:
        """Look at the loss of the running backward pass. Synchronises only for one that gets what it cannot take. ``parameters``: the
        optimizer's, by id; what another network made may have a loss of its own.
        """
        self._looks += 1
        self.is_looking = self._looks < _LOSSES and self._same < _OLD_LOSSES
        losses = losses_going_backward()
        terms = [node for loss in losses for node in _terms(loss)]
        nodes = nodes_to(losses, parameters)
        # a loop that clears the gradient in between may well look at it and begin again
        is_again = any(self._mark in notes_of(node) for node in terms) and not (interval.drops or interval.writes)
        # autocast casts a parameter once for all calls within it
        made = [node for node in nodes if not is_move(node) or _inputs(node)]
        is_old = any(notes_of(node).get(self._visited, self._steps) < self._steps for node in made)
        self._same += is_again or is_old
        for node in terms:
            notes_of(node)[self._mark] = True
        for node in nodes:
            notes_of(node)[self._visited] = self._steps
        if losses:
            is_squashed = any(is_made_by(each, _SQUASHES) for each in _taken_by(_TAKE_LOGITS, losses))
            self._tallies.check("softmax-before-loss", is_squashed, self._key)
            is_raw = not all(is_made_by(each, _GIVE_LOGARITHMS) for each in _taken_by(_TAKE_LOGARITHMS, losses))
            is_raw |= any(is_made_by(each, _SQUASHES) for each in _divergences(losses))
            is_below = is_raw and any(bool(loss < 0) for loss in losses)
            self._tallies.check("log-softmax-missing", is_below, self._key)
            self._tallies.check("rows-paired", pairs_rows(losses), self._key)
            self._tallies.check("classes-mixed", mixes_classes(losses), self._key)


def _taken_by(operations: Container[str], losses: Sequence[Tensor]) -> Iterator[Node | None]:
    return (node.next_functions[0][0] for node in nodes_of(losses, OUTPUT) if operation_of(node) in operations)


def _divergences(losses: Sequence[Tensor]) -> Iterator[Node]:
    """What kl_div takes for logarithms: it sums their products with the targets, subtracted from a constant."""
    for total in (node for node in nodes_of(losses, OUTPUT) if operation_of(node) == "Sum"):
        for node in inputs_of(total):
            product = inputs_of(node)[:1] if operation_of(node) == "Sub" and node.next_functions[0][0] is None else []
            if product and operation_of(product[0]) == "Mul":
                yield from inputs_of(product[0])[:1]


def _terms(loss: Tensor) -> list[Node]:
    """The node of a loss and those that it is a multiple, a mean or a sum of. Terms with factors may add up to what is meant: left out."""
    found: list[Node] = []
    node, is_number = loss.grad_fn, True
    while node is not None and len(found) < _NODES:
        found.append(node)
        inputs, operation = _inputs(node), operation_of(node)
        is_passed = is_number and len(inputs) == 1 and operation in _MULTIPLES | _REDUCTIONS
        node = inputs[0] if is_passed else None
        is_number &= operation not in _REDUCTIONS  # factors of its elements may differ
    waiting = found[:1]
    while waiting and len(found) < _NODES:
        node = waiting.pop()
        if operation_of(node) in _SUMS:
            terms = [each for each in _inputs(node) if each not in found]
            found, waiting = [*found, *terms], [*waiting, *terms]
    return found


def _inputs(node: Node) -> list[Node]:
    """Those with a gradient, without parameters."""
    return [each for each in inputs_of(node) if each.next_functions]


#: The parameters have to change between this many backward passes in a row, beyond the usual number between two steps. Methods that
#: move the parameters within a step do so less often.
_PASSES = 5
#: The approximate number of elements of each parameter that are compared.
_SAMPLED = 4096
#: The number of gradients cleared without a step that rules out a mere inspection before training.
_CLEARED = 30
#: The number of backward passes after which a few cleared sums are proof, too.
_MANY, _TWICE = 100, 2
#: The number of backward passes into one sum of gradients that would be an implausibly large batch.
_SUMMED = 500


class UnattachedUpdates:
    """Counts backward passes since the optimizer's last step, and how often its parameters changed before one."""

    def __init__(self) -> None:
        self.places: Sequence[Place] = ()  # parameters of the optimizer, which are compared
        self.passes = self._moves = self._looks = 0
        self._most = 1  # passes between two steps so far
        self._is_certain = False
        self._samples: list[_Sample] = []

    def backward_ended(self) -> bool:
        """Count a backward pass. Returns whether the parameters have changed before too many of them for a coincidence.

        No parameter is read during the usual number of passes between two steps, which in most loops is all of them: this saves a
        copy of the smaller parameters in every step. Synchronises an accelerator once soon after that, then less and less often.
        """
        self.passes += 1
        beyond = self.passes - self._most
        if beyond <= 1:
            if beyond == 1:
                self._samples = [_Sample(place) for place in self.places]
            return False
        if self._is_certain:
            return True
        moved = [sample.has_moved() for sample in self._samples]
        self._moves += any(moved)
        # version counters miss fused optimizers of an accelerator and writes to .data
        is_due = not self._moves and beyond == _PASSES * 3**self._looks
        self._looks += is_due
        if is_due or self._moves >= _PASSES - 1:
            self._is_certain = any(sample.has_changed() for sample in self._samples)
            self._moves = max(self._moves, beyond) if self._is_certain else 0
        return self._is_certain

    def has_changed(self, in_step: bool) -> bool:
        """Whether a change of the parameters since then is known; ``in_step``: compare them now, too, which synchronises."""
        return self._moves > 0 or (in_step and any(sample.has_changed() for sample in self._samples))

    def step_ended(self) -> None:
        """Start again after a step of the optimizer, or of another attached one with the same parameters."""
        self._most = max(self._most, self.passes)
        self.passes = self._moves = self._looks = 0
        self._is_certain, self._samples = False, []


class _Sample:
    """Some elements of one parameter, and the number of writes to it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._first = self._last = self._now()
        self._version = self._written()

    def _written(self) -> int:
        parameter = self._place()
        return -1 if parameter is None else version_of(parameter)

    def _now(self) -> Tensor | None:
        if (parameter := self._place()) is None:
            return None
        part = local_part(parameter).detach()
        while part.numel() > _SAMPLED and part.dim():
            part = part[: _SAMPLED * len(part) // part.numel()] if part.numel() < _SAMPLED * len(part) else part[0]
        return part.clone()

    def has_moved(self) -> bool:
        """Whether it has changed since the last call; on accelerators, whether it was written to."""
        version, before = self._version, self._last
        self._version = self._written()
        if before is None or before.device.type != "cpu":
            return self._version != version
        self._last = self._now()
        return _differ(self._last, before)

    def has_changed(self) -> bool:
        return _differ(self._now(), self._first)


def _differ(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.shape == other.shape and not torch.equal(one, other)


class UnusedGradients:
    """Detects a loop that runs backward passes without a step while the parameter does not change."""

    def __init__(self) -> None:
        self._value: Tensor | None = None
        self._is_other = False
        self._next = 0

    def are_certain(self, parameter: Tensor, probe: Probe, clears: bool) -> bool:
        """Whether the loop still has no step after too many backward passes for a coincidence.

        ``clears``: in-place writes to gradients set them to zero. Synchronises after the 30th, 100th, 300th pass and so on.
        """
        fired, cleared = probe.interval.fired, probe.interval.cleared(clears)
        enough = cleared >= _CLEARED or fired >= _SUMMED or (cleared >= _TWICE and fired >= _MANY)
        if self._is_other or (not enough and cleared < _CLEARED // 3 and fired < _MANY // 2):
            return False
        if self._value is None:
            self._value = parameter.detach().clone()
        elif enough and fired >= self._next:
            self._next = 3 * fired
            # something other than the watched optimizers moves it, so the loop does train
            self._is_other = self._value.shape != parameter.shape or not torch.equal(self._value, parameter.detach())
        return enough and not self._is_other


# --- One optimizer under the audit: which of its parameters is the probe, and what is judged with it ---


#: The number of consecutive steps without a gradient, or backward passes without the probe, after which it is replaced.
PATIENCE = 3
#: The number of parameters of an optimizer without steps that are compared, and the largest size of one.
_PLACES, _LARGEST = 4, 2**20
#: Steps of torch's own optimizers that no backward pass preceded, before they count: they change nothing for certain, but a loop may
#: pretrain another part of the model, or wait for data. Where there was a forward, one counts as several.
_FUTILE, _WITH_FORWARD = 100, 10
#: Such steps, from the first one on, of a model that is never called: it is another one that trains.
_ELSEWHERE = 10
#: The number of writes of one or two clips by norm or value; more writes have another cause.
_CLIPS = 4


class ProbedOptimizer:
    """The audit's state of one optimizer, and the findings about each of its steps, from what its probe has observed. ``is_alone``: no
    other one is attached, so that no parameter has to show which one a finding is about.
    """

    def __init__(self, optimizer: Optimizer, tallies: Tallies, is_alone: bool) -> None:
        self._optimizer, self._tallies, self._is_alone = weakref.ref(optimizer), tallies, is_alone
        self.key = id(optimizer)  # in the tallies
        self.owned: frozenset[int] = frozenset()  # the ids of its parameters
        self.probe: Probe | None = None
        self.writes, self.losses = GradientWrites(), LossChecks(tallies, self.key, is_alone)
        self.unattached = UnattachedUpdates()
        self.stepped_in = -1  # the backward pass within which it has stepped last
        self.has_stepped = False  # or a scaler has kept it from that
        self._is_of_torch = type(optimizer).__module__.startswith("torch.optim.")
        # before all else, and leaves the gradients as they are
        self.calls_closure_once = self._is_of_torch and not isinstance(optimizer, torch.optim.LBFGS)
        self.is_unknown = False  # it steps outside training, or calls a closure as it likes
        self.is_late = False  # its step calls a closure first, as those of Lightning do, and is judged when it has ended
        self._absent = self.silent = 0  # steps without a gradient, and backward passes without the probe
        self._had_gradients = False
        self._before: Tensor | None = None  # the gradient of the last step
        self._is_repeated = False  # the last step had the gradient of the one before
        self._futile = 0  # steps in a row without any gradient, though the model was called
        self._with = 0  # steps with gradients, once there were some without
        self._is_elsewhere = True  # there was no gradient and no call of the model so far
        self._attacks = False  # passes that are cleared are for the gradient of an input
        self._norms: list[tuple[float, float]] = []  # of scaled gradients, after the loop has written to them
        self._looks, self._is_clip = 0, False
        self.end_attempt()

    def choose_probe(self, inventory: ModelIndex | None, with_gradient: bool = False) -> None:
        """Probe the smallest of its parameters; ``with_gradient``: the smallest that has a gradient now."""
        optimizer = self._optimizer()
        self._absent, self.probe, self.silent = 0, None, 0
        if optimizer is None or inventory is None:
            return
        self.owned = frozenset(map(id, parameters_of(optimizer)))
        found = [
            each
            for each in inventory.there()
            if id(each[1]) in self.owned and each[1].requires_grad and (each[1].grad is not None or not with_gradient)
        ]
        if found:
            name, parameter, place = chosen = min(found, key=lambda each: each[1].numel())
            others = [each[2] for each in found if each is not chosen and each[1].numel() <= _LARGEST]
            self.unattached.places = [place, *others[:: max(1, len(others) // (_PLACES - 1))][: _PLACES - 1]]
            self.probe = Probe("" if self._is_alone else name, place, parameter)

    def rests(self) -> bool:
        """Whether it has never stepped, though its parameters get gradients."""
        probe = self.probe
        has_gradient = probe is not None and (probe.has_fired or ((p := probe.place()) is not None and p.grad is not None))
        return has_gradient and not self.has_stepped

    def names(self, inventory: ModelIndex) -> tuple[str, ...]:
        """Its parameters; the module that has them all, if they have one that is not the whole model."""
        found = [name for name, parameter, _ in inventory.there() if id(parameter) in self.owned]
        common = ".".join(os.path.commonprefix([name.split(".")[:-1] for name in found]))  # noqa: RUF071 (of lists of parts)
        return (common,) if common else tuple(found)

    def is_stale(self, in_step: bool) -> bool:
        """Whether the parameters have changed since its last step; ``in_step``: this may synchronise."""
        if self.probe is None or not self.unattached.passes:
            return False
        return (in_step and self.probe.was_written()) or self.unattached.has_changed(in_step)

    def step_began(self, optimizer: Optimizer, forwards: int, is_unknown: bool) -> bool:
        """Judge the step, after ``forwards`` of the training since the last step of any optimizer; ``is_unknown``: gradients show nothing.
        Returns whether the probe has to be replaced.
        """
        self.is_unknown, probe = is_unknown, self.probe
        if probe is None or is_unknown:
            return False
        parameter = probe.place()
        if parameter is None or id(parameter) != probe.identity:  # it was replaced
            return True
        if getattr(optimizer, "grad_scale", None) is not None:  # a fused one, that unscales as it steps
            self.unscaling(optimizer)
        gradient = probe.look(parameter)
        if gradient is not None:
            self._absent, self._had_gradients = 0, True
            self._step_with_gradient(probe, gradient, forwards)
            return False
        if not self._step_without_gradient(probe, optimizer, forwards):
            return False
        self._absent += 1
        return self._absent >= PATIENCE or not self._had_gradients

    def accumulated(self, probe: Probe) -> None:
        """Judge what the running backward pass shows, after the probe has seen its accumulation."""
        interval, tallies, key = probe.interval, self._tallies, self.key
        if self.losses.is_looking:
            self.losses.accumulated(interval, self.owned)
        if (interval.drops or interval.writes) and not self._attacks and tallies.of("micro-batch-discarded", key).is_suspected:
            # passes may be cleared by mistake: look for inputs with a gradient
            self._attacks = reaches_input(losses_going_backward())
        if interval.late >= 0 and interval.fired == 1 and (interval.late or not tallies.is_empty):
            dropped = interval.dropped  # written to between its step and its drop
            is_clip = dropped is not None and interval.late <= _CLIPS and self.writes.is_late_clip(dropped)
            tallies.check("clip-after-step", is_clip, key, probe.name)
        self._is_mixed |= self._is_unscaled and self.is_scaled

    def _step_with_gradient(self, probe: Probe, gradient: Tensor, forwards: int) -> None:
        tallies, key, seen = self._tallies, self.key, probe.interval
        self._is_called()
        self._futile = 0
        if not tallies.is_empty and (count := tallies.of("step-without-gradients", key).count):
            self._with += 1
            if self._with > count:  # the steps before pretrained another part, or waited for data
                tallies.retract("step-without-gradients", key)
        if seen.fired and (seen.fired != forwards or not self.losses.is_idle):
            self.losses.step_began(forwards, seen.fired, probe.name)
        if tallies.is_empty and seen.fired and not (seen.carried or seen.drops or seen.writes or seen.synced > 1):
            self._is_repeated = False  # the usual case: no finding so far, and none now
            return
        tallies.missed("step-without-gradients", key)
        if seen.synced > 1 and not seen.drops:
            tallies.check("sync-every-micro-batch", True, key, probe.name, {"backward passes": seen.synced})
        if seen.fired:
            tallies.missed("dead-hooks", key)
        elif not seen.is_paused and (parameter := probe.place()) is not None and parameter._cdata != probe.tensor:
            tallies.check("dead-hooks", True, key, probe.name)  # another tensor was put into it, whose hooks never fire
        if seen.doubtful or gradient is not probe.gradient:
            return
        if seen.fired:
            self._check_accumulations(probe.name, seen)
        elif seen.after_step and gradient._version == probe.version and not forwards:
            # writes through .data change no version, so values have to confirm it
            is_same = self._before is None or torch.equal(self._before, gradient)
            tallies.check("stepped-twice", is_same, key, probe.name)
            self._is_repeated = True

    def _check_accumulations(self, name: str, seen: Interval) -> None:
        tallies, key, writes = self._tallies, self.key, self.writes
        if not self._is_repeated:
            tallies.missed("stepped-twice", key)
        self._is_repeated = False
        # the last count takes a confirmation by values
        tally = tallies.of("missing-zero-grad", key)
        is_so = seen.carried and (writes.stays or tally.count < tally.repeats - 1)
        tallies.check("missing-zero-grad", is_so, key, name)
        cleared = seen.cleared(writes.clears)
        # a single drop in each step may be deliberate, to inspect a gradient
        tallies.check("micro-batch-discarded", cleared >= 2 and not self._attacks, key, name, {"discarded": cleared})
        if seen.writes and writes.clips:
            tallies.check("clip-per-micro-batch", True, key, name, {"times in a step": seen.writes})

    def _step_without_gradient(self, probe: Probe, optimizer: Optimizer, forwards: int) -> bool:
        """Judge a probe without a gradient. Returns whether other parameters have one: it may be the turn of another optimizer."""
        if any(parameter.grad is not None for parameter in parameters_of(optimizer)):
            self._is_called()
            self._futile = 0
            return True
        if forwards or probe.has_fired or self.is_late:  # a closure may call parts of the model, or wait for data
            self._is_called()
        if self._is_alone and self._is_of_torch:
            self._futile += _WITH_FORWARD if forwards else 1
            if self._is_elsewhere and self._futile == _ELSEWHERE:
                self._tallies.seen("another-model-trained", self.key, evidence={"steps": float(_ELSEWHERE)})
        if (probe.interval.fired or self._futile >= _FUTILE) and not probe.interval.doubtful:
            self._tallies.check("step-without-gradients", True, self.key, probe.name)
        return False

    def _is_called(self) -> None:
        """The model is part of the training after all."""
        if self._is_elsewhere:
            self._is_elsewhere = False
            self._tallies.retract("another-model-trained", self.key)

    def step_ended(self, has_stepped: bool) -> None:
        """Begin an interval after the step, or with ``has_stepped`` False after the scaler prevented it."""
        self.has_stepped = True
        if has_stepped:
            self.stepped_in = torch._C._current_graph_task_id()
        probe = self.probe
        if probe is not None and self._is_unscaled:
            is_mixed = self._is_mixed or (self._is_alone and self.is_scaled)
            self._tallies.check("backward-after-unscale", is_mixed, self.key, probe.name)
        self.end_attempt()
        if probe is not None:
            probe.stepped(None if self.is_unknown else probe.place())
            is_suspected = probe.gradient is not None and self._tallies.of("stepped-twice", self.key).is_suspected
            self._before = probe.gradient.clone() if is_suspected and probe.gradient is not None else None
        self.is_unknown = False

    # --- its GradScaler ------------------------------------------------------------------------------------------------------

    def end_attempt(self) -> None:
        self._is_unscaled = False  # the scaler has unscaled the gradients in this attempt
        self.is_scaled = self._is_mixed = False  # a loss was scaled since then, and its gradient was added to unscaled ones

    def unscaling(self, optimizer: Optimizer) -> None:
        """The optimizer's gradients are about to be divided by the scale: none may have been clipped before."""
        probe = self.probe
        parameter = None if probe is None else probe.place()
        if probe is None or parameter is None or probe.interval.doubtful or not probe.interval.fired:
            return
        if probe.look(parameter) is not probe.gradient:
            return
        touched = probe.interval.touched
        if not touched or self._was_clipped(optimizer):
            self._tallies.check("clipped-while-scaled", touched, self.key, probe.name)

    def unscaled(self) -> None:
        self._is_unscaled, self.is_scaled = True, False

    def _was_clipped(self, optimizer: Optimizer) -> bool:
        """Whether the loop's writes are known to be a clip. Synchronises the device a few times in total."""
        if self._is_clip or self._looks >= _MOST:
            return self._is_clip
        self._looks += 1
        found = _norm_and_largest(optimizer)
        if all(map(math.isfinite, found)):  # steps that overflow are no evidence
            self._norms = [*self._norms[1 - _COMPARED :], found]
        if len(self._norms) == _COMPARED:
            each_kind = list(zip(*self._norms, strict=True))
            self._is_clip = any(max(values) > 0 and min(values) > (1 - _SAME) * max(values) for values in each_kind)
        return self._is_clip
