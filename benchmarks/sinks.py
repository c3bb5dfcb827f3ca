"""Cost of a row on the training thread, by sink, beside the tracker's own call in the same run.

    python -m benchmarks.sinks
    python -m benchmarks.report     # the table of the documentation

W&B and Trackio pass rows to their own process or thread, whose time is not included.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .machine import machine, versions
from .report import RESULTS, sinks_table
from .timing import quotients, spread

Log = Callable[[dict[str, float], int], object]
ROUNDS, QUICK_ROUNDS = 200, 3
#: The values of ``watch``, and those of a model with many layers.
SIZES = (14, 1000)
#: Packages whose versions are listed.
PACKAGES = ("wandb", "tensorboard", "trackio")


def values(size: int, step: int) -> dict[str, float]:
    """A row, no two alike."""
    if size <= SIZES[0]:
        return {f"gradmon/value_{i}": math.sin(step + i) for i in range(size)}
    return {f"gradient/transformer.h.{i}.mlp.c_fc.weight/norm": math.sin(step + i) for i in range(size)}


def contenders(stack: ExitStack, directory: Path) -> dict[str, dict[str, Log]]:
    """Each sink of the package, and its equivalent by hand."""
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_CONSOLE="off", HF_HOME=str(directory), HF_HUB_OFFLINE="1")
    import trackio
    import wandb
    from torch.utils.tensorboard import SummaryWriter

    import torch_gradmon as gradmon

    def run() -> Any:
        found = wandb.init(project="benchmark", dir=directory, reinit="create_new")
        stack.callback(found.finish)
        return found

    file = stack.enter_context((directory / "by_hand.jsonl").open("w"))
    writer = stack.enter_context(SummaryWriter(str(directory / "by_hand")))
    jsonl, board = gradmon.sinks.JsonlSink(directory / "sink.jsonl"), gradmon.sinks.TensorBoardSink(directory / "sink")
    own, other = run(), run()
    tracked = trackio.init(project="benchmark", auto_log_gpu=False, auto_log_cpu=False)  # one process has one run
    for each in (jsonl, board):
        stack.callback(each.close)
    stack.callback(tracked.finish)

    def write_line(row: dict[str, float], step: int) -> None:
        file.write(json.dumps({"step": step, **row}) + "\n")
        file.flush()

    def add_scalars(row: dict[str, float], step: int) -> None:
        for key, value in row.items():
            writer.add_scalar(key, value, step)

    return {
        "JsonlSink": {"ours": jsonl.log, "json.dumps, write, flush": write_line},
        "WandbSink": {"ours": gradmon.sinks.WandbSink(own, alone=True).log, "run.log, offline": lambda row, step: other.log(row)},
        "TensorBoardSink": {"ours": board.log, "add_scalar for each": add_scalars},
        "TrackioSink": {"ours": gradmon.sinks.TrackioSink(tracked).log, "run.log": lambda row, step: tracked.log(row, step=step)},
    }


def measure(rounds: int) -> dict[str, Any]:
    """Microseconds for a row of each size, and quotients within rounds."""
    sections = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place, ExitStack() as stack:
        found = contenders(stack, Path(place))
        step = 0
        for size in SIZES:
            times: dict[tuple[str, str], dict[int, float]] = {}
            for number in range(-2, rounds):  # two to warm up
                for sink, ways in found.items():
                    for way in sorted(ways, reverse=bool(number % 2)):
                        step += 1
                        row = values(size, step)
                        start = time.perf_counter()
                        ways[way](row, step)
                        times.setdefault((sink, way), {})[number] = 1e6 * (time.perf_counter() - start)
            for sink, ways in found.items():
                (hand,) = ways.keys() - {"ours"}
                ours, by_hand = ({n: t for n, t in times[sink, way].items() if n >= 0} for way in ("ours", hand))
                sections.append(
                    {
                        "sink": sink,
                        "values": size,
                        "ours_us": spread(list(ours.values())),
                        "by_hand": hand,
                        "by_hand_us": spread(list(by_hand.values())),
                        "ratio": spread(quotients(ours, by_hand)),
                    }
                )
    return {
        "machine": machine(),
        "versions": versions(PACKAGES),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "rounds": rounds,
        "sinks": sections,
    }


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sinks")
    parser.add_argument("--quick", action="store_true", help="only to see whether it runs; writes nothing without --out")
    parser.add_argument("--out", type=Path, help="where the result goes")
    asked = parser.parse_args(words)
    result = measure(QUICK_ROUNDS if asked.quick else ROUNDS)
    print(*sinks_table(result), sep="\n")
    out = asked.out or (None if asked.quick else RESULTS / "sinks.json")
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"\nwrote {out}")


if __name__ == "__main__":
    main()
