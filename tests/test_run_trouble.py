"""What may happen to a run directory: the process is killed, the disk fills up, the path goes away, somebody reads meanwhile."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import shutil
import signal
import subprocess
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from torch_gradmon import GradmonWarning, ModuleMonitor
from torch_gradmon.analysis.many_runs import RunCard
from torch_gradmon.analysis.run import diagnose, read_run
from torch_gradmon.core import torch_modes
from torch_gradmon.core.keys import Key
from torch_gradmon.core.moments import Column
from torch_gradmon.core.records import StepRecord
from torch_gradmon.runs.liveness import run_status
from torch_gradmon.runs.log import LogWriter
from torch_gradmon.runs.writer import RunWriter

from . import forked
from .families import BY_NAME

VALUES, ROWS = "gradmon.000001.values", "gradmon.000001.rows"

_CHILD = """
    import sys, torch
    from torch import nn
    import torch_gradmon as gradmon
    torch.manual_seed(int(sys.argv[2]))
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gradmon.watch(model, optimizer, run_dir=sys.argv[1])
    for step in range(1_000_000):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm().item()
        optimizer.step()
        print(step, repr(norm), flush=True)
"""


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_after_kill_9_every_step_that_returned_reads_back(seed: int, tmp_path: Path) -> None:
    with forked.start(textwrap.dedent(_CHILD), tmp_path, seed) as child:
        generator = random.Random(seed)
        lines = [child.stdout.readline() for _ in range(generator.randint(1, 60))]
        time.sleep(generator.uniform(0, 0.01))
        child.kill()
        lines += child.stdout.read().splitlines(keepends=True)
    assert child.returncode == -signal.SIGKILL
    printed = {int(step): float(norm) for step, norm in (line.split() for line in lines if line.endswith("\n"))}
    run = read_run(tmp_path)
    stored = run.series("gradmon/grad_norm")
    assert len(printed) <= len(stored) <= len(printed) + 1  # the last one may have been killed before it was printed
    for step, norm in printed.items():
        assert stored[step] == pytest.approx(norm, rel=1e-6)
        rows = run.table("gradient_before_clip", step).rows
        assert rows[:, Column.SQUARE_SUM].sum().sqrt().item() == pytest.approx(norm, rel=1e-6)


def _parameters(model: nn.Module) -> list[Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def _run_with_trouble(
    path: Path, steps: int = 20, happens: Callable[[int], object] = lambda step: None
) -> tuple[nn.Module, ModuleMonitor]:
    """A training, and what happens before each update."""
    model = BY_NAME["mlp"].model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = gradmon.watch(
        model, optimizer, run_dir=path, on_spike=None, checks=gradmon.Checks(data=False)
    )  # one write a record
    for step, batch in enumerate(BY_NAME["mlp"].batches(steps)):
        optimizer.zero_grad()
        BY_NAME["mlp"].loss(model, batch).backward()
        monitor.log_context(note="x" * 100_000)
        happens(step)
        optimizer.step()
    return model, monitor


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("call", ["write", "short write", "write, not cut off", "fdatasync"])
def test_a_failing_file_system_warns_once_and_recovers(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = _train_plain(20)

    def fails(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    def short(file: int, data: bytes, write: Callable[[int, bytes], int] = os.write) -> int:
        if len(data) < 1000:
            fails()
        return write(file, data[: len(data) // 3])

    def happens(step: int) -> None:
        if step == 5:
            monkeypatch.setattr("torch_gradmon.runs.writer._SYNCS", 0.0)
            failing = "fdatasync" if call == "fdatasync" else "write"
            monkeypatch.setattr(f"torch_gradmon.runs.log.os.{failing}", fails if call in ("write", "fdatasync") else short)
            if "not cut off" in call:
                monkeypatch.setattr("torch_gradmon.runs.log.os.ftruncate", fails)
        if step == 9:
            monkeypatch.undo()

    with pytest.warns(GradmonWarning, match=r"could not be written to the run directory.*training continues") as caught:
        model, monitor = _run_with_trouble(tmp_path, happens=happens)
    assert len(caught) == 1
    for ours, other in zip(_parameters(model), _parameters(plain), strict=True):
        assert torch.equal(ours, other)
    lost = monitor.warning_counts()["store"]
    monitor.detach()
    run = read_run(tmp_path)
    assert run.damage == [] or "not cut off" in call
    if call != "fdatasync":  # where the operating system has it all the same
        assert lost == 4
        assert run.steps == [*range(5), *range(9, 20)]


@contextlib.contextmanager
def _small_disk(place: Path) -> Iterator[Callable[[], object]]:
    """A file system of 4 MB that is nearly full; gives what makes room."""
    place.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if mount is None or umount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=4m", "none", place]).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        (place / "others").write_bytes(bytes(3_600_000))
        yield (place / "others").unlink
    finally:
        subprocess.run([umount, "--lazy", place], check=True)


@contextlib.contextmanager
def _small_files(place: Path) -> Iterator[Callable[[], object]]:
    """No file may be larger than 550 kB; gives what lifts the limit."""
    resource = pytest.importorskip("resource")
    place.mkdir()
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (550_000, usual[1]))
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


@pytest.mark.parametrize("limited", [_small_disk, _small_files])
def test_what_a_full_disk_cost_is_told_and_the_run_goes_on(limited: Callable[..., Any], tmp_path: Path) -> None:
    plain, _ = _train_plain(20)
    with limited(tmp_path / "disk") as make_room:
        with pytest.warns(GradmonWarning, match=r"could not be written to the run directory.*training continues") as caught:
            model, monitor = _run_with_trouble(
                tmp_path / "disk" / "run", happens=lambda step: make_room() if step == 10 else None
            )
        lost = monitor.warning_counts()["store"]
        monitor.detach()
        assert len(caught) == 1
        assert 2 < lost < 8
        with contextlib.closing(read_run(tmp_path / "disk" / "run")) as run:
            assert run.steps == [*range(10 - lost), *range(10, 20)]
            assert run.damage == []
            assert len(run.series("gradient_before_clip/0.weight/norm")) == 20 - lost
    for ours, other in zip(_parameters(model), _parameters(plain), strict=True):
        assert torch.equal(ours, other)


def _train_plain(steps: int) -> tuple[nn.Module, None]:
    model = BY_NAME["mlp"].model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in BY_NAME["mlp"].batches(steps):
        optimizer.zero_grad()
        BY_NAME["mlp"].loss(model, batch).backward()
        optimizer.step()
    return model, None


def test_a_run_can_be_read_while_it_goes_on(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    monitor = ModuleMonitor(model, run_dir=tmp_path)
    readers = []
    for step in range(30):
        monitor.begin_step(step)
        monitor.log_scalar("x", step)
        monitor.end_step()
        readers.append(read_run(tmp_path))
        assert readers[-1].series("x") == {s: s for s in range(step + 1)}
    assert readers[3].series("x") == {s: s for s in range(4)}
    assert not monitor.warning_counts()


@contextlib.contextmanager
def _read_only(directory: Path, place: Path) -> Iterator[Path]:
    """The same directory once more, as on a medium that nobody can write to, the administrator neither."""
    place.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if mount is None or umount is None or subprocess.run([mount, "--bind", directory, place], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        if subprocess.run([mount, "-o", "remount,ro,bind", place], capture_output=True).returncode:
            pytest.skip("nothing can be mounted read-only here")
        yield place
    finally:
        subprocess.run([umount, "--lazy", place], check=True)


def test_a_run_can_be_read_where_nothing_can_be_written(tmp_path: Path) -> None:
    _, monitor = _run_with_trouble(tmp_path / "run", steps=4)
    monitor.detach()
    with _read_only(tmp_path / "run", tmp_path / "medium") as medium:
        with pytest.raises(OSError, match="Read-only"):
            (medium / "x").touch()
        run = read_run(medium)
        assert run.steps == [0, 1, 2, 3]
        assert list(run.series("gradmon/grad_norm")) == [0, 1, 2, 3]
        assert run_status(medium).step == 3


_STRANGER = """
    import os, sys, torch_gradmon
    from torch_gradmon.runs.liveness import run_status
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    try:
        print(len(torch_gradmon.load_run(sys.argv[1]).series("gradmon/grad_norm")), run_status(sys.argv[1]).step)
    except ValueError as error:
        print(error)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that other users can enter, which those of pytest are not."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    for each in (path, *path.iterdir()):
        each.chmod(0o755)
    shutil.rmtree(path)


