"""In one real step nothing calls up the layers but the places that dispatch."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import torch_gradmon as gradmon

_PACKAGE = "/torch_gradmon/"
_LAYERS = {
    **dict.fromkeys(("core",), 1),
    **dict.fromkeys(("statistics",), 2),
    **dict.fromkeys(("step",), 3),
    **dict.fromkeys(("capture", "spikes", "runs", "sinks"), 4),
    **dict.fromkeys(("plugins", "analysis"), 5),
    **dict.fromkeys(("monitor",), 6),
    **dict.fromkeys(("integrations",), 7),
    **dict.fromkeys(("cli",), 8),
}
#: Where a call may go up: the fence runs what it is given, hooks call the method that they hold, and objects ask through a protocol or a
#: function that the layer above has given them.
_DISPATCH = {
    "core/fence.py": "runs what passes through the fence",
    "capture/hooks.py": "hooks on modules and parameters",
    "core/validation.py": "the cadence is the user's function",
}

#: Calls through an object or a function that the layer above has handed down, for a reason.
_HANDED_DOWN = {
    ("plugins", "monitor/builder.py"): "what a monitor offers its plugins",
    ("step/exchange.py", "spikes/detector_set.py"): "which logged values detectors need on all ranks",
    (
        "step/record_builder.py",
        "capture/module_values.py",
    ): "built-in values of modules, evaluated when the step's rows have come",
}


class Trace:
    """Calls of the package's functions: the files that they reach, and those that go up the layers."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self.up: Counter[tuple[str, str]] = Counter()

    @staticmethod
    def _file(frame: FrameType | None) -> str:
        name = "" if frame is None else frame.f_code.co_filename
        return name.rpartition(_PACKAGE)[2] if _PACKAGE in name else ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call" or not (callee := self._file(frame)):
            return
        self.files[callee] += 1
        back = frame.f_back
        while back is not None and back.f_code.co_name in ("<listcomp>", "<genexpr>", "<dictcomp>", "<lambda>"):
            back = back.f_back
        caller = self._file(back)
        is_up = bool(caller) and self._layer(callee) > self._layer(caller) and "<" not in frame.f_code.co_name
        handed = any(caller.startswith(above) and callee == below for above, below in _HANDED_DOWN)
        if is_up and not handed and caller not in _DISPATCH:
            self.up[caller, callee] += 1

    @staticmethod
    def _layer(file: str) -> int:
        return _LAYERS[file.partition("/")[0]]

    @contextmanager
    def on(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(before)


def test_a_step_calls_up_where_it_dispatches_and_nowhere_else(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = gradmon.watch(model, optimizer, run_dir=tmp_path)
    monitor.add_sink(lambda values, step: None)
    trace = Trace()

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    for _ in range(55):
        step()
    with trace.on():
        step()
    assert {file.partition("/")[0] for file in trace.files} >= {"core", "statistics", "step", "capture", "monitor"}
    assert dict(trace.up) == {}
