"""A run directory of a stranger is only data: reading it neither fails, hangs, takes much memory nor touches a file."""

from __future__ import annotations

import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from . import forked
from .hostile_runs import Mutator, made, read_all, records_in, show_all
from .stored_runs import ROWS, VALUES


@pytest.fixture(scope="module")
def mutator(tmp_path_factory: pytest.TempPathFactory) -> Mutator:
    path = tmp_path_factory.mktemp("made")
    files = made(path)
    return Mutator(files, {name: records_in(path / name) for name in files})


@contextmanager
def _within(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"not done in {seconds} s")

    before = [(number, signal.signal(number, late)) for number in (signal.SIGALRM, signal.SIGPROF)]
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of this process, however busy the machine is
    signal.alarm(20 * seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in before:
            signal.signal(number, handler)


def _read_mutations(mutator: Mutator, seeds: range, tmp_path: Path, shown: bool) -> None:
    refused = 0
    for seed in seeds:
        path = tmp_path / "run"
        files = mutator.write(seed, path)
        report = tmp_path / "report.html" if seed % 20 == 0 else None
        with _within(10), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                told = read_all(path)
                if shown and not told:
                    show_all(path, report)
            except Exception as error:
                raise AssertionError(f"mutation {seed}") from error
        refused += bool(told)
        assert {file.name: file.read_bytes() for file in path.iterdir()} == files, f"mutation {seed}"
        shutil.rmtree(path)
    assert refused < len(seeds) / 10, "too few were read"


@pytest.mark.parametrize(
    ("seeds", "shown"),
    [
        (range(60), False),
        pytest.param(range(60, 250), False, marks=pytest.mark.thorough),
        pytest.param(range(250, 300), True, marks=pytest.mark.extra),
    ],
)
def test_mutated_runs_are_read_without_harm(mutator: Mutator, tmp_path: Path, seeds: range, shown: bool) -> None:
    _read_mutations(mutator, seeds, tmp_path, shown)


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.timeout(3600)
def test_three_thousand_mutated_runs_are_read_without_harm(mutator: Mutator, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _read_mutations(mutator, range(300, 3300), tmp_path, shown=True)
    if sys.platform == "linux":
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


_LARGE = """
import resource, sys
from torch_gradmon.analysis.run import load_run
from torch_gradmon.runs.format import JSON, of_json
from torch_gradmon.runs.log import framed

path, kind = sys.argv[1] + "/" + sys.argv[3], sys.argv[2]
head = of_json({"is": "head", "format": 1, "writer": "", "claims": True, "facts": {}})
large = {
    "lists": lambda: JSON + b'{"facts":{"x":[' + b"[]," * 5_000_000 + b"[]]}}",
    "depth": lambda: JSON + b"[" * 20_000_000,
    "keys": lambda: of_json({"is": "keys", "first": 0, "keys": [["", "", str(number)] for number in range(1_100_000)]}),
    "name": lambda: of_json({"is": "keys", "first": 0, "keys": [["", "x" * 40_000_000, ""]]}),
    "digits": lambda: of_json({"facts": {"every": 1}}).replace(b"1", b"1" * 20_000_000),
}[kind]()
data = framed(head, 0)
data += framed(large, len(data))
with open(path, "wb") as file:
    file.write(data)
size = len(data)
del data, large
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run = load_run(sys.argv[1])
print(run.damage, run.keys()[:3], run.meta)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, size)
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="the largest memory is counted in other units elsewhere")
@pytest.mark.parametrize("kind", ["lists", "depth", "keys", "name", "digits"])
def test_memory_stays_in_proportion_to_the_bytes(kind: str, tmp_path: Path) -> None:
    with forked.start(_LARGE, tmp_path, kind, VALUES) as child:
        told, error = child.stdout.read().splitlines(), child.wait()
    assert error == 0, told
    assert "cannot be read" in told[0]
    grown, size = map(int, told[1].split())
    assert grown * 1000 < 4 * size + 200_000_000


def test_links_in_a_run_directory_are_not_followed(mutator: Mutator, tmp_path: Path) -> None:
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "run"
    mutator.write(0, elsewhere)
    path.mkdir()
    (path / VALUES).symlink_to(elsewhere / VALUES)
    assert "is a link" in read_all(path)
    (path / VALUES).unlink()
    shutil.copy(elsewhere / VALUES, path)
    (path / ROWS).symlink_to(elsewhere / ROWS)
    assert read_all(path) == ""
