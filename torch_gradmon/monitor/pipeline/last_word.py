"""One line about a run when its monitor ends, so that a script does not end in silence about what is wrong with it."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections import Counter

from ...core.formatting import listed, placed, printable
from ...core.torch_modes import outside_dispatch_modes

#: Findings that the line names.
_NAMED = 3


def last_word(path: str | os.PathLike[str]) -> str:
    """The errors and warnings of the run in ``path`` on one line, consequences left out; empty if there are none.

    Raises:
        OSError, ValueError: the run cannot be read.
    """
    from ...analysis.diagnosis.diagnose import diagnose
    from ...analysis.diagnosis.findings import SEVERITIES
    from ...runs.reader import single_threaded

    with outside_dispatch_modes(), single_threaded():
        found = [finding for finding, _ in diagnose(path).grouped() if finding.severity != "info"]
    counts = Counter(finding.severity for finding in found)
    head = ", ".join(f"{counts[each]} {each}{'s' * (counts[each] > 1)}" for each in SEVERITIES if counts[each])
    names = listed([placed(finding.rule, finding.where) for finding in found], _NAMED)
    return printable(f"{head}: {names}; gradmon diagnose {shlex.quote(os.fspath(path))}") if found else ""


def say(path: str | os.PathLike[str]) -> None:
    """Print :func:`last_word` to stderr. A training that has ended is not failed by what it did wrong, so that nothing is raised."""
    with contextlib.suppress(Exception):
        if text := last_word(path):
            sys.stderr.write(f"torch_gradmon: {text}\n")
