"""The exchange between ranks at the end of a step.

Rows of sharded tensors are in the plan. Which modules are called and which values are logged is known only at the end of a step, and may
differ between ranks; all ranks agree on a list of them. A rank with something new marks that in the exchange; then all ranks gather what
is new, and exchange it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.errors import WarningLog
from ..core.keys import PARAMETER_SOURCES, Key
from ..core.moments import ALL_COLUMNS, Column, identity
from ..statistics.tensor_access import accumulator_dtype
from .buffer import SKEW, StepBuffer
from .consensus import Agreement, named
from .ranks import Ranks, digest_of

#: An item that all ranks exchange: a tensor by source and name, or a value by source, name, metric and reducer.
Entry = tuple[str, ...]
#: Columns of the exchange's own row that hold the broadcast slot.
_SLOT = [Column.COUNT, Column.ABS_SUM, Column.SQUARE_SUM, Column.NEAR_ZERO, Column.NONFINITE]
#: The empty broadcast slot.
EMPTY_SLOT: tuple[float, ...] = (0.0,) * len(_SLOT)
#: By source, the names of tensors whose rows are exchanged, and the columns.
Tensors = Mapping[str, tuple[Sequence[str], frozenset[Column]]]

#: Parts of what ranks have in common: the names of tensors, the metrics, and what else has to be equal for any exchange.
NAMES, METRICS, CADENCE = "names of parameters", "metrics", "every="

_ALONE = {
    "tensors": (
        "sharded tensors cannot be reported, and activations and logged values of this rank are of its own batches; create the monitor on "
        "every rank, and if a pipeline's stages differ, pass the ranks of this stage as process_group="
    ),
    "stages": "each rank has to watch its stages of the pipeline",
    "decisions": (
        "this rank does not act on spikes, since not every rank would act in the same way; pass on_spike= and the same detectors on every "
        "rank"
    ),
    "values": "activations and logged values of this rank are of its own batches; create the monitor on every rank",
}
#: What ranks may differ in and still exchange the rest.
_PARTIAL = {"tensors": {NAMES, METRICS}}


class RankExchange:
    """The exchange of a step. Every rank enters it with the same rows, whether or not it has values for them.

    Args:
        ranks: that take part.
        complaints: gets a warning if some are missing.

    Attributes:
        takes_place: whether there was any exchange.
        shares_values: whether ranks have exchanged values of their batches.
    """

    def __init__(self, ranks: Ranks, complaints: WarningLog) -> None:
        self.ranks = ranks
        self._complaints = complaints
        self._agreements: dict[str, Agreement] = {}
        self._has_told: dict[str, bool] = {}  # whether all take part, once it is known
        self._common: list[str] | None = None  # names that all ranks have, where some have others
        self._entries: list[Entry] = []
        self.takes_place = self.shares_values = False
        self._broadcast_slot = self._received_slot = EMPTY_SLOT

    def run(
        self,
        buffer: StepBuffer,
        tensors: Tensors,
        shares_values: bool,
        watches: Callable[[Key], bool],
        may_extend: bool = True,
        asked: str = "",
        parts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Merge the values in ``buffer`` with those of the other ranks. A no-op without other ranks or anything to merge.

        Args:
            buffer: of the step that ends.
            tensors: rows that all ranks expect.
            shares_values: whether to merge activations, and values that were logged to be shared.
            watches: whether a logged value is shared in any case, as its mean, because a detector uses it.
            may_extend: whether the list of shared values may grow in this step, which synchronises with the device.
            asked: what all ranks are asked to take part in; by default tensors or values.
            parts: what ranks must have in common for that.
        """
        if not (tensors or shares_values) or self.ranks.count == 1:
            return
        what = asked or ("tensors" if tensors else "values")
        if not self.all_take_part(what, parts, buffer.step):
            why = self.why_not(what)
            for source in tensors:
                buffer.refuse_all(source, why)
            if shares_values and not self._agreement(what).is_alone:  # else it is said that values are of this rank's batches
                buffer.withhold_values(watches, why)
            return
        tensors = self._common_of(buffer, tensors)
        buffer.join_streams()
        columns = ALL_COLUMNS if shares_values else frozenset[Column]().union(*(of for _, of in tensors.values()))
        mine = self._shared(buffer, watches) if shares_values else {}
        has_new = identity(int(shares_values))
        has_new[:, Column.SUM] = float(not mine.keys() <= set(self._entries))
        has_new[:, [Column.MIN, Column.MAX]] = float(buffer.step)
        if may_extend and self._broadcast_slot is not EMPTY_SLOT:
            has_new[:, _SLOT] = torch.tensor(self._broadcast_slot, dtype=torch.float64, device="cpu")
        known = [buffer.rows_or_none(source, names) for source, (names, _) in tensors.items()]
        merged = self._merged([has_new, *known, *_rows(mine, self._entries)], columns)
        start = len(has_new)
        for source, (names, of) in tensors.items():
            buffer.put_exchanged(source, names, merged[start : start + len(names)], of)
            start += len(names)
        _take(buffer, self._entries, merged[start:])
        self.shares_values |= shares_values
        self.takes_place = True
        if shares_values:
            buffer.noted[SKEW] = merged[0, Column.MAX] - merged[0, Column.MIN]
        if shares_values and may_extend:
            received = merged[0].tolist()
            self._received_slot = tuple(received[column] for column in _SLOT)
            self._broadcast_slot = EMPTY_SLOT
            if received[Column.SUM] > 0:
                self._extend(buffer, mine)

    def broadcast(self, slot: tuple[float, ...]) -> None:
        """Send five numbers with the next exchange of a monitored step. They are added up, so at most one rank may send any."""
        self._broadcast_slot = slot

    @property
    def has_received(self) -> bool:
        """Whether the last exchange brought numbers that were not taken yet."""
        return self._received_slot is not EMPTY_SLOT

    def take_received(self) -> tuple[float, ...]:
        """The numbers of the last exchange, the same on all ranks."""
        received, self._received_slot = self._received_slot, EMPTY_SLOT
        return received

    def _extend(self, buffer: StepBuffer, mine: Mapping[Entry, Tensor]) -> None:
        """Exchange new entries of any rank, and add them to the list."""
        known = set(self._entries)
        gathered = self.ranks.gathered([entry for entry in mine if entry not in known])
        new = sorted({tuple(entry) for entries in gathered for entry in entries})
        self._entries += new
        _take(buffer, new, self._merged(_rows(mine, new), ALL_COLUMNS))

    def _merged(self, rows: Sequence[Tensor], columns: frozenset[Column]) -> Tensor:
        return self.ranks.merged(
            torch.cat([some.to(self.ranks.device, accumulator_dtype(self.ranks.device)) for some in rows]), columns
        )

    def all_take_part(self, what: str, parts: Callable[[], Mapping[str, Any]] = dict, step: int | None = None) -> bool:
        """Whether every rank exchanges ``"tensors"``, ``"values"`` or ``"decisions"``. Asked the first time, a rank without peers waits.

        Where some ranks have other names or metrics they still do, of what all have in common.

        Args:
            what: is exchanged.
            parts: what ranks must have in common, as JSON.
            step: the number of the step in flight, in which late ranks may join; None where there is no step.
        """
        if self.ranks.count == 1:
            return True
        agreement = self._agreement(what)
        if agreement.is_met:
            return self._has_told[what]
        is_met = agreement.ask(lambda: {part: digest_of(value) for part, value in parts().items()}, step)
        if what == "tensors":
            self.ranks.be_alone(not self.are_equal(what))
        if not is_met and agreement.is_open:
            return False
        takes_part = is_met and agreement.differing.keys() <= _PARTIAL.get(what, set())
        if takes_part and NAMES in agreement.differing:
            everybody = [{tuple(each) for each in found} for found in self.ranks.gathered(parts().get(NAMES, []))]
            self._common = sorted(each[0] for each in set.intersection(*everybody))
        if is_met or what not in self._has_told:
            self._has_told[what] = takes_part
            if not takes_part or agreement.differing:
                words = (
                    "tensors are reported as far as all ranks have them and measure them alike" if takes_part else _ALONE[what]
                )
                self._complaints.add(f"ranks:{what}", f"{self.why_not(what)}; {words}")
        return takes_part

    def end(self) -> None:
        """The run ends on this rank. Where ranks were absent, all are asked anew the next time."""
        for what in [what for what, agreement in self._agreements.items() if not agreement.is_met]:
            self._agreements.pop(what).end()
            self._has_told.pop(what, None)

    def are_equal(self, what: str) -> bool:
        """Whether it is known that every rank takes part, and has all of it in common."""
        return self.ranks.count == 1 or (self._agreement(what).is_met and not self._agreement(what).differing)

    def is_refused(self, what: str) -> bool:
        """Whether it is known that not every rank takes part."""
        return what in self._agreements and not (self._agreements[what].is_met and self._has_told[what])

    def why_not(self, what: str) -> str:
        """Why not all of it is exchanged."""
        agreement = self._agreement(what)
        if agreement.differing:
            return "; ".join(
                f"{named(ranks)} differ{'s' * (len(ranks) == 1)} in {part}" for part, ranks in agreement.differing.items()
            )
        late = "it has no monitor that exchanges the same, or is late; it may join in a later step"
        return f"{agreement.why_not}: {late}" if agreement.may_join else agreement.why_not

    def _agreement(self, what: str) -> Agreement:
        if what not in self._agreements:
            self._agreements[what] = Agreement(self.ranks, what)
        return self._agreements[what]

    def _common_of(self, buffer: StepBuffer, tensors: Tensors) -> Tensors:
        """The tensors that all ranks exchange, in the same order on all of them; the others are refused."""
        agreement = self._agreements.get("tensors")
        if not tensors or agreement is None or self.are_equal("tensors"):
            return tensors
        why = self.why_not("tensors")
        if self._common is None or METRICS in agreement.differing:
            for source in tensors:
                buffer.refuse_all(source, why)
            return {}
        found: dict[str, tuple[Sequence[str], frozenset[Column]]] = {}
        for source, (names, columns) in tensors.items():
            own = set(names)
            common = [name for name in self._common if name in own]
            for name in own.difference(common):
                buffer.clear(source, [name])
                buffer.refuse(source, name, why)
            found[source] = common, columns
        return found

    def _shared(self, buffer: StepBuffer, watches: Callable[[Key], bool]) -> dict[Entry, Tensor]:
        """This rank's values that are not in the plan."""
        rows: dict[Entry, Tensor] = {(source, name): row for (source, name), row in buffer.merged_rows_of_calls().items()}
        values = buffer.shared_values(watches)
        if "tensors" in self._agreements and not self.are_equal(
            "tensors"
        ):  # of a sharded tensor every rank has to bring its part
            common = set() if METRICS in self._agreements["tensors"].differing else set(self._common or ())
            for key in [key for key in values if key.source in PARAMETER_SOURCES and key.name not in common]:
                del values[key]
                buffer.withhold(key, self.why_not("tensors"))
        rows.update(((*key, reducer), row) for key, (reducer, row) in values.items())
        return rows


def _rows(mine: Mapping[Entry, Tensor], entries: Sequence[Entry]) -> list[Tensor]:
    nothing = identity(1)[0]
    return [torch.stack([mine.get(entry, nothing).to("cpu", torch.float64) for entry in entries])] if entries else []


def _take(buffer: StepBuffer, entries: Sequence[Entry], rows: Tensor) -> None:
    tensors: dict[str, list[int]] = {}
    for place, entry in enumerate(entries):
        if len(entry) == 2:
            tensors.setdefault(entry[0], []).append(place)
        else:
            *key, reducer = entry
            buffer.put_shared(Key(*key), reducer, rows[place])
    for source, places in tensors.items():
        buffer.put_exchanged(source, [entries[place][1] for place in places], rows[places], ALL_COLUMNS)
