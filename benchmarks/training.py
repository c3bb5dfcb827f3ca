"""Whole training steps with and without the monitor, in alternation, on two copies of one model."""

from __future__ import annotations

import copy
import gc
import tempfile
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_gradmon as gradmon

from .models import GPT, GPT2_124M, GPT_10M, Sizes
from .timing import clock_for, spread

_WARM_UP = 3
_SEQUENCES, _MAX_NORM = 8, 1.0
#: The standard preset measures updates on these.
_UPDATES_EVERY = 10


class Side:
    """One copy of the model with its optimizer, which takes steps. ``foreach`` is that of torch's optimizers and clips."""

    def __init__(self, model: GPT, foreach: bool | None = None) -> None:
        self.model, self._foreach = model, foreach
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=foreach)

    def step(self, tokens: Tensor, following: Tensor) -> None:
        """Forward, backward, clip, optimizer."""
        device = tokens.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = self.model(tokens, following)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _MAX_NORM, foreach=self._foreach)
        self.optimizer.step()


def train(device: torch.device, threads: int, steps: int) -> dict[str, Any]:
    """One section of the result: a 10M GPT in float32 on a CPU, GPT-2 124M under bfloat16 autocast on a GPU."""
    sizes, title = (GPT2_124M, "GPT-2 124M, bf16 autocast") if device.type == "cuda" else (GPT_10M, "10M GPT")
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    with device:
        bare = Side(GPT(sizes))
    watched = Side(copy.deepcopy(bare.model))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        monitor = gradmon.watch(watched.model, watched.optimizer, run_dir=folder)
        times, ends = _in_turns(bare, watched, sizes, device, steps)
        history = monitor.get_all_metrics()
        monitor.detach()
    measured = range(_WARM_UP, _WARM_UP + steps)
    # overhead_fraction is of the time since the watched model's last step, and the other model's step lies within that time
    own = {
        step: 100 * history[step]["gradmon/overhead_fraction"] * (ends[step] - ends[step - 1]) / times["watched"][step]
        for step in measured
    }
    return {
        "title": title,
        "parameters": sum(p.numel() for p in bare.model.parameters()),
        "tokens": _SEQUENCES * sizes.context,
        "device": device.type,
        "threads": threads,
        "steps": steps,
        "step_ms": spread([1e3 * times["bare"][step] for step in measured]),
        "own_pct": spread(list(own.values())),
        "own_pct_mean": sum(own.values()) / len(own),
        "own_pct_with_updates": spread([share for step, share in own.items() if step % _UPDATES_EVERY == 0]),
        "difference_ms": spread([1e3 * (times["watched"][step] - times["bare"][step]) for step in measured]),
        "difference_pct": spread([100 * (times["watched"][step] / times["bare"][step] - 1) for step in measured]),
        "same_bits": all(torch.equal(a, b) for a, b in zip(bare.model.parameters(), watched.model.parameters(), strict=True)),
    }


def _in_turns(
    bare: Side, watched: Side, sizes: Sizes, device: torch.device, steps: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds of each side's steps, and when the watched ones ended."""
    clock = clock_for(device)
    sides = {"bare": bare, "watched": watched}
    times: dict[str, list[float]] = {name: [] for name in sides}
    ends: list[float] = []
    generator = torch.Generator().manual_seed(1)
    for step in range(_WARM_UP + steps):
        tokens, following = batch_of(sizes, _SEQUENCES, generator, device)
        gc.collect()
        for name in sorted(sides, reverse=bool(step % 2)):
            times[name].append(clock(partial(sides[name].step, tokens, following)))
            if name == "watched":
                ends.append(time.perf_counter())
    return times, ends


def batch_of(sizes: Sizes, sequences: int, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and those that follow, both ``[sequences, context]``; rare tokens are rare, as in text."""
    text = (sizes.vocabulary ** torch.rand(sequences, sizes.context + 1, generator=generator)).long().sub_(1).to(device)
    return text[:, :-1], text[:, 1:]
