"""What ranks tell each other at the end of a step, all of it at once.

Rows of the tensors that are spread over ranks stand in the plan. Which modules are called and which values are logged only a step
can tell, and not each rank may see the same; of these there is a list that all ranks agree on. A rank that has something new says
so in the exchange, and then all tell each other what is new, and exchange that too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..core.errors import WarningLog
from ..core.keys import Key
from ..core.moments import ALL_COLUMNS, Column, identity
from .buffer import SKEW, StepBuffer
from .consensus import Rendezvous
from .ranks import Ranks

#: Something that all ranks exchange: a tensor by source and name, or a value by source, name, metric and how it merges.
Entry = tuple[str, ...]
#: Columns of the row that tells of the exchange itself, in which the first rank may tell the others something; nobody else uses them.
_WORD = [Column.COUNT, Column.ABS_SUM, Column.SQUARE_SUM, Column.NEAR_ZERO, Column.NONFINITE]
#: As many numbers, when it has nothing to say.
SILENCE: tuple[float, ...] = (0.0,) * len(_WORD)
#: Of each source the names of the tensors whose rows are exchanged, and the columns.
Tensors = Mapping[str, tuple[Sequence[str], frozenset[Column]]]

_ALONE = {
    "tensors": (
        "not every rank has a monitor of the same model and metrics, so that nothing can be told of what is spread over ranks; make one "
        "on each of them, and where a pipeline's stages differ, name the ranks of this stage with process_group="
    ),
    "decisions": (
        "not every rank has a monitor that acts on spikes in the same way, so nothing is done about them on this one; give on_spike= and "
        "the same detectors on each rank"
    ),
    "values": "not every rank has a monitor, so that what this one tells of activations and logged values is of its own batches",
}


class RankExchange:
    """The one exchange of a step. Every rank enters it with the same rows, whatever it has of them.

    Args:
        ranks: that tell each other.
        complaints: where it is said that others are missing.

    Attributes:
        word: what this rank has to say to all, in five numbers whose sum over ranks is taken: so one rank at most says anything.
        heard: what was said in the last exchange of a monitored step, the same on all ranks; whoever reads it sets it back.
    """

    def __init__(self, ranks: Ranks, complaints: WarningLog) -> None:
        self.ranks = ranks
        self._complaints = complaints
        self._agreement = Rendezvous(ranks)
        self._agreed: dict[str, bool] = {}
        self._entries: list[Entry] = []
        self.takes_place = False  # whether there was any exchange
        self.shares_values = False  # whether all ranks have told each other values of their batches
        self.word = self.heard = SILENCE

    def run(
        self,
        buffer: StepBuffer,
        tensors: Tensors,
        shares_values: bool,
        watches: Callable[[Key], bool],
        may_extend: bool = True,
        asked: str = "",
    ) -> None:
        """Merge what ``buffer`` has with what it has on the other ranks. Nothing where there are none, or nothing to merge.

        Args:
            buffer: of the step that ends.
            tensors: rows that all ranks know to expect.
            shares_values: whether activations, and values that were logged to be shared, are merged too.
            watches: whether a logged value is shared in any case, as its mean, since a detector judges it.
            asked: what all ranks are known to take part in; by default they are asked for tensors or for values.
            may_extend: whether the list of what is shared may grow in this step, which synchronises with the device.
        """
        if not (tensors or shares_values) or self.ranks.count == 1:
            return
        if not self.all_take_part(asked or ("tensors" if tensors else "values")):
            for source in tensors:
                buffer.refuse_all(source, _ALONE["tensors"])
            return
        columns = ALL_COLUMNS if shares_values else frozenset[Column]().union(*(of for _, of in tensors.values()))
        mine = self._shared(buffer, watches) if shares_values else {}
        has_new = identity(int(shares_values))
        has_new[:, Column.SUM] = float(not mine.keys() <= set(self._entries))
        has_new[:, [Column.MIN, Column.MAX]] = float(buffer.step)
        if may_extend and self.word is not SILENCE:
            has_new[:, _WORD] = torch.tensor(self.word, dtype=torch.float64, device="cpu")
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
            told = merged[0].tolist()
            self.heard = tuple(told[column] for column in _WORD)
            self.word = SILENCE  # it is said
            if told[Column.SUM] > 0:
                self._extend(buffer, mine)

    def _extend(self, buffer: StepBuffer, mine: Mapping[Entry, Tensor]) -> None:
        """Some rank has something new."""
        known = set(self._entries)
        told = self.ranks.gathered([entry for entry in mine if entry not in known])
        new = sorted({tuple(entry) for entries in told for entry in entries})
        self._entries += new
        _take(buffer, new, self._merged(_rows(mine, new), ALL_COLUMNS))

    def _merged(self, rows: Sequence[Tensor], columns: frozenset[Column]) -> Tensor:
        return self.ranks.merged(torch.cat([some.to(self.ranks.device, torch.float64) for some in rows]), columns)

    def all_take_part(self, what: str, layout: Callable[[], object] = tuple) -> bool:
        """Whether every rank exchanges ``"tensors"`` of this layout, ``"values"`` or ``"decisions"``. Asked once; who is alone waits
        for a while.
        """
        if what not in self._agreed:
            digest = hashlib.sha256(repr(layout()).encode()).hexdigest()[:16]
            self._agreed[what] = self.ranks.count == 1 or self._agreement.on(f"{what}-{digest}")
            if not self._agreed[what]:
                self._complaints.add(f"ranks:{what}", _ALONE[what])
                self.ranks.is_alone |= what == "tensors"
        return self._agreed[what]

    def is_refused(self, what: str) -> bool:
        """Whether it is known by now that not every rank takes part."""
        return self._agreed.get(what) is False

    def _shared(self, buffer: StepBuffer, watches: Callable[[Key], bool]) -> dict[Entry, Tensor]:
        """What this rank has of what is not in the plan."""
        rows: dict[Entry, Tensor] = {(source, name): row for (source, name), row in buffer.loose_rows().items()}
        for key, (reducer, row) in buffer.shared_values(watches).items():
            rows[(*key, reducer)] = row
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
