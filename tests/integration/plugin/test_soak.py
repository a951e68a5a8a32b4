"""Thousands of streams that are opened and ended in every way: no memory or file leaks.

``FLASHMOA_SOAK_STREAMS`` is their number (10,000 with ``make nightly``).
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx
import psutil
import pytest

from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.baseline import Baseline
from tests.integration.raw import RawConnection, make_request

STREAMS = int(os.environ.get("FLASHMOA_SOAK_STREAMS", "1000"))
pytestmark = [pytest.mark.anyio, pytest.mark.nightly, pytest.mark.timeout(60 + STREAMS // 10)]
AT_ONCE = 48
ROUNDS = 5
# By this much the memory of allocators may differ between two measurements.
SLACK_MB = 12.0
ENDINGS = ("use", "mispredict", "use twice", "delete", "expire", "vanish")
BRIEF = ("expire", "vanish")
GREEDY_ONE = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}


@dataclass(frozen=True)
class Memory:
    """The memory of an engine's processes, in MB, and the number of files that they have open."""

    http: float
    scheduler: float
    files: int

    @classmethod
    def of(cls, engine: LocalEngine) -> Memory:
        http = psutil.Process(engine.pid)
        children = http.children(recursive=True)
        schedulers = [child for child in children if "scheduler" in "".join(child.cmdline())]
        return cls(
            http=http.memory_info().rss / 1e6,
            scheduler=sum(child.memory_info().rss for child in schedulers) / 1e6,
            files=sum(process.num_fds() for process in [http, *schedulers]),
        )


class Soak:
    """Opens streams of all kinds, ``AT_ONCE`` at a time."""

    def __init__(self, http: httpx.AsyncClient, words: Callable[[int, int], str]) -> None:
        self._http = http
        self._words = words
        self._dice = random.Random(3)
        self._numbers = itertools.count()

    async def run(self, streams: int) -> None:
        todo = iter(range(streams))

        async def work() -> None:
            for _ in todo:
                await self._one(next(self._numbers))

        async with anyio.create_task_group() as group:
            for _ in range(AT_ONCE):
                group.start_soon(work)

    async def _one(self, number: int) -> None:
        ending = ENDINGS[number % len(ENDINGS)]
        # Some streams have the same beginning, like agents' prompts.
        text = self._words(self._dice.randint(10, 50), number % 200)
        ttl = 0.2 if ending in BRIEF else 60
        opened = await self._post("/prompt_streams", {"text": text, "ttl_seconds": ttl})
        path = f"/prompt_streams/{opened['id']}"
        for seq in range(self._dice.randint(0, 2)):
            piece = " " + self._words(4, number + seq)
            text += piece
            answer = await self._http.post(f"{path}/append", json={"seq": seq, "text": piece})
            # On a busy machine a stream may expire before its append.
            assert answer.status_code == 200 or ending in BRIEF, answer.text
        if ending == "delete":
            assert (await self._http.delete(path)).status_code == 200
        elif ending == "vanish":
            await self._vanish(text, opened["id"])
        elif ending != "expire":
            text = text if ending != "mispredict" else "Other " + text
            statuses = [
                await self._use(text, opened["id"]) for _ in range(1 + (ending == "use twice"))
            ]
            first = "mispredicted" if ending == "mispredict" else "hit"
            assert statuses == [first, "used"][: len(statuses)]

    async def _post(self, path: str, body: object) -> dict[str, str]:
        answer = await self._http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def _use(self, text: str, stream_id: str) -> str:
        body = {"text": text, "sampling_params": GREEDY_ONE, "prompt_stream_id": stream_id}
        answer = await self._http.post("/generate", json=body)
        return answer.json()["meta_info"]["prompt_stream"]["status"]

    async def _vanish(self, text: str, stream_id: str) -> None:
        """Ask for an answer and disconnect."""
        connection = await RawConnection.open(str(self._http.base_url))
        body = {"text": text, "sampling_params": GREEDY_ONE, "prompt_stream_id": stream_id}
        await connection.send(make_request("/generate", body))
        await connection.reset()


@pytest.fixture
async def soaked(engines: LocalEngines, model: Path) -> LocalEngine:
    return await engines.start(
        model,
        core=0,
        # A small pool is soon full and then evicts KV.
        arguments=["--max-total-tokens", "6000", "--log-level", "warning", "--enable-metrics"],
        environment={"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"},
    )


async def test_memory_and_files_do_not_grow_with_the_number_of_streams(
    soaked: LocalEngine, words: Callable[[int, int], str]
) -> None:
    async with httpx.AsyncClient(base_url=soaked.url, timeout=60) as own:
        base = Baseline(soaked, own)
        await base.take()
        measurements: list[Memory] = []
        started = time.monotonic()
        async with httpx.AsyncClient(base_url=soaked.url, timeout=60) as http:
            soak = Soak(http, words)
            for _ in range(ROUNDS):
                await soak.run(STREAMS // ROUNDS)
                measurements.append(Memory.of(soaked))
        await base.wait_until_restored()
        measurements.append(Memory.of(soaked))
        series = (await own.get("/metrics")).text.count("\nsglang:http_requests_total")
    seconds = time.monotonic() - started
    print(f"\n{STREAMS} streams in {seconds:.0f} s; {base.figures}; {series} series of requests")
    for memory in measurements:
        sizes = f"http {memory.http:.1f} MB, scheduler {memory.scheduler:.1f} MB"
        print(f"  {sizes}, {memory.files} files")
    warm, last = measurements[0], measurements[-1]
    assert last.http - warm.http < SLACK_MB
    assert last.scheduler - warm.scheduler < SLACK_MB
    assert last.files <= warm.files
    assert series < 20
    await soaked.stop()
