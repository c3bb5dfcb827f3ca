"""Real process groups for tests: workers that wait for functions to run together, over gloo on the CPU."""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import multiprocessing
import os
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

#: Seconds after which a test counts as hanging; a collective gives up a little earlier.
LIMIT = 90.0
_PATIENCE = 5.0
#: Of torch 2.6, within its own FSDP2.
_NO_FSDP2_ON_CPU = "'Stream' object has no attribute 'record_event'"
_groups: dict[int, Group] = {}


def on_ranks(count: int, function: Callable[..., Any], *args: Any, limit: float = LIMIT) -> list[Any]:
    """What ``function(rank, *args)`` returns on each of ``count`` ranks; it must be a function of a module, for it is pickled.

    Raises:
        AssertionError: it raised on some rank, or hangs.
    """
    group = _groups.get(count)
    if group is None or not group.alive:
        group = _groups[count] = Group(count)
    try:
        return group.run(function, args, limit)
    except AssertionError as error:
        if _NO_FSDP2_ON_CPU in str(error):
            pytest.skip("FSDP2 of this torch does not run on a CPU")
        raise


@contextlib.contextmanager
def impatient(seconds: float = 1.0) -> Iterator[None]:
    """Wait no longer than this for other ranks."""
    from torch_gradmon.step import exchange

    before, exchange.PATIENCE = exchange.PATIENCE, seconds
    try:
        yield
    finally:
        exchange.PATIENCE = before


def refusals(attempts: Iterable[Callable[[], object]]) -> list[str]:
    """Type and text of the error of each attempt; empty for one that succeeds."""
    messages = []
    for attempt in attempts:
        try:
            attempt()
            messages.append("")
        except (TypeError, ValueError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


class Group:
    """So many processes in one process group; they are used by many tests, since each takes seconds to start."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("forkserver")  # which imports once what every rank needs
        context.set_forkserver_preload(["torch._dynamo", "tests.rank_runs"])  # the first optimizer imports the former
        self._directory = tempfile.TemporaryDirectory()
        store = Path(self._directory.name) / "store"
        pipes = [context.Pipe() for _ in range(count)]
        self._pipes = [ours for ours, _ in pipes]
        self._workers = [
            context.Process(target=_work, args=(rank, count, str(store), theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for worker in self._workers:
            worker.start()
        for _, theirs in pipes:
            theirs.close()
        self.alive = True
        atexit.register(self.kill)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], limit: float) -> list[Any]:
        """Run it on each rank."""
        for pipe in self._pipes:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        until = time.monotonic() + limit
        silent = dict(zip(self._pipes, range(len(self._pipes)), strict=True))
        while silent and (ready := wait(silent, max(0.0, until - time.monotonic()))):
            for pipe in ready:
                rank = silent.pop(pipe)
                good, answer = _received(pipe)
                (results if good else failures)[rank] = answer
                if not good:  # the others may wait for this one
                    until = min(until, time.monotonic() + _PATIENCE)
        if failures or silent:
            self.kill()
            told = [f"rank {rank}:\n{text}" for rank, text in failures.items()]
            raise AssertionError("\n".join([*told, f"no answer from ranks {sorted(silent.values())}"] if silent else told))
        return [results[rank] for rank in range(len(self._pipes))]

    def kill(self) -> None:
        """End the processes, and close what leads to them: some hundred groups that failed would use up all descriptors."""
        atexit.unregister(self.kill)
        self.alive = False
        for worker in self._workers:
            if worker.is_alive():
                worker.kill()
        for worker in self._workers:
            worker.join()
            worker.close()
        for pipe in self._pipes:
            pipe.close()
        self._directory.cleanup()


def _received(pipe: Connection) -> tuple[bool, Any]:
    try:
        good, answer = pipe.recv()
    except (EOFError, OSError):
        return False, "the process has ended"
    return good, answer


class _CountedFrom(Counter[Any]):
    def __init__(self, start: int) -> None:
        super().__init__()
        self._start = start

    def __missing__(self, key: object) -> int:
        return self._start


def _work(rank: int, count: int, store: str, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from torch_gradmon.step import exchange

    torch.set_num_threads(1)
    gc.freeze()  # what was imported before the fork stays out of collections, and in pages that are shared
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=LIMIT - 10)
    )
    for number in itertools.count():
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        # each function is a job of its own: a monitor that an earlier one left on some ranks only is none of its business
        exchange._made = _CountedFrom(1000 * number)
        try:
            pipe.send((True, function(rank, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
