"""Whether the diagnosis shortens the way to a training that learns: ``python -m benchmarks.external.repairing``.

A scripted mechanic tries one repair of :data:`.repairs.REPAIRS` after the other, each in a training of its own, until the loss ends at
least halfway between that of the broken training and that of its healed twin. Without the diagnosis it takes the order in which people try
them, or any order; with it, the repairs that the findings of the broken training ask for come first. A third mechanic may also change one
line: that to which a finding points, which heals where the finding names the fault, and else is a training in vain.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import datetime
import io
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import torch_gradmon as gradmon

from ..faults.judging import describe
from ..machine import machine
from ..report import write_section
from . import CASES
from .judging import case_of, judged
from .repairs import REPAIRS, Repair, guided

RESULTS = Path(__file__).parent.parent / "results" / "repairs.json"
#: Every how many-th case takes part, in the order of their names: all would take a night.
EVERY = 3
#: The part of the way from the broken loss to the healed one that counts as mended, and the least distance, as a part of the broken one.
_MENDED, _APART = 0.5, 0.1
#: A mechanic without a way to tell ends here.
PATIENCE = 5


class Mechanic:
    """As ``gradmon.watch``, with a repair before; what it returns does nothing."""

    def __init__(self, directory: str, repair: Repair | None) -> None:
        self._directory, self._repair = directory, repair

    def __call__(
        self, model: Any, *optimizers: Any, scaler: Any = None, checks: bool | gradmon.Checks = True
    ) -> gradmon.ModuleMonitor:
        """Repair, and watch nothing."""
        if self._repair is not None:
            self._repair(model, optimizers)
        return gradmon.watch(model, *optimizers, scaler=scaler, run_dir=self._directory, checks=checks)


@dataclass(frozen=True)
class Outcome:
    """What became of one broken training.

    Attributes:
        case: its name.
        broken, healed: the mean loss at the end, of it and of its healed twin.
        found: rules of the findings in the broken one, ranked; information last.
        names_fault: the place in ``found`` of the first one that names the fault, from 0; None without.
        mending: the repairs after which the loss ends halfway to the healed one at least.
    """

    case: str
    broken: float
    healed: float
    found: tuple[str, ...]
    names_fault: int | None
    mending: tuple[str, ...]

    @property
    def shows(self) -> bool:
        """Whether the fault shows in the loss: else no mechanic could tell whether it is mended."""
        return math.isfinite(self.healed) and not self.broken - self.healed < _APART * abs(self.broken)

    def tries(self, order: Sequence[str]) -> int | None:
        """The number of trainings until one of these repairs mends; None if none does."""
        return next((place + 1 for place, repair in enumerate(order) if repair in self.mending), None)


def _ends_at(name: str, repair: Repair | None, healed: bool = False) -> float:
    """The mean loss of the last steps; infinite where the repaired training cannot run."""
    case = case_of(name)
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            return float(case.run(Mechanic(directory, repair), 0, healed))
        except Exception:
            return math.inf


def tried(name: str) -> Outcome:
    """Train one case broken, healed, and with each repair; and diagnose the broken one."""
    torch.set_num_threads(1)
    diagnosed = judged(name, 0, twin=False)
    rank = {"error": 0, "warning": 0, "info": 1}
    found = sorted((rank[severity], place, rule) for each in diagnosed.found for place, (severity, rule) in enumerate(each))
    rules = tuple(dict.fromkeys(rule for _, _, rule in found))
    os.environ["GRADMON_DISABLE"] = "1"
    try:
        broken, healed = _ends_at(name, None), _ends_at(name, None, healed=True)
        enough = healed + _MENDED * (broken - healed) if math.isfinite(broken) else 2 * abs(healed) + 1
        mending = tuple(label for label, repair in REPAIRS.items() if _ends_at(name, repair) <= enough)
    finally:
        del os.environ["GRADMON_DISABLE"]
    case = case_of(name)
    names_fault = next((place for place, rule in enumerate(rules) if rule in case.rules), None)
    return Outcome(name, broken, healed, rules, names_fault, mending)


def summary(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """For each mechanic the share mended within :data:`PATIENCE` trainings and within all, and the mean number of trainings spent."""
    shown = [each for each in outcomes if each.shows]
    ways: dict[str, list[int | None]] = {"as people try": [], "with the diagnosis": [], "with the diagnosis, and the line": []}
    for each in shown:
        order = guided(each.found)
        ways["as people try"].append(each.tries(list(REPAIRS)))
        ways["with the diagnosis"].append(each.tries(order))
        line = None if each.names_fault is None else each.names_fault + 1
        ways["with the diagnosis, and the line"].append(_first(line, each.tries(order), lines=len(each.found)))
    found = {name: _of_tries(tries, len(REPAIRS)) for name, tries in ways.items()}
    found["in any order"] = _in_any_order(shown)
    return found


def _first(line: int | None, repair: int | None, lines: int) -> int | None:
    """Lines that findings point to are tried first, then repairs."""
    return line if line is not None else None if repair is None else lines + repair


def _of_tries(tries: Sequence[int | None], most: int) -> dict[str, float]:
    return {
        "cases": len(tries),
        "mended": sum(each is not None for each in tries),
        "soon": sum(each is not None and each <= PATIENCE for each in tries),
        "trainings": statistics.fmean(most if each is None else each for each in tries),
    }


def _in_any_order(shown: Sequence[Outcome]) -> dict[str, float]:
    """Expectations over all orders: of n repairs with k that mend, the first of these is at (n + 1) / (k + 1)."""
    n = len(REPAIRS)
    counts = [len(each.mending) for each in shown]
    soon = sum(1 - math.comb(n - k, PATIENCE) / math.comb(n, PATIENCE) for k in counts)
    return {
        "cases": len(shown),
        "mended": sum(k > 0 for k in counts),
        "soon": soon,
        "trainings": statistics.fmean((n + 1) / (k + 1) if k else n for k in counts),
    }


def markdown(result: Mapping[str, Any]) -> str:
    """The section of the documentation."""
    return "\n".join(_lines(result))


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield f"| the mechanic | mended within {PATIENCE} trainings | mended at all | trainings, mean |"
    yield "| --- | ---: | ---: | ---: |"
    for name in ("in any order", "as people try", "with the diagnosis", "with the diagnosis, and the line"):
        of = result["summary"][name]
        yield f"| {name} | {of['soon']:.0f} of {of['cases']:.0f} | {of['mended']:.0f} | {of['trainings']:.1f} |"
    yield ""
    hidden = result["cases"] - result["summary"]["in any order"]["cases"]
    yield (
        f"{result['cases']} broken trainings, every third, seed 0; in {hidden:.0f} of them the fault does not show in the loss, and they "
        f"are left out. {describe(result['machine'])}; {result['date']}."
    )


def main() -> None:
    """Try every repair on every third broken training, print the table, and keep the result."""
    from tqdm import tqdm

    parser = argparse.ArgumentParser(prog="python -m benchmarks.external.repairing", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only those whose name contains one of these")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    broken = sorted(case.name for case in CASES if case.bug and not case.out_of_sight)[::EVERY]
    chosen = [name for name in broken if not arguments.names or any(part in name for part in arguments.names)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
        outcomes = list(tqdm(pool.map(tried, chosen), total=len(chosen), disable=None))
    result = {
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "cases": len(outcomes),
        "summary": summary(outcomes),
        "outcomes": [asdict(each) for each in outcomes],
    }
    print(markdown(result), *(f"{o.case}: {o.mending or 'nothing mends'}; {o.found[:4]}" for o in outcomes), sep="\n")
    if not arguments.names:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        write_section("repairs", markdown(result))


if __name__ == "__main__":
    main()
