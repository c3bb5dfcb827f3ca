"""The order of a model's parameters and modules, for rows of plots, tables and lists of keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .keys import PARAMETER_SOURCES, owner_of

_DIGITS = re.compile(r"(\d+)")


class ModelOrder:
    """Sorts names of measured tensors.

    Args:
        parameters: of the model, in its order.
        modules: likewise.
    """

    def __init__(self, parameters: Iterable[str] = (), modules: Iterable[str] = ()) -> None:
        self._parameters, self._modules = ({name: place for place, name in enumerate(names)} for names in (parameters, modules))

    def sorted(self, source: str, measured: Iterable[Sequence[str]]) -> list[str]:
        """All names in ``measured``, each once.

        A tensor inside a module's output, an output of one of several calls, and an attention head are placed with their module. A name
        that the model no longer has keeps its place among the names measured with it.

        Args:
            source: of the names.
            measured: lists of tensors that were measured together.
        """
        orders = sorted(measured, key=len, reverse=True)  # the longest list places unknown names best
        place = self._parameters if source in PARAMETER_SOURCES else self._modules
        owners = {name: owner_of(name, place) for order in orders for name in order}
        known = (name for name, owner in owners.items() if owner in place)
        return merged([sorted(known, key=lambda name: (place[owners[name]], _natural(name))), *orders])


def merged(orders: Iterable[Sequence[str]]) -> list[str]:
    """Merge several orders; earlier ones take precedence. A name missing in one is placed before its successor in a later one.

    >>> merged([["a", "c"], ["b", "c", "d"], ["a", "aa", "b"]])
    ['a', 'aa', 'b', 'c', 'd']
    """
    found: list[str] = []
    for order in orders:
        known, waiting, before = set(found), list[str](), dict[str, list[str]]()
        for name in dict.fromkeys(order):
            if name in known:
                before.setdefault(name, []).extend(waiting)
                waiting = []
            else:
                waiting.append(name)
        found = [name for old in found for name in (*before.get(old, ()), old)] + waiting
    return found


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Sort key with numbers compared as numbers: ``head_2`` before ``head_10``."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in _DIGITS.split(name)]
