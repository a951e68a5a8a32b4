"""The plugin's routes on real SGLang: their answers, and that no request breaks them."""

import httpx
import pytest
from flashmoa_sglang.sglang.releases import TESTED

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.errors import (
    MalformedRequest,
    PromptTooLarge,
    RequestRefused,
    StreamGone,
    StreamOutOfOrder,
    StreamUnknown,
)
from tests.conftest import POOL
from tests.integration.support import Words, generate, wait_for_state, wait_until_prefilled


async def test_info_describes_the_engine(http: httpx.AsyncClient, client: EngineClient) -> None:
    # It is in no pair.
    assert (await http.get("/flashmoa/info")).json()["role"] is None
    info = await client.info()
    assert info.sglang["version"] in TESTED
    assert {"prefill_only", "prompt_streams", "render"} <= set(info.capabilities)
    assert info.context_length == 32768
    assert len(info.tokenizer["digest"]) == 64


async def test_prefill_only_leaves_the_prompt_in_the_cache(
    client: EngineClient, words: Words
) -> None:
    await client.flush_cache()
    text = words(100, 1)
    first = await client.prefill_only(text=text)
    assert (first.prompt_tokens, first.cached_tokens, first.prefilled_tokens) == (100, 0, 100)
    again = await client.prefill_only(text=text)
    assert again.cached_tokens == 99
    _, usage = await generate(client, text + " more of it", 1)
    assert usage.cached_tokens == 100


async def test_the_cache_of_a_busy_engine_is_not_emptied(client: EngineClient) -> None:
    sampling = {"max_new_tokens": 2000, "temperature": 0, "ignore_eos": True}
    async with client.generate(text="The", sampling=sampling) as pieces:
        await anext(pieces)
        with pytest.raises(RequestRefused, match=r"was not idle for 0.1 s.* Try again once"):
            await client.flush_cache(wait_seconds=0.1)


async def test_ids_of_streams_and_probes_are_not_in_the_log(
    engine: LocalEngine,
    http: httpx.AsyncClient,
    client: EngineClient,
    words: Words,
) -> None:
    """A reader of the log who knows the id could use the stream."""
    stream = await client.open_stream(text=words(50, 4))
    await client.append(stream.id, 0, text=" and more")
    await client.keep_alive(stream.id)
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    generation = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
    for path, body in (("/v1/chat/completions", chat), ("/generate", generation)):
        named = {"X-Request-Id-FlashMoA-Stream": stream.id}
        assert (await http.post(path, json=body, headers=named)).status_code == 200
    await client.delete_stream(stream.id)
    state = (await http.post("/prompt_streams", json={"text": "x", "lora_path": "no"})).json()
    await wait_for_state(http, state["id"], lambda now: now["failure"] is not None)
    # Routers probe every two seconds.
    assert (await http.get("/health/ready")).json() == {"status": "ready"}
    assert (await http.get("/model_info")).status_code == 200
    log = engine.log.read_text()
    assert "/model_info" in log and "/health/ready" not in log
    assert "/prompt_streams HTTP" in log and "A prompt stream is not prefilled" in log
    assert stream.id not in log and state["id"] not in log
    await client.delete_stream(state["id"])


