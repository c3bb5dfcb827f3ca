"""The runs below a directory."""

from __future__ import annotations

import os
from pathlib import Path

from ...core.formatting import listed, printable
from ...runs.format import is_run

#: Directories below each other that are looked into.
_DEPTH = 4
#: Runs that the error of a directory without one names.
_NAMED = 5


def find_runs(root: str | os.PathLike[str]) -> dict[str, Path]:
    """The run directories in and below ``root``, at most four levels deep, by their path from there, sorted.

    Names that are no printable text are left out. Links are not followed, so that nothing outside is shown. If ``root`` is a
    run itself, its name is that of the directory.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    top = Path(root)
    if not top.is_dir():
        raise FileNotFoundError(f"there is no directory {os.fspath(root)!r}")
    found = {}
    for place, directories, files in os.walk(top):
        below = Path(place).relative_to(top)
        if len(below.parts) >= _DEPTH:
            directories.clear()
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        if is_run(file for file in files if not os.path.islink(os.path.join(place, file))):
            name = below.as_posix() if below.parts else top.resolve().name
            if name.isprintable():  # else it is no text, which JSON and addresses could not have
                found[name] = Path(place)
    return dict(sorted(found.items()))


def is_below(path: Path, root: str | os.PathLike[str]) -> bool:
    """Whether a run that was found still stands where it was found, and nobody has put a link in its way."""
    return path.resolve() == Path(root).resolve() / path.relative_to(root)


def no_run(path: str | os.PathLike[str], error: FileNotFoundError) -> str:
    """What to say of a directory without a run: ``error``, or the names of the runs below it."""
    try:
        below = list(find_runs(path))
    except OSError:
        below = []
    names = [printable(str(Path(path) / name)) for name in below]
    return f"there is no run in {os.fspath(path)!r} itself; below it: {listed(names, _NAMED)}" if names else str(error)
