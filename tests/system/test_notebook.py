"""The notebook of the docs runs from its first to its last cell in a separate kernel."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

import asyncrl

pytestmark = pytest.mark.system
NOTEBOOK = Path(__file__).parents[2] / "docs" / "first_run.ipynb"
CELL_S = 240


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    # Unix sockets: no port that other users could connect to.
    settings = Config(KernelManager={"transport": "ipc", "ip": str(tmp_path / "kernel")})
    place = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, timeout=CELL_S, kernel_name="python3", resources=place, config=settings)
    client.execute(env=dict(os.environ))
    first, second = (asyncrl.Run.open(tmp_path / "runs" / name) for name in ("first", "second"))
    assert [(run.status, run.summary["steps"]) for run in (first, second)] == [("finished", 50), ("finished", 20)]
    assert "last_digit" in str(second.samples(limit=1).to_pandas()["reward_parts"][0])
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert len(outputs) >= 6 and all(output.output_type != "error" for output in outputs)
