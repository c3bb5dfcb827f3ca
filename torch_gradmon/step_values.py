"""What a step is told while it is open, and for a while after: by the hooks, and by the loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .adaptive_clipping import Told
from .capture.activations import ActivationCapture
from .capture.outputs import copied
from .flight import Flight, Flights
from .guard import Guard, guarded
from .ledger import Ledger
from .merging import Aggregation
from .modes import unseen
from .names import Key
from .recorder import Recorder
from .step import StepBuffer
from .step_exchange import StepExchange


class StepValues:
    """Facts, values and tags for a step, and which step they belong to. :class:`Session` opens and closes steps."""

    guard: Guard
    ledger: Ledger
    recorder: Recorder
    activations: ActivationCapture
    step: int | None
    open: bool
    _buffer: StepBuffer | None
    _early: StepBuffer | None
    _records_only: bool
    _ended: int | None
    _flights: Flights
    together: StepExchange
    _tags: dict[str, Any]
    _told_ahead: set[str]
    _unseen_refusals: Tensor | None

    # --- by hooks --------------------------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """Whether nothing is measured for the moment."""
        return self.activations.paused

    @property
    def listens(self) -> bool:
        """Whether a value from inside a forward counts."""
        return self.takes_values and not self._records_only and not self.paused and self.activations.in_training

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

    def forward_unseen(self) -> None:
        """A backward pass came without a forward of the root module: values logged between the two went to the step before."""
        flight = self._in_flight
        if self.ledger.has_late_values or (flight is not None and flight.late is not None):
            self.guard.complaints.add(
                "forward",
                "the model's forward is not seen (it is compiled inside, or called by its parts), so that values logged between "
                "forward and backward count for the step before; log them after backward() or begin steps with begin_step()",
            )

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

    @guarded
    def capture_activation(self, name: str, activations: Any) -> None:
        """Measure a value that is no module's output."""
        self.activations.capture(name, activations)

    @guarded
    def record_attention(self, name: str, named: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> None:
        """Measure one call of attention, unless it was seen by itself."""
        with unseen():
            self.activations.attention.tell(name, named, {"query": named["query"], "key": named["key"], **arguments})

    def log(self, key: Key, value: Any, aggregation: Aggregation, reducer: str = "") -> None:
        """A value for the step in flight or, between its end and the next forward, for the step that just ended; merged over
        ranks by ``reducer``.
        """
        if self.guard.inert:
            return
        self.together.reduces |= bool(reducer)
        is_late = self.together.exchange.shares_values and not self.open and self.step is not None
        if is_late and (reducer or self.ledger.judges.watches(key)):
            text = "/".join(filter(None, key))
            self.guard.complaints.add(
                f"late:{text}",
                f"{text} was logged after optimizer.step(), when the ranks had told each other their values: it is this rank's "
                "own, and no detector judges it; log it before",
            )
        try:
            with unseen():
                self._log(key, value, aggregation)
                if reducer and (buffer := self._buffer or self._early) is not None:
                    buffer.share(key, reducer)
        except (TypeError, ValueError, RuntimeError) as error:
            text = "/".join(part for part in key if part)
            self._absent()[key.source, key.name] = str(error)
            self.guard.complaints.add(f"log:{text}", f"a value of {text} is lost", error)

    def _log(self, key: Key, value: Any, aggregation: Aggregation) -> None:
        if self._buffer is not None:
            self._buffer.merge_value(key, value, aggregation)
        elif self.step is None:
            if self._early is None:
                self._early = StepBuffer(-1, self.guard.complaints)
            self._early.merge_value(key, value, aggregation)
        elif not self.open:
            flight = self._in_flight
            if (recorded := self.recorder.open_buffer(self._ended)) is not None:
                recorded.merge_value(key, value, aggregation)
            elif flight is None:
                self.ledger.add(key, value, aggregation)
            else:
                self._flights.add(flight, key, value, aggregation)

    @property
    def _in_flight(self) -> Flight | None:
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
        if self.step is None:
            self._told_ahead |= tags.keys()
        tags = {name: copied(value) for name, value in tags.items()}  # loops fill the same list or tensor again
        late = {} if self.open else {name: value for name, value in tags.items() if name not in self._told_ahead}
        self._tags.update((name, value) for name, value in tags.items() if name not in late)
        if not late:
            return
        if self.recorder.tag(self._ended, late):
            return
        if (flight := self._in_flight) is not None:
            flight.tags.update(late)
        else:
            self.ledger.tag(late)
