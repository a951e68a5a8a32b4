"""Who can use a prompt stream, how long it lives, and its namespace: a salt, key or adapter."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from flashmoa_sglang.sglang.releases import RELEASE

from flashmoa import Workflow
from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.models import build_adapter
from tests.integration.support import (
    GREEDY,
    Words,
    complete_stream,
    post_json,
    start_special_engine,
    wait_until_held,
    wait_until_idle,
)


async def open_stream(http: httpx.AsyncClient, text: str, **fields: Any) -> str:
    return (await post_json(http, "/prompt_streams", text=text, **fields))["id"]


async def ask(http: httpx.AsyncClient, text: str, **fields: Any) -> dict[str, Any]:
    sampling = {**GREEDY, "max_new_tokens": 8}
    return await post_json(http, "/generate", text=text, sampling_params=sampling, **fields)


def check_status(answer: dict[str, Any]) -> str:
    """Return the stream's status; check that its KV was used completely, or not at all."""
    meta = answer["meta_info"]
    status = meta["prompt_stream"]["status"]
    assert meta["late_tokens"] <= 2 if status == "hit" else meta["cached_tokens"] == 0
    return status


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
async def test_a_stream_serves_only_requests_with_its_salt(
    http: httpx.AsyncClient, client: EngineClient, words: Words, name: str
) -> None:
    if name not in RELEASE.namespace_fields("a", None, None):
        pytest.skip("/generate of this release has no cache_salt")
    text = words(300, 600)
    await client.flush_cache()
    alone = await ask(http, text + " of")
    for of_stream, of_request, status in (
        ("mine", "mine", "hit"),
        ("mine", "yours", "other_namespace"),
        ("mine", None, "other_namespace"),
        (None, "yours", "other_namespace"),
    ):
        await client.flush_cache()
        stream = await open_stream(http, text, **{name: of_stream})
        await complete_stream(client, stream)
        answer = await ask(http, text + " of", prompt_stream_id=stream, **{name: of_request})
        assert check_status(answer) == status
        assert answer["output_ids"] == alone["output_ids"]


async def test_the_kv_of_a_salt_serves_chats_with_this_salt_only(
    http: httpx.AsyncClient, client: EngineClient, words: Words
) -> None:
    await client.flush_cache()
    messages = [{"role": "user", "content": words(200, 401)}]
    done = await client.prefill_only(messages=messages, cache_salt="one")
    cached: list[int] = []
    for salt in ("two", "one"):
        body = {"model": "m", "messages": messages, "max_tokens": 1, "cache_salt": salt}
        usage = (await http.post("/v1/chat/completions", json=body)).json()["usage"]
        cached.append((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))
    assert cached == [0, done.prompt_tokens - 1]


@pytest.fixture(scope="module")
async def adapted(
    engines: LocalEngines, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[LocalEngine]:
    folder = tmp_path_factory.mktemp("adapters")
    paths = [
        f"{name}={build_adapter(folder / name, model, seed)}" for seed, name in enumerate("ab")
    ]
    arguments = ["--lora-paths", *paths, "--lora-backend", "torch_native"]
    async with start_special_engine(engines, model, *arguments) as engine:
        yield engine


@pytest.fixture
async def adapted_http(adapted: LocalEngine) -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=adapted.url, timeout=60) as http:
        yield http


@pytest.fixture
async def adapted_client(adapted: LocalEngine) -> AsyncGenerator[EngineClient]:
    async with EngineClient(adapted.url, timeout=60) as client:
        yield client
        await wait_until_idle(client)


async def test_a_stream_of_an_adapter_serves_its_requests(
    adapted_client: EngineClient, adapted_http: httpx.AsyncClient, words: Words
) -> None:
    text = words(300, 601)
    alone = await ask(adapted_http, text + " of", lora_path="a")
    assert alone["output_ids"] != (await ask(adapted_http, text + " of"))["output_ids"]
    for fields in ({"lora_path": "a"}, {"model": "base:a"}):
        await adapted_client.flush_cache()
        stream = await open_stream(adapted_http, text, **fields)
        await complete_stream(adapted_client, stream)
        answer = await ask(adapted_http, text + " of", lora_path="a", prompt_stream_id=stream)
        assert check_status(answer) == "hit"
        assert answer["output_ids"] == alone["output_ids"]


