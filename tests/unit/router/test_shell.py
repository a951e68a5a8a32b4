"""Test the shell router without engines: requests, the cache, prompts and answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.engine import EngineClient
from flashmoa.router.forwarding import CHAT
from flashmoa.router.shell.agent_answers import (
    AgentFailed,
    AgentKey,
    AgentPromptCache,
    AnswerRecorder,
    ReadableAnswer,
)
from flashmoa.router.shell.agent_requests import parse_request
from flashmoa.router.shell.application import (
    EarlyPrefill,
    ShellOptions,
    shell_application,
)
from tests.integration.router.serving import serve
from tests.unit.linking.hung_engine import hung_engine
from tests.unit.router.support import KEY, FakeEngine, running
from tests.unit.router.test_forwarding import STREAM, Server

pytestmark = pytest.mark.anyio


def key_of(agent: str, client: str = "", workflow: str = "w") -> AgentKey:
    return AgentKey(client, workflow, agent)


def test_parts_of_a_prompt_become_the_body_that_is_sent() -> None:
    prompt = [{"text": "Plan: "}, {"agent": "a"}, {"text": "\nAgain: "}, {"agent": "a"}]
    request = parse_request(
        "/generate", {"prompt": prompt, "agent": "b", "workflow": "w", "stream": True}
    )
    assert (request.agent, request.workflow, tuple(request.marks)) == ("b", "w", ("a",))
    assert not request.is_chat and not request.is_ordinary
    assert request.filled({"a": "X"}) == {"text": "Plan: X\nAgain: X", "stream": True}


def test_parts_of_a_chat_become_messages() -> None:
    image = {"type": "image_url", "image_url": {"url": "u"}}
    agent = {"type": "agent", "agent": "a"}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Judge: "}, agent]},
        {"role": "user", "content": [image, agent]},
    ]
    request = parse_request(CHAT, {"messages": messages, "temperature": 0})
    assert request.filled({"a": "X"}) == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Judge: X"},
            {"role": "user", "content": [image, {"type": "text", "text": "X"}]},
        ],
        "temperature": 0,
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}),
        (CHAT, {"messages": 3}),
        (CHAT, {}),
        ("/generate", {"text": "x", "sampling_params": {"n": 2}}),
        ("/generate", {"text": ["x", "y"], "input_ids": None}),
        ("/generate", {"input_ids": [[1], [2]]}),
    ],
)
def test_request_without_agents_is_ordinary(path: str, body: dict[str, Any]) -> None:
    request = parse_request(path, body)
    assert request.is_ordinary and request.body == body


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": [{"text": 3}]}, "part of a prompt"),
        ({"prompt": [{"input_ids": [1]}, {"agent": "a"}]}, "part of a prompt"),
        ({"prompt": [{"agent": "a"}], "text": "x"}, "give one of"),
        ({"prompt": [{"agent": f"{number}"} for number in range(257)]}, "at most 256"),
        ({"agent": 3}, "must be strings"),
        ({"agent": "a", "text": ["x", "y"]}, "one answer"),
        ({"agent": "a", "text": "x", "sampling_params": {"n": 2}}, "one answer"),
        ({"agent": "a", "input_ids": [[1]]}, "one answer"),
    ],
)
def test_malformed_request_is_refused_with_the_reason(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_request("/generate", body)


def test_salted_prompt_is_not_prefilled_early() -> None:
    prompt = [{"agent": "a"}]
    assert parse_request("/generate", {"prompt": prompt}).can_prefill_early
    assert not parse_request("/generate", {"prompt": prompt, "cache_salt": "s"}).can_prefill_early


def test_agents_differ_between_workflows_and_clients() -> None:
    cache = AgentPromptCache()
    mine = cache.read(key_of("a"))
    assert cache.read(key_of("a")) is mine
    assert cache.read(key_of("a", workflow="v")) is not mine
    assert cache.read(key_of("a", client="Bearer x")) is not mine


def test_answers_are_kept_while_they_are_used_and_those_that_were_begun_last() -> None:
    cache = AgentPromptCache(most=2)
    writing, waited_for = cache.begin(key_of("a"), ()), cache.read(key_of("x"))
    for number in range(100):
        cache.read(key_of(f"unbegun-{number}"))
        cache.begin(key_of(f"begun-{number}"), ()).close()
    assert cache.read(key_of("a")) is writing and cache.begin(key_of("x"), ()) is waited_for
    again = cache.begin(key_of("x"), ())  # An agent that is asked again writes another answer.
    assert again is not waited_for and cache.read(key_of("x")) is again
    for number in (0, 99):  # The last one has been forgotten for these two.
        assert not cache.read(key_of(f"begun-{number}")).is_over
    assert len(cache._answers) == 2


def test_agents_that_wait_for_each_other_are_refused() -> None:
    cache = AgentPromptCache()
    with pytest.raises(ValueError, match="would wait"):
        cache.begin(key_of("a"), [key_of("a")])
    a = cache.begin(key_of("a"), [key_of("b")])
    cache.begin(key_of("b"), [key_of("c")])
    with pytest.raises(ValueError, match="would wait"):
        cache.begin(key_of("c"), [key_of("a")])
    # No request waits for a finished answer, and an agent may read its own previous one.
    a.close()
    cache.begin(key_of("c"), [key_of("a")])
    cache.begin(key_of("a"), [key_of("a")])


async def test_an_early_chat_is_rendered_with_every_field_that_shapes_its_prompt() -> None:
    rendered: list[dict[str, Any]] = []

    class Engine:
        async def render(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> str:
            rendered.append(fields)
            return "".join(message["content"] for message in messages)

    fields = {"tool_choice": "none", "reasoning_effort": "low", "chat_template_kwargs": {"x": 1}}
    messages = [{"role": "user", "content": "Sum up."}]
    request = parse_request(CHAT, {"messages": messages, "temperature": 0, **fields})
    prompt = await EarlyPrefill(cast("EngineClient", Engine()), request, {}).build_prompt()
    assert prompt.stable() == "Sum up." and rendered == [fields]


async def test_an_early_prompt_grows_with_its_answers_and_its_stream_is_released() -> None:
    answer = ReadableAnswer("a")
    parts = [{"text": "Judge: "}, {"agent": "a"}, {"text": "!"}]
    request = parse_request("/generate", {"prompt": parts})
    async with (
        hung_engine() as engine,
        EngineClient(engine.url) as client,
        anyio.create_task_group() as group,
    ):
        group.cancel_scope.deadline = anyio.current_time() + 10
        early = EarlyPrefill(client, request, {"a": answer})
        group.start_soon(early.run)
        await engine.until("open")
        answer.write("walk")
        await engine.until("append")
        answer.close()
        await early.finish()
    texts = [body.get("text") for _, body in engine.requests]
    assert texts[:2] == ["Judge: ", "walk"] and ("prefill", "Judge: walk!") in [
        (route, body.get("text")) for route, body in engine.requests
    ]
    assert engine.routes()[-1] == "delete" and not group.cancel_scope.cancelled_caught


async def test_a_prompt_that_no_text_can_have_is_left_to_its_request() -> None:
    answer = ReadableAnswer("a")
    answer.close()
    request = parse_request("/generate", {"prompt": [{"agent": "a"}, {"text": "x\ud800"}]})
    async with (
        serve(FakeEngine().app()) as url,
        EngineClient(url, headers=KEY) as engine,
        anyio.create_task_group() as group,
    ):
        early = EarlyPrefill(engine, request, {"a": answer})
        group.start_soon(early.run)
        await anyio.wait_all_tasks_blocked()
        await early.finish()


def events(*bodies: dict[str, Any]) -> bytes:
    return (
        b"".join(f"data: {json.dumps(body)}\n\n".encode() for body in bodies) + b"data: [DONE]\n\n"
    )


def generation(text: str, reason: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"text": text, "output_ids": [1], "meta_info": {"finish_reason": reason}}


@given(cut=st.integers(1, 40))
def test_generation_is_recorded_however_its_stream_is_cut(cut: int) -> None:
    answer = ReadableAnswer("a")
    recorder = AnswerRecorder(answer, is_stream=True)
    content = events(generation("wa"), generation("walk", {"type": "stop", "matched": 9}))
    for start in range(0, len(content), cut):
        recorder.receive(content[start : start + cut])
    recorder.end("answered")
    assert (answer.written, answer.is_complete) == ("walk", True)


def test_chat_is_recorded_as_text_streamed_or_not() -> None:
    streamed, whole = ReadableAnswer("a"), ReadableAnswer("b")
    chunks = [{"choices": [{"delta": {"content": part}}]} for part in ("wa", None, "lk")]
    AnswerRecorder(streamed, is_stream=True).receive(events(*chunks, {"choices": []}))
    message = {"choices": [{"message": {"content": "walk"}}]}
    AnswerRecorder(whole).receive(json.dumps(message).encode())
    assert streamed.written == whole.written == "walk"


ABORTED = {"delta": {"content": "wa"}, "finish_reason": "abort"}


@pytest.mark.parametrize(
    ("content", "ending", "message"),
    [
        (events({"error": {"message": "no room"}}), "answered", "no room"),
        (events(generation("", {"type": "abort"})), "answered", "a's request was aborted"),
        (events({"choices": [ABORTED]}), "answered", "a's request was aborted"),
        (events({"text": "x"}), "answered", "cannot be read"),
        (events(generation("x")), "lost", "was lost"),
        (b"", "left", "a's request was left; send it again"),
    ],
)
async def test_unusable_response_fails_its_answer(
    content: bytes, ending: str, message: str
) -> None:
    answer = ReadableAnswer("a")
    recorder = AnswerRecorder(answer, is_stream=True)
    recorder.receive(content)
    recorder.end(ending)
    with pytest.raises(AgentFailed, match=message):
        await answer.complete()


async def test_answer_that_breaks_off_is_an_error() -> None:
    begun = events(generation("wa")).partition(b"data: [DONE]")[0]
    prefill, broken = FakeEngine(), Server((STREAM + begun,))
    async with (
        serve(prefill.app()) as url,
        broken.listening() as pd_router,
        running(shell_application(ShellOptions(url, pd_router))) as client,
    ):
        writing = json.dumps({"text": "x", "agent": "a", "stream": True}).encode()
        status, content = await client("POST", "/generate", writing, KEY)
        assert b"the engine is gone" in content
        reads = json.dumps({"prompt": [{"text": "So: "}, {"agent": "a"}]}).encode()
        status, content = await client("POST", "/generate", reads, KEY)
        assert status == 424 and b"was lost" in content
