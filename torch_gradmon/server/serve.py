"""The server: answers requests with pages, their data, and streams of new steps. Nothing can be changed through it."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, quote, urlsplit

from ..analysis.report.page import as_json
from . import PORT, pages, streams
from .access import Access
from .board import RunBoard

_HTML, _JSON = "text/html; charset=utf-8", "application/json"
#: Smaller answers are not worth packing.
_PACKED = 2000
#: What a browser must not do with any answer.
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class _Refused(Exception):
    """An answer without content."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    """Answers one request at a time; the server has a thread for each connection. Runs are found by name in the list that the server made:
    no part of a request is ever used as a path.
    """

    protocol_version = "HTTP/1.1"
    server_version = "gradmon"
    sys_version = ""
    #: Seconds that a connection may be idle, and that a page may not read.
    timeout = 60
    _query: Mapping[str, list[str]]

    def do_GET(self) -> None:
        """Answer, whatever happens on the way."""
        try:
            self._answer()
        except _Refused as refusal:
            self._refuse(refusal.status, str(refusal))
        except (ConnectionError, TimeoutError):  # the page was closed
            self.close_connection = True
        except Exception as error:  # a run that is removed, or another kind of file, just now
            with contextlib.suppress(OSError):
                self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, " ".join(str(error).split()))

    do_HEAD = do_GET

    @property
    def _gradmon(self) -> Server:
        return cast(Server, self.server)

    def _answer(self) -> None:
        asked = urlsplit(self.path)
        self._query = parse_qs(asked.query)
        access = self._gradmon.access
        if not access.names_this_machine(self.headers.get("Host", "")):
            raise _Refused(HTTPStatus.FORBIDDEN, "this server is called localhost or 127.0.0.1")
        if not access.has_token(self._query, self.headers.get("Cookie", ""), self._gradmon.cookie):
            raise _Refused(HTTPStatus.UNAUTHORIZED, "open the address that gradmon serve has printed: it holds the token")
        routes: dict[str, Callable[[], None]] = {
            "/": lambda: self._send(pages.all_runs(self._gradmon.root), _HTML),
            "/run": lambda: self._send(pages.one_run(*self._run("name")), _HTML),
            "/both": self._both,
            "/content.json": self._content,
            "/runs.json": lambda: self._send(json.dumps([card.to_dict() for card in self._gradmon.board.cards()]), _JSON),
            "/events": self._events,
        }
        if asked.path not in routes:
            raise _Refused(HTTPStatus.NOT_FOUND, "there is no such page")
        routes[asked.path]()

    def _run(self, key: str) -> tuple[Path, str]:
        name = (self._query.get(key) or [""])[0]
        path = self._gradmon.board.path(name)
        if path is None:
            raise _Refused(HTTPStatus.NOT_FOUND, "there is no such run")
        return path, name

    def _both(self) -> None:
        (first, one), (second, other) = self._run("first"), self._run("second")
        if one == other:
            raise _Refused(HTTPStatus.BAD_REQUEST, "choose two runs")
        self._send(pages.two_runs((first, second), (one, other)), _HTML)

    def _content(self) -> None:
        content = pages.content_of(*self._run("run"))
        if content is None:
            raise _Refused(HTTPStatus.NOT_FOUND, "the run has no step yet")
        self._send(as_json(content), _JSON)

    def _events(self) -> None:
        board = self._gradmon.board
        events = streams.of_run(board, self._run("run")[1]) if "run" in self._query else streams.of_all(board)
        self.send_response(HTTPStatus.OK)
        self._send_headers("text/event-stream", None)
        self.close_connection = True
        if self.command != "HEAD":
            self._stream(streams.written(events, lambda data: json.dumps(data, allow_nan=False)))

    def _stream(self, lines: Iterator[bytes]) -> None:
        for line in lines:
            if self._gradmon.is_closing:
                return
            self.wfile.write(line)
            self.wfile.flush()

    def _send(self, text: str, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        body, packs = text.encode(), "gzip" in self.headers.get("Accept-Encoding", "") and len(text) > _PACKED
        if packs:
            body = gzip.compress(body, 1)
        self.send_response(status)
        if packs:
            self.send_header("Content-Encoding", "gzip")
        self._send_headers(kind, len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_headers(self, kind: str, length: int | None) -> None:
        self.send_header("Content-Type", kind)
        if length is None:
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(length))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        token = self._gradmon.access.token
        if token is not None and "token" in self._query:
            self.send_header("Set-Cookie", f"{self._gradmon.cookie}={token}; HttpOnly; SameSite=Strict; Path=/")
        self.end_headers()

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._query = {}
        self._send(f"{why}\n", "text/plain; charset=utf-8", status)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is for the address."""


class Server(ThreadingHTTPServer):
    """Serves the runs below a directory.

    Args:
        root: the directory, or one run.
        host: the address to bind to.
        port: 0 for any free one.
        token: that requests need; by default none on this machine, and a new one elsewhere.

    Attributes:
        root: as given.
        board: what is known of the runs.
        access: who may read.
        is_closing: whether streams have to end.

    Raises:
        FileNotFoundError: there is no such directory.
        ValueError: the token has signs that an address cannot have.
        OSError: the port is taken.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, root: str | os.PathLike[str], host: str = "127.0.0.1", port: int = PORT, token: str | None = None) -> None:
        self.root, self.board, self.access, self.is_closing = root, RunBoard(root), Access(host, token), False
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    @property
    def cookie(self) -> str:
        """The name of the cookie with the token; cookies do not differ by port."""
        return f"gradmon_token_{self.server_address[1]}"

    @property
    def address(self) -> str:
        """What a browser opens."""
        host, port = self.server_address[:2]
        name = f"[{host!s}]" if self.address_family == socket.AF_INET6 else str(host)
        return f"http://{name}:{port}/" + (f"?token={quote(self.access.token)}" if self.access.token is not None else "")

    def server_close(self) -> None:
        """End the streams and the thread of diagnoses too."""
        self.is_closing = True
        super().server_close()
        self.board.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a browser that leaves is no error."""
