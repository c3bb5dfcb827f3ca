"""Alerts: to webhooks that take, fail, hang and refuse, and never in the way of the training."""

from __future__ import annotations

import gc
import io
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_gradmon as gradmon
from tests.live_training import LAYER, train
from tests.receivers import receiver
from tests.stored_runs import changed, timed
from torch_gradmon.analysis.many_runs import RunCard
from torch_gradmon.analysis.run import load_run
from torch_gradmon.core.loop_mistakes import LoopFinding
from torch_gradmon.core.records import SpikeEvent
from torch_gradmon.server import board as board_module
from torch_gradmon.server.board import Alarms, RunAlarms, RunBoard
from torch_gradmon.sinks import alerts
from torch_gradmon.sinks.alerts import Alert, AlertSink, Messenger, post


def until(found: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.01)


def trained(*targets: Any, steps: int = 60, **options: Any) -> list[Tensor]:
    """Parameters after a training in which one batch is bad; ``targets`` are alerted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    monitor = gradmon.watch(model, optimizer, on_spike=None, **options)
    for target in targets:
        monitor.add_sink(gradmon.sinks.AlertSink(target))
    for step in range(steps):
        x = torch.randn(32, 8) * (1000 if step == 40 else 1)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    monitor.detach()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_spike_calls_a_webhook(tmp_path: Path) -> None:
    with receiver() as hook:
        trained(hook.address, run_dir=tmp_path / "run")
        until(lambda: hook.got)
    (alert,) = (each for each in hook.got if each["kind"] == "spike")
    assert (alert["run"], alert["step"], alert["what"]) == (str(tmp_path / "run"), 40, "grad_norm")
    assert alert["text"].startswith(f"{tmp_path / 'run'}: step 40: grad_norm = ")


def test_a_spike_calls_a_function_in_a_thread_of_its_own() -> None:
    got: list[tuple[Alert, str]] = []
    trained(lambda alert: got.append((alert, threading.current_thread().name)))
    assert [(alert.kind, alert.step, name) for alert, name in got if alert.kind == "spike"] == [
        ("spike", 40, "torch_gradmon alerts")
    ]


@pytest.mark.filterwarnings("ignore:torch_gradmon")
def test_a_finding_calls_once() -> None:
    got: list[Alert] = []
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    monitor = gradmon.watch(model, optimizer)
    monitor.add_sink(gradmon.sinks.AlertSink(got.append, on="finding"))
    for _ in range(60):  # gradients are never cleared
        model(torch.randn(32, 8)).square().mean().backward()
        optimizer.step()
    monitor.detach()
    assert [(alert.kind, alert.what) for alert in got] == [("finding", "missing-zero-grad")]
    assert got[0].text.startswith(f"missing-zero-grad, first in step {got[0].step}. Gradients are not cleared")
    assert got[0].text.endswith("before the first backward pass.")


@pytest.mark.thorough
def test_training_is_the_same_with_alerts_that_fail_hang_and_refuse() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        refused = f"http://127.0.0.1:{free.getsockname()[1]}/"

    def fails(alert: Alert) -> None:
        raise ValueError("nobody is there")

    plain = trained()
    with receiver(failures=1000) as broken, receiver(hangs=True) as hanging:
        begin = time.perf_counter()
        found = trained(broken.address, hanging.address, refused, fails)
        assert hanging.requests <= 1
        hanging.release.set()
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert time.perf_counter() - begin < 60  # ten seconds at the end for each at most


def test_the_training_thread_never_waits_for_a_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that can wait is called on it between the first step and the end: no socket is opened, no thread joined."""
    here, waits = threading.current_thread(), list[str]()
    opened, joined = socket.socket.connect, threading.Thread.join

    def connect(self: socket.socket, address: Any) -> None:
        if threading.current_thread() is here:
            waits.append("connect")
        opened(self, address)

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        if threading.current_thread() is here:
            waits.append("join")
        joined(self, timeout)

    with receiver(hangs=True) as hanging:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        monitor = gradmon.watch(model, optimizer, on_spike=None)
        monitor.add_sink(gradmon.sinks.AlertSink(hanging.address))
        monkeypatch.setattr(socket.socket, "connect", connect)
        monkeypatch.setattr(threading.Thread, "join", join)
        for step in range(60):
            optimizer.zero_grad()
            (model(torch.randn(16, 4)) * (1e4 if step == 40 else 1)).square().mean().backward()
            optimizer.step()
        until(lambda: hanging.requests)
        assert waits == []
        hanging.release.set()
        monitor.detach()


