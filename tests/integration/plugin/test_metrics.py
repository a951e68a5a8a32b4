"""The metrics of prompt streams, and the routes that need the server's API key."""

import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from flashmoa.errors import EngineDraining
from tests.conftest import ROOT
from tests.integration.support import (
    GREEDY,
    Words,
    complete_stream,
    generate,
    wait_until_idle,
    wait_until_prefilled,
)

KEY = "secret"
LONG = {**GREEDY, "max_new_tokens": 1500}


@pytest.fixture(scope="module")
async def guarded(engines: LocalEngines, model: Path) -> AsyncGenerator[LocalEngine]:
    """An engine with metrics, an API key, and room for one request and one more that waits."""
    running = await engines.start(
        model,
        core=0,
        arguments=[
            "--enable-metrics", "--api-key", KEY, "--max-total-tokens", "2000",
            "--max-running-requests", "1", "--max-queued-requests", "1",
        ],
    )  # fmt: skip
    # The engine's own measurements take a place in the queue.
    async with EngineClient(running.url, api_key=KEY, timeout=60) as client:
        with anyio.fail_after(60):
            while (await client.info()).costs is None:  # noqa: ASYNC110
                await anyio.sleep(0.05)
    yield running
    await running.stop()


@pytest.fixture
async def allowed(guarded: LocalEngine) -> AsyncGenerator[EngineClient]:
    async with EngineClient(guarded.url, api_key=KEY, timeout=60) as client:
        yield client


