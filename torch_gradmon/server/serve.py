"""The server: answers requests with pages, their data, and streams of new steps. Nothing can be changed through it."""

from __future__ import annotations

import contextlib
import gzip
import hmac
import ipaddress
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from ..analysis.comparison import renamer
from ..analysis.diff import diff_runs
from ..analysis.many_runs import RunCard
from ..analysis.report.page import as_json, comparison_content, content, html, template
from ..analysis.run import read_run
from ..runs.format import version
from . import PORT
from .board import RunBoard

# --- Who may read: requests with the token, which other accounts of this machine do not have either ---

#: Characters of a token, which is part of addresses.
_TOKEN = re.compile(r"[A-Za-z0-9_.~-]+")


def is_local(host: str) -> bool:
    """Whether an address to bind to, or the one in a request, is of this machine alone."""
    name = host.strip("[]")
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Access:
    """Decides about requests. Without a ``token`` a new one is made; an empty one is none, which only an address of this machine may
    have. Raises ValueError for one that is not allowed.
    """

    def __init__(self, host: str, token: str | None = None) -> None:
        if token and not _TOKEN.fullmatch(token):
            raise ValueError(f"a token has letters, digits and the signs _ . ~ - only, got {token!r}")
        self._is_local = is_local(host)
        if token == "" and not self._is_local:
            raise ValueError(f"everybody could read at {host} without a token; leave it out at an address of this machine only")
        self.token = secrets.token_urlsafe(24) if token is None else token or None

    def refusal(self, headers: Message, query: Mapping[str, list[str]]) -> tuple[HTTPStatus, str] | None:
        """The answer to a request that may not read; None if it may."""
        # a link with the token, which another site cannot know, is none of its
        is_link = headers.get("Sec-Fetch-Mode") == "navigate" and "token" in query
        if headers.get("Sec-Fetch-Site") == "cross-site" and not is_link:
            return HTTPStatus.FORBIDDEN, "pages of other sites cannot read here"
        # only the names of this machine, so that no page of another site that has its name resolved to it can read
        host = headers.get("Host", "")
        name = host.rpartition(":")[0] if host.count(":") == 1 or "]:" in host else host
        if self._is_local and not is_local(name):
            return HTTPStatus.FORBIDDEN, "this server is called localhost or 127.0.0.1"
        # no cookie has the token: browsers send cookies of one port to all ports of a machine
        given = query.get("token", [""])[0]
        if self.token is not None and not hmac.compare_digest(given.encode(), self.token.encode()):
            return HTTPStatus.UNAUTHORIZED, "open the address that gradmon serve has printed: it holds the token"
        return None


# --- The pages of the server ---


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _script(name: str) -> str:
    return _text("common.js") + _text(name)


def _page(name: str, script: str, /, **values: str) -> str:
    style = files("torch_gradmon.analysis.report").joinpath("page.css").read_text(encoding="utf-8") + _text("runs.css")
    return template("server", name).render(style=style, script=_script(script), **values)


def content_of(path: Path, name: str) -> dict[str, Any] | None:
    with closing(read_run(path)) as run:
        return content(run, name, lambda: None) if run.steps else None


def one_run(path: Path, name: str) -> str:
    """The report of a run, which goes along with it."""
    shown = version(path)  # before it is read: what is written in between comes with the next version
    found = content_of(path, name)
    if found is None:
        return _page("waiting.html.j2", "page.js", name=name)
    return html(found, run=name, script=_script("page.js"), version=shown)


def two_runs(paths: tuple[Path, Path], names: tuple[str, str]) -> str:
    """The report of two runs on top of each other, as they are now."""
    difference = diff_runs(*paths)
    with closing(read_run(paths[0])) as first, closing(read_run(paths[1])) as second:
        title = f"{names[0]} and {names[1]}"
        found = comparison_content((first, second), names, difference, renamer(None), title, lambda: None)
    return html(found, run="", script=_script("page.js"), version="")


