"""Start routers in front of a benchmark's engines, each as a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
import json, sys
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
arguments = json.loads(sys.argv[1])
arguments["prefill_urls"] = [tuple(engine) for engine in arguments.get("prefill_urls", [])]
Router.from_args(RouterArgs(
    host="127.0.0.1", log_level="warn", worker_startup_check_interval=1, **arguments
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
    if name == OURS:
        flags = [part for url in engines for part in ("--engine", url)]
        async with _start_flashmoa(flags, 1) as [url]:
            yield url
    else:
        async with _start_sglang_router(worker_urls=list(engines), policy="cache_aware") as url:
            yield url


@asynccontextmanager
async def start_pd_router(prefill: str, bootstrap_port: int, decode: str) -> AsyncGenerator[str]:
    """Start a PD pair's own router, and yield its URL once both engines answer through it.

    Args:
        prefill, decode: URLs of the engines.
        bootstrap_port: port at which the prefill engine is told about requests.

    Raises: EngineError as :func:`start_router`.
    """
    async with _start_sglang_router(
        pd_disaggregation=True, prefill_urls=[(prefill, bootstrap_port)], decode_urls=[decode]
    ) as url:
        yield url


@asynccontextmanager
async def start_shell_routers(
    pairs: Sequence[tuple[str, str]],
) -> AsyncGenerator[list[str]]:
    """Start the shell routers of PD pairs, which share agents' answers. Yield their URLs.

    Args:
        pairs: URLs of each pair's prefill engine and of its own router.

    Raises: EngineError as :func:`start_router`.
    """
    flags = [
        part
        for prefill, pd_router in pairs
        for part in ("--prefill", prefill, "--pd-router", pd_router)
    ]
    async with _start_flashmoa(flags, len(pairs)) as urls:
        yield urls


@asynccontextmanager
async def _start_flashmoa(flags: Sequence[str], count: int) -> AsyncGenerator[list[str]]:
    """Start ``flashmoa router``, and yield the URLs of its ``count`` ports."""
    port = free_port(count)
    urls = [f"http://127.0.0.1:{port + number}" for number in range(count)]
    command = [sys.executable, "-c", _FLASHMOA, "router", *flags, "--port", str(port)]
    async with _running(command, urls):
        yield urls


@asynccontextmanager
async def _start_sglang_router(**arguments: Any) -> AsyncGenerator[str]:
    port = free_port()
    given = {"port": port, "prometheus_port": free_port(), **arguments}
    url = f"http://127.0.0.1:{port}"
    async with _running([sys.executable, "-c", _SGLANG_ROUTER, json.dumps(given)], [url]):
        yield url


@asynccontextmanager
async def _running(command: Sequence[str], urls: Sequence[str]) -> AsyncGenerator[None]:
    """Run a router, from when it answers requests at all of these URLs."""
    with tempfile.TemporaryDirectory(prefix="flashmoa-router-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = await anyio.open_process(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        try:
            for url in urls:
                await _wait_until_ready(process, url, log)
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await _stop(process)


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
