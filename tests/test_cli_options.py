"""One habit in all commands: an option of one name means one thing, and files are written in one way."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon.cli.catalogue import GROUPS
from torch_gradmon.cli.commands.common import PAGES, UsageError, output
from torch_gradmon.cli.main import command_parser, main

from .stored_runs import VALUES

FLAG = ""
#: Every option of every command: what it takes (nothing for a flag), the commands that have it, and what it means in all of them.
OPTIONS: dict[str, tuple[str, str, str]] = {
    "--output": ("FILE", "demo diff export report width-sweep", "where the command writes its file"),
    "--json": (FLAG, "compare diagnose diff doctor status summary why width-sweep", "JSON on stdout, for a program"),
    "--json-schema": (FLAG, "compare diagnose diff doctor status summary why width-sweep", "what --json prints"),
    "--first": ("STEP", "detail diff export", "number of the first step"),
    "--last": ("STEP", "diff export", "number of the last step"),
    "--step": ("STEP", "why", "number of a step"),
    "--steps": ("N", "demo width-sweep", "how many steps"),
    "--tail": ("N", "live summary", "the last steps"),
    "--for": ("N", "detail", "how many of the steps to come"),
    "--every": ("N", "detail", "steps that are divisible by it"),
    "--wait": (FLAG, "detail live", "wait for what is not there yet"),
    "--timeout": ("SECONDS", "detail", "wait no longer"),
    "--interval": ("SECONDS", "live", "between two looks"),
    "--once": (FLAG, "live", "one picture, and end"),
    "--status": (FLAG, "detail", "tell, and change nothing"),
    "--reset": (FLAG, "detail", "back to what the script asks for"),
    "--preset": ("minimal standard full", "detail", "what is measured"),
    "--diagnose": (FLAG, "compare", "with all rules"),
    "--alert": ("URL", "live serve", "a webhook"),
    "--host": ("ADDRESS", "serve", "to listen at"),
    "--port": ("PORT", "serve", "to listen at"),
    "--token": ("TEXT", "serve", "that requests need"),
    "--no-token": ("", "serve", "that requests need"),
    "--run-dir": ("DIR", "demo", "where a run is kept"),
    "--seed": ("N", "demo", "a seed"),
    "--seeds": ("N", "width-sweep", "how many seeds"),
    "--title": ("TEXT", "report", "of the page"),
    "--all": (FLAG, "summary", "leave nothing out"),
    "--depth": ("N", "summary", "parts of names that make a group"),
    "--sort": ("COLUMN", "compare summary", "order of rows"),
    "--largest": (FLAG, "compare", "the largest value first"),
    "--keys": ("REGEX", "diff summary", "keys, or names of parameters"),
    "--ignore": ("REGEX", "diff", "keys that are not"),
    "--rename": ("REGEX=NEW", "diff", "modules of A, as they are in B"),
    "--rtol": ("X", "diff", "relative tolerance"),
    "--atol": ("X", "diff", "absolute tolerance"),
    "--tol": ("REGEX=X", "diff", "relative tolerance of some keys"),
    "--strict": (FLAG, "diff", "what only one run has counts too"),
    "--table": ("tensors steps", "export", "one of the two tables"),
    "--source": ("NAME", "export", "of tensors"),
    "--data": ("MODULE:NAME", "width-sweep", "batches"),
    "--widths": ("N", "width-sweep", "of the models"),
    "--optimizer": ("NAME", "width-sweep", "that trains them"),
    "--lr": ("X", "width-sweep", "at the smallest width"),
    "--lr-exponent": ("C", "width-sweep", "how it goes with the width"),
    "--loss": ("MODULE:FUNCTION", "width-sweep", "of model and batch"),
    "--expect": ("WHAT", "width-sweep", "exponents"),
    "--tolerance": ("X", "width-sweep", "of exponents"),
    "--confidence": ("P", "width-sweep", "of intervals"),
}
NAMES = sorted(name for group in GROUPS.values() for name in group)


def _actions() -> Iterator[tuple[str, argparse.Action]]:
    parser = command_parser()
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for name, command in subparsers.choices.items():
        yield from ((name, action) for action in command._actions)


def test_each_option_means_one_thing_wherever_it_is() -> None:
    found: dict[str, tuple[str, set[str]]] = {}
    helps: dict[str, set[str]] = {}
    for name, action in _actions():
        for option in action.option_strings:
            if option == "--help" or not option.startswith("--"):
                continue
            takes = FLAG if action.nargs == 0 else action.metavar or " ".join(map(str, action.choices or ()))
            known = found.setdefault(option, (str(takes), set()))
            assert known[0] == takes, f"{option} of {name} takes {takes}, elsewhere {known[0]}"
            known[1].add(name)
            helps.setdefault(option, set()).add(str(action.help))
    assert {option: (takes, " ".join(sorted(names))) for option, (takes, names) in found.items()} == {
        option: entry[:2] for option, entry in OPTIONS.items()
    }, "write new options into the table, under a name that has this meaning elsewhere too"
    for option in ("--json", "--last"):
        assert len(helps[option]) == 1, f"{option} is explained in one way: {helps[option]}"


def test_every_argument_that_is_a_run_is_called_so() -> None:
    positional = {name: [a.metavar for a in _of(name) if not a.option_strings] for name in NAMES}
    assert positional == {
        **{name: ["RUN"] for name in ("diagnose", "export", "status", "summary", "detail", "live", "why")},
        "report": ["RUN", "OTHER"],
        "serve": ["DIRECTORY"],
        "mcp": ["DIRECTORY"],
        "compare": ["DIRECTORY"],
        "diff": ["A", "B"],
        "width-sweep": ["MODULE:FUNCTION"],
        "demo": [],
        "doctor": [],
    }


def _of(name: str) -> list[argparse.Action]:
    return [action for command, action in _actions() if command == name]


# --- files -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "short"
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradmon.watch(model, optimizer, run_dir=path, on_spike=None):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    return path


#: What each command that writes a file is asked for, RUN standing for a run, and the ending of its file.
WRITERS: dict[str, tuple[list[str], str]] = {
    "export": (["export", "RUN"], ".csv"),
    "report": (["report", "RUN"], ".html"),
    "diff": (["diff", "RUN", "RUN"], ".html"),
    "width-sweep": (["width-sweep", "SCRIPT:make", "--data", "SCRIPT:batch", "--widths", "4", "8", "16", "--seeds", "1"], ".png"),
    "demo": (["demo", "--steps", "1", "--run-dir", "DEMO"], ".svg"),
}
SCRIPT = """
import torch
from torch import nn
def make(width):
    return nn.Sequential(nn.Linear(3, width), nn.Linear(width, 1))
