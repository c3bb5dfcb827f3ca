"""What the diagnosis says of whole programs, which strangers to its rules wrote: ``python -m benchmarks.external.whole``.

Each file in ``programs/`` has a function ``train(watch)``; a faulty one takes ``mended``, too. Those of trainers run in the environments
that ``make test`` makes for them. By the hash of its name a program is in the open half, on which rules may be tuned, or in the one that is
held back. Which rules name a fault was decided by a reader of the programs and of the rules before any run:
``programs/faults/rules.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.util
import io
import json
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..machine import machine
from ..report import RESULTS, ROOT, with_section, write_section
from . import judging

PROGRAMS = Path(__file__).parent / "programs"
SOUND, FAULTS = ("sound_first", "sound_second"), "faults"
SECONDS = 600


class Watch(judging.Watch):
    """What a program calls where a user would add the one line: also in a trainer."""

    def _adapter(self, trainer: str, name: str) -> Any:
        adapters = importlib.import_module(f"torch_gradmon.integrations.{trainer}")
        adapter = getattr(adapters, name)(preset="full", on_spike=None, run_dir=Path(self.directory) / str(len(self.monitors)))
        self.monitors.append(adapter.monitor)
        return adapter

    def callbacks(self, trainer: str) -> list[Any]:
        """Those for ``"lightning"`` or ``"transformers"``."""
        return [self._adapter(trainer, "GradmonCallback")]

    def ignite(self, engine: Any, model: Any, *optimizers: Any) -> None:
        """Watch what an Ignite engine trains."""
        self._adapter("ignite", "GradmonHandler").attach(engine, model, *optimizers)


@dataclass
class Outcome:
    """``found``: severity and rule of the findings of each monitor, ranked; ``error``: why the program ended, if it raised."""

    program: str
    half: str
    measure: float | None = None
    found: list[list[tuple[str, str]]] = field(default_factory=list)
    error: str = ""
    mended: bool = False  # a faulty program, with the wrong line put right

    @property
    def is_sound(self) -> bool:
        return self.mended or not self.program.startswith(FAULTS)

    @property
    def alarms(self) -> list[str]:
        """Rules that warn."""
        return [rule for found in self.found for severity, rule in found if severity != "info"]

    def names(self, rules: Sequence[str]) -> bool:
        """Whether a warning among the first ones has one of these rules, or ``watch`` has refused the loop."""
        first = [rule for found in self.found for severity, rule in found[: judging.FIRST] if severity != "info"]
        return "ValueError" in self.error or not set(rules).isdisjoint(first)


def half_of(path: Path) -> str:
    """``"open"`` or ``"held back"``."""
    return "open" if hashlib.sha1(path.stem.encode(), usedforsecurity=False).hexdigest()[0] in "01234567" else "held back"


def judged(path: Path, mended: bool) -> Outcome:
    """Run one program here, and diagnose what it has written."""
    import torch

    import torch_gradmon as gradmon

    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("program", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["program"] = module = importlib.util.module_from_spec(spec)
    outcome = Outcome(f"{path.parent.name}/{path.stem}", half_of(path), mended=mended)
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        watch = Watch(directory)
        try:
            spec.loader.exec_module(module)
            outcome.measure = float(module.train(watch, **({"mended": True} if mended else {})))
        except Exception as error:  # also one of watch(), which refuses a loop with the reason
            outcome.error = f"{type(error).__name__}: {error}"
        for monitor in watch.monitors:
            monitor.detach()
        for run in sorted(Path(directory).iterdir()):
            outcome.found.append([(finding.severity, finding.rule) for finding in gradmon.load_run(run).diagnose().findings])
    return outcome


def in_process(path: Path, mended: bool) -> Outcome:
    """The same in an interpreter of its own, that of the program's trainer."""
    trainer = path.stem.partition("_")[0]
    python = sys.executable if trainer == "plain" else str(ROOT / f".venv-{trainer}" / "bin" / "python")
    command = [python, "-W", "ignore", "-m", __spec__.name, "--one", str(path), *(["--mended"] if mended else [])]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT)
        found = json.loads(ran.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, IndexError, ValueError) as error:
        return Outcome(f"{path.parent.name}/{path.stem}", half_of(path), error=f"not run: {error}", mended=mended)
    return Outcome(**found)


def visible(outcomes: Sequence[Outcome], rules: dict[str, dict[str, Any]]) -> list[tuple[Outcome, list[str]]]:
    """The faults that a monitor can see, and the rules that name each."""
    found = [(each, rules[each.program.partition("/")[2]]) for each in outcomes if not each.is_sound]
    return [(each, judged["rules"]) for each, judged in found if not judged["out_of_sight"]]


