"""Packages whose names are imported when they are first used: most of the time would go into what a program does not use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def importing(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``package``; ``homes`` has the module in it that has each of the public names, or that it is."""

    def importer(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = f"{package}.{homes.get(name, name)}"  # other names may be modules
        try:
            module = import_module(home)
        except ModuleNotFoundError as error:
            if error.name != home:
                raise
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        value = getattr(module, name, module) if name in homes else module
        setattr(sys.modules[package], name, value)
        return value

    return importer
