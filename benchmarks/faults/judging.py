"""Recall and false alarms of the diagnosis on the zoo of faults: ``python -m benchmarks.faults.judging``."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import multiprocessing
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import torch_gradmon as gradmon

from ..machine import machine
from ..report import write_section
from . import FAULTS, HEALTHY, Training
from .unseen import HEALTHY as UNSEEN_HEALTHY
from .unseen import TRAININGS as UNSEEN_FAULTS

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
#: By another author, who had not seen the rules.
UNSEEN = (*UNSEEN_FAULTS, *UNSEEN_HEALTHY)
ZOO = (*FAULTS, *HEALTHY)
#: A fault counts as named where its rule is among this number of first findings.
FIRST = 2
#: A finding that knows more of the same fault than the rule that is expected: a referee of its own accepted the second pair, for inputs
#: that are two hundred times too large.
NARROWER = {"loss-plateau": "loss-at-chance", "saturated-units": "inputs-not-normalised"}


@dataclass(frozen=True)
class Outcome:
    """The findings in one training.

    Attributes:
        training: its name.
        rule: what should be found; empty for a healthy one and for the fixed twin.
        held_back: see :class:`Training`.
        twin: whether it is the fixed one.
        seed: of parameters and data.
        found: severity and rule of the findings, ranked; of several monitors, one after the other.
        unseen: rules that failed.
    """

    training: str
    rule: str
    held_back: bool
    twin: bool
    seed: int
    found: tuple[tuple[tuple[str, str], ...], ...]
    unseen: tuple[str, ...] = ()

    @property
    def place(self) -> int | None:
        """Position of the rule among the findings, from 0."""
        fitting = {self.rule, NARROWER.get(self.rule)}
        return min((place for found in self.found for place, (_, rule) in enumerate(found) if rule in fitting), default=None)

    @property
    def named(self) -> bool:
        """Whether the fault is among the first findings."""
        return self.place is not None and self.place < FIRST

    @property
    def alarms(self) -> list[str]:
        """Rules that warn without a fault."""
        return [] if self.rule else [rule for found in self.found for severity, rule in found if severity != "info"]


def diagnosed(
    training: Training, seed: int, twin: bool, preset: str = "full", directory: Path | None = None
) -> list[gradmon.Diagnosis]:
    """Run one training under monitors and return the diagnosis of each; they write runs 0, 1, ... in ``directory``, if there is one."""
    monitors: list[gradmon.ModuleMonitor] = []

    def watch(model: Any, *optimizers: Any, scaler: Any = None) -> gradmon.ModuleMonitor:
        run_dir = None if directory is None else directory / f"{len(monitors)}"
        monitors.append(gradmon.watch(model, *optimizers, scaler=scaler, preset=preset, on_spike=None, run_dir=run_dir))
        return monitors[-1]

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        training.run(watch, seed, twin)
        diagnoses = [monitor.diagnose() for monitor in monitors]
        for monitor in monitors:
            monitor.detach()
    return diagnoses


def judged(name: str, seed: int, twin: bool, preset: str = "full") -> Outcome:
    """Run one training under a monitor and ask for its diagnosis."""
    training = next(each for each in (*ZOO, *UNSEEN) if each.name == name)
    diagnoses = diagnosed(training, seed, twin, preset)
    found = tuple(tuple((finding.severity, finding.rule) for finding in diagnosis.findings) for diagnosis in diagnoses)
    failed = tuple(f"{rule}: {why}" for diagnosis in diagnoses for rule, why in diagnosis.unseen.items() if "failed" in why)
    return Outcome(name, "" if twin else training.rule, training.held_back, twin, seed, found, failed)


def _one(job: tuple[str, int, bool], preset: str) -> Outcome:
    torch.set_num_threads(1)
    return judged(*job, preset=preset)


def jobs(trainings: Iterable[Training], seeds: Sequence[int]) -> list[tuple[str, int, bool]]:
    """Each training with each seed; a faulty one, then its twin."""
    return [
        (training.name, seed, twin)
        for training in trainings
        for seed in seeds
        for twin in ((False, True) if training.rule else (False,))
    ]


def counts(outcomes: Sequence[Outcome]) -> dict[str, dict[str, list[int]]]:
    """By rule, and for all of them, how many were named of how many that were tuned on, held back, or of the second zoo; how many in the
    first place; and in how many sound trainings it warned.
    """
    rules = sorted({o.rule for o in outcomes if o.rule} | {rule for o in outcomes for rule in o.alarms})
    sound = [o for o in outcomes if not o.rule]
    others = {training.name for training in UNSEEN}

    def of(own: Sequence[Outcome], alarms: int) -> dict[str, list[int]]:
        second = [o for o in own if o.training in others]
        first = [o for o in own if o.training not in others]
        parts = {"tuned on": [o for o in first if not o.held_back], "held back": [o for o in first if o.held_back]}
        found = {title: [sum(o.named for o in part), len(part)] for title, part in {**parts, "second zoo": second}.items()}
        return {**found, "first": [sum(o.place == 0 for o in own), len(own)], "false alarms": [alarms, len(sound)]}

    by_rule = {rule: of([o for o in outcomes if o.rule == rule], sum(rule in o.alarms for o in sound)) for rule in rules}
    return {**by_rule, "all": of([o for o in outcomes if o.rule], sum(bool(o.alarms) for o in sound))}


def table(counted: Mapping[str, Mapping[str, Sequence[int]]]) -> Iterator[str]:
    """Rows of Markdown."""
    titles = list(counted["all"])
    yield f"| rule | {' | '.join(titles)} |"
    yield f"| --- |{' ---: |' * len(titles)}"
    for rule, parts in counted.items():
        bare = {title for title, (_, many) in parts.items() if not many or (title == "false alarms" and rule != "all")}
        cells = (str(some) if title in bare else f"{some} of {many}" for title, (some, many) in parts.items())
        yield f"| {rule if rule == 'all' else f'`{rule}`'} | {' | '.join(cells)} |"


def wrong(outcomes: Sequence[Outcome]) -> list[str]:
    """Every miss and false alarm, a line each."""
    lines = []
    for o in outcomes:
        told = "; ".join(", ".join(f"{severity} {rule}" for severity, rule in found[:4]) or "nothing" for found in o.found)
        if o.rule and not o.named:
            lines.append(f"missed   {o.training} seed {o.seed}: {told}")
        elif o.alarms:
            lines.append(f"alarm in {o.training}{' (mended)' if o.twin else ''} seed {o.seed}: {told}")
        lines += [f"defect   {o.training} seed {o.seed}: {why}" for why in o.unseen]
    return lines


def markdown(result: Mapping[str, Any]) -> str:
    """The section of the documentation."""
    many = f"{result['trainings']} trainings with seeds {', '.join(map(str, result['seeds']))}"
    return "\n".join([*table(result["counts"]), "", f"{many}; {describe(result['machine'])}; {result['date']}."])


def describe(found: Mapping[str, Any]) -> str:
    """The machine in a line."""
    return f"{found['processor']} ({found['cores']} cores), torch {found['torch']}"


def main() -> None:
    """Run what is asked for, print the table and what went wrong, and keep the result of a full run."""
    from tqdm import tqdm  # of the tests, only that of this function has it

    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.judging", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only those whose name, rule or family contains one of these")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--preset", default="full", choices=["minimal", "standard", "full"])
    parser.add_argument("--unseen", action="store_true", help="the second zoo only")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    zoo = UNSEEN if arguments.unseen else (*ZOO, *UNSEEN)
    chosen = [t for t in zoo if not arguments.names or any(name in f"{t.name} {t.rule}" for name in arguments.names)]
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(arguments.jobs, maxtasksperchild=40) as pool:
        todo = jobs(chosen, arguments.seeds)
        outcomes = list(tqdm(pool.imap(partial(_one, preset=arguments.preset), todo), total=len(todo), disable=None))
    counted, faults = counts(outcomes), wrong(outcomes)
    print(*table(counted), *faults, sep="\n")
    print(f"{len(outcomes)} trainings, preset {arguments.preset}, {time.perf_counter() - begin:.0f} s")
    if not arguments.names and not arguments.unseen and arguments.preset == "full":
        result = {
            "machine": machine(),
            "date": datetime.date.today().isoformat(),
            "seeds": arguments.seeds,
            "trainings": len(outcomes),
            "counts": counted,
            "wrong": faults,
        }
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        write_section("faults", markdown(result))


if __name__ == "__main__":
    main()