async def test_render_returns_the_prompt_of_a_chat_request(
    http: httpx.AsyncClient, client: EngineClient
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    text = await client.render(messages)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    done = await client.prefill_only(messages=messages)
    body = {"model": "m", "messages": messages, "max_tokens": 1}
    usage = (await http.post("/v1/chat/completions", json=body)).json()["usage"]
    assert usage["prompt_tokens"] == done.prompt_tokens
    assert usage["prompt_tokens_details"]["cached_tokens"] == done.prompt_tokens - 1


async def test_render_shows_tools_as_the_template_does(client: EngineClient) -> None:
    function = {"name": "look", "description": "looks", "parameters": {"type": "object"}}
    text = await client.render(
        [{"role": "user", "content": "Hi"}], tools=[{"type": "function", "function": function}]
    )
    assert "# Tools" in text
    assert '"look"' in text


async def test_bodies_that_do_not_fit_are_explained(http: httpx.AsyncClient) -> None:
    for body, says in (
        ([], "must be a JSON object"),
        ({"text": 5}, "text: Input should be a valid string."),
        ({"messages": [{"role": "user"}]}, "content: Field required"),
        ({"text": "x", "expected_output_tokens": 10**400}, "expected_output_tokens"),
        ({"text": "x", "priority": 10**400}, "priority"),
    ):
        answer = await http.post("/prompt_streams", json=body)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400
        # Python's names and pydantic's pages help no client.
        assert says in message and "instance" not in message and "https:" not in message, message


async def test_out_of_order_and_late_appends_lose_nothing(client: EngineClient) -> None:
    opened = await client.open_stream(text="one two")
    with pytest.raises(StreamOutOfOrder, match="before append 0"):
        await client.append(opened.id, 1, text=" four")
    # The second time changes nothing.
    for _ in range(2):
        assert (await client.append(opened.id, 0, text=" three four five")).next_seq == 1
    # Another text may not take its place.
    for other in (" three", " three four five six"):
        with pytest.raises(StreamOutOfOrder, match="Send what follows it as append 1"):
            await client.append(opened.id, 0, text=other)
    ended = await client.append(opened.id, 1, end=True)
    assert ended.ended
    with pytest.raises(StreamOutOfOrder, match="ended"):
        await client.append(opened.id, 2, text=" six")
    _, usage = await generate(client, "one two three four five six", 2, opened.id)
    assert usage.prompt_stream is not None
    assert usage.prompt_stream.status == "hit"
    with pytest.raises(StreamGone, match="used"):
        await client.append(opened.id, 2, text=" six")


async def test_a_stream_may_begin_with_nothing_and_lives_for_an_hour_at_most(
    http: httpx.AsyncClient, client: EngineClient
) -> None:
    opened = await client.open_stream(text="", ttl_seconds=100_000)
    most = (await http.get("/flashmoa/info")).json()["limits"]["ttl_seconds"]
    assert opened.ttl_seconds == most == 3600
    for seq, text in enumerate(("", "one ", "", "two")):
        assert (await client.append(opened.id, seq, text=text)).next_seq == seq + 1
    await client.append(opened.id, 4, text="", end=True)
    _, usage = await generate(client, "one two three", 2, opened.id)
    assert usage.prompt_stream is not None and usage.prompt_stream.status == "hit"


async def test_what_is_certainly_too_long_is_not_tokenised(http: httpx.AsyncClient) -> None:
    """It would hold up all requests. Of a continued answer, SGLang encodes the chat before it."""
    long, answer = {"role": "user", "content": "a b " * 250_000}, {"role": "assistant"}
    continued = {"messages": [long, {**answer, "content": "So"}], "continue_final_message": True}
    for body in ({"text": long["content"]}, {"messages": [long]}, continued):
        for path in ("/prefill_only", "/prompt_streams"):
            refused = await http.post(path, json=body)
            assert refused.status_code == 413 and " characters; " in refused.text, refused.text


async def test_the_reported_limit_of_a_prompt_is_exact(
    http: httpx.AsyncClient, client: EngineClient
) -> None:
    """Here it follows from the KV pool. One token more is refused by the plugin, not by SGLang."""
    most = (await http.get("/flashmoa/info")).json()["max_prompt_tokens"]
    assert POOL - 10 < most < POOL
    for path in ("/prefill_only", "/prompt_streams"):
        answer = await http.post(path, json={"input_ids": [5] * (most + 1)})
        assert answer.status_code == 413
        assert answer.json()["error"]["max_tokens"] == most
    assert (await client.prefill_only(input_ids=[5] * most)).prompt_tokens == most
    opened = await client.open_stream(input_ids=[5] * (most - 1))
    with pytest.raises(PromptTooLarge):
        await client.append(opened.id, 0, input_ids=[5, 5])
    await client.append(opened.id, 0, input_ids=[5], end=True)
    assert (await wait_until_prefilled(client, opened.id, most)).prefilled_tokens == most
    await client.delete_stream(opened.id)


async def test_text_held_back_counts_when_the_stream_ends(client: EngineClient) -> None:
    """In a text without boundaries no token is certain before its end."""
    opened = await client.open_stream(text="é" * 20)
    assert opened.received_tokens == 0
    with pytest.raises(PromptTooLarge):
        await client.append(opened.id, 0, text="é中" * 12_000, end=True)
    ended = await client.append(opened.id, 0, text=" end", end=True)
    assert ended.ended
    assert 0 < ended.received_tokens < 100
    await client.delete_stream(opened.id)


async def test_an_unknown_stream_is_reported_as_unknown(client: EngineClient) -> None:
    with pytest.raises(StreamUnknown, match="Open one first"):
        await client.append("nonsense", 0, text="x")


async def test_a_stream_of_token_ids_refuses_text(client: EngineClient) -> None:
    opened = await client.open_stream(input_ids=[5, 6, 7])
    with pytest.raises(MalformedRequest, match="append input_ids"):
        await client.append(opened.id, 0, text="x")
    await client.delete_stream(opened.id)


async def test_a_batch_leaves_a_stream_to_the_next_request(
    http: httpx.AsyncClient, client: EngineClient
) -> None:
    stream = await client.open_stream(text="one")
    body = {"text": ["one two", "one three"], "prompt_stream_id": stream.id}
    answer = await http.post("/generate", json=body)
    assert answer.status_code == 200 and len(answer.json()) == 2
    state = await http.get(f"/prompt_streams/{stream.id}")
    assert not state.json()["in_use"]
    await client.delete_stream(stream.id)


async def test_long_chats_are_rendered(client: EngineClient) -> None:
    content = " ".join(["Nepal"] * 4_000)
    text = await client.render([{"role": "user", "content": content}] * 3)
    turn = f"<|im_start|>user\n{content}<|im_end|>\n"
    assert text == f"{turn * 3}<|im_start|>assistant\n"
