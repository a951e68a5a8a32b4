"""Start routers in front of a benchmark's engines, each as a separate process, and PD pairs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import httpx
from anyio.abc import Process

from flashmoa.engine.local import LocalEngine, free_port
from flashmoa.errors import EngineError
from flashmoa_bench.harness import clock

OURS, STOCK, SMG = "flashmoa router", "sglang-router", "smg"
# Our router with the order of rules of MoE-Prefill §7: it never waits for a prefix.
OUR_CASCADE = f"{OURS} --patience 0"
# Arguments on a CPU. A decode engine's default backup of retracted requests needs a GPU.
_PREFILL = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port")
_DECODE = (
    *("--disaggregation-mode", "decode"),
    *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
)
# Starts an engine with the pair's model and further arguments.
StartEngine = Callable[[Sequence[str]], Awaitable[LocalEngine]]
# The router ends when the benchmark ends, even if that is killed (PR_SET_PDEATHSIG).
_END_WITH_PARENT = "import ctypes, signal; ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
_FLASHMOA = _END_WITH_PARENT + "from flashmoa.cli import main; main()"
# sglang-router's own command would import SGLang, which is not needed here. smg, its successor, has
# the same interface.
_RUST_ROUTER = (
    _END_WITH_PARENT
    + """
import importlib, json, sys
package = sys.argv[1]
Router = importlib.import_module(f"{package}.router").Router
RouterArgs = importlib.import_module(f"{package}.router_args").RouterArgs
arguments = json.loads(sys.argv[2])
for name in json.loads(sys.argv[3]):
    if hasattr(RouterArgs, name):
        arguments[name] = round(getattr(RouterArgs, name) * float(sys.argv[4]))
