"""The notebook runs from top to bottom, and its figures appear."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "first_look.ipynb"

pytestmark = [
    pytest.mark.extra,
    pytest.mark.skipif(find_spec("nbclient") is None or find_spec("ipykernel") is None, reason="nbclient is not installed"),
]


def _outputs(cell: Any) -> list[Any]:
    """The types of content that a cell shows."""
    return sorted(kind for output in cell.outputs for kind in output.get("data", ["text"]))


def test_the_notebook_runs_and_shows_what_it_has_stored(tmp_path: Path) -> None:
    import nbclient
    import nbformat

    stored = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    fresh = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    nbclient.NotebookClient(fresh, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [cell for cell in fresh.cells if cell.cell_type == "code"]
    assert sum("image/png" in _outputs(cell) for cell in cells) == 3
    assert "spike (step 150)" in "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert [_outputs(cell) for cell in cells] == [_outputs(cell) for cell in stored.cells if cell.cell_type == "code"]
