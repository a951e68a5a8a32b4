"""Who can use a prompt stream, and how long it lives without a request of its client."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

import anyio
import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine

pytestmark = pytest.mark.anyio


@pytest.fixture
async def http(engine: LocalEngine, client: EngineClient) -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as connected:
        yield connected


async def test_streams_are_counted_and_not_listed(http: httpx.AsyncClient) -> None:
    ids = [(await http.post("/prompt_streams", json={"text": "a"})).json()["id"] for _ in range(2)]
    assert (await http.get("/prompt_streams")).json() == {"open": 2}
    info = (await http.get("/flashmoa/info")).text
    assert not any(stream_id in info for stream_id in ids)
    for stream_id in ids:
        await http.delete(f"/prompt_streams/{stream_id}")
    assert (await http.get("/prompt_streams")).json() == {"open": 0}


async def test_stream_ids_are_random(http: httpx.AsyncClient) -> None:
    ids = {(await http.post("/prompt_streams", json={"text": "a"})).json()["id"] for _ in range(8)}
    assert len(ids) == 8
    # An id is a UUID in hexadecimal: 122 random bits, and six for the kind of UUID.
    assert all(len(stream_id) == 32 and int(stream_id, 16) for stream_id in ids)
    for stream_id in ids:
        await http.delete(f"/prompt_streams/{stream_id}")


async def test_a_stream_lives_for_thirty_seconds_or_as_its_client_asks(
    http: httpx.AsyncClient,
) -> None:
    for fields, seconds in (({}, 30), ({"ttl_seconds": 5}, 5), ({"ttl_seconds": 1e9}, 3600)):
        state = (await http.post("/prompt_streams", json={"text": "a", **fields})).json()
        assert state["ttl_seconds"] == seconds
        await http.delete(f"/prompt_streams/{state['id']}")


@pytest.mark.slow
async def test_a_stream_that_is_kept_alive_outlasts_its_ttl(
    http: httpx.AsyncClient, words: Callable[[int, int], str]
) -> None:
    body = {"text": words(50, 730), "ttl_seconds": 2}
    opened = (await http.post("/prompt_streams", json=body)).json()
    path = f"/prompt_streams/{opened['id']}"
    until = anyio.current_time() + 4
    while anyio.current_time() < until:
        answer = await http.post(f"{path}/keep_alive")
        assert answer.status_code == 200, answer.text
        assert answer.json()["next_seq"] == 0
        await anyio.sleep(0.2)
    with anyio.fail_after(10):
        while (await http.get(path)).status_code == 200:  # noqa: ASYNC110
            await anyio.sleep(0.02)
    answer = await http.post(f"{path}/keep_alive")
    assert answer.status_code == 410
    assert answer.json()["error"]["reason"] == "expired"
    assert (await http.post("/prompt_streams/unknown/keep_alive")).status_code == 404
