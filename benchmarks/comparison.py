"""All contenders on one set of gradients."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from .contenders import CONTENDERS, Contender
from .rivals import LeftOut
from .sets import SETS, build, gradients
from .timing import SLOW, Run, clock_for, floor_for, interleave, quotients, spread

#: Contenders whose speed is compared with others.
OURS = ("eager", "fused", "triton", "monitor")
OTHERS = ("naive_loop", "torch_module_monitor", "wandb_watch", "lightning")
_WARM_UP = 2


def compare(name: str, device: torch.device, threads: int, rounds: int) -> dict[str, Any]:
    """One section of the result: the set, the floor, every contender's ratio to it, and the contenders left out, with the reason."""
    which = SETS[name]
    torch.set_num_threads(threads)
    with ExitStack() as stack:
        model = build(which, device)
        tensors = gradients(model)
        runs, left_out = able(CONTENDERS, model, stack)
        clock, floor = clock_for(device), floor_for(tensors)
        floor_seconds = min(clock(floor.run) for _ in range(_WARM_UP + 1)) * floor.scale
        warm = {each: min(clock(run) for _ in range(_WARM_UP)) for each, run in runs.items()}
        slow = frozenset(each for each, seconds in warm.items() if seconds > SLOW * floor_seconds)
        samples = interleave(floor, runs, slow, rounds * which.patience, clock)
        return {
            "set": name,
            "title": which.title,
            "tensors": len(tensors),
            "elements": sum(tensor.numel() for tensor in tensors),
            "bytes": sum(tensor.nbytes for tensor in tensors),
            "dtype": str(which.dtype).removeprefix("torch."),
            "device": device.type,
            "threads": threads,
            "floor_ms": spread([1e3 * seconds for seconds in samples.floors]),
            "contenders": {
                each: {
                    "label": CONTENDERS[each].label,
                    "ours": CONTENDERS[each].ours,
                    "ratio": spread(list(samples.ratios[each].values())),
                    "ms": spread([1e3 * seconds for seconds in samples.seconds[each].values()]),
                }
                for each in runs
            },
            "left_out": left_out,
            "times_faster": [
                {"ours": ours, "than": other, **spread(quotients(samples.ratios[other], samples.ratios[ours]))}
                for ours in OURS
                for other in OTHERS
                if ours in runs and other in runs
            ],
        }


def able(contenders: Mapping[str, Contender], model: torch.nn.Module, stack: ExitStack) -> tuple[dict[str, Run], dict[str, str]]:
    """The contenders that can run, after a first call, which may compile; and those that cannot."""
    runs: dict[str, Run] = {}
    left_out: dict[str, str] = {}
    for name, contender in contenders.items():
        try:
            run = contender.make(model, stack)
            run()
            runs[name] = run
        except LeftOut as reason:
            left_out[name] = str(reason)
        except Exception as error:  # others' packages may fail in any way, which must not end the comparison
            left_out[name] = f"failed: {type(error).__name__}: {error}".splitlines()[0]
        if name in left_out:
            print(f"left out: {contender.label}: {left_out[name]}", file=sys.stderr)
    return runs, left_out