def _kept_from(directory: Path) -> str:
    """What a user sees there who may not write."""
    for each in directory.iterdir():
        each.chmod(0o444)
    directory.chmod(0o555)
    return forked.run(textwrap.dedent(_STRANGER), directory, cwd="/").stdout.strip()


def test_a_run_of_another_user_can_be_read(place: Path) -> None:
    _, monitor = _run_with_trouble(place / "run", steps=4)
    assert _kept_from(place / "run") == "4 3"  # while it goes on
    monitor.detach()
    assert _kept_from(place / "run") == "4 3"
    (place / "run" / VALUES).chmod(0)
    assert forked.run(textwrap.dedent(_STRANGER), place / "run", cwd="/").stdout.strip().endswith("this user has no permission")


@pytest.mark.parametrize(
    ("name", "error", "why"),
    [
        ("file/run", NotADirectoryError, "Not a directory"),
        ("/proc/run", OSError, "/proc/run"),
    ],
)
def test_a_run_directory_that_cannot_be_written_is_refused_by_name(
    name: str, error: type[Exception], why: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / name
    model = nn.Linear(2, 2)
    with pytest.raises(error, match="cannot be written") as raised:
        gradmon.watch(model, torch.optim.SGD(model.parameters()), run_dir=path)
    assert str(raised.value).startswith(f"run_dir={str(path)!r} cannot be written: ")
    assert why in str(raised.value)
    assert not model._forward_pre_hooks


def test_a_run_whose_process_is_gone_does_not_look_alive(tmp_path: Path) -> None:
    with forked.start(textwrap.dedent(_CHILD), tmp_path, 1) as child:
        while child.stdout.readline().split()[0] != "5":
            pass
        alive = run_status(tmp_path)
        child.kill()
    assert (alive.looks_alive, alive.is_gone) == (True, False)
    dead = run_status(tmp_path)
    assert (dead.looks_alive, dead.is_gone, dead.has_ended) == (False, True, False)
    assert str(dead).endswith("its process is gone, so it was killed or crashed")
    assert dead.age < 60
    assert RunCard(tmp_path).state == "silent"


def _refused(number: int, signal: int) -> None:
    raise PermissionError


def test_a_link_among_the_files_of_a_run_is_not_followed(tmp_path: Path) -> None:
    _, monitor = _run_with_trouble(tmp_path / "run", steps=4)
    monitor.detach()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / VALUES).symlink_to(tmp_path / "run" / VALUES)
    with pytest.raises(ValueError, match="is a link, which is not followed"):
        read_run(tmp_path / "link")


