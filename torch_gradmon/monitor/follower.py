"""Follow a loop that nobody edits: from what the hooks see to when a step begins, what is measured, and when it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..capture.hooks import Hook
from ..core.errors import SpikeError
from ..core.fence import fenced
from ..core.keys import GRADIENT_BEFORE_CLIP
from ..plugins.spike_policy.policy import View
from ..step.planner import Planner
from .loop import in_backward
from .loop.attachment import Attachment
from .loop.in_backward import StepsInBackward

if TYPE_CHECKING:
    from .session import Session

#: After so many steps the smallest number of backward passes in a step counts as known, and earlier ones are not measured.
_LEARNING = 100
_WITHIN = (
    "an optimizer stepped within the backward pass before this was known of the loop; they are measured from the next step on"
)


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether an optimizer comes with the state of earlier steps. Adagrad makes its state beforehand; without state, as of plain SGD,
    nothing is known.
    """
    state = next(iter(optimizer.state.values()), None)
    if not state:
        return False
    steps = state.get("step", 1)
    return not isinstance(steps, torch.Tensor) or steps.device.type != "cpu" or bool(steps)  # never waits for a device


class Follower:
    """Drives a session by hooks.

    A step begins with the first training forward, backward pass or optimizer step after the last one ended. It ends when the
    last of the optimizers has stepped, under a GradScaler when the scaler has updated. Where steps are begun by hand, only
    the measuring is left to the hooks.
    """

    def __init__(
        self,
        session: Session,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
        wrappers: Sequence[tuple[Any, Optimizer]] = (),
    ) -> None:
        self.session = session
        self.guard = session.guard
        self.refused = self.orphaned = False
        self._attempted = False
        self._begun: set[int] = set()
        self._groups: list[int] = []
        self._backward_since = self._parameters_measured = False
        self._done: set[int] = set()
        self._decided: set[int] = set()  # whose closure was called once
        self._refused: set[int] = set()  # whom the scaler did not let step
        self._raised: set[int] = set()  # whose closure raised
        self.in_backward = StepsInBackward()
        self._owned: dict[int, list[int]] = {}
        self._unowned: list[int] = []
        self._backwards = self._learned = self._stepped_after = 0
        self._called_in_training = self._called_in_eval = False  # since an attempt was over
        self._is_first = True
        self._fewest: int | None = None
        self._attachment = Attachment(self, module, optimizers, scaler, session.audit, wrappers)
        session.audit.follow(module, optimizers)
        self._attachment.may_skip = session.actor is not None

    # --- for the session -----------------------------------------------------------------------------------------------------

    def groups_changed(self) -> bool:
        """Whether an optimizer got or lost parameters since hooks were armed."""
        return self._groups != self._group_sizes()

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for optimizer in self.optimizers() for group in optimizer.param_groups]

    def step_opened(self) -> None:
        """A step was opened."""
        self._attempted = self.refused = False
        for seen in (self._begun, self._done, self._decided, self._refused, self._raised):
            seen.clear()
        self._backwards = 0
        self._parameters_measured = False
        self.in_backward.step_opened()
        self._numbers = {id(reference()): number for number, reference in enumerate(self._attachment.optimizers)}

    def step_closed(self) -> None:
        """The step was closed."""
        if self._backwards:
            self.in_backward.step_closed()
            self._learned += 1
            self._fewest = min(self._backwards, self._fewest or self._backwards)

    @property
    def has_stepped(self) -> bool:
        """Whether any optimizer has stepped in the open step, or tried to."""
        return bool(self._attempted or self._begun or self._done or self._refused)

    def interrupted(self) -> None:
        """The open step ends, although not every optimizer was seen to the end of its step. One that raised counts as refused."""
        self.refused |= bool(self._begun)
        self.session.attempted += not self._attempted
        self._attempted = True

    def arm(self, planner: Planner) -> None:
        """Hang the hooks on parameters that a monitored step needs."""
        assert planner.inventory is not None
        self._groups = self._group_sizes()
        self._owned, self._unowned = planner.positions(self.optimizers())
        owners = Counter(position for positions in self._owned.values() for position in positions)
        self.session.parameters.shared = {position for position, count in owners.items() if count > 1}
        places = planner.inventory.references
        self._attachment.arm(
            places,
            [
                (places[position], Hook(self.gradient_came, position), Hook(self.gradient_accumulated, position))
                for position in planner.local_positions()
            ],
        )

    def disarm(self) -> None:
        """Take the hooks on parameters away."""
        self._attachment.disarm()

    def remove(self) -> None:
        """Take all hooks away."""
        self._attachment.remove()

    def optimizers(self) -> list[Optimizer]:
        """The optimizers that are still there, in the order in which they step."""
        return [optimizer for reference in self._attachment.optimizers if (optimizer := reference()) is not None]

    # --- what hooks tell -----------------------------------------------------------------------------------------------------

    @property
    def _leads(self) -> bool:
        """Whether steps begin and end by what the hooks see."""
        return not self.session.by_hand and not self.session.paused

    def _ensure_open(self, is_hidden: bool = True) -> None:
        """A backward pass or an optimizer is part of a step; ``is_hidden``: where it begins one, no hook has seen the forward."""
        if self._leads and not self.session.open:
            self.session.begin(self.session.next_step, is_hidden=is_hidden)
        elif self.session.is_tentative:
            self.session.confirm()

    @fenced
    def counts_eval(self) -> bool:
        """Whether a call in evaluation mode may be training: where no step has ended so far, and in loops that train in that mode.
        Elsewhere only its backward pass tells.
        """
        if not self._leads:
            return False
        self._called_in_eval = True
        if self.session.open:
            if self.session.trains_in_eval and not self._backwards:
                self.session.count_eval()  # a call in training mode that no backward pass followed has begun the step
            return self.session.counts_eval
        self.session.release()  # no backward pass has followed the call before
        self.session.is_undecided = not self.session.trains_in_eval and self.session.last_ended is not None
        return not self.session.is_undecided

    @fenced
    def forward_began(self, in_eval: bool) -> None:
        """A training forward."""
        if self.session.open and self._leads and not self._attachment.in_closure:
            if self._attempted or self._begun:
                self.interrupted()
                self.session.end()  # its end was not seen, as when a scaler is not updated
            elif self.session.is_tentative and not in_eval:
                self._called_in_eval = False
                self.session.drop()
            elif self.in_backward.any_now and not self._awaits_others():
                self._all_stepped()  # the end of the backward pass was not seen, as of one that has all in re-entrant checkpoints
        if not self.session.open and self._leads:
            self.session.release()
            self.session.begin(self.session.next_step, is_tentative=in_eval)
        self._called_in_training |= not in_eval
        self._look_for_optimizers()

    def _look_for_optimizers(self) -> None:
        if not self.optimizers():
            self.orphaned = True
            message = "the attached optimizers are gone, and no step can end any more; call detach(), then attach() the new ones"
            self.guard.complaints.add("optimizers", message)
            self.session.audit.optimizers_gone()

    @fenced
    def root_in_training(self) -> None:
        """The root is called in training mode: what it does to its buffers may have to be undone."""
        if not self.session.open or not (self._leads or self._backwards):  # it is what the step begins with
            self.session.buffers_may_move()

    def root_began(self) -> None:
        """It was the root's own hook that told of it."""
        self.session.activations.training_began()

    @fenced
    def backward_ended(self) -> None:
        """Measure gradients before clipping, since this may have been the last backward pass of the step."""
        if self.session.paused:
            return
        self._ensure_open()
        self._look_for_optimizers()
        self.session.audit.backward_ended()
        self._backwards += 1
        self.session.activations.was_trained = True
        self._backward_since = True
        if not self.in_backward.any_now and self._more_are_to_come():
            return
        self._measure_before_clip()
        if self.in_backward.any_now and not in_backward.is_nested() and not self._awaits_others():
            self._all_stepped()

    def _measure_before_clip(self) -> None:
        scaled: list[int] = []
        plain: list[int] = []
        inverse_scale: torch.Tensor | None = None
        for optimizer, positions in self._shares():
            scale = self._attachment.inverse_scale(optimizer)
            inverse_scale = inverse_scale if scale is None else scale
            if optimizer is not None and self.in_backward.knows(optimizer):
                continue  # each of its gradients was measured when it was there
            if optimizer is not None and id(optimizer) in self._done:
                # of use only if this optimizer steps again in this step; another one's backward may pass through here too
                self.session.gradients.before_clip(positions, scale, held_for=id(optimizer))
            else:
                (plain if scale is None else scaled).extend(positions)
        if inverse_scale is not None:
            self.session.note("amp_scale", inverse_scale.double().reciprocal())
        for positions, scale in ((plain, None), (scaled, inverse_scale)):
            if positions:
                self.session.gradients.before_clip(sorted(positions), scale)

    @fenced
    def gradient_complete(self, position: int) -> None:
        """Measure the gradient of one parameter before clipping: its optimizer may step before the backward pass is over. Where that
        has stepped behind an earlier one, this pass is another optimizer's turn, and its end measures what may still count.
        """
        if not self.session.paused:
            self._ensure_open()
            within = any(self.in_backward.knows(o) for o in self.optimizers() if position in self._owned.get(id(o), []))
            self.session.gradients.before_clip([position] if within else self.to_step([position]), None)

    def _more_are_to_come(self) -> bool:
        """Whether, by all that was seen so far, this was not yet the last backward pass of the step."""
        known = self._learned >= _LEARNING and len(self._attachment.optimizers) == 1
        return known and self._fewest is not None and self._backwards < self._fewest

    def scales(self, positions: Iterable[int]) -> list[tuple[list[int], torch.Tensor | None]]:
        """These positions by what their gradients have to be multiplied by at this moment."""
        wanted = set(positions)
        shares = [(sorted(wanted.intersection(own)), self._attachment.inverse_scale(o)) for o, own in self._shares()]
        return [(own, scale) for own, scale in shares if own]

    def root_called(self, module: nn.Module) -> None:
        """The root's forward begins; where that is no news, nothing happens."""
        self._attachment.root_called(module)

    def part_called(self, module: nn.Module) -> None:
        """A part of the model is called, by somebody else than the root."""
        if not self.session.open or self.session.is_tentative:
            self._attachment.forward_began(module)

    def inverse_scale(self) -> torch.Tensor | None:
        """What gradients inside of the model have to be multiplied by at this moment."""
        # of one that has yet to step, since others under the same scaler may have been unscaled, and stepped
        scales = (self._attachment.inverse_scale(optimizer) for optimizer in self.optimizers())
        return next((scale for scale in scales if scale is not None), None)

    def _shares(self) -> Iterator[tuple[Optimizer | None, list[int]]]:
        for optimizer in self.optimizers():
            yield optimizer, self._owned.get(id(optimizer), [])
        yield None, self._unowned

    @fenced
    def gradient_came(self, position: int, gradient: torch.Tensor | None) -> None:
        """One backward pass brought a gradient for the parameter at ``position``."""
        if not self.session.paused:
            self._ensure_open()
            self.session.gradients.local(position, gradient, self.inverse_scale())

    @fenced
    def gradient_accumulated(self, position: int, parameter: torch.Tensor) -> None:
        """That gradient was accumulated."""
        self.session.gradients.commit_local(position)

    @fenced
    def wrapper_began(self, optimizer: Optimizer) -> None:
        """Measure parameters before anything of a wrapper's step has changed them."""
        self._end_raised(optimizer)
        if self._steps_late(optimizer):
            return
        self._ensure_open(is_hidden=False)
        if self.session.takes_values:
            self._measure_parameters()
            self.session.parameters.before_step(self._positions_at(optimizer))

    @fenced
    def wrapper_ended(self, optimizer: Optimizer) -> None:
        """The wrapper has left the step out, as those that accumulate gradients do."""
        self.session.parameters.forget(self._positions_at(optimizer))

    @fenced
    def step_began(self, optimizer: Optimizer, has_closure: bool) -> bool:
        """Measure parameters, and gradients unless the closure has yet to compute them; whether nothing is to change."""
        self._end_raised(optimizer)
        within = self.in_backward.began(optimizer)
        if not has_closure and not within and self._steps_late(optimizer):
            return self.session.skips
        if has_closure and self._leads and not self.session.open:
            self.session.release()  # its forward is yet to come: a call in evaluation mode before was none of this step
        self._ensure_open(is_hidden=False)
        self._begun.add(id(optimizer))
        if not self.session.takes_values:
            return False
        self._note_rates(optimizer)
        if not within and self._takes_turns():
            self.session.note("by_turns", 1.0)
        if self._is_first and has_stepped(optimizer):
            self.session.note("goes_on", 1.0)
        if not self._backwards and not has_closure and not within and self._attachment.hooks_died():
            self._revive_hooks(optimizer)
        if self._backwards and self._more_are_to_come():
            reason = (
                f"this step had {self._backwards} backward passes where none had fewer than {self._fewest} before; "
                "monitor.clip_grad_norm_ measures whatever their number"
            )
            self.session.explain(GRADIENT_BEFORE_CLIP, reason)
        self.session.gradients.release(id(optimizer))
        self._measure_parameters()
        positions = self._owned.get(id(optimizer), []) if within else self._positions_at(optimizer)
        self.session.parameters.before_step(positions)
        if not has_closure:
            if within and not self.session.gradients.are_measured(positions):
                self.session.explain(GRADIENT_BEFORE_CLIP, _WITHIN)
            if within:
                self.session.gradients.after_clip(positions, self._attachment.inverse_scale(optimizer))
            else:
                self._measure_used(optimizer, self._attachment.inverse_scale(optimizer))
            skips = not within and self._skips(optimizer)
            if within and self.session.actor is not None:
                message = "optimizers step within the backward pass, before all gradients are there: nothing is done about spikes"
                self.guard.complaints.add("acting", message)
            self._done.add(id(optimizer))
            return skips
        return False

    def _skips(self, optimizer: Optimizer, refused: bool = False) -> bool:
        """Whether the step is a spike, and this optimizer is to change nothing."""
        if self.session.actor is None:
            return False
        others = [type(other).__name__ for other in self.optimizers() if id(other) in self._done and other is not optimizer]
        has_scaler = isinstance(getattr(optimizer, "found_inf", None), torch.Tensor)  # of a fused one, whose step looks at it
        left = {id(each): self._attachment.leftovers(each) for each in self.optimizers()}
        own = left.pop(id(optimizer), [])
        view = View(has_scaler, refused, " and ".join(others), self._of_no_concern(left), bool(own))
        try:
            skips = self.session.decide(view)
        except SpikeError:
            self._attempted = True
            self.session.attempted += 1
            if self._leads:
                self.session.end()
            raise
        if own and not skips:
            self._attachment.accept()
        return skips

    def _of_no_concern(self, left: Mapping[int, Sequence[torch.Tensor]]) -> frozenset[str]:
        """Names of the parameters whose gradients another optimizer has from a skipped step, or will not use, since it was refused."""
        inventory = self.session.planner.inventory
        if inventory is None:
            return frozenset()
        positions = {p for parameters in left.values() if parameters for p in inventory.positions(parameters)}
        positions |= {p for refused in self._refused for p in self._owned.get(refused, [])}
        return frozenset(inventory.names[p] for p in positions)

    @property
    def holds_scaler(self) -> bool:
        """Whether the step is skipped, which is no good step for the scaler to count."""
        return self.session.skips

    @property
    def overrules_scaler(self) -> bool:
        """Whether it is skipped since the scalers of the ranks disagreed."""
        return self.session.actor is not None and self.session.actor.overrules_scaler

    def _revive_hooks(self, optimizer: Optimizer) -> None:
        """Parameters were replaced since hooks were hung on them, and now there are gradients of which no hook was called."""
        if any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]):
            self._attachment.revive()
            reason = "the hooks on parameters had died, as in a conversion of DTensors by .to(); they are put back"
            self.session.explain(GRADIENT_BEFORE_CLIP, reason)
            message = f"{reason}; gradients before clipping are missing in step {self.session.step}"
            self.guard.complaints.add("hooks", message)

    def _measure_parameters(self) -> None:
        """All of them, once a step: before the first of several optimizers has changed anything."""
        if not self._parameters_measured:
            self._parameters_measured = True
            self.session.parameters.measure(sorted({*self._unowned, *(p for own in self._owned.values() for p in own)}))

    def _steps_late(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer belongs to the step that has just ended: named before the last one, it steps after it."""
        others_stepped = bool(self._done) and id(optimizer) not in self._done and self._backwards > 0
        late = others_stepped and not self._backward_since and self._leads and self.session.has_just_ended
        if late:
            self._attachment.move_last(optimizer)
            kind = type(optimizer).__name__
            self.guard.complaints.add(
                "order",
                f"the {kind} named earlier steps last; name optimizers in the order in which they step. From here on it counts so",
            )
        return late

    def _takes_turns(self) -> bool:
        """Whether optimizers have losses of their own, as two players have: a backward pass lies between their steps, or some pass
        brought gradients to one of them only. Parts of one model under several optimizers share every pass.
        """
        if self.in_backward.any_now:
            return False
        if self._done:
            return self._backwards > self._stepped_after
        return not self._refused and self.session.audit.receive_apart()

    def _note_rates(self, optimizer: Optimizer) -> None:
        place = self._numbers[id(optimizer)]
        for number, group in enumerate(optimizer.param_groups):
            self.session.note(f"lr/{place}/{number}", group.get("lr"))

    def _measure_used(self, optimizer: Optimizer, inverse_scale: torch.Tensor | None) -> None:
        """The gradients that the optimizer is about to use; with the last one also those that none uses, which nobody unscales."""
        self.session.gradients.after_clip(self._owned.get(id(optimizer), []), inverse_scale)
        if self._unowned and self._is_last(optimizer):
            self.session.gradients.after_clip(self._unowned, self._attachment.inverse_scale(None))

    def to_step(self, positions: Iterable[int]) -> list[int]:
        """Those of ``positions`` whose optimizers have not stepped in this step yet: later gradients of the others are not for it."""
        stepped = {position for done in self._done for position in self._owned.get(done, [])}
        return [position for position in positions if position not in stepped]

    def _positions_at(self, optimizer: Optimizer) -> list[int]:
        own = self._owned.get(id(optimizer), [])
        return sorted([*own, *self._unowned]) if self._is_last(optimizer) else own

    def _is_last(self, optimizer: Optimizer) -> bool:
        return self._attachment.optimizers[-1]() is optimizer

    @fenced
    def closure_ended(self, optimizer: Optimizer) -> bool:
        """The optimizer's gradients are there now. A closure that is called several times leaves its last ones; the first ones
        decide whether nothing is to change.
        """
        self._measure_used(optimizer, self._attachment.inverse_scale(optimizer))
        if id(optimizer) in self._decided:
            return self.session.skips
        self._decided.add(id(optimizer))
        if self.session.actor is not None and self._attachment.was_changed(optimizer):
            kind = type(optimizer).__name__
            message = f"{kind} writes to the parameters before its closure is called, so that its steps cannot be skipped"
            self.guard.complaints.add("skip:closure", f"{message}; attach the optimizer that it wraps instead")
            return False
        return self._skips(optimizer)

    @fenced
    def closure_raised(self, optimizer: Optimizer) -> None:
        """The step of this optimizer is an attempt that was not applied; it is over when the next one begins."""
        self._raised.add(id(optimizer))

    def _end_raised(self, optimizer: Optimizer) -> None:
        """End the open step if this optimizer's closure raised in it: no forward has come since, for that is in the next closure."""
        if id(optimizer) in self._raised and self._leads:
            self.interrupted()
            self.session.end()

    @fenced
    def step_ended(self, optimizer: Optimizer, found_inf: torch.Tensor | None) -> None:
        """Measure the update; the step ends with the last optimizer, under a scaler with its update."""
        self._begun.discard(id(optimizer))
        self._raised.discard(id(optimizer))
        self._done.add(id(optimizer))
        self._is_first = False
        self._stepped_after = self._backwards
        if in_backward.is_running():
            self.session.parameters.after_step(self._owned.get(id(optimizer), []), optimizer)
            return  # the step ends with the backward pass, or with an optimizer behind it
        self.session.parameters.after_step(self._owned.get(id(optimizer), []), optimizer)
        if found_inf is not None:
            self.session.note_refusal(found_inf)
        self._attempt_over(optimizer)

    @fenced
    def step_refused(self, optimizer: Optimizer) -> None:
        """The scaler found infinite gradients: they are measured all the same, and the step is labelled not applied."""
        self._ensure_open(is_hidden=False)
        self.refused = True
        self._note_rates(optimizer)
        self._measure_parameters()
        self._measure_used(optimizer, None)
        self._skips(optimizer, refused=True)  # nothing is left to skip, but other ranks may wait
        self._refused.add(id(optimizer))
        self._attempt_over(optimizer)

    def _attempt_over(self, optimizer: Optimizer) -> None:
        if not self._awaits_others() if self.in_backward.any_now else self._is_last(optimizer):
            self._all_stepped()

    def _awaits_others(self) -> bool:
        """Whether another optimizer is to step behind the backward pass, within which some have stepped."""
        return self.in_backward.awaited(self.optimizers(), self._done)

    def _all_stepped(self) -> None:
        if self.in_backward.any_now:
            self.session.gradients.after_clip(self._unowned, self._attachment.inverse_scale(None))
        if self.session.open and not self._attempted:
            self.session.attempt_over(self.refused)
        self._attempted, self._backward_since = True, False
        if self._leads and (self._called_in_training or self._called_in_eval):
            trains_in_eval = self.session.trains_in_eval or not self._called_in_training
            self.session.trains_in_eval = self._called_in_eval and trains_in_eval
        self._called_in_training = self._called_in_eval = False
        if self._leads and not self._attachment.in_scaler_step:
            self.session.end()

    @fenced
    def scaler_updated(self) -> None:
        """The scaler ends the attempt."""
        if self.session.open and self._attempted and self._leads:
            self.session.end()

    @fenced
    def scale_mistaken(self, reason: str, scaler: torch.amp.GradScaler | None) -> None:
        """The gradients measured so far in this step were divided by a wrong scale, or by none: drop them."""
        if self.session.scaler is None:
            self.session.scaler = scaler
        self.session.gradients.drop_scaled(reason)
        self.session.activations.drop_scaled(reason)
        self.guard.complaints.add("scaler", f"{reason}; gradients before clipping are missing in step {self.session.step}")
