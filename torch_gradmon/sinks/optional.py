"""Optional packages behind sinks."""

from __future__ import annotations

from importlib.util import find_spec


def require(package: str, sink: object) -> None:
    """Check that ``package`` is installed for ``sink``.

    Raises:
        ImportError: it is not installed.
    """
    if find_spec(package) is None:
        raise ImportError(f"{type(sink).__name__} needs {package}: pip install {package}")
