"""Test the router in front of two real engines."""

import json

import anyio
import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from tests.integration.router.conftest import make_options, serve_router
from tests.integration.router.http_calls import (
    generated,
    generation,
    metric,
)
from tests.integration.router.serving import InTurn
from tests.integration.support import Words, post_json, wait_until_idle


async def test_router_passes_on_engines_answers(
    router: httpx.AsyncClient, client: EngineClient, words: Words
) -> None:
    text = words(60, 901)
    async with httpx.AsyncClient(base_url=client.url, timeout=60) as direct:
        expected = await generated(direct, text, tokens=8)
        assert (await generated(router, text, tokens=8))["text"] == expected["text"]
        ask = {
            "model": "default",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 8,
            "temperature": 0,
        }
        chats = [
            (await one.post("/v1/chat/completions", json=ask)).json()["choices"][0]["message"]
            for one in (direct, router)
        ]
        assert chats[0] == chats[1]
        wrong = [await one.post("/generate", json={"text": 3}) for one in (direct, router)]
        assert wrong[0].status_code == wrong[1].status_code == 400
    streamed = ""
    async with router.stream("POST", "/generate", json=generation(text, 8, stream=True)) as answer:
        pieces = [line[6:] async for line in answer.aiter_lines() if line.startswith("data: ")]
    assert pieces[-1] == "[DONE]" and len(pieces) > 3
    streamed = json.loads(pieces[-2])["text"]
    assert streamed == expected["text"]
    assert (await router.get("/flashmoa/info")).json()["kv"]
    assert await metric(router, "flashmoa_router_engine_up{") == 2
    assert (await router.get("/v1/models")).json()["data"]
    assert (await router.get("/health")).status_code == 200


async def test_siblings_are_routed_to_the_engine_that_cached_their_prefix(
    router: httpx.AsyncClient, words: Words
) -> None:
    documents = [words(320, 910 + number) for number in range(4)]
    cached: list[int] = []
    for number in range(3):
        for document in documents:
            answer = await generated(router, f"{document} {words(8, 950 + number)}", tokens=1)
            cached.append(answer["meta_info"]["cached_tokens"])
    # The first request about a document computes it, the others do not.
    assert all(tokens < 100 for tokens in cached[:4])
    assert all(tokens >= 300 for tokens in cached[4:])
    assert await metric(router, "flashmoa_router_requests_total") == 12
    assert await metric(router, "flashmoa_router_engine_load") == 0


async def test_stream_and_its_request_stay_on_one_engine(
    engine: LocalEngine, downstream: LocalEngine, words: Words
) -> None:
    text, more = words(100, 970), " " + words(50, 971)
    async with serve_router(make_options(engine, downstream, policy=InTurn())) as router:
        async with EngineClient(str(router.base_url)) as client:
            # The router looks like an engine to an engine's client.
            assert "prompt_streams" in (await client.info()).capabilities
            streams = [await client.open_stream(text=text) for _ in range(3)]
            for stream in streams:
                await client.append(stream.id, 0, text=more)
            for stream in streams:
                assert (await client.stream_state(stream.id)).next_seq == 1
            ask = generation(text + more, prompt_stream_id=streams[1].id)
            answer = await post_json(router, "/generate", ask)
            assert answer["meta_info"]["prompt_stream"]["status"] == "hit"
            router.headers["X-Request-Id-FlashMoA-Stream"] = streams[2].id
            answer = await post_json(router, "/generate", generation(text + more))
            assert answer["meta_info"]["prompt_stream"]["status"] == "hit"
        # Another router, such as this one after a restart, does not know the streams.
        async with serve_router(make_options(engine, downstream)) as other:
            unknown = await other.delete(f"/prompt_streams/{streams[0].id}")
            assert unknown.status_code == 404
            assert unknown.json()["error"]["code"] == "unknown_stream"
        gone = await router.delete(f"/prompt_streams/{streams[0].id}")
        assert gone.status_code == 200


async def test_disconnect_aborts_the_request_at_the_engine(
    router: httpx.AsyncClient, engine: LocalEngine, downstream: LocalEngine, words: Words
) -> None:
    text = words(40, 980)
    async with router.stream(
        "POST", "/generate", json=generation(text, 4000, stream=True)
    ) as answer:
        async for _ in answer.aiter_lines():
            break
    with anyio.move_on_after(0.3):
        await router.post("/generate", json=generation(text, 4000))
    for one in (engine, downstream):
        async with EngineClient(one.url) as watching:
            await wait_until_idle(watching)
    assert await metric(router, "flashmoa_router_engine_load{") == 0


async def test_lists_of_prompts_are_routed_and_answered_like_an_engine(
    router: httpx.AsyncClient, client: EngineClient, words: Words
) -> None:
    documents = [words(20, 1071), words(20, 1072)]
    score = {"query": words(100, 1070), "label_token_ids": [5, 9], "items": documents}
    async with httpx.AsyncClient(base_url=client.url, timeout=60) as direct:
        ask = {"model": "default", "apply_softmax": True, **score}
        answers = [await post_json(to, "/v1/score", ask) for to in (direct, router)]
    for one, other in zip(answers[0]["scores"], answers[1]["scores"], strict=True):
        # They differ slightly, because the second one used the cache.
        assert one == pytest.approx(other, abs=1e-3)
    ask = {"query": "lake", "documents": documents, "stream": True}
    async with router.stream("POST", "/v1/rerank", json=ask) as answer:
        events = [line async for line in answer.aiter_lines() if line]
    assert len(events) == 4 and events[-1] == "data: [DONE]"
