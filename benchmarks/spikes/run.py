"""Evaluate every spike rule on the same signals and print a comparison.

python -m benchmarks.spikes
python -m benchmarks.spikes --traces DIR --held-out 1000    # on data that no rule was tuned on
python -m benchmarks.spikes --rules MedianMad --seeds 2     # one rule, quickly
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..machine import machine, versions
from ..report import RESULTS
from .contenders import CONTENDERS, TUNED_ON, Factory
from .cost import cost, vectorised_cost
from .invariants import CHECKS, check, flags
from .scenarios import CLEAN, RAMPS, SPIKED, generate
from .scoring import Counts, score, worst
from .table import legend, notes, table
from .traces import DATA, KINDS, Trace, load

SEEDS = 5
#: The stored figures of each trace.
BY_TRACE = ("events", "hits", "true_alarms", "false_alarms", "warmup_alarms", "false_steps", "longest_run")


def judge(name: str, make: Factory, traces: Sequence[Trace], seeds: Sequence[int]) -> dict[str, Any]:
    """All figures of one contender."""
    judged = [(trace, flags(make, trace)) for trace in traces]
    counts = {trace.name: score(trace, found) for trace, found in judged}
    return {
        **{kind: totals({trace.name: counts[trace.name] for trace in traces if trace.kind == kind}) for kind in KINDS},
        "traces": {name: {part: getattr(each, part) for part in BY_TRACE} for name, each in counts.items()},
        "scenarios": {each.__name__: scenario(make, each.__name__, seeds).as_json() for each in (*CLEAN, *SPIKED)},
        "invariants": check(make, judged),
        "cost_us": cost(make),
        "vectorised_us": vectorised_cost(name),
    }


def totals(counts: Mapping[str, Counts]) -> dict[str, Any]:
    """All traces of a kind pooled, and the worst of them."""
    found = worst(counts)
    return {
        **sum(counts.values(), Counts()).as_json(),
        "worst": None
        if found is None
        else {
            "trace": found[0],
            "events": found[1].events,
            "missed": found[1].events - found[1].hits,
            "false_steps": found[1].false_steps,
        },
    }


def scenario(make: Factory, name: str, seeds: Sequence[int]) -> Counts:
    """The signals of all seeds pooled. Their first samples count as all others do: many scenarios are about them."""
    signals = [generate(name, seed) for seed in seeds]
    return sum((score(signal, flags(make, signal), warmup=0) for signal in signals), Counts())


def measure(contenders: Mapping[str, Factory], directory: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """The whole result, in its stored form.

    Raises:
        ValueError: the directory holds no traces with labels.
    """
    traces = load(directory)
    return {
        "machine": machine(),
        "versions": versions(()),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "tuned_on": TUNED_ON,
        "directory": directory.name,
        "traces": {kind: _described([trace for trace in traces if trace.kind == kind]) for kind in KINDS},
        "first_seed": seeds[0],
        "seeds": len(seeds),
        "scenarios": {
            group: [each.__name__ for each in found] for group, found in (("clean", CLEAN), ("spiked", SPIKED), ("ramps", RAMPS))
        },
        "invariants": list(CHECKS),
        "contenders": {name: judge(name, make, traces, seeds) for name, make in contenders.items()},
    }


def _described(traces: Sequence[Trace]) -> dict[str, int]:
    return {
        "count": len(traces),
        "samples": sum(len(trace.values) for trace in traces),
        "events": sum(len(trace.events) for trace in traces),
    }


def main(words: Sequence[str] | None = None) -> None:
    """Evaluate, print, and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spikes")
    parser.add_argument("--traces", type=Path, default=DATA, help="a directory laid out as data/, to judge on instead")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="signals of each scenario")
    parser.add_argument(
        "--held-out", type=int, default=0, metavar="SEED", help="first seed of the scenarios; 0 are those to tune on"
    )
    parser.add_argument("--rules", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="judge only these")
    parser.add_argument("--out", type=Path, help="where the result goes; without it only the default signals' is written")
    asked = parser.parse_args(words)
    if asked.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {asked.seeds}")
    seeds = range(asked.held_out, asked.held_out + asked.seeds)
    result = measure({name: CONTENDERS[name] for name in asked.rules}, asked.traces, seeds)
    print(*table(result), "", *notes(result), *legend(result), sep="\n")
    usual = all(getattr(asked, name) == parser.get_default(name) for name in ("traces", "seeds", "held_out", "rules"))
    out = asked.out or (RESULTS / "spikes.json" if usual else None)
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"\nwrote {out}")


if __name__ == "__main__":
    main()
