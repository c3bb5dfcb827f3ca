"""The fastest way to measure on each device, and stock operations wherever that one cannot be had."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..core.errors import WarningLog
from ..core.moments import ALL_COLUMNS, Column, identity
from .eager import DEFAULT_EPS, EagerStatistics


class Backend(Protocol):
    """Measures tensors that are on one device; see :meth:`torch_gradmon.statistics.eager.EagerStatistics.measure`."""

    def measure(
        self,
        tensors: Sequence[Tensor],
        columns: frozenset[Column] = ALL_COLUMNS,
        *,
        eps: float = DEFAULT_EPS,
        inverse_scale: Tensor | None = None,
        minus: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Rows ``[len(tensors), 8]``."""


class Statistics:
    """Measures tensors, wherever they are.

    Args:
        complaints: where it is said, once, that a faster way cannot be had.
        eps: an element counts as near zero when ``|x| <= eps``.
        compiled: compile a kernel for large CPU tensors, now.
    """

    def __init__(self, complaints: WarningLog, eps: float = DEFAULT_EPS, compiled: bool = False) -> None:
        self.eps = eps
        self._complaints = complaints
        self._eager = EagerStatistics()
        self._of: dict[str, Backend] = {}
        self._lock = threading.Lock()  # forward hooks may fire on several threads, and the scratch memory is shared
        if compiled:
            self._of["cpu"] = self._fused()

    def _fused(self) -> Backend:
        try:
            from .cpp import CppStatistics

            return CppStatistics()
        except Exception as error:
            self._complaints.add("compile", "the statistics could not be compiled, which makes them slower, not wrong", error)
            return self._eager

    def _triton(self) -> Backend:
        try:
            from .triton import TritonStatistics

            return TritonStatistics()
        except Exception as error:
            self._complaints.add("triton", "Triton cannot be used, which makes statistics on the GPU slower, not wrong", error)
            return self._eager

    def row_of(self, tensor: Tensor, columns: frozenset[Column], inverse_scale: Tensor | None = None) -> list[float] | None:
        """The row of one CPU tensor as numbers, or None where :meth:`measure` has to be asked. See :meth:`EagerStatistics.row_of`."""
        backend = self._of.get("cpu", self._eager)
        if not tensor.is_cpu or not isinstance(backend, EagerStatistics):
            return None
        with self._lock:
            return backend.row_of(tensor, columns, self.eps, inverse_scale)

    def measure(
        self,
        tensors: Sequence[Tensor],
        columns: frozenset[Column],
        inverse_scale: Tensor | None = None,
        minus: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Rows ``[len(tensors), 8]`` of tensors on one device, on that device. See :meth:`EagerStatistics.measure`."""
        if not tensors:
            return identity(0)
        kind = tensors[0].device.type
        backend = self._of.get(kind)
        if backend is None:
            backend = self._of[kind] = self._triton() if kind == "cuda" and torch.version.hip is None else self._eager
        with self._lock:
            try:
                return backend.measure(tensors, columns, eps=self.eps, inverse_scale=inverse_scale, minus=minus)
            except Exception as error:
                if backend is self._eager:
                    raise
                rows = self._eager.measure(tensors, columns, eps=self.eps, inverse_scale=inverse_scale, minus=minus)
                self._of[kind] = self._eager  # after it has succeeded: else the tensors were to blame
                name = type(backend).__name__
                self._complaints.add(f"backend:{kind}", f"{name} failed and is off: statistics are slower now, not wrong", error)
                return rows
