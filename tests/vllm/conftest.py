"""Start real vLLM servers on the CPU; ``make test-vllm`` installs vLLM in its own environment."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import STDOUT

import anyio
import httpx
import pytest
from anyio.abc import Process

from flashmoa.engine.local import free_port, tiny_model
from tests.conftest import GUIDE, ROOT

PYTHON = ROOT / ".venvs" / "vllm" / "bin" / "python"
SERVED_NAME = "tiny"
_START_SECONDS = 180
collect_ignore_glob = [] if (ROOT / ".venvs" / "vllm" / ".ready").exists() else ["test_*.py"]


class Server:
    """A vLLM server that has been started."""

    def __init__(self, process: Process, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._process = process
        self._log = log

    async def wait_until_ready(self) -> None:
        async with httpx.AsyncClient() as http:
            with anyio.fail_after(_START_SECONDS):
                while self._process.returncode is None:
                    try:
                        if (await http.get(f"{self.url}/health")).is_success:
                            return
                    except httpx.TransportError:
                        pass
                    await anyio.sleep(0.5)
        end = await anyio.Path(self._log).read_text(errors="replace")
        pytest.fail(f"vLLM ended at its start:\n{end[-3000:]}")


@asynccontextmanager
async def start_vllm(model: Path, core: int, folder: Path) -> AsyncGenerator[Server]:
    """Run a server on one core."""
    port = free_port()
    log = folder / f"vllm-{core}.log"
    command = [
        str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", SERVED_NAME, "--port", str(port), "--max-model-len", "8192",
        "--enforce-eager", "--enable-prompt-tokens-details",
        # In bfloat16, vLLM's default, a prompt that is partly cached may be rounded differently.
        "--dtype", "float32",
    ]  # fmt: skip
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {
        **ours,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("wb") as output:
        process = await anyio.open_process(
            command, stdout=output, stderr=STDOUT, env=environment, start_new_session=True
        )
    try:
        yield Server(process, port, log)
    finally:
        with anyio.CancelScope(shield=True):
            # Its engine is another process of the same group.
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            await process.aclose()


@pytest.fixture(scope="session")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[tuple[str, str]]:
    """Two servers with the same model, one per core."""
    folder = tmp_path_factory.mktemp("vllm")
    model = tiny_model("small", [GUIDE], ROOT / ".cache" / "models")
    async with start_vllm(model, 0, folder) as first, start_vllm(model, 1, folder) as second:
        for server in (first, second):
            await server.wait_until_ready()
        yield first.url, second.url
