"""What :func:`torch_gradmon.diff` returns."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.formatting import ShownAsText
from .result import ComparisonResult
from .text import to_text


@dataclass(frozen=True, repr=False)
class Difference(ShownAsText, ComparisonResult):
    """Where two runs diverge; ``str()`` gives it as text on one screen. The attributes are those of :class:`ComparisonResult`."""

    def __str__(self) -> str:
        return to_text(self)
