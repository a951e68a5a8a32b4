"""Start routers in front of a benchmark's engines, each as a separate process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import anyio
import httpx
from anyio.abc import Process

from flashmoa.engine import EngineError
from flashmoa.engine.local import free_port

OURS, STOCK = "flashmoa router", "sglang-router"
_START_SECONDS = 60.0
_STOP_SECONDS = 5.0
# The router ends when the benchmark ends, even if that is killed (PR_SET_PDEATHSIG).
_END_WITH_PARENT = "import ctypes, signal; ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
_FLASHMOA = _END_WITH_PARENT + "from flashmoa.cli import main; main()"
# sglang-router's own command would import SGLang, which is not needed here.
_SGLANG_ROUTER = (
    _END_WITH_PARENT
    + """
import sys
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
Router.from_args(RouterArgs(
    worker_urls=sys.argv[3:], policy="cache_aware", host="127.0.0.1", port=int(sys.argv[1]),
    prometheus_port=int(sys.argv[2]), log_level="warn", worker_startup_check_interval=1,
)).start()
"""
)
# Every vocabulary has these tokens. They are few, so that they take hardly any room in a cache.
_PROBE = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}


def installed_routers() -> list[str]:
    """Return the routers that are installed here."""
    return [OURS, *([STOCK] if find_spec("sglang_router") is not None else [])]


@asynccontextmanager
async def start_router(name: str, engines: Sequence[str]) -> AsyncGenerator[str]:
    """Start a router over ``engines``, and yield its URL once it answers requests.

    Args:
        name: one of :func:`installed_routers`.
        engines: the engines' URLs.

    Raises: EngineError, with the end of the router's log, if it does not answer in time.
    """
    port, metrics_port = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="flashmoa-router-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = await anyio.open_process(
                _command(name, engines, port, metrics_port),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        try:
            await _wait_until_ready(process, url, log)
            yield url
        finally:
            with anyio.CancelScope(shield=True):
                await _stop(process)


def _command(name: str, engines: Sequence[str], port: int, metrics_port: int) -> list[str]:
    if name == OURS:
        flags = [part for url in engines for part in ("--engine", url)]
        return [sys.executable, "-c", _FLASHMOA, "router", *flags, "--port", str(port)]
    return [sys.executable, "-c", _SGLANG_ROUTER, str(port), str(metrics_port), *engines]


async def _wait_until_ready(process: Process, url: str, log: Path) -> None:
    async with httpx.AsyncClient(timeout=10) as http:
        with anyio.move_on_after(_START_SECONDS):
            while process.returncode is None:
                try:
                    if (await http.post(f"{url}/generate", json=_PROBE)).is_success:
                        return
                except httpx.TransportError:
                    pass
                await anyio.sleep(0.1)
    raise EngineError(f"a router does not start:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:]


async def _stop(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
    with anyio.move_on_after(_STOP_SECONDS) as scope:
        await process.wait()
    if scope.cancelled_caught:
        process.kill()
        await process.wait()
    await process.aclose()
