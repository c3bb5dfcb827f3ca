"""Append-only log files, framed as in LevelDB: written by one process, read by everybody, at the same time and on other hosts.

A file is a row of blocks of 32 KiB. A record is one frame, or several where it crosses blocks: 4 bytes of CRC32 (zlib) over kind and data,
2 bytes length, 1 byte kind (whole 1, first 2, middle 3, last 4), data; all little-endian. Fewer than 7 bytes at the end of a block are
filler.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

from ..core.files import created, opened

BLOCK = 32768
_HEADER = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_SEEDS = [zlib.crc32(bytes([kind])) for kind in range(5)]
#: Operating systems make appended bytes visible elsewhere by pages, in any order.
_PAGE = 4096
#: Seconds after the last write from which zeros are no page on its way, and what is missing is lost, whatever clocks and caches differ by.
SETTLED = 600.0
_AT_ONCE = 32 * BLOCK


class Overspent(ValueError):
    """Reading a run takes longer than it may."""


_UNTIL: ContextVar[tuple[float, float] | None] = ContextVar("until", default=None)


@contextlib.contextmanager
def reading_within(seconds: float) -> Iterator[None]:
    """Give all reading in the block so much time, lest one run of a stranger hold up others. Raises Overspent if it takes longer."""
    token = _UNTIL.set((time.monotonic() + seconds, seconds))
    try:
        yield
    finally:
        _UNTIL.reset(token)


def check_time() -> None:
    """Ask for the time that :func:`reading_within` gives. Raises Overspent once it is over."""
    if (until := _UNTIL.get()) is not None and time.monotonic() > until[0]:
        raise Overspent(f"reading it takes more than {until[1]:g} s")


def framed(record: bytes, at: int) -> bytes:
    """``record`` in frames, to be appended to a file of ``at`` bytes."""
    room = BLOCK - at % BLOCK
    parts, begin, kind = [], 0, _FIRST
    if room < _HEADER.size:
        parts.append(b"\xff" * room)  # not zero, which would look like bytes on their way
        room = BLOCK
    while True:
        data = record[begin : begin + room - _HEADER.size]
        begin += len(data)
        if begin == len(record):
            kind = _WHOLE if kind == _FIRST else _LAST
        parts += [_HEADER.pack(zlib.crc32(data, _SEEDS[kind]), len(data), kind), data]
        if begin == len(record):
            return b"".join(parts)
        kind, room = _MIDDLE, BLOCK


class LogWriter:
    """Appends records to a file of its own, each with one write. Raises FileExistsError if it exists, OSError if it cannot be made."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        self.size = 0  # up to the end of the last record
        self.file = created(path, os.O_APPEND)
        self._is_torn = False  # what a failed write left behind could not be cut off

    def append(self, record: bytes) -> tuple[int, int]:
        """Append ``record``; returns where it begins and ends. Raises OSError; what was written of it is cut off again."""
        filler = b"\xff" * (-self.size % BLOCK) if self._is_torn else b""  # readers look for the next frame at the next block
        at = self.size + len(filler)
        room = BLOCK - at % BLOCK
        if room >= len(record) + _HEADER.size:  # as nearly always
            data = filler + _HEADER.pack(zlib.crc32(record, _SEEDS[_WHOLE]), len(record), _WHOLE) + record
        else:
            data = filler + framed(record, at)
        written = 0
        try:
            while written < len(data):
                written += os.write(self.file, data[written:] if written else data)
        except OSError:
            self._cut_off(written)
            raise
        self.size, self._is_torn = self.size + len(data), False
        return at + (room if room < _HEADER.size else 0), self.size

    def _cut_off(self, written: int) -> None:
        if written:
            try:
                os.ftruncate(self.file, self.size)
            except OSError:
                self.size += written
                self._is_torn = True

    def sync(self) -> None:
        """Have the file written back, which makes it visible on other hosts and outlasts a crash of this one. Raises OSError."""
        getattr(os, "fdatasync", os.fsync)(self.file)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.close()

    def close(self) -> None:
        """Close the file. Raises OSError, as where a server reports a failed write only now."""
        if self.file >= 0:
            file, self.file = self.file, -1
            os.close(file)


