"""Bytes that ranks exchange in a step, beside the formula of the documentation.

    python -m benchmarks.exchange

Runs 1, 2 and 4 processes over gloo, counts the bytes of the collectives, and writes ``benchmarks/results/exchange.json``. Bytes
do not depend on the machine.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_gradmon as gradmon
from torch_gradmon.core.moments import WIDTH
from torch_gradmon.step.ranks import GATHERED

from .models import GPT, Sizes

RESULTS = Path(__file__).parent / "results" / "exchange.json"
#: GPT-2's 148 parameters, narrow.
SIZES = Sizes(vocabulary=64, context=16, width=48, heads=4, blocks=12)
#: Llama 2 and 3 with 70 billion parameters: 80 blocks of 9 tensors, the embedding, the last norm and the output.
TENSORS_OF_70B = 80 * 9 + 3
#: Of the preset ``standard``: gradients before and after clipping and parameters; on every tenth step also updates, and the parameters
#: that they refer to.
SOURCES, SOURCES_OF_A_TENTH_STEP = 3, 5
STEPS = 11


class Collectives:
    """Counts the monitor's collectives, and the bytes that this rank puts into them."""

    NAMES = ("all_gather_single", "all_gather_into_tensor", "all_reduce")

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self._before: dict[str, Any] = {}

    def __enter__(self) -> Collectives:
        for name in self.NAMES:
            if function := getattr(dist, name, None):
                self._before[name] = function
                setattr(dist, name, self._counted(name, function))
        return self

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_globals["__name__"].startswith("torch_gradmon"):  # FSDP2 uses the same functions
                sent = args[1] if "gather" in name else args[0]
                self.calls.append((name, sent.nbytes))
            return function(*args, **kwargs)

        return counted

    def __exit__(self, *_: object) -> None:
        for name, function in self._before.items():
            setattr(dist, name, function)


def predicted(tensors: int, sources: int, ranks: int, values: int = 0) -> dict[str, int]:
    """The formula: how many collectives, the bytes that each rank puts into them, and those that each receives.

    A gather brings every rank the rows of all others; a reduction round a ring moves twice the rows, less one part of each.
    """
    if ranks == 1 or not (tensors or values):
        return {"collectives": 0, "sent": 0, "received": 0}
    matrix = (tensors * sources + values + 1) * WIDTH * 8
    if ranks * matrix <= GATHERED:
        return {"collectives": 1, "sent": matrix, "received": (ranks - 1) * matrix}
    return {"collectives": 2, "sent": matrix, "received": 2 * (ranks - 1) * matrix // ranks}


def counted(wrap: str) -> list[list[tuple[str, int]]]:
    """The collectives of each step of a watched training, on this rank."""
    torch.manual_seed(0)
    model: nn.Module = GPT(SIZES)
    if wrap == "DDP":
        model = DistributedDataParallel(model)
    else:
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)  # type: ignore[arg-type]
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(model, optimizer, on_spike=None)
    tokens = torch.randint(SIZES.vocabulary, (2, 2, SIZES.context))
    calls = []
    for _ in range(STEPS):
        with Collectives() as collectives:
            optimizer.zero_grad()
            model(*tokens).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            monitor.get_step_metrics()
        calls.append(collectives.calls)
    monitor.detach()
    return calls


def _work(rank: int, ranks: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    found = {wrap: counted(wrap) for wrap in ("DDP", "FSDP2")}
    Path(directory, f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def measured(ranks: int) -> list[dict[str, Any]]:
    """Bytes that this number of ranks exchanges, by wrapper: in most steps, and in every tenth."""
    with tempfile.TemporaryDirectory() as directory:
        multiprocessing.spawn(_work, args=(ranks, directory), nprocs=ranks)  # type: ignore[no-untyped-call]
        all_ranks = [json.loads(Path(directory, f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    if any(found != all_ranks[0] for found in all_ranks):
        raise RuntimeError("the ranks do not exchange the same")
    tensors = sum(1 for _ in GPT(SIZES).parameters())
    found = []
    for wrap, steps in all_ranks[0].items():
        for title, calls, sources in (("most", steps[1:10], SOURCES), ("every tenth", [steps[10]], SOURCES_OF_A_TENTH_STEP)):
            kinds = {tuple(map(tuple, each)) for each in calls}
            if len(kinds) > 1:
                raise RuntimeError(f"steps differ: {kinds}")
            (each,) = kinds
            spread = tensors if wrap == "FSDP2" else 0
            row = {"ranks": ranks, "wrap": wrap, "steps": title, "tensors": spread}
            row |= {"collectives": len(each), "sent": sum(size for _, size in each)}
            found.append({**row, "formula": predicted(spread, sources, ranks)})
    return found


def main() -> None:
    """Measure, compare and write."""
    rows = [row for ranks in (1, 2, 4) for row in measured(ranks)]
    for row in rows:
        expected = {name: row["formula"][name] for name in ("collectives", "sent")}
        if {name: row[name] for name in expected} != expected:
            raise SystemExit(f"the formula is wrong: {row}")
        print(row)
    large = [{"ranks": ranks, **predicted(TENSORS_OF_70B, SOURCES, ranks)} for ranks in (8, 64, 1024)]
    RESULTS.write_text(json.dumps({"torch": torch.__version__, "rows": rows, "of 70B": large}, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {RESULTS}")


if __name__ == "__main__":
    main()
