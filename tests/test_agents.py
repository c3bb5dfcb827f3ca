"""The tools for agents, called by a client of the protocol's own SDK through a process."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.live_training import LAYER, train
from torch_gradmon.cli.main import main

pytest.importorskip("mcp.server.mcpserver")
pytestmark = pytest.mark.extra
COMMAND = "from torch_gradmon.cli.main import main; raise SystemExit(main())"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    train(place / "first", 60, spike=40)
    train(place / "second", 60, lr=1e-2)
    return place


def called(root: Path, *calls: tuple[str, dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """The tools that a server in a process of its own has, and the results of calls: data, or the text of an error."""
    from mcp import Client, StdioServerParameters

    async def talk() -> tuple[list[Any], list[Any]]:
        parameters = StdioServerParameters(command=sys.executable, args=["-c", COMMAND, "mcp", str(root)])
        async with Client(parameters) as client:
            tools = (await client.list_tools()).tools
            found = []
            for name, arguments in calls:
                result = await client.call_tool(name, arguments)
                text = "".join(getattr(part, "text", "") for part in result.content)
                found.append(
                    text if result.is_error else (result.structured_content or {}).get("result", result.structured_content)
                )
            return tools, found

    return asyncio.run(asyncio.wait_for(talk(), 120))


def test_an_agent_finds_the_run_the_layer_and_the_step(root: Path) -> None:
    tools, (runs, status, diagnosis, advice, why, keys, series, difference) = called(
        root,
        ("list_runs", {}),
        ("status", {"run": "first"}),
        ("diagnose", {"run": "first"}),
        ("advice", {"run": "first"}),
        ("why", {"run": "first"}),
        ("keys", {"run": "first", "contains": "grad_norm"}),
        ("series", {"run": "first", "key": "gradmon/grad_norm", "first": 39, "last": 41}),
        ("diff", {"first": "first", "second": "second"}),
    )
    assert [tool.name for tool in tools] == ["list_runs", "status", "diagnose", "advice", "why", "keys", "series", "diff"]
    assert all(tool.description and tool.annotations.read_only_hint for tool in tools)
    assert {run["name"]: run["spikes"] for run in runs} == {"first": 1, "second": 0}
    assert (status["worst_spike"]["step"], status["worst_spike"]["where"]) == (40, LAYER)
    assert status["next"]["rule"] == diagnosis["findings"][0]["rule"] == "spike"
    assert advice[0].startswith(f"spike in {LAYER}: Look at the batch of this step")
    assert "step 40" in why
    assert LAYER in why
    assert keys == {"count": 1, "keys": ["gradmon/grad_norm"]}
    assert series["steps"] == [39, 40, 41]
    assert series["values"][1] > 100 * series["values"][0]
    assert "lr" in difference
    assert json.dumps([runs, status, diagnosis], allow_nan=False)


def test_mistakes_are_explained_and_nothing_else_can_be_read(root: Path) -> None:
    _, found = called(
        root,
        ("status", {"run": "../first"}),
        ("status", {"run": "/etc"}),
        ("status", {"run": "frist"}),
        ("series", {"run": "first", "key": "gradmon/grad_nrm"}),
        ("why", {"run": "second"}),
        ("why", {"run": "first", "step": 1000}),
    )
    assert all("there is no run" in text for text in found[:3])
    assert "first" in found[2]
    assert "gradmon/grad_norm" in found[3]
    assert "there is no spike" in found[4]
    assert "1000" in found[5]


def test_the_command_without_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mcp", str(tmp_path / "none")]) == 2
    assert "there is no directory" in capsys.readouterr().err
