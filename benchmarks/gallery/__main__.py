"""Write the pages and pictures of the gallery: ``python -m benchmarks.gallery``."""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

import torch_gradmon as gradmon

from ..external.whole import about, precision, stored
from ..faults import FAULTS, Training
from ..faults.judging import diagnosed
from .healthy import FAMILIES, table
from .pictures import OVER_DEPTH, layers, signals
from .texts import WHY

ROOT = Path(__file__).parent.parent.parent
GALLERY = ROOT / "docs" / "gallery"
#: Characters that a page of the site has room for.
_COLUMNS = 80
#: What a map of layers shows.
_RELATIVE = "each gradient norm relative to the median of its row, as the report first shows it"
_SENTENCE = re.compile(r".*?\.(?= [A-Z]|$)")


def examples() -> dict[str, Training]:
    """The first training of each rule."""
    found: dict[str, Training] = {}
    for training in FAULTS:
        found.setdefault(training.rule, training)
    return found


def recorded(training: Training, fixed: bool, directory: Path) -> tuple[gradmon.Run, gradmon.Diagnosis]:
    """Run a training under a monitor: its run directory, and the diagnosis."""
    diagnosis = diagnosed(training, 0, fixed, directory=directory)[0]
    return gradmon.load_run(directory / "0"), diagnosis


def page(training: Training, directory: Path, out: Path) -> str:
    """The page of one rule; its pictures are written beside it."""
    rule = training.rule
    (faulty, diagnosis), (cured, after) = (recorded(training, fixed, directory / f"{rule}-{fixed}") for fixed in (False, True))
    found = next(finding for finding in diagnosis.findings if finding.rule == rule)
    signals(out / "pictures" / f"{rule}.png", {"faulty": faulty, "cured": cured})
    map_of_layers = "No step ended in this run, so nothing else is recorded."
    if faulty.steps:
        is_relative = rule not in OVER_DEPTH
        layers(out / "pictures" / f"{rule}-layers.png", faulty, is_relative)
        what = _RELATIVE if is_relative else "the norm of each gradient"
        map_of_layers = (
            f"![The layers of the faulty run over its steps: {what}](pictures/{rule}-layers.png)\n\n_Made by `make gallery`._"
        )
    rest = [finding for finding in after.findings if finding.severity != "info"]
    verdict = "finds nothing to warn about" if not rest else f"still warns: {', '.join(each.rule for each in rest)}"
    return f"""# {rule}

{found.cause}

![Loss, gradient norm and update ratio of the faulty run and of the cured one](pictures/{rule}.png)

_Made by `make gallery`, like all of this page, from `{training.name}` of `benchmarks/faults/`, with and without its fault._

## The finding

```text
{found.text(_COLUMNS)}
```

{map_of_layers}

## Why it happens

{WHY[rule]}

## The cure

In this training, one line: **{training.advice}**. Of the cured run the diagnosis {verdict}.

## How often it is wrong

<!-- precision -->

{about(rule, *precision(stored()))}

<!-- /precision -->

_Made by `python -m benchmarks.external.whole`._
"""


def healthy_page(name: str, directory: Path, out: Path) -> str:
    """The page of a family of healthy runs; its pictures are written beside it."""
    title, training, text = FAMILIES[name]
    run, diagnosis = recorded(training, False, directory / name)
    signals(out / "pictures" / f"{name}.png", {"healthy": run})
    layers(out / "pictures" / f"{name}-layers.png", run, relative=True)
    found = ", ".join(f"`{finding.rule}`" for finding in diagnosis.findings if finding.severity == "info")
    return f"""# {title}, healthy

{text}

![Loss, gradient norm and update ratio of the run](pictures/{name}.png)

_Made by `make gallery`, like all of this page, from a small training that is as it should be, `{training.name}`._

## What is normal here

{table(run)} The diagnosis warns of nothing{f", and has for information: {found}" if found else ""}.

![The layers over the steps: {_RELATIVE}](pictures/{name}-layers.png)

_Made by `make gallery`._
"""


def _row(out: Path, name: str, title: str) -> str:
    """The line of a page in the list: its first picture, small, and its first sentence."""
    about = (out / f"{name}.md").read_text(encoding="utf-8").split("\n\n")[1]
    sentence = _SENTENCE.match(about)
    assert sentence is not None, about
    return f'| <img src="pictures/{name}.png" alt="" width="300"> | [{title}]({name}.md): {sentence[0]} |'


def write(names: Iterable[str], out: Path) -> None:
    """Write the pages of these rules and families, and the list of all of them."""
    (out / "pictures").mkdir(parents=True, exist_ok=True)
    known = examples()
    with tempfile.TemporaryDirectory() as directory:
        for name in names:
            torch.manual_seed(0)
            text = healthy_page(name, Path(directory), out) if name in FAMILIES else page(known[name], Path(directory), out)
            (out / f"{name}.md").write_text(text, encoding="utf-8")
            print(name, flush=True)
    healthy, faults = "\n".join(FAMILIES), "\n".join(sorted(known))
    families = "\n".join(_row(out, name, family.title) for name, family in FAMILIES.items())
    rules = "\n".join(_row(out, rule, rule) for rule in sorted(known))
    (out / "index.md").write_text(
        f"""# Gallery of runs

What healthy runs look like, to hold your own beside them; and what each finding of the diagnosis looks like, why it happens, and the
same run cured. All of them are small trainings on a CPU, made by `make gallery`.

## Healthy runs

| loss, gradient norm, update ratio | run |
| --- | --- |
{families}

## Faults

| faulty and cured | finding |
| --- | --- |
{rules}

```{{toctree}}
:hidden:

{healthy}
{faults}
```
""",
        encoding="utf-8",
    )


def main() -> None:
    """Write the gallery."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gallery", description=__doc__)
    parser.add_argument("names", nargs="*", help="write the pages of these rules and families only")
    parser.add_argument("--to", type=Path, default=GALLERY, help="the directory, by default that of the documentation")
    options = parser.parse_args()
    torch.set_num_threads(1)
    write(options.names or [*FAMILIES, *sorted(examples())], options.to)


if __name__ == "__main__":
    main()
