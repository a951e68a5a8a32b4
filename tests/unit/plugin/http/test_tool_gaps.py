"""Prompts that are pinned while tools run: which answers leave one, and how answers are read."""

import itertools
import json
import threading
from array import array
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.http import rendering, tool_gaps
from flashmoa_sglang.http.sent_answers import Chat, Messages, Responses, SentAnswer
from flashmoa_sglang.http.streams import StreamTable
from flashmoa_sglang.messages import RequestMark
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import State

from tests.unit.plugin.http.fakes import generation

Body = dict[str, Any]
# A request that names no stream has one, too, if it is known by its prompt.
OF_A_STREAM = {"custom_params": RequestMark("stream", final=True).to_custom_params()}
TOOLS = SimpleNamespace(messages=[SimpleNamespace(role="user")], tools=["a tool"])
STOPPED = {"text": "", "meta_info": {"id": "one", "finish_reason": {"type": "stop"}}}
FIELDS = {"priority": None, "stream": False, "sampling_params": OF_A_STREAM}


@pytest.fixture
def gaps(engine: Any, table: StreamTable) -> tool_gaps.ToolGaps:
    # The state of a server that does not run.
    made = tool_gaps.ToolGaps(engine, table, rendering.ChatRenderer(State()))
    made._seconds = 60
    return made


@pytest.fixture(autouse=True)
def chat() -> Iterator[None]:
    token = rendering.served.set(TOOLS)
    yield
    rendering.served.reset(token)


async def outputs(*answers: Any) -> AsyncGenerator[Any]:
    for answer in answers:
        yield answer


async def taken(outputs: AsyncGenerator[Any]) -> list[Any]:
    return [output async for output in outputs]


@pytest.mark.parametrize(
    ("chat_", "fields"),
    [
        (None, {}),
        (SimpleNamespace(messages=["Hi"], tools=None), {}),
        (TOOLS, {"session_params": {"id": "s"}}),
        (TOOLS, {"sampling_params": {**OF_A_STREAM, "n": 2}}),
    ],
    ids=["of tokens, without a parser", "without tools", "of a session", "of two answers"],
)
async def test_an_unknown_next_prompt_is_not_pinned(
    gaps: tool_gaps.ToolGaps, engine: Any, chat_: Any, fields: Body
) -> None:
    rendering.served.set(chat_)
    ended = {"finish_reason": {"type": "stop"}}
    cut = {"id": "cut", "finish_reason": {"type": "length"}}

    def answer() -> AsyncGenerator[Any]:
        metas = [{"id": "one", "finish_reason": None}, {"id": "one", **ended}]
        return outputs(
            *({"meta_info": meta} for meta in metas),
            [{"meta_info": meta} for meta in ({"id": "two", **ended}, cut)],
        )

    fields = {**FIELDS, **fields}
    watched = gaps.watch(generation([1, 2], **fields), answer())
    assert len(await taken(watched)) == 3 and not gaps._tasks
    # Until this message, the scheduler keeps room for the agents of streams' requests.
    assert engine.released == ["one", "two"]
    rendering.served.set(None)
    others = gaps.watch(generation([1, 2], **{**fields, "sampling_params": None}), answer())
    assert len(await taken(others)) == 3 and len(engine.released) == 2


# Another request while the next prompt is rendered, if any.
LATE = {
    "its own": {},
    "of another namespace": {"extra_key": "other"},
    "another agent's": {"input_ids": [1, 2, 3, 9]},
    "none": None,
}


@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
async def test_no_prompt_is_pinned_too_late(
    gaps: tool_gaps.ToolGaps, engine: Any, monkeypatch: pytest.MonkeyPatch, late: Body | None
) -> None:
    rendered, pinned = threading.Event(), late != {}

    def next_prompt(*_: object) -> Any:
        rendered.wait()
        return array("q", [1, 2, 3, 4, 5])

    async def serve() -> Any:
        return await taken(gaps.watch(generation([1, 2, 3], **FIELDS), outputs(STOPPED)))

    monkeypatch.setattr(gaps, "_next_prompt", next_prompt)
    try:
        await gaps.follow(Chat, serve())
        (task,) = gaps._tasks
        if late is not None:
            later = generation(**{"ids": [1, 2, 3, 4, 5, 6], **FIELDS, **late})
            gaps.watch(later, outputs())
        rendered.set()
        await task
    finally:
        rendered.set()
    assert len(gaps._table) == pinned and not gaps._tasks
    assert engine.released == ([] if pinned else ["one"])


def chunk(finish: str | None = None, **delta: Any) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]}, separators=(',', ':'))}\n\n"


async def served(gaps: tool_gaps.ToolGaps, *events: str) -> AsyncGenerator[str]:
    """Stream events as SGLang does: the last ones come once the model has ended."""
    running = {"meta_info": {"id": "one", "finish_reason": None}}
    async for output in gaps.watch(generation([1, 2, 3], **FIELDS), outputs(running, STOPPED)):
        if output is running:
            yield chunk(role="assistant", content="")
    for event in events:
        yield event


async def follow(gaps: tool_gaps.ToolGaps, *events: str) -> AsyncGenerator[str]:
    async def create() -> Any:
        return served(gaps, *events)

    return await gaps.follow(Chat, create())


CALL = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = (chunk(tool_calls=[CALL]), chunk("tool_calls"), "data: [DONE]\n\n")


