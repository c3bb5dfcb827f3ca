"""What the diagnosis says of trainings that others broke: ``python -m benchmarks.external.judging``, as ``make bench-external`` runs it."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import torch_gradmon as gradmon

from ..faults.judging import describe
from ..machine import machine
from ..report import write_section
from . import CASES
from .case import Case

RESULTS = Path(__file__).parent.parent / "results" / "external.json"
#: A fault counts as named where one of its rules is among this number of first findings, by a warning or an error.
FIRST = 2
JUDGES = {
    "traincheck": "silent errors of TrainCheck (OSDI 2025)",
    "questions": "questions on Stack Overflow, forums and GitHub",
    "localisers": "kinds of AutoTrainer, DeepLocalize, UMLAUT, DeepFD, NeuraLint",
    "examples": "kinds of pytorch/examples and others, healthy",
}


class Watch:
    """As ``gradmon.watch``; picklable, since some cases call it in processes of their own. Each monitor writes a run.

    Args:
        directory: of the runs, by number; those of other ranks are written by the first one.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.monitors: list[gradmon.ModuleMonitor] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"directory": self.directory, "monitors": []}

    def __call__(
        self, model: Any, *optimizers: Any, scaler: Any = None, checks: bool | gradmon.Checks = True
    ) -> gradmon.ModuleMonitor:
        """Watch it."""
        run_dir = Path(self.directory) / str(len(self.monitors))
        self.monitors.append(
            gradmon.watch(model, *optimizers, scaler=scaler, preset="full", on_spike=None, run_dir=run_dir, checks=checks)
        )
        return self.monitors[-1]


@dataclass(frozen=True)
class Outcome:
    """The findings in one training.

    Attributes:
        case: its name.
        judge: see :class:`Case`.
        rules: findings any of which would name the fault; empty for a healthy one and for the mended twin.
        held_back: see :class:`Case`.
        twin: whether it is the mended one.
        seed: of parameters and data.
        found: severity and rule of the findings, ranked; of several monitors, one after the other.
        failed: rules that raised, and why ``watch`` refused the loop.
    """

    case: str
    judge: str
    rules: tuple[str, ...]
    held_back: bool
    twin: bool
    seed: int
    found: tuple[tuple[tuple[str, str], ...], ...]
    failed: tuple[str, ...] = ()

    def named(self, with_information: bool = False) -> bool:
        """Whether the fault is among the first findings, or ``watch`` has refused the loop with the reason."""
        return self.is_refused or any(
            rule in self.rules and (with_information or severity != "info")
            for found in self.found
            for severity, rule in found[:FIRST]
        )

    @property
    def is_refused(self) -> bool:
        """Whether ``watch`` has refused a faulty loop."""
        return bool(self.rules) and any(why.startswith("refused") for why in self.failed)

    @property
    def alarms(self) -> list[str]:
        """Rules that warn without a fault."""
        if self.rules:
            return []
        refused = ["refused"] if any(why.startswith("refused") for why in self.failed) else []
        return refused + [rule for found in self.found for severity, rule in found if severity != "info"]


def case_of(name: str) -> Case:
    """The case of that name."""
    return next(each for each in CASES if each.name == name)


def judged(name: str, seed: int, twin: bool) -> Outcome:
    """Run one training under monitors, and diagnose the runs that they wrote."""
    case = case_of(name)
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        watch, refused = Watch(directory), tuple[str, ...]()
        try:
            case.run(watch, seed, twin)
        except ValueError as error:  # of watch(), which takes no such loop; it is no finding
            refused = (f"refused: {error}",)
        for monitor in watch.monitors:
            monitor.detach()
        diagnoses = [gradmon.load_run(path).diagnose() for path in sorted(Path(directory).iterdir())]
    found = tuple(tuple((finding.severity, finding.rule) for finding in each.findings) for each in diagnoses)
    failed = tuple(f"{rule}: {why}" for each in diagnoses for rule, why in each.unseen.items() if "failed" in why)
    return Outcome(name, case.judge, () if twin else case.rules, case.held_back, twin, seed, found, (*refused, *failed))


def _one(job: tuple[str, int, bool]) -> Outcome:
    torch.set_num_threads(1)
    return judged(*job)


def jobs(cases: Sequence[Case], seeds: Sequence[int]) -> list[tuple[str, int, bool]]:
    """Each training with each seed; a faulty one, then its twin."""
    return [(each.name, seed, twin) for each in cases for seed in seeds for twin in ((False, True) if each.bug else (False,))]


def counts(outcomes: Sequence[Outcome]) -> dict[str, dict[str, list[int]]]:
    """By judge and for all: how many faults were named, tuned on and held back, how many if information counts too, and in how many sound
    trainings there was a warning.
    """
    found = {}
    for judge in (*JUDGES, "all"):
        own = [o for o in outcomes if judge in (o.judge, "all")]
        faults, sound = [o for o in own if o.rules], [o for o in own if not o.rules]
        found[judge] = {
            "named": _share([o.named() for o in faults]),
            "held back": _share([o.named() for o in faults if o.held_back]),
            "with information": _share([o.named(with_information=True) for o in faults]),
            "false alarms": _share([bool(o.alarms) for o in sound]),
        }
    return found


def _share(flags: Sequence[bool]) -> list[int]:
    return [sum(flags), len(flags)]


