"""One forward of the model under the refined coordinate check: the running calls, and runs of their counterparts."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..modules.pass_tracker import PassTracker
from ..modules.structure import tensors_of
from ..reference.source import ReferencePass, ReplayedForward, first_of
from .terms import CheckTerms


class _Frame:
    """A running call, of the root or of a module.

    Attributes:
        run: of the reference or of the module's counterpart on the inputs of this call; None if none was needed.
        calls: number of calls of each module in it so far.
        moved: the counterpart's outputs, by path.
    """

    def __init__(self, name: str, run: ReplayedForward | None, start: Mapping[str, Tensor]) -> None:
        self.name, self.run, self.start = name, run, start
        self.calls: Counter[str] = Counter()
        self.moved: Mapping[str, Tensor] = {}

    def start_run(self) -> ReplayedForward:
        """Start a run of the counterpart."""
        self.run = ReplayedForward()
        return self.run

    def set_moved(self, outputs: Mapping[str, Tensor]) -> None:
        """Keep the counterpart's outputs."""
        self.moved = outputs


class ForwardCheck:
    """Runs the counterparts of called modules, and measures the terms of each call.

    Args:
        root: the watched model.
        reference: the module to compare with.
        terms: measures.
        passes: paused while a counterpart runs.

    Attributes:
        parts: modules of the reference by name.
    """

    def __init__(self, root: nn.Module, reference: ReferencePass, terms: CheckTerms, passes: PassTracker) -> None:
        self._root, self._reference, self._terms, self._passes = root, reference, terms, passes
        self.parts = reference.parts()
        self._frames: list[_Frame] = []
        self._run: ReplayedForward | None = None  # the running one
        self._thread = threading.get_ident()

    def start(self, name: str, run: ReplayedForward) -> None:
        """Check modules from now on; ``run`` is that of the whole reference."""
        self._frames = [_Frame(name, run, {})]

    @contextlib.contextmanager
    def noting(self, run: ReplayedForward) -> Iterator[None]:
        """Record calls of the reference's parts in ``run``."""
        self._run = run
        try:
            yield
        finally:
            self._run = None

    @property
    def is_checking(self) -> bool:
        """Whether a call now is one of the model. Not in runs of the reference or replicas of DataParallel."""
        return self._run is None and len(self._frames) > 0 and threading.get_ident() == self._thread

    def part_called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A part of the reference is called."""
        if self._run is not None and threading.get_ident() == self._thread:
            self._run.called(name, args, kwargs)

    def part_returned(self, name: str, output: Any) -> None:
        """A part of the reference has returned."""
        if self._run is not None and threading.get_ident() == self._thread:
            self._run.returned(name, output)

    def called(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs before the module works in place or draws random numbers."""
        numbers = [frame.calls[name] for frame in self._frames]
        root = self._frames[0].run
        assert root is not None
        outcome, part = root.outcome(name, numbers[0]), self.parts.get(name)
        frame = _Frame(name, None, {} if outcome is None else outcome.outputs or {})
        around = list(zip(self._frames, numbers, strict=True))
        for each in self._frames:
            each.calls[name] += 1
        self._frames.append(frame)
        if self._passes.paused:
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self._terms.set_absent(name, "inside a torch.func transform")
        elif part is None or outcome is None:
            self._terms.set_absent(name, "the reference module has no such module, or called it less often")
        else:
            try:  # before metric functions, which may draw random numbers
                frame.set_moved(self._moved(frame, around, part, module, args, kwargs))
            finally:
                self._terms.of_inputs(name, module, dict(first_of(args, kwargs)), outcome.first)

    def _moved(
        self,
        frame: _Frame,
        around: list[tuple[_Frame, int]],
        part: nn.Module,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Mapping[str, Tensor]:
        """f(x_t; W_0): from an enclosing run with the same inputs, innermost first, or from a run of its own."""
        for outer, number in reversed(around):
            known = None if outer.run is None else outer.run.outputs_for(frame.name, number, args, kwargs)
            if known is not None:
                return known
        run = frame.start_run()
        with self._passes.pause(), self.noting(run):  # model and reference may share modules
            return self._reference.run_part(part, module, self._root, args, kwargs, run.note)

    def returned(self, name: str, module: nn.Module, output: Any) -> None:
        """A module has returned."""
        while len(self._frames) > 1:  # inner calls that did not return have raised
            frame = self._frames.pop()
            if frame.name == name:
                if frame.moved and not self._passes.paused:
                    now = dict(tensors_of(output, ""))
                    self._terms.of_outputs(name, module, self.parts[name], now, frame.moved, frame.start)
                return
