"""Answers are heard while the engine writes them, and their bytes stay as they are."""

import json
import re
from collections import defaultdict
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.event_loop import own_task
from tests.integration.ears import Ear, in_flight, listening, text_of
from tests.integration.support import IS_0_5_12, Body, start_special_engine
from tests.waiting import until

MESSAGES = [{"role": "user", "content": "Plan a trip to Nepal."}]
CHAT = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0}

TOOL: Body = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def forced(text: str, **fields: Any) -> Body:
    """A random model writes what a grammar makes it write."""
    return {"regex": re.escape(text).replace("\\ ", " "), "max_tokens": 200, **fields}


ANSWERS: dict[str, Body] = {
    "text": {},
    "one token": {"max_tokens": 1},
    "no answer": {"max_tokens": 0},
    "log-probabilities": {"logprobs": True, "top_logprobs": 2},
    "several answers": {"n": 2},
    "a stop string that is met": forced("One two STOP three", stop=["STOP"]),
    "a stop string that is kept": forced("One two STOP", stop=["STOP"], no_stop_trim=True),
    "a stop string that has only begun": forced("One STO two ST", stop=["STOP"]),
    "characters of several tokens": forced("🙂 and 👩‍👩‍👧, né à 北京"),
    "a cut character": forced("🙂🙂🙂🙂", max_tokens=7),
    "special tokens": forced("<|x|> and </s>", skip_special_tokens=False),
    "a tag in a text": forced(
        "The tag <think> opens a thought.", chat_template_kwargs={"enable_thinking": False}
    ),
    "a thought": forced("<think>Hm, well.</think>Yes."),
    "a cut thought": forced(
        "<think>Hm, well.</think>Yes.",
        max_tokens=6,
        chat_template_kwargs={"force_nonempty_content": True},
    ),
    "an open thought": forced("<think>Hm, well."),
    "a thought that is not split off": forced(
        "<think>Hm, well.</think>Yes.", separate_reasoning=False
    ),
    "tools that are not called": forced("I need no tool.", tools=[TOOL]),
    "a tool call": forced(CALL, tools=[TOOL]),
    "a text and two tool calls": forced(f"Let me look.\n{CALL}\n{CALL}", tools=[TOOL]),
    "a cut tool call": forced(CALL, tools=[TOOL], max_tokens=12),
    "a schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"enum": ["a", "b"]}},
        }
    },
}


# SGLang's streaming parser divides such a text at another place if it comes in other pieces.
CHUNK_DEPENDENT = ("a tag in a text",)


@pytest.fixture(scope="module")
async def engine(engines: LocalEngines, thinking_model: Path) -> AsyncGenerator[LocalEngine]:
    """An engine that parses reasoning and tool calls."""
    async with start_special_engine(
        engines,
        thinking_model,
        "--enable-cache-report", "--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3",
        "--constrained-json-disable-any-whitespace", "--served-model-name", "m",
        has_costs=False,
    ) as engine:  # fmt: skip
        yield engine


@pytest.fixture
async def ear(http: httpx.AsyncClient) -> AsyncGenerator[Ear]:
    async with own_task(listening(http)) as ear:
        yield ear
    with anyio.fail_after(10):
        while (counts := await in_flight(http))["channels"]:  # noqa: ASYNC110
            await anyio.sleep(0.02)
    assert not counts["heard_calls"]


