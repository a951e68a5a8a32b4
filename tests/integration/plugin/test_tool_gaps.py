"""The prompts that come back with tools' results are held in the engine, whatever the client is."""

import json
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.framework_scripts import run_frameworks
from tests.integration.support import (
    IS_0_5_12,
    Body,
    Words,
    fetch_kv_state,
    start_special_engine,
    wait_for_state,
    wait_until_held,
    wait_until_idle,
)

POOL = 4000
# The pattern that a random model must write.
CALL = (
    r"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>(Rome|Oslo)</arg_value>\n</tool_call>"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "Tells the weather."}


@pytest.fixture(scope="module")
async def engine(engines: LocalEngines, model: Path) -> AsyncGenerator[LocalEngine]:
    """An engine that holds prompts over tool calls, for 30 seconds each."""
    async with start_special_engine(
        engines,
        model,
        "--enable-cache-report", "--tool-call-parser", "glm", "--flashmoa-hold-tool-calls", "30",
        "--constrained-json-disable-any-whitespace", "--served-model-name", "m",
        "--preferred-sampling-params", json.dumps({"regex": CALL, "min_new_tokens": 2}),
        pool=POOL,
    ) as engine:  # fmt: skip
        yield engine


async def post(http: httpx.AsyncClient, path: str, body: Body) -> list[Body]:
    """Return an answer, or all its events if it is streamed."""
    answer = await http.post(path, json={"model": "m", **body})
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return [answer.json()]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def prefilled(engine: LocalEngine) -> int:
    """Return how many tokens the last prefill computed; not all answers of all releases tell.

    SGLang may log a prefill a step later, so that a one-token answer may come before the log.
    """
    *_, tokens = re.findall(r"Prefill batch.*#new-token: (\d+)", engine.log.read_text())
    return int(tokens)


async def ask_chat(
    http: httpx.AsyncClient, prompt: str, more: Body, answered: list[Body]
) -> list[Body]:
    """Send a prompt, and an answer with the results of its calls if there is one.

    Return the answer to a prompt alone, with the results of its calls.
    """
    messages: list[Body] = [{"role": "user", "content": prompt}, *answered]
    body = {
        "messages": messages,
        "tools": [{"type": "function", "function": {**WEATHER, "parameters": SCHEMA}}],
        "regex": CALL,
        "max_tokens": 8 if answered else 100,
        **more,
    }
    events = await post(http, "/v1/chat/completions", body)
    if answered:
        return []
    choices = [choice for event in events for choice in event["choices"]]
    parts = [choice.get("delta") or choice["message"] for choice in choices if "delta" in choice]
    parts = parts or [choices[0]["message"]]
    calls = [call for part in parts for call in part.get("tool_calls") or ()]
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    call = {"id": calls[0]["id"], "type": "function"}
    call["function"] = {"name": "weather", "arguments": arguments}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "It rains."},
    ]


# These come first: prompts that other tests leave held would want the same room.
@pytest.mark.parametrize("tools", [True, False], ids=["no call", "no tools"])
async def test_an_idle_engine_keeps_no_room_for_an_agent_that_has_ended(
    http: httpx.AsyncClient, client: EngineClient, words: Words, tools: bool
) -> None:
    """Streams need no other request to be prefilled."""
    await client.flush_cache()
    messages = [{"role": "user", "content": words(2500, 9)}]
    weather = {"type": "function", "function": {**WEATHER, "parameters": SCHEMA}}
    chat = {"messages": messages, **({"tools": [weather]} if tools else {})}
    (own,) = await post(http, "/prompt_streams", chat)
    body = {**chat, "prompt_stream_id": own["id"], "regex": "It rains!", "max_tokens": 100}
    (answer,) = await post(http, "/v1/chat/completions", body)
    assert answer["usage"]["prompt_stream"]["status"] == "hit"
    (other,) = await post(http, "/prompt_streams", {"text": words(POOL - 500, 10)})
    # A rest that is not worth a forward waits for more text.
    await wait_for_state(
        http, other["id"], lambda now: now["received_tokens"] - now["prefilled_tokens"] <= 256
    )
    await http.delete(f"/prompt_streams/{other['id']}")