# --- Server-sent events: what is new, as soon as it is written ---

#: Seconds between two looks at a file, and after which a row is sent again: its age has changed, and sending it shows whether the page is
#: still open.
LOOK, ALIVE = 0.3, 10.0
#: A comment, which pages ignore.
SIGN = ("", None)
Event = tuple[str, Any]


def of_run(board: RunBoard, name: str, look: float = LOOK) -> Iterator[Event]:
    """The row of a run whenever it changes, until another run takes its place."""
    path = board.path(name)
    known: Any = None
    began: float | None = None  # of another run in the same directory it is another time
    sent = 0.0
    while path is not None:
        card, now = board.card(name), time.monotonic()
        if card is not None and began is not None and card.began != began:
            yield "replaced", {}
            return
        began = began if card is None else card.began
        fresh = None if card is None else _state(card)
        if fresh != known or now - sent > ALIVE:
            known, sent = fresh, now
            yield ("gone", {}) if card is None else ("card", {"version": version(path), "card": card.to_dict()})
        else:
            time.sleep(look)


def of_all(board: RunBoard, look: float = LOOK) -> Iterator[Event]:
    """The rows that have changed, and the names of runs that are gone; at first all of them, which is marked."""
    known: dict[str, Any] = {}
    sent: float | None = None
    while True:
        cards = {card.name: card for card in board.cards()}
        states = {name: _state(card) for name, card in cards.items()}
        changed = [cards[name].to_dict() for name, state in states.items() if known.get(name) != state]
        gone = [name for name in known if name not in states]
        if changed or gone or sent is None:
            yield "cards", {"cards": changed, "gone": gone, "all": sent is None}
            known, sent = states, time.monotonic()
        elif time.monotonic() - sent > ALIVE:
            sent = time.monotonic()
            yield SIGN
        time.sleep(look)


def _state(card: RunCard) -> Any:
    """What a page has to know at once; the age of the last step is not."""
    return card.step, card.steps, card.state, card.began, card.spikes, card.is_diagnosed, tuple(card.findings), card.loss


def written(events: Iterator[Event]) -> Iterator[bytes]:
    """The events as a browser reads them."""
    for kind, data in events:
        yield b": alive\n\n" if data is None else f"event: {kind}\ndata: {json.dumps(data, allow_nan=False)}\n\n".encode()


# --- The server ---

