"""The contenders: each turns a model with gradients into a function that measures them once."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.core.moments import ALL_COLUMNS, VIEWS, Column
from torch_gradmon.statistics import cpp, kernel_build
from torch_gradmon.statistics.eager import EagerStatistics
from torch_gradmon.statistics.request import Request

from . import rivals
from .rivals import LeftOut
from .sets import gradients
from .timing import Run

#: The five built-ins as functions for torch-module-monitor.
FIVE = ("norm", "mean", "std", "max", "sparsity")
_BUT_NEAR_ZERO = ALL_COLUMNS - {Column.NEAR_ZERO}
_NORM = frozenset({Column.COUNT, Column.SQUARE_SUM})


def _eager(columns: frozenset[Column]) -> Callable[[nn.Module, ExitStack], Run]:
    return lambda model, _: _measuring(EagerStatistics(), model, columns)


def _fused(model: nn.Module, _: ExitStack) -> Run:
    try:
        kernel = cpp.found()[0] or cpp.compiled()
    except RuntimeError as error:
        raise LeftOut(str(error)) from error
    return _measuring(cpp.CppStatistics(kernel), model, ALL_COLUMNS)


def _fused_avx2(model: nn.Module, _: ExitStack) -> Run:
    """What a processor without AVX-512 runs."""
    path = kernel_build.built("AVX2")
    if path is None or torch.backends.cpu.get_cpu_capability() != "AVX512":
        raise LeftOut("no other kernel than the one above")
    return _measuring(cpp.CppStatistics(cpp.loaded(str(path))), model, ALL_COLUMNS)


def _triton(model: nn.Module, _: ExitStack) -> Run:
    if gradients(model)[0].device.type != "cuda":
        raise LeftOut("needs a GPU")
    try:
        backend = importlib.import_module("torch_gradmon.statistics.triton").TritonStatistics()
    except ImportError as error:
        raise LeftOut(f"cannot be imported: {error}") from error
    return _measuring(backend, model, ALL_COLUMNS)


def _measuring(backend: EagerStatistics, model: nn.Module, columns: frozenset[Column]) -> Run:
    """All rows on the host, as at a step's end. The backend is reused between calls, as in a monitor."""
    tensors = gradients(model)
    return lambda: backend.rows(tensors, Request(columns)).cpu()


def _monitor(model: nn.Module, stack: ExitStack) -> Run:
    """The same calls as torch-module-monitor gets, and the same five metrics of every gradient by key."""
    monitor = stack.enter_context(gradmon.ModuleMonitor(model))
    for metric in FIVE:
        monitor.add_gradient_metric(metric)
    return rivals.step_by_hand(monitor)


def _exact_clip(model: nn.Module, stack: ExitStack) -> Run:
    """A step that is not monitored: clipping alone."""
    monitor = stack.enter_context(gradmon.ModuleMonitor(model))
    return lambda: monitor.clip_grad_norm_(rivals.NEVER_CLIPS, exact=True)


def _exact_clip_measured(model: nn.Module, stack: ExitStack) -> Run:
    """A monitored step: all statistics before clipping, and clipping by the norm from these."""
    monitor = stack.enter_context(gradmon.ModuleMonitor(model))
    for metric in VIEWS:
        monitor.add_gradient_metric(metric, stages=("before_clip",))
    steps = itertools.count()

    def run() -> object:
        monitor.begin_step(next(steps))
        return monitor.clip_grad_norm_(rivals.NEVER_CLIPS, exact=True)

    return run


@dataclass(frozen=True)
class Contender:
    """One way to look at gradients.

    Attributes:
        label: its name in tables.
        make: the function to measure; cleanup is pushed on the stack.
        ours: whether it is part of torch_gradmon.
    """

    label: str
    make: Callable[[nn.Module, ExitStack], Run]
    ours: bool = False


CONTENDERS = {
    "eager": Contender("torch_gradmon, eager, all statistics, no keys", _eager(ALL_COLUMNS), ours=True),
    "eager_but_near_zero": Contender("torch_gradmon, eager, all but near-zero, no keys", _eager(_BUT_NEAR_ZERO), ours=True),
    "eager_norm": Contender("torch_gradmon, eager, norm only, no keys", _eager(_NORM), ours=True),
    "fused": Contender("torch_gradmon, fused, all statistics, no keys", _fused, ours=True),
    "fused_avx2": Contender("torch_gradmon, fused for AVX2, all statistics, no keys", _fused_avx2, ours=True),
    "triton": Contender("torch_gradmon, Triton, all statistics, no keys", _triton, ours=True),
    "monitor": Contender("torch_gradmon.ModuleMonitor, five metrics by key", _monitor, ours=True),
    "exact_clip": Contender("torch_gradmon, clip_grad_norm_(exact=True)", _exact_clip, ours=True),
    "exact_clip_measured": Contender(
        "torch_gradmon, clip_grad_norm_(exact=True) and all statistics", _exact_clip_measured, ours=True
    ),
    "torch_clip": Contender("torch.nn.utils.clip_grad_norm_", rivals.torch_clip),
    "naive_loop": Contender("naive loop, six values by .item()", rivals.naive_loop),
    "torch_module_monitor": Contender("torch-module-monitor, five metrics", rivals.torch_module_monitor),
    "wandb_watch": Contender("wandb.watch, its hooks", rivals.wandb_watch),
    "lightning": Contender("Lightning grad_norm, norms only", rivals.lightning),
}
