"""The server of runs: who may read, what is found, and what streams."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from tests.live_training import LAYER, train
from tests.stored_runs import NO_RECORD, VALUES, rewritten
from torch_gradmon.analysis.many_runs import RunCard, differing
from torch_gradmon.analysis.run import diagnose, find_runs, load_run
from torch_gradmon.runs.log import LogReader

for package in ("plotly", "jinja2"):
    pytest.importorskip(package)
from torch_gradmon.server import board as watched_run  # noqa: E402
from torch_gradmon.server import serve  # noqa: E402
from torch_gradmon.server.board import (  # noqa: E402
    RunBoard,
    WatchedRun,
    version,
)
from torch_gradmon.server.serve import (  # noqa: E402
    Access,
    Server,
    is_local,
)

pytestmark = pytest.mark.extra
ODD = "<b>&'\" ü"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    train(place / "first", 60, spike=40)
    train(place / "sweep" / ODD, 30, lr=1e-2)
    (place / "no run").mkdir()
    return place


@contextmanager
def serving(root: Path, **options: Any) -> Iterator[Server]:
    with Server(root, port=0, **{"token": "", **options}) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


def get(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, Any]:
    place = urlsplit(server.address)
    connection = http.client.HTTPConnection(str(place.hostname), place.port or 0, timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read(), answer.headers
    connection.close()
    return found


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    with serving(root) as found:
        yield found


# --- rows of runs ----------------------------------------------------------------------------------------------------------------


def test_a_card_has_what_the_run_has(root: Path) -> None:
    card = RunCard(root / "first")
    with closing(load_run(root / "first")) as run:
        losses = list(run.series("loss").values())
        assert (card.steps, card.step, card.first_loss) == (60, 59, losses[0])
        assert card.loss == sorted(losses[57:])[1]
        assert card.cost is not None
        assert card.seconds == run.record(59).context["time"] - run.record(0).context["time"]
    assert (card.state, card.spikes, card.spike_step, card.not_applied) == ("ended", 1, 40, 0)
    assert LAYER in card.worst_spike
    assert card.spike_where == LAYER
    assert card.losses[0] == (0, pytest.approx(losses[0], rel=1e-3))
    assert len(RunCard(root / "first", points=10).losses) == 11
    assert not card.is_diagnosed
    assert [rule for _, rule, _ in RunCard(root / "first", diagnosis=diagnose(root / "first")).findings] == ["spike"]
    assert json.dumps(card.to_dict(), allow_nan=False)


def test_settings_are_those_of_the_optimizer_and_only_some_differ(root: Path) -> None:
    cards = [RunCard(path) for path in find_runs(root).values()]
    assert differing(cards) == ["lr"]
    assert [card.settings["lr"] for card in cards] == ["0.002", "0.01"]
    assert cards[0].settings["optimizer"] == "AdamW"
    assert cards[0].settings["parameters"] == f"{4 * 72 + 9:,}"


def test_runs_are_found_below_a_directory_but_not_behind_links(root: Path, tmp_path: Path) -> None:
    assert list(find_runs(root)) == ["first", f"sweep/{ODD}"]
    assert list(find_runs(root / "first")) == ["first"]
    (tmp_path / "link").symlink_to(root, target_is_directory=True)
    assert find_runs(tmp_path) == {}
    with pytest.raises(FileNotFoundError, match="no directory"):
        find_runs(tmp_path / "none")


# --- who may read -----------------------------------------------------------------------------------------------------------------


def test_pages_and_data(server: Server, root: Path) -> None:
    status, page, headers = get(server, "/")
    assert (status, headers["Content-Type"], headers["X-Content-Type-Options"]) == (200, "text/html; charset=utf-8", "nosniff")
    assert b"<table" in page
    cards = json.loads(get(server, "/runs.json")[1])
    assert {card["name"] for card in cards} == {"first", f"sweep/{ODD}"}
    status, packed, headers = get(server, "/run?name=first", **{"Accept-Encoding": "gzip"})
    assert (status, headers["Content-Encoding"]) == (200, "gzip")
    assert b'data-run="first"' in gzip.decompress(packed)
    content = json.loads(get(server, "/content.json?run=first")[1])
    assert content["marks"] == [40]
    both = get(server, f"/both?first=first&second={quote(f'sweep/{ODD}')}")
    assert both[0] == 200
    assert b"Where they diverge" in both[1]
    assert get(server, "/both?first=first&second=first")[0] == 400


def test_names_are_escaped(server: Server) -> None:
    page = get(server, f"/run?name={quote(f'sweep/{ODD}')}")[1].decode()
    assert ODD not in page
    assert "<b>&" not in page


@pytest.mark.parametrize(
    "path",
    [
        "/run",
        "/run?name=",
        "/run?name=..%2Ffirst",
        "/run?name=%2Fetc%2Fpasswd",
        "/run?name=no%20run",
        "/content.json?run=../../etc/passwd",
        "/events?run=none",
        "/both?first=first&second=../first",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/first/gradmon.000001.values",
        "/static/page.js",
    ],
)
def test_nothing_but_the_runs_that_were_found_can_be_read(server: Server, path: str) -> None:
    status, body, _ = get(server, path)
    assert status == 404
    assert len(body) < 100


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(server: Server, method: str) -> None:
    assert get(server, "/", method)[0] == 501


def test_a_page_of_another_site_whose_name_leads_here_reads_nothing(server: Server) -> None:
    for host, status in (
        ("evil.example", 403),
        ("evil.example:80", 403),
        ("localhost:1", 200),
        ("127.0.0.1", 200),
        ("[::1]:9", 200),
    ):
        assert get(server, "/", Host=host)[0] == status, host


def test_addresses_of_this_machine() -> None:
    assert all(is_local(name) for name in ("localhost", "127.0.0.1", "127.3.2.1", "::1", "[::1]"))
    assert not any(is_local(name) for name in ("0.0.0.0", "::", "192.168.0.1", "example.org", "", "localhost.example.org"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "::"])
def test_a_token_is_made_anew_for_each_server(host: str) -> None:
    first, second = (Access(host).token for _ in range(2))
    assert first != second
    assert len(first or "") >= 32


def test_only_this_machine_is_served_without_a_token() -> None:
    assert Access("127.0.0.1", "").token is None
    with pytest.raises(ValueError, match="everybody could read at"):
        Access("0.0.0.0", "")


def test_pages_of_other_sites_read_nothing_but_a_link_with_the_token_opens(root: Path) -> None:
    with serving(root, token="secret") as server:
        for path in ("/?token=secret", "/run?name=first&token=secret", "/runs.json?token=secret", "/events?token=secret"):
            assert get(server, path, **{"Sec-Fetch-Site": "cross-site"})[0] == 403
        assert get(server, "/", **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"})[0] == 403
        assert get(server, "/?token=secret", **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"})[0] == 200
        assert get(server, "/?token=other", **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"})[0] == 401
        assert get(server, "/?token=secret", **{"Sec-Fetch-Site": "same-origin"})[0] == 200


def exchange(server: Server, request: bytes, seconds: float = 10.0) -> bytes:
    """All that a connection answers to these bytes, until it ends or says no more."""
    with socket.create_connection(server.server_address[:2], seconds) as connection:
        found = b""
        with contextlib.suppress(OSError):  # the server has ended the connection while the request was sent
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while part := connection.recv(1 << 16):
                found += part
    return found


@pytest.mark.parametrize("length", [b"Content-Length: %d", b"Transfer-Encoding: chunked\r\nX: %d"])
def test_the_body_of_a_request_is_not_the_next_request(server: Server, length: bytes) -> None:
    smuggled = b"GET /runs.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    found = exchange(server, b"GET / HTTP/1.1\r\nHost: localhost\r\n" + length % len(smuggled) + b"\r\n\r\n" + smuggled)
    assert found.startswith(b"HTTP/1.1 400 ")
    assert found.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "request_",
    [
        b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % (b"a" * 70_000),
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 200 + b"\r\n",
        b"nonsense\r\n\r\n",
        b"\r\n",
    ],
)
def test_what_is_no_request_for_a_page_gets_the_safe_headers_too(server: Server, request_: bytes) -> None:
    found = exchange(server, request_)
    if found.startswith(b"HTTP/"):
        assert b"\r\nX-Content-Type-Options: nosniff\r\n" in found
        assert b"\r\nConnection: close\r\n" in found
    assert b"Traceback" not in found


def test_a_request_that_comes_slowly_is_ended(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve._Handler, "timeout", 0.5)
    with serving(root) as server, socket.create_connection(server.server_address[:2], 30) as connection:
        with contextlib.suppress(OSError):
            for _ in range(300):
                connection.sendall(b"G")
                time.sleep(0.1)
                if not server.deadlines:
                    break
        until(lambda: not server.deadlines)
        assert connection.recv(1) == b""


def test_300_connections_are_answered_and_no_more_than_the_limit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_CONNECTIONS", 310)
    with serving(root) as server, contextlib.ExitStack() as stack:
        place = server.server_address[:2]
        kept = [stack.enter_context(socket.create_connection(place, 30)) for _ in range(300)]
        assert get(server, "/runs.json")[0] == 200
        more = [stack.enter_context(socket.create_connection(place, 30)) for _ in range(30)]
        until(lambda: sum(select.select([each], [], [], 0)[0] != [] for each in more) >= 20)  # ended at once
        for connection in kept:
            connection.sendall(b"GET /none HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert all(connection.recv(12) == b"HTTP/1.1 404" for connection in kept)


def test_one_run_that_takes_long_does_not_hold_up_the_others(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        shutil.copytree(root / "first", tmp_path / name)
    monkeypatch.setattr(watched_run, "ROW_SECONDS", 0.5)

    def endless(path: Path, name: str, *args: Any) -> Any:
        while name == "a":
            with closing(LogReader(path / VALUES)) as file:
                list(file.follow())
        return RunCard(path, name, *args)

    monkeypatch.setattr(watched_run, "RunCard", endless)
    with serving(tmp_path) as server:
        assert [run["name"] for run in json.loads(get(server, "/runs.json")[1])] == ["b"]
    assert "the run a cannot be read and is left out" in caplog.text
    assert "reading it takes more than 0.5 s" in caplog.text


def test_each_request_needs_the_token_in_its_address(root: Path) -> None:
    with serving(root, token="secret") as server:
        assert server.address.endswith("/?token=secret")
        for path in ("/", "/runs.json", "/events", "/run?name=first", "/?token=", "/?token=other"):
            status, body, headers = get(server, path, Cookie="token=secret")
            assert status == 401, path
            assert b"secret" not in body
        for path in ("/", "/runs.json", "/run?name=first"):
            status, _, headers = get(server, f"{path}{'&' if '?' in path else '?'}token=secret")
            assert status == 200
            assert "Set-Cookie" not in headers  # browsers would send it to all ports of this machine


def test_a_run_that_a_link_took_the_place_of_is_not_served(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "first", tmp_path / "outside" / "a")
    shutil.copytree(root / "first", tmp_path / "served" / "a")
    with serving(tmp_path / "served") as server:
        assert get(server, "/content.json?run=a")[0] == 200
        shutil.rmtree(tmp_path / "served" / "a")
        (tmp_path / "served" / "a").symlink_to(tmp_path / "outside" / "a", target_is_directory=True)
        assert get(server, "/content.json?run=a")[0] == 404
        assert get(server, "/run?name=a")[0] == 404


# --- what streams -----------------------------------------------------------------------------------------------------------------


def test_a_stream_sends_what_changes_and_only_that(root: Path, tmp_path: Path) -> None:
    place = tmp_path / "runs"
    shutil.copytree(root / "first", place / "a")
    board = RunBoard(place)
    events = serve.of_all(board, look=0.01)
    kind, data = next(events)
    assert kind == "cards"
    assert [card["name"] for card in data["cards"]] == ["a"]
    shutil.copytree(root / "first", place / "b")
    names = []
    while "b" not in names:
        names += [card["name"] for card in next(events)[1]["cards"]]
    assert set(names) == {"a", "b"}  # a once more: with its diagnosis
    shutil.rmtree(place / "b")
    gone: list[str] = []
    while not gone:
        gone += next(events)[1]["gone"]
    assert gone == ["b"]
    board.close()


def test_a_diagnosis_comes_into_the_row(root: Path) -> None:
    board = RunBoard(root / "first")
    for event, data in serve.of_all(board, look=0.01):
        if event and data["cards"][0]["is_diagnosed"]:
            break
    assert data["cards"][0]["findings"][0][:2] == ["warning", "spike"]
    board.close()


def test_the_stream_of_a_run_ends_with_the_run(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "first", tmp_path / "a")
    board = RunBoard(tmp_path)
    events = serve.of_run(board, "a", look=0.01)
    kind, data = next(events)
    assert (kind, data["card"]["step"], data["version"]) == ("card", 59, version(tmp_path / "a"))
    shutil.rmtree(tmp_path / "a")
    shutil.copytree(next(iter(find_runs(root / "sweep").values())), tmp_path / "a")  # another run in the same place
    assert next(events) == ("replaced", {})
    assert list(events) == []
    board.close()


def test_events_are_as_a_browser_reads_them(server: Server) -> None:
    with urllib.request.urlopen(f"{server.address}events?run=first", timeout=30) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        assert answer.readline() == b"event: card\n"
        assert json.loads(answer.readline().removeprefix(b"data: "))["card"]["name"] == "first"
    assert list(serve.written(iter([serve.SIGN, ("a", {"b": 1})]))) == [
        b": alive\n\n",
        b'event: a\ndata: {"b": 1}\n\n',
    ]


def test_a_run_without_a_step_has_a_page_that_waits(root: Path, tmp_path: Path) -> None:
    import torch
    from torch import nn

    import torch_gradmon as gradmon

    model = nn.Linear(2, 2)
    gradmon.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path / "a").detach()
    with serving(tmp_path) as server:
        assert b"No step was recorded so far" in get(server, "/run?name=a")[1]
        assert json.loads(get(server, "/runs.json")[1])[0]["state"] in ("empty", "ended")
        assert get(server, "/content.json?run=a")[0] == 404


def test_a_file_that_is_no_run_is_left_out(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / VALUES).write_bytes(NO_RECORD)
    with serving(tmp_path) as server:
        assert json.loads(get(server, "/runs.json")[1]) == []
        assert get(server, "/run?name=a")[0] == 503
        get(server, "/runs.json")
    assert [record.message.partition(":")[2].partition(":")[0] for record in caplog.records] == [
        " the run a cannot be read and is left out"
    ]  # once


def test_a_run_of_a_later_version_hides_no_other(root: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(root / "first", tmp_path / name)
    rewritten(tmp_path / "a", facts=lambda facts: {**facts, "setup": [{}]})  # findings without what we know of them
    with serving(tmp_path) as server:
        assert {run["name"] for run in json.loads(get(server, "/runs.json")[1])} == {"a", "b"}


def test_a_run_in_the_place_of_another_has_findings_of_its_own(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "first", tmp_path / "a")
    run = WatchedRun("a", tmp_path / "a")
    run.diagnose()
    until(lambda: (card := run.card()) is not None and card.is_diagnosed)
    shutil.rmtree(tmp_path / "a")
    assert run.card() is None
    shutil.copytree(next(iter(find_runs(root / "sweep").values())), tmp_path / "a")
    card = run.card()
    assert card is not None
    assert not card.is_diagnosed


def test_a_row_is_read_by_one_thread_at_a_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, release = list[int](), threading.Event()

    def slow(path: Path, name: str, *args: Any) -> Any:
        if name == "read by five":  # the thread of the server that the other tests share reads rows too
            reads.append(1)
            release.wait(120)
        return RunCard(path, name, *args)

    run = WatchedRun("read by five", root / "first")
    first = run.card()
    monkeypatch.setattr(watched_run, "RunCard", slow)
    monkeypatch.setattr(watched_run, "version", lambda path: "another")
    until(lambda: time.monotonic() > run._due)
    threads = [threading.Thread(target=run.card) for _ in range(5)]
    for thread in threads:
        thread.start()
    until(lambda: len(reads) == 1)
    assert run.card() is first  # the old one, without waiting
    release.set()
    for thread in threads:
        thread.join()
    assert len(reads) == 1


def test_a_board_that_is_closed_while_its_thread_wakes_up_ends(root: Path) -> None:
    class ClosedMeanwhile(threading.Event):
        def clear(self) -> None:
            board._closed = True
            self.set()
            super().clear()

    board = RunBoard(root)
    board._worker, board._asked = ClosedMeanwhile(), time.monotonic() - 60  # no request for a while: it would wait for one
    thread = threading.Thread(target=board._work, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def until(found: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.01)


def test_tokens_that_cannot_stand_in_an_address_are_refused(root: Path) -> None:
    for token in ("my secret", "a;b", "\u00e4", "\u03a9"):
        with pytest.raises(ValueError, match="letters, digits"):
            Access("127.0.0.1", token)
    asked = Message()
    asked["Host"] = "127.0.0.1:8642"
    assert Access("127.0.0.1", "a").refusal(asked, {"token": ["a"]}) is None
    for query in ({}, {"token": ["b"]}):
        assert Access("127.0.0.1", "a").refusal(asked, query)[0] == 401  # type: ignore[index]


def test_the_server_ends_with_its_streams_open(root: Path) -> None:
    with serving(root) as server:
        answer = urllib.request.urlopen(f"{server.address}events", timeout=30)
        answer.readline()
    answer.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(server.address, timeout=5)


def test_the_command(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torch_gradmon.cli.main import main

    assert main(["serve", str(tmp_path / "none")]) == 2
    with serving(root) as server:
        assert main(["serve", str(root), "--port", str(server.server_address[1])]) == 2
    assert "--port 0 takes a free port" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", str(root), "--port", "70000"])


def test_the_command_serves_until_ctrl_c(root: Path) -> None:
    # a shell has SIGINT ignored by what it starts in the background, and so would the command's process
    start = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from torch_gradmon.cli.main import main; raise SystemExit(main())"
    )
    command = [sys.executable, "-c", start, "serve", str(root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        place = process.stdout.readline().split()[-1]
        address = process.stdout.readline().removeprefix("open in a browser: ").strip()
        assert address.startswith(f"{place}?token=")
        with urllib.request.urlopen(address.replace("?", "runs.json?"), timeout=30) as answer:
            assert len(json.load(answer)) == 2
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