async def test_a_streamed_answer_is_read_as_it_was_sent(
    gaps: tool_gaps.ToolGaps, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []

    def next_prompt(_: object, parts: Any) -> None:
        read.extend(parts())

    monkeypatch.setattr(gaps, "_next_prompt", next_prompt)
    sent = (chunk(content="I look.\n"), *CALLED)
    assert await taken(await follow(gaps, *sent)) == [chunk(role="assistant", content=""), *sent]
    for task in list(gaps._tasks):
        await task
    assert read == [{"role": "assistant", "content": "I look.\n", "tool_calls": [CALL]}]
    assert engine.released == ["one"]


@pytest.mark.parametrize(
    ("events", "left_after"),
    [
        ((chunk(content="Yes."), chunk("stop")), None),
        (CALLED, 1),
        (('data: {"choices": "none"}\n\n', *CALLED), None),
    ],
    ids=["without calls", "whose client leaves", "that cannot be read"],
)
async def test_an_answer_leaves_nothing(
    gaps: tool_gaps.ToolGaps, engine: Any, events: tuple[str, ...], left_after: int | None
) -> None:
    """Its client gets it all the same, and the scheduler keeps no room for the next prompt."""
    got: list[str] = []
    following = await follow(gaps, *events)
    async for event in following:
        got.append(event)
        if len(got) - 1 == left_after:
            await following.aclose()
    assert got[1:] == [*events][:left_after]
    assert engine.released == ["one"] and not gaps._tasks


async def test_background_answers_keep_no_room(gaps: tool_gaps.ToolGaps, engine: Any) -> None:
    """Its client gets it later, by another request."""
    watched: list[AsyncGenerator[Any]] = []

    async def create() -> Any:
        watched.append(gaps.watch(generation([1, 2, 3], **FIELDS), outputs(STOPPED)))
        return SimpleNamespace(status="queued", output=[])

    await gaps.follow(Responses, create())
    assert await taken(watched[0]) == [STOPPED]
    assert engine.released == ["one"] and not gaps._tasks


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


TEXTS, PLACES = st.text(max_size=20), st.lists(st.integers(0, 99), max_size=4)


@given(
    st.lists(st.tuples(st.sampled_from(["content", "reasoning_content"]), TEXTS), max_size=4),
    st.lists(st.tuples(TEXTS, PLACES), min_size=1, max_size=3),
)
def test_chunks_add_up_to_the_message(
    texts: list[tuple[str, str]], calls: list[tuple[str, list[int]]]
) -> None:
    sent = Chat()
    for name, text in texts:
        sent.add(chunk(**{name: text}))
    for index, (arguments, places) in enumerate(calls):
        head = {"index": index, "id": f"c{index}", "type": "function"}
        sent.add(chunk(tool_calls=[{**head, "function": {"name": "f", "arguments": None}}]))
        for part in cut(arguments, places):
            sent.add(chunk(tool_calls=[{"index": index, "function": {"arguments": part}}]))
    sent.add('data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n')
    (message,) = sent.parts()
    for name in ("content", "reasoning_content"):
        assert message.get(name, "") == "".join(text for of, text in texts if of == name)
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [
        arguments for arguments, _ in calls
    ]
    assert [call["id"] for call in message["tool_calls"]] == [f"c{n}" for n in range(len(calls))]


INPUTS = st.dictionaries(TEXTS, st.integers(), max_size=2)
BLOCKS = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, TEXTS),
    st.builds(lambda text: {"type": "thinking", "thinking": text}, TEXTS),
    st.builds(lambda given: {"type": "tool_use", "id": "c", "name": "f", "input": given}, INPUTS),
)


@given(st.lists(st.tuples(BLOCKS, PLACES), max_size=4))
def test_anthropics_events_add_up_to_the_blocks(blocks: list[tuple[Body, list[int]]]) -> None:
    sent = Messages()

    def send(**data: Any) -> None:
        sent.add(f"event: {data['type']}\ndata: {json.dumps(data)}\n\n")

    send(type="message_start", message={})
    for index, (block, places) in enumerate(blocks):
        is_call = block["type"] == "tool_use"
        field = "input" if is_call else block["type"]
        empty = {**block, field: {} if is_call else ""}
        send(type="content_block_start", index=index, content_block=empty)
        written = json.dumps(block["input"]) if is_call and block["input"] else ""
        for part in cut(written if is_call else block[field], places):
            delta = {"partial_json" if is_call else field: part}
            send(type="content_block_delta", index=index, delta=delta)
        send(type="content_block_stop", index=index)
    assert sent.parts() == [block for block, _ in blocks]


@pytest.mark.parametrize("api", [Chat, Messages, Responses])
def test_an_error_has_no_parts(api: type[SentAnswer]) -> None:
    assert api.read(SimpleNamespace(body=b'{"error": {"message": "no"}}')) == []


def test_a_response_has_its_items_in_the_last_event() -> None:
    sent, items = Responses(), [{"type": "function_call", "arguments": "{}"}]
    for name, output in (("created", []), ("completed", items)):
        data = json.dumps({"type": f"response.{name}", "response": {"output": output}})
        event = f"event: response.{name}\ndata: {data}\n\n"
        assert (Responses.end in event) == bool(output)
        sent.add(event)
    assert sent.parts() == items
