"""The prompt that is held while tools run is the next prompt, with the answer as it was sent.

SGLang's parsers of streams and of whole answers differ.
"""

import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.support import (
    IS_0_5_12,
    Body,
    Words,
    slow,
    slow_except,
    start_special_engine,
    wait_until_held,
    wait_until_idle,
)

# Sends a conversation. Returns what a client adds to it for the answer and the results of its
# calls, and how many tokens of the prompt were computed after the request had come.
Client = Callable[[httpx.AsyncClient, list[Body], Body, bool], Awaitable[tuple[list[Body], int]]]

POOL = 6000
SCHEMA: Body = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
# A result is about 40 tokens in the prompt.
RESULT, MOST_LATE = "It rains. " * 5, 50
# Answers that call a tool, as models write them for each parser.
CALLS = {
    "qwen25": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "glm45": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
        "</tool_call>"
    ),
    # SGLang's stream has the second call as text.
    "mistral": (
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}, '
        '{"name": "weather", "arguments": {"city": "Rome"}}]'
    ),
}
# Only a template that writes thoughts shows whether they have come back.
CONTENT = "{{ message.content or '' }}"
THOUGHTS = (
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
)
# Text follows the model's thoughts and comes before its call.
ANSWER = "<think>\nI must look.\n</think>\n\nLet me look.\n"


@pytest.fixture(scope="module", params=slow_except(CALLS, "qwen25", "glm45"))
def parser(request: pytest.FixtureRequest) -> str:
    return request.param


def answer_of(parser: str) -> str:
    """Return the text that a grammar makes the random model write."""
    return (ANSWER if parser == "qwen25" else "Let me look.\n") + CALLS[parser]


