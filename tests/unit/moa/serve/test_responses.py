"""The Responses API, as OpenAI's client reads it."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import APIStatusError, AsyncOpenAI
from starlette.applications import Starlette
from starlette.routing import Mount

from flashmoa.moa.config import read_tables
from flashmoa.moa.serve.application import application
from flashmoa.moa.serve.chat_completions import ChatRequestRefused
from flashmoa.moa.serve.responses import parse_response_request
from tests.unit.moa.scripted_engine import Script, ScriptedEngine, scripted_engine
from tests.unit.moa.serve.served import serving
from tests.unit.moa.serve.test_application import events

SCRIPTS: dict[str, Script] = {
    "plain": ["It is ", "18."],
    "calls": ["I look.", ("call", "read"), ("call", "list")],
    "only call": [("call", "read"), "not reached"],
    "empty": [("thought", "Hm."), "not reached"],
    "cut": ["It", ("end", "cut")],
    "thinks": [("thought", "It is 18, ")] * 3 + ["It is 18. "],
}
TOOL: dict[str, Any] = {
    "type": "function", "name": "read", "description": "Reads.", "strict": True,
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}  # fmt: skip
INPUT: list[Any] = [
    {"role": "user", "content": [{"type": "input_text", "text": "Mend it."}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
    {"type": "function_call", "call_id": "1", "name": "read", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "x = 1"},
]


@asynccontextmanager
async def connected(last: str) -> AsyncGenerator[tuple[ScriptedEngine, AsyncOpenAI]]:
    async with (
        serving(SCRIPTS, [{"model": "plain"}], [{"model": last}]) as (engine, http),
        AsyncOpenAI(base_url=f"{http.base_url}/v1/", api_key="-", max_retries=0) as client,
    ):
        yield engine, client


async def test_thought_is_counted() -> None:
    async with connected("thinks") as (_, client):
        answer = await client.responses.create(model="moa", input="What?")
    assert answer.usage is not None and answer.usage.output_tokens == 4
    assert answer.usage.output_tokens_details.reasoning_tokens == 3


async def test_a_text_is_answered_whole_and_streamed() -> None:
    async with connected("plain") as (engine, client):
        asked: dict[str, Any] = {"model": "moa", "input": "What?", "instructions": "Be brief."}
        whole = await client.responses.create(**asked, max_output_tokens=9, temperature=0.5)
        async with client.responses.stream(**asked) as stream:
            sent = [event async for event in stream]
            final = await stream.get_final_response()
    assert whole.output_text == final.output_text == "It is 18."
    assert whole.status == final.status == "completed" and whole.temperature == 0.5
    assert whole.usage is not None and whole.usage.output_tokens == 2
    extra: Any = whole.model_extra
    assert len(extra["flashmoa"]["agents"]) == 2
    assert [event.type.removeprefix("response.") for event in sent] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in sent] == list(range(len(sent)))
    last = engine.bodies[1]
    assert last["max_tokens"] == 9
    assert last["messages"][0]["content"].startswith("Be brief.")


async def test_calls_of_tools_are_items() -> None:
    async with connected("calls") as (engine, client):
        asked: dict[str, Any] = {
            "model": "moa", "input": INPUT, "tools": [TOOL], "store": False,
            "tool_choice": {"type": "function", "name": "read"}, "parallel_tool_calls": True,
            "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_object"}},
        }  # fmt: skip
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            sent = [event async for event in stream]
            final = await stream.get_final_response()
    for response in (whole, final):
        text, *calls = response.output
        assert text.type == "message"
        found = [call for call in calls if call.type == "function_call"]
        assert [(call.call_id, call.name) for call in found] == [
            ("call_read", "read"), ("call_list", "list")
        ]  # fmt: skip
        assert json.loads(found[0].arguments) == {"path": "a.py"}
    added = [event for event in sent if event.type == "response.output_item.added"]
    done = [event for event in sent if event.type == "response.output_item.done"]
    assert [one.output_index for one in added] == [one.output_index for one in done] == [0, 1, 2]
    last = next(body for body in engine.bodies if body["model"] == "calls")
    function = {name: value for name, value in TOOL.items() if name != "type"}
    assert last["tools"] == [{"type": "function", "function": function}]
    assert last["tool_choice"] == {"type": "function", "function": {"name": "read"}}
    assert last["reasoning_effort"] == "low"
    assert last["response_format"] == {"type": "json_object"}
    assert [one["role"] for one in last["messages"]][-3:] == ["assistant", "tool", "user"]


@pytest.mark.parametrize(
    ("last", "items"),
    [("plain", ["message"]), ("calls", ["message"]), ("only call", ["function_call"])],
)
async def test_the_item_that_the_limit_cut_is_incomplete(last: str, items: list[str]) -> None:
    async with connected(last) as (_, client):
        asked: dict[str, Any] = {"model": "moa", "input": "?", "tools": [TOOL]}
        whole = await client.responses.create(**asked, max_output_tokens=1)
        async with client.responses.stream(**asked, max_output_tokens=1) as stream:
            sent = [event async for event in stream]
    done = [event.item for event in sent if event.type == "response.output_item.done"]
    final = sent[-1]
    assert final.type == "response.incomplete"
    for found in (whole.output, final.response.output, done):
        assert [(one.type, getattr(one, "status", "")) for one in found] == [
            (kind, "incomplete") for kind in items
        ]
    assert whole.status == final.response.status == "incomplete"


async def test_an_empty_answer_is_an_item_that_begins() -> None:
    async with serving(SCRIPTS, [{"model": "plain"}], [{"model": "empty"}]) as (_, http):
        body = {"input": "?", "stream": True, "max_output_tokens": 1}
        sent = events(await http.post("/v1/responses", json=body))
    kinds = [event["type"].removeprefix("response.") for event in sent]
    assert kinds[2:] == [
        "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done", "incomplete",
    ]  # fmt: skip


async def test_responses_are_answered_under_a_root_path() -> None:
    async with scripted_engine(SCRIPTS) as (engine, _):
        models = [{"models": [{"engine": engine.url, "model": "plain"}]}] * 2
        app = Starlette(routes=[Mount("/moa", application(read_tables({"layers": models})))])
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            answer = await http.post("/moa/v1/responses", json={"input": "What?"})
    assert answer.status_code == 200 and answer.json()["object"] == "response"


async def test_failures_are_reported() -> None:
    async with connected("cut") as (_, client):
        with pytest.raises(APIStatusError, match="nothing is stored here") as refused:
            await client.responses.create(model="moa", input="?", previous_response_id="resp_1")
        assert refused.value.status_code == 400
    async with serving(SCRIPTS, [{"model": "cut"}], [{"model": "cut"}]) as (_, http):
        body = {"input": "What?", "stream": True}
        answer = await http.post("/v1/responses", json=body)
    failed = events(answer)[-1]
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["message"]


async def test_an_error_of_the_server_follows_the_first_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_question: Any) -> None:
        raise ZeroDivisionError("an error of the server")

    monkeypatch.setattr("flashmoa.moa.run.conversation", fail)
    async with serving(SCRIPTS, [{"model": "plain"}], [{"model": "plain"}]) as (_, http):
        answer = await http.post("/v1/responses", json={"input": "What?", "stream": True})
    kinds = [event["type"].removeprefix("response.") for event in events(answer)]
    assert kinds == ["created", "in_progress", "failed"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": None}, "input"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["web_search_call.results"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": "x"}, "text"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"messages": []}, "messages"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input"),
        ({"temprature": 1}, "temprature"),
        ({"store": True}, "store"),
        ({"max_tool_calls": 2}, "max_tool_calls"),
    ],
)
async def test_what_cannot_be_followed_is_refused(fields: dict[str, Any], param: str) -> None:
    async with serving(SCRIPTS, [{"model": "plain"}], [{"model": "plain"}]) as (_, http):
        answer: httpx.Response = await http.post("/v1/responses", json={"input": "?", **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param
    assert param in error["message"] and "prefilled" not in error["message"]


def test_items_become_messages_that_templates_know() -> None:
    thought = {"type": "reasoning", "summary": []}
    items: list[Any] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "In English."}]},
        {"role": "user", "content": "Why?"},
        *[thought, thought],
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "Please."},
    ]
    chat = parse_response_request({"input": items, "instructions": "Be brief."})
    assert [(one["role"], one["content"]) for one in chat.messages] == [
        ("system", "Be brief.\n\nIn English."),
        ("user", "Why?"),
        ("assistant", "No."),
        ("user", "Please."),
    ]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["type", "role"]), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(
    ["input", "instructions", "text", "reasoning", "tools", "tool_choice", "include"]
), json_values))  # fmt: skip
def test_any_object_is_read_or_refused(body: dict[str, Any]) -> None:
    try:
        assert parse_response_request(body).messages
    except ChatRequestRefused as error:
        assert error.param and str(error)