def precision(outcomes: Sequence[Outcome]) -> tuple[int, Counter[str]]:
    """Sound trainings by others, these and those of ``external.json``, and by rule how many of them have it as a warning."""
    sound = [outcome for outcome in outcomes if outcome.is_sound and not outcome.error]
    warned = Counter(rule for outcome in sound for rule in set(outcome.alarms))
    known = json.loads(judging.RESULTS.read_text(encoding="utf-8"))
    for each in known["outcomes"]:
        if each["twin"] or each["judge"] == "examples":
            warned.update({rule for found in each["found"] for severity, rule in found if severity != "info"})
    return len(sound) + known["counts"]["all"]["false alarms"][1], warned


def stored() -> list[Outcome]:
    """Of the last full run."""
    return [Outcome(**each) for each in json.loads((RESULTS / "programs.json").read_text(encoding="utf-8"))["outcomes"]]


def about(rule: str, count: int, warned: Mapping[str, int]) -> str:
    """The sentence on the page of a rule."""
    found = warned.get(rule, 0)
    share = "none" if not found else f"{found} of them, {100 * found / count:.2f} %"
    return f"In {count} sound trainings that others wrote, this rule warned in {share}."


def markdown(outcomes: Sequence[Outcome], rules: dict[str, dict[str, Any]]) -> str:
    """What the documentation says of the programs, and of each rule in sound trainings."""
    rows = ["| programs | half | named | warnings in sound ones |", "| --- | --- | ---: | ---: |"]
    for half in ("open", "held back"):
        of_half = [each for each in outcomes if each.half == half]
        for title, sound in (
            ("written as sound", [each for each in of_half if each.is_sound and not each.mended]),
            ("mended twins", [each for each in of_half if each.mended]),
        ):
            rows.append(f"| {title} | {half} | | {sum(bool(each.alarms) for each in sound)} of {len(sound)} |")
        seen = visible(of_half, rules)
        rows.append(f"| faulty | {half} | {sum(each.names(of) for each, of in seen)} of {len(seen)} | |")
    count, warned = precision(outcomes)
    told = "; ".join(f"`{rule}` in {number} ({100 * number / count:.2f} %)" for rule, number in warned.most_common())
    text = f"In {count} sound trainings by others, all that this page tells of, a rule warned: {told or 'in none'}."
    return "\n".join([*rows, "", text])


def lines(outcomes: Sequence[Outcome], rules: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What is said of the two halves, and each program that is judged wrongly."""
    for half in ("open", "held back"):
        own = [outcome for outcome in outcomes if outcome.half == half]
        sound = [outcome for outcome in own if outcome.is_sound]
        yield f"{half}: {sum(bool(outcome.alarms) for outcome in sound)} of {len(sound)} sound programs with a warning"
        yield from (f"  {each.program}: {', '.join(each.alarms)} {each.error}" for each in sound if each.alarms or each.error)
        seen = visible(own, rules)
        yield f"{half}: {sum(each.names(of) for each, of in seen)} of {len(seen)} faults named"
        for each, of in seen:
            if not each.names(of):
                first = "; ".join(", ".join(rule for _, rule in found[: judging.FIRST]) for found in each.found)
                yield f"  {each.program}: {first or 'nothing'} instead of {', '.join(of) or 'a rule that is missing'}"


def main() -> None:
    """Run what is asked for, print it, and keep the result of a full run."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only those whose set or name contains one of these")
    parser.add_argument("--open", action="store_true", help="only those that rules may be tuned on")
    parser.add_argument("--mended", action="store_true", help="only the faulty ones with the wrong line put right")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(asdict(judged(arguments.one, arguments.mended))))
        return
    every = [(path, False) for of in (*SOUND, FAULTS) for path in sorted((PROGRAMS / of).glob("*.py"))]
    every += [(path, True) for path, _ in every if path.parent.name == FAULTS]
    chosen = [each for each in every if not arguments.names or any(name in str(each[0]) for name in arguments.names)]
    chosen = [each for each in chosen if each[1] >= arguments.mended and (not arguments.open or half_of(each[0]) == "open")]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = list(pool.map(lambda each: in_process(*each), chosen))
    rules = json.loads((PROGRAMS / FAULTS / "rules.json").read_text(encoding="utf-8"))
    print("\n".join(lines(outcomes, rules)))
    if len(chosen) == len(every):
        result = {"machine": machine(), "date": datetime.date.today().isoformat(), "outcomes": list(map(asdict, outcomes))}
        (RESULTS / "programs.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        write_section("programs", markdown(outcomes, rules))
        judged_by_others = precision(outcomes)
        for page in (ROOT / "docs" / "gallery").glob("*.md"):
            text = page.read_text(encoding="utf-8")
            if "<!-- precision -->" in text:
                page.write_text(with_section(text, "precision", about(page.stem, *judged_by_others)), encoding="utf-8")


if __name__ == "__main__":
    main()