def wrong(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Every miss and false alarm, a line each."""
    for o in outcomes:
        told = "; ".join(", ".join(f"{severity} {rule}" for severity, rule in found[:4]) or "nothing" for found in o.found)
        if o.rules and not o.named():
            yield f"missed   {o.case} seed {o.seed} ({', '.join(o.rules)}): {told}"
        elif o.alarms:
            yield f"alarm in {o.case}{' (mended)' if o.twin else ''} seed {o.seed}: {told}"
        for why in o.failed:
            yield f"defect   {o.case} seed {o.seed}: {why}"


def table(counted: Mapping[str, Mapping[str, Sequence[int]]]) -> Iterator[str]:
    """Rows of Markdown."""
    titles = [title for title, (_, many) in counted["all"].items() if many]
    yield f"| judge | {' | '.join(titles)} |"
    yield f"| --- |{' ---: |' * len(titles)}"
    for judge, parts in counted.items():
        cells = (f"{some} of {many}" if many else "" for some, many in (parts[title] for title in titles))
        yield f"| {JUDGES.get(judge, judge)} | {' | '.join(cells)} |"


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two results with other seeds as one.

    Raises:
        ValueError: they share a seed, or were taken by other machines.
    """
    if set(one["seeds"]) & set(other["seeds"]) or one["machine"] != other["machine"]:
        raise ValueError(f"results with seeds {one['seeds']} and {other['seeds']} do not go together, or their machines differ")
    counted = {
        judge: {title: [a + b for a, b in zip(pair, other["counts"][judge][title], strict=True)] for title, pair in parts.items()}
        for judge, parts in one["counts"].items()
    }
    return {
        **other,
        "seeds": sorted([*one["seeds"], *other["seeds"]]),
        "trainings": one["trainings"] + other["trainings"],
        "counts": counted,
        "wrong": [*one["wrong"], *other["wrong"]],
        "outcomes": [*one["outcomes"], *other["outcomes"]],
    }


def _cases(outcomes: Iterable[Outcome]) -> str:
    """The names of their cases, with seeds."""
    seeds: dict[str, list[str]] = {}
    for o in outcomes:
        seeds.setdefault(f"`{o.case}`{', mended' if o.twin else ''}{', held back' if o.held_back else ''}", []).append(
            str(o.seed)
        )
    return "; ".join(f"{name} (seed {', '.join(of)})" for name, of in sorted(seeds.items())) or "none"


def markdown(result: Mapping[str, Any]) -> str:
    """The section of the documentation."""
    outcomes = [Outcome(**{**each, "found": tuple(map(tuple, each["found"]))}) for each in result["outcomes"]]
    faults = [o for o in outcomes if o.rules and not o.named()]
    refused = [o for o in outcomes if o.is_refused]
    silent = [o for o in faults if not o.named(with_information=True)]
    blind = [f"`{name}` ({why})" for name, why in result["out of sight"].items()]
    many = f"{result['trainings']} trainings with seeds {', '.join(map(str, result['seeds']))}"
    return "\n".join(
        [
            *table(result["counts"]),
            "",
            f"Not named: {_cases(silent)}.",
            "",
            f"Named as information only: {_cases(o for o in faults if o not in silent)}.",
            "",
            f"Refused by `watch` with the reason, which counts as named: {_cases(refused)}.",
            "",
            f"Warnings without a fault: {_cases(o for o in outcomes if o.alarms)}.",
            "",
            f"Left out, since no monitor of gradients can see them: {'; '.join(blind) or 'none'}.",
            "",
            f"{many}; {describe(result['machine'])}; {result['date']}.",
        ]
    )


def main() -> None:
    """Run what is asked for, print the table and what went wrong, and keep the result of a full run."""
    from tqdm import tqdm

    parser = argparse.ArgumentParser(prog="python -m benchmarks.external.judging", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only those whose name, judge or rule contains one of these")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--add", action="store_true", help="to the stored result, which has other seeds")
    parser.add_argument("--open", action="store_true", help="only those that rules may be tuned on")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    seen = [case for case in CASES if not case.out_of_sight and not (arguments.open and case.held_back)]
    chosen = [
        case
        for case in seen
        if not arguments.names or any(name in f"{case.name} {case.judge} {' '.join(case.rules)}" for name in arguments.names)
    ]
    begin = time.perf_counter()
    todo = jobs(chosen, arguments.seeds)
    # no daemons: cases of several ranks start processes themselves
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
        outcomes = list(tqdm(pool.map(_one, todo), total=len(todo), disable=None))
    counted, faults = counts(outcomes), list(wrong(outcomes))
    print(*table(counted), *faults, sep="\n")
    print(f"{len(outcomes)} trainings, {time.perf_counter() - begin:.0f} s")
    if not arguments.names and not arguments.open:
        result = {
            "machine": machine(),
            "date": datetime.date.today().isoformat(),
            "seeds": arguments.seeds,
            "trainings": len(outcomes),
            "counts": counted,
            "wrong": faults,
            "out of sight": {case.name: case.out_of_sight for case in CASES if case.out_of_sight},
            "outcomes": [asdict(o) for o in outcomes if o.is_refused or o.alarms or (o.rules and not o.named())],
        }
        if arguments.add:
            result = merged(json.loads(RESULTS.read_text(encoding="utf-8")), result)
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        write_section("external", markdown(result))


if __name__ == "__main__":
    main()
