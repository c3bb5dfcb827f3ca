"""New files in directories that others can write to."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def created(path: str | os.PathLike[str], flags: int = 0) -> int:
    """A descriptor of a new file to write to. Its permissions are at most those of its directory, and fewer by the umask. Raises OSError,
    as FileExistsError where there is something at the path, such as a link.
    """
    flags |= os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.open(path, flags, 0o666 & os.stat(os.path.dirname(path) or ".").st_mode)


def opened(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file that is not reached through a link, without waiting, as for the writer of a pipe. Raises OSError."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file that takes the place of the one at ``path`` when the block ends, complete; if it raises, nothing is left of it."""
    path = Path(path)
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    file = open(created(part), "wb")  # noqa: SIM115 (closed before it is renamed)
    try:
        with file:
            yield file
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