async def ask(http: httpx.AsyncClient, path: str, body: Body, call: str | None = None) -> str:
    """Return an answer, with the same ids, times and cached tokens in each."""
    headers = {} if call is None else {"X-Request-Id-FlashMoA": call}
    answer = await http.post(path, json={"model": "m", **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    text = re.sub(r'"(id|item_id|call_id|request_id)": ?"[^"]*"', '"id":"-"', answer.text)
    # Older releases have no details where no token was cached.
    text = re.sub(r'"prompt_tokens_details": ?(null|\{[^}]*\})', '"details":0', text)
    varying = "created|created_at|completed_at|cached_tokens"
    return re.sub(rf'"({varying})": ?[\d.]+', '"varying":0', text)


def events_of(answer: str) -> list[Body]:
    lines = (line.removeprefix("data: ") for line in answer.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


def joined(answer: str) -> dict[int, Body]:
    """Join the events of a streamed chat, which are divided otherwise in each run."""
    found: dict[int, Body] = {}
    for choice in (choice for event in events_of(answer) for choice in event["choices"]):
        one = found.setdefault(choice["index"], defaultdict(str, tools=[], logprobs=[]))
        delta = choice["delta"]
        for kind in ("content", "reasoning_content"):
            one[kind] += delta.get(kind) or ""
        calls: list[Body] = delta.get("tool_calls") or []
        for call in calls:
            if name := call["function"].get("name"):
                one["tools"].append(name)
            one["arguments"] += call["function"].get("arguments") or ""
        logprobs: Body = choice.get("logprobs") or {}
        one["logprobs"] += logprobs.get("content") or []
        one["finish_reason"] = choice["finish_reason"] or one["finish_reason"]
    return found


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", ANSWERS)
async def test_a_chat_is_heard_as_it_is_streamed_and_its_bytes_stay(
    http: httpx.AsyncClient, client: EngineClient, ear: Ear, kind: str, is_streamed: bool
) -> None:
    if IS_0_5_12 and kind == "a cut thought":
        pytest.skip("SGLang 0.5.12 answers it with 500")
    path, body = "/v1/chat/completions", {**CHAT, **ANSWERS[kind], "stream": is_streamed}
    call = ear.name_call()
    # The last digits of log-probabilities depend on what is cached.
    await client.flush_cache()
    plain = await ask(http, path, body)
    await client.flush_cache()
    heard = await ask(http, path, body, call)
    assert joined(heard) == joined(plain) if is_streamed else heard == plain
    streamed = joined(plain if is_streamed else await ask(http, path, {**body, "stream": True}))
    if body.get("n") or not body["max_tokens"]:
        assert not ear.heard
        return
    events = await ear.until_end(call)
    assert events[-1]["end"] == streamed[0]["finish_reason"]
    assert events[-1]["usage"]["completion_tokens"] > 0
    if kind in CHUNK_DEPENDENT:
        return
    assert text_of(events) == streamed[0]["content"]
    assert text_of(events, "reasoning") == streamed[0]["reasoning_content"]
    assert [event["tool"] for event in events if "tool" in event] == streamed[0]["tools"]


RESPONSES: dict[str, Body] = {
    "text": {},
    "tools": {"tools": [{"type": "function", **TOOL["function"]}], "regex": "I need no tool"},
    "a schema": {
        "text": {
            "format": {"type": "json_schema", "name": "n", "schema": {"enum": ["one", "another"]}}
        }
    },
}


@pytest.mark.parametrize("kind", RESPONSES)
async def test_a_response_is_heard_and_its_bytes_stay(
    http: httpx.AsyncClient, ear: Ear, kind: str
) -> None:
    if IS_0_5_12:
        pytest.skip("SGLang 0.5.12 looks for thoughts in responses otherwise than in chats")
    body = {"input": "Plan a trip.", "max_output_tokens": 24, "temperature": 0, **RESPONSES[kind]}
    call = ear.name_call()
    plain = await ask(http, "/v1/responses", body)
    heard = await ask(http, "/v1/responses", body, call)
    assert heard == plain
    events = await ear.until_end(call)
    items = json.loads(plain)["output"]
    text = "".join(
        part["text"] for item in items if item["type"] == "message" for part in item["content"]
    )
    assert text_of(events) == text


async def test_a_completion_is_heard_without_parsers(http: httpx.AsyncClient, ear: Ear) -> None:
    body = {"prompt": "Plan a trip.", "max_tokens": 24, "temperature": 0}
    call = ear.name_call()
    plain = await ask(http, "/v1/completions", body)
    assert await ask(http, "/v1/completions", body, call) == plain
    events = await ear.until_end(call)
    assert text_of(events, "text") == json.loads(plain)["choices"][0]["text"]
    assert events[-1]["end"] == "length"


async def test_calls_at_once_are_kept_apart(http: httpx.AsyncClient, ear: Ear) -> None:
    calls = {ear.name_call(): f"Plan a trip to place {number}." for number in range(24)}
    answers: dict[str, str] = {}

    async def call(call_id: str, prompt: str) -> None:
        body = {
            **CHAT,
            "messages": [{"role": "user", "content": prompt}],
            "separate_reasoning": False,
        }
        answers[call_id] = await ask(http, "/v1/chat/completions", body, call_id)

    async with anyio.create_task_group() as group:
        for call_id, prompt in calls.items():
            group.start_soon(call, call_id, prompt)
    for call_id, answer in answers.items():
        content = json.loads(answer)["choices"][0]["message"]["content"]
        assert text_of(await ear.until_end(call_id)) == content


async def test_a_call_is_heard_that_began_before_its_channel(http: httpx.AsyncClient) -> None:
    ear = Ear()
    call = ear.name_call()
    body = {**CHAT, "max_tokens": 400, "ignore_eos": True, "separate_reasoning": False}
    answers: list[str] = []

    async def ask_it() -> None:
        answers.append(await ask(http, "/v1/chat/completions", body, call))

    async with anyio.create_task_group() as listeners:
        async with anyio.create_task_group() as group:
            group.start_soon(ask_it)
            with anyio.fail_after(20):
                while not (await in_flight(http))["requests"]:  # noqa: ASYNC110
                    await anyio.sleep(0.005)
            listeners.start_soon(ear.listen, http)
            await ear.until_end(call)
        listeners.cancel_scope.cancel()
    events = ear.heard[call]
    assert len(events) > 3
    assert text_of(events) == json.loads(answers[0])["choices"][0]["message"]["content"]


async def test_a_call_whose_client_leaves_ends_without_a_reason(
    http: httpx.AsyncClient, ear: Ear
) -> None:
    call = ear.name_call()
    body = {**CHAT, "max_tokens": 4000, "ignore_eos": True}
    async with anyio.create_task_group() as group:
        group.start_soon(ask, http, "/v1/chat/completions", body, call)
        await until(lambda: ear.heard[call])
        group.cancel_scope.cancel()
    events = await ear.until_end(call)
    assert events[-1] == {"end": None}


async def test_a_refused_call_ends(http: httpx.AsyncClient, ear: Ear) -> None:
    call = ear.name_call()
    headers = {"X-Request-Id-FlashMoA": call}
    body = {"model": "m", "messages": MESSAGES, "max_tokens": -1}
    answer = await http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 400
    assert not (await in_flight(http))["heard_calls"]


async def test_a_channel_is_named_by_hexadecimal_digits(http: httpx.AsyncClient) -> None:
    for name in (None, "", "x" * 16, "a" * 15, "a" * 32):
        headers = {} if name is None else {"X-FlashMoA-Channel": name}
        answer = await http.get("/flashmoa/calls", headers=headers)
        assert answer.status_code == 400
        assert "16 hexadecimal digits" in answer.json()["error"]["message"]


async def test_a_channel_that_is_opened_again_closes_the_older_one(http: httpx.AsyncClient) -> None:
    older, newer = Ear(), Ear()
    newer.channel = older.channel
    ended = anyio.Event()

    async def listen() -> None:
        await older.listen(http)
        ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(listen)
        await older.listens.wait()
        group.start_soon(newer.listen, http)
        with anyio.fail_after(20):
            await ended.wait()
        call = newer.name_call()
        await ask(http, "/v1/chat/completions", CHAT, call)
        await newer.until_end(call)
        assert not older.heard
        group.cancel_scope.cancel()
