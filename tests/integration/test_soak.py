"""Thousands of calls of every kind: servers hold no more afterwards than before.

``FLASHMOA_SOAK_CALLS`` is how many calls (10,000 with ``make nightly``). The first fifth warms up.
"""

import json
import os
import random
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import anyio
import httpx
import psutil
import pytest

from flashmoa.engine.local import LocalEngine, LocalEngines, free_port
from tests.integration.baseline import Baseline
from tests.integration.moa.serving import FILE
from tests.integration.raw import RawConnection, make_request
from tests.integration.router.http_calls import chat, generation, metric
from tests.integration.support import STRICT, Words

CALLS = int(os.environ.get("FLASHMOA_SOAK_CALLS", "1000"))
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(400 + CALLS // 5),
]
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
    def by(cls, processes: dict[str, psutil.Process]) -> "Held":
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
        settle: waits until the server is idle, and checks the server's own figures.
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


STREAMS = ("use", "mispredict", "use twice", "delete", "expire", "vanish")
OTHERS = ("chat", "streamed", "leave", "score", "prefill only", "refused", "unknown")
# A small pool is soon full and then evicts KV.
POOL = 6000


class Requests:
    """Makes requests of each kind in turn, and opens streams that end in every way."""

    def __init__(self, http: httpx.AsyncClient, words: Words) -> None:
        self._http = http
        self._words = words
        self._dice = random.Random(3)

    async def ask(self, number: int) -> None:
        kind = (STREAMS + OTHERS)[number % len(STREAMS + OTHERS)]
        if kind in STREAMS:
            await self._stream(kind, number)
        else:
            await self._other(kind, number)

    async def _other(self, kind: str, number: int) -> None:
        text = self._words(60, number)
        if kind == "chat":
            await self._post("/v1/chat/completions", chat(text, max_tokens=2))
        elif kind in ("streamed", "leave"):
            body = chat(text, max_tokens=4, stream=True)
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    if kind == "leave":
                        break
        elif kind == "score":
            body = {"query": text, "items": [" a", " b"], "label_token_ids": [5, 6], "model": "m"}
            await self._post("/v1/score", body)
        elif kind == "prefill only":
            await self._post("/prefill_only", {"text": text})
        elif kind == "refused":
            answer = await self._http.post(f"/nothing/{number}", content=b"{")
            assert answer.status_code == 404
            answer = await self._http.post("/v1/chat/completions", content=b"{")
            assert answer.status_code == 400
        else:
            answer = await self._http.delete(f"/prompt_streams/{number:032x}")
            assert answer.status_code == 404

    async def _stream(self, ending: str, number: int) -> None:
        # Some streams have the same beginning, like agents' prompts.
        text = self._words(self._dice.randint(10, 50), number % 200)
        is_brief = ending in ("expire", "vanish")
        ttl = 0.2 if is_brief else 60
        opened = await self._post("/prompt_streams", {"text": text, "ttl_seconds": ttl})
        path = f"/prompt_streams/{opened['id']}"
        for seq in range(self._dice.randint(0, 2)):
            piece = " " + self._words(4, number + seq)
            text += piece
            answer = await self._http.post(f"{path}/append", json={"seq": seq, "text": piece})
            # On a busy machine a stream may expire before its append.
            assert answer.status_code == 200 or is_brief, answer.text
        if ending == "delete":
            assert (await self._http.delete(path)).status_code == 200
        elif ending == "vanish":
            connection = await RawConnection.open(str(self._http.base_url))
            body = generation(text, 1, prompt_stream_id=opened["id"])
            await connection.send(make_request("/generate", body))
            await connection.reset()
        elif ending != "expire":
            text = text if ending != "mispredict" else "Other " + text
            body = generation(text, 1, prompt_stream_id=opened["id"])
            answers = [
                await self._post("/generate", body) for _ in range(1 + (ending == "use twice"))
            ]
            statuses = [answer["meta_info"]["prompt_stream"]["status"] for answer in answers]
            first = "mispredicted" if ending == "mispredict" else "hit"
            assert statuses == [first, "used"][: len(statuses)]

    async def _post(self, path: str, body: object) -> Any:
        answer = await self._http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


async def test_an_engine_and_its_router_hold_no_more_after_thousands_of_requests(
    engines: LocalEngines, model: Path, words: Words, tmp_path: Path
) -> None:
    events = {"publisher": "zmq", "endpoint": f"tcp://*:{free_port()}"}
    engine = await engines.start(
        model,
        core=0,
        arguments=[
            *("--max-total-tokens", str(POOL), "--log-level", "warning", "--enable-metrics"),
            *("--kv-events-config", json.dumps(events)),
        ],
        # If an engine is killed while it compiles, it leaves a lock, and torch waits for it.
        environment={**STRICT, "TORCH_EXTENSIONS_DIR": str(tmp_path)},
    )
    async with (
        serving("router", "--engine", engine.url) as (url, process),
        httpx.AsyncClient(base_url=engine.url, timeout=60) as direct,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        base = Baseline(engine, direct)
        await base.take()
        series: set[int] = set()

        async def settle() -> None:
            await base.wait_until_restored()
            with anyio.fail_after(20):
                while await metric(http, "flashmoa_router_engine_load"):  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            page = (await http.get("/metrics")).text
            series.add(len(page.splitlines()))
            assert await metric(http, "flashmoa_router_waiting") == 0
            assert 0 < await metric(http, "flashmoa_router_engine_blocks") <= POOL / 16
            told = (await direct.get("/metrics")).text
            # SGLang's own series of requests have the path.
            assert told.count("\nsglang:http_requests_total") < 20
            assert told.count("\nflashmoa:") < 30

        processes = {"router": process, **engine_processes(engine)}
        await ask_often(Requests(http, words).ask, processes, settle)
        assert len(series) == 1 and max(series) < 60, series
    await engine.stop()


SYSTEMS = ("three", "stairs", "judged", "failing")
WAYS = ("whole", "stream", "leave", "refused")


async def test_a_server_of_mixtures_holds_no_more_after_thousands_of_questions(
    engine: LocalEngine, tmp_path: Path
) -> None:
    config = tmp_path / "moa.toml"
    config.write_text(FILE.format(url=engine.url, tokens=3))
    async with (
        serving("moa", "serve", str(config)) as (url, process),
        httpx.AsyncClient(base_url=engine.url, timeout=60) as direct,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        base = Baseline(engine, direct)
        await base.take()
        series: list[int] = []

        async def ask(number: int) -> None:
            system, way = SYSTEMS[number % len(SYSTEMS)], WAYS[number // len(SYSTEMS) % len(WAYS)]
            body: dict[str, Any] = {
                "model": f"nobody-{number}" if way == "refused" else system,
                "messages": [{"role": "user", "content": f"{number}: what is in Patan?"}],
                "stream": way != "whole",
                "user": f"user-{number}",
            }
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if way == "leave":
                    return
                await answer.aread()
            if way == "refused":
                assert answer.status_code == 404, answer.text

        async def settle() -> None:
            with anyio.fail_after(20):
                while await metric(http, "flashmoa_moa_running"):  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            await base.wait_until_restored(seconds=45)
            series.append(len((await http.get("/metrics")).text.splitlines()))

        await ask_often(ask, {"moa": process}, settle)
        assert series[-1] == series[0] < 300, series