async def test_a_prompt_is_held_for_a_while_and_given_up_for_requests(
    engine: LocalEngine, http: httpx.AsyncClient, client: EngineClient, words: Words
) -> None:
    """The whole pool is there for a request that needs it, and nothing is left in the end."""
    before = (await fetch_kv_state(client)).gave_way
    turn = await ask_chat(http, prompt := words(500, 4), {}, [])
    await wait_until_held(client)
    held = (await fetch_kv_state(client)).protected
    await client.prefill_only(text=words(POOL - 200, 5))
    assert (await fetch_kv_state(client)).gave_way > before
    assert (await client.info()).prompt_streams == 1
    with anyio.fail_after(30):
        while (await fetch_kv_state(client)).protected < held:  # noqa: ASYNC110
            await anyio.sleep(0.01)  # Once the room is there again, so is the prompt.
    await ask_chat(http, prompt, {}, turn)
    assert prefilled(engine) < 30
    await ask_chat(http, words(500, 6), {}, [])
    await wait_until_held(client)
    assert (await wait_until_idle(client)).pinned_streams == 0  # It expires after 30 s.


NAMED = {"type": "function", "function": {"name": "weather"}}
# Fields that OpenAI's client for JavaScript sends back with a message.
NOTHING = {"refusal": None, "annotations": [], "audio": None, "function_call": None}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_a_forced_call_that_is_sent_back_in_any_form_finds_its_prompt(
    engine: LocalEngine, http: httpx.AsyncClient, client: EngineClient, words: Words, choice: Any
) -> None:
    """The model writes JSON then, which is not what the chat template renders."""
    for seed, is_whole in enumerate((True, False), 40):
        await client.flush_cache()
        messages: list[Body] = [{"role": "user", "content": words(500, seed)}]
        body = {
            "messages": messages,
            "tools": [{"type": "function", "function": {**WEATHER, "parameters": SCHEMA}}],
            "tool_choice": choice,
            "parallel_tool_calls": False,
        }
        path = "/v1/chat/completions"
        (first,) = await post(http, path, {**body, "max_tokens": 100})
        message = first["choices"][0]["message"]
        (call,) = message["tool_calls"]
        if is_whole:
            message |= {**NOTHING, "content": None}
        else:
            arguments = json.dumps(json.loads(call["function"]["arguments"]), indent=2)
            call = {"id": call["id"], "type": "function", "function": dict(call["function"])}
            call["function"]["arguments"] = arguments
            message = {"role": "assistant", "tool_calls": [call]}
        await wait_until_held(client)
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "It rains."}]
        await post(http, path, {**body, "max_tokens": 8})
        assert prefilled(engine) <= 30
        assert (await client.info()).prompt_streams == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_prompt_of_token_ids_is_held_with_its_answer(
    http: httpx.AsyncClient, client: EngineClient, words: Words, stream: bool
) -> None:
    """A front end, as Dynamo's, renders chats itself, and reads the calls in answers."""
    await client.flush_cache()

    async def generate(ids: list[int], regex: str, tokens: int) -> Body:
        sampling = {"regex": regex, "max_new_tokens": tokens, "temperature": 0}
        body = {"input_ids": ids, "sampling_params": sampling, "stream": stream}
        return (await post(http, "/generate", body))[-1]

    (prompt, result) = await client.tokenize([words(500, 30), " It rains."])
    await generate(prompt, "It rains!", 100)
    assert (await client.info()).prompt_streams == 0
    answer = await generate(prompt, CALL, 100)
    await wait_until_held(client)
    for seed in range(3):
        await client.prefill_only(text=words(POOL // 2, 33 + seed))
    # The front end renders the answer anew, which may end in another way.
    again = [*prompt, *answer["output_ids"][:-3], *result]
    meta = (await generate(again, CALL, 8))["meta_info"]
    assert meta["prompt_tokens"] - meta["cached_tokens"] <= 30
    assert (await wait_until_idle(client)).pinned_streams == 0


@pytest.mark.nightly
@pytest.mark.skipif(IS_0_5_12, reason="it tells no cached tokens in Anthropic's API")
async def test_a_program_with_anthropics_client_finds_its_prompt(engine: LocalEngine) -> None:
    await run_frameworks("test_anthropic.py", FLASHMOA_ENGINES=engine.url)


async def test_an_answer_without_calls_leaves_nothing(
    http: httpx.AsyncClient, client: EngineClient, words: Words
) -> None:
    body = {"messages": [{"role": "user", "content": words(50, 3)}], "max_tokens": 100}
    tools = [{"type": "function", "function": {**WEATHER, "parameters": SCHEMA}}]
    await post(http, "/v1/chat/completions", {**body, "regex": "It rains!", "tools": tools})
    await post(http, "/v1/chat/completions", {**body, "regex": CALL})
    # The length ends this one within its call.
    cut = {**body, "regex": CALL, "tools": tools, "max_tokens": 10}
    await post(http, "/v1/chat/completions", cut)
    assert (await wait_until_idle(client)).pinned_streams == 0


async def test_a_request_of_another_tenant_does_not_use_what_is_held(
    engine: LocalEngine, http: httpx.AsyncClient, client: EngineClient, words: Words
) -> None:
    turn = await ask_chat(http, prompt := words(500, 7), {"cache_salt": "a"}, [])
    await wait_until_held(client)
    await ask_chat(http, prompt, {"cache_salt": "b"}, turn)
    assert prefilled(engine) > 500
    assert (await client.info()).prompt_streams == 1
    await ask_chat(http, prompt, {"cache_salt": "a"}, turn)
    assert prefilled(engine) < 30
    assert (await client.info()).prompt_streams == 0


async def test_a_request_that_names_its_own_stream_gives_up_what_is_held(
    http: httpx.AsyncClient, client: EngineClient, words: Words
) -> None:
    turn = await ask_chat(http, prompt := words(500, 8), {}, [])
    await wait_until_held(client)
    messages = [{"role": "user", "content": prompt}, *turn]
    (own,) = await post(http, "/prompt_streams", {"messages": messages})
    assert (await client.info()).prompt_streams == 2
    await ask_chat(http, prompt, {"prompt_stream_id": own["id"]}, turn)
    assert (await client.info()).prompt_streams == 0


CHATS = {
    "/v1/chat/completions": lambda text: {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
    },
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 8},
}


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        ("/v1/responses", True),
        pytest.param("/v1/responses", False, marks=pytest.mark.nightly),
        pytest.param("/v1/chat/completions", True, marks=pytest.mark.nightly),
        pytest.param("/v1/chat/completions", False, marks=pytest.mark.nightly),
    ],
)
async def test_a_prewarmed_prompt_is_kept_for_its_time(
    engine: LocalEngine,
    http: httpx.AsyncClient,
    client: EngineClient,
    words: Words,
    path: str,
    stream: bool,
) -> None:
    """Any number of requests may use it."""
    await client.flush_cache()
    body = CHATS[path](words(500, 20))
    warm = {"prompt_cache_options": {"prewarm": True, "ttl": "15s"}, "stream": stream}
    more = {"stream_options": {"include_usage": True}} if stream and "messages" in body else {}
    events = await post(http, path, {**body, **warm, **more})
    usage = events[-1].get("response", events[-1])["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 0
    for seed in range(3):
        await client.prefill_only(text=words(POOL // 2, 30 + seed))
        await post(http, path, body)
        assert prefilled(engine) == 1
    assert (await wait_until_idle(client)).pinned_streams == 0
