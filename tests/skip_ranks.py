"""What the ranks of a test do where steps are skipped: one of them sees what the others do not."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.exchange import Collectives
from torch_gradmon import ModuleMonitor, Rollback, Skip, SpikeCapture, SpikeDetector, SpikeError
from torch_gradmon.spikes import Threshold

from .rank_runs import WRAPS, Net
from .ranks import impatient

LIMIT, BAD = 1e4, 1e7
#: Of the steps of a run those that are poisoned.
POISONED = (4, 5)


def _model(wrap: str) -> nn.Module:
    return Net(idle=False) if wrap == "plain" else WRAPS[wrap]().model


def _optimizer(model: nn.Module, name: str = "AdamW", **options: Any) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)(model.parameters(), lr=1e-2, **options)  # type: ignore[no-any-return]


def _backward(model: nn.Module, step: int, by: float = 1.0, scaler: Any = None) -> Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    loss = model(x).square().mean() * by
    (loss if scaler is None else scaler.scale(loss)).backward()
    if not hasattr(model, "require_backward_grad_sync") and not hasattr(model, "set_requires_gradient_sync"):
        for parameter in model.parameters():  # as people write it by hand
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    return loss.detach()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def _parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [_local(tensor.detach()).clone() for tensor in (*model.parameters(), *states)]


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def _watch(
    model: nn.Module, optimizer: Any, policy: Any, detector: SpikeDetector | None = None, scaler: Any = None
) -> ModuleMonitor:
    monitor = ModuleMonitor(model, on_spike=policy, spike_capture=SpikeCapture(after=0))
    monitor.add_detector(detector or SpikeDetector(Threshold(LIMIT)))
    return monitor.attach(optimizer, scaler=scaler)


class Fails(Threshold):
    """A rule that fails on one rank."""

    def __init__(self, limit: float, fails: bool) -> None:
        super().__init__(limit)
        self._fails, self._asked = fails, 0

    def score(self, value: float) -> float:
        self._asked += 1
        if self._fails and self._asked > 3:
            raise ValueError("only here")
        return value


def poisoned(rank: int, wrap: str, how: str) -> tuple[list[bool], bool, list[str]]:
    """Which steps were skipped, whether the end is that of a run that never saw them, and what was done.

    ``how``: what rank 1 alone has in the poisoned steps: ``"loss"`` a loss of NaN, ``"large"`` a large one, ``"gradient"`` a NaN in a
    gradient after it was reduced, ``"logged"`` a large value that it logs, ``"rule"`` a rule that fails, while the loss is large on
    both.
    """
    warnings.simplefilter("ignore")
    detector = SpikeDetector(Fails(LIMIT, how == "rule" and rank == 1))
    if how == "logged":
        detector = SpikeDetector(Threshold(LIMIT), signal="loss")
    ends, flags, actions = [], [], []
    for policy in (None, Skip(limit=None)):
        model = _model(wrap)
        optimizer = _optimizer(model)
        monitor = None if policy is None else _watch(model, optimizer, policy, detector)
        for step in range(8):
            if monitor is None and step in POISONED:
                continue
            is_bad = step in POISONED and (rank == 1 or how == "rule")
            optimizer.zero_grad()
            by = {"loss": float("nan"), "large": BAD, "rule": BAD}.get(how, 1.0) if is_bad else 1.0
            loss = _backward(model, step, by)
            if is_bad and how == "gradient":
                gradient = next(p.grad for p in model.parameters() if p.grad is not None and _local(p.grad).numel())
                _local(gradient).view(-1)[0] = float("nan")
            if monitor is not None and how == "logged":
                monitor.log_scalar("loss", BAD if is_bad else loss)
            optimizer.step()
            if monitor is not None:
                flags.append(monitor.step_was_skipped)
                monitor.get_step_metrics()
                record = monitor._runtime.pipeline.last
                actions.append("" if record is None else str(record.context.get("skipped", "")))
        ends.append(_parts(model, optimizer))
        if monitor is not None:
            monitor.detach()
    return flags, _equal(*ends), actions


def stopped(rank: int, wrap: str) -> tuple[int, bool]:
    """The step at which this rank was stopped, and whether that left everything as it was."""
    warnings.simplefilter("ignore")
    model = _model(wrap)
    optimizer = _optimizer(model)
    monitor = _watch(model, optimizer, Skip(limit=2, on_limit="stop"))
    for step in itertools.count():
        optimizer.zero_grad()
        _backward(model, step, BAD if rank == 1 and step > 2 else 1.0)
        before = _parts(model, optimizer)
        try:
            optimizer.step()
        except SpikeError:
            monitor.detach()
            return step, _equal(before, _parts(model, optimizer))
    raise AssertionError


def with_a_failing_rule(rank: int, policy: Any) -> tuple[list[bool], dict[str, int]]:
    """The rule of rank 1 for a logged value fails in step 3, and step 5 is a spike by another rule."""
    warnings.simplefilter("ignore")
    model = _model("ddp")
    optimizer = _optimizer(model)
    monitor = ModuleMonitor(model, on_spike=policy, spike_capture=SpikeCapture(after=0))
    monitor.add_detector(SpikeDetector(Threshold(LIMIT)))
    monitor.add_detector(SpikeDetector(Fails(LIMIT, rank == 1), signal="loss"))
    monitor.attach(optimizer)
    flags = []
    for step in range(8):
        optimizer.zero_grad()
        loss = _backward(model, step, BAD if step == 5 else 1.0)
        monitor.log_scalar("loss", loss.clamp(max=1.0))
        optimizer.step()
        flags.append(monitor.step_was_skipped)
    found = monitor.warning_counts()
    monitor.detach()
    return flags, found


def refused_by_one(rank: int, wrap: str, fused: bool) -> tuple[list[bool], bool, tuple[int, ...]]:
    """The scaler of rank 1 alone refuses step 2: which steps were skipped, and whether the ranks are still the same."""
    warnings.simplefilter("ignore")
    model = _model(wrap)
    optimizer = _optimizer(model, **({"fused": True} if fused else {"foreach": False}))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    monitor = _watch(model, optimizer, Skip(), scaler=scaler)
    flags = []
    for step in range(5):
        optimizer.zero_grad()
        _backward(model, step, scaler=scaler)
        if rank == 1 and step == 2:
            gradient = next(p.grad for p in model.parameters() if p.grad is not None)
            gradient.view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        flags.append(monitor.step_was_skipped)
    sums = [torch.stack([part.double().sum() for part in _parts(model, optimizer)])]
    gathered = [torch.zeros_like(sums[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, sums[0])
    counts = monitor.get_step_counts()
    monitor.detach()
    return flags, torch.equal(*gathered), (counts.attempted, counts.applied, counts.skipped, counts.overflowed)


def went_back(rank: int, wrap: str, directory: str, lost: bool) -> tuple[list[int], bool]:
    """Rank 1 alone has a spike in step 12: to which steps it went back, and whether the end is that of a run without those batches.

    ``lost``: rank 1 cannot read its snapshots any more then.
    """
    warnings.simplefilter("ignore")
    ends, went, load = [], [], torch.load

    def unreadable(*args: object, **options: object) -> None:
        raise OSError("input/output error")

    for policy in (None, Rollback(every=5, margin=0, keep=2, directory=directory or None, skip_batches=1)):
        model = _model(wrap)
        optimizer = _optimizer(model, "SGD", momentum=0.9)
        monitor = None if policy is None else _watch(model, optimizer, policy)
        numbers = iter(range(20) if monitor is not None else [*range(11), *range(14, 20)])
        for number in numbers:
            if lost and rank == 1 and number == 12:
                torch.load = unreadable
            optimizer.zero_grad()
            _backward(model, number, BAD if rank == 1 and number == 12 and monitor is not None else 1.0)
            optimizer.step()
            if monitor is not None and (back := monitor.last_record.rollback) is not None:
                went.append(back.to_step)
                for _ in range(back.skip_batches):
                    next(numbers)
        ends.append(_parts(model, optimizer))
        if monitor is not None:
            monitor.detach()
    torch.load = load
    return went, _equal(*ends)


def with_other_snapshots(rank: int, what: str, directory: str) -> tuple[list[int], bool]:
    """To which steps this rank went back, and whether the ranks are the same in the end.

    ``what``: of rank 1 ``"taking"`` the snapshot of step 10 fails, or ``"other"`` an object that belongs to it, or ``"directory"``
    the directory is another one.
    """
    warnings.simplefilter("ignore")

    class Other:
        def state_dict(self) -> dict[str, int]:
            if what == "taking" and rank == 1 and step == 11:
                raise OSError("no space left")
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if what == "other" and rank == 1:
                raise ValueError("not here")

    other = Other()
    model = _model("ddp")
    optimizer = _optimizer(model)
    place = f"{directory}/{rank}" if what == "directory" else None
    monitor = _watch(model, optimizer, Rollback(every=5, margin=0, extra_state=(other,), directory=place))
    went = []
    for step in range(16):
        optimizer.zero_grad()
        _backward(model, step, BAD if step == 13 else 1.0)
        optimizer.step()
        if monitor.last_record.rollback is not None:
            went.append(monitor.last_record.rollback.to_step)
    monitor.detach()
    sums = torch.stack([part.double().sum() for part in _parts(model, optimizer)])
    gathered = [torch.zeros_like(sums) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, sums)
    return went, torch.equal(*gathered)


@impatient()
def disagreeing(rank: int, how: str) -> tuple[list[bool], dict[str, int]]:
    """Rank 1 has no monitor, one that does not skip, or one that skips otherwise; all have a spike."""
    warnings.simplefilter("ignore")
    model = _model("ddp")
    optimizer = _optimizer(model)
    policies = {"none": None, "warns": "warn", "otherwise": Skip(limit=7)}
    monitor = _watch(model, optimizer, "skip" if rank == 0 else policies[how]) if rank == 0 or how != "none" else None
    flags = []
    for step in range(4):
        optimizer.zero_grad()
        _backward(model, step, BAD if step == 2 else 1.0)
        optimizer.step()
        flags.append(monitor is not None and monitor.step_was_skipped)
    found = {} if monitor is None else monitor.warning_counts()
    if monitor is not None:
        monitor.detach()
    return flags, found


def collectives(rank: int, wrap: str, policy: Any) -> list[int]:
    """How many collectives of ours each step has."""
    warnings.simplefilter("ignore")
    model = _model(wrap)
    optimizer = _optimizer(model)
    monitor = _watch(model, optimizer, copy.copy(policy))
    calls = []
    for step in range(6):
        optimizer.zero_grad()
        with Collectives() as counts:
            _backward(model, step, BAD if step == 4 else 1.0)
            optimizer.step()
        calls.append(len(counts.calls))
    monitor.detach()
    return calls
