"""Start engines on this machine's CPU, for the demo, the benchmarks and the tests.

They need no GPU and no model hub, but ``flashmoa-sglang`` and SGLang. The text of models with
random weights (:func:`tiny_model`) is noise; the timing of the engines is real. One process imports
SGLang and forks engines. Each engine is pinned to a core, so two engines on two cores are two
devices that really overlap.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE
from typing import Any

import anyio
import httpx
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from flashmoa.engine.client import EngineClient
from flashmoa.engine.wire import EngineInfo
from flashmoa.errors import EngineError

# Arguments for engines that are measured on a CPU. Nothing overlaps there, so SGLang's overlap
# schedule would only deliver each token one step late.
WITHOUT_OVERLAP = ("--disable-overlap-schedule",)
# Below the ports that the system gives to connections, and below those that SGLang derives.
_PORTS = range(15_000, 28_000)


class LocalEngine:
    """A started engine. ``url`` is its root URL, ``log`` the file with its output."""

    def __init__(self, pid: int, port: int, log: Path) -> None:
        self.pid = pid
        self.url = f"http://127.0.0.1:{port}"
        self.log = log

    def is_running(self) -> bool:
        """Return whether any process of the engine is alive."""
        return _group_exists(self.pid)

    async def wait_until_ready(self, limit: float = 180.0) -> None:
        """Wait until the engine answers.

        Raises: EngineError with the end of the log, if the engine ends, or is not ready within
            ``limit`` seconds.
        """
        deadline = time.monotonic() + limit
        # No proxy reaches this machine's own addresses.
        async with httpx.AsyncClient(trust_env=False) as http:
            while time.monotonic() < deadline:
                if not self.is_running():
                    raise EngineError(
                        f"the engine for {self.url} ended at start; the end of its log:\n"
                        f"{self.tail()}"
                    )
                try:
                    answer = await http.get(f"{self.url}/model_info", timeout=5)
                    if answer.status_code in (200, 401):
                        return
                except httpx.TransportError:
                    pass
                await anyio.sleep(0.1)
        raise EngineError(
            f"{self.url} was not ready within {limit:.0f} s; the end of the engine's "
            f"log:\n{self.tail()}"
        )

    def tail(self, lines: int = 25) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    async def stop(self) -> None:
        """Kill all processes of the engine. It has no other users and no state worth saving."""
        _signal_group(self.pid, signal.SIGKILL)
        with anyio.move_on_after(5.0):
            while self.is_running():  # noqa: ASYNC110 - there is no event for it
                await anyio.sleep(0.02)


class LocalEngines:
    """Starts engines by one forkserver (:func:`local_engines`)."""

    def __init__(self, process: Process, logs: Path) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._stdin = process.stdin
        self._lines = BufferedByteReceiveStream(process.stdout)
        self._logs = logs
        self._engines: list[LocalEngine] = []

    async def read_line(self) -> str:
        """Return the next line that the forkserver writes.

        Raises: EngineError if the forkserver has ended.
        """
        try:
            return (await self._lines.receive_until(b"\n", max_bytes=1 << 20)).decode()
        except anyio.IncompleteRead as error:
            errors = (self._logs / "forkserver.log").read_text(errors="replace")
            raise EngineError(
                "the process that imports SGLang and starts engines has ended; the end of its "
                f"output:\n{errors[-2000:]}"
            ) from error

    async def start(
        self,
        model: Path | str,
        *,
        core: int | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> LocalEngine:
        """Start an engine, pinned to a CPU core unless ``core`` is ``None``.

        Args:
            model: the folder or name of its model.
            arguments: command-line arguments of SGLang.
            wait: whether to wait until the engine is ready.

        Raises: EngineError if ``wait`` is true and the engine does not become ready.
        """
        port = free_port()
        log = self._logs / f"engine-{port}.log"
        command: dict[str, Any] = {
            "args": [
                "--model-path", str(model), "--port", str(port), "--skip-server-warmup",
                "--log-level", "info", *arguments,
            ],
            "env": {
                "SGLANG_CPU_OMP_THREADS_BIND": "all" if core is None else str(core),
                **(environment or {}),
            },
            "cores": [] if core is None else [core],
            "log": str(log),
        }  # fmt: skip
        log.touch()
        await self._stdin.send((json.dumps(command) + "\n").encode())
        engine = LocalEngine(int(await self.read_line()), port, log)
        self._engines.append(engine)
        if wait:
            await engine.wait_until_ready()
        return engine

    async def stop(self) -> None:
        """Kill all engines."""
        async with anyio.create_task_group() as group:
            for engine in self._engines:
                group.start_soon(engine.stop)


@asynccontextmanager
async def local_engines() -> AsyncGenerator[LocalEngines]:
    """Start a forkserver. Leaving the context ends the forkserver and all its engines."""
    with tempfile.TemporaryDirectory(prefix="flashmoa-engines-") as folder:
        logs = Path(folder)
        if find_spec("flashmoa_cpu") is None:
            raise RuntimeError(
                "engines on this machine's CPU need SGLang, the plugin and the CPU platform: make "
                "setup in a clone of FlashMoA's repository installs them"
            )
        with (logs / "forkserver.log").open("wb") as errors:
            process = await anyio.open_process(
                [sys.executable, "-m", "flashmoa_cpu.forkserver"],
                stdin=PIPE,
                stdout=PIPE,
                stderr=errors,
                # SGLang does not delete the files of its interprocess sockets.
                env={**os.environ, "TMPDIR": folder},
                start_new_session=True,
            )
        engines = LocalEngines(process, logs)
        try:
            while await engines.read_line() != "ready":
                pass
            yield engines
        finally:
            with anyio.CancelScope(shield=True):
                await engines.stop()
                _signal_group(process.pid, signal.SIGKILL)
                await process.wait()
                await process.aclose()


def free_port(count: int = 1) -> int:
    """Return the first of ``count`` successive ports of this machine that are free now.

    Raises: OSError if there are none.
    """
    # Not a port that the system chooses: a connection could take it before a server listens.
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if all(_is_free(port + number) for number in range(count)):
            return port
    raise OSError(
        f"no {count} successive ports from {_PORTS.start} to {_PORTS.stop - 1} are free; end a "
        "program that uses one of them"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def _signal_group(leader: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _group_exists(leader: int) -> bool:
    """Return whether a process of a group runs.

    Ended processes do not count, even before their parent has waited for them: the first process
    adopts orphans, and in a container it may never wait.
    """
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return any(_runs_in_group(process, leader) for process in Path("/proc").glob("[0-9]*"))


def _runs_in_group(process: Path, leader: int) -> bool:
    try:
        # The file's second field, the process name in parentheses, may contain any bytes.
        state, _parent, group, *more = (process / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    # A process whose main thread has ended is a zombie, but keeps its sockets until its last thread
    # ends. The state is the third field of the file, the number of threads the twentieth.
    threads = int(more[14])
    return int(group) == leader and (state not in (b"Z", b"X") or threads > 1)


def tiny_model(shape: str, texts: Sequence[Path], cache: Path) -> Path:
    """Return the folder of a tiny model. Make the model, in seconds, if ``cache`` lacks it.

    Args:
        shape: a name in ``flashmoa_cpu.tiny_model.SHAPES``.
        texts: files to train its tokenizer on.
        cache: the parent folder of the models.

    Raises: EngineError with the reason if the model cannot be made.
    """
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.read_bytes())
    out = cache / f"{shape}-{digest.hexdigest()[:12]}"
    if not out.exists():
        command = [sys.executable, "-m", "flashmoa_cpu.tiny_model", "--out", str(out)]
        command += ["--shape", shape, "--text", *map(str, texts)]
        process = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if process.returncode:
            reason = process.stderr.decode(errors="replace").strip()
            raise EngineError(
                f"no model of shape {shape!r} could be made (`flashmoa doctor` checks the "
                f"installation): {reason[-500:]}"
            )
    return out


@asynccontextmanager
async def tiny_engines(
    shapes: Sequence[str],
    texts: Sequence[Path],
    cache: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> AsyncGenerator[list[LocalEngine]]:
    """Make tiny models (:func:`tiny_model`) and serve them with :func:`engines_per_core`.

    Raises: EngineError if a model cannot be made or an engine does not start.
    """
    progress("making tiny models (random weights, own tokenizer)")
    models = [await anyio.to_thread.run_sync(tiny_model, shape, texts, cache) for shape in shapes]
    async with engines_per_core(models, progress) as engines:
        yield engines


@asynccontextmanager
async def engines_per_core(
    models: Sequence[Path], progress: Callable[[str], None] = lambda _: None
) -> AsyncGenerator[list[LocalEngine]]:
    """Serve models on this CPU, the first on core 0, the second on core 1, and so on.

    Leaving the context ends the engines. ``progress`` is called with a short message when a step
    begins.

    Raises: EngineError if an engine does not start.
    """
    progress("importing SGLang, once for all engines")
    async with local_engines() as starter:
        progress(f"starting {len(models)} engines, one per core")
        arguments = ["--max-total-tokens", "12000", "--enable-cache-report", *WITHOUT_OVERLAP]
        engines = [
            await starter.start(model, core=core, arguments=arguments, wait=False)
            for core, model in enumerate(models)
        ]
        for engine in engines:
            await engine.wait_until_ready()
        progress("the engines measure what their forwards cost")
        for engine in engines:
            await wait_for_costs(engine.url)
        yield engines


async def wait_for_costs(url: str) -> EngineInfo:
    """Wait until an engine has measured the costs of its forwards, for at most two minutes.

    An earlier request would disturb the measurement. It could also share a batch with one, which
    may round it differently and change the choice between two almost equally likely tokens.

    Raises: PluginMissing if the engine has no plugin.
    """
    async with EngineClient(url) as client:
        info = await client.info()
        # On a busy machine, an engine may be used before it has measured its costs.
        with anyio.move_on_after(120.0):
            while info.costs is None:
                await anyio.sleep(0.1)
                info = await client.info()
    return info
