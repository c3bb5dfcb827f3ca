"""The exchange between ranks at the end of a step.

Rows of sharded tensors are in the plan. Which modules are called and which values are logged is known only at the end of a step, and may
differ between ranks; all ranks agree on a list of them. A rank with something new marks that in the exchange; then all ranks gather what
is new, and exchange it too.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn

from ..core.errors import WarningLog
from ..core.formatting import listed
from ..core.keys import PARAMETER_SOURCES, Key
from ..core.moments import ALL_COLUMNS, Column, identity
from ..core.torch_modes import HomeProcess
from ..statistics.request import accumulator_dtype
from .buffer import SKEW, StepBuffer
from .model_index import GradientSource, Place
from .ranks import EMPTY_SLOT, METRICS, NAMES, Ranks, digest_of

# --- Whether all ranks take part in an exchange. No rank has to answer, so none can block the others ---

#: Seconds that a rank waits for the others; usually milliseconds, since all come from the same backward pass. One that comes later joins in
#: a later step.
PATIENCE = 20.0
#: Seconds within which the store answers a request; torch's own limit holds for waits only.
STORE_LIMIT = 5.0
#: The same once this rank has arrived: the others may enter the exchange, and would wait for it as long as a collective does.
_ARRIVED_LIMIT = 600.0
#: A part of the cards: it tells where the card's writer looks for the answer.
_LOOKS = "looks"


@dataclass(frozen=True)
class Answer:
    """The answer to one call, the same on all ranks."""

    absent: int = 0  # how many ranks had not come
    first: int = -1  # of them, by its number among all processes
    # by the part of the cards, the ranks whose part is not that of most
    differing: Mapping[str, Sequence[int]] = field(default_factory=dict)
    step: int = 0  # the last of the steps in which ranks look for the answer


def within(limit: float, request: Callable[[], Any]) -> Any:
    """What ``request`` returns, by a thread of its own, since most requests to a store wait for ever. TimeoutError after ``limit``."""
    found: list[Any] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            found.append(request())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="torch_gradmon store", daemon=True)
    thread.start()
    thread.join(limit)
    if failed:
        raise failed.pop()  # kept here, it would be in a cycle with this frame and all that called it
    if not found:
        raise TimeoutError(f"the key-value store of torch.distributed gave no answer in {limit:g} s")
    return found[0]


class BoundedStore:
    """A key-value store whose requests end in time, with a TimeoutError. ``connected_anew``: by a connection of its own: a client serves
    one request at a time, and another thread may wait for an answer.
    """

    def __init__(self, prefix: str, connected_anew: bool = True) -> None:
        self._store = within(STORE_LIMIT, lambda: store_of(prefix, connected_anew))
        self._is_waiting = False

    def call(self, method: str, *args: Any, limit: float | None = None) -> Any:
        if self._is_waiting:
            raise TimeoutError("the key-value store of torch.distributed has not answered an earlier request")
        return within(STORE_LIMIT if limit is None else limit, lambda: self._asked(method, args))

    def _asked(self, method: str, args: tuple[Any, ...]) -> Any:
        self._is_waiting = True
        try:
            return getattr(self._store, method)(*args)
        finally:
            self._is_waiting = False

    def values(self, keys: Sequence[str], limit: float | None = None) -> list[bytes]:
        if getattr(self._store, "has_extended_api", bool)():
            return self.call("multi_get", list(keys), limit=limit)  # type: ignore[no-any-return]
        return [self.call("get", key, limit=limit) for key in keys]

    def first_absent(self, keys: Sequence[str], limit: float | None = None) -> int:
        """The place of the first key that does not exist; there must be one. Takes log2 requests."""
        low, high = 0, len(keys)  # those before `low` exist; one before `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.call("check", list(keys[low:middle]), limit=limit) else (low, middle)
        return low


class Agreement:
    """Whether all ranks take part in one exchange; ranks count the agreements of one name that each has made."""

    def __init__(self, ranks: Ranks, what: str) -> None:
        self._ranks, self._what = ranks, what
        self._store: BoundedStore | None = None
        self._number = 0  # of the agreement, among those of this name
        self._call = 0  # all before it were answered: some were absent
        self._looks: int | None = None  # for the answer to this call, in this step
        self._meets: int | None = None  # in this step
        self._step: int | None = None  # the last one in which this was asked
        self._is_asked = self._is_over = self._has_ended = False
        self._process = HomeProcess()
        self.takes_part: bool | None = None  # whether ranks that have come exchange anything, once that was told
        self.is_met = False  # all ranks have come, and do so in each step from now on
        self.is_open = True  # ranks that were absent may still turn out to be late
        self.differing: Mapping[str, Sequence[int]] = {}  # by the part of the cards, the ranks whose part is not that of most
        self.why_not = ""  # a reason that names the ranks; empty before they were called, and where all take part

    @property
    def is_alone(self) -> bool:
        """Whether ranks were absent again when they were called, though they may still join."""
        return not (self.is_met or self.is_open)

    @property
    def may_join(self) -> bool:
        return not (self.is_met or self._is_over)

    def ask(self, card: Callable[[], Mapping[str, str]], step: int | None = None) -> bool:
        """Whether all ranks take part; the same on all of them, and all through a ``step``, that in flight. Without one nothing changes
        after the first time, when this waits for the others. ``card``: digests of what ranks should have in common, by part.
        """
        if self.is_met or self._is_over or (self._is_asked and (step is None or step == self._step)):
            return self.is_met
        try:
            if not self._is_asked:
                self._is_asked = True
                self._begin(card())
            elif step is not None:
                self._go_on(card, step)
        except (RuntimeError, TimeoutError) as error:  # of the store
            self._is_over, self.is_open = True, False
            self.why_not = f"it is not known whether all ranks take part: {error}"
        self._step = step
        return self.is_met

    def end(self) -> None:
        """This rank takes part no longer. A rank that comes later begins anew with those that come then."""
        if self._store is not None and not (self.is_met or self._has_ended):
            self._has_ended = True
            _mark_ended(self._store, self._number)

    def __del__(self) -> None:
        """As :meth:`end` for a monitor that nobody detached, on a thread that nobody waits for: a collection may come at any moment."""
        if self._store is not None and not (self.is_met or self._has_ended or self._process.is_forked):
            with contextlib.suppress(RuntimeError):  # no thread starts while the interpreter ends
                _thread.start_new_thread(_mark_ended, (self._store, self._number))

    def _begin(self, card: Mapping[str, str]) -> None:
        prefix = f"torch_gradmon/{self._what}-{digest_of(self._ranks.members)}"
        try:
            self._store = BoundedStore(prefix)
        except (ImportError, RuntimeError, ValueError, TimeoutError):
            try:  # perhaps this rank alone has no second connection
                self._store = BoundedStore(prefix, connected_anew=False)
            except (ImportError, RuntimeError, ValueError):
                # a private API, and some backends have no store: so it is on all ranks
                self.is_met, self.is_open = True, False
                return
        has_ended = True
        while has_ended:  # by all ranks that had come: as in an earlier training, with a monitor on some ranks only
            self._number = _made[self._what, tuple(self._ranks.members)]
            _made[self._what, tuple(self._ranks.members)] += 1
            answer = self._meet("0", card)
            if not answer.absent:
                return
            has_ended = self._store.call("add", f"{self._number}/ended", 0) >= self._ranks.count - answer.absent
        self._call = 1

    def _go_on(self, card: Callable[[], Mapping[str, str]], step: int) -> None:
        while self._meets is None:
            if self._looks is None:
                self._looks = step + (1 << self._call - 1)  # ever more seldom
                answer = self._arrive(str(self._call), {**card(), _LOOKS: str(self._looks)})
            elif step < self._looks:
                return
            else:
                answer = self._answer(str(self._call))
            if answer is None:
                return
            if answer.absent:
                self._miss(answer)
                self._call, self._looks, self.is_open = self._call + 1, None, False
            else:
                self._meets = answer.step
        if step >= self._meets and self._meet(f"{self._call} in step", card()).absent:
            # they count differently, so they cannot enter anything together
            self._is_over, self.is_open = True, False
            self.why_not = f"{self.why_not} in step {self._meets}, in which the others were: ranks count their steps differently"

    def _miss(self, answer: Answer) -> None:
        self.why_not = (
            f"rank {answer.first}{f' and {answer.absent - 1:,} more' * (answer.absent > 1)} did not come to the exchange"
        )

    def _meet(self, call: str, card: Mapping[str, str]) -> Answer:
        answer = self._arrive(call, card)
        if answer is None:
            answer = self._answer(call, PATIENCE)
        if answer.absent:
            self._miss(answer)
        else:
            self.is_met, self.is_open, self.differing, self.why_not = True, False, answer.differing, ""
        return answer

    def _arrive(self, call: str, card: Mapping[str, str]) -> Answer | None:
        """Leave this rank's card. Returns the answer if this rank is the last to come."""
        assert self._store is not None
        count = self._ranks.count
        try:
            self._store.call("set", f"{self._number}/{call}/{self._ranks.rank}", json.dumps(card))
        except TimeoutError:  # not counted yet, so the answer will be that this rank is absent
            return Answer(1, self._ranks.members[self._ranks.rank])
        if self._store.call("add", f"{self._number}/{call}/here", 1, limit=_ARRIVED_LIMIT) < count:
            return None
        raw = self._store.values([f"{self._number}/{call}/{rank}" for rank in range(count)], _ARRIVED_LIMIT)
        return self._first(call, self._compared([json.loads(each) for each in raw]))

    def _compared(self, cards: Sequence[dict[str, str]]) -> Answer:
        step = max(int(card.pop(_LOOKS, 0)) for card in cards)
        differing: dict[str, list[int]] = {}
        for part in dict.fromkeys(part for card in cards for part in card):
            usual = Counter(card.get(part) for card in cards).most_common(1)[0][0]
            if others := [rank for rank, card in enumerate(cards) if card.get(part) != usual]:
                differing[part] = [self._ranks.members[rank] for rank in others]
        return Answer(differing=differing, step=step)

    def _answer(self, call: str, patience: float | None = None) -> Answer:
        """The answer to a call that this rank has come to; where there is none yet, not after ``patience``, some are absent."""
        assert self._store is not None
        key = f"{self._number}/{call}/answer"
        if patience is None:
            is_there = self._store.call("check", [key], limit=_ARRIVED_LIMIT)
        else:
            try:
                self._store.call("wait", [key], timedelta(seconds=patience), limit=_ARRIVED_LIMIT)
                is_there = True
            except (RuntimeError, ValueError):
                # DistStoreError, if the wait took too long; the request below shows if it is worse
                is_there = False
        if is_there:
            return Answer(**json.loads(self._store.call("get", key, limit=_ARRIVED_LIMIT)))
        count = self._ranks.count
        absent = count - self._store.call("add", f"{self._number}/{call}/here", 0, limit=_ARRIVED_LIMIT)
        cards = [f"{self._number}/{call}/{rank}" for rank in range(count)]
        first = self._store.first_absent(cards, _ARRIVED_LIMIT) if absent else -1
        return self._first(call, Answer(max(absent, 1), self._ranks.members[first]))

    def _first(self, call: str, answer: Answer) -> Answer:
        """The first answer that any rank gives, perhaps this one."""
        assert self._store is not None
        kept = self._store.call(
            "compare_set", f"{self._number}/{call}/answer", "", json.dumps(asdict(answer)), limit=_ARRIVED_LIMIT
        )
        return Answer(**json.loads(kept))