class Figures:
    """The content of ``/metrics``; call it with a metric's name, and perhaps a label's value."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, name: str, label: str = "") -> float:
        rows = re.findall(rf"^flashmoa:{name}{{(.*)}} (\S+)$", self.text, re.MULTILINE)
        values = [float(value) for labels, value in rows if label in labels]
        assert len(values) <= 1, rows
        # The model has no name, so its path is shown.
        assert 'model_name="/' in rows[0][0]
        return values[0] if values else 0.0


async def figures(engine: LocalEngine, accepted: str = "*/*") -> Figures:
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as http:
        answer = await http.get("/metrics", headers={"Accept": accepted})
    assert answer.status_code == 200
    return Figures(answer.text)


async def get(engine: LocalEngine, path: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=engine.url, timeout=60, headers=headers) as http:
        return (await http.get(path)).json()


async def in_flight(engine: LocalEngine) -> int:
    return (await get(engine, "/flashmoa/info"))["in_flight"]["requests"]


async def test_metrics_count_what_streams_did(
    guarded: LocalEngine, allowed: EngineClient, words: Words
) -> None:
    start = await figures(guarded)
    for name in ("streams_open", "duplicate_tokens_avoided_total", "streams_gave_way_total"):
        assert start(name) == 0
    used = await allowed.open_stream(text=words(200, 1))
    wrong = await allowed.open_stream(text=words(200, 2))
    await allowed.append(used.id, 0, text=" and a few words more", end=True)
    await wait_until_prefilled(allowed, used.id, 204)
    await complete_stream(allowed, wrong.id)
    assert (await figures(guarded))("streams_open") == 2
    await generate(allowed, words(200, 1) + " and a few words more of it", 1, used.id)
    await generate(allowed, words(200, 3), 1, wrong.id)
    await generate(allowed, "The", 1, "never opened")
    deleted = await allowed.open_stream(text="The plan")
    await allowed.delete_stream(deleted.id)
    await wait_until_idle(allowed)
    end = await figures(guarded)
    assert end("streams_open") == 0
    assert [end("finals_total", s) for s in ("hit", "mispredicted", "unknown")] == [1, 1, 1]
    assert [end("streams_ended_total", s) for s in ("used", "deleted", "expired")] == [2, 1, 0]
    assert 400 <= end("stream_tokens_buffered_total") <= 410
    assert 390 <= end("stream_tokens_prefilled_total") <= end("stream_tokens_buffered_total")
    assert end("stream_increments_total") >= 2
    assert 190 <= end("final_late_tokens_total") <= 230
    # There is one row for each route, and not for each stream.
    assert used.id not in end.text
    assert 'endpoint="/prompt_streams/{stream_id}/append"' in end.text


async def test_the_boards_metrics_exist(
    guarded: LocalEngine, allowed: EngineClient, words: Words
) -> None:
    """The metrics of docs/grafana exist on every SGLang release that these tests run on."""
    # In OpenMetrics, one of the formats of /metrics, names have no colon.
    board = (ROOT / "docs" / "grafana" / "flashmoa.json").read_text()
    names = set(re.findall(r"\b(?:flashmoa|sglang)\[:_\]\w+", board))
    text = words(100, 20)
    opened = await allowed.open_stream(text=text)
    await complete_stream(allowed, opened.id)
    await generate(allowed, text, 2, opened.id)
    # The first is the format for people, the second is what Prometheus asks for.
    for accepted in ("*/*", "application/openmetrics-text;version=1.0.0"):
        text = (await figures(guarded, accepted)).text
        missing = [name for name in names if not re.search(rf"^{name}\{{", text, re.MULTILINE)]
        assert not missing, accepted


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/flashmoa/info"),
        ("POST", "/prefill_only"),
        ("POST", "/render"),
        ("POST", "/prompt_streams"),
        ("GET", "/prompt_streams"),
        ("GET", "/prompt_streams/x"),
        ("POST", "/prompt_streams/x/append"),
        ("POST", "/prompt_streams/x/keep_alive"),
        ("DELETE", "/prompt_streams/x"),
    ],
)
async def test_the_servers_api_key_guards_the_routes(
    guarded: LocalEngine, method: str, path: str
) -> None:
    async with httpx.AsyncClient(base_url=guarded.url, timeout=60) as http:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
            answer = await http.request(method, path, headers=headers, json={"text": "x"})
            assert answer.status_code == 401, (path, headers)
        right = {"Authorization": f"Bearer {KEY}"}
        answer = await http.request(method, path, headers=right, json={"text": "x"})
        assert answer.status_code not in (401, 403), path
        if (method, path) == ("POST", "/prompt_streams"):
            await http.delete(f"{path}/{answer.json()['id']}", headers=right)


async def test_health_and_metrics_need_no_key(guarded: LocalEngine) -> None:
    async with httpx.AsyncClient(base_url=guarded.url, timeout=60) as http:
        for path in ("/health", "/health/ready", "/metrics"):
            assert (await http.get(path)).status_code == 200


async def test_a_stream_is_opened_while_the_queue_is_full(
    guarded: LocalEngine, allowed: EngineClient, words: Words
) -> None:
    """It takes no place in the queue, and is prefilled when there is room. A prefill gets a 503."""
    text = words(300, 8)

    async def occupy() -> None:
        async with allowed.generate(text="The", sampling=LONG) as deltas:
            async for _ in deltas:
                running.set()

    running = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(occupy)
        await running.wait()
        group.start_soon(occupy)
        while await in_flight(guarded) < 2:  # noqa: ASYNC110 - there is no event for it
            await anyio.sleep(0.01)
        with pytest.raises(EngineDraining) as busy:
            await allowed.prefill_only(text="Full")
        assert busy.value.code == "engine_busy"
        opened = await allowed.open_stream(text=text)
        await allowed.append(opened.id, 0, end=True)
        with pytest.raises(EngineDraining):
            await allowed.prefill_only(text="Still full")
        group.cancel_scope.cancel()
    await wait_until_prefilled(allowed, opened.id, 300)
    assert (await get(guarded, f"/prompt_streams/{opened.id}"))["failure"] is None
    _, usage = await generate(allowed, text, 1, opened.id)
    assert usage.prompt_stream is not None and usage.prompt_stream.status == "hit"
    await wait_until_idle(allowed)
