"""Ask a server thousands of times, and compare what its processes hold before and after.

``FLASHMOA_SOAK_CALLS`` is how often (10,000 with ``make nightly``). The first fifth warms up.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from subprocess import DEVNULL

import anyio
import httpx
import psutil
import pytest

from flashmoa.engine.local import LocalEngine, free_port

CALLS = int(os.environ.get("FLASHMOA_SOAK_CALLS", "1000"))
TIMEOUT = pytest.mark.timeout(400 + CALLS // 5)
AT_ONCE = 48
ROUNDS = 5
# By this much the memory of allocators may differ between two measurements.
SLACK_MB = 12.0


@dataclass(frozen=True)
class Held:
    """What processes hold: the memory of each, in MB, and the files that all have open."""

    memory: dict[str, float]
    files: int

    @classmethod
    def by(cls, processes: dict[str, psutil.Process]) -> Held:
        memory = {name: process.memory_info().rss / 1e6 for name, process in processes.items()}
        return cls(memory, sum(process.num_fds() for process in processes.values()))

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size:.1f} MB" for name, size in self.memory.items())
        return f"{sizes}, {self.files} files"


def engine_processes(engine: LocalEngine) -> dict[str, psutil.Process]:
    http = psutil.Process(engine.pid)
    children = http.children(recursive=True)
    schedulers = [child for child in children if "scheduler" in "".join(child.cmdline())]
    return {"http": http, **{f"scheduler {n}": each for n, each in enumerate(schedulers)}}


@asynccontextmanager
async def serving(*command: str) -> AsyncGenerator[tuple[str, psutil.Process]]:
    """Run a command of ``flashmoa`` that serves; yield its URL and its process."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    main = [sys.executable, "-c", "from flashmoa.cli import main; main()"]
    arguments = [*main, *command, "--port", str(port)]
    async with await anyio.open_process(arguments, stdout=DEVNULL, stderr=None) as process:
        try:
            with anyio.fail_after(60):
                async with httpx.AsyncClient(base_url=url) as http:
                    while True:
                        try:
                            await http.get("/health")
                            break
                        except httpx.TransportError:
                            await anyio.sleep(0.1)
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()


async def ask_often(
    ask: Callable[[int], Awaitable[None]],
    processes: dict[str, psutil.Process],
    settle: Callable[[], Awaitable[None]],
) -> None:
    """Call ``ask`` with numbers, some at once, and check that what processes hold does not grow.

    Args:
        settle: waits until the server is idle, and checks what it says of itself.
    """
    measured: list[Held] = []
    started = time.monotonic()
    for end in range(CALLS // ROUNDS, CALLS + 1, CALLS // ROUNDS):
        numbers = iter(range(end - CALLS // ROUNDS, end))

        async def work(numbers: Iterator[int] = numbers) -> None:
            for number in numbers:
                await ask(number)

        async with anyio.create_task_group() as group:
            for _ in range(AT_ONCE):
                group.start_soon(work)
        await settle()
        measured.append(Held.by(processes))
        print(f"\n{end} calls, {time.monotonic() - started:.0f} s: {measured[-1]}", end="")
    warm, last = measured[0], measured[-1]
    calls = CALLS - CALLS // ROUNDS
    grown = {name: size - warm.memory[name] for name, size in last.memory.items()}
    shown = {name: f"{1e3 * size / calls:.2f} kB" for name, size in grown.items()}
    print(f"\ngrowth for each call after the first fifth: {shown}")
    assert max(grown.values()) < SLACK_MB
    assert last.files <= warm.files + AT_ONCE  # Connections come and go.
