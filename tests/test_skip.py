"""A skipped step leaves nothing behind: with every optimizer of torch.optim, as if the batch had never come."""

from __future__ import annotations

import inspect
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_gradmon import ModuleMonitor, Skip, SpikeCapture, SpikeDetector
from torch_gradmon.spikes import Threshold

pytestmark = pytest.mark.filterwarnings("ignore::torch_gradmon.GradmonWarning", "ignore:.*closure.*:UserWarning")

CLASSES = {
    name: found
    for name, found in vars(torch.optim).items()
    if inspect.isclass(found) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer
}
OPTIONS = {"SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, "LBFGS": {"max_iter": 3}}
MODES = ("none", "scaler", "closure", "accumulation")
#: Above every good gradient norm, below every bad one.
LIMIT = 1e4


def _variants() -> list[tuple[str, str, str]]:
    found = []
    for name, cls in CLASSES.items():
        flags = ["plain", *(flag for flag in ("fused", "foreach") if flag in inspect.signature(cls).parameters)]
        found += [(name, flag, mode) for flag, mode in itertools.product(flags, MODES)]
    return found


def _refused(name: str, flag: str, mode: str) -> str:
    """What torch itself cannot do, by the words in which it says so."""
    if name == "LBFGS" and mode != "closure":
        return "missing 1 required positional argument: 'closure'" if mode != "scaler" else "missing 1 required|not supported"
    if flag == "fused" and name not in ("Adam", "AdamW", "SGD", "Adagrad"):
        return "fused"
    return ""


class Task:
    """A model of one matrix, an optimizer, and a loop in one of the modes. The same twice gives the same bits."""

    def __init__(self, name: str, flag: str, mode: str) -> None:
        torch.manual_seed(0)
        sparse = name == "SparseAdam"
        self.model: nn.Module = nn.Embedding(6, 3, sparse=True) if sparse else nn.Linear(3, 2, bias=False)
        options: dict[str, Any] = {**OPTIONS.get(name, {}), **({flag: True} if flag != "plain" else {})}
        if flag == "plain" and "foreach" in inspect.signature(CLASSES[name]).parameters:
            options["foreach"] = False
        self.optimizer = CLASSES[name](self.model.parameters(), lr=0.01, **options)
        self.mode = mode
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if mode == "scaler" else None
        self.data = torch.Generator().manual_seed(1)
        self.sparse = sparse

    def batches(self) -> list[Tensor]:
        count = 2 if self.mode == "accumulation" else 1
        if self.sparse:
            return [torch.randint(6, (4,), generator=self.data) for _ in range(count)]
        return [torch.randn(4, 3, generator=self.data) for _ in range(count)]

    def train(self, bad: float = 1.0) -> None:
        """One step; ``bad`` multiplies the loss."""
        batches = self.batches()

        def backward() -> Tensor:
            self.optimizer.zero_grad()
            losses = [self.model(batch).square().sum() * bad for batch in batches]
            for loss in losses:
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            return sum(losses)  # type: ignore[return-value]

        if self.mode == "closure":
            self.optimizer.step(backward)
            return
        backward()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def content(self) -> bytes:
        """Every byte of parameters, optimizer and scaler."""
        scaler = None if self.scaler is None else self.scaler.state_dict()
        return _bytes([list(self.model.state_dict().items()), self.optimizer.state_dict(), scaler])


def _bytes(value: Any) -> bytes:
    if isinstance(value, Tensor):
        return pickle.dumps((str(value.dtype), tuple(value.shape))) + bytes(
            value.detach().flatten().contiguous().view(torch.uint8).tolist()
        )
    if isinstance(value, dict):
        return b"{" + b",".join(_bytes(k) + b":" + _bytes(v) for k, v in value.items()) + b"}"
    if isinstance(value, (list, tuple)):
        return b"[" + b",".join(map(_bytes, value)) + b"]"
    return pickle.dumps(value)


def _skips(task: Any, skip: Any = None, **more: Any) -> ModuleMonitor:
    monitor = ModuleMonitor(task.model, on_spike=skip or Skip(limit=None), **more)
    monitor.add_detector(SpikeDetector(Threshold(LIMIT)))
    return monitor.attach(task.optimizer, scaler=task.scaler)


#: What skips a hundred steps always; all skip a thousand in the slow tests.
LONG = {
    ("AdamW", "fused", "none"),
    ("Adam", "plain", "scaler"),
    ("SGD", "foreach", "accumulation"),
    ("LBFGS", "plain", "closure"),
}


@pytest.mark.parametrize(("name", "flag", "mode"), _variants())
def test_skips_leave_every_byte_as_it_was(name: str, flag: str, mode: str) -> None:
    _leaves_nothing(name, flag, mode, 100 if (name, flag, mode) in LONG else 12)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "flag", "mode"), _variants())
def test_a_thousand_skips_leave_every_byte_as_it_was(name: str, flag: str, mode: str) -> None:
    _leaves_nothing(name, flag, mode, 1000)


def _leaves_nothing(name: str, flag: str, mode: str, count: int) -> None:
    if refusal := _refused(name, flag, mode):
        with pytest.raises((RuntimeError, TypeError, ValueError), match=refusal):
            Task(name, flag, mode).train()
        return
    reference, task = Task(name, flag, mode), Task(name, flag, mode)
    monitor = _skips(task, spike_capture=SpikeCapture(after=0))
    # the scaler minds NaN by itself; there, and nowhere else, it is a refusal
    bad = itertools.cycle([1e9, 1e7] if mode == "scaler" else [1e9, math.nan, math.inf])
    for _ in range(3):
        reference.train()
        task.train()
        assert not monitor.step_was_skipped
    assert task.content() == reference.content()
    addresses = [p.data_ptr() for p in task.model.parameters()]
    for _ in range(count):
        task.train(next(bad))
        assert monitor.step_was_skipped
    assert task.content() == reference.content()
    assert [p.data_ptr() for p in task.model.parameters()] == addresses
    reference.data.set_state(task.data.get_state())  # the batches that never came
    for _ in range(2):
        reference.train()
        task.train()
        assert task.content() == reference.content()
    counts = monitor.get_step_counts()
    assert (counts.attempted, counts.applied, counts.skipped, counts.overflowed) == (count + 5, 5, count, 0)
    assert counts.nonfinite == (0 if mode == "scaler" else count - -(-count // 3))
