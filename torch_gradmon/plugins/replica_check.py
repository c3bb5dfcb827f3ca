"""The check of replicas: what must be equal on several ranks, who finds out whether it is, and when."""

from __future__ import annotations

import contextlib
import json
import math
import re
import statistics
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..capture.gradients import scale_of
from ..capture.hooks import Handles, ModuleHook
from ..core import keys
from ..core.loop_mistakes import RANK_FAULTS, LoopFinding
from ..core.moments import Column
from ..core.records import StepRecord, loss_among
from ..statistics.fingerprint import fingerprints, packed, unpacked
from ..step.active_step import ActiveStep
from ..step.buffer import DeviceToHostCopy
from ..step.exchange import BoundedStore
from ..step.model_index import parameters_of
from ..step.planner import Planner
from ..step.plugin import Plugin
from ..step.ranks import Ranks, digest_of, is_dtensor, local_part


def ranks_of(module: DistributedDataParallel) -> list[int]:
    """The ranks over which it copies its module, among all processes, ascending."""
    from torch.distributed import get_process_group_ranks

    return sorted(get_process_group_ranks(module.process_group))


# --- What must be equal on several ranks: which tensors, and on which ranks ---


#: Kinds of items, each a possible cause of differences in the next ones.
NUMBER, BUFFER, GRADIENT, STATE, PARAMETER = "number", "buffer", "gradient", "state", "parameter"
#: The name of a GradScaler's scale.
SCALE = "scale of the GradScaler"
#: Attributes with which Megatron-LM and DeepSpeed mark parameters that only some ranks have.
_MARKS = (("tensor_model_parallel", True), ("allreduce", False))
#: What identifies the ranks of a mesh, which takes long to describe.
_meshes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


class Item(NamedTuple):
    """A tensor, plain and dense, that is equal on all ranks with the same ``share``: a part of a sharded tensor, or empty for all of it."""

    kind: str
    name: str  # of the parameter or number; for state with its key
    share: str
    tensor: Tensor


