"""Where records go."""

from .jsonl import JsonlSink
from .outlet import Outlet

__all__ = ["JsonlSink", "Outlet"]
