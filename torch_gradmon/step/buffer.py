"""The values of the current step, on the device.

Everything that hooks measure is stored here as device tensors; micro-batches merge here; :meth:`StepBuffer.start_readback` sends all of it
to the host at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

import torch
from torch import Tensor

from ..core.errors import WarningLog
from ..core.keys import MODULE_SOURCES, PARAMETER, PARAMETER_DIFFERENCE, PARAMETER_SOURCES, RCC_SOURCES, Key
from ..core.moments import merge_by_group
from ..core.records import StatsTable
from .device_transfer import DeviceToHostCopy
from .reduction import finished
from .row_store import RowStore
from .stream_join import StreamJoin
from .value_store import SHARED_SOURCES, ValueStore
from .worst_rows import Identities, largest_of

#: Sources that are measured before the first optimizer of a step changes anything.
_FIRST = frozenset({PARAMETER, PARAMETER_DIFFERENCE})
#: Facts that count all optimizers of a step.
_ADDED = frozenset({"edited", "found_inf", "unseen_refusals"})
#: A fact: the difference between the steps of ranks that have exchanged values.
SKEW = "ranks/skew"


class StepBuffer(RowStore, ValueStore):
    """What was measured in one step: rows of statistics, values, and facts.

    Args:
        step: its number.
        complaints: gets failures of aggregation functions.
    """

    def __init__(self, step: int, complaints: WarningLog) -> None:
        RowStore.__init__(self)
        ValueStore.__init__(self)
        self.step = step
        self.noted: dict[str, Tensor | float] = {}  # facts about the step
        self.extras: dict[str, Tensor] = {}  # small tensors for plugins, by a name that begins with theirs
        self.rows: list[tuple[Identities, int]] = []  # logged ones, call by call; their losses are extras
        self._are_rows_over = False  # the next ones are those of another evaluation
        self.thawed: set[str] = set()  # parameters frozen only for a part of the step
        self.frozen: set[str] = set()  # parameters frozen since the step began
        self.used: set[str] = set()  # parameters of the optimizers that stepped, with or without a gradient
        self.absent: dict[tuple[str, str], str] = {}
        self.refused: dict[str, str] = {}
        self.rng: dict[str, Tensor] = {}  # states of the random generators at its beginning
        self.unshown: set[tuple[str, str]] = set()  # source and name of rows for the run directory only
        self._complaints = complaints
        self._streams: StreamJoin | None = None

    def join_streams(self) -> None:
        """Whatever the stream that a value was computed on, the current one may read it from now on. The host does not wait."""
        if self._streams is not None:
            self._streams.join(self._on_device)

    def _note_stream(self, device: torch.device) -> None:
        if self._streams is None:
            self._streams = StreamJoin()
        self._streams.note(device)

    def _on_device(self) -> Iterator[Tensor]:
        yield from self._blocks
        yield from chain(*self._parts.values(), *(pending.parts for pending in self._pending.values()))
        yield from (values for _, values in self._vectors)
        yield from self._counts.values()
        yield from (sums for _, sums in self._contributions.values())
        yield from (fact for fact in self.noted.values() if isinstance(fact, Tensor))
        yield from self.extras.values()

    def clear(self, source: str, names: Iterable[str] | None = None) -> None:
        """Remove the values of ``source``, or of some of its tensors."""
        if self._dropped is not None:
            names = None if names is None else frozenset(names)
            self._dropped.update([(source, None)] if names is None else ((source, name) for name in names))
        if self.has_rows(source) or self._pending or self._vectors:
            gone = None if names is None else frozenset(names)
            self.clear_rows(source, gone)
            self.clear_values(source, gone)

    def refuse(self, source: str, name: str, reason: str) -> None:
        """Mark a tensor as not measurable, which also prevents sums over the whole source."""
        self.absent[source, name] = reason
        self.refused[source] = f"{name} could not be measured: {reason}"

    def refuse_all(self, source: str, reason: str) -> None:
        """Mark all of ``source`` as missing."""
        self.clear(source)
        self.absent[source, ""] = self.refused[source] = reason

    def withhold(self, key: Key, reason: str) -> None:
        """Remove a value that is not that of all ranks."""
        super().withhold(key, reason)
        self.absent[key.source, "/".join(filter(None, key[1:]))] = reason

    def withhold_values(self, watches: Callable[[Key], bool], reason: str) -> None:
        """Remove this rank's values of its own batches, which those of other ranks were not merged with."""
        sources = {source for source, _ in self.merged_rows_of_calls()}
        for source in sources | {key.source for key in self._pending if key.source in SHARED_SOURCES}:
            self.refuse_all(source, reason)
        for key in self.shared_values(watches):
            self.withhold(key, reason)

    def out_of_step(self) -> None:
        """Warn that ranks have exchanged values of different steps, which are useless."""
        reason = "the ranks are not in the same step: on one of them a step did not end, or ended twice"
        self._complaints.add("ranks:skew", f"values from step {self.step} on are dropped, because {reason}")
        self.absent.update(((source, ""), reason) for source in (*PARAMETER_SOURCES, *MODULE_SOURCES, *RCC_SOURCES))

    def log_rows(self, ids: Identities, losses: Tensor) -> None:
        """The losses of rows; the largest are kept."""
        if self._are_rows_over:
            for call in range(len(self.rows)):
                del self.extras[f"rows/{call}"]
            self.rows, self._are_rows_over = [], False
        self.extras[f"rows/{len(self.rows)}"] = largest_of(losses, ids)
        # a list may be filled anew before the numbers are on the host
        self.rows.append((ids if isinstance(ids, Tensor) else list(ids), len(losses)))

    def end_rows(self) -> None:
        """All rows of the batch are logged; where a closure is evaluated again, they come anew."""
        self._are_rows_over = True

    def absorb(self, other: StepBuffer) -> None:
        """Merge the values of :meth:`merge_rows` and :meth:`merge_value` in ``other``."""
        other.join_streams()
        self.absorb_rows(other)
        self.absorb_values(other)
        self.absent.update(other.absent)
        self.refused.update(other.refused)

    def take_over(self, other: StepBuffer, source: str, names: Iterable[str]) -> None:
        """Replace the values of these tensors by those in ``other``."""
        names = list(names)
        other.join_streams()
        self.clear(source, names)
        self.take_rows(other, source, names)
        self.take_values(other, source, set(names))
        self.absent.update({where: reason for where, reason in other.absent.items() if where[0] == source})

    def set_aside(self) -> StepBuffer:
        """A new buffer with all that was measured so far. This one begins anew."""
        earlier = StepBuffer(self.step, self._complaints)
        earlier._take_all(self)
        self.begin_rows_anew()
        self.begin_values_anew()
        self._streams, self.noted, self.extras, self.rows, self.rng, self._are_rows_over = None, {}, {}, [], {}, False
        self.thawed, self.frozen, self.used, self.unshown = set(), set(), set(), set(self.unshown)
        self.absent, self.refused = {}, {}
        return earlier

    def _take_all(self, other: StepBuffer) -> None:
        self.take_all_rows(other)
        self.take_all_values(other)
        self._streams, self.noted, self.extras, self.rows = other._streams, other.noted, other.extras, other.rows
        self.thawed, self.frozen, self.used, self.unshown = other.thawed, other.frozen, other.used, other.unshown
        self.rng, self.absent, self.refused = other.rng, other.absent, other.refused

    def begins(self, rng: dict[str, Tensor]) -> None:
        """What is measured from now on began with these states of the random generators."""
        self.rng = rng

    def renumber(self, step: int) -> None:
        """The values are of this step."""
        self.step = step

    def rejoin(self, earlier: StepBuffer) -> None:
        """What was set aside is of the same step: merge as if it never had been. Of parameters the first values count, of what an
        optimizer's step gives the last ones.
        """
        earlier.join_streams()
        self.take_back_values(earlier, _FIRST, self._is_dropped)
        self.take_back_rows(earlier, _FIRST)
        added = {name: earlier.noted[name] + fact for name, fact in self.noted.items() if name in _ADDED & earlier.noted.keys()}
        self.noted = {**earlier.noted, **self.noted, **added}
        calls = [*earlier.rows, *self.rows]
        losses = [buffer.extras.pop(f"rows/{call}") for buffer in (earlier, self) for call in range(len(buffer.rows))]
        self.extras = {**earlier.extras, **self.extras, **{f"rows/{call}": each for call, each in enumerate(losses)}}
        self.rows, self.rng = calls, earlier.rng
        self.thawed |= earlier.thawed
        self.frozen |= earlier.frozen
        self.used |= earlier.used
        self.unshown |= earlier.unshown
        self.absent, self.refused = {**earlier.absent, **self.absent}, {**earlier.refused, **self.refused}

    def scalars(self) -> StepBuffer:
        """A new buffer that continues with the logged values."""
        more = StepBuffer(self.step, self._complaints)
        more.share_logged(self)
        return more

    def part(self, sources: Iterable[str]) -> StepBuffer:
        """A new buffer with the stored rows of ``sources`` and the logged values. This one is unchanged."""
        self.join_streams()
        wanted, found = set(sources), StepBuffer(self.step, self._complaints)
        found.share_rows(self, wanted)
        found.share_logged(self, reducers=True)
        found.refused.update({source: reason for source, reason in self.refused.items() if source in wanted})
        return found

    def start_readback(self) -> PendingReadback:
        """Start the copy to the host, after which nothing may be stored. Does not synchronise."""
        if self._streams is not None:
            self.join_streams()
        # merged on the host, which is cheaper than one launch for each
        self._parts = {where: parts for where, parts in self._parts.items() if parts}
        parts = [part for parts in self._parts.values() for part in parts]
        reduced = self._reduced()
        noted = {name: fact for name, fact in self.noted.items() if isinstance(fact, Tensor)}
        vectors = [values for _, values in self._vectors]
        facts, extras = noted.values(), self.extras.values()
        arrival = DeviceToHostCopy([*self._blocks, *parts, *reduced.values(), *facts, *self._counts.values(), *vectors, *extras])
        merged = [(where, len(parts)) for where, parts in self._parts.items()]
        keys = [keys for keys, _ in self._vectors]
        return PendingReadback(self, arrival, merged, list(reduced), set(noted), list(self._counts), keys)

    def flush(self) -> tuple[dict[str, StatsTable], dict[Key, float], dict[str, float]]:
        """:meth:`start_readback`, then wait: see :meth:`PendingReadback.land`."""
        return self.start_readback().land()

    def _reduced(self) -> dict[Key, Tensor]:
        """Final scalars; several for a key whose aggregation returned a dict."""
        reduced: dict[Key, Tensor] = {}
        for key, pending in self._pending.items():
            try:
                reduced.update(finished(key, pending))
            except Exception as error:
                name = getattr(pending.aggregation, "__name__", repr(pending.aggregation))
                self._complaints.add(
                    f"aggregation:{key}", f"the aggregation {name} of {'/'.join(filter(None, key))} failed", error
                )
                self.absent[key.source, key.name] = f"its aggregation function raised {type(error).__name__}: {error}"
        return reduced


