"""What commands print with ``--json`` is as their schemas have it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.live_training import train
from torch_gradmon import cli
from torch_gradmon.cli.catalogue import COMMANDS
from torch_gradmon.cli.main import main

SCHEMAS = Path(cli.__file__).parent / "schemas"
NAMES = sorted(path.stem for path in SCHEMAS.iterdir())
jsonschema = pytest.importorskip("jsonschema")
pytestmark = pytest.mark.extra

MODEL = """
import torch
from torch import nn

def make(width):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=g), torch.randint(2, (8,), generator=g)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    train(place / "spiked", 60, spike=40)
    train(place / "wild", 40, lr=10.0)
    return place


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    main(list(words))
    return json.loads(capsys.readouterr().out)


def schema(capsys: pytest.CaptureFixture[str], name: str) -> Any:
    with pytest.raises(SystemExit, match=r"^0$"):
        main([name, "--json-schema"])  # nothing else has to be given
    found = json.loads(capsys.readouterr().out)
    assert found["title"] == f"gradmon {name} --json"
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def _calls(runs: Path) -> dict[str, list[list[str]]]:
    spiked, wild = str(runs / "spiked"), str(runs / "wild")
    return {
        "compare": [[str(runs)], [str(runs), "--diagnose"]],
        "diagnose": [[spiked], [wild]],
        "diff": [[spiked, wild], [spiked, spiked]],
        "doctor": [[]],
        "status": [[spiked], [wild]],
        "summary": [[spiked], [wild, "--all"]],
        "why": [[spiked], [spiked, "--step", "3"]],
    }


@pytest.mark.parametrize("name", [name for name in NAMES if name != "width-sweep"])
def test_what_is_printed_is_as_the_schema_has_it(runs: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    wanted = schema(capsys, name)
    for words in _calls(runs)[name]:
        found = printed(capsys, name, *words, "--json")
        jsonschema.validate(found, wanted, jsonschema.Draft202012Validator)
        assert set(found) == set(wanted["properties"]), words  # nothing that it does not name


def test_the_check_of_widths_prints_what_its_schema_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    words = [
        f"{tmp_path / 'model.py'}:make",
        "--data",
        f"{tmp_path / 'model.py'}:batch",
        "--widths",
        "8",
        "16",
        "32",
        "--seeds",
        "2",
    ]
    found = printed(capsys, "width-sweep", *words, "--json")
    wanted = schema(capsys, "width-sweep")
    jsonschema.validate(found, wanted, jsonschema.Draft202012Validator)
    assert set(found) == set(wanted["properties"])


def test_every_command_with_json_has_a_schema() -> None:
    with_json = {
        name
        for name, command in COMMANDS.items()
        for each in command.arguments
        for option_names, _ in (each if isinstance(each, list) else [each])
        if "--json" in option_names
    }
    assert with_json == set(NAMES)


def test_a_schema_refuses_what_is_wrong(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted, found = schema(capsys, "status"), printed(capsys, "status", str(runs / "spiked"), "--json")
    for name, value in (("state", "asleep"), ("loss", math.nan.__repr__()), ("step", "59"), ("findings", [{}])):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**found, name: value}, wanted, jsonschema.Draft202012Validator)
