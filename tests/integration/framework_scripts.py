"""Run tests of other projects' newest clients, in an environment of their own."""

import os

import anyio

from tests.conftest import ROOT


async def run_frameworks(*files: str, venv: str = "frameworks", **environment: str) -> None:
    """Run files of tests/frameworks on servers of this environment, and print their output."""
    python = ROOT / ".venvs" / venv / "bin" / "python"
    assert python.exists(), f"its environment is missing; run `make .venvs/{venv}/.ready`"
    # Without the conftest.py above, which needs SGLang.
    command = [python, "-m", "pytest", "--confcutdir=tests/frameworks", "-s"]
    command += [f"tests/frameworks/{file}" for file in files]
    given = {**os.environ, **environment}
    done = await anyio.run_process(command, cwd=ROOT, env=given, check=False)
    output = done.stdout.decode()
    print(output)
    assert done.returncode == 0, output[-5000:] + done.stderr.decode()[-2000:]
