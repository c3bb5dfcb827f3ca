"""Measure an older commit beside this checkout, in one interleaved run: ``python -m benchmarks.commits COMMIT``.

Where git is missing, the folder of the older package takes the place of the commit. Each version runs in a process of its own, on the same
gradients. In each round every contender has one turn, in a new order; all but the demo and idle steps are quotients over one
``torch.sum`` of each tensor, directly before and after them in the same process.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .commit_worker import SMALL
from .machine import machine
from .report import RESULTS, ROOT, with_spread, write_section
from .timing import spread

ROUNDS = 21
#: Contenders that take seconds have one turn in this number of rounds.
SLOW_EVERY = 3
SLOW = ("wandb_watch", "torch_module_monitor", "demo")
TITLES = {"gpt2_124m": "GPT-2, 124 million in 148 tensors", SMALL: "1,000 tensors of 1,024"}
STEPS = ("step/6", "step/148", "step/full")
OLD = ("gpt2_124m/eager", "gpt2_124m/compiled", f"{SMALL}/eager", f"{SMALL}/compiled", "demo", "idle", *STEPS)
NEW = (
    *(f"{of}/{who}" for of in TITLES for who in ("default", "eager", "torch_module_monitor", "wandb_watch")),
    "demo",
    "idle",
    *STEPS,
)
OTHERS = {
    "demo": "demo with everything on, share of the time in %",
    "idle": "step that is not monitored, 150 parameters, µs",
    "step/6": "own time of a monitored step, 6 parameters, µs of the processor",
    "step/148": "the same, 148 small parameters",
    "step/full": 'the same with `preset="full"`',
    "import": "`import torch_gradmon`, in % of torch's own import",
    "import_watch": "`from torch_gradmon import watch`, in % of torch's own import",
}
RIVALS = {"torch_module_monitor": "torch-module-monitor's five metrics", "wandb_watch": "wandb.watch"}


class Version:
    """A process with one version of the package."""

    def __init__(self, package: Path, stack: ExitStack) -> None:
        path = stack.enter_context(tempfile.TemporaryDirectory())
        (Path(path) / "torch_gradmon").symlink_to(package)
        # an installed package has bytecode; a checkout may be run without
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([path, str(ROOT)]),
            "PYTHONPYCACHEPREFIX": stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)),
            "PYTHONDONTWRITEBYTECODE": "",
        }
        self._process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.commit_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=path,
                env=self.environment,
            )
        )
        stack.callback(self._process.stdin.close)  # type: ignore[union-attr]

    def measure(self, name: str) -> float:
        """One turn of a contender."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(name, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("= "):
                return float(line[2:])
        raise RuntimeError(f"the process that measures {name} ended")

    def import_share(self, what: str) -> float:
        """The own part of an import over that of torch, in percent, in a fresh interpreter."""
        code = (
            "import time; a = time.perf_counter(); import torch; b = time.perf_counter()\n"
            f"{what}\nprint(100 * (time.perf_counter() - b) / (b - a))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], env=self.environment, capture_output=True, text=True, check=True, cwd="/"
        )
        return float(done.stdout)


IMPORTS = {"import": "import torch_gradmon", "import_watch": "from torch_gradmon import watch"}


