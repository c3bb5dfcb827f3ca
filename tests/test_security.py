"""What a stranger has named or written is only data: in terminals, pages, alerts, agents' answers and checkpoints."""

from __future__ import annotations

import copy
import io
import json
import random
import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_gradmon as gradmon
from torch_gradmon import load_run
from torch_gradmon.cli.main import main
from torch_gradmon.runs import format as f

from .stored_runs import rewritten

#: Sequences that clear a terminal, set its title, ring, write over what stands there, turn the direction, break lines, or are half of one.
NAMES = [
    "a\x1b[2Jb",
    "a\x1b]0;t\x07b",
    "a\x9b31mb",
    "a\bb",
    "a\u202eb",
    "a\nall is well",
    "a\r\u2028b",
    "a\x00b",
    "a\ud800b",
    "[red]a[/red]",
]


class Named(nn.Module):
    """Layers of these names."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = x + layer(x).tanh()
        return self.head(x)


def train(path: Path, names: list[str], spike: bool = True) -> None:
    torch.manual_seed(0)
    model = Named(names)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = gradmon.watch(model, optimizer, run_dir=path, on_spike=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(30):
            loss = (model(torch.randn(8, 4)) - 1).square().mean() * (1e4 if spike and step == 25 else 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for name in ("loss", *names):
                monitor.log_scalar(name, loss.detach())
        monitor.detach()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("named")
    train(path / "run", NAMES)
    train(path / "other", NAMES, spike=False)
    named = {"model": NAMES[0], "trainer": NAMES[5], "title": NAMES[1]}
    for each in ("run", "other"):
        rewritten(path / each, facts=lambda facts: {**facts, **named})
    return path


def controls(text: str) -> set[str]:
    """The characters in a text that control something, other than line breaks and rich's own colours."""
    return {letter for letter in text if letter != "\n" and unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")}


COMMANDS = [
    ["summary", "run"], ["status", "run"], ["diagnose", "run"], ["why", "run"], ["diff", "run", "other"], ["compare", "."],
    ["detail", "run", "--status"], ["live", "run", "--once"], ["status", "run", "--json"], ["why", "run", "--json"],
    ["diff", "run", "other", "--json"], ["compare", ".", "--json"], ["summary", "run", "--json"], ["diagnose", "run", "--json"],
    ["detail", "run", "--every", "1"], ["summary", "none\x1b[2J"], ["why", "run", "--step", "999"], ["diff", "run", "\x1b[2J"],
]  # fmt: skip


@pytest.mark.extra
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_command_prints_what_controls_a_terminal(words: list[str], run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        try:
            main(words)
        except SystemExit:
            pass
    text = said.getvalue()
    assert text
    assert not controls(text)
    assert not any(line.startswith("all is well") for line in text.splitlines())


def test_names_are_made_printable_where_a_run_is_read(run: Path) -> None:
    with_names = load_run(run / "run")
    texts = [
        *with_names.keys(),
        *with_names.tensors("gradient"),
        *with_names._reader.meta.values(),
        with_names._reader.model_text,
    ]
    texts += [event.where for event in with_names.spikes] + [event.reason for event in with_names.spikes]
    assert not controls(" ".join(map(str, texts)))
    assert not any("\n" in text for text in map(str, texts))
    assert len(with_names.series(r"gradient/layers.a\x1b[2Jb.weight/norm")) == 30


@pytest.mark.parametrize("text", [b'{"a": "\\u001b"}', '{"\u202e": ["\x9b"]}'.encode(), b'{"a": {"\\ud800": "x\\ny"}}'])
def test_a_text_of_a_run_is_one_line_without_controls(text: bytes) -> None:
    assert not controls(json.dumps(f.parsed(text), ensure_ascii=False))


def test_what_a_notebook_shows_is_escaped(run: Path) -> None:
    shown = gradmon.load_run(run / "run").diagnose()._repr_html_()
    assert shown.count("<") == 2  # <pre> and </pre>
    assert not controls(shown)


# --- checkpoints --------------------------------------------------------------------------------------------------------------------


def _mutated(state: Any, draw: random.Random) -> Any:
    values: list[Any] = [None, True, -1, 2**63, float("nan"), float("inf"), "x", [], {}, [[]], {"": None}, torch.ones(3)]
    if isinstance(state, dict) and state and draw.random() < 0.85:
        name = draw.choice(list(state))
        return {**state, name: _mutated(state[name], draw)}
    if isinstance(state, list) and state and draw.random() < 0.85:
        place = draw.randrange(len(state))
        return [*state[:place], _mutated(state[place], draw), *state[place + 1 :]]
    return draw.choice(values)


def _loop() -> Iterator[gradmon.ModuleMonitor]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    monitor = gradmon.watch(model, optimizer)
    while True:
        yield monitor
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()


def test_a_hostile_state_is_loaded_or_refused_and_stops_nothing() -> None:
    loop = _loop()
    for _ in range(20):
        monitor = next(loop)
    state = monitor.state_dict()
    refused = 0
    for seed in range(150):
        before = copy.deepcopy(monitor.state_dict())
        try:
            monitor.load_state_dict(_mutated(state, random.Random(seed)))
        except (TypeError, ValueError):
            refused += 1
            assert str(monitor.state_dict()) == str(before), seed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            next(loop)
        monitor.load_state_dict(state)
    assert refused > 50
    monitor.detach()
