"""What a step is told while it is open, and for a while after: by the hooks, and by the loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..capture.modules.source import ModuleSource
from ..capture.modules.structure import copied
from ..core.fence import Fence, fenced
from ..core.keys import Key
from ..core.torch_modes import outside_dispatch_modes
from ..monitor.pending_queue import Flights
from ..plugins.clipping.adaptive import Told
from ..plugins.flight_recorder import Recorder
from ..step.buffer import StepBuffer
from ..step.exchange_policy import ExchangePolicy
from ..step.pending_step import PendingStep
from ..step.reduction import Aggregation
from .pipeline.ledger import Ledger


class StepValues:
    """Facts, values and tags for a step, and which step they belong to. :class:`Session` opens and closes steps."""

    guard: Fence
    ledger: Ledger
    recorder: Recorder
    activations: ModuleSource
    step: int | None
    open: bool
    _buffer: StepBuffer | None
    is_tentative: bool
    is_undecided: bool
    _is_hidden: bool
    _first_keys: frozenset[Key]
    _undecided_tags: dict[str, Any]
    _early: StepBuffer | None
    _unseen: StepBuffer | None
    _records_only: bool
    _ended: int | None
    _flights: Flights
    together: ExchangePolicy
    _tags: dict[str, Any]
    _told_ahead: set[str]
    _unseen_refusals: Tensor | None
    _is_away: bool

    # --- by hooks --------------------------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """Whether nothing is measured for the moment."""
        return self.activations.paused

    @property
    def listens(self) -> bool:
        """Whether a value from inside a forward counts."""
        if self.paused or not self.activations.in_training:
            return False
        return self.takes_values and not self._records_only if self.open else self.may_be_forward

    @property
    def may_be_forward(self) -> bool:
        """Whether, though no step is open, this may be the forward of the next one."""
        return False

    @property
    def takes_values(self) -> bool:
        """Whether a step is open that is monitored, or recorded in case of a spike."""
        return self.open and self._buffer is not None

    def note(self, name: str, value: Any) -> None:
        """A fact about the step in flight, a number or a 0-d tensor, for the context of its record."""
        if self.open and self._buffer is not None:
            if isinstance(value, Tensor) and value.numel() == 1:
                self._buffer.noted[name] = value.detach().clone()
            elif isinstance(value, (int, float)):
                self._buffer.noted[name] = value

    def release(self) -> None:
        """No backward pass has followed the call in evaluation mode so far: what was logged since belongs to the step before."""
        if not self.is_undecided:
            return
        early, self._early = self._early, None
        tags, self._undecided_tags = self._undecided_tags, {}
        if early is not None:
            self._add_late(early)
        if tags:
            self._tag_late(tags)

    def explain(self, source: str, reason: str) -> None:
        """Why ``source`` has no values in the step in flight."""
        if self._buffer is not None:
            self._buffer.absent[source, ""] = reason

    def note_refusal(self, found_inf: Tensor) -> None:
        """A fused optimizer did not apply the step where ``found_inf`` is not zero: a fact that stays on the device."""
        refused = (found_inf > 0).double()
        if self._buffer is not None and self.open:
            self._buffer.noted["found_inf"] = refused + self._buffer.noted.get("found_inf", 0.0)
        if self._buffer is None or not self.open or self._records_only:
            self._unseen_refusals = refused if self._unseen_refusals is None else self._unseen_refusals + refused
        elif self._unseen_refusals is not None:
            self._buffer.noted["unseen_refusals"], self._unseen_refusals = self._unseen_refusals, None

    # --- by the loop -----------------------------------------------------------------------------------------------------------

    @fenced
    def capture_activation(self, name: str, activations: Any) -> None:
        """Measure a value that is no module's output."""
        self.activations.capture(name, activations)

    @fenced
    def record_attention(self, name: str, named: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> None:
        """Measure one call of attention, unless it was seen by itself."""
        with outside_dispatch_modes():
            self.activations.attention.report(name, named, {"query": named["query"], "key": named["key"], **arguments})

    def log(self, key: Key, value: Any, aggregation: Aggregation, reducer: str = "", is_measured: bool = False) -> None:
        """A value for the step in flight or, between its end and the next forward, for the step that just ended; merged over
        ranks by ``reducer``. ``is_measured``: it is part of a training forward, and goes where that goes.
        """
        if self.guard.inert:
            return
        if self._is_away:
            text = "/".join(filter(None, key))
            self.guard.complaints.add(f"away:{text}", f"{text} was logged while the monitor is detached, and is dropped")
            return
        self.together.reduces |= bool(reducer)
        is_late = self.together.exchange.shares_values and not self.open and not self._is_ahead(key)
        if is_late and (reducer or self.ledger.judges.watches(key)):
            text = "/".join(filter(None, key))
            self.guard.complaints.add(
                f"late:{text}",
                f"{text} was logged after optimizer.step(), when the ranks had told each other their values: it is this rank's "
                "own, and no detector judges it; log it before",
            )
        try:
            with outside_dispatch_modes():
                buffer = self._log(key, value, aggregation, is_measured)
                if reducer and buffer is not None:
                    buffer.share(key, reducer)
        except (TypeError, ValueError, RuntimeError) as error:
            text = "/".join(part for part in key if part)
            self._absent()[key.source, key.name] = str(error)
            self.guard.complaints.add(f"log:{text}", f"a value of {text} is lost", error)

    def _log(self, key: Key, value: Any, aggregation: Aggregation, is_measured: bool) -> StepBuffer | None:
        """Where the value went; None where that step is not monitored, or has ended."""
        if self._buffer is not None and (is_measured or not self.is_tentative):
            buffer = self._buffer
        elif is_measured and not self.open:
            buffer = self._unseen = self._unseen or StepBuffer(-1, self.guard.complaints)
        elif self._is_ahead(key):
            buffer = self._early = self._early or StepBuffer(-1, self.guard.complaints)
        elif self.open:
            return None
        else:
            late = StepBuffer(-1, self.guard.complaints)
            late.merge_value(key, value, aggregation)
            self._add_late(late)
            return None
        buffer.merge_value(key, value, aggregation)
        return buffer

    def _is_ahead(self, key: Key) -> bool:
        """Whether a value that is logged now belongs to the step to come, as far as is known."""
        if self.open:
            return self.is_tentative
        if self.step is None or self.is_undecided:
            return True
        # what came before the first backward pass tells on which side of a forward that is not seen the loop logs
        return self._is_hidden and (key in self._first_keys or self._early is not None)

    def _add_late(self, late: StepBuffer) -> None:
        """Values for the step that ended last."""
        flight = self._in_flight
        if (recorded := self.recorder.open_buffer(self._ended)) is not None:
            recorded.absorb(late)
        elif flight is None:
            self.ledger.add(late)
        else:
            self._flights.add(flight, late)

    @property
    def _in_flight(self) -> PendingStep | None:
        """The step that ended last, while its values are on their way."""
        return self._flights.newest(self._ended)

    def _absent(self) -> dict[tuple[str, str], str]:
        """Where reasons are kept for the step that a value logged now would belong to."""
        if self._buffer is not None:
            return self._buffer.absent
        flight = self._in_flight
        return self.ledger.absent if flight is None else flight.departure.buffer.absent

    def tell(self, told: Mapping[Key, Told]) -> None:
        """Values of the step in flight that the device has; those that need not exist replace each other, the rest adds up."""
        if not (self.open and self._buffer is not None):
            return
        for key, one in told.items():
            if one.there is None:
                self._buffer.merge_value(key, one.value, "sum")
            else:
                self._buffer.put_where(key, one.value, one.there)

    def has_just_monitored(self, step: int) -> bool:
        """Whether ``step`` is the last one that was monitored, and its values are on their way."""
        return self._flights.newest(step) is not None

    @property
    def has_just_ended(self) -> bool:
        """Whether no step is open, and the last one was monitored."""
        return not self.open and (self.ledger.last is not None or self._in_flight is not None)

    def tag(self, tags: Mapping[str, Any]) -> None:
        """Facts for the run directory about the step that a scalar logged now would belong to; between two steps about the coming
        one, if that is how they were given at first.
        """
        if self._is_away:
            return
        if self.step is None:
            self._told_ahead |= tags.keys()
        tags = {name: copied(value) for name, value in tags.items()}  # loops fill the same list or tensor again
        late = {} if self.open else {name: value for name, value in tags.items() if name not in self._told_ahead}
        self._tags.update((name, value) for name, value in tags.items() if name not in late)
        if self.is_undecided:
            self._undecided_tags.update(late)
        elif late:
            self._tag_late(late)

    def _tag_late(self, late: Mapping[str, Any]) -> None:
        """Facts about the step that ended last."""
        if self.recorder.tag(self._ended, late):
            return
        if (flight := self._in_flight) is not None:
            flight.tags.update(late)
        else:
            self.ledger.tag(late)
