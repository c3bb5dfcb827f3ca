"""The check of the data: looks at the first batches, and at what comes back to the model's output."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..capture.hooks import Handles, Hook, ModuleHook, takes_hooks, tensors_of
from ..capture.loss_graph import OUTPUT, losses_going_backward, nodes_of, notes_of, sources_of
from ..core.keys import SUMMARY, Key
from ..core.records import EXPECTATION, NON_FINITE_INPUT, StepRecord, loss_in
from ..core.torch_modes import outside_dispatch_modes, will_run
from ..statistics.fingerprint import fingerprints, packed, unpacked
from ..step.active_step import ActiveStep
from ..step.model_index import parameters_of
from .output_gradient import (
    Origin,
    Targets,
    Tokens,
    facts_of,
    is_linear,
    judge,
    origin_of,
    output_of,
    recognised,
    runs_over_batch,
    sample_of,
    shares_of,
    shares_of_next,
    tokens_of,
)
from .setup_check import MadeInForward, has_modes
from .tallies import Check, Tallies

if TYPE_CHECKING:
    from torch.autograd.graph import Node


#: Elements of a row that are compared, and rows that are kept.
_COMPARED, _KEPT = 64, 4096
#: The least share of rows in the training that the model has acted on, and the largest share of calls on rows that had one before.
_TRAINED, _REPEATED = 0.05, 0.1
#: The least share of rows that it has acted on just before their step, as it also does for a look at some of them.
_AT_ONCE = 0.5
#: The fewest rows of a training with acted ones.
_FEWEST = 8
#: The least share of steps, and their fewest number, in which another model trains through this one.
_THROUGH, _STEPS = 1 / 16, 4


class Acting:
    """Looks for rows that the model was called on without gradients, in training mode and for the first time, and that it trains on later.

    Such calls are of fewer rows than a batch: others prepare a step. A validation is on rows that are never trained on, or again and
    again. All is compared on the device, and nothing is synchronised.

    It also looks for an opponent: another model that trains through this one, between the steps of this one. If that is watched, too, it
    gets a note.
    """

    def __init__(self, note: Callable[..., None]) -> None:
        self._note = note
        self.is_so = False  # the data depend on the model, as far as is known
        self._batch = 0  # the most rows of a step
        self._kept: Tensor | None = None  # identities of rows that it was called on, [_KEPT]
        self._again: Tensor | None = None  # how many of the rows since the last step had a call before
        self._next = self._fresh = 0  # the place of the next row, and how many came since the last step
        self._sums = [0.0] * 5
        self._steps = self._through = 0
        self._opposed = 0  # how often what the model made went through its opponent
        self._passed = -1  # the last step in which another model was trained through this one

    @torch.inference_mode(False)
    @torch.no_grad()
    def called(self, args: Sequence[object], kwargs: dict[str, object]) -> None:
        data = _rows(batch_tensors(args, kwargs))
        if data is None or 2 * len(data) >= max(self._batch, 2) or (self._kept is not None and self._kept.device != data.device):
            return
        rows = _identities(data)
        if self._kept is None:
            self._kept = torch.full((_KEPT,), -1, dtype=torch.int64, device=rows.device)
        self._again = torch.isin(rows, self._kept).sum() + (0 if self._again is None else self._again)
        self._kept[(torch.arange(len(rows), device=rows.device) + self._next) % _KEPT] = rows
        self._next, self._fresh = (self._next + len(rows)) % _KEPT, self._fresh + len(rows)

    @torch.no_grad()
    def trained(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """A step of the training begins, with these inputs. Returns numbers of rows, int64 ``[5]``: in this step, of these acted on before
        the last one and since then, in calls since the last step, and of these called on before. None without any calls.
        """
        data = _rows(tensors)
        if data is None:
            return None
        self._batch, self._steps = max(self._batch, len(data)), self._steps + 1
        if self._kept is None or self._kept.device != data.device:
            return None
        rows = _identities(data)
        is_data = rows != 0  # rows of zeros are padding
        in_turn = self._kept.roll(-self._next)  # the oldest first
        at = max(_KEPT - self._fresh, 0)
        acted, at_once = ((torch.isin(rows, known) & is_data).sum() for known in (in_turn[:at], in_turn[at:]))
        counts = (len(rows), acted, at_once, self._fresh, 0 if self._again is None else self._again)
        self._again, self._fresh = None, 0
        return torch.stack([each if isinstance(each, Tensor) else torch.full_like(acted, each) for each in counts])

    def made(self, output: Tensor) -> None:
        if output.grad_fn is not None:
            notes_of(output.grad_fn)[OUTPUT] = weakref.ref(self)

    def passes_through(self, data: Tensor, step: int, root: nn.Module | None) -> bool:
        """Whether this input of ``step`` comes from another model than ``root``, which is trained through this one, and not only from other
        tensors with a gradient, as adversarial ones do.
        """
        nodes = list(nodes_of([data], OUTPUT))
        makers = [maker for node in nodes if (maker := notes_of(node).get(OUTPUT, _nobody)()) is not None and maker is not self]
        own = set() if root is None else set(map(id, root.parameters()))
        variables = [variable for node in nodes if isinstance(variable := getattr(node, "variable", None), nn.Parameter)]
        if not makers and own.issuperset(map(id, variables)):
            return False
        self._through, self._passed = self._through + (step != self._passed), step
        for maker in makers if self._has_opponent else ():
            maker._opposed += 1
            maker._judge()
        self._judge()
        return True

    @property
    def _has_opponent(self) -> bool:
        return self._through >= max(_STEPS, _THROUGH * self._steps) and self._steps >= _STEPS

    def add(self, numbers: Sequence[float]) -> None:
        self._sums = [one + other for one, other in zip(self._sums, numbers, strict=True)]
        self._judge()

    def _judge(self) -> None:
        trained, acted, at_once, called, again = self._sums
        is_so = acted >= max(_FEWEST, _TRAINED * trained) or acted + at_once >= max(_FEWEST, _AT_ONCE * trained)
        is_so &= again <= _REPEATED * called
        is_so |= self._has_opponent or self._opposed >= _STEPS
        if is_so != self.is_so:
            self.is_so = is_so
            self._note(acts=is_so)


def _rows(tensors: Sequence[Tensor]) -> Tensor | None:
    """The first input of floating point as ``[rows, elements]``; of images, a row is an image."""
    first = _first_float(tensors)
    if first is None or not first.numel():
        return None
    return first.detach().flatten(1) if first.ndim >= 4 else first.detach().reshape(-1, first.shape[-1])


def _first_float(tensors: Sequence[Tensor]) -> Tensor | None:
    return next((tensor for tensor in tensors if torch.is_floating_point(tensor) and tensor.ndim), None)


def _identities(rows: Tensor) -> Tensor:
    """One number for each of the first rows, int64 ``[rows]``."""
    bits = rows[:_KEPT, :_COMPARED].float().contiguous().view(torch.int32).long()
    odd = torch.arange(1, bits.shape[1] + 1, device=bits.device) * 2654435761 % 2**31 * 2 + 1  # Knuth's multiplier
    return (bits * odd).sum(1)  # whole numbers: the same in any order and shape


RULE = "players-agree"
#: Whether a pass trains the network that answers, on data without a graph, or the one that made them, through it.
ANSWERS, MAKES = "answers", "makes"
ROLES = (ANSWERS, MAKES)
#: Which network made the data, which one answers, and what is trained.
Role = tuple[tuple[int, int], str]

#: The least share of answers that a pass pushes one way, of those that it pushes at all.
_ALIKE = 0.95
#: The fewest steps in which both push clearly, and their least share of those in which both push at all.
_FEWEST_PUSHES, _CLEAR = 8, 0.75
#: The largest deviation of a gradient from the order of its answers, over the largest gradient: its rounding; of bfloat16 twice its eps.
_ROUNDING = 1e-3
#: Two losses have one goal if the two differ by at most this share of the way to it: labels of 0.9 and 1 do, by a fifth.
_SAME_GOAL = 0.25

#: Which network made a storage, as long as the user's tensors keep it: a detached output has no graph to note it in.
_makers: weakref.WeakKeyDictionary[torch.UntypedStorage, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


#: The modules whose calls monitors follow, as long as they have hooks: the two of a game may have a monitor each.
_networks: weakref.WeakSet[_Part] = weakref.WeakSet()


def role_of(called: nn.Module, tensors: Sequence[Tensor], answers: Tensor) -> Role | None:
    """What a pass from these ``answers`` trains, one or a map of them for each row that another network made; else None."""
    if not tensors or not answers.ndim or answers.shape[0] != tensors[0].shape[0] or (answers.ndim > 1 and answers.shape[1] != 1):
        return None
    maker = _makers.get(tensors[0].untyped_storage(), _nobody)()
    if maker is None or maker is called:
        return None
    return (id(maker), id(called)), MAKES if tensors[0].requires_grad else ANSWERS


def _nobody() -> None:
    """The network where none is known, such as the maker of what none has made."""


@torch.no_grad()
def push_of(answers: Tensor, gradient: Tensor) -> Tensor | None:
    """What :meth:`Players.add` takes of a pass: ``gradient`` came back, of a loss, to these ``answers``. Nothing is synchronised."""
    if type(gradient) is not Tensor or gradient.numel() != answers.numel():
        return None
    answers, order = answers.double().sort()
    pushes = gradient.detach().flatten().double()[order]
    steps, rounding = pushes.diff(), max(_ROUNDING, 2 * torch.finfo(gradient.dtype).eps) * pushes.abs().amax()
    disorder = torch.minimum((steps > rounding).sum(), (steps < -rounding).sum())
    centred = answers - answers.mean()
    slope = (centred * pushes).sum() / centred.square().sum()
    bent = (pushes - pushes.mean() - slope * centred).abs().amax() > rounding
    goal = torch.where((slope > 0) & ~bent, answers.mean() - pushes.mean() / slope, torch.nan)
    return torch.stack([(pushes > 0).sum().double(), (pushes < 0).sum().double(), disorder.double(), answers.mean(), goal])


def came_back(pushes: dict[Role, Tensor], role: Role, answers: Tensor, gradient: Tensor) -> None:
    """Keep the first pass: of a loss, not of a penalty, whose gradient has a graph."""
    if not torch.is_grad_enabled() and (push := push_of(answers, gradient)) is not None:
        pushes.setdefault(role, push)


class Players:
    """Judges, step by step, whether both push the same way.

    Of a game, the one that answers lowers what the other one raises, in every loss of it: of logits, hinges, distances, squares. What is
    pushed to a goal of each row, as a value is that a critic learns, is no game: its gradients do not follow the order of the answers.
    """

    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies
        self._both = self._clear = 0
        self._differ = False

    def add(self, answers: Sequence[float], makes: Sequence[float], step: int) -> None:
        """Count a step with a pass of each that pushes at all: a hinge that is met does not."""
        if not any(answers[:2]) or not any(makes[:2]):
            return
        self._both += 1
        # 1 for a pass that raises the answers, -1 for one that lowers them, and 0 if it does neither clearly
        ways = [(up >= _ALIKE * (up + down)) - (down >= _ALIKE * (up + down)) for down, up, *_ in (answers, makes)]
        if not all(ways) or answers[2]:
            return
        self._clear += 1
        # of two squares on the same side of the answers the goals tell; of other losses a goal is not known
        (at, goal), (other_at, other_goal) = answers[3:], makes[3:]
        differ = abs(goal - other_goal) > _SAME_GOAL * max(abs(goal - at), abs(other_goal - other_at))
        self._differ |= ways[0] != ways[1] or differ
        if self._differ:
            self._tallies.retract(RULE)
        elif self._clear >= max(_FEWEST_PUSHES, _CLEAR * self._both):
            self._tallies.seen(RULE, step=step, evidence={"steps": float(self._clear)})


# --- The backward passes whose gradients are in the sum that an optimizer uses ---


class _Calls:
    """Counts the calls of one module in one step, and the backward passes through its outputs.

    A sum ends where its gradients are dropped or written to, as a clear does; no value is read. One ends as well where the parameters
    move: by an optimizer that has used it, or by sharpness-aware minimisation.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.forwards, self.in_training = 0, False  # calls, and whether one was in training mode
        self._task = -1
        self._count = self._used = 0
        self._forwards_before = 0  # the last pass
        # a parameter, its version, its gradient's id and version
        self._sum: tuple[weakref.ref[Tensor], int, int, int] | None = None

    @property
    def micro_batches(self) -> int:
        return max(self._used, self._count, 1)

    def accumulates(self) -> bool:
        """Within a pass: whether it adds to gradients of the module, and does not only return some or stop at an input."""
        module = self._module()
        return module is not None and any(_is_reached(parameter) for parameter in module.parameters() if parameter.requires_grad)

    def was_cleared(self) -> bool:
        if self._sum is None:
            return False
        place, value_version, gradient, version = self._sum
        parameter = place()
        if parameter is None:
            return False
        now, is_used = parameter.grad, parameter._version != value_version
        if not is_used and id(now) == gradient and now is not None and now._version == version:
            return False
        if is_used:
            self._used = max(self._used, self._count)
        self._count, self._sum = 0, None
        return not is_used

    def began(self) -> bool:
        """Count the running pass once, unless there was no forward since the last one: several may follow a single forward. Returns
        whether the pass is new, so that its end has to be seen.
        """
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return False
        self._task = task
        self._count += self.forwards > self._forwards_before
        self._forwards_before = self.forwards
        return True

    def ended(self) -> None:
        """Note what shows later whether the sum was cleared or used."""
        module = self._module()
        for parameter in () if module is None else module.parameters():
            if (gradient := parameter.grad) is not None:
                self._sum = weakref.ref(parameter), parameter._version, id(gradient), gradient._version
                return


