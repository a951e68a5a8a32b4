"""Run sglang-router or its successor smg, which users may have had before FlashMoA."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from subprocess import DEVNULL

import anyio
import httpx

from flashmoa.engine.local import free_port

STOCK_ROUTERS = ("sglang_router", "smg")
# sglang-router imports SGLang for traces if it can, which fails on a CPU without the plugin.
_LAUNCH = """
import importlib, sys
sys.modules["sglang"] = None
importlib.import_module(sys.argv.pop(1) + ".launch_router").main()
"""


@asynccontextmanager
async def start_stock_router(package: str, *arguments: str) -> AsyncGenerator[httpx.AsyncClient]:
    """Start one of the stock routers; yield a client of it once it has found its engines."""
    port = free_port()
    process = await anyio.open_process(
        [
            sys.executable, "-c", _LAUNCH, package, "--host", "127.0.0.1", "--port", str(port),
            "--prometheus-port", str(free_port()), "--worker-startup-check-interval", "1",
            *arguments,
        ],
        stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            with anyio.fail_after(90):
                while not await _is_ready(client):
                    assert process.returncode is None
                    await anyio.sleep(0.1)
            yield client
    finally:
        with anyio.CancelScope(shield=True):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            await process.aclose()


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/readiness")).is_success
    except httpx.TransportError:
        return False