def _mark_ended(store: BoundedStore, number: int) -> None:
    with contextlib.suppress(Exception):  # nobody is there to hear of it
        store.call("add", f"{number}/ended", 1)


#: Number of agreements by name and ranks, in this process.
_made: Counter[tuple[str, tuple[int, ...]]] = Counter()


def named(ranks: Sequence[int]) -> str:
    """``"rank 3"``, or ``"ranks 1, 2, 3 and 4 more"``."""
    return f"rank{'s' * (len(ranks) > 1)} {listed(map(str, ranks), 3)}"


def second_connection(store: Any) -> Any:
    """The default store of ``torch.distributed`` once more, with a connection of its own, so that no thread waits for another one's answer.
    Raises ValueError or RuntimeError where there can be no second one.
    """
    return store.clone() if hasattr(store, "clone") else connected_again(store)


def connected_again(store: Any) -> Any:
    """The same before torch 2.8: below a prefix of its own, which the ranks agree on; those of ``store`` keep other worlds apart, and
    cannot be read.
    """
    kinds: Any = torch.distributed
    prefix, base = store.compare_set("torch_gradmon/again", "", uuid4().hex).decode(), store
    while isinstance(base, kinds.PrefixStore):
        base = base.underlying_store
    if isinstance(base, kinds.FileStore):
        return kinds.PrefixStore(prefix, kinds.FileStore(base.path, kinds.get_world_size()))
    if isinstance(base, kinds.TCPStore):
        patience = min(base.timeout, timedelta(seconds=PATIENCE))
        again = kinds.TCPStore(base.host, base.port, is_master=False, wait_for_workers=False, timeout=patience)
        return kinds.PrefixStore(prefix, again)
    raise ValueError(f"a {type(base).__name__} cannot be connected to again")