class Common:
    """What the ranks ``members`` have in common: all that DDP copies in ``model``, at any depth, which is not kept alive."""

    def __init__(self, distinct: re.Pattern[str] | None, model: nn.Module | None = None, members: Sequence[int] = ()) -> None:
        self._distinct = distinct
        found = [] if model is None else [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
        self._wrappers = [weakref.ref(module) for module in found]
        self._copies: dict[int, str] = {}
        self._ignored: set[int] = set()
        for module in found:  # the innermost one last
            ranks = ranks_of(module)
            name = "" if ranks == sorted(members) else digest_of(ranks)
            self._copies.update((id(parameter), name) for parameter in module.parameters())
            left_out: Any = module.parameters_to_ignore
            self._ignored.update(id(p) for name, p in module.module.named_parameters() if name in left_out)

    @property
    def wrapper(self) -> DistributedDataParallel | None:
        return self._wrappers[0]() if len(self._wrappers) == 1 else None

    @property
    def is_joining(self) -> bool:
        """Whether ranks may be in different steps, within ``join()``."""
        return any(module._join_config.enable for reference in self._wrappers if (module := reference()) is not None)

    def copies(self, *parameters: Tensor) -> str:
        """A name of the ranks over which DDP copies the first parameter; empty if these are all, or it is below no DDP.

        Other ranks have other parts of the model, as in tensor parallelism by plain tensors.
        """
        return self._copies.get(id(parameters[0]), "") if parameters else ""

    def items(self, kind: str, name: str, tensor: Tensor, copies: str) -> Iterator[Item]:
        """One for each set of ranks that have ``tensor``, or this part of it; none if only this rank has it."""
        tensor = tensor.detach()
        if is_dtensor(tensor):
            if (part := _replica(tensor)) is not None and _is_dense(part[1]):
                yield Item(kind, name, *part)
            if not copies or any(placement.is_partial() for placement in tensor.placements):  # type: ignore[attr-defined]
                return
            tensor = local_part(tensor)
        if _is_dense(tensor):
            yield Item(kind, name, copies, tensor)

    def includes(self, name: str, tensor: Tensor) -> bool:
        """Whether a parameter, or a buffer, is equal on ranks: no pattern names it, and no library marks it or leaves it out."""
        is_marked = any(getattr(tensor, mark, not is_so) is is_so for mark, is_so in _MARKS)
        is_distinct = self._distinct is not None and self._distinct.search(name)
        return not (is_marked or is_distinct or id(tensor) in self._ignored)

    def of_optimizer(self, optimizer: Optimizer, names: Mapping[int, str], is_averaged: bool, first: int) -> Iterator[Item]:
        """Everything that ranks must have in common when the optimizer has stepped; with ``is_averaged`` only parameters, since ranks train
        by themselves and average them now and then. ``names`` of parameters, by id; ``first``: its first group's number among all
        optimizers'.
        """
        for number, group in enumerate(optimizer.param_groups, first):
            rate = group.get("lr")
            if isinstance(rate, (int, float)):
                rate = torch.tensor(float(rate), dtype=torch.float64, device="cpu")
            if isinstance(rate, Tensor):
                yield from self.items(NUMBER, rate_name(number), rate, self.copies(*group["params"]))
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None or not self.includes(name, parameter):
                    continue
                copies, found = self.copies(parameter), [(PARAMETER, name, parameter)]
                if not is_averaged:
                    state = {key: value for key, value in optimizer.state.get(parameter, {}).items() if isinstance(value, Tensor)}
                    found += [] if parameter.grad is None else [(GRADIENT, name, parameter.grad)]
                    found += [(STATE, f"{name}/{key}", state[key]) for key in sorted(state)]
                for each in found:
                    yield from self.items(*each, copies)

    def of_parameters(self, parameters: Mapping[str, Tensor]) -> Iterator[Item]:
        for name, parameter in parameters.items():
            if self.includes(name, parameter):
                yield from self.items(PARAMETER, name, parameter, self.copies(parameter))

    def of_buffers(self, module: DistributedDataParallel) -> Iterator[Item]:
        """Those that it has just sent."""
        copies = self.copies(*module.parameters())
        ignored: Any = module.parameters_to_ignore
        for name, buffer in module.module.named_buffers():
            if name not in ignored and self.includes(name, buffer):
                yield from self.items(BUFFER, name, buffer, copies)

    def of_scaler(self, scaler: torch.amp.GradScaler | None, optimizer: Optimizer) -> Iterator[Item]:
        copies = self.copies(*parameters_of(optimizer))
        numbers = {SCALE: scale_of(scaler), "steps since the GradScaler's scale grew": getattr(scaler, "_growth_tracker", None)}
        for name, number in numbers.items():
            if isinstance(number, Tensor):
                yield from self.items(NUMBER, name, number, copies)


def rate_name(group: int) -> str:
    """The name of the learning rate of a parameter group, counted over all optimizers."""
    return f"learning rate of group {group}"


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.device.type != "meta"


def _replica(sharded: Any) -> tuple[str, Tensor] | None:
    """Which part of a DTensor this rank has, and that part; None if no other rank of its mesh has the same."""
    mesh, coordinate = sharded.device_mesh, sharded.device_mesh.get_coordinate()
    replicates = [placement.is_replicate() for placement in sharded.placements]
    is_partial = any(placement.is_partial() for placement in sharded.placements)
    has_copies = any(is_so and mesh.size(dim) > 1 for dim, is_so in enumerate(replicates))
    if is_partial or coordinate is None or not has_copies:
        return None
    if mesh not in _meshes:
        _meshes[mesh] = digest_of(mesh.mesh.tolist())
    where = ["*" if is_so else str(place) for is_so, place in zip(replicates, coordinate, strict=True)]
    return f"{_meshes[mesh]}:{','.join(where)}", local_part(sharded)


#: Fingerprints by kind and name.
Found = Mapping[tuple[str, str], int]


class Snapshot:
    """The fingerprints of all that ranks have in common in one step."""

    def __init__(self, step: int) -> None:
        self.step = step
        # what has landed: a digest of the batch, if it is known, and all others by what ranks should have in common; ranks with other
        # parameters have other keys
        self.batch: str | None = None
        self.by_share: dict[str, dict[tuple[str, str], int]] = {}
        self._labels: list[tuple[str, str, str]] = []
        self._layout: list[tuple[str, str, tuple[int, ...], str]] = []
        self._parts: list[Tensor] = []
        self._batch = 0

    def add_batch(self, tensors: Sequence[Tensor]) -> None:
        if not self._batch and tensors and not self._parts and len({tensor.device for tensor in tensors}) == 1:
            self._batch = len(tensors)
            self._parts.append(packed(fingerprints(tensors)))

    def add_buffers(self, items: Sequence[Item]) -> None:
        if not any(kind == BUFFER for _, kind, _ in self._labels):
            self.add(items)

    def add(self, items: Sequence[Item]) -> None:
        by_device: dict[torch.device, list[Item]] = {}
        for item in items:
            by_device.setdefault(item.tensor.device, []).append(item)
        for each in by_device.values():
            self._labels += [(item.share, item.kind, item.name) for item in each]
            self._parts.append(packed(fingerprints([item.tensor for item in each])))
        parameters = [item for item in items if item.kind == PARAMETER]
        self._layout += [(item.share, item.name, tuple(item.tensor.shape), str(item.tensor.dtype)) for item in parameters]

    def land(self) -> Generator[None, None, None]:
        """Copy all of them to the host, and yield until they are there."""
        copy = DeviceToHostCopy(self._parts)
        while not copy.is_ready():
            yield
        parts, layout = [unpacked(part) for part in copy.land()], digest_of(sorted(self._layout))
        values: list[int] = torch.cat(parts).tolist() if parts else []
        self.batch = digest_of(values[: self._batch]) if self._batch else None
        for (share, kind, name), value in zip(self._labels, values[self._batch :], strict=True):
            self.by_share.setdefault(f"{layout}|{share}", {})[kind, name] = value


# --- Where ranks leave their messages: the key-value store of ``torch.distributed`` ---


class Board:
    """Messages of each rank, by a name; ``subject`` is the same on all ranks that share the board.

    Raises:
        ImportError, RuntimeError, ValueError: there is no store, or none that can be used beside the training.
        TimeoutError: the store did not answer in time. So does each method; RuntimeError, if the connection is lost.
    """

    def __init__(self, subject: str, rank: int, count: int) -> None:
        self._store = BoundedStore(f"torch_gradmon/replicas/{subject}")
        self._store.call("add", "made", 1)
        self._training = 0
        self._counted: set[str] = set()  # names of the messages that this rank has left in this training
        self.rank, self.count = rank, count

    def has_changed(self) -> bool:
        """Whether a rank has made a board for the subject since this was asked last, so that messages have to be left again.

        They are kept apart by the number of boards that all ranks have made: those of an earlier training are not read.
        """
        before, self._training = self._training, self._store.call("add", "made", 0)
        if self._training != before:
            self._counted.clear()
        return self._training != before

    def put(self, name: str, message: Any) -> None:
        self._store.call("set", self._key(name, self.rank), json.dumps(message))
        if name not in self._counted:
            self._counted.add(name)
            self._store.call("add", f"{self._training}/{name}/here", 1)

    def silent(self, name: str) -> tuple[int, int]:
        """How many ranks have left no message of that name in this training, and the first of them. One request, and log2 if any."""
        missing = self.count - self._store.call("add", f"{self._training}/{name}/here", 0)
        keys = [self._key(name, rank) for rank in range(self.count)]
        return (missing, self._store.first_absent(keys)) if missing > 0 else (0, -1)

    def _key(self, name: str, rank: int) -> str:
        return f"{self._training}/{name}/{rank}"

    def read(self, name: str, ranks: Sequence[int], step: int) -> dict[int, Any] | None:
        """The messages of these ranks about ``step``; None while one is missing. Does not wait."""
        keys = [self._key(name, rank) for rank in ranks]
        if not self._store.call("check", keys):
            return None
        found = [json.loads(raw) for raw in self._store.values(keys)]
        return dict(zip(ranks, found, strict=True)) if all(message["step"] == step for message in found) else None


# --- Which ranks differ, in what, and since when: pure functions of the messages of ranks ---


#: The largest number of ranks, of those that differ, that are asked for details in one check.
ASKED = 6
#: By step, in the order in which things were measured: kind, name, and a hash of the statistics.
Trace = Mapping[int, Sequence[Sequence[str]]]


class Suspects(NamedTuple):
    """A rank ``odd`` that differs from a ``reference``, which is one of the largest number of equal ranks."""

    reference: int
    usual: int  # how many are equal to the reference; where as many are equal to `odd`, it may be they that are wrong
    odd: int
    alike: int
    share: str


def compared(digests: Mapping[int, Mapping[str, str]]) -> bool:
    """Whether every rank has something in common with another one. ``digests`` by rank and share."""
    counts = Counter(share for of in digests.values() for share in of)
    return all(any(counts[share] > 1 for share in of) for of in digests.values())


def suspects(digests: Mapping[int, Mapping[str, str]]) -> list[Suspects]:
    """The ranks that differ, one for each share in which some do."""
    found = []
    for share in dict.fromkeys(share for of in digests.values() for share in of):
        ranks = [rank for rank in sorted(digests) if share in digests[rank]]
        counts = Counter(digests[rank][share] for rank in ranks)
        if len(counts) < 2:
            continue
        usual, most = counts.most_common(1)[0]
        odd = next(rank for rank in ranks if digests[rank][share] != usual)
        reference = next(rank for rank in ranks if digests[rank][share] == usual)
        found.append(Suspects(reference, most, odd, counts[digests[odd][share]], share))
    return found[: ASKED // 2]


def differing(one: Found, other: Found) -> dict[str, list[str]]:
    """Names by kind.

    Where all parameters are equal after the step, most gradients, or most of the state under one key, differ on purpose: the optimizer
    exchanges gradients itself, or each rank keeps the state of its own parameters. State that only one rank has is of that kind too.
    """
    kinds: dict[str, list[str]] = {}
    alone = [key for key in {*one} ^ {*other} if key[0] == GRADIENT]
    for kind, name in (*(key for key in one if key in other and one[key] != other[key]), *alone):
        kinds.setdefault(kind, []).append(name)
    if PARAMETER in kinds:
        return kinds
    sizes = Counter(_sort_of(*key) for key in one)
    apart = Counter(_sort_of(kind, name) for kind, names in kinds.items() for name in names)
    on_purpose = {sort for sort, count in apart.items() if sort[0] in (GRADIENT, STATE) and 2 * count > sizes[sort]}
    found = {kind: [name for name in names if _sort_of(kind, name) not in on_purpose] for kind, names in kinds.items()}
    return {kind: names for kind, names in found.items() if names}


def _sort_of(kind: str, name: str) -> tuple[str, str]:
    """The kind, and for state its key."""
    return kind, name.rpartition("/")[2] if kind == STATE else ""


def _since(one: Trace, other: Trace, equal_in: int | None, kinds: set[str]) -> tuple[int, str, str] | None:
    """The first step after ``equal_in`` in which something of these kinds differs, its kind and its name.

    Statistics of parameters are from before the step. Those that differed although all was equal are of no use: gradients before ranks
    exchange them, or of another implementation.
    """
    steps = sorted(one.keys() & other.keys())
    useless: set[tuple[int, str, str]] = set()
    if equal_in is not None:
        known = [step for step in steps if step <= equal_in]
        if not known:
            return None
        useless = set(_apart(one[known[-1]], other[known[-1]]))
    for step in steps:
        if equal_in is None or step > equal_in:
            for place, kind, name in _apart(one[step], other[step]):
                if kind in kinds and (place, kind, name) not in useless:
                    return step, kind, name
    return None


def _apart(one: Sequence[Sequence[str]], other: Sequence[Sequence[str]]) -> list[tuple[int, str, str]]:
    """What differs between the statistics of one step, each with its place among those of its kind and name."""
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for (kind, name, ours), (its_kind, its_name, theirs) in zip(one, other, strict=False):
        seen[kind, name] += 1
        if (kind, name) == (its_kind, its_name) and ours != theirs:
            found.append((seen[kind, name], kind, name))
    return found


def parameter_of(kind: str, name: str) -> str:
    """The parameter that an item belongs to: state has a key behind its name."""
    return name.rpartition("/")[0] if kind == STATE else name


#: Types of arguments that are no batch.
_SETTINGS = (type(None), bool, int, float, str)
#: The share of values at either end that a range leaves out, the fewest values that have one, and the number of checks in a row in which
#: one rank has to be apart. By simulation: losses of 100 steps, correlated by .99 from step to step, kept two to eight ranks apart in
#: 15 of 1,200 checks, and never in three in a row.
OUTSIDE, FEWEST, IN_A_ROW = 0.1, 20, 3
#: What a rank measures of its own batches.
LOCAL = ("loss", "gradient norm")


def has_own_batches(module: nn.Module, members: Sequence[int]) -> bool:
    """Whether each of these ranks has a batch of its own: under DDP or FSDP2 over just them, and no tensor parallelism."""
    if isinstance(module, DistributedDataParallel):
        return ranks_of(module) == sorted(members)
    if not any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
        return False
    sharded: list[Any] = [parameter for parameter in module.parameters() if is_dtensor(parameter)]
    return bool(sharded) and all(
        sorted(each.device_mesh.mesh.flatten().tolist()) == sorted(members)
        and all(p.is_replicate() for p in each.placements[:-1])
        for each in sharded
    )


def same_batches(step: int, messages: Mapping[int, Mapping[str, Any]]) -> list[LoopFinding]:
    """The finding that all ranks had the same batch in this check and in the last one; ``messages`` by rank."""
    now = {message["batch"] for message in messages.values()}
    before = {message["batch before"] for message in messages.values()}
    # a batch that never changes is no batch, or the whole data
    if len(now) == len(before) == 1 and None not in now | before and now != before:
        return [LoopFinding("same-batches-on-all-ranks", step, step, 1, (), {"ranks": float(len(messages))})]
    return []


def batch_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a model, and one level inside of lists and dicts.

    None of them if an argument is of another kind, since the batch may be in there; nor if all have a single element.
    """
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, Tensor) and not is_dtensor(each) and not each.is_sparse and not each.is_nested:
                found.append(each)
            elif not isinstance(each, _SETTINGS):
                return []
    return found if any(tensor.numel() > 1 for tensor in found) else []


class Range(NamedTuple):
    """Most of the values of one rank since the last check."""

    low: float
    median: float
    high: float


class Streak(NamedTuple):
    """Checks in a row, from that of step ``first`` on, in which the values of one ``rank`` on the board were far from all others."""

    rank: int
    is_above: bool
    first: int
    checks: int


def range_of(values: Sequence[float]) -> Range | None:
    """The range of the values without a tenth at either end; None if there are too few, or if one is not finite."""
    if len(values) < FEWEST or not all(map(math.isfinite, values)):
        return None
    ordered = sorted(values)
    low, median, high = (ordered[round(share * (len(values) - 1))] for share in (OUTSIDE, 0.5, 1 - OUTSIDE))
    return Range(low, median, high)


def local_values(kind: str, records: Sequence[StepRecord], after: int, rank: int) -> list[float]:
    """What this rank has measured of its own batches in the steps ``after`` that one: the loss, or the norm of their gradients where
    :meth:`ModuleMonitor.add_micro_batch_metrics` measures it.
    """
    recent = [record for record in records if record.step > after]
    if kind == "loss":
        loss = loss_among({key for record in recent[-1:] for key in record.values})
        return [record.values[loss] for record in recent if loss in record.values] if loss is not None else []
    norms = [record.context["batch_norms"].get(str(rank)) for record in recent if "batch_norms" in record.context]
    return [sum(of) / len(of) for of in norms if of]


def ranks_apart(
    step: int, ranges: Mapping[int, Mapping[str, Sequence[float]]], streaks: dict[str, Streak], names: Sequence[int]
) -> list[LoopFinding]:
    """The findings that one rank was far from all others in several checks in a row: ``streaks`` by kind, which are brought up to date.
    ``names``: numbers of the ranks among all processes.
    """
    found = []
    for kind in LOCAL:
        known = {rank: Range(*of[kind]) for rank, of in ranges.items() if kind in of}
        if len(known) < len(ranges):
            continue  # some have measured too little since
        before, now = streaks.pop(kind, None), apart(known)
        if now is None:
            continue
        goes_on = before is not None and before[:2] == now
        streaks[kind] = streak = Streak(*now, before.first, before.checks + 1) if goes_on and before else Streak(*now, step, 1)
        if streak.checks >= IN_A_ROW:
            others = statistics.median(each.median for rank, each in known.items() if rank != streak.rank)
            evidence = {"rank": float(names[streak.rank]), "median there": known[streak.rank].median, "median elsewhere": others}
            found.append(LoopFinding("one-rank-apart", streak.first, step, 1, (kind,), evidence))
    return found


def apart(ranges: Mapping[int, Range]) -> tuple[int, bool] | None:
    """The rank whose range is as far from those of all others as the widest of these is wide, while the others overlap; and whether its
    values are larger.
    """
    if len(ranges) < 2:
        return None
    for rank, own in sorted(ranges.items(), key=lambda item: -item[1].median):
        others = [each for number, each in ranges.items() if number != rank]
        if max(each.low for each in others) > min(each.high for each in others):
            continue
        widest = max(each.high - each.low for each in others)
        small, large = sorted((own.median, others[0].median), key=abs)
        if len(ranges) == 2 and small * large >= 0 and abs(large) < 2 * abs(small):
            continue  # where each has the same few rows again and again, ranges are narrow
        above, below = own.low - max(each.high for each in others), min(each.low for each in others) - own.high
        if max(above, below) >= widest and max(above, below) > 0:
            return rank, above > 0
    return None


# --- The check of replicas: when it is due, and what is done with its verdict ---


#: The first step is looked for in the statistics of this number of steps and of parameters.
TRACED_STEPS, TRACED_NAMES = 200, 20
#: Kinds by source, in the order in which a step measures them.
_SOURCES = {keys.PARAMETER: PARAMETER, keys.GRADIENT_BEFORE_CLIP: GRADIENT, keys.GRADIENT: GRADIENT}
#: Steps that others are waited for, and steps after which an alert has reached all ranks.
PATIENCE, AFTER_ALERT = 50, 4
Records = Callable[[], Sequence[StepRecord]]


class ReplicaCheck(Plugin):
    """Compares fingerprints of everything that must be equal on all ranks. Each rank leaves its own; the first one compares them.

    ``every``: steps between two checks; ``sync_every``: ranks average their parameters after each such number of steps, and train by
    themselves in between; ``distinct``: parameters that differ between ranks; ``records``: the last ones of this rank; ``recorded``: those
    of steps that were not monitored, which waits for the device.
    """

    name = "replica_check"
    stops_on_failure = True

    def __init__(
        self,
        every: int,
        sync_every: int,
        distinct: re.Pattern[str] | None,
        ranks: Ranks,
        planner: Planner,
        records: Records,
        recorded: Records,
    ) -> None:
        self._every, self._sync_every, self._distinct, self._common = every, sync_every, distinct, Common(distinct)
        self._ranks, self._planner = ranks, planner
        self._records, self._recorded = records, recorded
        self._board: Board | None = None
        self._has_own_batches = False
        self._brings_buffers = False  # DDP is called, and sends them before it calls the module
        self._has_others = False  # parameters that no optimizer has were compared
        self._has_joined = False
        self._handles = Handles()
        self._facts: dict[str, LoopFinding] = {}
        self._forget()

    def _forget(self) -> None:
        self._end()
        self._due: int | None = None  # None: in the next step of an optimizer
        self._last_good: int | None = None  # the last step in which nothing differed
        self._batch: str | None = None
        self._seen: dict[str, int] = {}  # the last step whose values of this kind are in a range
        self._streaks: dict[str, Streak] = {}

    def _end(self) -> None:
        self._snapshot: Snapshot | None = None
        self.watches_idle_steps = False
        # no more comes to the snapshot, and ranks compare it
        self._messages: Generator[None, None, list[LoopFinding]] | None = None
        self._taken: set[int] = set()  # ids of the optimizers in the snapshot

    def facts(self) -> list[LoopFinding]:
        return list(self._facts.values())

    # --- when ----------------------------------------------------------------------------------------------------------------

    def on_attach(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Begin with the next step: ranks that were initialised differently show there."""
        self.on_detach()
        inventory = self._planner.inventory
        names = [] if inventory is None else inventory.names
        distinct = "" if self._distinct is None else self._distinct.pattern
        subject = (self._every, self._sync_every, distinct, self._ranks.members, names)
        # no store, or one that cannot be connected to again
        with contextlib.suppress(ImportError, RuntimeError, ValueError, TimeoutError):
            self._board = Board(digest_of(subject), self._ranks.rank, self._ranks.count)
        self._common = Common(self._distinct, module, self._ranks.members)
        called = self._common.wrapper or module
        self._has_own_batches = has_own_batches(called, self._ranks.members)
        if self._board is not None and (self._has_own_batches or isinstance(called, DistributedDataParallel)):
            self._handles.of_module(called.register_forward_pre_hook(ModuleHook(self._called), with_kwargs=True))
        if self._board is not None and isinstance(called, DistributedDataParallel):
            self._handles.of_module(called.module.register_forward_pre_hook(ModuleHook(self._inner_called), prepend=True))

    def on_detach(self) -> None:
        self._handles.remove()
        self._forget()
        self._board, self._common = None, Common(self._distinct)
        self._has_others = self._has_joined = False

    @property
    def may_miss(self) -> int:  # type: ignore[override]
        if self._board is None:
            return sys.maxsize
        if self._snapshot is not None or self._due is None:
            return 0
        return max(0, self._due - (self.context.step or 0) - 2)

    def on_alert(self, step: int) -> None:
        if self._snapshot is None:
            self._due = step + AFTER_ALERT

    def on_rewind(self, step: int) -> None:
        self._forget()

    def _is_due(self, step: int) -> bool:
        """Whether ``step`` is that of a check, or the first one after it in which ranks have just averaged their parameters."""
        return (self._due is None or step >= self._due) and step % self._sync_every == 0 and self._messages is None

    # --- a check -------------------------------------------------------------------------------------------------------------

    def on_optimizer_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        if self._sync_every > 1:  # ranks have just averaged their parameters
            self._take_fingerprints(optimizer)

    def on_optimizer_stepped(self, optimizer: Optimizer) -> None:
        if self._sync_every == 1:  # gradients are still there, also those that a closure has computed
            self._take_fingerprints(optimizer)

    def _take_fingerprints(self, optimizer: Optimizer) -> None:
        step = self.context.step
        if self._board is None or step is None or id(optimizer) in self._taken or not self._is_due(step):
            return
        # once ranks have had steps that others had not, the same number is no longer the same moment
        self._has_joined = self._has_joined or self._common.is_joining
        if self._has_joined:
            self._end()
            return
        if self._snapshot is not None and self._snapshot.step != step:
            self._end()  # the batch of a step whose optimizer did not step
        optimizers, stepped = list(self.context.optimizers), self._planner.source.stepped
        names = {id(stepped(parameter)): name for name, parameter in self._parameters()}
        before = optimizers[: optimizers.index(optimizer)] if optimizer in optimizers else []
        first = sum(len(each.param_groups) for each in before)
        items = list(self._common.of_optimizer(optimizer, names, self._sync_every > 1, first))
        if not self._taken and self._sync_every == 1:
            items += self._common.of_scaler(self.context.scaler, optimizer)
        if not self._has_others:
            owned = set(map(id, parameters_of(*optimizers)))
            items += self._common.of_parameters({name: p for name, p in self._parameters() if id(p) not in owned})
            self._has_others = True
        self._begin(step).add(items)
        self._taken.add(id(optimizer))

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if isinstance(module, DistributedDataParallel):  # after a hook of the user, buffers are as that has left them
            sends = module.will_sync_module_buffers()  # type: ignore[no-untyped-call]
            self._brings_buffers = sends and not hasattr(module, "buffer_hook")
        if self._has_own_batches and self._trains(module) and self._is_due(step := self.context.coming_step):
            self.context.call(self._take_batch, step, args, kwargs or {})

    def _inner_called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        brings, self._brings_buffers = self._brings_buffers, False
        if brings and self._trains(module) and self._is_due(step := self.context.coming_step):
            self.context.call(self._take_buffers, step)

    def _trains(self, module: nn.Module) -> bool:
        return module.training and torch.is_grad_enabled() and not self.context.is_paused

    def _take_batch(self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begin(step).add_batch(batch_in(args, kwargs))

    def _take_buffers(self, step: int) -> None:
        if (module := self._common.wrapper) is not None:
            self._begin(step).add_buffers(list(self._common.of_buffers(module)))

    def _begin(self, step: int) -> Snapshot:
        if self._snapshot is None:
            self._snapshot, self.watches_idle_steps = Snapshot(step), True
        return self._snapshot

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        inventory = self._planner.inventory
        for name, parameter, _ in () if inventory is None else inventory.there():
            if not self._planner.source.is_part(parameter):  # whose other elements are on other ranks, so that it is no copy
                yield name, parameter

    def on_step_closed(self, step: ActiveStep) -> None:
        snapshot, board, now = self._snapshot, self._board, self.context.step or 0
        if board is None or snapshot is None or not self._taken:
            return
        if self._messages is None:
            if now < snapshot.step:
                return
            self._messages = self._exchanged(snapshot, board)
        verdict: list[LoopFinding] = []
        try:
            next(self._messages)
            if now <= snapshot.step + PATIENCE:
                return
            verdict = self._not_compared(snapshot.step, board)
        except StopIteration as ended:
            verdict = ended.value
        except TimeoutError:  # the store stands still; the next check asks again
            pass
        except torch.distributed.DistNetworkError:  # the process that has the store has ended, as at the end of a training
            self._board = None
        for fact in verdict:
            self._take(fact)
        if verdict:
            self.context.annotate_run(replicas=[fact.to_dict() for fact in self.facts()])
        self._end()
        self._due = (now // self._every + 1) * self._every

    def _not_compared(self, step: int, board: Board) -> list[LoopFinding]:
        """The finding, where nothing was ever compared because some ranks give no answer. The first rank alone asks which."""
        if self._last_good is not None or not self._ranks.is_first:
            return []
        count, first = board.silent("digests")
        if not count:
            return []
        silent = {"ranks without an answer": float(count), "the first of them": float(self._ranks.members[first])}
        return [LoopFinding("ranks-not-compared", step, step, 1, (), {**silent, "ranks": float(self._ranks.count)})]

    def _take(self, fact: LoopFinding) -> None:
        known = self._facts.get(fact.rule)
        if known is not None:
            self._facts[fact.rule] = LoopFinding(fact.rule, known.first, fact.last, known.count + 1, known.where, known.evidence)
            return
        self._facts[fact.rule] = fact
        mistake = RANK_FAULTS[fact.rule]
        if self._ranks.is_first and mistake.warns:
            self.context.warn(f"replicas:{fact.rule}", f"{mistake.cause} ({_in_words(fact)}). {mistake.advice}")

    # --- the messages of ranks about one check, over a few steps -----------------------------------------------------------------

    def _exchanged(self, snapshot: Snapshot, board: Board) -> Generator[None, None, list[LoopFinding]]:
        """Returns the verdict; yields, once in each step, as long as a message is missing: nothing waits for another rank. The first rank
        asks those that differ what does, and since when.
        """
        step, is_first, left = snapshot.step, board.rank == 0, dict[str, Any]()

        def put(name: str, message: Mapping[str, Any]) -> None:
            left[name] = {"step": step, **message}
            board.put(name, left[name])

        def read(name: str, ranks: Sequence[int]) -> Generator[None, None, dict[int, Any]]:
            while (found := board.read(name, ranks, step)) is None:
                yield
                if board.has_changed():
                    for each in left.items():
                        board.put(*each)
            return found

        yield from snapshot.land()
        board.has_changed()
        local = self._next_ranges(step) if self._sync_every == 1 and self._has_own_batches else {}
        before, self._batch = self._batch, snapshot.batch
        shares = {share: digest_of(sorted(found.items())) for share, found in snapshot.by_share.items()}
        put("digests", {"shares": shares, "batch": snapshot.batch, "batch before": before, "local": local})
        differ: list[Suspects] = []
        pairs: list[list[Found]] = []
        if is_first:
            digests = yield from read("digests", range(board.count))
            differ = suspects({rank: message["shares"] for rank, message in digests.items()})
            ranges = {rank: message["local"] for rank, message in digests.items()}
            facts = same_batches(step, digests) + ranks_apart(step, ranges, self._streaks, self._ranks.members)
            asked = sorted({rank for who in differ for rank in (who.reference, who.odd)})
            is_compared = compared({rank: message["shares"] for rank, message in digests.items()})
            put("question", {"ranks": asked, "facts": [fact.to_dict() for fact in facts], "compared": is_compared})
        question = (yield from read("question", [0]))[0]
        asked, found, is_good = question["ranks"], question["facts"], question["compared"]
        if board.rank in asked:
            values = {share: [[*key, value] for key, value in of.items()] for share, of in snapshot.by_share.items()}
            put("answer", {"shares": values})
            yield  # so that the trace has the next step, in which a difference of state shows
        if is_first and asked:
            answers = yield from read("answer", asked)
            pairs = [[_answered(answers[rank], who.share) for rank in (who.reference, who.odd)] for who in differ]
            keys = (key for one, other in pairs for key in dict.fromkeys((*one, *other)) if one.get(key) != other.get(key))
            put("names", {"names": [*dict.fromkeys(parameter_of(*key) for key in keys)][:TRACED_NAMES]})
        if board.rank in asked:
            put("trace", self._trace((yield from read("names", [0]))[0]["names"]))
        if is_first and asked:
            traces = yield from read("trace", asked)
            put("verdict", {"facts": [fact.to_dict() for fact in self._verdicts(step, differ, pairs, traces)]})
        if asked:
            verdict = (yield from read("verdict", [0]))[0]["facts"]
            found, is_good = [*found, *verdict], not verdict  # what differs then does so on purpose
        if is_good:
            self._last_good = step
        return [LoopFinding.of_dict(fact) for fact in found]

    def _next_ranges(self, step: int) -> dict[str, list[float]]:
        """The ranges of this rank's own values since the ranges before, where there are enough of them."""
        records, found = self._records(), dict[str, list[float]]()
        for kind in LOCAL:
            values = local_values(kind, records, self._seen.get(kind, -1), self._ranks.rank)
            if (each := range_of(values)) is not None:
                found[kind] = [float(f"{value:.6g}") for value in each]
            if len(values) >= FEWEST:
                self._seen[kind] = step
        return found

    def _verdicts(
        self, step: int, differ: Sequence[Suspects], pairs: Sequence[Sequence[Found]], traces: Mapping[int, Any]
    ) -> list[LoopFinding]:
        found: dict[str, LoopFinding] = {}
        for who, (reference, other) in zip(differ, pairs, strict=True):
            if kinds := differing(reference, other):
                sizes = Counter(kind for kind, _ in {*reference, *other})
                fact = self._fact(step, who, kinds, sizes, [traces[rank] for rank in (who.reference, who.odd)])
                found.setdefault(fact.rule, fact)  # one finding for each rule, that of the first share
        return list(found.values())

    def _fact(
        self, step: int, who: Suspects, kinds: Mapping[str, Sequence[str]], sizes: Mapping[str, int], traces: Sequence[Any]
    ) -> LoopFinding:
        """What differs between two ranks now by kind, of how many, and as far as their ``traces`` tell, what differed first."""
        kind = next(kind for kind in (NUMBER, BUFFER, GRADIENT, STATE, PARAMETER) if kind in kinds)
        name, first, equal_in = kinds[kind][0], None, self._last_good
        if self._sync_every == 1:  # else the statistics of steps are not those of equal ranks
            # before the first check it is unknown whether gradients are equal when they are measured
            of_use = {NUMBER, PARAMETER, *([GRADIENT] if equal_in is not None or GRADIENT in kinds else [])}
            one, other = ({int(at): of for at, of in each["steps"].items()} for each in traces)
            if (since := _since(one, other, equal_in, of_use)) is not None:
                first, earlier, name_then = since
                if earlier != PARAMETER or kind == PARAMETER:  # state is in no statistics, so it may have been earlier
                    kind, name = earlier, name_then
        evidence: dict[str, float] = {"rank": self._ranks.members[who.odd], "unlike rank": self._ranks.members[who.reference]}
        evidence["ranks like it"], evidence["ranks like the other"] = who.alike, who.usual
        if kind in kinds:  # else they are equal again
            evidence[f"{kind}s that differ"], evidence[f"{kind}s"] = len(kinds[kind]), sizes[kind]
        ours, theirs = (each["norms"].get(parameter_of(kind, name)) for each in traces)
        if ours and theirs:
            evidence["norm of the parameter there"], evidence["and elsewhere"] = theirs, ours
        if first is None and equal_in is not None:
            evidence["equal until step"] = equal_in
        rule = "ranks-not-synchronised" if kind == GRADIENT else "ranks-diverged"
        numbers = {key: float(value) for key, value in evidence.items()}
        return LoopFinding(rule, step if first is None else first, step, 1, (name,), numbers)

    def _trace(self, names: Sequence[str]) -> dict[str, Any]:
        """Hashes of the statistics of these parameters in the last steps, and the last norms."""
        steps: dict[int, list[tuple[str, str, str]]] = {}
        norms: dict[str, float] = {}
        known = {record.step: record for record in (*self._recorded(), *self._records())}
        for _, record in sorted(known.items())[-TRACED_STEPS:]:
            rates = record.context.get("lr", [])
            found = steps[record.step] = [(NUMBER, rate_name(number), repr(rate)) for number, rate in enumerate(rates)]
            if "amp_scale" in record.context:
                found.append((NUMBER, SCALE, repr(record.context["amp_scale"])))
            for source, kind in _SOURCES.items():
                table = record.tables.get(source)
                if table is None:
                    continue
                place = {name: row for row, name in enumerate(table.names)}
                there = [name for name in names if name in place]
                found += [(kind, name, digest_of(table.rows[place[name]].tolist())) for name in there]
                if kind == PARAMETER:
                    norms.update((name, float(table.rows[place[name], Column.SQUARE_SUM]) ** 0.5) for name in there)
        return {"steps": steps, "norms": norms}


def _answered(message: Mapping[str, Any], share: str) -> Found:
    return {(kind, name): value for kind, name, value in message["shares"].get(share, ())}


def _in_words(fact: LoopFinding) -> str:
    numbers = {name: f"{value:,.0f}" if value.is_integer() else f"{value:.6g}" for name, value in fact.evidence.items()}
    if not fact.where:
        return f"first in step {fact.first:,}"
    if "unlike rank" not in numbers:
        middle = f"{numbers['median there']} in the median, elsewhere {numbers['median elsewhere']}"
        return f"{fact.where[0]} of rank {numbers['rank']}: {middle}, in steps {fact.first:,} to {fact.last:,}"
    found = f"rank {numbers['rank']} is unlike rank {numbers['unlike rank']} in {fact.where[0]} from step {fact.first:,} on"
    if fact.evidence["ranks like it"] >= fact.evidence["ranks like the other"]:
        return f"{found}, and either may be the wrong one"
    return f"{found}, which is as on {numbers['ranks like the other']} ranks"
