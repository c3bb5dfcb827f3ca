"""Measures one version of the package on request, for :mod:`benchmarks.commits`: reads a name from each line, prints a number.

The first folder on the path has the package; everything else comes from this checkout.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn

import torch_gradmon as gradmon

from . import rivals
from .sets import SETS, Tensors, build, gradients

NINE = ("norm", "rms", "mean", "std", "max", "min_value", "max_value", "sparsity", "nonfinite_count")
OLDER_NAMES = {"nonfinite_count": "nonfinite"}
SMALL = "small_1024"
DEMO_STEPS, DEMO_FIRST = 150, 8
#: Beyond these the audit of the loop rests in most steps.
IDLE_FIRST, IDLE_STEPS = 2000, 300
#: Steps of a loop before its time counts, those of one block, one of which has updates, and blocks of each loop in a turn.
OWN_FIRST, OWN_STEPS, OWN_BLOCKS = 350, 10, 7


def _model(name: str) -> nn.Module:
    if name != SMALL:
        return build(SETS[name], torch.device("cpu"))
    model = Tensors([(1024,)] * 1000)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return model


def _nine(model: nn.Module, stack: ExitStack, kernel: str = "auto") -> rivals.Run:
    """Nine built-ins of every gradient, by key in a dict."""
    with patch.dict(os.environ, GRADMON_KERNEL=kernel):
        monitor = stack.enter_context(gradmon.ModuleMonitor(model))
    for metric in NINE:
        try:
            monitor.add_gradient_metric(metric)
        except ValueError:  # the name it had in older versions
            monitor.add_gradient_metric(OLDER_NAMES[metric])
    return rivals.step_by_hand(monitor)


MAKERS: dict[str, Callable[[nn.Module, ExitStack], rivals.Run]] = {
    "default": _nine,
    "eager": lambda model, stack: _nine(model, stack, "torch"),
    "compiled": lambda model, stack: _nine(model, stack, "build"),
    "torch_module_monitor": rivals.torch_module_monitor,
    "wandb_watch": rivals.wandb_watch,
}


class _Small(nn.Module):
    """A transformer of 148 tensors whose arithmetic takes little: 12 layers of width 8."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.last = nn.Embedding(13, 8), nn.Embedding(8, 8), nn.LayerNorm(8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 32, 0.0, batch_first=True) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for layer in self.layers:
            y = layer(y)
        return self.last(y) @ self.tokens.weight.t()


class _Training:
    """A loop, of 6 tensors or of 148, with a monitor of this ``preset``, or without."""

    def __init__(self, tensors: int, preset: str | None, stack: ExitStack) -> None:
        torch.manual_seed(0)
        widths = ((16, 32), (32, 32), (32, 4))
        layers = [layer for sizes in widths for layer in (nn.Linear(*sizes), nn.ReLU())][:-1]
        self._model: nn.Module = _Small() if tensors == 148 else nn.Sequential(*layers)
        assert len(list(self._model.parameters())) == tensors
        self._x = torch.randint(13, (8, 8)) if tensors == 148 else torch.randn(64, 16)
        self._y = torch.randint(13, (64,)) if tensors == 148 else torch.randint(4, (64,))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6)
        self._monitor = gradmon.watch(self._model, self._optimizer, preset=preset) if preset else None
        if self._monitor is not None:
            stack.callback(self._monitor.detach)
        self.run(OWN_FIRST)

    def run(self, steps: int) -> float:
        """Seconds of the processor."""
        start = time.process_time()
        for _ in range(steps):
            loss = nn.functional.cross_entropy(self._model(self._x).flatten(0, -2), self._y)
            self._optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            if self._monitor is not None:
                self._monitor.log_scalar("loss", loss.detach())
        return time.process_time() - start


