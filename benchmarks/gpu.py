"""What the monitor costs on an NVIDIA GPU: statistics as a share of the memory's bandwidth, and whole training steps.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --dry-run   # tiny shapes on the simulated device; measures nothing and writes nothing

Writes ``benchmarks/results/gpu.json`` and the table of the documentation. Both parts bound their rounds by the time of a first one: 60
seconds for the training and 40 for each of the four sets, with at least five rounds. A contender that takes more than five seconds is left
out, and no set begins after seven minutes, so that the whole ends before nine. By these bounds the estimate for an H100 is five minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import torch

from torch_gradmon import testing

from .gpu_statistics import SETS, TINY, TINY_SETS, measure_all
from .gpu_training import train
from .machine import machine, versions
from .report import ABSENT, RESULTS, ROOT, figure, with_spread, write_section

OUT = RESULTS / "gpu.json"
#: Seconds after which no further set is begun.
LIMIT = 420.0
NOT_RUN = (
    "_Not run: nothing was measured on a GPU yet. On a machine with an NVIDIA GPU, `make bench-gpu` writes the table here: statistics as a "
    "share of the bandwidth of a copy, and whole training steps._"
)
DRY_RUN = "Dry run on the simulated device: nothing was measured on a GPU, and no number below is a speed."


def driver() -> str | None:
    """The version of NVIDIA's driver; None if its tool is not there."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def result_on(device: torch.device, *, is_dry: bool) -> dict[str, Any]:
    """The whole result."""
    start = time.monotonic()
    few = {"seconds": 0.0, "least": 1}
    training = train(device, TINY, block=2, **few) if is_dry else train(device)  # type: ignore[arg-type]
    statistics = measure_all(TINY_SETS, device, start + LIMIT, **few) if is_dry else measure_all(SETS, device, start + LIMIT)
    return {
        "machine": {**machine(), "driver": driver()},
        "versions": versions(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": device.type,
        "seconds": time.monotonic() - start,
        "training": training,
        "statistics": statistics,
    }


def _table(sections: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A row for each contender, a column for each set."""
    yield f"| share of the copy's bandwidth in % | {' | '.join(section['title'] for section in sections)} |"
    yield f"| --- |{' ---: |' * len(sections)}"
    rates = (with_spread(section["copy_gb_per_s"]) if "copy_gb_per_s" in section else ABSENT for section in sections)
    yield f"| the copy itself, GB/s, reads and writes together | {' | '.join(rates)} |"
    found = [section.get("contenders", {}) for section in sections]
    labels = {name: contender["label"] for contenders in found for name, contender in contenders.items()}
    for name, label in labels.items():
        cells = (with_spread(each[name]["share_pct"]) if name in each else ABSENT for each in found)
        yield f"| {label} | {' | '.join(cells)} |"


def _step_lines(training: Mapping[str, Any]) -> Iterator[str]:
    size = f"{training['title']}, {training['parameters']:,} parameters, {training['tokens']:,} tokens, AdamW, clipping"
    yield f"- **Whole steps** ({size}): {with_spread(training['step_ms']['without'])} ms without a monitor."
    bare = training["waits"]["without"]
    for preset, added in training["added_pct"].items():
        waits = training["waits"][preset]
        operations, events = (figure(waits[kind] - bare[kind]) for kind in ("operations", "events"))
        yield (
            f"- Preset `{preset}`: {with_spread(added)} % longer. In a step the host waits for {operations} more operations and for "
            f"{events} more events than without it."
        )


def markdown(result: Mapping[str, Any] | None) -> str:
    """The section of the documentation; ``None`` before there are results."""
    if result is None:
        return NOT_RUN
    where, sections = result["machine"], list(result["statistics"].values())
    packages = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version is not None)
    left_out: dict[tuple[str, str], list[str]] = {}
    for section in sections:
        for name_and_reason in section["left_out"].items():
            left_out.setdefault(name_and_reason, []).append(section["title"])
    lines = [f"{name} ({'; '.join(titles)}): {why}" for (name, why), titles in left_out.items()]
    parts = [
        f"{where['gpu']}, driver {where['driver']}, torch {where['torch']}, Python {where['python']}; {packages}; {result['date']}. "
        "Medians, quartiles in brackets. 100 % is one read of each gradient at the rate at which the copy reads and writes "
        "together. ModuleMonitor, torch-module-monitor and wandb.watch bring values to the host, and wait for them.",
        "\n".join(_table(sections)),
        "\n".join(_step_lines(result["training"])),
        f"Left out: {'; '.join(lines)}." if lines else "",
    ]
    return "\n\n".join(part for part in parts if part)


def load() -> dict[str, Any] | None:
    """The stored result; None before there is one."""
    return json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else None


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the simulated device; writes nothing")
    if parser.parse_args(words).dry_run:
        print(DRY_RUN, markdown(result_on(testing.simulated_device().torch_device, is_dry=True)), DRY_RUN, sep="\n\n")
        return
    if not torch.cuda.is_available():
        raise SystemExit("There is no GPU, so nothing is measured. --dry-run runs the same program on the simulated device.")
    result = result_on(torch.device("cuda"), is_dry=False)
    OUT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    page = write_section("gpu", markdown(result))
    print(markdown(result), f"wrote {OUT.relative_to(ROOT)} and the table in {page.relative_to(ROOT)}", sep="\n\n")


if __name__ == "__main__":
    main()
