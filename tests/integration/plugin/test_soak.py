"""Thousands of streams that end in every way, and of other calls: an engine holds no more then."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.baseline import Baseline
from tests.integration.raw import RawConnection, make_request
from tests.integration.soak import TIMEOUT, ask_often, engine_processes
from tests.integration.support import STRICT

pytestmark = [pytest.mark.anyio, pytest.mark.nightly, TIMEOUT]
ENDINGS = ("use", "mispredict", "use twice", "delete", "expire", "vanish")
OTHERS = ("prefill only", "score", "unknown")
BRIEF = ("expire", "vanish")
GREEDY_ONE = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}


class Soak:
    """Opens streams of all kinds, and asks for what needs none."""

    def __init__(self, http: httpx.AsyncClient, words: Callable[[int, int], str]) -> None:
        self._http = http
        self._words = words
        self._dice = random.Random(3)

    async def ask(self, number: int) -> None:
        ways = ENDINGS + OTHERS
        way = ways[number % len(ways)]
        if way in ENDINGS:
            await self._stream(way, number)
        elif way == "prefill only":
            await self._post("/prefill_only", {"text": self._words(40, number)})
        elif way == "score":
            body = {"query": self._words(20, number), "label_token_ids": [5, 6], "model": "m"}
            await self._post("/v1/score", {**body, "items": [f" {number}", " b"]})
        else:
            answer = await self._http.get(f"/prompt_streams/{number:032x}")
            assert answer.status_code == 404

    async def _stream(self, ending: str, number: int) -> None:
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
        environment=STRICT,
    )


async def test_an_engine_holds_no_more_after_thousands_of_calls(
    soaked: LocalEngine, words: Callable[[int, int], str]
) -> None:
    async with (
        httpx.AsyncClient(base_url=soaked.url, timeout=60) as own,
        httpx.AsyncClient(base_url=soaked.url, timeout=60) as http,
    ):
        base = Baseline(soaked, own)
        await base.take()
        series: list[int] = []

        async def settle() -> None:
            await base.wait_until_restored()
            page = (await own.get("/metrics")).text
            # That of requests has the path.
            series.append(page.count("\nsglang:http_requests_total"))
            assert page.count("\nflashmoa:") < 30

        await ask_often(Soak(http, words).ask, engine_processes(soaked), settle)
        assert series[-1] < 20, series
    await soaked.stop()
