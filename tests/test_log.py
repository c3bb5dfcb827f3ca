"""Log files: what is appended reads back, whatever became of a part of it, and in whatever order it comes into sight."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_gradmon.runs import log
from torch_gradmon.runs.log import BLOCK, LogReader, LogWriter, framed

PAGE = 4096
_QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
_SIZES = st.lists(
    st.one_of(st.integers(0, 300), st.sampled_from([BLOCK - 15, BLOCK - 14, BLOCK - 8, BLOCK - 7, BLOCK - 6, BLOCK, 3 * BLOCK])),
    min_size=1,
    max_size=30,
)


def _records(sizes: list[int], seed: int = 0) -> list[bytes]:
    """Records with long stretches of zeros, as those of real runs have."""
    chance = random.Random(seed)
    return [bytes(size) if chance.random() < 0.3 else chance.randbytes(size) for size in sizes]


def _laid_out(records: list[bytes]) -> tuple[bytes, list[int]]:
    """A file with these records, and where each begins."""
    data, begins = bytearray(), []
    for record in records:
        room = BLOCK - len(data) % BLOCK
        begins.append(len(data) + (room if room < 7 else 0))
        data += framed(record, len(data))
    return bytes(data), begins


def _settled(path: Path, data: bytes) -> Path:
    """A file that nobody has written for long."""
    path.write_bytes(data)
    os.utime(path, (1e9, 1e9))
    return path


def _read(path: Path) -> tuple[list[bytes], list[log.Damage]]:
    with closing(LogReader(path)) as file:
        return [record.data for record in file.follow()], file.damage


@_QUICK
@given(sizes=_SIZES)
def test_records_of_any_size_read_back(sizes: list[int], tmp_path: Path) -> None:
    path, records = tmp_path / "log", _records(sizes)
    path.unlink(missing_ok=True)
    writer = LogWriter(path)
    places = [writer.append(record) for record in records]
    writer.close()
    assert path.read_bytes() == _laid_out(records)[0]
    assert [begin for begin, _ in places] == _laid_out(records)[1]
    with closing(LogReader(path)) as file:
        found = list(file.follow())
        assert [(record.begin, record.end) for record in found] == places
        assert [record.data for record in found] == records
        assert [file.at(begin) for begin, _ in places] == [file.at(begin, end) for begin, end in places] == records
        assert file.damage == []


@_QUICK
@given(sizes=st.lists(st.integers(20, 20_000), min_size=3, max_size=20), data=st.data())
def test_one_bad_bit_costs_one_record(sizes: list[int], data: st.DataObject, tmp_path: Path) -> None:
    records = _records(sizes)
    whole, begins = _laid_out(records)
    place = data.draw(st.integers(0, len(records) - 2))  # the end of a file cannot be told from one that is on its way
    at = begins[place] + 7 + data.draw(st.integers(0, min(sizes[place], BLOCK - begins[place] % BLOCK - 7) - 1))
    spoilt = bytearray(whole)
    spoilt[at] ^= 1 << data.draw(st.integers(0, 7))
    found, damage = _read(_settled(tmp_path / "log", bytes(spoilt)))
    assert found == [record for number, record in enumerate(records) if number != place]
    assert damage[0].begin == begins[place]


@_QUICK
@given(seed=st.integers(0, 10_000))
def test_a_bad_bit_anywhere_costs_its_block_at_most(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    records = [bytes([number]) + record for number, record in enumerate(_records([chance.randrange(3000) for _ in range(100)]))]
    whole, begins = _laid_out(records)
    spoilt = bytearray(whole)
    at = chance.randrange(len(whole) - 2 * BLOCK)
    spoilt[at] ^= 1 << chance.randrange(8)
    found, damage = _read(_settled(tmp_path / "log", bytes(spoilt)))
    there = [record[0] for record in found]
    assert found == [records[number] for number in there]
    assert there == sorted(set(there))
    lost = set(range(100)).difference(there)
    block = at // BLOCK * BLOCK
    assert all(block - 3007 <= begins[number] < block + BLOCK for number in lost)
    assert bool(damage) == bool(lost)


def test_after_a_torn_write_the_file_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full in the middle of a record, and what was written of it cannot be cut off."""
    records = _records([500] * 200)
    writer = LogWriter(tmp_path / "log")
    write, left = os.write, [0]

    def short(file: int, data: bytes) -> int:
        if left[0]:
            left[0] -= 1
            if not left[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(file, data[: len(data) // 2])
        return write(file, data)

    def refused(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(log.os, "write", short)
    kept = []
    for number, record in enumerate(records):
        if number % 37 == 30:
            left[0] = 2
            with monkeypatch.context() as patched:
                if number % 2:
                    patched.setattr(log.os, "ftruncate", refused)
                with pytest.raises(OSError, match="No space left"):
                    writer.append(record)
        else:
            writer.append(record)
            kept.append(record)
    writer.close()
    found, damage = _read(_settled(tmp_path / "log", (tmp_path / "log").read_bytes()))
    assert found == kept
    assert len(damage) == 2  # the others were cut off


def _views(whole: bytes, chance: random.Random) -> Iterator[bytes]:
    """The file as another host sees it, each time with some pages more, the last time whole; what is not there yet is zeros."""
    pages = range(0, len(whole), PAGE)
    there = dict.fromkeys(pages, 0)
    end = 0
    while sum(there.values()) < len(whole):
        end = max(end, min(len(whole), end + chance.choice([100, PAGE, 3 * PAGE, 10 * PAGE])))
        for page in chance.sample(pages, chance.randint(0, min(4, len(pages)))) if chance.random() < 0.9 else pages:
            most = min(PAGE, len(whole) - page, max(0, end - page))
            there[page] = max(there[page], most if chance.random() < 0.7 else chance.randint(0, most))
        yield b"".join(whole[page : page + there[page]].ljust(PAGE, b"\0") for page in pages)[:end]
    yield whole


@_QUICK
@given(seed=st.integers(0, 100_000))
def test_a_follower_sees_each_record_once_in_any_order_of_pages(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    records = _records([chance.choice([0, 10, 300, 3000, 40_000]) for _ in range(30)], seed)
    path = tmp_path / "log"
    path.write_bytes(b"")
    found: list[bytes] = []
    with closing(LogReader(path)) as file:
        for view in _views(_laid_out(records)[0], chance):
            with open(path, "r+b") as other:
                other.write(view)
            found += [record.data for record in file.follow()]
            assert found == records[: len(found)]
            assert file.damage == []
    assert found == records


def test_links_and_devices_are_no_logs(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(framed(b"x", 0))
    (tmp_path / "link").symlink_to(tmp_path / "log")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError, match=r"is a link|not a regular file"):
            LogReader(tmp_path / name)
    with pytest.raises(FileExistsError):
        LogWriter(tmp_path / "link")


def test_what_precedes_an_old_record_is_not_on_its_way(tmp_path: Path) -> None:
    records = _records([900] * 200)
    whole, begins = _laid_out(records)
    (tmp_path / "log").write_bytes(whole[: 2 * PAGE] + bytes(PAGE) + whole[3 * PAGE :])
    first = next(number for number, begin in enumerate(begins) if begin + 907 > 2 * PAGE)
    next_block = next(number for number, begin in enumerate(begins) if begin > BLOCK)
    for age, lost in ((590, range(first, 200)), (610, range(first, next_block))):
        with closing(LogReader(tmp_path / "log", lambda data, age=age: time.time() - age)) as file:
            assert [record.data for record in file.follow()] == [data for at, data in enumerate(records) if at not in lost]
            assert bool(file.damage) == (age > 600)


def test_what_is_read_is_little_more_than_what_is_asked_for(tmp_path: Path) -> None:
    records = _records([4000] * 1000)
    whole, begins = _laid_out(records)
    (tmp_path / "log").write_bytes(whole)
    with closing(LogReader(tmp_path / "log")) as file:
        for place in (700, 20, 500):
            before = file.bytes_read
            assert file.at(begins[place]) == records[place]
            assert file.bytes_read - before < 2.1 * PAGE
        before = file.bytes_read
        assert [file.at(begin) for begin in begins] == records
        assert file.bytes_read - before < 1.01 * len(whole) + 2 * PAGE
