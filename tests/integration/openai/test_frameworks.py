"""Test agent frameworks on OpenAI's newest client, which does not go with SGLang's packages."""

from __future__ import annotations

import os

import anyio
import pytest

from flashmoa.engine.local import LocalEngine
from tests.conftest import ROOT

PYTHON = ROOT / ".venvs" / "frameworks" / "bin" / "python"


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_the_newest_frameworks_answer_the_same_linked(
    engine: LocalEngine, downstream: LocalEngine
) -> None:
    """Run tests/frameworks in its environment, on the engines of this one."""
    assert PYTHON.exists(), "its environment is missing; run `make .venvs/frameworks/.ready`"
    # Without the conftest.py above, which needs SGLang.
    command = [PYTHON, "-m", "pytest", "--confcutdir=tests/frameworks", "tests/frameworks", "-s"]
    environment = {**os.environ, "FLASHMOA_ENGINES": f"{engine.url} {downstream.url}"}
    done = await anyio.run_process(command, cwd=ROOT, env=environment, check=False)
    output = done.stdout.decode()
    print(output)
    assert done.returncode == 0, output[-5000:] + done.stderr.decode()[-2000:]
