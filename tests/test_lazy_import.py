"""What the package imports, and when."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import torch_gradmon as gradmon
from torch_gradmon import sinks
from torch_gradmon.core.lazy_import import importing

pytestmark = pytest.mark.thorough

_LOADED = """
import sys
import torch
{}
print(*sorted(name for name in sys.modules if name.startswith("torch_gradmon.")))
"""


def loaded(statement: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", _LOADED.format(statement)], capture_output=True, text=True, check=True)
    return {name.removeprefix("torch_gradmon.") for name in done.stdout.split()}


def test_the_import_loads_next_to_nothing() -> None:
    assert loaded("import torch_gradmon") == {"core", "core.lazy_import"}


def test_a_run_is_read_without_a_monitor() -> None:
    assert not {"monitor.monitor", "plugins", "capture"} & loaded("from torch_gradmon import load_run")


def test_a_monitor_loads_no_diagnosis_no_reader_and_no_tracker() -> None:
    names = loaded("from torch_gradmon import watch")
    assert not {"analysis.diagnosis", "analysis.comparison", "runs.reader", "sinks.wandb", "sinks.tensorboard"} & names
    assert not {"capture.attention", "capture.coordinate_check", "capture.reference", "plugins.clipping"} & names
    assert not {"plugins.flight_recorder", "statistics.histogram", "core.loop_mistakes", "spikes.rules"} & names
    assert len(names) <= 80


@pytest.mark.parametrize("package", [gradmon, sinks])
def test_every_public_name_has_a_home_and_is_what_type_checkers_see(package: object) -> None:
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))  # type: ignore[attr-defined]
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module or alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname is None
    }
    assert seen == package._HOMES  # type: ignore[attr-defined]
    assert sorted(package.__all__) == sorted(seen)  # type: ignore[attr-defined]
    for name in seen:
        assert getattr(package, name).__name__.endswith(name)
    assert set(seen) <= set(dir(package))


def test_a_name_that_does_not_exist_is_an_attribute_error_and_a_failing_import_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not hasattr(gradmon, "wacht")
    with pytest.raises(AttributeError, match="module 'torch_gradmon' has no attribute 'wacht'"):
        gradmon.wacht  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="wacht"):
        exec("from torch_gradmon import wacht")
    place = tmp_path / "needy"
    place.mkdir()
    (place / "__init__.py").touch()
    (place / "part.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        importing("needy", {"thing": "part"})("thing")


def test_modules_are_attributes_as_they_were() -> None:
    code = "import torch_gradmon; print(torch_gradmon.spikes.MeanStd, torch_gradmon.testing.RecordingSink)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