@dataclass
class PendingReadback:
    """The values of a step on their way to the host.

    Attributes:
        buffer: their source.
        arrival: the copy.
        merged: tensors whose rows are yet to be merged, and how many.
        reduced: the keys of values.
        noted: the names of facts that are tensors.
        counted: the keys of values that may not exist.
        vectors: the keys of values that came together; None for one that was removed.
        extras: what plugins have sent along, once the copy has landed: float64.
    """

    buffer: StepBuffer
    arrival: DeviceToHostCopy
    merged: list[tuple[tuple[str, str], int]]
    reduced: list[Key]
    noted: set[str]
    counted: list[Key]
    vectors: list[list[Key | None]]
    extras: dict[str, Tensor] = field(default_factory=dict)

    def land(self) -> tuple[dict[str, StatsTable], dict[Key, float], dict[str, float]]:
        """Tables by source, custom values and facts, on the host. Waits for the copy, once per device."""
        host = iter(self.arrival.land())
        blocks = list(islice(host, self.buffer.block_count))
        counts = [count for _, count in self.merged]
        parts = list(islice(host, sum(counts)))
        if parts:
            rows = torch.stack(parts)
            owners = [number for number, count in enumerate(counts) for _ in range(count)]
            blocks.append(rows if len(parts) == len(counts) else merge_by_group(rows, owners, len(counts)))
        tables = self.buffer.collect(blocks, [where for where, _ in self.merged])
        values = {key: float(next(host)) for key in self.reduced}
        facts = {name: float(next(host) if name in self.noted else fact) for name, fact in self.buffer.noted.items()}
        if facts.pop(SKEW, 0.0):
            self.buffer.out_of_step()
            return {}, {}, facts
        contributed = {key: float(next(host)) for key in self.counted}
        values = {key: value for key, value in values.items() if contributed.get(key, 1.0)}
        for keys in self.vectors:
            values.update((key, value) for key, value in zip(keys, next(host).tolist(), strict=True) if key is not None)
        self.extras = dict(zip(self.buffer.extras, host, strict=True))
        return tables, values, facts
