"""What programs on the simulated accelerator share. Each runs in a process of its own: ``python -m tests.simulated_cases NAME``.

A device once registered changes what torch takes for its accelerator, so no other test may share the process.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch_gradmon import testing

DEVICE = testing.simulated_device()
AT = DEVICE.torch_device

Program = Callable[[], Any]


class Programs(dict[str, Program]):
    """Programs by name; a decorator that adds one."""

    def __call__(self, program: Program) -> Program:
        """Add ``program``."""
        self[program.__name__] = program
        return program

    def main(self) -> None:
        """Run the one that the command line names, and print its result as JSON."""
        print("=", json.dumps(self[sys.argv[1]]()))


@contextmanager
def without(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Within the block a method that waits does not; what then goes wrong may warn."""
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        setattr(owner, name, original)


def races_of(program: Program) -> str:
    """What ``program`` uses too early, in words; empty if nothing."""
    try:
        with DEVICE.lazy():
            program()
    except AssertionError as error:
        return str(error)
    return ""
