"""Test that calls of the Responses API are observed, and its answers read however they are cut."""

import json
import logging
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.engine.wire import STREAM_HEADER
from flashmoa.link.answers import ResponseReader
from flashmoa.link.calls import CallResult
from flashmoa.observe import Event, LinkDeclined, LinkOpened, PromptSent
from flashmoa.observe.calls import calls
from flashmoa.openai import run
from tests.unit.events import of_kind
from tests.unit.openai.fake_server import FakeServer, in_pieces
from tests.waiting import until

TEXTS = st.text(max_size=6)
USAGE = {"input_tokens": 9, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 5}}


def message(text: str) -> dict[str, Any]:
    content = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "content": [content]}


def call(name: str) -> dict[str, Any]:
    function = {"call_id": f"call_{name}", "name": name, "arguments": "{}"}
    return {"type": "function_call", "id": f"fc_{name}", **function}


def response(status: str, *output: dict[str, Any]) -> dict[str, Any]:
    return {"id": "resp_1", "object": "response", "status": status, "output": [*output],
            "error": None, "usage": USAGE}  # fmt: skip


def events(status: str, *output: dict[str, Any]) -> bytes:
    """Return the events of an answer, as SGLang streams them."""
    found: list[dict[str, Any]] = [
        {"type": "response.created", "response": response("in_progress")}
    ]
    for place, item in enumerate(output):
        found.append({"type": "response.output_item.added", "output_index": place, "item": {}})
        if item["type"] == "message":
            text = item["content"][0]["text"]
            pieces = [text[at : at + 2] for at in range(0, len(text), 2)]
            found += [{"type": "response.output_text.delta", "delta": each} for each in pieces]
            found.append({"type": "response.output_text.done", "text": text})
        elif item["type"] == "function_call":
            delta = item["arguments"]
            found.append({"type": "response.function_call_arguments.delta", "delta": delta})
        found.append({"type": "response.output_item.done", "item": item})
    end = "failed" if status == "failed" else "completed"
    found.append({"type": f"response.{end}", "response": response(status, *output)})
    numbered = [{**event, "sequence_number": number} for number, event in enumerate(found)]
    lines = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in numbered]
    return "".join(lines).encode()


OUTPUTS = st.lists(
    st.one_of(TEXTS.map(message), st.sampled_from("ab").map(call), st.just({"type": "reasoning"})),
    max_size=4,
)


@given(OUTPUTS, st.sampled_from(["completed", "incomplete", "failed"]), st.data())
def test_an_answer_is_read_from_any_pieces(
    output: list[dict[str, Any]], status: str, data: st.DataObject
) -> None:
    stream = events(status, *output)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    reader = ResponseReader(is_stream=True)
    pieces = [stream[a:b] for a, b in pairwise(sorted({0, *cuts, len(stream)}))]
    text = "".join(map(reader.feed, pieces))
    # A naive oracle, of the whole answer.
    texts = [item["content"][0]["text"] for item in output if item["type"] == "message"]
    named = [item["name"] for item in output if item["type"] == "function_call"]
    assert text == "".join(texts) and reader.is_over
    document = ResponseReader(is_stream=False)
    document.feed(json.dumps(response(status, *output)).encode())
    result = reader.result()
    assert result == document.result()
    if status == "failed":
        assert result is None
        return
    assert result is not None and result.text == text and result.usage is not None
    assert (result.usage.prompt_tokens, result.usage.cached_tokens) == (9, 5)
    assert result.is_forwarded == (len(texts) == 1 and bool(texts[0]) and not named)
    if (sent := result.tool_calls) is not None:
        assert [each["function"]["name"] for each in sent["tool_calls"]] == named  # type: ignore[index]
    else:
        assert not named or len(output) > 1


def test_a_stream_that_breaks_off_has_no_result() -> None:
    reader = ResponseReader(is_stream=True)
    stream = events("completed", message("Hello"))
    assert reader.feed(stream[: stream.index(b"event: response.completed")]) == "Hello"
    assert reader.result() is None and "not read to its end" in reader.problem


@pytest.mark.parametrize(
    "odd", [b"{}", b"[]", b"null", b"x", b'{"type": "response.output_text.delta", "delta": 1}',
            b'{"type": "response.completed", "response": null}', b'{"status": "completed"}',
            b'{"status": "completed", "output": [null]}', b'{"status": "completed", "output": 1}'],
)  # fmt: skip
@pytest.mark.parametrize("is_stream", [False, True])
def test_odd_answers_are_no_problem(odd: bytes, is_stream: bool) -> None:
    reader = ResponseReader(is_stream=is_stream)
    reader.feed(b"data: %b\n\n" % odd if is_stream else odd)
    assert isinstance(reader.result(), CallResult | None)


