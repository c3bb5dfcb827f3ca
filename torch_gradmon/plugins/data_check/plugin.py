"""The check of the data: looks at the first batches, and at what comes back to the model's output."""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...capture.hooks import Handles, Hook, ModuleHook, takes_hooks
from ...capture.loss_graph import losses_going_backward
from ...core.errors import WarningLog
from ...core.keys import SUMMARY, Key
from ...core.loop_mistakes import SETUP_MISTAKES, LoopFinding
from ...core.records import StepRecord, loss_in
from ...statistics.fingerprint import fingerprints, packed, unpacked
from ...step.active_step import ActiveStep
from ...step.plugin import Plugin
from ..setup_check.expectations import Expectations
from ..setup_check.hidden_parameters import MadeInForward
from ..setup_check.modules import has_modes
from ..tallies import Tallies
from .acting import Acting
from .arguments import judge, share_of_own, shares_of, tokens_of
from .batches import Batches, batch_tensors, look_of, sampled, sums_of
from .head import Origin, facts_of, is_linear, origin_of, output_of, recognised, sample_of
from .passes import Passes
from .players import ROLES, Answers, Network, Players, Role, are_several, is_made, made, of_one_pair, role_of
from .targets import Targets

#: Monitored steps that are looked at, among this number of steps of any kind; and those of them whose output is, too.
STEPS, SPAN = 48, 200
#: The most outputs of a step with a copy that waits for their gradient.
_WAITING = 4
_HEADS = frozenset((0, 1, 2, 3, 5, 8, 11, 14, 18, 22, 26, 31, 36, 41, 46))


class _Look:
    """What is known of one step.

    Args:
        step: its number.
        has_head: the output is looked at, too.

    Attributes:
        calls: number of forwards of the step by the module's identity.
        in_training: the identities of those that were called in training mode.
        passes: backward passes by the same.
        tokens: that the first forward of a language model got, see :func:`.arguments.tokens_of`.
        output: what the output was made by, from which the first gradient came back that is in the sum of the step.
        found: numbers on their device.
    """

    def __init__(self, step: int, has_head: bool) -> None:
        self.step, self.has_head = step, has_head
        self.calls: Counter[int] = Counter()
        self.in_training: set[int] = set()
        self.passes: dict[int, Passes] = {}
        self.tokens: Tensor | None = None
        self.output, self._module = Origin(), 0
        self._is_summed = False  # the gradient that was looked at is in the sum
        self._waiting = 0  # samples whose gradient has not come
        self.found: dict[str, Tensor] = {}

    @property
    def forwards(self) -> int:
        """Those of the module that made the output."""
        return self.calls[self._module]

    @property
    def micro_batches(self) -> int:
        """The backward passes of that module that are in one sum."""
        passes = self.passes.get(self._module)
        return 1 if passes is None else passes.micro_batches

    def take_batch(self, tensors: Sequence[Tensor], inputs: Sequence[Tensor], part: str) -> None:
        """Look at the arguments of a first forward, and at those that are ``inputs``; ``part``: of the model, or empty for all of it."""
        if not tensors or len({tensor.device for tensor in tensors}) > 1:
            return
        if (sums := sums_of(tensors)) is not None:
            self.found[f"sums{part}"] = sums
        self.found[f"fingerprint{part}"] = packed(fingerprints(list(map(sampled, tensors))))
        if self.has_head and (look := look_of(inputs)) is not None:
            self.found[f"look{part}"] = look

    def has_batch(self, part: str) -> bool:
        """Whether one of this part was looked at."""
        return f"fingerprint{part}" in self.found

    def takes_sample(self, module: int) -> bool:
        """Whether the gradient of an output that ``module`` has just made will be looked at."""
        self._check_cleared(module)
        takes = self._waiting < _WAITING and not self._is_summed
        self._waiting += takes
        return takes

    def take_head(self, module: int, output: Origin, sample: Tensor, gradient: Tensor, is_summed: bool) -> None:
        """Look at the first gradient that comes back to an output, of the ``module`` with this identity; or at a later one that
        ``is_summed`` if that was not.
        """
        self._waiting = max(self._waiting - 1, 0)  # several passes may come back to one output
        if type(gradient) is not Tensor or self._is_summed or ("head" in self.found and not is_summed):
            return
        losses = losses_going_backward()
        if not is_linear(losses) and (facts := facts_of(sample, gradient)) is not None:
            self.found["head"], self.output, self._module = facts, output, module
            self._is_summed = is_summed
            self.found.pop("loss", None)
            if len(losses) == 1 and losses[0].device == gradient.device:
                self.found["loss"] = losses[0].detach().double().reshape(1)

    def count_pass(self, module: int) -> bool:
        """Count the running backward pass. Returns whether its end has to be seen."""
        self._check_cleared(module)
        return self.passes[module].began(self.calls[module])

    def _check_cleared(self, module: int) -> None:
        if self.passes[module].was_cleared() and module == self._module:
            self._is_summed = False


