"""What clients of ``gradmon serve`` cost the training that they look at: ``python -m benchmarks.clients``."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .machine import machine
from .report import write_section

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "clients.json"
_SERVE = "from torch_gradmon.cli.main import main; raise SystemExit(main())"


def asked(port: int, path: str) -> socket.socket:
    """A connection that has asked for a page."""
    connection = socket.create_connection(("127.0.0.1", port), 30)
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    connection.setblocking(False)
    return connection


@contextlib.contextmanager
def watching(port: int, clients: int) -> Iterator[None]:
    """So many clients: half of them look at the list of runs, half at the run. What they get is dropped, in one thread."""
    is_over = threading.Event()
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for number in range(clients):
            connection = stack.enter_context(asked(port, "/events?run=run" if number % 2 else "/events"))
            selector.register(connection, selectors.EVENT_READ)

        def drop() -> None:
            while not is_over.is_set():
                for key, _ in selector.select(0.1):
                    with contextlib.suppress(OSError):
                        key.fileobj.recv(1 << 20)  # type: ignore[union-attr]

        thread = threading.Thread(target=drop, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def written(run: Path) -> int:
    """Bytes of the run, which are in proportion to its steps."""
    return sum(path.stat().st_size for path in run.iterdir())


def measured(clients: int, pairs: int, seconds: float) -> dict[str, Any]:
    """One training, alternately alone and with clients."""
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        run = Path(place) / "run"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}

        def started(*words: str, **options: Any) -> subprocess.Popen[str]:
            process = subprocess.Popen([sys.executable, *words], env=environment, cwd=ROOT, text=True, **options)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        started("-W", "ignore", "-m", "tests.live_training", str(run), "1000000000", "-1", "0", stderr=subprocess.DEVNULL)
        while not (run.is_dir() and len(list(run.iterdir())) == 2 and written(run) > 1_000_000):
            time.sleep(0.1)
        server = started("-c", _SERVE, "serve", place, "--port", "0", "--no-token", stdout=subprocess.PIPE)
        assert server.stdout is not None
        port = int(server.stdout.readline().strip().strip("/").rpartition(":")[2])
        speeds: dict[int, list[float]] = {0: [], clients: []}
        for pair in range(pairs):
            for number in (0, clients) if pair % 2 else (clients, 0):
                with watching(port, number) if number else contextlib.nullcontext():
                    time.sleep(0.5)
                    before, begin = written(run), time.perf_counter()
                    time.sleep(seconds)
                    speeds[number].append((written(run) - before) / (time.perf_counter() - begin))
        begin = time.perf_counter()
        with contextlib.ExitStack() as many:
            connections = [many.enter_context(asked(port, "/")) for _ in range(300)]
            opening = time.perf_counter() - begin
            for connection in connections:
                connection.settimeout(60)
                assert connection.recv(12) == b"HTTP/1.1 200"
            answering = time.perf_counter() - begin
    ratios = [with_them / alone for alone, with_them in zip(speeds[0], speeds[clients], strict=True)]
    return {"clients": clients, "ratios": ratios, "seconds_to_open_300": opening, "seconds_to_answer_300": answering}


def markdown(result: dict[str, Any]) -> str:
    """The section of the documentation."""
    found, ratios = result["machine"], sorted(result["ratios"])
    return (
        f"With {result['clients']} open pages the training makes {statistics.median(ratios):.3f} times as many steps as without "
        f"({ratios[0]:.3f} to {ratios[-1]:.3f} in {len(ratios)} pairs of one run). 300 connections open in "
        f"{result['seconds_to_open_300']:.2f} s, and {result['seconds_to_answer_300']:.2f} s after the first all have their answer."
        f"\n\n{found['processor']} ({found['cores']} cores), the training, the server and the "
        f"clients on the same machine; {result['date']}."
    )


def main() -> None:
    """Measure, print the sentence and keep the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients", description=__doc__)
    parser.add_argument("--pairs", type=int, default=12, help="of a phase alone and one with clients")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a phase")
    parser.add_argument("--quick", action="store_true", help="one short pair, nothing kept")
    arguments = parser.parse_args()
    found = measured(10, 1, 0.5) if arguments.quick else measured(100, arguments.pairs, arguments.seconds)
    result = {"machine": machine(), "date": datetime.date.today().isoformat(), **found}
    print(markdown(result))
    if not arguments.quick:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        write_section("clients", markdown(result))


if __name__ == "__main__":
    main()
