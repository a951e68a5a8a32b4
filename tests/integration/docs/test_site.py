"""Test that the documentation site builds completely, and that its first program runs."""

import re
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from flashmoa.engine.local import LocalEngine
from tests.conftest import ROOT

DOCS = ROOT / "docs"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
    made = subprocess.run([*build, DOCS, tmp_path], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    pages = {page.relative_to(tmp_path).with_suffix(".md") for page in tmp_path.rglob("*.html")}
    written = {page.relative_to(DOCS) for page in DOCS.rglob("*.md")}
    assert written <= pages
    # The pages load nothing from other sites.
    for page in tmp_path.rglob("*.html"):
        assert not re.search(r'(src|<link[^>]*href)="(https?:)?//', page.read_text()), page


async def test_the_chat_of_the_engines_api_finds_its_stream(engine: LocalEngine) -> None:
    page = (DOCS / "engine-api.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len([line for line in program.splitlines() if line.strip()]) <= 25
    program = program.replace("http://127.0.0.1:30000", engine.url)
    run = await anyio.run_process([sys.executable, "-c", program], check=False)
    assert run.stdout.decode().split() == ["hit"], run.stderr.decode()


async def test_the_first_program_of_the_documentation_runs(
    engine: LocalEngine, tmp_path: Path
) -> None:
    page = (DOCS / "index.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len([line for line in program.splitlines() if line.strip()]) < 20
    program = program.replace("http://127.0.0.1:30000", engine.url)
    program = program.replace("max_tokens=400", "max_tokens=16")
    run = await anyio.run_process([sys.executable, "-c", program], cwd=tmp_path, check=False)
    assert run.returncode == 0, run.stderr.decode()
    assert (tmp_path / "run.jsonl").exists()
