"""The exchange between ranks at the end of a step.

Rows of sharded tensors are in the plan. Which modules are called and which values are logged is known only at the end of a step, and may
differ between ranks; all ranks agree on a list of them. A rank with something new marks that in the exchange; then all ranks gather what
is new, and exchange it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..core.errors import WarningLog
from ..core.keys import Key
from ..core.moments import ALL_COLUMNS, Column, identity
from ..statistics.tensor_access import accumulator_dtype
from .buffer import SKEW, StepBuffer
from .consensus import Rendezvous
from .ranks import Ranks, digest_of

#: An item that all ranks exchange: a tensor by source and name, or a value by source, name, metric and reducer.
Entry = tuple[str, ...]
#: Columns of the exchange's own row that hold the broadcast slot.
_SLOT = [Column.COUNT, Column.ABS_SUM, Column.SQUARE_SUM, Column.NEAR_ZERO, Column.NONFINITE]
#: The empty broadcast slot.
EMPTY_SLOT: tuple[float, ...] = (0.0,) * len(_SLOT)
#: By source, the names of tensors whose rows are exchanged, and the columns.
Tensors = Mapping[str, tuple[Sequence[str], frozenset[Column]]]

_ALONE = {
    "tensors": (
        "some ranks have no monitor with the same model and metrics, so sharded tensors cannot be reported; create the monitor on every "
        "rank, and if a pipeline's stages differ, pass the ranks of this stage as process_group="
    ),
    "stages": "some ranks do not watch their stages of the pipeline",
    "decisions": (
        "some ranks have no monitor that acts on spikes in the same way, so this rank does not act on them; pass on_spike= and "
        "the same detectors on every rank"
    ),
    "values": "some ranks have no monitor, so activations and logged values of this rank are of its own batches",
}


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
        self._agreement = Rendezvous(ranks)
        self._agreed: dict[str, bool] = {}
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
    ) -> None:
        """Merge the values in ``buffer`` with those of the other ranks. A no-op without other ranks or anything to merge.

        Args:
            buffer: of the step that ends.
            tensors: rows that all ranks expect.
            shares_values: whether to merge activations, and values that were logged to be shared.
            watches: whether a logged value is shared in any case, as its mean, because a detector uses it.
            asked: what all ranks are known to take part in; by default tensors or values.
            may_extend: whether the list of shared values may grow in this step, which synchronises with the device.
        """
        if not (tensors or shares_values) or self.ranks.count == 1:
            return
        if not self.all_take_part(asked or ("tensors" if tensors else "values")):
            for source in tensors:
                buffer.refuse_all(source, _ALONE["tensors"])
            return
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

    def all_take_part(self, what: str, layout: Callable[[], object] = tuple) -> bool:
        """Whether every rank exchanges ``"tensors"`` of this layout, ``"values"`` or ``"decisions"``. Asked once; a rank without
        peers waits.
        """
        if what not in self._agreed:
            self._agreed[what] = self.ranks.count == 1 or self._agreement.on(f"{what}-{digest_of(layout())}")
            if not self._agreed[what]:
                self._complaints.add(f"ranks:{what}", _ALONE[what])
                if what == "tensors":
                    self.ranks.stay_alone()
        return self._agreed[what]

    def is_refused(self, what: str) -> bool:
        """Whether it is known that not every rank takes part."""
        return self._agreed.get(what) is False

    def _shared(self, buffer: StepBuffer, watches: Callable[[Key], bool]) -> dict[Entry, Tensor]:
        """This rank's values that are not in the plan."""
        rows: dict[Entry, Tensor] = {(source, name): row for (source, name), row in buffer.merged_rows_of_calls().items()}
        rows.update(((*key, reducer), row) for key, (reducer, row) in buffer.shared_values(watches).items())
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