class _Part:
    """A module that the loop calls: the model, or in a container without a forward one of those in it.

    Attributes:
        name: of the module in the model.
        batches: that it got.
        has_modes: it is trained, and behaves otherwise in evaluation mode.
    """

    def __init__(self, name: str, module: nn.Module, tallies: Tallies, owned: Collection[int]) -> None:
        self.name, self.batches = name, Batches(tallies, name)
        self.has_modes = any(id(parameter) in owned for parameter in module.parameters()) and has_modes(module)


class DataCheck(Plugin):
    """Looks at the first batches of a training, in STEPS monitored steps of the first SPAN, and then takes its hooks away.

    Args:
        every: steps from one monitored step to the next.
        expectations: what the user has declared.
        complaints: receives a warning about each certain mistake.
        note: writes facts about the run to the run directory.
    """

    name = "data_check"
    stops_on_failure = True

    def __init__(self, every: int, expectations: Expectations, complaints: WarningLog, note: Callable[..., None]) -> None:
        self._every, self._expectations, self._note = every, expectations, note
        self._tallies = Tallies(complaints, lambda: self.context.step or 0, note, SETUP_MISTAKES, "data")
        self._targets = Targets(self._tallies)
        self._parts: dict[int, _Part] = {}  # by the module's identity
        self._root: weakref.ref[nn.Module] | None = None
        self._acting, self._new_layers, self._players = Acting(note), MadeInForward(), Players(self._tallies)
        self._pushes: dict[Role, Tensor] = {}  # since the last step
        self._handles = Handles()
        self._networks: list[Network] = []  # that have hooks
        self._first_loss: dict[str, float] = {}
        self._looked = 0
        self._last: int | None = None  # the last step that is looked at
        self._look: _Look | None = None
        self._open: dict[int, _Look] = {}  # of steps whose record is still to come
        self._is_paused, self._has_root = False, True

    def facts(self) -> list[LoopFinding]:
        """What was found so far."""
        return self._tallies.facts()

    @property
    def acts(self) -> bool:
        """Whether the data depend on the model."""
        return self._acting.is_so

    @property
    def chance(self) -> dict[str, float]:
        """See :attr:`Targets.chance`; with the first loss that went backward, and its step, which a logged one has to agree with."""
        return {**self._targets.chance, **self._first_loss} if self._targets.chance else {}

    def on_attach(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Begin to look, unless a compiler would have to trace the hooks."""
        self.on_detach()
        self._looked, self._last = 0, None
        self._tallies.write_facts(begins=True)
        self._has_root, self._root = _has_forward(module), weakref.ref(module)
        owned = {id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]}
        self._parts = {}
        for name, called in _called_modules(module):
            if id(called) in self._parts:
                continue
            self._parts[id(called)] = _Part(name, called, self._tallies, owned)
            is_compiled = hasattr(called, "_orig_mod") or getattr(called, "_compiled_call_impl", None) is not None
            if takes_hooks(called) and not is_compiled:
                self._handles.of_module(called.register_forward_pre_hook(ModuleHook(self._called), with_kwargs=True))
                self._handles.of_module(called.register_forward_hook(ModuleHook(self._returned)))
                self._networks.append(Network())

    def on_pause(self, is_paused: bool) -> None:
        """What the model gets meanwhile is no batch of the training."""
        self._is_paused = is_paused

    def on_detach(self) -> None:
        """Take the hooks away."""
        self._remove_hooks()
        self._new_layers.end()
        self._look = None
        self._open.clear()

    def _remove_hooks(self) -> None:
        self._handles.remove()
        self._networks.clear()
        self._pushes = {}

    def on_leave(self, last: int | None) -> None:
        """Write the facts to the run directory, if they are new."""
        self._tallies.write_facts()

    # --- hooks ---------------------------------------------------------------------------------------------------------------

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if self._is_paused or torch._C._current_graph_task_id() != -1 or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        step = self.context.coming_step
        self._last = step + SPAN if self._last is None else self._last
        if step > self._last:
            self._remove_hooks()
        elif not torch.is_grad_enabled():
            if module.training and self._has_root:  # one part of several may be a teacher
                self.context.call(self._acted, args, kwargs or {})
        elif step % self._every == 0:
            self._train(module, step, args, kwargs or {})

    def _train(self, module: nn.Module, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._look is None or self._look.step != step:
            self.context.call(self._began, module, step, args, kwargs)
        if (look := self._look) is not None:
            if not self._has_root and module.training:
                look.in_training.add(id(module))
            if not self._has_root and not look.has_batch(name := self._parts[id(module)].name):
                self.context.call(self._part_called, look, module, name, args, kwargs)
            look.calls[id(module)] += 1

    def _began(self, module: nn.Module, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._look = _Look(step, self._looked in _HEADS)
        if not self._has_root:
            return
        tensors = batch_tensors(args, kwargs)
        if tensors and tensors[0].grad_fn is not None and self._acting.pass_through(tensors[0]):
            self._look = None
            return
        self._look.take_batch(tensors, batch_tensors(args, kwargs, inputs_alone=True), "")
        if (rows := self._acting.trained(tensors)) is not None:
            self._look.found["rows"] = rows
        if self._look.has_head:
            self._new_layers.begin(module)
            if (shares := shares_of(module, kwargs)) is not None:
                self._look.found["arguments"] = shares
            self._look.tokens = tokens_of(module, args, kwargs)

    def _part_called(self, look: _Look, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What goes into one part of several is a batch unless another part or a parameter gave it."""
        tensors = batch_tensors(args, kwargs)
        if not any(each.requires_grad or is_made(each) for each in tensors):
            look.take_batch(tensors, batch_tensors(args, kwargs, inputs_alone=True), name)
            if look.has_head:
                self._new_layers.begin(module)

    def _acted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._acting.called(batch_tensors(args, kwargs))

    def _returned(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if made := self._new_layers.end():
            self.context.call(
                self._tallies.seen, "unregistered-parameters", None, (), {"tensors made anew in each forward": made}
            )
        look = self._look
        if self._is_paused or torch._C._functorch.peek_interpreter_stack() is not None:  # a transformation within the step
            return
        if are_several():
            self.context.call(self._play, module, args, result)
        if look is not None and torch.is_grad_enabled():
            self.context.call(self._follow, look, module, result)

    def _play(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        made(module, result)
        if (answers := output_of(result)) is None or (role := role_of(module, batch_tensors(args, {}), answers)) is None:
            return
        if role not in self._pushes:  # the first of a step is enough
            waiting = Answers(answers, functools.partial(self._pushes.setdefault, role))
            answers.register_hook(_Push(self, waiting))  # type: ignore[no-untyped-call]

    def _follow(self, look: _Look, module: nn.Module, result: Any) -> None:
        if (output := output_of(result)) is None:
            return
        self._acting.made(output)
        if not look.has_head:
            return
        look.passes.setdefault(id(module), Passes(module))
        sample = sample_of(output) if look.takes_sample(id(module)) else None
        origin = Origin() if sample is None else origin_of(output)
        tokens, look.tokens = look.tokens, None
        output.register_hook(_Return(self, look, id(module), origin, sample, tokens))  # type: ignore[no-untyped-call]

    def came_back(
        self, look: _Look, module: int, output: Origin, sample: Tensor | None, tokens: Tensor | None, gradient: Tensor
    ) -> None:
        """A gradient came back to an output of a step."""
        if tokens is not None and type(gradient) is Tensor and (share := share_of_own(tokens, gradient)) is not None:
            look.found["own"] = share
        is_summed = look.passes[module].accumulates()
        if is_summed and look.count_pass(module):
            engine, ended = torch.autograd.Variable._execution_engine, look.passes[module].ended
            # DDP copies the reduced gradients back in a callback of its own; one queued from within a callback comes after it
            engine.queue_callback(lambda: engine.queue_callback(lambda: self.context.call(ended)))
        if sample is not None:
            look.take_head(module, output, sample, gradient, is_summed)

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def on_step_closing(self, step: ActiveStep) -> None:
        """Send what was seen in a monitored step to the host."""
        look, self._look = self._look, None
        if self._pushes and step.is_monitored and step.buffer is not None:
            pushes, self._pushes = self._pushes, {}
            step.buffer.extras.update((f"{self.name}/{role}", push) for role, push in of_one_pair(pushes).items())
        if look is None or look.step != step.number or not step.is_monitored or step.buffer is None:
            return
        step.buffer.extras.update((f"{self.name}/{name}", numbers) for name, numbers in look.found.items())
        look.found.clear()
        self._open[step.number] = look
        self._looked += 1
        if self._looked >= STEPS:
            self._remove_hooks()

    def on_record(self, record: StepRecord) -> None:
        """Judge a step once its values are on the host."""
        one, other = (record.extras.get(f"{self.name}/{role}") for role in ROLES)
        if one is not None and other is not None:
            self._players.add(one.tolist(), other.tolist(), record.step)
        seen = self._open.pop(record.step, None)
        if seen is None:
            return
        rows, facts, loss, arguments, own = (
            record.extras.get(f"{self.name}/{name}") for name in ("rows", "head", "loss", "arguments", "own")
        )
        for shares in (arguments, own):
            if shares is not None:
                judge(shares.tolist(), self._tallies)
        for module, part in self._parts.items():
            self._judge_batch(part, record)
            if part.has_modes and not self._has_root and seen.calls[module]:
                self._judge_mode(part.name, module in seen.in_training)
        if rows is not None:
            self._acting.add(rows.tolist())
        if facts is not None:
            known = self.chance
            head = recognised(facts.tolist(), loss_in(record.values) if loss is None else loss.item())
            if loss is not None and not self._first_loss:
                self._first_loss = {"step": float(record.step), "went backward": loss.item()}
            if head is not None:
                forwards = seen.forwards + int(record.context.get("rests", 0))  # a turn that others take has labels of its own
                self._targets.add(head, forwards, seen.micro_batches, self.context.scaler is not None, seen.output)
            if self.chance != known:
                self._note(chance=self.chance)
        if not self._tallies.is_empty and any(part.batches.is_repeated for part in self._parts.values()):
            self._tallies.retract("labels-constant")  # one example, or one goal for all of them, is all there is

    def _judge_batch(self, part: _Part, record: StepRecord) -> None:
        fingerprint, look, sums = (
            record.extras.get(f"{self.name}/{name}{part.name}") for name in ("fingerprint", "look", "sums")
        )
        # a NaN may stand for a value that is missing, and a mask may be infinite: what the model makes of it decides
        if sums is not None and not bool(sums.isfinite().all()) and _is_spoiled(record):
            part.batches.spoiled(record.step)
        if fingerprint is not None:
            part.batches.add(hash(tuple(unpacked(fingerprint).tolist())))
            part.batches.judge(self._expectations.batch_varies)
        if look is not None:
            part.batches.looked(*look.tolist())

    def _judge_mode(self, name: str, in_training: bool) -> None:
        """That of one part of several; the setup check has that of the whole model."""
        root = None if self._root is None else self._root()
        if not in_training and root is not None and root.training:
            self._tallies.seen("eval-mode", name, (name,))
        elif not self._tallies.is_empty:
            self._tallies.missed("eval-mode", name)


def _is_spoiled(record: StepRecord) -> bool:
    """Whether the gradients of a step are NaN or infinite."""
    norm = record.values.get(Key(SUMMARY, "", "grad_norm"))
    return norm is not None and not math.isfinite(norm)


def _has_forward(module: nn.Module) -> bool:
    """Whether it can be called itself; a ``ModuleDict`` of parts cannot."""
    return getattr(type(module), "forward", None) is not nn.Module.forward  # modules of TorchScript have none


def _called_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The module, or those in it that are called in its place, with their names."""
    if _has_forward(module):
        yield name, module
    else:
        for own, part in module.named_children():
            yield from _called_modules(part, f"{name}.{own}" if name else own)


class _Return(Hook):
    """Gives the gradient of an output to the check."""

    def __init__(
        self, check: DataCheck, look: _Look, module: int, output: Origin, sample: Tensor | None, tokens: Tensor | None
    ) -> None:
        super().__init__(check.context.call, check.came_back, look, module, output, sample, tokens)


class _Push(Hook):
    """Gives the gradient of answers to what waits for it, unless it is one of a penalty, which has a graph."""

    def __init__(self, check: DataCheck, waiting: Answers) -> None:
        super().__init__(check.context.call, _came_back, waiting)


def _came_back(waiting: Answers, gradient: Tensor) -> None:
    if not torch.is_grad_enabled():
        waiting.came_back(gradient)
