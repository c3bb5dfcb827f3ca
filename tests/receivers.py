"""Webhooks on this machine that take, fail or hang."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver(ThreadingHTTPServer):
    """Keeps what it gets.

    Args:
        failures: how many requests it answers with an error before it takes one.
        hangs: whether it answers none before it is released.
        moved: whether it sends all to another address.
    """

    daemon_threads = True

    def __init__(self, failures: int = 0, hangs: bool = False, moved: bool = False) -> None:
        self.got: list[dict[str, Any]] = []
        self.requests, self.failures, self.moved = 0, failures, moved
        self.release = threading.Event()
        if not hangs:
            self.release.set()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A sender that gave up."""


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests += 1
        self.server.release.wait(60)
        if self.server.moved:
            self.send_response(302)
            self.send_header("Location", self.server.address)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if self.server.requests <= self.server.failures:
            self.send_error(500)
            return
        self.server.got.append(body)
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextmanager
def receiver(**how: Any) -> Iterator[Receiver]:
    """A receiver that runs."""
    with Receiver(**how) as found:
        threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield found
        finally:
            found.release.set()
            found.shutdown()
