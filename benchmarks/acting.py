"""Cost of a decision before every optimizer step, and of snapshots for a rollback.

    python -m benchmarks.acting

Several copies of a 10M GPT train in alternation, and the monitor's own time is measured in each. Writes
``benchmarks/results/acting.json``.
"""

from __future__ import annotations

import copy
import datetime
import gc
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import torch_gradmon as gradmon

from .machine import machine
from .models import GPT, GPT_10M
from .report import Result, _row, figure, with_spread
from .timing import clock_for, spread
from .training import Side

RESULTS = Path(__file__).parent / "results" / "acting.json"
STEPS, _WARM_UP, _SEQUENCES = 20, 2, 2
#: Steps from one monitored step to the next with a cadence, and from one snapshot to the next.
EVERY = 10
WATCHED: dict[str, dict[str, Any]] = {
    'on_spike="warn"': {"on_spike": "warn"},
    'on_spike="skip"': {"on_spike": "skip"},
    f'on_spike="warn", every={EVERY}': {"on_spike": "warn", "every": EVERY},
    f'on_spike="skip", every={EVERY}': {"on_spike": "skip", "every": EVERY},
    f"on_spike=Rollback(every={EVERY})": {"on_spike": gradmon.Rollback(every=EVERY)},
}


def measure(threads: int, steps: int = STEPS) -> dict[str, Any]:
    """Milliseconds of the monitor's own time, in steps that are monitored and take no snapshot, and in the others."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    bare = Side(GPT(GPT_10M))
    sides = {name: Side(copy.deepcopy(bare.model)) for name in WATCHED}
    monitors = {name: gradmon.watch(sides[name].model, sides[name].optimizer, **WATCHED[name]) for name in WATCHED}
    clock = clock_for(torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    own: dict[str, list[float]] = {name: [] for name in WATCHED}
    whole: list[float] = []
    for step in range(_WARM_UP + steps):
        text = (GPT_10M.vocabulary ** torch.rand(_SEQUENCES, GPT_10M.context + 1, generator=generator)).long().sub_(1)
        run = {name: partial(side.step, text[:, :-1], text[:, 1:]) for name, side in sides.items()}
        gc.collect()
        whole.append(1e3 * clock(partial(bare.step, text[:, :-1], text[:, 1:])))
        for name in sorted(WATCHED, reverse=bool(step % 2)):
            fence = monitors[name]._runtime.fence
            before = fence.spent()
            run[name]()
            own[name].append(1e3 * (fence.spent() - before))
    if any(monitor.get_step_counts().skipped for monitor in monitors.values()):
        raise SystemExit("a step was skipped, which is not what is measured here")
    same = all(
        torch.equal(a, b) for s in sides.values() for a, b in zip(bare.model.parameters(), s.model.parameters(), strict=True)
    )
    for monitor in monitors.values():
        monitor.detach()
    measured = range(_WARM_UP, _WARM_UP + steps)
    between = [step for step in measured if step % EVERY]
    rows = {
        name: {
            "own_ms": spread([own[name][step] for step in between]),
            "own_pct": spread([100 * own[name][step] / whole[step] for step in between]),
            "on_every_tenth_ms": spread([own[name][step] for step in measured if step % EVERY == 0]),
        }
        for name in WATCHED
    }
    state = sum(p.numel() * p.element_size() for p in bare.model.parameters()) * 3  # Adam keeps two moments
    return {
        "threads": threads,
        "step_ms": spread([whole[s] for s in measured]),
        "rows": rows,
        "same_bits": same,
        "snapshot_bytes": state,
    }


def markdown(result: Result) -> str:
    """The section of the documentation."""
    machine, sections = result["machine"], result["sections"]
    heads = [f"{section['threads']} thread{'s' * (section['threads'] > 1)}" for section in sections]
    titles = [*(f"ms, {head}" for head in heads), *(f"% of a step, {head}" for head in heads)]
    lines = [
        _row(["the monitor's own time", *titles, f"ms in every {EVERY}th step"]),
        _row(["---", *("---:" for _ in range(len(titles) + 1))]),
    ]
    for name in sections[0]["rows"]:
        rows = [section["rows"][name] for section in sections]
        cells = [*(with_spread(row["own_ms"]) for row in rows), *(with_spread(row["own_pct"]) for row in rows)]
        lines.append(_row([f"`{name}`", *cells, with_spread(rows[0]["on_every_tenth_ms"])]))
    steps = ", ".join(
        f"{figure(section['step_ms']['median'])} ms with {head}" for section, head in zip(sections, heads, strict=True)
    )
    size = sections[0]["snapshot_bytes"] / 1e6
    return "\n".join(
        [
            *lines,
            "",
            f"A 10M GPT with AdamW and clipping, whose step takes {steps} without a monitor; a snapshot has {size:,.0f} MB. "
            f"{machine['processor']} ({machine['cores']} cores), torch {machine['torch']}; {result['date']}. Medians, quartiles in "
            "brackets.",
        ]
    )


def main() -> None:
    """Measure and write."""
    start = time.perf_counter()
    sections = [measure(threads) for threads in (1, 2)]
    date = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    result = {"date": date, "machine": machine(), "steps": STEPS, "sections": sections}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for section in sections:
        print(section["threads"], "threads, same bits:", section["same_bits"])
        for name, row in section["rows"].items():
            print(f"  {name:<36}", {kind: round(values["median"], 3) for kind, values in row.items()})
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
