"""Which signals come before a divergence, how early, and how often in vain: ``python -m benchmarks.foresight.judging``."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..faults.judging import describe
from ..machine import machine
from ..report import write_section
from .families import FAMILIES
from .held_out import HELD_OUT
from .recording import Recording, record
from .signals import SIGNALS, episodes

RESULTS = Path(__file__).parent.parent / "results" / "foresight.json"
#: What is before this step does not count, neither as a warning nor as a false alarm: there is no past to compare with.
BEGIN = 150
#: How early a warning has to be, in steps before the loss leaves its own normal.
EARLY, VERY_EARLY = 10, 50
#: False alarms in this number of sound steps that a threshold may cause on the families that it is chosen on.
ALLOWED, PER = 1, 10_000
FORESIGHT, SPIKES = "`Foresight`: the first two together", "the default detector of spikes in the gradient's norm"


def _one(job: tuple[int, int, bool]) -> Recording:
    torch.set_num_threads(1)
    index, seed, sound = job
    return record((*FAMILIES, *HELD_OUT)[index], seed, sound)


def crossings(recording: Recording, signal: str, threshold: float) -> list[int]:
    """The steps from :data:`BEGIN` on in which a score is above the threshold."""
    return [step for step, score in recording.scores[signal] if step >= BEGIN and not score <= threshold]


def threshold(recordings: Sequence[Recording], signal: str) -> float:
    """The lowest one that causes no more false alarms than allowed in sound trainings."""
    scores = sorted({score for each in recordings for step, score in each.scores[signal] if step >= BEGIN})
    low, high = 0, len(scores) - 1
    if high < 0:
        return math.inf
    allowed = ALLOWED * sum(each.steps - BEGIN for each in recordings) / PER
    while low < high:  # the higher it is, the fewer crossings
        middle = (low + high) // 2
        alarms = sum(len(episodes(crossings(each, signal, scores[middle]))) for each in recordings)
        low, high = (low, middle) if alarms <= allowed else (middle + 1, high)
    return scores[low]


def warned(recordings: Iterable[Recording], name: str, bound: float) -> dict[str, list[int]]:
    """By training, the steps of warnings."""
    found = {}
    for each in recordings:
        steps = each.signs if name == FORESIGHT else each.spikes if name == SPIKES else crossings(each, name, bound)
        found[f"{each.family} seed {each.seed}"] = [step for step in steps if step >= BEGIN]
    return found


def lead(recording: Recording, steps: Sequence[int]) -> int | None:
    """Steps from the first warning to the onset; None without a warning before it."""
    assert recording.onset is not None
    return next((recording.onset - step for step in steps if step < recording.onset), None)


def row(recordings: Sequence[Recording], name: str, bound: float) -> dict[str, Any]:
    """How a signal does on these trainings."""
    diverging = [each for each in recordings if not each.sound and each.onset is not None and each.onset >= BEGIN + EARLY]
    sound = [each for each in recordings if each.sound and each.onset is None]
    steps = warned(diverging, name, bound)
    leads = {f"{each.family} seed {each.seed}": lead(each, steps[f"{each.family} seed {each.seed}"]) for each in diverging}
    known = sorted(value for value in leads.values() if value is not None)
    alarms = {key: episodes(value) for key, value in warned(sound, name, bound).items()}
    many = sum(each.steps - BEGIN for each in sound)
    return {
        "diverging": len(diverging),
        "early": sum(value >= EARLY for value in known),
        "very early": sum(value >= VERY_EARLY for value in known),
        "median lead": median(known) if known else None,
        "false alarms": sum(map(len, alarms.values())),
        "sound steps": many,
        "threshold": bound,
        "missed": sorted(key for key, value in leads.items() if value is None or value < EARLY),
        "in vain": sorted(key for key, value in alarms.items() if value),
    }


def judge(recordings: Sequence[Recording]) -> dict[str, dict[str, dict[str, Any]]]:
    """By signal, the rows of the families that thresholds were chosen on and of those held out."""
    chosen = [each for each in recordings if not each.held_out]
    held_out = [each for each in recordings if each.held_out]
    sound = [each for each in chosen if each.sound and each.onset is None]
    bounds = {signal.name: threshold(sound, signal.name) for signal in SIGNALS}
    bounds |= {FORESIGHT: math.nan, SPIKES: math.nan}
    return {
        name: {"chosen": row(chosen, name, bounds[name]), "held out": row(held_out, name, bounds[name])}
        for name in (FORESIGHT, *(signal.name for signal in SIGNALS), SPIKES)
    }


def at_best(recordings: Sequence[Recording]) -> dict[str, int]:
    """By signal, how many of these divergences it would foresee ten steps early with a threshold chosen on these trainings themselves."""
    sound = [each for each in recordings if each.sound and each.onset is None]
    return {signal.name: row(recordings, signal.name, threshold(sound, signal.name))["early"] for signal in SIGNALS}


def table(signals: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[str]:
    """Rows of Markdown."""
    yield "| signal | 10 steps early | 50 steps early | median lead | false alarms in 10,000 sound steps | 10 steps early, tuned on |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    sources = {signal.name: signal.source for signal in SIGNALS}
    for name, rows in signals.items():
        of, tuned = rows["held out"], rows["chosen"]
        source = f" ({sources[name]})" if sources.get(name) else ""
        cells = (
            _share(of["early"], of["diverging"]),
            _share(of["very early"], of["diverging"]),
            "" if of["median lead"] is None else f"{of['median lead']:.0f}",
            f"{PER * of['false alarms'] / max(of['sound steps'], 1):.1f}",
            _share(tuned["early"], tuned["diverging"]),
        )
        yield f"| {name}{source} | {' | '.join(cells)} |"


def _share(some: int, many: int) -> str:
    return f"{some} of {many} ({100 * some / max(many, 1):.0f} %)"


def _by_family(trainings: Iterable[str]) -> str:
    """Families with the seeds of these trainings."""
    found: dict[str, list[str]] = {}
    for family, _, seed in (each.partition(" seed ") for each in trainings):
        found.setdefault(family, []).append(seed)
    return "; ".join(f"{family} (seed{'s' * (len(seeds) > 1)} {', '.join(seeds)})" for family, seeds in found.items()) or "none"


def markdown(result: Mapping[str, Any]) -> str:
    """The section of the documentation."""
    of, tuned = (result["signals"][FORESIGHT][part] for part in ("held out", "chosen"))
    best = max(result["at best"], key=lambda name: result["at best"][name])
    not_diverged = _by_family(result["not diverged"])
    return "\n".join(
        [
            *table(result["signals"]),
            "",
            f"Held out: {result['families held out']} families, {of['diverging']} divergences, {of['sound steps']:,} sound steps; "
            f"tuned on: {result['families']} families, {tuned['diverging']} divergences, {tuned['sound steps']:,} sound steps.",
            "",
            f"Not foreseen by `Foresight` at least ten steps early, held out: {_by_family(of['missed'])}; tuned on: "
            f"{_by_family(tuned['missed'])}.",
            "",
            f"Even with a threshold chosen on the held-out families themselves, the best single signal, {best}, would foresee "
            f"{_share(result['at best'][best], of['diverging'])}.",
            "",
            f"Warned in vain, held out: {_by_family(of['in vain'])}; tuned on: {_by_family(tuned['in vain'])}.",
            "",
            f"Left out, since the training that was to diverge did not, or did before step {BEGIN + EARLY}, or the sound one did: "
            f"{not_diverged}.",
            "",
            f"Seeds {', '.join(map(str, result['seeds']))}; {describe(result['machine'])}; {result['date']}.",
        ]
    )


def _left_out(recordings: Iterable[Recording]) -> list[str]:
    return [
        f"{each.family} seed {each.seed}{' sound' if each.sound else ''}"
        for each in recordings
        if (each.onset is not None if each.sound else each.onset is None or each.onset < BEGIN + EARLY)
    ]


def judged(recordings: Sequence[Recording], seeds: Sequence[int]) -> dict[str, Any]:
    """The whole result."""
    return {
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "seeds": list(seeds),
        "families": sum(not family.held_out for family in FAMILIES),
        "families held out": len(HELD_OUT),
        "not diverged": _left_out(recordings),
        "at best": at_best([each for each in recordings if each.held_out]),
        "signals": judge(recordings),
    }


def main() -> None:
    """Run what is asked for, print the table, and keep the result of a full run."""
    from tqdm import tqdm

    parser = argparse.ArgumentParser(prog="python -m benchmarks.foresight.judging", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only families whose name contains one of these")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--tuned", action="store_true", help="only families that thresholds may be chosen on")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    chosen = [
        index
        for index, family in enumerate((*FAMILIES, *HELD_OUT))
        if not (arguments.tuned and family.held_out)
        and (not arguments.names or any(name in family.name for name in arguments.names))
    ]
    begin = time.perf_counter()
    jobs = [(index, seed, sound) for seed in arguments.seeds for index in chosen for sound in (False, True)]
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        recordings = list(tqdm(pool.imap(_one, jobs), total=len(jobs), disable=None))
    result = judged(recordings, arguments.seeds)
    print(markdown(result))
    print(f"{len(recordings)} trainings, {time.perf_counter() - begin:.0f} s")
    if not arguments.names and not arguments.tuned:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        write_section("foresight", markdown(result))


if __name__ == "__main__":
    main()
