"""Statistics of gradients on a GPU, as a share of the bandwidth of a copy of the same bytes.

The unit is a device-to-device copy of as many bytes as the gradients have, measured directly before and after each contender. It reads each
byte once and writes it once. So the memory moves ``2 * bytes / seconds of the copy``, and a contender that reads each gradient once has the
share ``(bytes / its seconds) / (2 * bytes / seconds of the copy)``, which is half the copy's time over its own. A share of 100 % is
a single read at the full rate of the copy. A contender that reads the gradients several times has a smaller share, however fast
it reads.
"""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from torch_gradmon.core.torch_modes import has_triton_kernels
from torch_gradmon.statistics.eager import EagerStatistics
from torch_gradmon.statistics.request import Request

from .comparison import able
from .contenders import CONTENDERS, Contender
from .models import GPT, GPT2_1B5, GPT2_124M, Sizes
from .rivals import LeftOut
from .sets import GradientSet, build, gradients
from .timing import SLOW, Floor, Run, clock_for, interleave, spread

#: Small ones first, since time may run out.
SETS = {
    "gpt2_124m_bf16": GradientSet("GPT-2 124M, bf16", lambda: GPT(GPT2_124M), torch.bfloat16),
    "gpt2_124m_fp32": GradientSet("GPT-2 124M, fp32", lambda: GPT(GPT2_124M)),
    "gpt2_1b5_bf16": GradientSet("GPT-2 1.5B, bf16", lambda: GPT(GPT2_1B5), torch.bfloat16),
    "gpt2_1b5_fp32": GradientSet("GPT-2 1.5B, fp32", lambda: GPT(GPT2_1B5)),
}
TINY = Sizes(vocabulary=40, context=12, width=16, heads=2, blocks=2)
TINY_SETS = {
    "tiny": GradientSet("tiny, fp32", lambda: GPT(TINY)),
    "tiny_bf16": GradientSet("tiny, bf16", lambda: GPT(TINY), torch.bfloat16),
}

#: Calls in one measurement of a contender that leaves its result on the device: the host runs ahead there, as it does in a training.
CALLS = 5
#: The measurements of a set take about this number of seconds, by the time of a first round; the least and the most rounds.
SECONDS, LEAST, MOST = 40.0, 5, 51
#: A contender whose first measurement takes more seconds is left out.
PATIENCE = 5.0


def _stock(model: nn.Module, _: ExitStack) -> Run:
    return _rows(EagerStatistics(), model)


def _triton(model: nn.Module, _: ExitStack) -> Run:
    if not has_triton_kernels(gradients(model)[0].device):
        raise LeftOut("needs a GPU")
    try:
        backend = importlib.import_module("torch_gradmon.statistics.triton").TritonStatistics()
    except ImportError as error:
        raise LeftOut(f"cannot be imported: {error}") from error
    return _rows(backend, model)


def _rows(backend: EagerStatistics, model: nn.Module) -> Run:
    tensors = gradients(model)
    return lambda: backend.rows(tensors, Request())


def _total_norm(model: nn.Module, _: ExitStack) -> Run:
    tensors = gradients(model)
    foreach = tensors[0].is_cuda  # the simulated device has none
    return lambda: torch.nn.utils.get_total_norm(tensors, foreach=foreach)


#: The result of these stays on the device.
ON_DEVICE = {
    "triton": Contender("torch_gradmon, Triton: all statistics of each", _triton, ours=True),
    "stock": Contender("torch_gradmon, stock operations: all statistics of each", _stock, ours=True),
    "total_norm": Contender("torch.nn.utils.get_total_norm, foreach: a norm", _total_norm),
}
#: These bring values of each gradient to the host.
TO_HOST = {name: CONTENDERS[name] for name in ("monitor", "torch_module_monitor", "wandb_watch")}
ALL = {**ON_DEVICE, **TO_HOST}


def copy_of(tensors: Sequence[Tensor]) -> Floor:
    """A read of as many bytes as ``tensors`` have: half of a copy."""
    size = sum(tensor.nbytes for tensor in tensors)
    source, target = (torch.zeros(size, dtype=torch.uint8).to(tensors[0].device) for _ in range(2))
    return Floor(lambda: target.copy_(source), scale=0.5)


def repeated(run: Run, calls: int) -> Run:
    """``calls`` calls, one directly after the other."""

    def all_calls() -> None:
        for _ in range(calls):
            run()

    return all_calls


def needed_bytes(which: GradientSet) -> int:
    """Parameters, gradients, and both sides of the copy, with a half for what contenders allocate."""
    with torch.device("meta"):
        elements = sum(parameter.numel() for parameter in which.build().parameters())
    return int(4.5 * elements * which.dtype.itemsize)


def measure(which: GradientSet, device: torch.device, seconds: float = SECONDS, least: int = LEAST) -> dict[str, Any]:
    """One set: the rate of the copy in GB/s, the share of each contender in percent, and the contenders left out, with the reason.

    Raises:
        LeftOut: it does not fit.
    """
    if device.type == "cuda" and (free := torch.cuda.mem_get_info(device)[0]) < needed_bytes(which):
        raise LeftOut(f"needs {needed_bytes(which) / 1e9:.0f} GB on the device, {free / 1e9:.0f} are free")
    with ExitStack() as stack:
        model = build(which, device) if device.type == "cuda" else build(which, torch.device("cpu")).to(device)
        tensors = gradients(model)
        size = sum(tensor.nbytes for tensor in tensors)
        runs, left_out = able(ALL, model, stack)
        calls = {name: CALLS if name in ON_DEVICE else 1 for name in runs}
        clock, copy = clock_for(device), copy_of(tensors)
        floor = Floor(repeated(copy.run, CALLS), copy.scale)
        runs = {name: repeated(run, calls[name]) for name, run in runs.items()}
        warm = {name: clock(run) for name, run in runs.items()}
        for name in [name for name, taken in warm.items() if taken > PATIENCE]:
            left_out[name] = f"takes {warm.pop(name):.0f} seconds"
            del runs[name]
        once = min(clock(floor.run) for _ in range(2))
        rounds = max(least, min(MOST, int(seconds / (sum(warm.values()) + 2 * len(runs) * once + 1e-9))))
        slow = frozenset(name for name, taken in warm.items() if taken > SLOW * once)
        samples = interleave(floor, runs, slow, rounds, clock)
        shares = {name: [100 * calls[name] / (CALLS * ratio) for ratio in samples.ratios[name].values()] for name in runs}
        return {
            "title": which.title,
            "tensors": len(tensors),
            "bytes": size,
            "rounds": rounds,
            "copy_gb_per_s": spread([CALLS * size / each / 1e9 for each in samples.floors]),
            "contenders": {
                name: {
                    "label": ALL[name].label,
                    "share_pct": spread(shares[name]),
                    "ms": spread([1e3 * each / calls[name] for each in samples.seconds[name].values()]),
                }
                for name in runs
            },
            "left_out": {ALL[name].label: reason for name, reason in left_out.items()},
        }


def measure_all(sets: dict[str, GradientSet], device: torch.device, until: float, **bounds: Any) -> dict[str, Any]:
    """All sets, by name; one is left out with the reason if it does not fit, or begins after ``until``, of :func:`time.monotonic`."""
    found: dict[str, Any] = {}
    for name, which in sets.items():
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            if time.monotonic() > until:
                raise LeftOut("no time is left")
            found[name] = measure(which, device, **bounds)
        except LeftOut as reason:
            found[name] = {"title": which.title, "left_out": {"all": str(reason)}}
    return found
