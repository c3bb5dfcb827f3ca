"""Forked workers, such as those of a data loader."""

from __future__ import annotations

import os


class HomeProcess:
    """The process that made this object. A forked worker has a copy of it, and must not touch what the object's owner has open."""

    def __init__(self) -> None:
        self._number = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked worker."""
        return os.getpid() != self._number