def store_of(prefix: str, connected_anew: bool = False) -> Any:
    """The key-value store of ``torch.distributed``, by private names; ``connected_anew``: with a connection of its own."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    store = _get_default_store()
    return PrefixStore(prefix, second_connection(store) if connected_anew else store)


# --- Where gradients are under FSDP1, which only several ranks have ---


def _flat_of(handle: weakref.ref[Any]) -> nn.Parameter | None:
    return getattr(handle(), "flat_param", None)


class Fsdp1Source(GradientSource):
    """Gradients are in ``.grad``, of the part that this rank has; with ``use_orig_params=False`` parameters are the flat ones."""

    def __init__(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel  # loaded already, since there is one

        self._handles: list[weakref.ref[Any]] = []
        self._known: set[int] = set()  # flat parameters, and original ones
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._lengths: dict[int, int] = {}  # of flat parameters, without the padding behind the last one
        self._parts: set[int] = set()
        self._copies: set[int] = set()  # parts that a rank of an earlier group has too
        for unit in model.modules():
            handle = unit._handle if isinstance(unit, FullyShardedDataParallel) else None
            if handle is None:
                continue
            flat: Any = handle.flat_param
            self._handles.append(weakref.ref(handle))
            self._known.add(id(flat))
            originals = flat._params or []
            self._shapes.update((id(p), tuple(shape)) for p, shape in zip(originals, flat._shapes, strict=bool(originals)))
            there = [info for info in flat._shard_param_infos if info.in_shard] if handle.uses_sharded_strategy else []
            if handle.uses_sharded_strategy:
                self._lengths[id(flat)] = max((info.offset_in_shard + info.numel_in_shard for info in there), default=0)
                self._parts.update(map(id, originals or [flat]))
                replicas = getattr(unit, "_inter_node_pg", None)
                if replicas is not None and torch.distributed.get_rank(replicas):
                    self._copies.update(map(id, originals or [flat]))
        self._known.update(self._shapes)
        for name, parameter in model.named_parameters():
            if getattr(parameter, "_fsdp_flattened", False) and id(parameter) not in self._known:
                raise ValueError(
                    f"{name} is a part of a flat parameter of FSDP1 above this module: watch the outermost FullyShardedDataParallel"
                )

    def hook_places(self, places: Sequence[Place]) -> Sequence[Place]:
        """The flat parameters, which original ones are views of, and all others."""
        flat: list[Place] = [partial(_flat_of, handle) for handle in self._handles]
        return [*flat, *(place for place in places if id(place()) not in self._known)]

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        return self._shapes.get(id(parameter), tuple(parameter.shape))

    def is_part(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._parts

    def value(self, parameter: nn.Parameter) -> Tensor:
        return self._own(parameter, parameter)

    def accumulated(self, parameter: nn.Parameter) -> Tensor | None:
        return None if parameter.grad is None else self._own(parameter, parameter.grad)

    used = accumulated

    def _own(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        if id(parameter) in self._copies:
            return tensor.detach().new_empty(0)
        return tensor.detach().view(-1)[: self._lengths[id(parameter)]] if id(parameter) in self._lengths else tensor


# --- The exchange between ranks at the end of a step ---

#: An item that all ranks exchange: a tensor by source and name, or a value by source, name, metric and reducer.
Entry = tuple[str, ...]
#: Columns of the exchange's own row that hold the broadcast slot.
_SLOT = [Column.COUNT, Column.ABS_SUM, Column.SQUARE_SUM, Column.NEAR_ZERO, Column.NONFINITE]
#: By source, the names of tensors whose rows are exchanged, and the columns.
Tensors = Mapping[str, tuple[Sequence[str], frozenset[Column]]]

_ALONE = {
    "tensors": (
        "sharded tensors cannot be reported, and activations and logged values of this rank are of its own batches; create the monitor on "
        "every rank, and if a pipeline's stages differ, pass the ranks of this stage as Distributed(process_group=...)"
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
    """The exchange of a step. Every rank enters it with the same rows, whether or not it has values for them."""

    def __init__(self, ranks: Ranks, complaints: WarningLog) -> None:
        self.ranks = ranks
        self._complaints = complaints
        self._agreements: dict[str, Agreement] = {}
        self._common: list[str] | None = None  # names that all ranks have, where some have others
        self._entries: list[Entry] = []

    def run(
        self,
        buffer: StepBuffer,
        tensors: Tensors,
        shares_values: bool,
        watches: Callable[[Key], bool],
        may_extend: bool = True,
        what: str = "tensors",
        parts: Callable[[], Mapping[str, Any]] = dict,
        slot: Sequence[float] = EMPTY_SLOT,
    ) -> tuple[float, ...] | None:
        """Merge rows of ``tensors`` with those of the other ranks; if ``shares_values`` also those of modules, and values that were logged
        to be shared or that a detector ``watches``, whose list may grow if it ``may_extend``, which synchronises with the device.

        Returns what all ranks have sent, :data:`EMPTY_SLOT` where none can; None if no exchange took place. The numbers of a ``slot`` are
        added up, so at most one rank may send any. ``parts``: what ranks must have in common for ``what`` they are asked to take part in.
        """
        if not (tensors or shares_values) or self.ranks.count == 1:
            return None
        if not self.all_take_part(what, parts, buffer.step):
            why = self.why_not(what)
            for source in tensors:
                buffer.refuse_all(source, why)
            if shares_values and not self._agreement(what).is_alone:  # else it is said that values are of this rank's batches
                buffer.withhold_values(watches, why)
            return None
        tensors = self._common_of(buffer, tensors)
        buffer.join_streams()
        columns = ALL_COLUMNS if shares_values else frozenset[Column]().union(*(of for _, of in tensors.values()))
        mine = self._shared(buffer, watches) if shares_values else {}
        has_new = identity(int(shares_values))
        has_new[:, Column.SUM] = float(not mine.keys() <= set(self._entries))
        has_new[:, [Column.MIN, Column.MAX]] = float(buffer.step)
        if may_extend and slot is not EMPTY_SLOT:
            has_new[:, _SLOT] = torch.tensor(slot, dtype=torch.float64, device="cpu")
        known = [buffer.rows_or_none(source, names) for source, (names, _) in tensors.items()]
        merged = self._merged([has_new, *known, *_rows(mine, self._entries)], columns)
        start = len(has_new)
        for source, (names, of) in tensors.items():
            buffer.put_exchanged(source, names, merged[start : start + len(names)], of)
            start += len(names)
        _take(buffer, self._entries, merged[start:])
        if shares_values:
            buffer.noted[SKEW] = merged[0, Column.MAX] - merged[0, Column.MIN]
        if not (shares_values and may_extend):
            return EMPTY_SLOT
        received = merged[0].tolist()
        if received[Column.SUM] > 0:
            self._extend(buffer, mine)
        return tuple(received[column] for column in _SLOT)

    def _extend(self, buffer: StepBuffer, mine: Mapping[Entry, Tensor]) -> None:
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
        """Whether every rank exchanges ``"tensors"``, ``"values"`` or ``"decisions"``; also where some have other names or metrics, what
        all have in common. Asked the first time, a rank without peers waits; ``step``: the one in flight, in which late ranks may join.
        """
        if self.ranks.count == 1:
            return True
        agreement = self._agreement(what)
        if agreement.is_met:
            return bool(agreement.takes_part)
        is_met = agreement.ask(lambda: {part: digest_of(value) for part, value in parts().items()}, step)
        if what == "tensors":
            self.ranks.is_alone = not self.are_equal(what)
        if not is_met and agreement.is_open:
            return False
        takes_part = is_met and agreement.differing.keys() <= _PARTIAL.get(what, set())
        if takes_part and NAMES in agreement.differing:
            everybody = [{tuple(each) for each in found} for found in self.ranks.gathered(parts().get(NAMES, []))]
            self._common = sorted(each[0] for each in set.intersection(*everybody))
        if is_met or agreement.takes_part is None:
            agreement.takes_part = takes_part
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

    def are_equal(self, what: str) -> bool:
        """Whether it is known that every rank takes part, and has all of it in common."""
        return self._agreement(what).is_met and not self._agreement(what).differing

    def is_refused(self, what: str) -> bool:
        return what in self._agreements and not (self._agreements[what].is_met and self._agreements[what].takes_part)

    def why_not(self, what: str) -> str:
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
        rows: dict[Entry, Tensor] = {(source, name): row for (source, name), row in buffer.merged_rows_of_calls().items()}
        values = buffer.shared_values(watches)
        if "tensors" in self._agreements and not self.are_equal("tensors"):
            # of a sharded tensor every rank has to bring its part
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
