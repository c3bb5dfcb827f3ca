"""``gradmon doctor``: what this installation uses, and why."""

from __future__ import annotations

import argparse
import json
import os
import platform
import webbrowser
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from ... import __version__
from ...core import torch_modes
from ...core.errors import WarningLog
from ...core.fence import is_disabled
from ...core.moments import ALL_COLUMNS, Column
from ...statistics import cpp, kernel_build
from ...statistics.dispatch import Statistics

#: Distributions by purpose, with the extra that installs them; None where each is installed by its own name.
_PACKAGES: Sequence[tuple[str, str | None, Sequence[str]]] = (
    ("trackers", None, ("wandb", "tensorboard", "trackio", "mlflow-skinny", "comet_ml", "swanlab")),
    ("trainers", None, ("lightning", "transformers", "accelerate", "pytorch-ignite")),
    ("reports", "report", ("plotly", "jinja2")),
    ("plots", "plot", ("matplotlib",)),
    ("tables", "export", ("pyarrow", "pandas")),
    ("terminal", "cli", ("rich", "tqdm")),
)
_NUMBERS = 1_000_000
#: Largest relative difference to float64 that passes, as the oracle of the tests has it.
_TOLERANCE = 1e-6


def run(options: argparse.Namespace) -> int:
    error = _error()
    lines = [*_facts(), ("check", f"statistics of {_NUMBERS:,} numbers differ by {error:.1g} from those in float64")]
    if options.json:
        print(json.dumps({**dict(lines), "difference": error, "disabled": is_disabled()}, indent=2))
    else:
        width = max(len(name) for name, _ in lines)
        print("\n".join(f"{name:<{width}}  {value}" for name, value in lines))
    return int(error > _TOLERANCE or is_disabled())


def _facts() -> Iterator[tuple[str, str]]:
    state = ", off: GRADMON_DISABLE is set, so monitors do nothing" if is_disabled() else ""
    yield "torch_gradmon", f"{__version__}{state}"
    yield "Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    yield "torch", f"{torch.__version__}, {torch.get_num_threads()} of {os.cpu_count()} cores"
    yield "CPU", _on_cpu()
    yield from _accelerators()
    for purpose, extra, packages in _PACKAGES:
        yield purpose, _installed(packages, extra)
    yield "browser", _browser()


def _on_cpu() -> str:
    kernel, why = cpp.found()
    if kernel is not None:
        return f"the C++ kernel that came with the package, built for {why}"
    try:
        compiler = f"GRADMON_KERNEL=build compiles it with {kernel_build.compiler()[0]}"
    except RuntimeError as error:
        compiler = str(error)
    return f"torch's operations: {why}; {compiler}"


def _accelerators() -> Iterator[tuple[str, str]]:
    triton = None if find_spec("triton") is None else version("triton")
    devices = list(torch_modes.described())
    for name, product, runs_triton in devices:
        kernel = "torch's operations"
        if runs_triton:
            kernel = f"{kernel}: Triton is not installed" if triton is None else f"the kernel for Triton {triton}"
        yield name, f"{product}: {kernel}"
    if not devices:
        yield "accelerator", "none that torch can use"


def _installed(packages: Sequence[str], extra: str | None) -> str:
    there, absent = [], []
    for package in packages:
        try:
            there.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            absent.append(package)
    how = f': pip install "torch_gradmon[{extra}]"' if extra is not None else ""
    return "; ".join([", ".join(there)] * bool(there) + [f"not installed: {', '.join(absent)}{how}"] * bool(absent))


def _browser() -> str:
    try:
        found = webbrowser.get()
    except webbrowser.Error:
        return "none, so a report is opened by hand"
    return str(getattr(found, "name", type(found).__name__))


def _error() -> float:
    """The largest relative difference of a sum to that in float64."""
    numbers = torch.randn(_NUMBERS, generator=torch.Generator().manual_seed(0))
    row, exact = Statistics(WarningLog()).measure([numbers], ALL_COLUMNS)[0], numbers.double()
    expected = {
        Column.COUNT: float(_NUMBERS),
        Column.ABS_SUM: float(exact.abs().sum()),
        Column.SQUARE_SUM: float(exact.square().sum()),
        Column.MIN: float(exact.min()),
        Column.MAX: float(exact.max()),
    }
    return max(abs(float(row[column]) - value) / abs(value) for column, value in expected.items())
