"""What every test shares: one thread, a fixed seed, no monitor switched off by the environment."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which torch may do in any test

# Transformers imports Comet, which would then make an experiment of its own for each run of MLflow
os.environ["COMET_DISABLE_AUTO_LOGGING"] = "1"

_OPTIONAL = ("rich", "tqdm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lacking = [name for name in _OPTIONAL if importlib.util.find_spec(name) is None]
    for item in items:
        if lacking and item.get_closest_marker("extra"):
            item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(lacking)}"))
        if not torch.cuda.is_available() and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    if (compiler := sys.modules.get("torch._dynamo.utils")) is not None:
        compiler.counters.clear()  # by which the monitor tells whether anything was compiled, also by another test
    torch.set_num_threads(1)
    torch.manual_seed(0)
    monkeypatch.delenv("GRADMON_DISABLE", raising=False)
