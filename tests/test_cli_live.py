"""``gradmon live`` shows a run while another process writes it, whatever becomes of that, and holds up nobody."""

from __future__ import annotations

import errno
import math
import os
import random
import re
import shutil
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import load_run
from torch_gradmon.analysis.run import read_run
from torch_gradmon.cli.main import main
from torch_gradmon.cli.terminal.live import ASCII, BLOCKS, Columns, LiveRun, RunFollower, sparkline
from torch_gradmon.core.keys import GRADIENT_BEFORE_CLIP, SUMMARY, Key
from torch_gradmon.runs.log import BLOCK, LogReader
from torch_gradmon.runs.writer import RunWriter

from . import forked
from .pseudo_terminal import terminal
from .stored_runs import NO_RECORD, VALUES, bytes_read
from .test_run_bulk import _record

pytestmark = pytest.mark.thorough

NAMES = ("[bold]a", "<b>&lt;\x1b[31m", "[/]", "a_very_long_name_" * 6)
_POSIX = pytest.mark.skipif(os.name != "posix", reason="needs a pseudo terminal")

_CHILD = """
    import sys, time, warnings, torch
    from torch import nn
    import torch_gradmon as gradmon
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    path, first, last, pause = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = gradmon.watch(model, optimizer, run_dir=path)
    monitor.load_state_dict({**monitor.state_dict(), "next_step": first})
    for step in range(first, last):
        x = torch.randn(64, 6)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean() * (1e5 if step == 70 else 1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        monitor.log_scalar("loss", loss.detach())
        print(monitor.current_step, flush=True)
        time.sleep(pause)
    monitor.detach()
    print("complaints", dict(monitor.warning_counts()), flush=True)
"""


def _child(path: Path, first: int, last: int, pause: float = 0.0) -> forked.Program:
    return forked.start(textwrap.dedent(_CHILD), path, first, last, pause)


def _wait_for(child: forked.Program, step: int) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        if line.strip() == str(step):
            return
    raise AssertionError(f"it ended before step {step}")


