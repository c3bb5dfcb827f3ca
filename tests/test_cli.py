"""The command line as a whole: its help, its examples, its exit codes, and a reader who has seen enough."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.cli.catalogue import COMMANDS, GROUPS
from torch_gradmon.cli.commands import common
from torch_gradmon.cli.main import command_parser, main

from . import forked
from .stored_runs import VALUES

NAMES = [name for group in GROUPS.values() for name in group]
_MAIN = "import sys; from torch_gradmon.cli.main import main; sys.exit(main())"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ten steps."""
    path = tmp_path_factory.mktemp("runs") / "short"
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = gradmon.watch(model, optimizer, run_dir=path, on_spike=None)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    monitor.detach()
    return path


@pytest.mark.parametrize("name", NAMES)
def test_a_command_is_what_the_table_of_commands_wants(name: str) -> None:
    command = COMMANDS[name]
    assert list(inspect.signature(command.run).parameters) == ["options"]
    assert len(command.examples) >= 1
    for line, what in command.examples:
        words = shlex.split(line)
        assert words[:2] == ["gradmon", name]
        assert what.strip()
        assert command_parser().parse_args(words[1:]).command == name


@pytest.mark.parametrize("name", NAMES)
def test_the_help_of_a_command_and_of_all_have_its_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line, _ in COMMANDS[name].examples]
    for words, wanted in (([name, "--help"], lines), (["--help"], lines[:1])):
        with pytest.raises(SystemExit, match=r"^0$"):
            main(words)
        printed = capsys.readouterr().out
        assert [line for line in wanted if f"  {line}\n" not in printed and f"  {line} " not in printed] == []
        assert printed.count("\n  gradmon ") >= len(wanted)


def test_the_help_of_all_groups_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    titles = [printed.index(f"\n {title}\n") for title in GROUPS]
    assert titles == sorted(titles)
    assert all(len(line) <= 100 for line in printed.splitlines())


def test_no_command_loads_torch_or_an_optional_package_before_it_runs() -> None:
    code = (
        "import sys; from torch_gradmon.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "print('loaded', *sorted({'torch', 'numpy', 'rich', 'plotly', 'jinja2', 'pandas', 'pyarrow', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.endswith("\nloaded\n"), done.stdout[-200:] + done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (common.UsageError("there is\nno such thing"), 2),
        (ValueError("there is\nno such thing"), 1),
        (OSError("there is\nno such thing"), 1),
    ],
)
def test_an_error_is_one_line_with_the_right_exit_code(
    error: Exception, code: int, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> str:
        raise error

    monkeypatch.setattr("torch_gradmon.cli.commands.one_run.open_run", fails)
    assert main(["why", str(run_dir)]) == code
    assert capsys.readouterr().err == "gradmon: error: there is no such thing\n"


def test_ctrl_c_ends_with_a_word(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("torch_gradmon.cli.commands.one_run.open_run", interrupted)
    assert main(["why", str(run_dir)]) == 130
    assert capsys.readouterr().err == "gradmon: error: stopped\n"


#: Commands that read a run, with what they need so that they can do without any extra, and write something of a run of ten steps.
READERS = {"diagnose": [], "summary": ["--json"], "why": ["--step", "9"]}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["nothing", "an empty directory", "text", "an older version"])
def test_what_is_no_run_is_a_wrong_request(name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    if kind != "nothing":
        path.mkdir()
    if kind == "text":
        (path / VALUES).write_text("hello " * 1000)
    if kind == "an older version":
        (path / "gradmon.sqlite").write_text("hello " * 1000)
    assert main([name, str(path), *READERS[name]]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gradmon: error: ")
    told = {"text": "is not a run of torch_gradmon", "an older version": "is of an older version"}
    assert told.get(kind, "no run in") in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.thorough
@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
@pytest.mark.parametrize(
    "words", [["--help"], *([name, *more] for name, more in READERS.items()), pytest.param(["summary"], marks=pytest.mark.extra)]
)
def test_a_reader_who_leaves_early_is_no_error(words: list[str], run_dir: Path) -> None:
    if words[0] in READERS:
        words = [*words, str(run_dir)]
    reader, writer = os.pipe()
    os.close(reader)  # before it writes
    with tempfile.TemporaryFile() as errors:
        with forked.start(_MAIN, *words, streams=[writer, writer, errors.fileno()]) as child:
            os.close(writer)
            child.wait()
        errors.seek(0)
        assert errors.read().decode() == ""
    ignores = words == ["--help"] and sys.version_info >= (3, 11)  # argparse itself takes no note of it
    assert child.returncode == (0 if ignores else 141)


def test_module_of_the_package_is_the_command(run_dir: Path) -> None:
    def output(*words: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "torch_gradmon", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        return done.returncode, done.stdout, done.stderr

    assert output("--version")[:2] == (0, f"torch_gradmon {gradmon.__version__}\n")
    assert output("diagnose", str(run_dir))[1].startswith(("Nothing found", "1 ", "2 ", "3 "))
    code, _, error = output("tune")
    assert code == 2
    assert "\ngradmon: " in f"\n{error}"  # below torch's own warning where there is no numpy


def test_why_without_a_spike_is_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = gradmon.watch(model, optimizer, run_dir=tmp_path, on_spike=None)
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    monitor.detach()
    assert main(["why", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("there is no spike in the 12 monitored steps from 0 to 11")
    assert not captured.err
    assert main(["why", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] is None
    assert found["spikes"] == []
    assert main(["why", str(tmp_path), "--step", "99"]) == 2