def test_only_a_process_of_this_machine_can_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch_modes.process_facts()
    assert not torch_modes.is_gone(own)
    assert torch_modes.is_gone({**own, "id": 2**22 + 1})  # more than Linux gives
    assert torch_modes.is_gone({**own, "began": "1"})  # its number belongs to another process by now
    assert not torch_modes.is_gone({**own, "id": 2**22 + 1, "where": "another"})
    assert not torch_modes.is_gone({})
    for odd in (0, -1, "x", 2**80, None):
        assert not torch_modes.is_gone({**own, "id": odd})
    with monkeypatch.context() as patch:  # the system hides processes of other users
        patch.setattr(os, "kill", _refused)
        assert not torch_modes.is_gone({**own, "began": "1"})
    monkeypatch.setattr("os.name", "nt")
    assert not torch_modes.is_gone({**own, "id": 2**22 + 1})


def test_a_reader_leaves_no_files_behind(tmp_path: Path) -> None:
    _, monitor = _run_with_trouble(tmp_path, steps=4)
    before = {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in tmp_path.iterdir()}
    assert before.keys() == {VALUES, ROWS}
    run = read_run(tmp_path)
    assert run.steps == [0, 1, 2, 3]
    assert run.table("gradient", 3) is not None
    assert run_status(tmp_path).step == 3
    diagnose(tmp_path)
    assert {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in tmp_path.iterdir()} == before
    monitor.detach()