def test_a_receiver_that_comes_back_gets_what_it_missed() -> None:
    with receiver(failures=3) as hook:
        messenger = Messenger(hook.address, pause=0.01)
        messenger.send(Alert("spike", "a"))
        until(lambda: hook.got)
        messenger.close()
    assert (hook.requests, [alert["text"] for alert in hook.got], messenger.lost) == (4, ["a"], 0)


def test_what_is_given_up_is_counted() -> None:
    with receiver(failures=1000) as hook:
        messenger = Messenger(hook.address, pause=0.01)
        messenger.send(Alert("spike", "a"))
        until(lambda: messenger.lost)
        messenger.close()
    assert (hook.requests, messenger.lost) == (alerts.ATTEMPTS, 1)
    blocked = threading.Event()
    messenger = Messenger(lambda alert: blocked.wait(20))
    for _ in range(120):
        messenger.send(Alert("spike", "a"))
    assert messenger.lost >= 19  # a hundred wait, and one is under way
    blocked.set()
    messenger.close()


def test_the_end_of_the_training_waits_no_longer_than_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[float | None] = []
    with receiver(hangs=True) as hook:
        messenger = Messenger(hook.address)
        messenger.send(Alert("spike", "a"))
        until(lambda: hook.requests)
        monkeypatch.setattr(threading.Thread, "join", lambda self, timeout=None: joined.append(timeout))
        messenger.close()
        assert joined == [10.0]


def test_slack_gets_the_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[Any] = []

    def opened(self: urllib.request.OpenerDirector, request: urllib.request.Request, timeout: float) -> io.BytesIO:
        assert isinstance(request.data, bytes)
        bodies.append(json.loads(request.data))
        return io.BytesIO()

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", opened)
    for url in ("https://hooks.slack.com/services/a", "https://notslack.com/a"):
        post(url, Alert("spike", "words", step=3))
    assert bodies[0] == {"text": "words"}
    assert bodies[1] == {"kind": "spike", "text": "words", "run": "", "step": 3, "what": "", "where": ""}


def test_a_signal_calls_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Alert] = []
    now = [0.0]
    monkeypatch.setattr(alerts.time, "monotonic", lambda: now[0])
    sink = AlertSink(got.append)
    sink.connect("r", list)
    for step, seconds in enumerate((0.0, 1.0, 30.0, 61.0)):
        now[0] = seconds
        sink.log_spike(SpikeEvent(step, "grad_norm", 1.0, 9.0, 5.0, "large", where="a.weight (9 times)"), f"step {step}")
    for step in (4, 5, 6):
        sink.log_spike(
            SpikeEvent(step, "loss", 1.0, 9.0, 5.0, "large", where="all 3 layers rose together (9 times)"), f"step {step}"
        )
    sink.close()  # the last one that was withheld comes at the end
    assert [alert.text for alert in got] == [
        "r: step 0",
        "r: step 3 (and 2 more before)",
        "r: step 4",
        "r: step 6 (and 1 more before)",
    ]
    assert [alert.where for alert in got] == ["a.weight", "a.weight", "", ""]


def test_findings_come_once_for_each_rule() -> None:
    got: list[Alert] = []
    found: list[LoopFinding] = []
    sink = AlertSink(got.append, on=["finding"])
    sink.connect("", lambda: found)
    sink.log({}, 0)
    found.append(LoopFinding("unheard-of", 3, 3, 1, ("a", "b")))
    for step in (1, 2):
        sink.log({}, step)
    sink.log_spike(SpikeEvent(4, "loss", 1.0, 9.0, 5.0, "large"), "step 4")
    sink.close()
    assert [(alert.text, alert.what, alert.where, alert.step) for alert in got] == [
        ("unheard-of in a, first in step 3", "unheard-of", "a", 3)
    ]


