"""The machine of a measurement, without its owner."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from typing import Any

import torch

import torch_gradmon

from .import_time import processor


def machine() -> dict[str, Any]:
    """Hardware, and the software that affects times."""
    return {
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


#: Packages that the statistics are compared with.
RIVALS = ("torch-module-monitor", "wandb", "lightning", "triton")


def versions(names: Sequence[str] = RIVALS) -> dict[str, str | None]:
    """Versions of torch_gradmon and of these packages; None where one is not installed."""
    found: dict[str, str | None] = {"torch_gradmon": torch_gradmon.__version__}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
