"""The Trackio sink with the real package; what it wrote is read back from its SQLite file.

Trackio fixes the place of its files when it is imported, so each test is a process of its own.
"""

from __future__ import annotations

import json
import math
import sqlite3
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

import torch_gradmon as gradmon

from . import forked

pytestmark = [pytest.mark.extra, pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")]


def _run(script: str, home: Path) -> str:
    settings = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "HOME": str(home), "PATH": ""}
    done = forked.run(textwrap.dedent(script), environment=settings, cwd=home, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _table(home: Path, table: str) -> list[dict[str, object]]:
    (path,) = (home / "trackio").glob("*.db")
    with sqlite3.connect(path) as database:
        database.row_factory = sqlite3.Row
        rows = [dict(row) for row in database.execute(f"SELECT * FROM {table} ORDER BY id")]
    database.close()
    return rows


def test_a_watched_run_reads_back_with_its_values(tmp_path: Path) -> None:
    _run(
        """
        import torch, trackio
        from torch import nn
        import torch_gradmon as gradmon

        trackio.init(project="tests", name="run", auto_log_gpu=False, auto_log_cpu=False)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradmon.watch(model, optimizer, layers="all", run_dir="run") as monitor:
            monitor.add_sink(trackio)
            monitor.add_sink(gradmon.sinks.JsonlSink("metrics.jsonl"))
            for step in range(12):
                optimizer.zero_grad()
                model(torch.randn(4, 3)).square().mean().backward()
                optimizer.step()
                monitor.log_scalar("loss", float("nan") if step == 5 else step / 8)
        trackio.finish()
        """,
        tmp_path,
    )
    wanted = {row.pop("step"): row for row in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())}
    read = """
        import json
        from trackio.sqlite_storage import SQLiteStorage

        print(json.dumps(SQLiteStorage.get_logs("tests", "run")))
        """
    found = {row.pop("step"): row for row in json.loads(_run(read, tmp_path))}
    assert all(row.pop("timestamp") for row in found.values())
    assert wanted[5].pop("loss") == "NaN"
    assert math.isnan(found[5].pop("loss"))
    assert found == wanted
    assert list(found) == list(range(12))
    loss = gradmon.load_run(tmp_path / "run").series("loss")
    assert math.isnan(loss[5])


def test_a_spike_is_an_alert_of_its_step(tmp_path: Path) -> None:
    _run(
        """
        import trackio
        from torch import nn
        import torch_gradmon as gradmon

        run = trackio.init(project="tests", name="run", auto_log_gpu=False, auto_log_cpu=False)
        model = nn.Linear(1, 1)
        with gradmon.ModuleMonitor(model) as monitor:
            monitor.add_detector(gradmon.SpikeDetector(signal="loss"))
            monitor.add_sink(run, every=100)
            for step in range(60):
                monitor.begin_step(step)
                monitor.log_scalar("loss", 100.0 if step == 50 else 1.0 + step % 3 / 10)
                monitor.end_step()
        trackio.finish()
        """,
        tmp_path,
    )
    (alert,) = _table(tmp_path, "alerts")
    assert (alert["title"], alert["level"], alert["step"]) == ("spike in loss", "warn", 50)
    assert str(alert["text"]).startswith("step 50: loss = 100 is 90.9 times the usual 1.1")


def test_without_a_run_it_says_what_to_do(tmp_path: Path) -> None:
    said = _run(
        """
        import torch_gradmon as gradmon

        for given in ([], ["mine"]):
            try:
                gradmon.sinks.TrackioSink(*given)
            except (ValueError, TypeError) as error:
                print(error)
        """,
        tmp_path,
    )
    assert said.splitlines() == [
        "no Trackio run is active: call trackio.init() before TrackioSink(), or give it a run",
        "run must be what trackio.init() gives, got 'mine' of type str",
    ]


def test_a_histogram_is_one(tmp_path: Path) -> None:
    said = _run(
        """
        import json
        import trackio
        import torch_gradmon as gradmon

        run = trackio.init(project="tests", name="run", auto_log_gpu=False, auto_log_cpu=False)
        gradmon.sinks.TrackioSink(run).log({"gradient/a.b/log2_histogram.-3": 5.0, "gradient/a.b/log2_histogram.zero": 2.0}, 0)
        trackio.finish()
        from trackio.sqlite_storage import SQLiteStorage

        print("ROW" + json.dumps(SQLiteStorage.get_logs("tests", "run")[0]))
        """,
        tmp_path,
    )
    row = json.loads(said.rpartition("ROW")[2].splitlines()[0])
    found = row["gradient/a.b/log2_histogram"]
    assert found["_type"] == "trackio.histogram"
    assert {edge: count for edge, count in zip(found["bins"], found["values"], strict=False) if count} == {-3: 5.0}
    assert row["gradient/a.b/log2_histogram.zero"] == 2.0