_HTML, _JSON = "text/html; charset=utf-8", "application/json"
#: Pages that are made at once, and connections.
_PAGES, _CONNECTIONS = os.cpu_count() or 1, 500
#: What a whole run is read for.
_READING = ("/run", "/both", "/content.json")
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
    #: Seconds that a request may take to come, and that a page may not read.
    timeout = 10
    server: Server
    _query: Mapping[str, list[str]]

    def do_GET(self) -> None:
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

    def handle_one_request(self) -> None:
        self.server.deadlines[self.connection] = time.monotonic() + self.timeout
        super().handle_one_request()

    def parse_request(self) -> bool:
        try:
            return super().parse_request()
        finally:
            self.server.deadlines.pop(self.connection, None)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no request for a page, in the same form, and end the connection."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self._refuse(HTTPStatus(code), message or HTTPStatus(code).phrase)

    def _answer(self) -> None:
        asked = urlsplit(self.path)
        self._query = parse_qs(asked.query)
        if self.headers.get("Transfer-Encoding") or self.headers.get("Content-Length", "0").strip() != "0":
            self.close_connection = True  # or what follows would be taken for the next request
            raise _Refused(HTTPStatus.BAD_REQUEST, "a request has no body here")
        if refusal := self.server.access.refusal(self.headers, self._query):
            raise _Refused(*refusal)
        routes: dict[str, Callable[[], tuple[str, str]]] = {
            "/": lambda: (_page("runs.html.j2", "runs.js", root=os.fspath(self.server.root)), _HTML),
            "/run": lambda: (one_run(*self._run("name")), _HTML),
            "/both": self._both,
            "/content.json": self._content,
            "/runs.json": lambda: (json.dumps([card.to_dict() for card in self.server.board.cards()]), _JSON),
        }
        if asked.path == "/events":
            self._events()
        elif asked.path in routes:
            with self.server.making if asked.path in _READING else contextlib.nullcontext():
                made = routes[asked.path]()
            self._send(*made)
        else:
            raise _Refused(HTTPStatus.NOT_FOUND, "there is no such page")

    def _run(self, key: str) -> tuple[Path, str]:
        name = (self._query.get(key) or [""])[0]
        path = self.server.board.path(name)
        if path is None:
            raise _Refused(HTTPStatus.NOT_FOUND, "there is no such run")
        return path, name

    def _both(self) -> tuple[str, str]:
        (first, one), (second, other) = self._run("first"), self._run("second")
        if one == other:
            raise _Refused(HTTPStatus.BAD_REQUEST, "choose two runs")
        return two_runs((first, second), (one, other)), _HTML

    def _content(self) -> tuple[str, str]:
        content = content_of(*self._run("run"))
        if content is None:
            raise _Refused(HTTPStatus.NOT_FOUND, "the run has no step yet")
        return as_json(content), _JSON

    def _events(self) -> None:
        board = self.server.board
        events = of_run(board, self._run("run")[1]) if "run" in self._query else of_all(board)
        self.send_response(HTTPStatus.OK)
        self._send_headers("text/event-stream", None)
        for line in written(events if self.command != "HEAD" else iter(())):
            if self.server.is_closing:
                return
            self.wfile.write(line)
            self.wfile.flush()

    def _send(self, text: str, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        body, packs = text.encode(), len(text) > _PACKED and "gzip" in self.headers.get("Accept-Encoding", "")
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
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(length))
        if self.close_connection:
            self.send_header("Connection", "close")
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._query = {}
        self._send(f"{why}\n", "text/plain; charset=utf-8", status)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is for the address."""


class Server(ThreadingHTTPServer):
    """Serves the runs below a directory, or one run, at ``port``, 0 for any free one; ``token`` as for :class:`Access`."""

    daemon_threads = True
    allow_reuse_address = True
    #: Connections that may wait to be accepted: one more than fit are tried again by their host, a second later.
    request_queue_size = _CONNECTIONS

    def __init__(self, root: str | os.PathLike[str], host: str = "127.0.0.1", port: int = PORT, token: str | None = None) -> None:
        self.access = Access(host, token)
        self.root, self.board = root, RunBoard(root)
        self.is_closing = False  # whether streams have to end
        self.making = threading.BoundedSemaphore(_PAGES)  # held by threads that make pages
        self.deadlines: dict[Any, float] = {}  # when the requests must have been read that are not yet, by connection
        self._free = threading.BoundedSemaphore(_CONNECTIONS)
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        name = f"[{host!s}]" if self.address_family == socket.AF_INET6 else str(host)
        return f"http://{name}:{port}/" + (f"?token={quote(self.access.token)}" if self.access.token is not None else "")

    def service_actions(self) -> None:
        """End connections whose request comes too slowly."""
        now = time.monotonic()
        for connection, until in list(self.deadlines.items()):
            if now > until:
                self.deadlines.pop(connection, None)
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, unless there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.deadlines.pop(request, None)
            self._free.release()

    def has_ended(self, seconds: float) -> bool:
        """Whether no page is being made any more, after a wait of so many seconds at most."""
        until = time.monotonic() + seconds
        return all(self.making.acquire(timeout=max(0.0, until - time.monotonic())) for _ in range(_PAGES))

    def server_close(self) -> None:
        """End the streams and the thread of diagnoses too."""
        self.is_closing = True
        super().server_close()
        self.board.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a browser that leaves is no error."""
