"""A program that believes to write to a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import select
import struct
import time
from collections.abc import Iterator

from . import forked

_GRADMON = "import sys; from torch_gradmon.cli.main import main; sys.exit(main())"
_WITHOUT_RICH = "import sys; sys.modules['rich'] = None; " + _GRADMON.removeprefix("import sys; ")
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[()].|[=>])")


class Terminal:
    """What ``gradmon`` with these arguments writes to a terminal of so many columns and rows."""

    def __init__(self, *arguments: str, columns: int = 80, rows: int = 24, rich: bool = True, **environment: str) -> None:
        import fcntl
        import pty
        import termios

        self._own, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.output = ""
        known = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.child = forked.start(
            _GRADMON if rich else _WITHOUT_RICH,
            *arguments,
            streams=[other] * 3,
            environment={**known, "TERM": "xterm-256color", **environment},
            terminal=True,  # so that Ctrl-C means something
        )
        os.close(other)

    def read(self, until: str, seconds: float = 200.0) -> str:
        """Read until ``until`` was written, colours apart; what was written so far.

        Raises:
            AssertionError: it was not in time.
        """
        end = time.monotonic() + seconds
        while until not in self.plain:
            assert time.monotonic() < end, f"{until!r} did not come:\n{self.plain[-3000:]}"
            if not self._more(0.2):
                assert until in self.plain, f"it ended without {until!r}:\n{self.plain[-3000:]}"
        return self.plain

    def _more(self, seconds: float) -> bool:
        """Whether there may be more to come."""
        if select.select([self._own], [], [], seconds)[0]:
            try:
                data = os.read(self._own, 65536)
            except OSError:  # the other side is closed
                return False
            self.output += data.decode("utf-8", errors="replace")
            return bool(data)
        return True

    @property
    def plain(self) -> str:
        """What was written, without colours and movements."""
        return _ESCAPES.sub("", self.output)

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._own, keys.encode())

    def end(self, seconds: float = 200.0) -> int:
        """Wait until it ends; its exit code."""
        end = time.monotonic() + seconds
        while self._more(0.2):
            assert time.monotonic() < end, f"it does not end:\n{self.plain[-3000:]}"
        return self.child.wait(timeout=seconds)

    def close(self) -> None:
        """End it if it still runs."""
        self.child.kill()
        with contextlib.suppress(OSError):
            os.close(self._own)


@contextlib.contextmanager
def terminal(*arguments: str, columns: int = 80, rows: int = 24, rich: bool = True, **environment: str) -> Iterator[Terminal]:
    """A :class:`Terminal` that is closed in the end."""
    found = Terminal(*arguments, columns=columns, rows=rows, rich=rich, **environment)
    try:
        yield found
    finally:
        found.close()
