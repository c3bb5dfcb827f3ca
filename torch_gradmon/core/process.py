"""Processes: forked workers, such as those of a data loader, what threads share, and whether the process of a run still exists."""

from __future__ import annotations

import hashlib
import os
import platform
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any


class HomeProcess:
    """The process that made this object. A forked worker has a copy of it, and must not touch what the object's owner has open."""

    def __init__(self) -> None:
        self._number = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked worker."""
        return os.getpid() != self._number


class SharedContext:
    """A context that changes something of the whole process. Threads that are in it at the same time share one: were each to restore what
    it found, the one that entered second would restore the change of the first for good.

    Args:
        make: makes the context; called by the first thread to enter.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._lock = threading.RLock()  # what is collected meanwhile may leave
        self._inside = 0
        self._context: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._context = self._make()
                self._context.__enter__()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._context is not None:
                self._context.__exit__(None, None, None)
                self._context = None


def process_facts() -> dict[str, Any]:
    """What identifies this process, for :func:`is_gone`."""
    number = os.getpid()
    return {"id": number, "began": _began(number), "where": _where()}


def is_gone(facts: Mapping[str, Any]) -> bool:
    """Whether a process with these facts certainly no longer exists. One of another machine, container or user may, and so may any where
    the system does not show when processes began, as Linux does.
    """
    number, began, where = (facts.get(name) for name in ("id", "began", "where"))
    if os.name != "posix" or not began or not where or where != _where():  # Windows would send a signal
        return False
    if not isinstance(number, int) or not 0 < number < 1 << 31:
        return False
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    except OSError:  # of another user: it exists
        return False
    now = _began(number)
    return now is not None and now != began  # another process has its number by now, or none but its entry is left


def _where() -> str:
    """This machine since it was started, and the container on it: a hash, since runs are given away. Empty if the system shows neither."""
    try:
        found = [platform.node(), Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        return ""
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]


def _began(number: int) -> str | None:
    """When a process started, in the system's own unit; empty if it has ended, None if the system does not show it."""
    try:
        state, *rest = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return "" if state in "ZX" else rest[18]