class Worker:
    """The contenders of this process, made when they are first asked for, on gradients of their own."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._models: dict[str, tuple[nn.Module, list[Tensor]]] = {}
        self._runs: dict[str, rivals.Run] = {}
        self._loops: dict[str, list[_Training]] = {}
        self._idle: tuple[nn.Module, torch.optim.Optimizer] | None = None

    def answer(self, name: str) -> float:
        """The figure: a time over the floor, or for ``demo`` a share in percent, for ``idle`` and ``step`` microseconds."""
        if name == "demo":
            return demo_share()
        if name == "idle":
            return self._idle_step()
        of, _, who = name.partition("/")
        if of == "step":
            return self._own_time(who)
        if of not in self._models:
            model = _model(of)
            self._models[of] = model, gradients(model)
        model, tensors = self._models[of]
        if name not in self._runs:
            self._runs[name] = MAKERS[who](model, self._stack)
            for _ in range(3):
                self._runs[name]()
        return _over_floor(self._runs[name], tensors)

    def _own_time(self, which: str) -> float:
        """What a step takes longer with a monitor than without: the median of blocks in turns, the middle ones with it."""
        if which not in self._loops:
            tensors, preset = (148, "full") if which == "full" else (int(which), "standard")
            self._loops[which] = [_Training(tensors, each, self._stack) for each in (None, preset)]
        plain, watched = self._loops[which]
        found = []
        for _ in range(OWN_BLOCKS):
            first, *times, last = (loop.run(OWN_STEPS) for loop in (plain, watched, watched, plain))
            found.append(1e6 * (sum(times) - first - last) / (2 * OWN_STEPS))
        return statistics.median(found)

    def _idle_step(self) -> float:
        if self._idle is None:
            model = Tensors([(8,)] * 150)
            model.forward = lambda: torch.stack(list(model.tensors)).sum()  # type: ignore[method-assign]
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            self._stack.callback(gradmon.watch(model, optimizer, every=10**9).detach)
            self._idle = model, optimizer
            for _ in range(IDLE_FIRST):
                optimizer.zero_grad()
                model().backward()
                optimizer.step()
        model, optimizer = self._idle
        before = [hook for _, hook in model._forward_pre_hooks.items()]
        around = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
        times = []
        for _ in range(IDLE_STEPS):
            start = time.perf_counter()
            for hook in before:
                hook(model, ())
            for hook in around:
                hook(optimizer, (optimizer,), {})  # type: ignore[operator]
            times.append(1e6 * (time.perf_counter() - start))
        return statistics.median(times)


def _over_floor(run: rivals.Run, tensors: list[Tensor]) -> float:
    """The time of ``run`` over that of one sum of each tensor, before and after it."""
    marks = [time.perf_counter()]
    for call in (lambda: [tensor.sum() for tensor in tensors], run, lambda: [tensor.sum() for tensor in tensors]):
        call()
        marks.append(time.perf_counter())
    first, own, last = (b - a for a, b in itertools.pairwise(marks))
    return 2 * own / (first + last)


def demo_share() -> float:
    """The monitor's share of the time of the demo's training, in percent, in the median step."""
    from torch_gradmon.cli import demo
    from torch_gradmon.cli.demo_model import CharacterGPT, Sizes, corpus

    torch.manual_seed(0)
    _, data, characters = corpus()
    sizes = Sizes()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        demo.train(CharacterGPT(characters, sizes), data, sizes, DEMO_STEPS, Path(folder), 0)
        records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    # in older versions a percentage
    percent = [
        100 * record["gradmon/overhead_fraction"] if "gradmon/overhead_fraction" in record else record["gradmon/overhead_pct"]
        for record in records
        if not record.keys().isdisjoint(("gradmon/overhead_fraction", "gradmon/overhead_pct"))
    ]
    return statistics.median(percent[DEMO_FIRST:])


def main() -> None:
    """Answer until the input ends."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        worker = Worker(stack)
        for line in sys.stdin:
            print("=", worker.answer(line.strip()), flush=True)


if __name__ == "__main__":
    main()
