"""An outside judge of the diagnosis: trainings that other people broke, written anew from public descriptions, and sound ones."""

from __future__ import annotations

import importlib
import pkgutil

from .case import Case

#: Modules with cases; the others hold data and parts.
_KINDS = ("traincheck_", "questions_", "localisers_", "healthy_", "unseen_")

CASES: list[Case] = [
    case
    for found in sorted(pkgutil.iter_modules(__path__), key=lambda each: each.name)
    if found.name.startswith(_KINDS)
    for case in importlib.import_module(f"{__name__}.{found.name}").CASES
]

__all__ = ["CASES", "Case"]
