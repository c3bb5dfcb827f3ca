"""Requests that no browser sends: the server answers or ends the connection, and goes on."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.live_training import train

for package in ("plotly", "jinja2"):
    pytest.importorskip(package)
from torch_gradmon.server.serve import Server  # noqa: E402

from .test_server import exchange, get, serving  # noqa: E402

pytestmark = pytest.mark.extra
SECRET = b"only the owner may read this"
_LINES = [
    b"GET / HTTP/1.1",
    b"GET /runs.json HTTP/1.1",
    b"GET /run?name=first HTTP/1.1",
    b"GET /content.json?run=first HTTP/1.1",
    b"GET /both?first=first&second=first HTTP/1.1",
    b"HEAD /run?name=first HTTP/1.1",
]
_PATHS = [
    "../private.txt", "..%2fprivate.txt", "%2e%2e/private.txt", "%252e%252e%252fprivate.txt", "/etc/passwd", "//etc/passwd", "\\..\\x",
    "first/gradmon.000001.values", "first\0", "first%00.html", "file:///etc/passwd", "{root}/private.txt", "link", "link/private.txt",
    "first#x", "first;x", "first?x", "*", "~", ".", "..", "", "a" * 5000, "\u202e",
    "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
]  # fmt: skip
_HEADERS = [
    b"Host: evil.example", b"Host: localhost\r\nHost: evil.example", b"Host:", b"Host: localhost@evil.example", b"Cookie: ;=;\xff",
    b"Cookie: gradmon_token_1=" + b"a" * 4000, b"Content-Length: -1", b"Content-Length: 99999999999999", b"Content-Length: x",
    b"Transfer-Encoding: chunked", b"Expect: 100-continue", b"Accept-Encoding: gzip;q=0", b"Range: bytes=0-9999999999", b"Connection: x",
    b"Upgrade: websocket", b": no name", b"no colon", b"X: " + b"y" * 60_000, b"\x00: \x00", b"Sec-Fetch-Site: cross-site",
    b"X-Forwarded-Host: localhost", b"X-Original-URL: /run?name=first",
]  # fmt: skip
_METHODS = [
    b"POST",
    b"PUT",
    b"DELETE",
    b"TRACE",
    b"CONNECT",
    b"OPTIONS",
    b"PATCH",
    b"get",
    b"GET\tX",
    b"",
    b"\x16\x03\x01\x02",
    b"PRI * HTTP/2.0",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("served")
    (place / "private.txt").write_bytes(SECRET)
    train(place / "runs" / "first", 12)
    (place / "outside").mkdir()
    (place / "outside" / "private.txt").write_bytes(SECRET)
    (place / "runs" / "link").symlink_to(place / "outside", target_is_directory=True)
    with serving(place / "runs") as found:
        yield found


def hostile(seed: int, root: Path) -> bytes:
    """A request with some of its parts replaced, cut or repeated."""
    draw = random.Random(seed)
    line, host = draw.choice(_LINES), b"Host: localhost"
    headers = draw.choices(_HEADERS, k=draw.randrange(3))
    kind = draw.randrange(6)
    if kind == 0:
        path = draw.choice(_PATHS).replace("{root}", str(root))
        path = quote(path) if draw.random() < 0.5 else path
        line = (
            b"GET /" + draw.choice(["", "run?name=", "content.json?run=", "events?run="]).encode() + path.encode() + b" HTTP/1.1"
        )
    elif kind == 1:
        line = draw.choice(_METHODS) + line[3:]
    elif kind == 2:
        line = line.replace(
            b"HTTP/1.1", draw.choice([b"HTTP/0.9", b"HTTP/1.0", b"HTTP/2", b"HTTP/1.1.1", b"HTTP/x", b"", b"XTTP/1.1"])
        )
    request = b"\r\n".join([line, *([] if draw.random() < 0.2 else [host]), *headers, b"Connection: close", b"", b""])
    if kind == 3:
        request = request[: draw.randrange(len(request))]
    elif kind == 4:
        changed = bytearray(request)
        for _ in range(draw.randrange(1, 9)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        request = bytes(changed)
    elif kind == 5:
        request = request * draw.randrange(2, 20)
    return request


def test_500_hostile_requests_get_an_answer_and_nothing_else(server: Server) -> None:
    root = Path(server.root)
    before = {path: path.stat().st_mtime_ns for path in root.parent.rglob("*")}
    for seed in range(500):
        request = hostile(seed, root)
        found = exchange(server, request)
        assert SECRET not in found, seed
        assert b"Traceback" not in found, seed
        for status in (part[:3] for part in found.split(b"HTTP/1.1 ")[1:]):
            assert status in (b"200", b"400", b"401", b"403", b"404", b"414", b"431", b"501", b"503", b"505", b"100"), (
                seed,
                status,
            )
    assert [card["name"] for card in json.loads(get(server, "/runs.json")[1])] == ["first"]
    assert {path: path.stat().st_mtime_ns for path in root.parent.rglob("*")} == before


def test_tokens_cannot_be_guessed_and_a_wrong_one_tells_nothing(tmp_path: Path) -> None:
    train(tmp_path / "first", 12)
    with serving(tmp_path, token="secret") as server:
        answers = set()
        draw = random.Random(0)
        for _ in range(100):
            guess = "".join(draw.choices("secrt", k=draw.randrange(8)))
            if guess != "secret":
                status, body, _ = get(server, f"/runs.json?token={guess}")
                answers.add((status, body))
        assert [status for status, _ in answers] == [401]
        assert b"secret" not in next(iter(answers))[1]


def test_connections_that_say_nothing_keep_nobody_waiting(server: Server) -> None:
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for number in range(100):
            connection = stack.enter_context(socket.create_connection(server.server_address[:2], 30))
            connection.sendall(b"GET /run?name=first HTTP/1.1\r\nHost: localhost\r\nX: "[: number % 40])
        assert get(server, "/runs.json")[0] == 200
