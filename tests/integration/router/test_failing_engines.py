"""Test routers whose engines die, come back, or are restarted one after the other."""

import os
import signal
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from flashmoa import EngineClient, Workflow
from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.router.conftest import make_options, serve_router
from tests.integration.router.http_calls import generated, generation, metric, wait_for_metric
from tests.integration.router.serving import InTurn
from tests.integration.support import (
    GREEDY,
    STRICT,
    Words,
    chat_text,
    wait_for_streams,
    wait_until_idle,
)
from tests.waiting import until

POOL = ["--max-total-tokens", "12000"]
WORKERS, WORKFLOWS = 4, 12
ASKED: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


class Load:
    """Runs workflows of a writer and a reader one after the other, in several workers at once."""

    def __init__(self, client: EngineClient, words: Words) -> None:
        self._client = client
        self._words = words
        # The texts of each workflow, by its seed; it runs several times.
        self.answers: dict[int, set[tuple[str, str]]] = {}
        # How the readers' prompt streams were used.
        self.statuses: Counter[str] = Counter()
        self._progress = anyio.Event()

    def write(self, seed: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": self._words(60, 8000 + seed)}]

    def read(self, seed: int, draft: object) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{self._words(200, 8100 + seed)}\n{draft}\nBetter?"}]

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Run workflows until the context is left. Raises: the first error of a workflow."""
        self._stopping = False
        async with anyio.create_task_group() as group:
            for worker in range(WORKERS):
                group.start_soon(self._work, worker)
            yield
            self._stopping = True

    async def _work(self, seed: int) -> None:
        while not self._stopping:
            seed = (seed + WORKERS) % WORKFLOWS
            async with Workflow(self._client) as flow:
                draft = flow.ask(self.write(seed), max_tokens=80, **ASKED)
                review = flow.ask(self.read(seed, draft), max_tokens=12, **ASKED)
                self.answers.setdefault(seed, set()).add((await draft, await review))
            used = review.usage and review.usage.prompt_stream
            self.statuses[used.status if used else "unlinked"] += 1
            self._progress.set()
            self._progress = anyio.Event()

    async def wait_for_hits(self, more: int = 3) -> None:
        """Wait until that many more workflows had their links."""
        goal = self.statuses["hit"] + more
        with anyio.fail_after(60):
            while self.statuses["hit"] < goal:
                await self._progress.wait()


@pytest.mark.nightly
@pytest.mark.timeout(400)
async def test_a_rolling_restart_under_linked_load_loses_nothing(
    engines: LocalEngines, model: Path, words: Words
) -> None:
    running = [await start(engines, model, core) for core in range(2)]
    try:
        async with (
            # So that a new engine gets requests at once, although its cache is empty.
            serve_router(make_options(*running, policy=InTurn())) as router,
            EngineClient(str(router.base_url), timeout=60) as client,
        ):
            load = Load(client, words)
            async with load.running():
                for core in range(2):
                    await load.wait_for_hits()
                    running[core] = await restart(engines, model, core, running[core], router)
                await load.wait_for_hits(2 * WORKERS)
            for engine in running:
                async with EngineClient(engine.url, timeout=60) as one:
                    assert (await wait_until_idle(one)).total
            await check_unlinked(client, load)
    finally:
        for engine in running:
            await engine.stop()


async def start(
    engines: LocalEngines, model: Path, core: int, *arguments: str, wait: bool = True
) -> LocalEngine:
    return await engines.start(
        model, core=core, arguments=[*POOL, *arguments], environment=STRICT, wait=wait
    )


async def restart(
    engines: LocalEngines, model: Path, core: int, old: LocalEngine, router: httpx.AsyncClient
) -> LocalEngine:
    """Drain an engine while it has prompt streams, and start another one on its port."""
    up = f'flashmoa_router_engine_up{{engine="{old.url}"}}'
    sent = f'flashmoa_router_requests_total{{ending="answered",engine="{old.url}"}}'
    async with EngineClient(old.url, timeout=60) as client:
        # The engine cannot end before this answer does.
        long = {**GREEDY, "max_new_tokens": 600}
        async with client.generate(text="The", sampling=long) as deltas:
            await anext(deltas)
            await wait_for_streams(client)
            os.kill(old.pid, signal.SIGTERM)
            with anyio.fail_after(30):
                while await metric(router, up):  # noqa: ASYNC110 - it sends no event
                    await anyio.sleep(0.02)
            assert old.is_running()
            before = await metric(router, sent)
            assert [delta async for delta in deltas][-1].finish_reason == "length"
    await until(lambda: not old.is_running())
    # After the router knew of the drain, it sent the engine nothing: only running requests ended.
    ended = await metric(router, sent)
    assert ended <= before + 2 * WORKERS
    port = old.url.rpartition(":")[2]
    new = await start(engines, model, core, "--port", port, wait=False)
    await wait_for_metric(router, up)
    await wait_for_metric(router, sent, above=ended)
    return LocalEngine(new.pid, int(port), new.log)


async def check_unlinked(client: EngineClient, load: Load) -> None:
    """Check that requests without links, one after the other, have the same answers."""
    for seed, answers in load.answers.items():
        draft = await chat_text(client, load.write(seed), max_tokens=80, **ASKED)
        review = await chat_text(client, load.read(seed, draft), max_tokens=12, **ASKED)
        assert answers == {(draft, review)}


@pytest.mark.slow
async def test_other_engine_serves_when_one_dies(
    engines: LocalEngines, model: Path, engine: LocalEngine, words: Words
) -> None:
    async with serve_router(
        make_options(engine, LocalEngine(0, 9, model), policy=InTurn())
    ) as router:
        # The second engine never existed.
        await generated(router, words(20, 990))
    mortal = await engines.start(model, core=1, arguments=["--max-total-tokens", "12000"])
    try:
        async with serve_router(make_options(mortal, engine, policy=InTurn())) as router:
            answers: list[httpx.Response] = []

            async def ask(number: int) -> None:
                body = generation(words(30, 1000 + number), tokens=200)
                answers.append(await router.post("/generate", json=body))

            async with anyio.create_task_group() as group:
                for number in range(4):
                    group.start_soon(ask, number)
                load = f'flashmoa_router_engine_load{{engine="{mortal.url}"'
                await wait_for_metric(router, load)
                await mortal.stop()
            # The requests that the engine had end with an error that says so.
            assert sorted(answer.status_code for answer in answers) == [200, 200, 502, 502]
            lost = [answer.text for answer in answers if answer.status_code == 502]
            assert all("the engine is gone" in text for text in lost)
            await generated(router, words(30, 1010))
            up = f'flashmoa_router_engine_up{{engine="{mortal.url}"}}'
            assert await metric(router, up) == 0
            # An engine that starts at the old address gets requests again.
            port = mortal.url.rpartition(":")[2]
            mortal = await engines.start(
                model, arguments=["--port", port, "--max-total-tokens", "12000"], wait=False
            )
            await wait_for_metric(router, up)
            for number in range(2):
                await generated(router, words(30, 1020 + number))
            assert await metric(router, up) == 1
    finally:
        await mortal.stop()