@pytest.fixture(scope="module")
async def engine(
    engines: LocalEngines,
    thinking_model: Path,
    parser: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncGenerator[LocalEngine]:
    """An engine that holds prompts over tool calls, for 15 seconds each."""
    template = tmp_path_factory.mktemp("template") / "thoughts.jinja"
    written = (thinking_model / "chat_template.jinja").read_text()
    assert CONTENT in written
    template.write_text(written.replace(CONTENT, THOUGHTS + CONTENT))
    async with start_special_engine(
        engines,
        thinking_model,
        "--enable-cache-report", "--tool-call-parser", parser, "--flashmoa-hold-tool-calls", "15",
        "--served-model-name", "m", "--chat-template", str(template),
        "--preferred-sampling-params", json.dumps({"regex": re.escape(answer_of(parser))}),
        *(("--reasoning-parser", "qwen3") if parser == "qwen25" else ()),
        pool=POOL,
    ) as engine:  # fmt: skip
        yield engine


def events_of(response: httpx.Response) -> list[Body]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


async def post(http: httpx.AsyncClient, path: str, body: Body) -> httpx.Response:
    response = await http.post(path, json={"model": "m", **body})
    assert response.status_code == 200, response.text
    return response


def add_up(chunks: list[Body]) -> Body:
    """Return the message that chunks add up to."""
    message: Body = {"role": "assistant", "content": ""}
    for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
        message["content"] += delta.get("content") or ""
        if delta.get("reasoning_content"):
            thoughts = message.get("reasoning_content", "")
            message["reasoning_content"] = thoughts + delta["reasoning_content"]
        for part in delta.get("tool_calls") or ():
            calls = message.setdefault("tool_calls", [])
            if part["index"] == len(calls):
                calls.append({**part, "function": {**part["function"], "arguments": ""}})
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"] or ""
    return message


def chat_body(messages: list[Body], answer: str | None = None, **more: Any) -> Body:
    return {
        "messages": messages,
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
        "chat_template_kwargs": {"enable_thinking": False},
        "max_tokens": 200,
        **({"regex": re.escape(answer)} if answer is not None else {}),
        **more,
    }


async def chat(
    http: httpx.AsyncClient, history: list[Body], more: Body, stream: bool
) -> tuple[list[Body], int]:
    """Ask as OpenAI's client of chat completions, and return the model's thoughts, too."""
    body = chat_body(history, stream=stream, **more)
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = await post(http, "/v1/chat/completions", {**body, **options})
    if stream:
        *chunks, last = events_of(response)
        message, usage = add_up(chunks), last["usage"]
    else:
        whole = response.json()
        message, usage = whole["choices"][0]["message"], whole["usage"]
    calls = message.get("tool_calls") or ()
    results = [{"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in calls]
    cached = (usage["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]
    return [{k: message[k] for k in message if message[k] is not None}, *results], (
        usage["prompt_tokens"] - cached
    )


async def forgetful_chat(
    http: httpx.AsyncClient, history: list[Body], more: Body, stream: bool
) -> tuple[list[Body], int]:
    """Ask as most clients of chat completions, which return no thoughts."""
    (message, *results), late = await chat(http, history, more, stream)
    message.pop("reasoning_content", None)
    return [message, *results], late


async def responses(
    http: httpx.AsyncClient, history: list[Body], more: Body, stream: bool
) -> tuple[list[Body], int]:
    """Ask as OpenAI's client of the Responses API, which returns all items."""
    if IS_0_5_12:
        pytest.skip("SGLang 0.5.12 has no functions in the Responses API")
    body = {
        "input": history,
        "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
        "chat_template_kwargs": {"enable_thinking": False},
        "max_output_tokens": more.get("max_tokens", 200),
        "stream": stream,
    }
    response = await post(http, "/v1/responses", body)
    whole = events_of(response)[-1]["response"] if stream else response.json()
    calls = [item for item in whole["output"] if item["type"] == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}
        for call in calls
    ]
    usage = whole["usage"]
    return [*whole["output"], *results], (
        usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"]
    )


async def messages(
    http: httpx.AsyncClient, history: list[Body], more: Body, stream: bool
) -> tuple[list[Body], int]:
    """Ask as Anthropic's client. The model writes any number of calls, and blanks between them."""
    if IS_0_5_12:
        pytest.skip("SGLang 0.5.12 tells no cached tokens in Anthropic's API")
    body = {
        "messages": history,
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
        "thinking": {"type": "disabled"},
        "max_tokens": more.get("max_tokens", 400),
        "temperature": 1,
        "stream": stream,
    }
    blocks: list[Body] = []
    for _ in range(50):  # A random model may not end.
        response = await post(http, "/v1/messages", body)
        events = events_of(response) if stream else [response.json()]
        blocks = read_blocks(events) if stream else events[0]["content"]
        usage = (events[0]["message"] if stream else events[0])["usage"]
        reasons = [event.get("delta", event).get("stop_reason") for event in events]
        if "tool_use" in reasons or "max_tokens" in more:
            break
    else:
        raise AssertionError("the model has called no tools")
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": RESULT}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    answer = {"role": "assistant", "content": blocks}
    # SGLang's tokens of Anthropic's usage are without the cached ones.
    return [answer, {"role": "user", "content": results}], usage["input_tokens"]


def read_blocks(events: list[Body]) -> list[Body]:
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    for event in events:
        if event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            for name in ("text", "partial_json"):
                block[name] = block.get(name, "") + delta.get(name, "")
    return [
        {**block, "input": json.loads(written or "{}")}
        if block["type"] == "tool_use"
        else {"type": "text", "text": block["text"]}
        for block in blocks
        for written in [block.pop("partial_json", "")]
    ]


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    "ask", [slow(chat), forgetful_chat, responses, messages], ids=lambda ask: ask.__name__
)
async def test_each_turn_of_an_agent_finds_its_prompt(
    http: httpx.AsyncClient,
    client: EngineClient,
    words: Words,
    parser: str,
    ask: Client,
    stream: bool,
) -> None:
    """Others fill the pool meanwhile, so that KV without a pin is evicted."""
    if ask is messages and parser != "glm45":
        pytest.skip("a random model hardly ever writes a call of Anthropic's API for this parser")
    answer = answer_of(parser)
    await client.flush_cache()
    history: list[Body] = [{"role": "user", "content": words(300, 1)}]
    more: Body = {"answer": answer} if "chat" in ask.__name__ else {}
    # Whether a client returns thoughts is known from its second answer on.
    unknown = 1 if ask is chat and "<think>" in answer else 0
    sent: list[Body] = []
    for turn in range(4):
        results = json.dumps(sent).count(RESULT)
        sent, late = await ask(http, history, more, stream)
        assert turn <= unknown or late <= MOST_LATE * results, (turn, late)
        history += sent
        await wait_until_held(client)
        for seed in (10, 20):
            await client.prefill_only(text=words(POOL // 2, seed + turn))
    # This answer is cut within its call.
    await ask(http, history, {**more, "max_tokens": 8}, stream)
    assert (await client.info()).prompt_streams == unknown


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_nothing_is_held_without_one_answer(
    http: httpx.AsyncClient, client: EngineClient, words: Words, parser: str, stream: bool
) -> None:
    messages: list[Body] = [{"role": "user", "content": words(50, 2)}]
    body = chat_body(messages, answer_of(parser), n=2, stream=stream)
    await post(http, "/v1/chat/completions", body)
    assert (await wait_until_idle(client)).pinned_streams == 0


async def test_nothing_is_held_of_an_answer_whose_client_leaves(
    http: httpx.AsyncClient, client: EngineClient, words: Words, parser: str
) -> None:
    answer = "Let me look. " * 40 + answer_of(parser)
    body = chat_body([{"role": "user", "content": words(50, 3)}], answer, stream=True)
    body |= {"model": "m", "max_tokens": 1000}
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if "look" in line:
                break
    assert (await wait_until_idle(client)).pinned_streams == 0
