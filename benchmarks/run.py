"""Measure torch_gradmon beside others, in one run and on the same gradients.

    python -m benchmarks.run
    python -m benchmarks.run --quick --sets small_distinct   # does it run?
    python -m benchmarks.report                              # the tables and the plot of the documentation

Prints ratios with their spread, and their distance from the targets; writes ``benchmarks/results/benchmark_cpu.json``
or ``benchmark_cuda.json``. A package that is not installed is left out, with a line about it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from .comparison import compare
from .machine import machine, versions
from .report import RESULTS, faster_table, ratios_table, step_line
from .sets import SETS
from .targets import judge
from .training import train

ROUNDS, TRAINING_STEPS = 21, 30
#: The fewest training steps that include one that measures updates.
QUICK_ROUNDS, QUICK_TRAINING_STEPS = 2, 8


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the command line."""
    threads = sorted({1, torch.get_num_threads()})
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run")
    parser.add_argument("--sets", nargs="*", choices=SETS, help="sets of gradients; all that the device is for by default")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="more of them for small sets")
    parser.add_argument("--threads", type=int, nargs="+", default=threads, help=f"sections to measure, by default {threads}")
    parser.add_argument("--quick", action="store_true", help="only to see whether it runs; writes nothing without --out")
    parser.add_argument("--out", type=Path, help="where the result goes")
    return parser.parse_args(words)


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """The whole result."""
    device = torch.device(asked.device)
    # threads of the host do not affect a GPU
    threads = [1] if device.type == "cuda" else asked.threads
    rounds = QUICK_ROUNDS if asked.quick else asked.rounds
    sets = asked.sets if asked.sets is not None else [name for name, s in SETS.items() if device.type == "cuda" or not s.gpu_only]
    result: dict[str, Any] = {
        "machine": machine(),
        "versions": versions(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": device.type,
        "rounds": rounds,
        "gradients": [],
        "training": [],
    }
    for count in threads:
        for name in sets:
            section = compare(name, device, count, rounds)
            result["gradients"].append(section)
            print(f"\n{count} threads" if device.type == "cpu" else "\nGPU", *ratios_table([section]), "", sep="\n")
            print(*faster_table([section]), sep="\n", flush=True)
    for count in threads:
        step = train(device, count, QUICK_TRAINING_STEPS if asked.quick else TRAINING_STEPS)
        result["training"].append(step)
        print(f"\n{step_line(step)} Same bits: {step['same_bits']}.", flush=True)
    return result


def main() -> None:
    """Measure, print, and write the result."""
    asked = arguments()
    result = measure(asked)
    print("\nAims, one thread:", *judge(result), sep="\n  ")
    out = asked.out or (None if asked.quick else RESULTS / f"benchmark_{asked.device}.json")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"\nwrote {out}")


if __name__ == "__main__":
    main()
