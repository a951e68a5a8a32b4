"""Start the engines of the checks on one GPU, each in the best way that works there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import anyio
from anyio.abc import Process

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, free_port, wait_for_costs
from flashmoa.errors import EngineError
from flashmoa_bench.harness.engines import STOCK
from flashmoa_bench.harness.modelled_gpus import read_server
from flashmoa_bench.harness.report import SETTINGS
from flashmoa_bench.harness.requests import ask


@dataclass(frozen=True, slots=True)
class Way:
    """A way of starting engines: a name, and SGLang's arguments."""

    name: str
    arguments: tuple[str, ...]


# Dummy weights have no tokenizer. Grammars and flashinfer's sampling need large packages.
_GPU = (
    *("--load-format", "dummy", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    "--disable-piecewise-cuda-graph",
)
_TRITON = ("--attention-backend", "triton")
_NO_GRAPHS = "--disable-cuda-graph"
# From the best way to the simplest.
GPU_WAYS = (
    Way("graphs", (*_GPU, *_TRITON, "--cuda-graph-bs", *("1", "2", "4", "8", "16", "32"))),
    Way("no graphs", (*_GPU, *_TRITON, _NO_GRAPHS)),
    Way("no overlap", (*_GPU, *_TRITON, _NO_GRAPHS, "--disable-overlap-schedule")),
    Way("torch's attention", (*_GPU, "--attention-backend", "torch_native", _NO_GRAPHS)),
)
CPU_WAYS = (Way("cpu", ("--grammar-backend", "none")),)


@dataclass(frozen=True, slots=True)
class Wanted:
    """An engine that a stage needs; ``model`` is a folder."""

    model: Path
    plugin: bool
    arguments: tuple[str, ...] = ()

    @property
    def measures(self) -> bool:
        """Return whether the engine measures the costs of its forwards after its start."""
        return self.plugin and "--flashmoa-costs" not in self.arguments


@dataclass(slots=True)
class Start:
    """One try to start an engine.

    Attributes:
        seconds: until it answered, or failed.
        problem: why it failed, and the end of its log; ``None`` if it runs.
    """

    name: str
    way: str
    arguments: list[str]
    seconds: float
    problem: str | None = None
    settings: dict[str, Any] | None = None


class GpuEngines:
    """Starts and stops engines on this machine; made by :func:`gpu_engines`.

    If an engine does not start or answer, it is started in the next way. Later engines begin with
    the first way that has worked for all engines.

    Attributes:
        starts: all tries so far.
    """

    def __init__(self, ways: Sequence[Way], logs: Path, apart: float, limit: float) -> None:
        self.starts: list[Start] = []
        self._ways = list(ways)
        self._logs = logs
        self._apart = apart
        self._limit = limit
        self._running: dict[str, _Running] = {}
        self._given_up: dict[str, Wanted] = {}

    def __getitem__(self, name: str) -> EngineClient:
        return self._running[name].client

    def __contains__(self, name: str) -> bool:
        return name in self._running

    async def use(self, wanted: Mapping[str, Wanted]) -> None:
        """Have exactly these engines run: end the others, and start the missing ones.

        They start one after another, since each takes its KV pool from the free memory, and another
        start would disturb the plugin's measurement of forwards.

        Raises: EngineError if an engine starts in no way; it is not tried again.
        """
        for name in self._running.keys() - wanted.keys():
            await self.stop(name)
        missing = [name for name in wanted if name not in self._running | self._given_up]
        async with anyio.create_task_group() as group:
            for place, name in enumerate(missing):
                group.start_soon(self._start, name, wanted[name], place * self._apart)
        if lacking := [name for name in wanted if name not in self._running]:
            raise EngineError(f"no way to start {', '.join(lacking)}: see the log of that name")

    async def stop(self, name: str) -> None:
        await self._running.pop(name).stop()

    async def _start(self, name: str, wanted: Wanted, delay: float) -> None:
        await anyio.sleep(delay)
        for way in list(self._ways):
            begun = time.perf_counter()
            start = Start(name, way.name, [*way.arguments, *wanted.arguments], 0)
            self.starts.append(start)
            running = await _Running.launch(name, wanted, way, self._logs)
            try:
                with anyio.fail_after(self._limit):
                    start.settings = await running.prepare(self._limit, measures=wanted.measures)
            except (EngineError, TimeoutError) as error:
                start.problem = f"{type(error).__name__}: {error}\n{running.engine.tail(60)}"
                print(f"{name} did not start ({way.name}): {start.problem}", flush=True)
            except BaseException:
                await running.stop()
                raise
            else:
                self._running[name] = running
                if way in self._ways:
                    self._ways = self._ways[self._ways.index(way) :]
            start.seconds = time.perf_counter() - begun
            if start.problem is None:
                print(f"{name} runs ({way.name}) after {start.seconds:.0f} s", flush=True)
                return
            await running.stop()
        self._given_up[name] = wanted


class _Running:
    """A process of an engine, and its client."""

    def __init__(self, process: Process, engine: LocalEngine) -> None:
        self.engine = engine
        self.client = EngineClient(engine.url)
        self._process = process

    @classmethod
    async def launch(cls, name: str, wanted: Wanted, way: Way, logs: Path) -> Self:
        """Start the process, without waiting. Engines of the same name share a log."""
        # SGLang's own choice of the second port may be taken by another engine's connection.
        port, log = free_port(2), logs / f"{name}.log"
        # setpriv ends the engine with this process, even if this process is killed.
        tied = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        command = [
            *tied, sys.executable, "-m", "flashmoa_sglang.serve",
            "--model-path", str(wanted.model), "--host", "127.0.0.1", "--port", str(port),
            "--nccl-port", str(port + 1),
            "--skip-tokenizer-init", "--skip-server-warmup", "--random-seed", "1",
            *way.arguments, *wanted.arguments,
        ]  # fmt: skip
        with log.open("ab") as output:
            process = await anyio.open_process(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **({} if wanted.plugin else STOCK)},
                start_new_session=True,
            )
        return cls(process, LocalEngine(process.pid, port, log))

    async def prepare(self, limit: float, *, measures: bool) -> dict[str, Any]:
        """Wait until the engine answers, and return its settings.

        Args:
            limit: seconds that the start may take.
            measures: whether to wait until the engine has measured its costs.

        Raises: EngineError or TimeoutError if it does not answer.
        """
        await self.engine.wait_until_ready(limit)
        costs = None
        if measures:
            # The first request of a client ends the measurement, so ours must come later.
            with anyio.move_on_after(30):
                costs = (await wait_for_costs(self.engine.url)).costs
        with anyio.fail_after(60):
            await ask(self.client, [1000, 2000, 3000], 2)
        server = await read_server(self.engine.url)
        found = {name: server[name] for name in SETTINGS if name in server}
        return {**found, "costs": costs.model_dump() if costs is not None else None}

    async def stop(self) -> None:
        with anyio.CancelScope(shield=True):
            await self.client.close()
            await self.engine.stop()
            await self._process.wait()
            await self._process.aclose()


@asynccontextmanager
async def gpu_engines(
    ways: Sequence[Way], logs: Path, *, apart: float = 0.0, limit: float = 150.0
) -> AsyncGenerator[GpuEngines]:
    """Yield an object that starts engines. Leaving the context ends all engines.

    Args:
        logs: folder for the engines' logs.
        apart: seconds between the starts of two engines.
        limit: seconds that one try to start an engine may take.
    """
    engines = GpuEngines(ways, logs, apart, limit)
    try:
        yield engines
    finally:
        await engines.use({})