def _is_reached(parameter: Tensor) -> bool:
    with outside_dispatch_modes(), torch.enable_grad():
        view: Node | None = parameter.view_as(parameter).grad_fn
    node = None if view is None else view.next_functions[0][0]
    return node is not None and will_run(node)


# --- Fingerprints of batches, 8 bytes a step, and what the first batches look like ---


#: Elements of a batch that are looked at.
_MOST = 1 << 16
#: Batches before anything is reported, and how far back a batch is looked for.
FEWEST, BACK = 16, 8
#: Share of batches that came before, if workers draw the same random numbers.
_COPIES = 0.3
#: An input whose root mean square is larger, or whose mean is this many standard deviations, is not normalised.
#: Small numbers are left alone, whatever their mean, since a bias takes it up; unless hardly anything else is in them.
_LARGE, _OFF, _SMALL, _FAR_OFF = 10.0, 5.0, 1.0, 50.0
#: Numbers this small drown in the biases.
_TINY = 0.02
#: The names of arguments that are no input: what the loss compares with, and what selects.
_NO_INPUT = re.compile(r"label|target|mask(?!ed)", re.IGNORECASE)


def batch_tensors(args: Sequence[object], kwargs: dict[str, object], inputs_alone: bool = False) -> list[Tensor]:
    """The plain tensors among the arguments of a model, of more than one element; ``inputs_alone``: without labels and masks, by name."""
    found = [*tensors_of(args, ""), *tensors_of(kwargs, "")]
    return [
        each
        for path, each in found
        if not (inputs_alone and _NO_INPUT.search(path))
        and type(each) is Tensor
        and each.layout is torch.strided
        and not each.is_nested
        and each.device.type != "meta"
        and each.numel() > 1
    ]


