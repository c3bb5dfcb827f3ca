"""What every test shares: one thread, a fixed seed, no monitor switched off by the environment."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Generator, Iterator
from typing import Any

import hypothesis  # before a freeze: trio's part of it looks for referrers of a generator, which a frozen one has not
import pytest
import torch

from torch_gradmon.core import torch_modes
from torch_gradmon.monitor import steps
from torch_gradmon.sinks import delivery
from torch_gradmon.statistics import cpp

from .browser import browser

# a busy machine is no failure
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Transformers imports Comet, which would then make an experiment of its own for each run of MLflow
os.environ["COMET_DISABLE_AUTO_LOGGING"] = "1"
# read once a process, at whatever first asks W&B for anything, which may be a test of something else
os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_CONSOLE="off")

_OPTIONAL = ("rich", "tqdm")


#: What computes the statistics of CPU tensors where a test does not ask for anything: the built kernel, if there is one.
_STATISTICS = {
    "built": cpp.found,
    "eager": lambda: (None, "the tests do without"),
    "compiled": lambda: (cpp.compiled(), "this processor"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--statistics", choices=list(_STATISTICS), default="built", help="what measures CPU tensors by default")


def pytest_configure(config: pytest.Config) -> None:
    if "not gpu" in config.getoption("markexpr"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or what torch picks by itself is the GPU: meshes, devices of DataParallel
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which torch may do in any test
    steps.PATIENCE = math.inf  # the share of the monitor's time is that of the machine too, which may be busy
    cpp.found = _STATISTICS[config.getoption("--statistics")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lacking = [name for name in _OPTIONAL if importlib.util.find_spec(name) is None]
    for item in items:
        if lacking and item.get_closest_marker("extra"):
            item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(lacking)}"))
        if not torch.cuda.is_available() and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """Leave out torch, its compiler and the collected tests, which stay, from every garbage collection that follows."""
    importlib.import_module("torch._dynamo")  # which the first optimizer would import
    gc.collect()
    gc.freeze()


#: What an older torch lacks, by the words in which a test meets it.
_ABSENT = {
    "inside torch.compile they need torch 2.7": (torch_modes.TELLS_EXPORT, "no statistics in compiled graphs before torch 2.7"),
    "'Stream' object has no attribute 'record_event'": (torch_modes.TELLS_EXPORT, "FSDP2 of this torch does not run on a CPU"),
    "Cannot use ReduceOp.AVG with Gloo": (
        torch.__version__ >= (2, 8),
        "gloo of this torch has no average, which FSDP2 with copies takes",
    ),
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Skip what this torch does not have."""
    try:
        return (yield)
    except Exception as error:
        for words, (is_there, reason) in _ABSENT.items():
            if not is_there and words in str(error):
                pytest.skip(reason)
        raise


@pytest.fixture(autouse=True, scope="module")
def _collections_look_at_what_is_new() -> None:
    """What earlier modules left behind, a million objects of the compiler above all, would cost each later collection half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No graphs of other tests, and counters at 0."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture(scope="session")
def driver() -> Iterator[Any]:
    """One browser for all pages: each start takes seconds."""
    with browser(1280, 940) as found:
        yield found


@pytest.fixture(autouse=True)
def _the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    if (compiler := sys.modules.get("torch._dynamo.utils")) is not None:
        compiler.counters.clear()  # by which the monitor tells whether anything was compiled, also by another test
    torch.set_num_threads(1)
    torch.manual_seed(0)
    monkeypatch.delenv("GRADMON_DISABLE", raising=False)
    monkeypatch.setattr(delivery, "SLOW", 3600.0)  # or a tracker is dropped where the machine is busy
