"""Run directories that nobody wrote so: mutations of a real one, and whether each is read without harm."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.analysis.many_runs import RunCard
from torch_gradmon.analysis.run import diagnose, read_run
from torch_gradmon.runs import format as f
from torch_gradmon.runs.log import LogReader, framed

from .stored_runs import ROWS, VALUES

#: What a run may be refused with; nothing else, and nothing once it was opened.
REFUSED = ("is not a run", "no run in", "is of format", "could not be read", "no recorded step yet")
#: Where the compressed numbers of records begin.
_COMPRESSED = {f.INDEX: 28, f.COLUMN: 12}
_STRANGE: tuple[Any, ...] = (
    "\ud800",
    None, True, -1, 0, 2**31, 2**63, 2**64, -(2**63), 10**39, 0.5, 1e300, -1e300, float("nan"), float("inf"), "", "x", "a\nb\x1b[2J",
    "x" * 20_000, [], {}, [[]], [None], [{}], {"": None}, ["x"], {"x": []}, "__class__", "time", "same_as",
)  # fmt: skip


def made(path: Path) -> dict[str, bytes]:
    """The files of a run with everything in it: spikes, late values, indices, a rewind, tags, equal statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with mock.patch.object(f, "INDEXED", 12):
        monitor = gradmon.watch(model, optimizer, run_dir=path, preset="full", on_spike=None)
        for step in range(40):
            monitor.set_tags(seed=step) if hasattr(monitor, "set_tags") else None
            optimizer.zero_grad()
            loss = (model(torch.randn(16, 6)) * (1e4 if step == 33 else 1)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            monitor.log_scalar("loss", loss.detach())
        monitor.detach()
    return {name: (path / name).read_bytes() for name in (VALUES, ROWS)}


def records_in(path: Path) -> list[bytes]:
    """All records of a log file."""
    with closing(LogReader(path)) as file:
        return [record.data for record in file.follow()]


def _log(records: list[bytes]) -> bytes:
    data = bytearray()
    for record in records:
        data += framed(record, len(data))
    return bytes(data)


_BOMB = zlib.compress(bytes(10**8), 1)  # made here, so that the memory of what reads can be told


class Mutator:
    """Makes mutated copies of a run's files.

    Args:
        files: their bytes, by name.
        records: likewise, as records.
    """

    def __init__(self, files: dict[str, bytes], records: dict[str, list[bytes]]) -> None:
        self._files, self._records = files, records

    def write(self, seed: int, path: Path) -> dict[str, bytes]:
        """Write a mutated copy into a new directory, as old as is settled or just written; returns its files."""
        return self._write(path, self.mutated(seed), is_settled=seed % 3 > 0)

    def write_unchanged(self, path: Path) -> None:
        self._write(path, self._files, is_settled=True)

    @staticmethod
    def _write(path: Path, made: dict[str, bytes], is_settled: bool) -> dict[str, bytes]:
        path.mkdir()
        for name, data in made.items():
            (path / name).write_bytes(data)
            if is_settled:
                os.utime(path / name, (1e9, 1e9))
        return made

    def mutated(self, seed: int) -> dict[str, bytes]:
        """The files with one to three changes, of one kind."""
        chance = random.Random(seed)
        name = chance.choice([VALUES, VALUES, ROWS])
        kinds: list[Callable[[random.Random, str], bytes]] = [self._bytes, self._order, self._record, self._json, self._json]
        return {**self._files, name: chance.choice(kinds)(chance, name)}

    def _bytes(self, chance: random.Random, name: str) -> bytes:
        """Flipped bits, cuts, zeros, bytes moved."""
        data = bytearray(self._files[name])
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(data))
            what = chance.randrange(4)
            if what == 0:
                data[at] ^= 1 << chance.randrange(8)
            elif what == 1:
                del data[at : at + chance.choice([1, 7, 4096, len(data)])]
                data += b"\0" * chance.choice([0, 0, 4096])
            elif what == 2:
                end = min(len(data), at + chance.choice([1, 100, 4096]))
                data[at:end] = bytes(end - at)
            else:
                data[at:at] = chance.randbytes(chance.choice([1, 7, 5000]))
            if not data:
                break
        return bytes(data)

    def _order(self, chance: random.Random, name: str) -> bytes:
        """Records exchanged, left out, repeated, or of the other file."""
        records = list(self._records[name])
        for _ in range(chance.randint(1, 3)):
            one, other = chance.randrange(len(records)), chance.randrange(len(records))
            what = chance.randrange(4)
            if what == 0:
                records[one], records[other] = records[other], records[one]
            elif what == 1:
                del records[one]
            elif what == 2:
                records.insert(one, records[other])
            else:
                records.insert(one, chance.choice(self._records[chance.choice([VALUES, ROWS])]))
        return _log(records)

    def _record(self, chance: random.Random, name: str) -> bytes:
        """Fields, lengths and counts of records, with right checksums."""
        records = list(self._records[name])
        for _ in range(chance.randint(1, 3)):
            kind = chance.choice(sorted({record[:1] for record in records} - {f.JSON}))
            place = chance.choice([each for each, record in enumerate(records) if record[:1] == kind])
            if kind in _COMPRESSED and chance.random() < 0.7:
                records[place] = self._compressed(chance, records[place])
                continue
            data = bytearray(records[place])
            at = 4 * chance.randrange(max(1, min(len(data), chance.choice([64, len(data)])) // 4))
            made = [
                struct.pack("<I", chance.choice([0, 1, 2**31, 2**32 - 1, len(data)])),
                struct.pack("<q", chance.choice([-1, 2**62, -(2**63), 0, 10**6])),
                struct.pack("<d", chance.choice([float("nan"), float("inf"), 1e300, -1.0])),
                struct.pack("<f", chance.choice([float("nan"), float("-inf"), 1e38, -1.0])),
                chance.randbytes(4),
            ]
            new = chance.choice(made)
            data[at : at + len(new)] = new
            records[place] = bytes(data[: chance.choice([len(data)] * 3 + [at])])
        return _log(records)

    def _compressed(self, chance: random.Random, record: bytes) -> bytes:
        """Other numbers in what is compressed, more or fewer of them, or a bomb."""
        head = _COMPRESSED[record[:1]]
        try:
            numbers = np.frombuffer(zlib.decompress(record[head:]), "u1").reshape(8, -1).T.copy().view("<i8")[:, 0]
        except (ValueError, zlib.error):  # changed before
            return record
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(numbers) or 1)
            what = chance.randrange(5)
            if what == 0:
                numbers[at : at + 1] = chance.choice([0, -1, 1, 2**31, 2**32, 2**53, 2**62, -(2**63), 0x7FF0000000000001])
            elif what == 1:
                numbers[at : at + 1] += chance.choice([-1, 1, 7, 32768])
            elif what == 2:
                numbers = np.delete(numbers, range(at, min(len(numbers), at + chance.choice([1, 8]))))
            elif what == 3:
                numbers = np.insert(numbers, at, [0] * chance.choice([1, 8, 10**6]))
            else:
                numbers = np.roll(numbers, chance.choice([1, 8]))
        data = f.squeezed(numbers)
        return record[:head] + chance.choice([data, data, data, data[: len(data) // 2], data + b"x", _BOMB])

    def _json(self, chance: random.Random, name: str) -> bytes:
        """Members of JSON: of other types, numbers, names, depth."""
        records = list(self._records[name])
        for _ in range(chance.randint(1, 2)):
            kind = chance.choice(sorted({record[:1] for record in records} & {f.JSON, f.STEP}))
            place = chance.choice([each for each, record in enumerate(records) if record[:1] == kind])
            if records[place][:1] == f.JSON:
                records[place] = f.JSON + _changed(chance, records[place][1:])
            else:
                frame = f.frame_of(records[place])
                what = chance.choice(["context", "events"])
                given = getattr(frame, what) or b"[]"
                if what == "events" and given == b"[]":
                    event = {
                        "step": 1,
                        "signal": "loss",
                        "value": 1.0,
                        "score": 9.0,
                        "threshold": 5.0,
                        "reason": "x",
                        "where": "y",
                    }
                    given = json.dumps([event]).encode()
                flags = frame.flags | (f.HAS_EVENTS if what == "events" else 0)
                records[place] = frame._replace(flags=flags, **{what: _changed(chance, given)}).packed()
        return _log(records)


def _changed(chance: random.Random, text: bytes) -> bytes:
    if chance.random() < 0.1:
        return chance.choice(
            [
                b"[" * 100_000 + b"]" * 100_000,
                b'{"facts":' * 500 + b"1" + b"}" * 500,
                b"9" * 100_000,
                b"\xff\xfe",
                b'"\xed\xa0\x80"',
                b"",
            ]
        )
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # changed before
        return text
    nodes = list(_nodes(found))
    for _ in range(chance.randint(1, 3)):
        if not nodes:
            break
        parent, key = chance.choice(nodes)
        if not (key in parent if isinstance(parent, dict) else key < len(parent)):
            continue
        what = chance.randrange(8)
        if what == 0:
            del parent[key]
        elif what == 1 and isinstance(parent, dict):
            parent[chance.choice(["", "x", "\ud800", "time", "9" * 30])] = parent.pop(key)
        elif what == 2 and isinstance(parent, list):
            parent *= 2
        elif what == 3:
            for _ in range(chance.choice([1, 40])):
                parent[key] = [parent[key]]
        else:
            parent[key] = chance.choice(_STRANGE)
    return json.dumps(found).encode()


def _nodes(found: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in list(found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()):
        yield found, key
        yield from _nodes(value)


def read_all(path: Path) -> str:
    """Read a run in every way that needs torch alone; returns by what it was refused, if it was."""
    try:
        run = read_run(path)
    except (ValueError, FileNotFoundError) as error:
        told = str(error)
        assert "\n" not in told, told
        assert len(told) < 1000, told
        assert any(part in told for part in REFUSED), told
        return told
    with closing(run):
        for record in run.records():
            assert run.context(record.step).keys() >= {"time", "applied"}
            assert len(run.metrics(record.step)) == len(record.values)
        for key in run.keys()[::25]:
            run.series(key)
        for source in run.sources:
            list(run.stacks(source))
        assert len(run.segments) <= len(run.steps)
        assert all("\n" not in line for line in [*run.damage, repr(run), run.model_text])
        list(map(str, run.trained_parts))
        run.refresh()
    RunCard(path)
    str(diagnose(path))
    return ""


def show_all(path: Path, report: Path | None) -> None:
    """Print what a run that can be read has, and draw it into `report`. Needs rich and plotly."""
    from torch_gradmon.analysis.report.page import write
    from torch_gradmon.cli.terminal.layer_table import summarize
    from torch_gradmon.cli.terminal.tables import QuietConsole, show_summary

    with closing(read_run(path)) as run:
        if not run.steps:
            return
        summary = summarize(run, str(path))
        json.dumps(summary.to_dict(), allow_nan=False)
        with redirect_stdout(io.StringIO()):
            show_summary(QuietConsole(), summary)
    if report is not None:
        write(path, report, progress=False)