async def test_a_stream_without_the_adapter_is_not_used_and_the_answer_says_so(
    adapted_client: EngineClient, adapted_http: httpx.AsyncClient, words: Words
) -> None:
    text = words(300, 602)
    for of_stream, of_request in ((None, "a"), ("a", None), ("a", "b")):
        await adapted_client.flush_cache()
        alone = await ask(adapted_http, text + " of", lora_path=of_request)
        await adapted_client.flush_cache()
        stream = await open_stream(adapted_http, text, lora_path=of_stream)
        await complete_stream(adapted_client, stream)
        answer = await ask(
            adapted_http, text + " of", lora_path=of_request, prompt_stream_id=stream
        )
        assert check_status(answer) == "other_namespace"
        assert answer["output_ids"] == alone["output_ids"]


async def test_a_request_of_a_different_namespace_leaves_the_stream_for_the_next(
    adapted_client: EngineClient, adapted_http: httpx.AsyncClient, words: Words
) -> None:
    text = words(300, 606)
    stream = await open_stream(adapted_http, text, lora_path="a")
    await complete_stream(adapted_client, stream)
    body = {"text": text + " of", "lora_path": "missing-adapter", "prompt_stream_id": stream}
    assert (await adapted_http.post("/generate", json=body)).status_code == 400
    answer = await ask(adapted_http, text + " of", lora_path="a", prompt_stream_id=stream)
    assert check_status(answer) == "hit"


async def test_a_workflows_stream_has_the_namespace_of_its_request(
    adapted_client: EngineClient, words: Words
) -> None:
    for namespace in (
        {"lora_path": "a"},
        {"model": "base:b"},
        {"cache_salt": "mine"},
        {"extra_key": "b"},
        {},
    ):
        async with Workflow(adapted_client) as flow:
            draft = flow.text("draft")
            messages = [{"role": "user", "content": f"{words(300, 604)} {draft}"}]
            answer = flow.ask(messages, max_tokens=4, temperature=0, **namespace)
            draft.write(words(40, 605))
            await wait_until_held(adapted_client)
            draft.close()
            await answer
        assert answer.usage is not None and answer.usage.prompt_stream is not None
        assert answer.usage.prompt_stream.status == "hit"
        assert answer.usage.streamed_tokens
        await adapted_client.flush_cache()


async def test_streams_are_counted_and_not_listed(http: httpx.AsyncClient) -> None:
    ids = [(await http.post("/prompt_streams", json={"text": "a"})).json()["id"] for _ in range(2)]
    # An id is a UUID in hexadecimal: 122 random bits, and six for the kind of UUID.
    assert all(len(stream_id) == 32 and int(stream_id, 16) for stream_id in set(ids))
    assert (await http.get("/prompt_streams")).json() == {"open": len(set(ids))}
    info = (await http.get("/flashmoa/info")).text
    assert not any(stream_id in info for stream_id in ids)
    for stream_id in ids:
        await http.delete(f"/prompt_streams/{stream_id}")
    assert (await http.get("/prompt_streams")).json() == {"open": 0}


async def test_a_stream_lives_for_thirty_seconds_or_as_its_client_asks(
    http: httpx.AsyncClient,
) -> None:
    for fields, seconds in (({}, 30), ({"ttl_seconds": 5}, 5)):
        state = (await http.post("/prompt_streams", json={"text": "a", **fields})).json()
        assert state["ttl_seconds"] == seconds
        await http.delete(f"/prompt_streams/{state['id']}")


@pytest.mark.slow
async def test_a_stream_that_is_kept_alive_outlasts_its_ttl(
    http: httpx.AsyncClient, words: Words
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