class Record(NamedTuple):
    """A record of a file, which takes the bytes from ``begin`` to ``end``."""

    begin: int
    end: int
    data: bytes


class Damage(NamedTuple):
    """Bytes of a file that are no record, though records follow."""

    begin: int
    end: int


class _Frame(NamedTuple):
    begin: int
    end: int  # 0 if it is unknown
    kind: int
    data: bytes | None  # None where it is damaged


class LogReader:
    """Reads a file while it is written, without changing anything.

    ``written`` tells from a record, or the first part of one, when it was written, in seconds since the epoch; None if that is not in it.
    Raises OSError if there is none, or it cannot be read, or is a link or a device.
    """

    def __init__(self, path: str | os.PathLike[str], written: Callable[[bytes], float | None] = lambda data: None) -> None:
        if os.path.islink(path):
            raise OSError(f"{os.fspath(path)!r} is a link, which is not followed")
        self._file = open(path, "rb", buffering=0, opener=opened)  # noqa: SIM115 (closed by close)
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self.close()
            raise OSError(f"{os.fspath(path)!r} is not a regular file")
        self.name = os.path.basename(path)
        self.offset = 0  # up to where follow() has read
        self.damage: list[Damage] = []  # what was found damaged up to there
        self.bytes_read = 0
        self._written = written
        self._kept = 0, b""  # a part of the file, and where it begins
        self._ahead = _PAGE  # bytes that are read at least

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self.close()

    @property
    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def found_backwards(self, kind: bytes, most: int) -> Record | None:
        """The last record that begins with ``kind``, among those that begin in the last ``most`` blocks."""
        size = self.size
        last = (size - 1) // BLOCK
        for block in range(last, max(-1, last - most), -1):
            begins = []
            frame = self._frame(block * BLOCK, size)
            while frame is not None and frame.data is not None and frame.begin // BLOCK == block:
                if frame.kind in (_WHOLE, _FIRST) and frame.data[:1] == kind:
                    begins.append(frame.begin)
                frame = self._frame(frame.end, size)
            for begin in reversed(begins):
                if isinstance(record := self._next(begin, size, True), Record):
                    return record
        return None

    def follow(self) -> Iterator[Record]:
        """The records that are new since the last call, up to the first byte that may still be on its way."""
        size, is_settled = self.size, self.age > SETTLED
        self._kept = 0, b""
        while self.offset < size:
            record = self._next(self.offset, size, is_settled)
            if record is None:
                return
            self.offset = record.end
            if isinstance(record, Damage):
                self.damage.append(record)
            else:
                yield record

    @property
    def age(self) -> float:
        """Seconds since the file was written last."""
        return time.time() - os.fstat(self._file.fileno()).st_mtime

    def begins_otherwise(self) -> bool:
        """Whether the file does not begin with a record, nor with bytes on their way."""
        frame = self._frame(0, self.size)
        return frame is not None and frame.end == 0 and any(self._bytes(0, _HEADER.size)[0][: _HEADER.size])

    def at(self, begin: int, end: int = 0) -> bytes | None:
        found = self.record(begin, end)
        return None if found is None else found.data

    def record(self, begin: int, end: int = 0) -> Record | None:
        """The record that begins at ``begin``, and ends at ``end`` unless that is 0; None if it is damaged or not there yet."""
        for _ in range(2):  # first in what was read before, which may be older than the record
            size = self.size
            record = self._next(begin, min(end, size) or size, True) if begin < size else None
            if isinstance(record, Record) and record.begin == begin and end in (0, record.end):
                return record
            self._kept = 0, b""
        return None

    def _next(self, at: int, size: int, is_settled: bool) -> Record | Damage | None:
        """The record that begins at ``at``, or what is there in its place; None if that is not decided yet."""
        check_time()  # also where all of it was read before
        begin, parts = at, list[bytes]()
        while True:
            frame = self._frame(at, size)
            if frame is None or frame.data is None:
                return None if frame is None else self._skipped(begin, frame, size, is_settled)
            if not parts:
                begin = frame.begin
                if frame.kind == _WHOLE:
                    return Record(begin, frame.end, frame.data)
                if frame.kind != _FIRST:  # the rest of a record whose beginning is damaged
                    return Damage(begin, frame.end)
            elif frame.kind in (_WHOLE, _FIRST):  # of another record: the end of this one is missing
                return Damage(begin, frame.begin)
            parts.append(frame.data)
            if frame.kind == _LAST:
                return Record(begin, frame.end, b"".join(parts))
            at = frame.end

    def _frame(self, at: int, size: int) -> _Frame | None:
        """The frame at ``at``, with data None where it is none; None where the file ends before it does."""
        room = BLOCK - at % BLOCK
        if room < _HEADER.size:
            at, room = at + room, BLOCK
        buffer, place = self._bytes(at, _HEADER.size)
        if len(buffer) - place < _HEADER.size or at + _HEADER.size > size:
            return None
        code, length, kind = _HEADER.unpack_from(buffer, place)
        if not _WHOLE <= kind <= _LAST or length > room - _HEADER.size:
            return _Frame(at, 0, 0, None)
        buffer, place = self._bytes(at + _HEADER.size, length)
        data = buffer[place : place + length]
        if len(data) < length or at + _HEADER.size + length > size:
            return None
        return _Frame(at, at + _HEADER.size + length, kind, data if zlib.crc32(data, _SEEDS[kind]) == code else None)

    def _skipped(self, begin: int, frame: _Frame, size: int, is_settled: bool) -> Damage | None:
        """What to skip from ``begin`` on, where ``frame`` is none; None if it may become one."""
        if frame.end:
            following = self._frame(frame.end, size)
            if following is not None and following.data is not None:
                return Damage(begin, frame.end) if is_settled or self._is_there(frame.begin, following.begin, size) else None
        block = frame.begin - frame.begin % BLOCK + BLOCK
        return Damage(begin, block) if block <= size and (is_settled or self._is_there(frame.begin, block, size)) else None

    def _is_there(self, begin: int, end: int, size: int) -> bool:
        """Whether each page from ``begin`` to ``end`` was seen to its end: one that is on its way, in whole or in part, ends with zeros.

        None is on its way if what was written next was written long ago.
        """
        pages = range(begin - begin % _PAGE + _PAGE, end + 1, _PAGE)
        ends = (self._bytes(at - 1, 1) for at in pages)
        return self._is_old(end, size) or all(buffer[place : place + 1] not in (b"\0", b"") for buffer, place in ends)

    def _is_old(self, at: int, size: int) -> bool:
        """Whether the first record behind ``at`` that says when it was written was written long ago."""
        while at < size:
            frame = self._frame(at, size)
            if frame is None or frame.data is None:
                at += BLOCK - at % BLOCK
                continue
            written = self._written(frame.data) if frame.kind in (_WHOLE, _FIRST) else None
            if written is not None:
                return time.time() - written > SETTLED
            at = frame.end
        return False

    def _bytes(self, at: int, count: int) -> tuple[bytes, int]:
        """A part of the file with ``count`` bytes from ``at`` on, fewer only at its end, and where among its bytes ``at`` is."""
        base, kept = self._kept
        if not base <= at <= at + count <= base + len(kept):
            begun = kept[at - base :] if at >= base else b""
            if not begun:  # more at a time where the file is read in order
                self._ahead = min(2 * self._ahead, _AT_ONCE) if kept and at == base + len(kept) else _PAGE
            check_time()
            self._file.seek(at + len(begun))
            read = self._file.read(max(count - len(begun), 0 if begun else self._ahead))
            self.bytes_read += len(read)
            base, kept = self._kept = at, begun + read
        return kept, at - base

    def close(self) -> None:
        self._file.close()