batch = torch.ones(4, 3), torch.ones(4, 1)
"""
#: Those whose work takes no training; the demo has its own tests, and so has the sweep.
QUICK = ["diff", "export", "report"]


@pytest.fixture
def words(run_dir: Path, tmp_path: Path) -> dict[str, list[str]]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    stand_for = {"RUN": str(run_dir), "DEMO": str(tmp_path / "demo"), "SCRIPT": str(script)}
    return {
        name: [stand_for.get(word, word.replace("SCRIPT", str(script))) for word in given] for name, (given, _) in WRITERS.items()
    }


def test_the_table_has_all_that_write() -> None:
    assert sorted(WRITERS) == OPTIONS["--output"][1].split()


@pytest.mark.extra
@pytest.mark.parametrize("name", QUICK)
def test_directories_are_made_and_a_file_is_replaced(
    name: str, words: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    target = tmp_path / "new" / "deep" / f"out{WRITERS[name][1]}"
    for _ in range(2):
        assert main([*words[name], "--output", str(target)]) == 0
        assert target.stat().st_size > 100
        target.write_text("before")
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(str(target)))
        assert line.endswith(" MB)")


@pytest.mark.extra
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("where", ["DIRECTORY", "script.py", "script.py/out", "RUN/VALUES", "out"])
def test_what_would_destroy_something_is_refused_before_any_work(
    name: str, where: str, words: dict[str, list[str]], run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("matplotlib")
    place = {"DIRECTORY": str(tmp_path), "RUN/VALUES": str(run_dir / VALUES)}.get(where, str(tmp_path / where))
    if where == "script.py/out":
        place += WRITERS[name][1]
    size = (run_dir / VALUES).stat().st_size
    assert main([*words[name], "--output", place]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"gradmon: error: --output {place} ")
    assert captured.err.count("\n") == 1
    assert (tmp_path / "script.py").read_text() == SCRIPT
    assert (run_dir / VALUES).stat().st_size == size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script.py"]


@pytest.mark.extra
@pytest.mark.parametrize("name", OPTIONS["--json"][1].split())
def test_json_is_all_that_is_on_stdout(
    name: str, words: dict[str, list[str]], run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words.get(name, ["doctor"] if name == "doctor" else [name, str(run_dir)])
    writes = name in WRITERS
    if writes:
        pytest.importorskip("matplotlib")
        pytest.importorskip("plotly")
    target = tmp_path / "beside" / f"it{WRITERS[name][1]}" if writes else None
    given = [*given, "--step", "0"] if name == "why" else given  # there is no spike
    main([*given, "--json", *(["--output", str(target)] if target is not None else [])])
    captured = capsys.readouterr()
    assert isinstance(json.loads(captured.out), dict)
    if target is not None:
        assert target.is_file()
        assert str(target) in captured.err


def test_where_a_file_goes_is_looked_at_and_nothing_is_made(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b.HTML"
    assert output(str(target), PAGES) == target
    assert not target.parent.exists()
    for wrong in ("b.md", "b", "b.html.txt"):
        with pytest.raises(UsageError, match=r"must end in \.html or \.htm"):
            output(str(tmp_path / wrong), PAGES)
