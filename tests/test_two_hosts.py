"""A run is trained on one host and read on another, through a file system that both mount: two sshfs mounts with caches of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from torch_gradmon.analysis.run import read_run
from torch_gradmon.cli.main import main
from torch_gradmon.runs.reader import RunReader

pytestmark = [pytest.mark.thorough, pytest.mark.extra, pytest.mark.timeout(240)]
for package in ("plotly", "jinja2"):
    pytest.importorskip(package)
from .test_server import get, serving  # noqa: E402

ROOT = Path(__file__).parent.parent
STEPS = 330
_SERVERS = ("/usr/lib/openssh", "/usr/lib/ssh", "/usr/libexec/openssh", "/usr/libexec")
#: As caches of NFS do, that of a host knows sizes of files that are some seconds old.
_OPTIONS = ("-o", "dcache_timeout=2", "-o", "entry_timeout=2", "-o", "attr_timeout=2", "-o", "max_conns=1")


class Hosts(NamedTuple):
    """Where two hosts see a directory, and where its files are."""

    training: Path
    reading: Path
    files: Path


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """sshfs, with the server of sftp instead of ssh, which then needs no login."""
    server = next((found for place in _SERVERS if os.access(found := f"{place}/sftp-server", os.X_OK)), None)
    unmount = shutil.which("fusermount3") or shutil.which("fusermount")
    if shutil.which("sshfs") is None or server is None or unmount is None or not os.path.exists("/dev/fuse"):
        pytest.skip("needs sshfs, the server of sftp and FUSE")
    places = Hosts(*(tmp_path / name for name in ("training", "reading", "files")))
    program = tmp_path / "ssh"
    program.write_text(f"#!/bin/sh\nexec {server}\n", encoding="utf-8")
    program.chmod(0o755)
    for place in places:
        place.mkdir()
    mounted = []
    try:
        for place in places[:2]:
            command = ["sshfs", f"nowhere:{places.files}", str(place), "-o", f"ssh_command={program}", *_OPTIONS]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            if done.returncode:
                pytest.skip(f"sshfs cannot mount here: {done.stderr.strip()}")
            mounted.append(place)
        yield places
    finally:
        for place in mounted:
            subprocess.run([unmount, "-u", "-z", str(place)], timeout=60, check=False)


def _look(directory: Path) -> dict[str, tuple[int, int]]:
    return {each.name: ((found := each.stat()).st_size, found.st_mtime_ns) for each in directory.iterdir()}


class Reads:
    """Steps that readers got, each time a prefix, and no shorter one than before."""

    def __init__(self) -> None:
        self.most: dict[str, int] = {}
        self.count = 0

    def add(self, reader: str, steps: list[int]) -> None:
        self.count += 1
        assert steps == list(range(len(steps))), reader
        assert len(steps) >= self.most.get(reader, 0), reader
        self.most[reader] = len(steps)


@pytest.mark.parametrize("is_killed", [False, True], ids=["ends", "is killed"])
def test_a_run_is_read_on_another_host_while_it_trains(hosts: Hosts, is_killed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.live_training import train\n"
        f"train(Path(sys.argv[1]), {10 * STEPS if is_killed else STEPS}, seconds=0.04)"
    )
    training = subprocess.Popen([sys.executable, "-c", program, str(hosts.training / "run")], cwd=ROOT)
    reads = Reads()
    seen = hosts.reading / "run"
    try:
        with serving(hosts.reading) as server:
            run: RunReader | None = None
            while training.poll() is None:
                time.sleep(0.02)
                if run is None:
                    try:
                        run = read_run(seen)
                    except FileNotFoundError:
                        continue
                run.refresh()
                reads.add("follower", run.steps)
                fresh = read_run(seen)
                reads.add("fresh", fresh.steps)
                assert run.damage == fresh.damage == []
                if fresh.steps:
                    assert len(fresh.series("loss")) == len(fresh.steps)
                    assert len(fresh.series("gradient_before_clip/4.weight/norm")) == len(fresh.steps)
                    status, text, _ = get(server, "/runs.json")
                    if not (cards := json.loads(text)):  # the server looks for new runs only now and then
                        continue
                    (card,) = cards
                    assert status == 200
                    reads.add("card", list(range(1 + (-1 if card["step"] is None else card["step"]))))
                    if reads.count % 5 == 0:  # the whole report
                        assert get(server, "/content.json?run=run")[0] == 200
                if is_killed and len(fresh.steps) > STEPS // 2:
                    training.kill()
                    training.wait()
            assert run is not None
            assert training.returncode == (-9 if is_killed else 0)
            assert reads.count >= 100
            expected = len(read_run(hosts.files / "run").steps)
            assert expected > STEPS // 2 if is_killed else expected == STEPS
            end = time.monotonic() + 30
            while len(run.steps) < expected and time.monotonic() < end:
                time.sleep(0.2)
                run.refresh()
            written = _look(hosts.files / "run")
            for place in (hosts.reading, hosts.training):
                again = read_run(place / "run")
                assert again.steps == run.steps == list(range(expected))
                assert len(again.series("gradient_before_clip/4.weight/norm")) == expected
            assert main(["status", str(seen)]) in (0, 1)
            assert f"step {expected - 1}" in capsys.readouterr().out
        assert _look(hosts.files / "run") == written
        assert sorted(written) == ["gradmon.000001.rows", "gradmon.000001.values"]
        print(f"{reads.count} reads, {reads.most}, {expected} steps")
    finally:
        if training.poll() is None:
            training.kill()
            training.wait()
