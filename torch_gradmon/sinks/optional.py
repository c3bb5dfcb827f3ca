"""The optional packages that sinks stand before."""

from __future__ import annotations

from importlib.util import find_spec


def require(package: str, sink: object) -> None:
    """Refuse to make ``sink`` without ``package``.

    Raises:
        ImportError: it is not installed.
    """
    if find_spec(package) is None:
        raise ImportError(f"{type(sink).__name__} needs {package}: pip install {package}")
