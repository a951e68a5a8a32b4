"""Thousands of requests of every kind through ``flashmoa router``: it holds no more afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import anyio
import httpx
import pytest

from flashmoa.engine.local import LocalEngines, free_port
from tests.integration.baseline import Baseline
from tests.integration.router.http_calls import chat, generation, metric
from tests.integration.soak import TIMEOUT, ask_often, serving
from tests.integration.support import STRICT

pytestmark = [pytest.mark.anyio, pytest.mark.nightly, TIMEOUT]

KINDS = ("chat", "stream", "leave", "claim", "delete", "expire", "score", "refused", "unknown")
# A small pool is soon full and then evicts KV.
POOL = 6000


class Requests:
    """Makes requests of each kind in turn, with prompts of which no two are the same."""

    def __init__(self, http: httpx.AsyncClient, words: Callable[[int, int], str]) -> None:
        self._http = http
        self._words = words

    async def ask(self, number: int) -> None:
        kind, text = KINDS[number % len(KINDS)], self._words(60, number)
        if kind == "chat":
            await self._post("/v1/chat/completions", chat(text, max_tokens=2))
        elif kind in ("stream", "leave"):
            body = chat(text, max_tokens=4, stream=True)
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    if kind == "leave":
                        break
        elif kind == "score":
            body = {"query": text, "items": [" a", " b"], "label_token_ids": [5, 6], "model": "m"}
            await self._post("/v1/score", body)
        elif kind == "refused":
            answer = await self._http.post(f"/nothing/{number}", content=b"{")
            assert answer.status_code == 404
            answer = await self._http.post("/v1/chat/completions", content=b"{")
            assert answer.status_code == 400
        elif kind == "unknown":
            answer = await self._http.delete(f"/prompt_streams/{number:032x}")
            assert answer.status_code == 404
        else:
            await self._open_stream(kind, text)

    async def _open_stream(self, kind: str, text: str) -> None:
        ttl = 0.2 if kind == "expire" else 60
        opened = await self._post("/prompt_streams", {"text": text, "ttl_seconds": ttl})
        path = f"/prompt_streams/{opened['id']}"
        if kind == "expire":
            return
        await self._post(f"{path}/append", {"seq": 0, "text": " more"})
        if kind == "delete":
            assert (await self._http.delete(path)).status_code == 200
        else:
            await self._post(
                "/generate", generation(f"{text} more", 1, prompt_stream_id=opened["id"])
            )

    async def _post(self, path: str, body: object) -> dict[str, str]:
        answer = await self._http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


async def test_a_router_holds_no_more_after_thousands_of_requests(
    engines: LocalEngines,
    model: Path,
    words: Callable[[int, int], str],
    compiling: dict[str, str],
) -> None:
    events = {"publisher": "zmq", "endpoint": f"tcp://*:{free_port()}"}
    engine = await engines.start(
        model,
        core=0,
        arguments=[
            *("--max-total-tokens", str(POOL), "--log-level", "warning"),
            *("--kv-events-config", json.dumps(events)),
        ],
        environment={**STRICT, **compiling},
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

        await ask_often(Requests(http, words).ask, {"router": process}, settle)
        assert len(series) == 1 and max(series) < 60, series
    await engine.stop()
