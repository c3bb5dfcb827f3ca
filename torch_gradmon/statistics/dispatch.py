"""Choose the fastest backend for each device, and fall back to stock operations."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core.errors import WarningLog, nearest
from ..core.moments import Column, identity
from ..core.torch_modes import has_triton_kernels
from . import cpp
from .eager import EagerStatistics
from .request import DEFAULT_EPS, Request

_known = lru_cache(maxsize=64)(Request)  # the same columns are asked for in each step
_KERNELS = {"auto": None, "build": True, "torch": False}


def kernel_choice() -> bool | None:
    """How statistics of CPU tensors are computed, by ``GRADMON_KERNEL``: ``auto`` (None) by the C++ kernel that came with the package,
    if it has one for this processor; ``build`` (True) compiles one if it has none; ``torch`` (False) by torch's operations.

    Raises:
        ValueError: it is none of these.
    """
    name = os.environ.get("GRADMON_KERNEL", "") or "auto"
    if name not in _KERNELS:
        raise ValueError(f"GRADMON_KERNEL={name!r} in the environment is none of {', '.join(_KERNELS)}{nearest(name, _KERNELS)}")
    return _KERNELS[name]


class Statistics:
    """Measures tensors on any device. ``compiled``: whether a kernel measures CPU tensors: None for the one that came with the package, if
    any; True to compile one now if none came.
    """

    def __init__(self, complaints: WarningLog, eps: float = DEFAULT_EPS, compiled: bool | None = None) -> None:
        self.eps = eps
        self._complaints = complaints
        self._eager = EagerStatistics()
        self.kernel = None if compiled is False else self._cpp(may_compile=bool(compiled))  # of CPU tensors, until it fails
        self._of: dict[str, EagerStatistics] = {"cpu": self.kernel or self._eager}
        self._lock = threading.Lock()  # forward hooks may fire on several threads, which share the scratch memory

    def _cpp(self, may_compile: bool) -> cpp.CppStatistics | None:
        try:
            kernel = cpp.found()[0] or (cpp.compiled() if may_compile else None)
            return None if kernel is None else cpp.CppStatistics(kernel)
        except Exception as error:
            self._complaints.add("compile", "the statistics could not be compiled, which makes them slower, not wrong", error)
            return None

    def _triton(self) -> EagerStatistics:
        try:
            from .triton import TritonStatistics

            return TritonStatistics()
        except Exception as error:
            self._complaints.add("triton", "Triton cannot be used, which makes statistics on the GPU slower, not wrong", error)
            return self._eager

    def inner_products(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
        return self._by_backend(first[0].device, "inner_products", first, second)

    def has_kernel(self, device: torch.device) -> bool:
        """Whether a kernel of its own measures tensors on ``device``, in a few launches however many they are."""
        return self._backend(device) is not self._eager

    def _backend(self, device: torch.device) -> EagerStatistics:
        backend = self._of.get(device.type)
        if backend is None:
            backend = self._of[device.type] = self._triton() if has_triton_kernels(device) else self._eager
        return backend

    def measure(
        self,
        tensors: Sequence[Tensor],
        columns: frozenset[Column],
        inverse_scale: Tensor | None = None,
        minus: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Rows ``[len(tensors), 8]`` of tensors on one device, on that device. See :meth:`EagerStatistics.rows`."""
        if not tensors:
            return identity(0)
        device = tensors[0].device
        request = _known(columns, self.eps) if inverse_scale is None else Request(columns, self.eps, inverse_scale.to(device))
        return self._by_backend(device, "rows", tensors, request, minus)

    def _by_backend(self, device: torch.device, method: str, tensors: Sequence[Tensor], *given: Any) -> Tensor:
        backend = self._of.get(device.type) or self._backend(device)
        with self._lock:
            try:
                found: Tensor = getattr(backend, method)(tensors, *given)
            except Exception as error:
                if backend is self._eager:
                    raise
                found = getattr(self._eager, method)(tensors, *given)
                # they have worked where the backend failed: else the tensors are the cause
                self._of[device.type] = self._eager
                self.kernel = None if backend is self.kernel else self.kernel
                message = f"{type(backend).__name__} failed and is off: statistics are slower now, not wrong"
                self._complaints.add(f"backend:{device.type}", message, error)
            return found