async def ask(server: FakeServer, client: Any, text: str, **more: Any) -> str:
    """Return the answer of the Responses API, streamed or not."""

    def answer(body: dict[str, Any]) -> httpx.Response:
        whole = {**response("completed", message(text)), "model": "m", "created_at": 1.0,
                 "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}  # fmt: skip
        if not body.get("stream"):
            return httpx.Response(200, json=whole)
        return in_pieces([events("completed", message(text))])

    server.response = answer
    found = await client.responses.create(model="m", **more)
    if not more.get("stream"):
        return found.output_text
    return "".join([event.delta async for event in found if event.type.endswith("text.delta")])


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_are_observed_and_expected_again(server: FakeServer, stream: bool) -> None:
    async def program(client: Any, task: str) -> list[str]:
        plan = await ask(server, client, f"A plan of {task}.", input=task, stream=stream)
        await until(lambda: task == "Nepal" or of_kind(found, LinkOpened))
        parts = [{"role": "user", "content": f"Check:\n{plan}"}]
        check = ask(server, client, "Fine.", instructions="Check it.", input=parts, stream=stream)
        return [plan, await check]

    found: list[Event] = []
    async with server.client() as client:
        for task in ("Nepal", "Norway"):
            found.clear()
            async with run(f"responses {stream}", listener=found.append):
                assert await program(client, task) == [f"A plan of {task}.", "Fine."]
    made = calls(found)
    assert [call.finished and call.finished.text for call in made] == ["A plan of Norway.", "Fine."]
    prompts = [event.messages for event in of_kind(found, PromptSent)]
    assert prompts[1] == [
        {"role": "instructions", "content": "Check it."},
        {"role": "user", "content": "Check:\nA plan of Norway."},
    ]
    # The server converts the request, so the server renders the prompt.
    rendered = server.bodies("/render_response")
    assert rendered[-1]["instructions"] == "Check it." and rendered[-1]["model"] == "m"
    claims = [headers.get(STREAM_HEADER) for headers in server.headers("/responses")]
    assert claims[:3] == [None] * 3 and made[1].started.stream_id == claims[3]


async def test_a_prompt_stored_at_the_server_is_unlinked(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    found: list[Event] = []
    async with server.client() as client:
        for is_first in (True, False, False):
            async with run("stored", listener=found.append):
                assert await ask(server, client, "A plan.", input="Nepal") == "A plan."
                if not is_first:
                    await until(lambda: of_kind(found, LinkDeclined))
                more = {"input": "Go on.", "previous_response_id": "resp_1"}
                assert await ask(server, client, "More.", **more) == "More."
    (declined,) = of_kind(found, LinkDeclined)
    reason = "a part of its prompt is stored at the server (previous_response_id)"
    assert declined.reason == reason
    assert all(call.finished for call in calls(found)) and len(calls(found)) == 6
    assert not any(STREAM_HEADER in headers for _, _, headers in server.requests)
    assert "Traceback" not in caplog.text


async def test_calls_of_plain_servers_are_unlinked(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    stock, asked = server.answer, list[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        is_stock = request.url.path.endswith("/responses")
        asked.extend([] if is_stock else [request.url.path])
        return stock(request) if is_stock else httpx.Response(404, json={"detail": "Not Found"})

    server.answer = answer  # type: ignore[method-assign]
    found: list[Event] = []
    async with server.client() as client:
        for is_first in (True, False):
            async with run("plain", listener=found.append):
                assert await ask(server, client, "A plan.", input="Nepal") == "A plan."
                if not is_first:
                    await until(lambda: len(of_kind(found, LinkDeclined)) == 2)
                assert await ask(server, client, "Fine.", input="Check: A plan.") == "Fine."
                assert await ask(server, client, "The end.", input="Sum up: Fine.") == "The end."
    declined = [event.reason for event in of_kind(found, LinkDeclined)]
    reason = "only engines with the plugin render requests of the Responses API"
    assert len(declined) == 2 and all(reason in each for each in declined)
    assert asked.count("/render_response") == 1  # In each run that expects calls.
    assert "Traceback" not in caplog.text