def _trained(directory: Path, at: int, happens: Callable[[], object], monitored: Callable[[ModuleMonitor], object] = id) -> None:
    """40 steps, and what happens before one of them."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    monitor = gradmon.watch(model, optimizer, run_dir=directory, on_spike=None)
    monitored(monitor)
    for step in range(40):
        if step == at:
            happens()
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    monitor.detach()


@pytest.mark.parametrize("how", ["directory", "file", "moved"])
def test_a_deleted_run_directory_is_told_of_and_made_anew(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_gradmon.runs.writer._LOOKS", 0.0)
    path = tmp_path / "run"
    happens = {
        "directory": lambda: shutil.rmtree(path),
        "file": (path / VALUES).unlink,
        "moved": lambda: path.rename(tmp_path / "other"),
    }[how]
    words = "was deleted or moved while this run was recorded there, and its steps up to 19 went with it; .* from 20 on"
    with pytest.warns(GradmonWarning, match=words) as caught:
        _trained(path, 20, happens)
    assert len(caught) == 1
    assert read_run(path).steps == list(range(20, 40))


def _without_place(path: Path, how: str) -> None:
    shutil.rmtree(path.parent if how == "parent" else path)
    if how == "file":
        path.touch()


@pytest.mark.parametrize("how", ["parent", "file"])
def test_a_run_directory_without_a_place_has_a_remedy(how: str, tmp_path: Path) -> None:
    path, seen = tmp_path / "runs" / "first", []
    remedy = f"make the directory {path.parent} again" if how == "parent" else f"remove the file {path}, which took its place"
    words = f"its steps up to 19 went with it; the steps from 20 on are lost too, until you {remedy}$"
    with pytest.warns(GradmonWarning, match=words) as caught:
        _trained(path, 20, lambda: _without_place(path, how), seen.append)
    assert len(caught) == 1
    assert seen[0].warning_counts() == {"gone": 20}
    assert path.is_file() if how == "file" else not path.parent.exists()


@pytest.mark.parametrize("how", ["parent", "file"])
def test_a_run_directory_goes_on_when_it_has_a_place_again(how: str, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "first"

    def monitored(monitor: ModuleMonitor) -> None:
        def placed(row: dict[str, float], step: int) -> None:
            if step == 29:
                path.unlink() if how == "file" else path.parent.mkdir()

        monitor.add_sink(SimpleNamespace(log=placed))

    with pytest.warns(GradmonWarning, match="the steps from 20 on are lost too") as caught:
        _trained(path, 20, lambda: _without_place(path, how), monitored)
    assert len(caught) == 1
    steps = read_run(path).steps
    assert steps == list(range(steps[0], 40))
    assert 29 <= steps[0] <= 31


def test_a_run_directory_that_is_deleted_at_the_end_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "run"
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    monitor = gradmon.watch(model, optimizer, run_dir=path)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    shutil.rmtree(path)
    with pytest.warns(GradmonWarning, match="its steps up to 0 went with it"):
        monitor.detach()
    assert not path.exists()


def test_a_replaced_run_directory_is_left_to_the_other_run(tmp_path: Path) -> None:
    path = tmp_path / "run"

    def replaced() -> None:
        shutil.rmtree(path)
        RunWriter(path).close()

    with pytest.warns(GradmonWarning, match="it was replaced, and the steps up to 19 are lost") as caught:
        _trained(path, 20, replaced)
    assert len(caught) == 1
    assert read_run(path).steps == []


def test_a_run_directory_whose_files_are_numbered_anew_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _trained(tmp_path, 20, lambda: monkeypatch.setattr(os.path, "samestat", lambda *_: False))
    assert read_run(tmp_path).steps == list(range(40))


def test_a_dropped_sink_promises_no_rows_that_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch_gradmon.sinks.jsonl.JsonlSink.log", full)
    for is_lost in (False, True):
        path, sink = tmp_path / str(is_lost), gradmon.sinks.JsonlSink(tmp_path / "rows")
        happens = (lambda: monkeypatch.setattr(RunWriter, "log", full)) if is_lost else (lambda: None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _trained(path, 0, happens, lambda monitor, sink=sink: monitor.add_sink(sink))
        (said,) = [str(warning.message) for warning in caught if "the sink JsonlSink failed 3 times" in str(warning.message)]
        assert ("all rows are in the run directory" in said) is not is_lost


def test_a_run_that_is_nan_for_good_hardly_grows_faster(tmp_path: Path) -> None:
    sizes = {}
    for factor in (1.0, math.nan):
        path = tmp_path / str(factor)
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        monitor = gradmon.watch(model, optimizer, run_dir=path, on_spike=None)
        for step in range(200):
            optimizer.zero_grad()
            (model(torch.randn(4, 16)).square().mean() * (factor if step >= 50 else 1.0)).backward()
            optimizer.step()
        monitor.detach()
        sizes[str(factor)] = sum(file.stat().st_size for file in path.iterdir())
        run = read_run(path)
    assert sizes["nan"] < 2 * sizes["1.0"]  # its events are twice as long as its values
    assert "cpu" in run.rng_state(50)
    with pytest.raises(KeyError, match="of NaN or Inf the first 8 in a row"):
        run.rng_state(150)


def test_after_its_files_are_dead_a_run_goes_on_in_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RunWriter(tmp_path)
    writer.claim({})
    record = StepRecord(0, 1.5e9, True, {Key("", "x", ""): 1.0}, {})
    writer.log(record)
    dead = writer._values

    def away(self: LogWriter, data: bytes) -> tuple[int, int]:
        if self is dead:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        return append(self, data)

    append = LogWriter.append
    monkeypatch.setattr(LogWriter, "append", away)
    with pytest.raises(OSError, match="not connected"):
        writer.log(record._replace(step=1))
    for step in range(2, 5):
        writer.log(record._replace(step=step))
    writer.close()
    assert read_run(tmp_path).steps == [0, 2, 3, 4]
