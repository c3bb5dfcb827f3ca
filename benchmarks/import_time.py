"""Time of ``import torch_gradmon`` beyond ``import torch``.

    python benchmarks/import_time.py [repeats]

Pairs of fresh interpreters, one after the other and in alternating order, so a change in the speed of the machine affects both.
The result is the median of the differences within the pairs. A second number, without torch's noise, is
the time that ``import torch_gradmon`` takes in an interpreter that has torch already.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
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


def measure(package: bool) -> tuple[float, float]:
    """Milliseconds for torch alone, and for all, in a fresh interpreter."""
    code = _MEASURE.format(more="import torch_gradmon" if package else "")
    words = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return 1e3 * float(words[0]), 1e3 * float(words[1])


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median_ms": round(middle, 2), "quartile_1_ms": round(low, 2), "quartile_3_ms": round(high, 2)}


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    """Measure, print, and write the result."""
    import torch

    import torch_gradmon

    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    measure(True)  # compiles the package and warms the disk's cache
    alone, both, own = [], [], []
    for repeat in range(repeats):
        order = (False, True) if repeat % 2 else (True, False)
        pair = {package: measure(package) for package in order}
        alone.append(pair[False][1])
        both.append(pair[True][1])
        own.append(pair[True][1] - pair[True][0])
    result = {
        "own_part": spread(own),
        "difference_of_pairs": spread([b - a for a, b in zip(alone, both, strict=True)]),
        "torch_alone": spread(alone),
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
