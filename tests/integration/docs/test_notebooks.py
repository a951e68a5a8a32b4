"""Run the notebooks from top to bottom, on engines of this session."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from flashmoa.engine.local import LocalEngine
from tests.conftest import ROOT

pytestmark = pytest.mark.nightly

FOLDER = ROOT / "examples" / "notebooks"
# Texts that each notebook prints in every run.
PRINTED = {
    "mapreduce": ["the same texts: True", "of its"],
    "mixture": ["used", "3.1"],
    "quickstart": ["the same texts: True", "linked   writer"],
    "timeline": ["hit", "late", "mispredicted"],
}


def test_every_notebook_is_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
async def test_notebook_runs_and_prints_its_results(
    name: str, engine: LocalEngine, downstream: LocalEngine, tmp_path: Path
) -> None:
    printed = await run_notebook(name, tmp_path, FLASHMOA_ENGINE=f"{engine.url} {downstream.url}")
    assert all(part in printed for part in PRINTED[name]), printed


async def run_notebook(name: str, scratch: Path, **environment: str) -> str:
    """Run a notebook from top to bottom, and return its printed text."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code), "clear it"
    client = NotebookClient(notebook, timeout=60, resources={"metadata": {"path": FOLDER}})
    await client.async_execute(env={**os.environ, "IPYTHONDIR": str(scratch), **environment})
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data"}
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "Traceback" not in printed and "Warning" not in printed, printed
    return printed