def _assert_same(live: LiveRun, fresh: LiveRun) -> None:
    assert live.records == fresh.records
    assert live.events == fresh.events
    for found, wanted in ((live.suspects(3), fresh.suspects(3)), (live.top_layers(3), fresh.top_layers(3))):
        assert repr(found) == repr(wanted)  # repr: NaN is not equal to itself


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a clip, a spike, a NaN, a skip, and layers whose names do harm."""
    path = tmp_path_factory.mktemp("runs") / "[red]first"
    torch.manual_seed(3)
    model = nn.Sequential()
    for name in NAMES:
        model.add_module(name, nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    is_spoiled = [False]
    weight = model.get_submodule("[/]").weight
    weight.register_hook(lambda gradient: gradient * math.nan if is_spoiled[0] else gradient)
    with pytest.warns(gradmon.GradmonWarning):
        monitor = gradmon.watch(model, optimizer, run_dir=path, on_spike="skip")
        for step in range(100):
            x = torch.randn(64, 6)
            is_spoiled[0] = step == 90
            loss = (model(x) - x).square().mean() * (1e5 if step == 70 else 1)
            optimizer.zero_grad()
            loss.backward()
            monitor.log_scalar("train/loss", loss.detach())
            monitor.clip_grad_norm_(0.1)
            optimizer.step()
        monitor.detach()
    return path


# --- sparklines ------------------------------------------------------------------------------------------------------------------------


def test_columns_hold_each_step_once_and_stay_as_they_are_while_steps_come() -> None:
    for most in (1, 7, 32, 100):
        for stride in (1, 10):
            before: dict[int, set[int]] = {}
            size = 0
            for last in range(1, 400):
                steps = list(range(0, stride * last, stride))
                columns = Columns.of(steps, most)
                assert 1 <= columns.count <= most
                places = [columns.place(step) for step in steps]
                shown = [place for place in places if place is not None]
                assert shown == sorted(shown)
                assert shown[-1] == columns.count - 1
                assert set(shown) == set(range(columns.count)), "a column is empty"
                assert len(steps) - len(shown) <= columns.size / stride
                now = {
                    column + columns.first: {s for s in steps if columns.place(s) == column} for column in range(columns.count)
                }
                if columns.size == size:
                    assert all(now[column] >= known for column, known in before.items() if column in now)
                before, size = now, columns.size
    assert Columns.of([], 10).count == 0
    assert Columns.of([5], 10).largest([5], [2.0]) == [2.0]


def test_a_column_has_its_largest_value_and_what_is_not_finite_before_all() -> None:
    columns = Columns.of(range(8), 4)
    found = columns.largest(range(8), [1.0, 3.0, math.nan, 9.0, 2.0, math.inf, 0.0, -1.0])
    assert repr(found) == "[3.0, nan, nan, 0.0]"
    assert columns.largest([0, 7], [1.0, 2.0]) == [1.0, None, None, 2.0]
    assert columns.marks([1, 6, -5, 99], "^") == "^  ^"


@pytest.mark.parametrize("letters", [BLOCKS, ASCII])
def test_a_spark_is_the_higher_the_larger_its_value(letters: str) -> None:
    for values in ([2.0**n for n in range(8)], [0.0, 1e-30, 1.0], [-3.0, -2.0, 5.0], [0.1, 100.0]):
        drawn = sparkline(values, letters)
        assert len(drawn) == len(values)
        assert [letters.index(letter) for letter in drawn] == sorted(letters.index(letter) for letter in drawn)
        assert (drawn[0], drawn[-1]) == (letters[0], letters[-1])
    assert len(set(sparkline([1.0, 1.001, 0.999], letters))) <= 2, "noise is no news"
    assert sparkline([0.5], letters, (0.0, 1.0)) == letters[4]
    assert sparkline([None, math.nan, -math.inf, 0.0], letters) == f" !!{letters[0]}"
    assert sparkline([], letters) == ""


# --- what is known of a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("window", [5, 600])
def test_whoever_follows_knows_what_a_fresh_reader_knows(seed: int, window: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    store, step, value = RunWriter(tmp_path), 0, 0.0
    store.log(_record(0, 1.0))
    follower = RunFollower(tmp_path, window)
    for _ in range(80):
        value += chance.choice([1, -0.5, 50])
        what = chance.choices(["step", "late", "between", "back", "resume"], [10, 3, 2, 1, 1])[0]
        if what == "step":
            step += chance.choice([1, 10])
            store.log(_record(step, value, events=chance.random() < 0.1))
        elif what == "late":
            store.log(_record(step, value, events=True), update=True)
        elif what == "between":
            store.log(_record(max(0, step - chance.randrange(1, 25)), value), backfill=True)
        elif what == "back":
            step = chance.randrange(0, step + 1)
            store.log(_record(step, value))
        else:
            store.close()
            store = RunWriter(tmp_path)
            step += 1
            store.log(_record(step, value))
        if chance.random() < 0.4:
            follower.refresh()
            assert follower.problem == ""
            fresh = load_run(tmp_path)
            _assert_same(follower.live, LiveRun(fresh._reader, window))
            assert len(follower.live.records) == min(window, len(fresh.steps))
            fresh.close()
    store.close()
    follower.close()


def test_layers_are_those_of_the_largest_spike_of_late_and_those_with_the_largest_share(trained: Path) -> None:
    run = load_run(trained)
    for window, step in ((600, 90), (30, 99)):  # five steps are late, and have no spike
        live = LiveRun(run._reader, window)
        assert repr(live.suspects(3)) == repr((step, run.record(step).suspects[:3]))
        holding = live.top_layers(3)
        for layer in holding:
            series = {
                at: norm for at, norm in run.series(f"{GRADIENT_BEFORE_CLIP}/{layer.name}/norm").items() if at >= 100 - window
            }
            assert list(layer.series.steps) == list(series)
            assert layer.series.finite.values == pytest.approx(
                [norm for norm in series.values() if math.isfinite(norm)], rel=1e-6
            )
            assert layer.usual == next(suspect.usual for suspect in run.record(99).suspects if suspect.name == layer.name)
        assert [layer.share for layer in holding] == sorted([layer.share for layer in holding], reverse=True)
        assert sum(layer.share for layer in live.top_layers(8)) == pytest.approx(1)


def test_what_a_run_tells_of_itself(trained: Path) -> None:
    live = LiveRun(read_run(trained), 600)
    assert live.loss == Key("", "train/loss", "")
    assert live.steps == list(range(100))
    whole = load_run(trained).series("gradmon/grad_norm")
    shown = live.series(Key(SUMMARY, "", "grad_norm"))
    assert shown.steps == tuple(whole)
    assert shown.values == pytest.approx(tuple(whole.values()), nan_ok=True)
    assert set(live.not_applied) == {70, 90}
    assert live.total("steps_skipped") == 2
    assert 0 < live.pace < 1
    assert live.fact("overhead_fraction") > 0
    assert live.fact("nothing") is None


def test_a_look_reads_only_what_is_new(tmp_path: Path) -> None:
    store = RunWriter(tmp_path)
    store.log(_record(0, 1.0))
    with bytes_read() as count:
        live = LiveRun(read_run(tmp_path), 50)
        for step in range(1, 1501):
            store.log(_record(step, 1.0))
            if step in (199, 1499):
                live.refresh()
                count.clear()
            if step in (200, 1500):
                live.refresh()
                assert live.steps == list(range(step - 49, step + 1))
                assert count.total() < 4 * BLOCK  # of one step, from the beginning of its blocks on
    store.close()


# --- other processes --------------------------------------------------------------------------------------------------------------------


def test_a_run_is_followed_while_another_process_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    follower, seen = RunFollower(path, 40), []
    follower.refresh()
    assert follower.live is None
    assert "there is no run in" in follower.problem
    child = _child(path, 0, 150, pause=0.002)
    while child.poll(0.005) is None:
        follower.refresh()
        if follower.live is not None and follower.live.last is not None:
            seen.append(follower.live.last.step)
            assert follower.problem == ""
            assert follower.live.steps == list(range(max(0, seen[-1] - 39), seen[-1] + 1))
    with child:
        assert child.stdout.read().splitlines()[-1] == "complaints {}", "the writer was held up"
    follower.refresh()
    assert follower.live.last.step == 149
    assert seen == sorted(seen)
    assert len(set(seen)) > 5, "it was not followed while it went on"
    _assert_same(follower.live, LiveRun(read_run(path), 40))
    follower.close()


def test_a_killed_run_is_followed_into_its_next_life(tmp_path: Path) -> None:
    path = tmp_path / "run"
    follower = RunFollower(path, 30)
    with _child(path, 0, 10_000, pause=0.005) as child:
        _wait_for(child, 60)
        follower.refresh()
    assert child.returncode == -signal.SIGKILL
    follower.refresh()
    died_at = follower.live.last.step
    assert died_at >= 60
    follower.refresh()
    assert (follower.live.last.step, follower.problem) == (died_at, "")
    with _child(path, 40, 60) as child:  # from a checkpoint
        assert child.wait() == 0
    follower.refresh()
    assert follower.live.last.step == 59
    assert follower.live.run.segments == [(0, 39), (40, 59)]
    assert follower.live.steps == list(range(30, 60))
    _assert_same(follower.live, LiveRun(read_run(path), 30))
    follower.close()


def test_a_run_that_is_removed_and_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "run"
    store = RunWriter(path)
    for step in range(5):
        store.log(_record(step, 1.0))
    follower = RunFollower(path, 30)
    follower.refresh()
    assert follower.live.steps == list(range(5))
    store.close()
    shutil.rmtree(path)
    follower.refresh()
    assert "any more" in follower.problem
    assert follower.live.steps == list(range(5)), "what was seen stays"
    path.mkdir()
    (path / VALUES).write_bytes(NO_RECORD)
    follower.refresh()
    assert "is not a run" in follower.problem
    (path / VALUES).unlink()
    store = RunWriter(path)
    store.log(_record(0, 9.0))
    follower.refresh()
    assert (follower.live.steps, follower.problem) == ([0], "")
    store.close()
    follower.close()


def test_a_file_that_cannot_be_read_for_a_while_is_told_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RunWriter(tmp_path)
    store.log(_record(0, 1.0))
    follower = RunFollower(tmp_path, 30)
    follower.refresh()
    store.log(_record(1, 1.0))

    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(LogReader, "_bytes", fails)
        follower.refresh()
    assert "Input/output error" in follower.problem
    assert follower.live.steps == [0]
    follower.refresh()
    assert (follower.live.steps, follower.problem) == ([0, 1], "")
    store.close()
    follower.close()


# --- how it looks ----------------------------------------------------------------------------------------------------------------------


def _frame(path: Path, columns: int = 80, rows: int | None = None, unicode: bool = True, after: float = 0.0) -> list[Any]:
    from torch_gradmon.cli.terminal.live_loop import Screen, frame

    follower = RunFollower(path, 600)
    follower.refresh()
    now = 0.0 if follower.live is None or follower.live.last is None else follower.live.last.time + after
    lines = frame(follower, Screen(columns, rows, unicode), now)
    follower.close()
    return lines


@pytest.mark.extra
@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize("rows", [10, 23, 60, None])
@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_frame_fits_the_terminal(trained: Path, columns: int, rows: int | None, unicode: bool) -> None:
    lines = [line.plain for line in _frame(trained, columns, rows, unicode)]
    assert max(map(len, lines)) <= columns
    assert rows is None or len(lines) <= rows
    assert unicode or "".join(lines).isascii()
    assert "\x1b" not in "".join(lines)
    text = "\n".join(lines)
    assert lines[0].startswith(str(trained)[-10:]) or "[red]first  step 99  live" in lines[0]
    for label in ("train/loss", "grad norm", "after clip", "clip share"):
        assert any(line.startswith(label) for line in lines)
    if rows != 10:
        assert "[/].weight" in text
        assert "NaN/Inf" in text
        assert "step 70  grad_norm = " in text
        assert "step 90  grad_norm is nan" in text


@pytest.mark.extra
def test_a_frame_says_what_happened(trained: Path) -> None:
    lines = _frame(trained, 120)
    text = "\n".join(line.plain for line in lines)
    assert "2 spikes, 2 not applied (2 skipped)" in lines[1].plain
    assert "lr 0.001" in lines[1].plain
    assert re.search(r"live, [0-9.]+ steps/s", lines[0].plain)
    norm = next(line.plain for line in lines if line.plain.startswith("grad norm"))
    assert "!" in norm
    assert norm.split()[-1] == "70"
    marks = next(line.plain for line in lines if line.plain.startswith("spikes"))
    places = [place for place, letter in enumerate(marks) if letter == "▲"]
    sparks = [place for place, letter in enumerate(norm) if letter in "!█"]
    assert places == sparks, "what happened at a time stands below each other"
    assert "by suspicion in step 90" in text
    assert "largest share of the squared norm" in text


@pytest.mark.extra
def test_a_run_that_ended_is_idle(trained: Path) -> None:
    assert "live" in _frame(trained, after=2.0)[0].plain
    assert "no new step for 42 s" in _frame(trained, after=42.4)[0].plain
    assert "no new step for 1 d 3 h" in _frame(trained, after=27.5 * 3600)[0].plain
    assert "live" in _frame(trained, after=-100.0)[0].plain  # a clock that goes wrong


@pytest.mark.extra
def test_runs_with_little_in_them(tmp_path: Path) -> None:
    RunWriter(tmp_path / "empty").close()
    assert "no step yet" in _frame(tmp_path / "empty")[0].plain
    assert "there is no run in" in _frame(tmp_path / "none", 200)[0].plain
    model = nn.Linear(1, 1)
    monitor = gradmon.ModuleMonitor(model, run_dir=tmp_path / "by hand")
    for step in range(3):
        monitor.begin_step(step)
        monitor.log_scalar("reward", step)
        monitor.end_step()
    assert any("no spikes" in line.plain for line in _frame(tmp_path / "by hand"))
    store = RunWriter(tmp_path / "one")
    store.log(_record(7, 1.0))
    store.close()
    assert "step 7" in _frame(tmp_path / "one")[0].plain


@pytest.mark.extra
def test_a_run_that_went_back_says_so(tmp_path: Path) -> None:
    store = RunWriter(tmp_path)
    for step in [*range(30), *range(20, 40)]:
        store.log(_record(step, 1.0))
    store.close()
    assert "went back to step 20" in _frame(tmp_path)[1].plain


# --- the command ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.extra
def test_once_prints_one_picture(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["live", str(trained), "--once"]) == 0
    printed = capsys.readouterr().out
    assert "grad norm" in printed
    assert "no new step for" in printed or "live" in printed


@pytest.mark.extra
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["live", "{none}", "--once"], "there is no run in"),
        (["live", "{none}"], "needs a terminal"),
        (["live", "{run}"], "needs a terminal that it can draw on; --once"),
        (["live", "{run}", "--once", "--alert", "http://localhost/"], "leave one of them out"),
        (["live", "{run}", "--alert", "localhost"], "--alert localhost: "),
        (["live", "{run}", "--interval", "0"], "'0' is not a number of seconds"),
        (["live", "{run}", "--interval", "nan"], "'nan' is not a number of seconds"),
        (["live", "{run}", "--tail", "-3"], "not a positive whole number"),
    ],
)
def test_a_wrong_request_is_told(
    words: list[str], told: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"{none}": str(tmp_path / "none"), "{run}": str(trained)}
    try:
        code: object = main([places.get(word, word) for word in words])
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert told in captured.err


def test_without_rich_the_extra_is_named(trained: Path) -> None:
    code = "import sys; sys.modules['rich'] = None; from torch_gradmon.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = forked.run(code, "live", trained, "--once")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'gradmon: error: the live view needs rich: pip install "torch_gradmon[cli]"\n'


@pytest.fixture
def going_on(tmp_path: Path) -> Iterator[Path]:
    """A run that another process writes."""
    with _child(tmp_path / "run", 0, 100_000, pause=0.02) as child:
        _wait_for(child, 20)
        yield tmp_path / "run"


@pytest.mark.extra
@_POSIX
@pytest.mark.parametrize("key", ["\x03"])
def test_a_terminal_shows_a_run_that_goes_on_until_a_key_is_pressed(key: str, going_on: Path) -> None:
    with terminal("live", str(going_on), "--interval", "0.2", columns=100, rows=30) as seen:
        seen.read("grad norm")
        seen.read("live, ")
        seen.read("Ctrl-C ends; every 0.2 s")
        deadline = time.monotonic() + 100
        while len(set(re.findall(r"step (\d+)  ", seen.plain))) < 4 and time.monotonic() < deadline:
            seen._more(0.2)
        seen.type(key)
        assert seen.end() == 0
    steps = [int(step) for step in re.findall(r"step (\d+)  ", seen.plain)]
    assert len(set(steps)) >= 4
    assert "Traceback" not in seen.plain
    assert "\x1b[?1049h" in seen.output  # on a screen of its own
    after = seen.output.rpartition("\x1b[?1049l")[2]
    assert "grad norm" in after  # and the last picture stays


@pytest.mark.extra
@_POSIX
def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    with terminal("live", str(tmp_path / "run"), "--wait", "--interval", "0.1", columns=120) as seen:
        seen.read("there is no run in")
        store = RunWriter(tmp_path / "run")
        seen.read("no step yet")
        store.log(_record(0, 1.0))
        seen.read("step 0  ")
        store.close()
        shutil.rmtree(tmp_path / "run")
        seen.read("any more")
        seen.type("\x03")
        assert seen.end() == 0


@pytest.mark.extra
def test_once_waits_for_the_first_step_if_it_is_told_to(tmp_path: Path) -> None:
    code = "import sys; from torch_gradmon.cli.main import main; sys.exit(main(sys.argv[1:]))"
    with forked.start(code, "live", tmp_path / "run", "--wait", "--once", "--interval", "0.05") as child:
        assert child.poll(0.5) is None
        store = RunWriter(tmp_path / "run")
        assert child.poll(0.5) is None
        store.log(_record(3, 1.0))
        out = child.stdout.read()
        store.close()
        assert child.wait() == 0
    assert "step 3  " in out