@torch.no_grad()
def sampled(tensor: Tensor) -> Tensor:
    """Some elements of a large one, in one distance, for a fingerprint: two batches that differ hardly agree in all of them."""
    step = tensor.numel() // _MOST
    return tensor if step < 2 else tensor.detach().reshape(-1)[:: step | 1]


@torch.no_grad()
def look_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Mean, root mean square, and largest difference between rows, of the first input of floating point: float64 ``[3]``."""
    first = _first_float(tensors)
    if first is None or first.device.type == "mps":
        return None
    rows = first.detach()[: max(1, _MOST * len(first) // max(first.numel(), 1))].double() if len(first) else None
    if rows is None or not rows.numel():
        return None
    apart = (rows - rows[:1]).abs().amax() if len(rows) > 1 else torch.full((), math.nan, dtype=torch.float64, device=rows.device)
    return torch.stack([rows.mean(), rows.square().mean().sqrt(), apart])


class _Part:
    """A module that the loop calls, and its batches: the model, without a name, or in a container without a forward one of those in it."""

    def __init__(self, name: str, module: nn.Module, tallies: Tallies, owned: Collection[int]) -> None:
        self.name, self._tallies = name, tallies
        #: it is trained, and behaves otherwise in evaluation mode
        self.has_modes = any(id(parameter) in owned for parameter in module.parameters()) and has_modes(module)
        self._seen: list[int] = []  # fingerprints

    @property
    def is_repeated(self) -> bool:
        return len(self._seen) >= FEWEST and len(set(self._seen)) == 1

    def check(self, rule: str, is_so: bool, evidence: Mapping[str, float] | None = None) -> None:
        self._tallies.check(rule, is_so, self.name or None, self.name, evidence or {})

    def judge(self, found: Sequence[Tensor | None], record: StepRecord, varies: bool | None) -> None:
        """Report what is odd in the batch of a step; ``varies``: what the user has declared."""
        fingerprint, look, sums = found
        # a NaN may stand for a value that is missing, and a mask may be infinite: what the model makes of it decides
        norm = record.values.get(Key(SUMMARY, "", "grad_norm"), 0.0)
        if sums is not None and not bool(sums.isfinite().all()) and not math.isfinite(norm):
            self._tallies.seen(NON_FINITE_INPUT, self.name or None, (self.name,) if self.name else (), step=record.step)
        if fingerprint is not None:
            self._seen.append(hash(tuple(unpacked(fingerprint).tolist())))
            if len(self._seen) >= FEWEST and varies is not False:
                self._judge_repeats(bool(varies))
        if look is not None:
            mean, rms, apart = look.tolist()
            self.check("constant-input", apart == 0, evidence={"largest difference between rows": 0.0})
            deviation = math.sqrt(max(rms**2 - mean**2, 0.0))
            off = abs(mean) / deviation if deviation else 0.0
            is_far = rms > _LARGE or 0 < rms < _TINY or off > (_OFF if rms > _SMALL else _FAR_OFF)
            self.check("inputs-not-normalised", is_far, evidence={"mean": mean, "standard deviation": deviation})

    def _judge_repeats(self, varies: bool) -> None:
        seen, different = self._seen, len(set(self._seen))
        again = sum(each in seen[max(place - BACK + 1, 0) : place] for place, each in enumerate(seen))
        # of workers that draw the same numbers, a batch comes again soon, though there are more different ones
        if not self.is_repeated and (different <= BACK or again < _COPIES * len(seen)):
            return
        self.check("repeated-batch", True, evidence={"batches": float(len(seen)), "different ones": float(different)})
        if varies:
            self._tallies.seen(EXPECTATION, "batch", ("batches that vary",), {"different ones": float(different)})


# --- The check of the data: looks at the first batches, and at what comes back to the model's output ---


#: Whose modules have a forward that only says that there is none.
_TRAINERS = ("lightning.", "pytorch_lightning.")
#: Monitored steps that are looked at, among this number of steps of any kind; and those of them whose output is, too.
STEPS, SPAN = 48, 200
#: How many of the first outputs have their graph walked; two that agree are a finding.
_GRAPHS = 4
#: The most outputs of a step with a copy that waits for their gradient.
_WAITING = 4
_HEADS = frozenset((0, 1, 2, 3, 5, 8, 11, 14, 18, 22, 26, 31, 36, 41, 46))


class _Look:
    """What is known of one step. ``has_head``: the output is looked at, too."""

    def __init__(self, step: int, has_head: bool) -> None:
        self.step, self.has_head = step, has_head
        self.calls: dict[int, _Calls] = {}  # by the module's identity
        # the calls and what the output was made by, from which the first gradient came back that is in the sum of the step
        self.source: _Calls | None = None
        self.output = Origin()
        self._is_summed = False  # the gradient that was looked at is in the sum
        self._waiting = 0  # samples whose gradient has not come
        self.found: dict[str, Tensor] = {}  # numbers on their device

    def of(self, module: nn.Module) -> _Calls:
        return self.calls.setdefault(id(module), _Calls(module))

    def take_batch(self, tensors: Sequence[Tensor], args: Sequence[object], kwargs: dict[str, object], part: str) -> None:
        """Look at the arguments of a first forward; ``part``: of the model, or empty for all of it."""
        if not tensors or len({tensor.device for tensor in tensors}) > 1:
            return
        if floats := [each.detach() for each in tensors if torch.is_floating_point(each) and each.device.type != "mps"]:
            # each is finite if all its elements are
            self.found[f"sums{part}"] = torch.stack([each.sum(dtype=torch.float64) for each in floats])
        self.found[f"fingerprint{part}"] = packed(fingerprints(list(map(sampled, tensors))))
        if self.has_head and (look := look_of(batch_tensors(args, kwargs, inputs_alone=True))) is not None:
            self.found[f"look{part}"] = look

    def takes_sample(self, calls: _Calls) -> bool:
        """Whether the gradient of an output that was just made will be looked at."""
        self.check_cleared(calls)
        takes = self._waiting < _WAITING and not self._is_summed
        self._waiting += takes
        return takes

    def take_head(self, calls: _Calls, output: Origin, sample: Tensor, gradient: Tensor, is_summed: bool) -> None:
        """Look at the first gradient that comes back to an output; or at a later one that ``is_summed`` if that was not."""
        self._waiting = max(self._waiting - 1, 0)  # several passes may come back to one output
        if type(gradient) is not Tensor or self._is_summed or ("head" in self.found and not is_summed):
            return
        losses = losses_going_backward()
        if not is_linear(losses) and (facts := facts_of(sample, gradient)) is not None:
            self.found["head"], self.output, self.source = facts, output, calls
            self._is_summed = is_summed
            self.found.pop("loss", None)
            if len(losses) == 1 and losses[0].device == gradient.device:
                self.found["loss"] = losses[0].detach().double().reshape(1)

    def check_cleared(self, calls: _Calls) -> None:
        if calls.was_cleared() and calls is self.source:
            self._is_summed = False


class DataCheck(Check):
    """Looks at the first batches of a training, in STEPS monitored steps of the first SPAN, and then takes its hooks away.

    ``every``: steps from one monitored step to the next; ``varies``: whether batches should differ, if that was declared.
    """

    name, part = "data_check", "data"

    def __init__(self, every: int, varies: bool | None) -> None:
        super().__init__()
        self._every, self._varies = every, varies
        self._targets, self._players = Targets(self.tallies), Players(self.tallies)
        self._acting = Acting(lambda **facts: self.context.annotate_run(**facts))
        self._parts: dict[int, _Part] = {}  # by the module's identity
        self._root: Callable[[], nn.Module | None] = _nobody
        self._new_layers = MadeInForward()
        self._pushes: dict[Role, Tensor] = {}  # since the last step
        self._handles = Handles()
        self._first_loss: dict[str, float] = {}
        self._looked = 0
        self._last: int | None = None  # the last step that is looked at
        self._look: _Look | None = None
        self._open: dict[int, _Look] = {}  # of steps whose record is still to come
        self._has_root = True

    @property
    def acts(self) -> bool:
        return self._acting.is_so

    @property
    def chance(self) -> dict[str, float]:
        """See :attr:`Targets.chance`; with the first loss that went backward, and its step, which a logged one has to agree with."""
        return {**self._targets.chance, **self._first_loss}

    def on_attach(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Begin to look, unless a compiler would have to trace the hooks."""
        self._end()
        self.context.set_quiet(False)
        self._looked, self._last = 0, None
        self.tallies.write_facts(begins=True)
        self._has_root, self._root = _has_forward(module), weakref.ref(module)
        owned = set(map(id, parameters_of(*optimizers)))
        self._parts = {}
        for name, called in _called_modules(module):
            if id(called) in self._parts:
                continue
            self._parts[id(called)] = part = _Part(name, called, self.tallies, owned)
            is_compiled = hasattr(called, "_orig_mod") or getattr(called, "_compiled_call_impl", None) is not None
            if takes_hooks(called) and not is_compiled:
                self._handles.of_module(called.register_forward_pre_hook(ModuleHook(self._called), with_kwargs=True))
                self._handles.of_module(called.register_forward_hook(ModuleHook(self._returned)))
                _networks.add(part)

    def _end(self) -> None:
        self._remove_hooks()
        self._new_layers.end()
        self._look = None
        self._open.clear()

    def _remove_hooks(self) -> None:
        self._handles.remove()
        _networks.difference_update(self._parts.values())
        self._pushes = {}

    # --- hooks ---------------------------------------------------------------------------------------------------------------

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if (
            self.context.is_paused
            or torch._C._current_graph_task_id() != -1
            or torch._C._functorch.peek_interpreter_stack() is not None
        ):
            return
        step = self.context.coming_step
        self._last = step + SPAN if self._last is None else self._last
        if step > self._last:
            self._remove_hooks()
        elif not torch.is_grad_enabled():
            if module.training and self._has_root:  # one part of several may be a teacher
                self.context.call(self._acting.called, args, kwargs or {})
        elif step % self._every == 0:
            self._train(module, step, args, kwargs or {})

    def _train(self, module: nn.Module, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._look is None or self._look.step != step:
            self.context.call(self._began, module, step, args, kwargs)
        if (look := self._look) is not None:
            # a later call of the step, as that on a generator's samples behind one on true ones
            if self._has_root and look.calls:
                self.context.call(self._passes_through, step, args, kwargs)
            calls = look.of(module)
            calls.in_training |= module.training
            if not self._has_root and f"fingerprint{(name := self._parts[id(module)].name)}" not in look.found:
                self.context.call(self._part_called, look, module, name, args, kwargs)
            calls.forwards += 1

    def _began(self, module: nn.Module, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._look = _Look(step, self._looked in _HEADS)
        if not self._has_root:
            return
        if self._passes_through(step, args, kwargs):
            self._look = None
            return
        tensors = batch_tensors(args, kwargs)
        self._look.take_batch(tensors, args, kwargs, "")
        if (rows := self._acting.trained(tensors)) is not None:
            self._look.found["rows"] = rows
        if self._look.has_head:
            self._new_layers.begin(module)
            if (shares := shares_of(module, kwargs)) is not None:
                self._look.found["arguments"] = shares

    def _passes_through(self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        tensors = batch_tensors(args, kwargs)
        is_made = len(tensors) > 0 and tensors[0].grad_fn is not None
        return is_made and self._acting.passes_through(tensors[0], step, self._root())

    def _part_called(self, look: _Look, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What goes into one part of several is a batch unless another part or a parameter gave it."""
        tensors = batch_tensors(args, kwargs)
        if not any(each.requires_grad or each.untyped_storage() in _makers for each in tensors):
            look.take_batch(tensors, args, kwargs, name)
            if look.has_head:
                self._new_layers.begin(module)

    def _returned(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if made := self._new_layers.end():
            self.context.call(self.tallies.seen, "unregistered-parameters", None, (), {"tensors made anew in each forward": made})
        look = self._look
        if self.context.is_paused or torch._C._functorch.peek_interpreter_stack() is not None:  # a transformation within the step
            return
        if len(_networks) > 1:  # of any monitors; else nothing has to be noted
            self.context.call(self._play, module, args, result)
        if look is not None and torch.is_grad_enabled():
            self.context.call(self._follow, look, module, result)

    def _play(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if type(result) is Tensor and torch.is_floating_point(result) and result.layout is torch.strided:
            _makers[result.untyped_storage()] = weakref.ref(module)  # with or without a graph
        if (answers := output_of(result)) is None or (role := role_of(module, batch_tensors(args, {}), answers)) is None:
            return
        if role not in self._pushes:  # the first of a step is enough
            copied = answers.detach().flatten().double()  # since the loop may write to them
            answers.register_hook(Hook(self.context.call, came_back, self._pushes, role, copied))  # type: ignore[no-untyped-call]

    def _follow(self, look: _Look, module: nn.Module, result: Any) -> None:
        if (output := output_of(result)) is None:
            return
        self._acting.made(output)
        if not look.has_head:
            return
        calls = look.of(module)
        sample = sample_of(output) if look.takes_sample(calls) else None
        origin = Origin() if sample is None else origin_of(output)
        tokens = None
        if self._looked < _GRAPHS:
            sources = sources_of(output)
            self.tallies.check("batch-as-sequence", runs_over_batch(sources, output))
            tokens, share = tokens_of(sources, module, output)
            if share is not None:
                look.found["attended"] = share
        output.register_hook(Hook(self.context.call, self._output_gradient, look, calls, origin, sample, tokens))  # type: ignore[no-untyped-call]

    def _output_gradient(
        self, look: _Look, calls: _Calls, output: Origin, sample: Tensor | None, tokens: Tokens | None, gradient: Tensor
    ) -> None:
        if tokens is not None and type(gradient) is Tensor and (shares := shares_of_next(tokens, gradient)) is not None:
            look.found["own"] = shares
        if is_summed := calls.accumulates():
            look.check_cleared(calls)
            if calls.began():
                engine = torch.autograd.Variable._execution_engine
                # DDP copies the reduced gradients back in a callback of its own; one queued from within a callback comes after it
                engine.queue_callback(lambda: engine.queue_callback(lambda: self.context.call(calls.ended)))
        if sample is not None:
            look.take_head(calls, output, sample, gradient, is_summed)

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def on_step_closing(self, step: ActiveStep) -> None:
        look, self._look = self._look, None
        if self._pushes and step.is_monitored and step.buffer is not None:
            pushes, self._pushes = self._pushes, {}
            # of two networks that were both trained by their answers
            pairs = [pair for pair, role in pushes if role == ANSWERS and (pair, MAKES) in pushes]
            step.buffer.extras.update((f"{self.name}/{role}", pushes[pair, role]) for pair in pairs for role in ROLES)
        if look is None or look.step != step.number or not step.is_monitored or step.buffer is None:
            return
        step.buffer.extras.update((f"{self.name}/{name}", numbers) for name, numbers in look.found.items())
        look.found.clear()
        self._open[step.number] = look
        self._looked += 1
        if self._looked >= STEPS:
            self._remove_hooks()

    def on_record(self, record: StepRecord) -> None:
        seen = self._open.pop(record.step, None)
        if seen is None and not record.extras:
            if record.step > (self._last or -1) and not (self._handles or self._open or self._look):
                self.context.set_quiet(True)
            return
        found = {name.removeprefix(f"{self.name}/"): numbers for name, numbers in record.extras.items()}
        if ANSWERS in found and MAKES in found:
            self._players.add(found[ANSWERS].tolist(), found[MAKES].tolist(), record.step)
        if seen is None:
            return
        rows, facts, loss, *tokens = map(found.get, ("rows", "head", "loss", "arguments", "own", "attended"))
        for shares in tokens:
            if shares is not None:
                judge(shares.tolist(), self.tallies)
        for module, part in self._parts.items():
            part.judge([found.get(f"{name}{part.name}") for name in ("fingerprint", "look", "sums")], record, self._varies)
            calls = seen.calls.get(module)  # the setup check has the mode of the whole model
            if part.has_modes and not self._has_root and calls is not None and calls.forwards:
                part.check("eval-mode", not calls.in_training and (root := self._root()) is not None and root.training)
        if rows is not None:
            self._acting.add(rows.tolist())
        if facts is not None:
            known = self.chance
            head = recognised(facts.tolist(), loss_in(record.values) if loss is None else loss.item())
            if loss is not None and not self._first_loss:
                self._first_loss = {"step": float(record.step), "went backward": loss.item()}
            if head is not None and (calls := seen.source) is not None:
                forwards = calls.forwards + int(record.context.get("rests", 0))  # a turn that others take has labels of its own
                self._targets.add(head, forwards, calls.micro_batches, self.context.scaler is not None, seen.output)
            if self.chance != known:
                self.context.annotate_run(chance=self.chance)
        if not self.tallies.is_empty and any(part.is_repeated for part in self._parts.values()):
            self.tallies.retract("labels-constant")  # one example, or one goal for all of them, is all there is


def _has_forward(module: nn.Module) -> bool:
    """Whether it can be called itself; a ``ModuleDict`` of parts cannot, nor a module of Lightning that leaves it to its training step."""
    forward = getattr(type(module), "forward", None)  # modules of TorchScript have none
    return forward is not nn.Module.forward and not str(getattr(forward, "__module__", "")).startswith(_TRAINERS)


def _called_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The module, or those in it that are called in its place, with their names."""
    if _has_forward(module):
        yield name, module
    else:
        for own, part in module.named_children():
            yield from _called_modules(part, f"{name}.{own}" if name else own)
