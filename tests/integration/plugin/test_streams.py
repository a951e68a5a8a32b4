"""Prompt streams on real SGLang: answers and tokens are exact, and KV is always released."""

import random
from typing import Any

import anyio
import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.errors import StreamGone
from tests.integration.ears import in_flight
from tests.integration.support import (
    Words,
    complete_stream,
    generate,
    wait_until_idle,
    wait_until_prefilled,
)
from tests.waiting import LAG

TEXTS = {
    "thai": "กองคาราวานมาถึงเมืองเก่าตอนเที่ยงและทุกคนพักผ่อนก่อน",
    "json": '{"name":"Asan","id":17,"tags":["old","town"]},',
    "digits": "31415926535897932384626433832795028841971",
}


@pytest.mark.parametrize("script", TEXTS)
async def test_text_with_few_boundaries_is_prefilled_while_it_is_written(
    client: EngineClient, script: str
) -> None:
    text = TEXTS[script] * (500 // len(TEXTS[script]))
    await client.flush_cache()
    expected, plain = await generate(client, text, 8)
    await client.flush_cache()
    opened = await client.open_stream(text=text[:6])
    for seq, start in enumerate(range(6, len(text), 6)):
        state = await client.append(opened.id, seq, text=text[start : start + 6])
    assert state.received_tokens >= 0.9 * plain.prompt_tokens
    await wait_until_prefilled(client, opened.id, state.received_tokens - LAG)
    answer, linked = await generate(client, text, 8, opened.id)
    assert answer == expected
    assert linked.prompt_stream is not None and linked.prompt_stream.status == "hit"
    assert plain.prompt_tokens - linked.cached_tokens <= 0.1 * plain.prompt_tokens + LAG


async def test_random_pairs_give_the_unlinked_answers(
    client: EngineClient, downstream_client: EngineClient, words: Words
) -> None:
    """A's tokens stream into B's prompt in random pieces; B answers as it does without a stream."""
    dice = random.Random(15)
    for pair in range(15):
        upstream, _ = await generate(client, words(dice.randint(1, 40), pair), dice.randint(1, 40))
        prefix, suffix = words(dice.randint(1, 200), 1000 + pair), dice.choice(["", "\n", " Go."])
        prompt = prefix + upstream + suffix
        await downstream_client.flush_cache()
        expected, plain = await generate(downstream_client, prompt, 12)
        await downstream_client.flush_cache()
        opened = await downstream_client.open_stream(text=prefix)
        start = 0
        for seq in range(dice.randint(1, 6)):
            end = dice.randint(start, len(upstream))
            await downstream_client.append(opened.id, seq, text=upstream[start:end])
            start = end
        if dice.random() < 0.5:
            await wait_until_prefilled(
                downstream_client, opened.id, max(0, opened.received_tokens - LAG)
            )
        answer, linked = await generate(downstream_client, prompt, 12, opened.id)
        assert answer == expected, pair
        assert linked.prompt_tokens == plain.prompt_tokens
        assert linked.prompt_stream is not None
        assert linked.prompt_stream.status == "hit"
    await wait_until_idle(downstream_client)


async def test_the_final_request_computes_only_the_rest(client: EngineClient, words: Words) -> None:
    await client.flush_cache()
    prefix, streamed = words(400, 11), words(60, 12)
    opened = await client.open_stream(text=prefix)
    await client.append(opened.id, 0, text=f" {streamed}", end=True)
    await wait_until_prefilled(client, opened.id, 460)
    _, usage = await generate(client, f"{prefix} {streamed} done", 1, opened.id)
    assert usage.streamed_tokens == usage.cached_tokens
    assert usage.cached_tokens is not None and usage.cached_tokens >= 459
    assert usage.late_tokens == usage.prompt_tokens - usage.cached_tokens
    assert usage.prompt_stream is not None
    assert sum(span.tokens for span in usage.prompt_stream.prefills) == usage.streamed_tokens


async def test_after_a_wrong_prediction_the_common_part_is_used(
    client: EngineClient, words: Words
) -> None:
    shared, wrong, right = words(200, 31), words(100, 32), words(100, 33)
    await client.flush_cache()
    expected, _ = await generate(client, f"{shared} {right}", 10)
    await client.flush_cache()
    opened = await client.open_stream(text=f"{shared} {wrong}")
    await complete_stream(client, opened.id)
    got, usage = await generate(client, f"{shared} {right}", 10, opened.id)
    assert got == expected
    assert usage.prompt_stream is not None and usage.prompt_stream.status == "mispredicted"
    assert usage.cached_tokens is not None and 195 <= usage.cached_tokens <= 201


async def test_a_streamed_chat_uses_a_stream(
    client: EngineClient, http: httpx.AsyncClient, words: Words
) -> None:
    await client.flush_cache()
    messages = [{"role": "user", "content": words(300, 41)}]
    text = await client.render(messages)
    opened = await client.open_stream(text=text, add_special_tokens=False)
    await complete_stream(client, opened.id)
    body = {"model": "m", "messages": messages, "max_tokens": 6, "prompt_stream_id": opened.id}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = await http.post("/v1/chat/completions", json=body)
    assert '"streamed_tokens"' in answer.text and '"status": "hit"' in answer.text


async def test_deleting_a_stream_stops_its_prefill(client: EngineClient, words: Words) -> None:
    await client.flush_cache()
    opened = await client.open_stream(text=words(6000, 63))
    await wait_until_prefilled(client, opened.id, 1)
    await client.delete_stream(opened.id)
    state = await wait_until_idle(client)
    assert state.evictable < 6000


async def test_a_request_behind_a_front_end_that_drops_the_id_finds_its_stream_by_its_prompt(
    client: EngineClient, http: httpx.AsyncClient, words: Words
) -> None:
    """The stream stays pinned until that request is there, and then gives its KV back."""
    ids = [*range(100, 400)]
    opened = await client.open_stream(input_ids=ids)
    await complete_stream(client, opened.id)
    shorter = await client.open_stream(input_ids=ids[:100])
    body = {"input_ids": [*ids, 7], "sampling_params": {"max_new_tokens": 1}}
    # Another tenant's request with the same prompt does not use the stream.
    other = await http.post("/generate", json={**body, "extra_key": "other"})
    assert other.json()["meta_info"]["cached_tokens"] == 0
    answer = await http.post("/generate", json=body)
    assert answer.json()["meta_info"]["cached_tokens"] == 300
    assert "prompt_stream" not in answer.json()["meta_info"]
    with pytest.raises(StreamGone):
        await client.stream_state(opened.id)
    # Its answer has no figures, so its client gets them where it would free the stream; once.
    figures = await client.delete_stream(opened.id)
    assert figures is not None and figures.prompt_stream.status == "hit"
    assert (figures.cached_tokens, figures.streamed_tokens, figures.late_tokens) == (300, 300, 1)
    assert await client.delete_stream(opened.id) is None
    # A stream that has not ended may still grow.
    assert (await http.get(f"/prompt_streams/{shorter.id}")).json()["in_use"] is False
    assert await client.delete_stream(shorter.id) is None


def take_back(dice: random.Random, text: str, more: str) -> tuple[int, str]:
    """Return a place in a text, and other text from there on, which may begin as before."""
    start = dice.randint(0, len(text))
    return start, text[start : dice.randint(start, len(text))] + more


@pytest.mark.parametrize("opened_by", ["text", "messages"])
async def test_text_that_is_taken_back_leaves_the_answer_of_the_whole_text(
    client: EngineClient, http: httpx.AsyncClient, words: Words, opened_by: str
) -> None:
    dice = random.Random(7)
    beginning = words(30, 77)
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": beginning}]}
    head, opening = beginning, dict[str, Any](text=beginning)
    if opened_by == "messages":
        # The client does not know its messages' rendered text, and counts appended text alone.
        head, opening = (await http.post("/render", json=chat)).json()["text"], chat
    opened = (await http.post("/prompt_streams", json=opening)).json()["id"]
    own = "" if opened_by == "messages" else head
    for seq in range(12):
        body: dict[str, Any] = {"seq": seq, "text": words(dice.randint(1, 60), seq)}
        if seq % 3:
            body["start"], body["text"] = take_back(dice, own, body["text"])
            own = own[: body["start"]]
        own += body["text"]
        answer = await http.post(f"/prompt_streams/{opened}/append", json=body)
        assert answer.status_code == 200, answer.text
        await wait_until_prefilled(client, opened, answer.json()["received_tokens"] - LAG)
    own = own if opened_by == "text" else head + own
    await client.append(opened, 12, end=True)
    state = await client.stream_state(opened)
    with anyio.fail_after(30):
        # The state may count tokens of the replaced text until the engine computes the new ones.
        while state.prefilled_tokens != state.received_tokens:
            await anyio.sleep(0.02)
            state = await client.stream_state(opened)
    # A rendered text has its special tokens already.
    prompt: dict[str, Any] = {
        "text": own,
        "sampling_params": {"max_new_tokens": 12, "temperature": 0},
    }
    linked = (await http.post("/generate", json={**prompt, "prompt_stream_id": opened})).json()
    assert linked["meta_info"]["prompt_stream"]["status"] == "hit"
    assert linked["meta_info"]["late_tokens"] <= 2
    await client.flush_cache()
    assert linked["output_ids"] == (await http.post("/generate", json=prompt)).json()["output_ids"]
    await wait_until_idle(client)


async def test_only_the_end_is_computed_again_if_only_the_end_differs(
    client: EngineClient, http: httpx.AsyncClient, words: Words
) -> None:
    await client.flush_cache()
    text, end = words(300, 78), words(20, 79)
    opened = (await http.post("/prompt_streams", json={"text": text + words(20, 80)})).json()["id"]
    await wait_until_prefilled(client, opened, 300 - LAG)
    body = {"seq": 0, "start": len(text), "text": end}
    append = f"/prompt_streams/{opened}/append"
    for _ in range(2):
        assert (await http.post(append, json=body)).json()["next_seq"] == 1
    after = await complete_stream(client, opened, 1)
    # Computed twice, the whole would be twice as much.
    assert after.computed_tokens < after.received_tokens + 60
    _, usage = await generate(client, text + end, 4, opened)
    assert usage.prompt_stream is not None and usage.prompt_stream.status == "hit"
    assert usage.late_tokens is not None and usage.late_tokens <= 2


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"start": -1, "text": "x"}, "start"),
        ({"start": 4, "text": "x"}, "start is 4, but the stream's text has only 3 characters"),
        ({"start": 10**400, "text": "x"}, "start"),
        ({"start": 1.5, "text": "x"}, "start"),
        ({"start": True, "text": "x"}, "start"),
        ({"start": 1}, "exactly one of text, input_ids"),
        ({"start": 1, "input_ids": [1]}, "append text"),
        ({"call": ""}, "32 hexadecimal digits"),
        ({"call": "x" * 32}, "32 hexadecimal digits"),
        ({"call": "a" * 31}, "32 hexadecimal digits"),
        ({"call": "a" * 100_000}, "32 hexadecimal digits"),
        ({"call": 7}, "call"),
        ({"call": "a" * 32, "text": "x"}, "exactly one"),
        ({"call": "a" * 32, "end": True}, "leave end out"),
        ({"call": "a" * 32, "start": 99}, "start is 99"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_an_append_that_makes_no_sense_is_refused(
    http: httpx.AsyncClient, client: EngineClient, body: dict[str, Any], says: str
) -> None:
    opened, ids = await client.open_stream(text="abc"), await client.open_stream(input_ids=[5, 6])
    for stream, sent, said in (
        (opened, body, says),
        (ids, {"start": 0, "input_ids": [5]}, "leave start out"),
        (ids, {"call": "a" * 32}, "append input_ids"),
    ):
        path = f"/prompt_streams/{stream.id}/append"
        answer = await http.post(path, json={"seq": 0, **sent})
        assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text
        assert len(answer.text) < 500
    assert not (await in_flight(http))["awaited_calls"]
    assert (await client.append(opened.id, 0, text="d")).next_seq == 1
    for stream in (opened, ids):
        await client.delete_stream(stream.id)