def measure(commit: str, rounds: int, package: Path | None = None, only: str = "") -> dict[str, Any]:
    """The figures of contenders that match the pattern ``only``; ``package`` is the commit's where it is at hand."""
    order, samples = random.Random(0), {"old": dict[str, list[float]](), "new": dict[str, list[float]]()}
    with ExitStack() as stack:
        sides = {"old": Version(package or _checked_out(commit, stack), stack), "new": Version(ROOT / "torch_gradmon", stack)}
        for version in sides.values():
            version.import_share(IMPORTS["import_watch"])  # compiles all
        turns = [("old", name) for name in (*OLD, *IMPORTS)] + [("new", name) for name in (*NEW, *IMPORTS)]
        turns = [turn for turn in turns if re.search(only, turn[1])]
        for number in range(rounds):
            order.shuffle(turns)
            for side, name in turns:
                if name.rpartition("/")[2] in SLOW and number % SLOW_EVERY:
                    continue
                version = sides[side]
                value = version.import_share(IMPORTS[name]) if name in IMPORTS else version.measure(name)
                samples[side].setdefault(name, []).append(value)
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return {
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "old_commit": commit,
        "rounds": rounds,
        **{side: {name: spread(values) for name, values in found.items()} for side, found in samples.items()},
        "times_as_fast": {
            f"{of}/{rival}": {
                side: statistics.median(samples["new"][f"{of}/{rival}"]) / statistics.median(samples[side][f"{of}/{who}"])
                for side, who in (("old", "eager"), ("new", "default"))
            }
            for of in TITLES
            for rival in RIVALS
            if {f"{of}/{rival}", f"{of}/default"} <= samples["new"].keys() and f"{of}/eager" in samples["old"]
        },
    }


def _checked_out(commit: str, stack: ExitStack) -> Path:
    """The package of a commit, in a worktree that goes with ``stack``."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", folder, commit], check=True)
    stack.callback(subprocess.run, ["git", "-C", ROOT, "worktree", "remove", "--force", folder], check=True)
    return Path(folder) / "torch_gradmon"


def _row(label: str, *cells: Mapping[str, float] | None) -> Iterator[str]:
    """A line of the table, if any of its figures is there."""
    if any(cells):
        yield f"| {label} | {' | '.join('' if cell is None else with_spread(cell) for cell in cells)} |"


def _rows(result: Mapping[str, Any]) -> Iterator[str]:
    """A row for each figure that the result has."""
    old, new, times = result["old"], result["new"], result["times_as_fast"]
    for of, title in TITLES.items():
        cells = (old.get(f"{of}/eager"), old.get(f"{of}/compiled"), new.get(f"{of}/default"))
        yield from _row(f"nine built-ins by key, {title}: over the floor", *cells)
    for (of, title), (rival, label) in itertools.product(TITLES.items(), RIVALS.items()):
        if (found := times.get(f"{of}/{rival}")) is not None:
            yield f"| the same, {title}: times as fast as {label} | {found['old']:.1f} | | {found['new']:.1f} |"
    for name, label in OTHERS.items():
        yield from _row(label, old.get(name), None, new.get(name))


def markdown(result: Mapping[str, Any]) -> str:
    """The section of the documentation about one result."""
    where = result["machine"]
    head = (
        "| default settings | before: torch's operations | before: kernel compiled on request | now |",
        "| --- | ---: | ---: | ---: |",
    )
    return (
        "\n".join((*head, *_rows(result)))
        + f"\n\nBefore is commit {result['old_commit']}; {result['rounds']} rounds, one thread. {where['processor']} "
        f"({where['cores']} cores, {where['instructions']}), {where['system']}, Python {where['python']}, torch {where['torch']}; "
        f"{result['date']}. Medians, quartiles in brackets."
    )


def results() -> str:
    """The section of the documentation: of each machine whose result is kept."""
    kept = sorted(RESULTS.glob("commits*.json"))
    return "\n\n".join(markdown(json.loads(path.read_text(encoding="utf-8"))) for path in kept)


def main() -> None:
    """Measure, print, and keep the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.commits", description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="one round, nothing kept")
    parser.add_argument("--package", type=Path, help="that commit's folder torch_gradmon, where there is no git")
    parser.add_argument("--only", default="", help="a pattern of the contenders to measure")
    parser.add_argument("--out", default="commits", help="name of the result; each that begins with commits has a table")
    asked = parser.parse_args()
    result = measure(asked.commit, 2 if asked.quick else asked.rounds, asked.package, asked.only)
    print(markdown(result))
    if not asked.quick:
        (RESULTS / f"{asked.out}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        write_section("commits", results())


if __name__ == "__main__":
    main()
