"""Start the engines of the checks on one GPU, each in the best way that works there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import anyio
from anyio.abc import Process

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, free_port, wait_for_costs
from flashmoa.errors import EngineError
from flashmoa_bench.harness.modelled_gpus import read_server
from flashmoa_bench.harness.requests import ask

# Makes SGLang load no plugin but the platform of a CPU, where that is installed.
_STOCK = {"SGLANG_PLUGINS": "flashmoa_modelled_gpu"}
# What explains a result, of what an engine says of itself.
_SETTINGS = (
    "version",
    "attention_backend",
    "chunked_prefill_size",
    "enable_mixed_chunk",
    "disable_overlap_schedule",
    "disable_cuda_graph",
    "max_total_num_tokens",
)
_FIRST_ANSWER_SECONDS = 60.0
# An engine is used before it has measured its costs if that takes longer.
_MEASURE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Way:
    """A way of starting engines: a name, and SGLang's arguments."""

    name: str
    arguments: tuple[str, ...]


# Dummy weights have no tokenizer. Grammars and flashinfer's sampling need packages that are large.
_GPU = (
    *("--load-format", "dummy", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    "--disable-piecewise-cuda-graph",
)
_TRITON = ("--attention-backend", "triton")
_NO_GRAPHS = "--disable-cuda-graph"
# From the best way to the most modest.
GPU_WAYS = (
    Way("graphs", (*_GPU, *_TRITON, "--cuda-graph-bs", *("1", "2", "4", "8", "16", "32"))),
    Way("no graphs", (*_GPU, *_TRITON, _NO_GRAPHS)),
    Way("no overlap", (*_GPU, *_TRITON, _NO_GRAPHS, "--disable-overlap-schedule")),
    Way("torch's attention", (*_GPU, "--attention-backend", "torch_native", _NO_GRAPHS)),
)
CPU_WAYS = (Way("cpu", ("--grammar-backend", "none")),)


@dataclass(frozen=True, slots=True)
class Wanted:
    """An engine that a stage needs: a folder with a model, arguments, and whether to plug in."""

    model: Path
    plugin: bool
    arguments: tuple[str, ...] = ()

    @property
    def measures(self) -> bool:
        """Return whether it measures what its forwards cost, once it has started."""
        return self.plugin and "--flashmoa-costs" not in self.arguments


@dataclass(slots=True)
class Start:
    """One try to start an engine, as the results have it.

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

    An engine that does not start, or does not answer, is started in the next way. Later engines
    begin with the way that has worked for all before.

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
        """Have exactly these engines run: end others, and start those that are missing.

        They begin one after the other, since each takes its KV pool from the memory that it finds,
        and the plugin measures forwards, which another start would disturb.

        Raises: EngineError if one starts in none of the ways; that is not tried again.
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
        """End an engine and all its processes."""
        await self._running.pop(name).stop()

    async def stop_all(self) -> None:
        for name in list(self._running):
            await self.stop(name)

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
    """A process of an engine, with a client of it."""

    def __init__(self, process: Process, engine: LocalEngine) -> None:
        self.engine = engine
        self.client = EngineClient(engine.url)
        self._process = process

    @classmethod
    async def launch(cls, name: str, wanted: Wanted, way: Way, logs: Path) -> Self:
        """Start the process, without waiting. Engines of one name write to one log."""
        # SGLang's own choice of the second port may be taken by another engine's connection.
        port, log = free_port(2), logs / f"{name}.log"
        # It ends with this process, however that ends.
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
                env={**os.environ, **({} if wanted.plugin else _STOCK)},
                start_new_session=True,
            )
        return cls(process, LocalEngine(process.pid, port, log))

    async def prepare(self, limit: float, *, measures: bool) -> dict[str, Any]:
        """Wait until the engine answers, and return its settings.

        Args:
            limit: seconds that it may take to start.
            measures: whether it measures its costs then, for which to wait.

        Raises: EngineError or TimeoutError if it does not.
        """
        await self.engine.wait_until_ready(limit)
        costs = None
        if measures:
            # The first request of a client, such as ours, ends the measurement.
            with anyio.move_on_after(_MEASURE_SECONDS):
                costs = (await wait_for_costs(self.engine.url)).costs
        with anyio.fail_after(_FIRST_ANSWER_SECONDS):
            await ask(self.client, [1000, 2000, 3000], 2)
        server = await read_server(self.engine.url)
        found = {name: server[name] for name in _SETTINGS if name in server}
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
    """Yield engines, none of which runs yet. Leaving the context ends all.

    Args:
        logs: folder of their logs.
        apart: seconds between the starts of two engines.
        limit: seconds that one try to start an engine may take.
    """
    engines = GpuEngines(ways, logs, apart, limit)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engines.stop_all)
        yield engines


def describe(starts: Sequence[Start]) -> list[dict[str, Any]]:
    """Return all tries to start engines, for the results."""
    return [asdict(start) for start in starts]
