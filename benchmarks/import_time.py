"""Time of ``import torch_gradmon``, and of ``from torch_gradmon import watch``, beyond ``import torch``.

    python benchmarks/import_time.py [repeats]

Fresh interpreters, one after the other and in alternating order, so a change in the speed of the machine affects all.
The own part is what each import takes in an interpreter that has torch already; the share is that over torch's own time in the same
interpreter. The package loads what is used: the first import next to nothing, the second all that a monitor needs before its first step.
All modules, torch's too, come from bytecode in a folder of their own: an installed package has it, a checkout may be run without.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "import_time.json"
AIM_MS = 50.0

_MEASURE = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
{more}
print(middle - start, time.perf_counter() - start)
"""


IMPORTS = {"package": "import torch_gradmon", "watch": "from torch_gradmon import watch"}


def measure(what: str, bytecode: str) -> tuple[float, float]:
    """Milliseconds that torch takes, and that the import of this name takes after it, in a fresh interpreter."""
    code = _MEASURE.format(more=IMPORTS[what])
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", code]
    words = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    return 1e3 * float(words[0]), 1e3 * (float(words[1]) - float(words[0]))


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median_ms": round(middle, 2), "quartile_1_ms": round(low, 2), "quartile_3_ms": round(high, 2)}


def processor() -> str:
    """The processor's name, and on Linux the numbers of its generation, which the name of a virtual one may lack."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    facts = {name.strip(): fact.strip() for name, _, fact in (line.partition(":") for line in lines)}
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    return f"{facts['model name']}, family {facts.get('cpu family')}, model {facts.get('model')}"


def main() -> None:
    """Measure, print, and write the result."""
    import torch

    import torch_gradmon

    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    seen: dict[str, list[tuple[float, float]]] = {what: [] for what in IMPORTS}
    with tempfile.TemporaryDirectory() as bytecode:
        for what in IMPORTS:
            measure(what, bytecode)  # compiles all, and warms the disk's cache
        for repeat in range(repeats):
            for what in sorted(IMPORTS, reverse=bool(repeat % 2)):
                seen[what].append(measure(what, bytecode))
    result = {
        "own_part": {what: spread([own for _, own in times]) for what, times in seen.items()},
        "percent_of_torch": {
            what: round(100 * statistics.median(own / torch_alone for torch_alone, own in times), 2)
            for what, times in seen.items()
        },
        "torch_alone": spread([torch_alone for times in seen.values() for torch_alone, _ in times]),
        "aim_ms": AIM_MS,
        "repeats": repeats,
        "processor": processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_gradmon": torch_gradmon.__version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