def test_wrong_targets_are_refused_before_anything_changes() -> None:
    model = nn.Linear(2, 2)
    monitor = gradmon.watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"'ftp://example\.org/'"):
        monitor.add_sink(gradmon.sinks.AlertSink("ftp://example.org/"))
    with pytest.raises(ValueError, match="'hook'"):
        monitor.add_sink(gradmon.sinks.AlertSink("hook"))
    with pytest.raises(TypeError, match="webhook or to a function"):
        monitor.add_sink(gradmon.sinks.AlertSink(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gradmon serve DIRECTORY --alert URL"):
        monitor.add_sink(gradmon.sinks.AlertSink(print, on="stalled"))
    with pytest.raises(ValueError, match="'spikes'"):
        monitor.add_sink(gradmon.sinks.AlertSink(print, on="spikes"))
    with pytest.raises(ValueError, match=r"got \(\)"):
        monitor.add_sink(gradmon.sinks.AlertSink(print, on=()))


# --- from outside ------------------------------------------------------------------------------------------------------------------


def aged(path: Path, seconds: float) -> None:
    """A run that is not ended, whose last step is so old."""
    with closing(load_run(path)) as run:
        shift = time.time() - seconds - run.record(run.steps[-1]).context["time"]
    timed(path, lambda record: record.time + shift if record.step else record.time)  # it began when it began


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("alarms") / "run"
    train(path, 60, spike=40)
    return path


def test_a_run_has_stalled_after_ten_usual_intervals(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "a")
    assert not RunCard(run).has_stalled  # ended
    for seconds, expected in ((45.0, False), (75.0, True)):  # steps of milliseconds: at least a minute
        aged(tmp_path / "a", seconds)
        assert RunCard(tmp_path / "a").has_stalled is expected
    timed(tmp_path / "a", lambda record: record.step * 10.0)  # a step every ten seconds
    for seconds, expected in ((80.0, False), (130.0, True)):
        aged(tmp_path / "a", seconds)
        assert RunCard(tmp_path / "a").has_stalled is expected


def test_pauses_that_a_run_makes_are_no_stalls(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "a")
    aged(tmp_path / "a", 1.0)
    cases = (((30,), 200.0, True), ((30, 50), 200.0, False), ((30, 50), 550.0, False), ((30, 50), 700.0, True))
    for evaluations, age, expected in cases:
        ends = [step + 300.0 * sum(step >= late for late in evaluations) for step in range(60)]  # five minutes before some
        ended = time.time() - age
        timed(tmp_path / "a", lambda record, ends=ends, ended=ended: ends[record.step] - ends[-1] + ended)
        card = RunCard(tmp_path / "a")
        assert (card.has_stalled, card.state == "silent") == (expected, expected)


@pytest.mark.thorough
def test_alarms_report_what_is_new_and_each_stall_once(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "a")
    aged(tmp_path / "a", 1.0)
    with receiver() as hook:
        board = RunBoard(tmp_path)
        alarms = Alarms(board, hook.address)
        shutil.copytree(run, tmp_path / "b")  # a run with a spike appears
        aged(tmp_path / "a", 100.0)
        until(lambda: len({alert["kind"] for alert in hook.got}) == 2)
        time.sleep(2.5)  # two more looks
        alarms.close()
        board.close()
    assert sorted((alert["kind"], alert["run"], alert["step"]) for alert in hook.got) == [
        ("spike", "b", 40),
        ("stalled", "a", 59),
    ]
    stalled = next(alert for alert in hook.got if alert["kind"] == "stalled")
    assert re.match(r"a: no step for 10\d s since step 59, where one is due every \d", stalled["text"])
    assert next(alert for alert in hook.got if alert["kind"] == "spike")["where"] == LAYER


def test_what_was_there_before_is_no_alert(run: Path) -> None:
    card = RunCard(run)
    old = changed(card, state="silent", usual=1.0, age=1e6, findings=[], is_diagnosed=False)
    alarms = RunAlarms(old)
    found = [("warning", "dead-units", "0")]
    assert list(alarms.new(old)) == []
    assert list(alarms.new(changed(old, findings=found, is_diagnosed=True))) == []  # its first diagnosis
    more = [*found, ("warning", "loss-plateau", "")]
    assert [alert.what for alert in alarms.new(changed(old, findings=more, is_diagnosed=True))] == ["loss-plateau"]
    assert [alert.kind for alert in alarms.new(changed(old, step=100, findings=more, is_diagnosed=True))] == ["stalled"]


def test_a_new_spike_is_named_itself_and_calls_once_a_minute(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(board_module.time, "monotonic", lambda: now[0])
    card = RunCard(run)
    alarms = RunAlarms(card)
    later = changed(card, spikes=2, last_spike="step 58: small", last_spike_step=58, last_spike_where="2.weight")
    assert [(alert.step, alert.where) for alert in alarms.new(later)] == [(58, "2.weight")]
    now[0] += 30
    assert list(alarms.new(changed(later, spikes=4))) == []
    now[0] += 31
    (alert,) = alarms.new(changed(later, spikes=5, last_spike="step 80: large"))
    assert alert.text.endswith("step 80: large (and 2 more before)")


def test_another_run_in_the_same_directory_is_new(run: Path) -> None:
    card = RunCard(run)
    alarms = RunAlarms(card)
    assert list(alarms.new(card)) == []
    assert [alert.kind for alert in alarms.new(changed(card, began=(card.began or 0.0) + 5))] == ["spike"]


def test_a_webhook_that_has_moved_is_an_error() -> None:
    with receiver(moved=True) as hook:
        messenger = Messenger(hook.address, pause=0.001)
        messenger.send(Alert("spike", "a"))
        until(lambda: messenger.lost)
        messenger.close()
    assert (hook.requests, hook.got) == (alerts.ATTEMPTS, [])


def test_a_messenger_works_again_while_an_old_call_hangs() -> None:
    release, got = threading.Event(), list[str]()

    def target(alert: Alert) -> None:
        if alert.text == "first":
            release.wait(60)
        got.append(alert.text)

    messenger = Messenger(target)
    messenger.send(Alert("spike", "first"))
    messenger.close(seconds=0.05)
    messenger.send(Alert("spike", "second"))
    until(lambda: got == ["second"])
    release.set()
    until(lambda: got == ["second", "first"])
    messenger.close()


def test_a_method_of_the_script_does_not_keep_the_model_alive() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = nn.Linear(2, 2)
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.monitor = gradmon.watch(self.model, optimizer)
            self.monitor.add_sink(gradmon.sinks.AlertSink(self.note))

        def note(self, alert: Alert) -> None: ...

    trainer = Trainer()
    alive = weakref.ref(trainer.model)
    trainer.monitor.detach()
    del trainer
    gc.collect()
    assert alive() is None


@pytest.mark.extra
def test_the_command_refuses_a_wrong_address(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torch_gradmon.cli.main import main

    assert main(["serve", str(run), "--port", "0", "--alert", "nowhere"]) == 2
    assert "--alert nowhere: an alert goes to an address" in capsys.readouterr().err


def test_gradmon_live_calls_without_a_terminal_too(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("rich")
    with receiver() as hook:
        program = "import sys; from torch_gradmon.cli.main import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", program, "live", str(tmp_path / "a"), "--wait", "--alert", hook.address]
        following = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert following.stdout is not None
            assert following.stdout.readline() == f"waiting for {tmp_path / 'a'}; Ctrl-C ends it\n"
            shutil.copytree(run, tmp_path / "b")
            aged(tmp_path / "b", 1.0)
            (tmp_path / "b").rename(tmp_path / "a")  # a run that appears later
            assert following.stdout.readline() == f"following {tmp_path / 'a'}; Ctrl-C ends it\n"
            aged(tmp_path / "a", 100.0)
            until(lambda: any(alert["kind"] == "stalled" for alert in hook.got))
            following.send_signal(signal.SIGINT)
            assert following.wait(20) == 0
        finally:
            following.kill()
            following.communicate()
    assert {(alert["kind"], alert["run"]) for alert in hook.got} == {("stalled", "a")}
