"""Measure what statistics of every module's output add to a training step on a CPU, beside torch-module-monitor.

    python -m benchmarks.activations
    python -m benchmarks.activations --quick      # does it run?

A forward and backward pass takes many times as long as the monitor's work in it, so the difference of two steps is mostly
noise. A stopwatch on every module, with hooks before and after those of the monitor, measures their time at each call, with the
caches as the model leaves them. With the three calls around the step this is the *added time*. Effects outside of it, such as a
model with emptied caches, appear in the difference between the steps of a round, which is listed beside it. The floor is
one ``torch.sum`` over each output.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from .machine import machine, versions
from .models import GPT, GPT_10M, Sizes
from .report import RESULTS, watched_table, with_spread
from .timing import Run, floor_for, interleave, quotients, spread
from .watched import Cost, Side, clock, outputs
from .watchers import METRICS, WATCHERS

ROUNDS, QUICK_ROUNDS = 30, 2
_SEQUENCES, _LENGTH = 4, 256
#: Target: the added time of torch-module-monitor over ours, for five metrics.
AIMS = {"eager": 3.5, "fused": 7.0}
THAN = ("torch_module_monitor_plain", "torch_module_monitor")


def compare(which: str, threads: int, rounds: int, sizes: Sizes = GPT_10M, length: int = _LENGTH) -> dict[str, Any]:
    """One section of the result: a set of metrics, each watcher's added time over the floor, and that over ours."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    title, metrics = METRICS[which]
    model = GPT(sizes)
    text = torch.randint(sizes.vocabulary, (_SEQUENCES, length + 1))
    batch = text[:, :-1], text[:, 1:]
    bare, sides, left_out = Side(copy.deepcopy(model), None, batch), dict[str, Side](), dict[str, str]()
    for name in (name for name, watcher in WATCHERS.items() if which in watcher.metrics):
        watched = copy.deepcopy(model)
        try:
            sides[name] = Side(watched, WATCHERS[name].watch(watched, metrics), batch)
        except Exception as error:  # a missing package or compiler must not end the comparison
            left_out[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"left out: {WATCHERS[name].label}: {left_out[name]}")
    floored = outputs(model, batch)
    runs: dict[str, Run] = {name: side.step for name, side in {"bare": bare, **sides}.items()}
    samples = interleave(floor_for(floored), runs, frozenset(), rounds, clock)
    return {
        "set": which,
        "title": title,
        "device": "cpu",
        "threads": threads,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": batch[0].numel(),
        "outputs": len(floored),
        "elements": sum(tensor.numel() for tensor in floored),
        "floor_ms": spread([1e3 * seconds for seconds in samples.floors]),
        "forward_ms": spread([1e3 * cost.forward for cost in bare.costs]),
        "step_ms": spread([1e3 * cost.whole for cost in bare.costs]),
        "stopwatch_ms": spread([1e3 * cost.added for cost in bare.costs]),
        "contenders": {
            name: {
                "label": WATCHERS[name].label,
                "ours": WATCHERS[name].ours,
                "ratio": spread(list(samples.ratios[name].values())),
                "ms": spread([1e3 * cost.added for cost in side.costs]),
                **_beside(bare.costs, side.costs),
            }
            for name, side in sides.items()
        },
        "left_out": left_out,
        "times_faster": [
            {"ours": ours, "than": other, **spread(quotients(samples.seconds[other], samples.seconds[ours]))}
            for ours in sides
            for other in sides
            if WATCHERS[ours].ours and not WATCHERS[other].ours
        ],
    }


def _beside(bare: Sequence[Cost], watched: Sequence[Cost]) -> dict[str, dict[str, float]]:
    """The time of a watched step beyond the bare one of its round, and its share of that bare step."""
    pairs = list(zip(bare, watched, strict=True))
    return {
        "difference_ms": spread([1e3 * (one.forward - other.forward) for other, one in pairs]),
        "added_pct": spread([100 * one.added / other.whole for other, one in pairs]),
    }


def judge(sections: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each target with a figure."""
    for section in sections:
        for entry in section["times_faster"] if section["set"] == "five" else ():
            if entry["than"] in THAN and (aim := AIMS.get(entry["ours"])) is not None:
                distance = 100 * (entry["median"] / aim - 1)
                verdict = f"{'met' if distance >= 0 else 'missed'} by {abs(distance):.0f} %"
                where = f"{section['threads']} thread{'s' * (section['threads'] > 1)}, {entry['ours']}"
                yield f"{where}: aimed at {aim:g} times less than {entry['than']}, measured {with_spread(entry)}, {verdict}"


def measure(threads: Sequence[int], rounds: int) -> dict[str, Any]:
    """The whole result."""
    sections = []
    for each in threads:
        for which in METRICS:
            sections.append(compare(which, each, rounds))
            print(f"\n{each} thread{'s' * (each > 1)}", *watched_table(sections[-1]), sep="\n", flush=True)
    return {
        "machine": machine(),
        "versions": versions(("torch-module-monitor",)),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "rounds": rounds,
        "activations": sections,
    }


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print, and write the result."""
    both = sorted({1, torch.get_num_threads()})
    parser = argparse.ArgumentParser(prog="python -m benchmarks.activations")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, nargs="+", default=both, help=f"sections to measure, by default {both}")
    parser.add_argument("--quick", action="store_true", help="only to see whether it runs; writes nothing without --out")
    parser.add_argument("--out", type=Path, help="where the result goes")
    asked = parser.parse_args(words)
    result = measure(asked.threads, QUICK_ROUNDS if asked.quick else asked.rounds)
    print("\nAims:", *judge(result["activations"]), sep="\n  ")
    out = asked.out or (None if asked.quick else RESULTS / "activations.json")
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"\nwrote {out}")


if __name__ == "__main__":
    main()