arguments["prefill_urls"] = [tuple(engine) for engine in arguments.get("prefill_urls", [])]
Router.from_args(RouterArgs(
    host="127.0.0.1", log_level="warn", worker_startup_check_interval=1, **arguments
)).start()
"""
)
# These routers' intervals of asking for load and health, and time-outs of silent engines. The
# slowdown of modelled GPUs stretches them.
_SECONDS = (
    "load_monitor_interval", "worker_stall_secs", "worker_wedge_secs", "worker_stale_secs",
    "worker_warmup_secs", "health_check_interval_secs", "health_check_timeout_secs",
    "cb_timeout_duration_secs", "cb_window_duration_secs", "eviction_interval_secs",
)  # fmt: skip


def installed_routers() -> list[str]:
    packages = {STOCK: "sglang_router", SMG: "smg"}
    found = [name for name, package in packages.items() if find_spec(package) is not None]
    return [OURS, *found]


@asynccontextmanager
async def start_router(
    name: str, engines: Sequence[str], model_config: Mapping[str, Any] | None = None
) -> AsyncGenerator[str]:
    """Start a router over ``engines``, and yield its URL once it answers requests.

    Args:
        name: one of :func:`installed_routers` or ``OUR_CASCADE``.
        engines: the engines' URLs.
        model_config: configuration of the model whose FLOPs our router counts; by default the
            engines' own.

    Raises: EngineError, with the end of the router's log, if it does not answer in time.
    """
    if not name.startswith(OURS):
        package = "smg" if name == SMG else "sglang_router"
        urls = list(engines)
        async with _start_rust_router(package, worker_urls=urls, policy="cache_aware") as url:
            yield url
        return
    flags = [part for url in engines for part in ("--engine", url)]
    flags += name.removeprefix(OURS).split()
    with tempfile.TemporaryDirectory(prefix="flashmoa-model-") as folder:
        if model_config is not None:
            file = Path(folder) / "config.json"
            file.write_text(json.dumps(model_config))
            flags += ["--model-config", str(file)]
        async with _start_flashmoa(flags) as url:
            yield url


@asynccontextmanager
async def _start_flashmoa(flags: Sequence[str]) -> AsyncGenerator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", _FLASHMOA, "router", *flags, "--port", str(port)]
    async with _running(command, url):
        yield url


@asynccontextmanager
async def _start_rust_router(package: str, **arguments: Any) -> AsyncGenerator[str]:
    port = free_port()
    given = {"port": port, "prometheus_port": free_port(), **arguments}
    url = f"http://127.0.0.1:{port}"
    slowdown = str(clock.machine_seconds(1.0))
    texts = [json.dumps(given), json.dumps(_SECONDS), slowdown]
    async with _running([sys.executable, "-c", _RUST_ROUTER, package, *texts], url):
        yield url


@asynccontextmanager
async def _running(command: Sequence[str], url: str) -> AsyncGenerator[None]:
    """Run a router, and yield once it answers requests."""
    with tempfile.TemporaryDirectory(prefix="flashmoa-router-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = await anyio.open_process(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        try:
            await _wait_until_ready(process, url, log)
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await _stop(process)


async def _wait_until_ready(process: Process, url: str, log: Path) -> None:
    # Every vocabulary has these tokens, and a cache has room for three more.
    probe = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}
    # An engine may hold a lone prompt back for some seconds, to fill a forward.
    async with httpx.AsyncClient(timeout=30) as http:
        with anyio.move_on_after(60):
            while process.returncode is None:
                try:
                    if (await http.post(f"{url}/generate", json=probe)).is_success:
                        return
                except httpx.TransportError:
                    pass
                await anyio.sleep(0.1)
    tail = await anyio.Path(log).read_text(errors="replace")
    raise EngineError(f"a router does not start:\n{tail[-1500:]}")


async def _stop(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
    with anyio.move_on_after(5) as scope:
        await process.wait()
    if scope.cancelled_caught:
        process.kill()
        await process.wait()
    await process.aclose()


@dataclass(frozen=True, slots=True)
class PairStart:
    """Describes a pair to start.

    Attributes:
        shell: whether it gets a shell router; then its engines need the plugin.
        transport: copies KV from one engine to the other: ``nixl`` or ``mooncake``.
    """

    start_engine: StartEngine
    shell: bool = True
    transport: str = "nixl"


@dataclass(frozen=True, slots=True)
class PdPair:
    """A running pair; ``url`` is its shell router's, or the stock router's without one."""

    url: str
    prefill: LocalEngine
    decode: LocalEngine


@asynccontextmanager
async def start_pd_pairs(pairs: Mapping[str, PairStart]) -> AsyncGenerator[dict[str, PdPair]]:
    """Start pairs, and yield them by name once they answer.

    Leaving the context ends the routers. The engines end with their :class:`LocalEngines`.

    Raises: EngineError if an engine or a router does not start, or a package is missing.
    """
    for package in {name for pair in pairs.values() for name in ("sglang_router", pair.transport)}:
        if find_spec(package) is None:
            raise EngineError(
                f"PD pairs need {package}, which is not installed here; "
                "run pip install -r requirements/routers.txt"
            )
    started: dict[str, PdPair] = {}
    async with AsyncExitStack() as stack:
        for name, pair in pairs.items():
            started[name] = await _start_pair(pair, stack)
        yield started


async def _start_pair(pair: PairStart, stack: AsyncExitStack) -> PdPair:
    """Start a pair, its stock router, and its shell router if wanted."""
    bootstrap = free_port()
    transport = ("--disaggregation-transfer-backend", pair.transport)
    prefill = await pair.start_engine([*_PREFILL, str(bootstrap), *transport])
    decode = await pair.start_engine([*_DECODE, *transport])
    router = _start_rust_router(
        "sglang_router",
        pd_disaggregation=True,
        prefill_urls=[(prefill.url, bootstrap)],
        decode_urls=[decode.url],
    )
    url = await stack.enter_async_context(router)
    if pair.shell:
        flags = ("--prefill", prefill.url, "--pd-router", url, "--decode", decode.url)
        url = await stack.enter_async_context(_start_flashmoa(flags))
    return PdPair(url, prefill, decode)
