"""Test the shell router's parts without engines: requests, the cache, prompts and answers."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.linking.prompt import Slot
from flashmoa.router.client_requests import CHAT
from flashmoa.router.errors import AgentFailed
from flashmoa.router.shell.agent_answers import (
    AgentKey,
    AgentPromptCache,
    AnswerRecorder,
    GrowingAnswer,
    ShellMetrics,
)
from flashmoa.router.shell.agent_requests import parse_request
from flashmoa.router.shell.early_prefill import TextPrompt, TokenPrompt

pytestmark = pytest.mark.anyio


def key_of(agent: str, client: str = "", workflow: str = "w") -> AgentKey:
    return AgentKey(client, workflow, agent)


def test_parts_of_a_prompt_become_the_body_that_is_sent() -> None:
    prompt = [{"text": "Plan: "}, {"agent": "a"}, {"text": "\nAgain: "}, {"agent": "a"}]
    request = parse_request(
        "/generate", {"prompt": prompt, "agent": "b", "workflow": "w", "stream": True}
    )
    assert (request.form, request.agent, request.workflow, tuple(request.marks)) == (
        "text",
        "b",
        "w",
        ("a",),
    )
    assert request.with_texts({"a": "X"}) == {"text": "Plan: X\nAgain: X", "stream": True}
    assert [piece for piece in request.pieces() if piece not in request.marks.values()] == [
        "Plan: ", "\nAgain: ", ""
    ]  # fmt: skip

    prompt = [{"input_ids": [1, 2]}, {"agent": "a"}, {"input_ids": [3]}]
    request = parse_request("/generate", {"prompt": prompt})
    assert (request.form, tuple(request.marks), request.is_ordinary) == ("tokens", ("a",), False)
    assert request.with_tokens({"a": [7, 8]}) == {"input_ids": [1, 2, 7, 8, 3]}


def test_parts_of_a_chat_become_messages() -> None:
    image = {"type": "image_url", "image_url": {"url": "u"}}
    agent = {"type": "agent", "agent": "a"}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Judge: "}, agent]},
        {"role": "user", "content": [image, agent]},
    ]
    request = parse_request(CHAT, {"messages": messages, "temperature": 0})
    assert request.with_texts({"a": "X"}) == {
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
        ({"prompt": [{"input_ids": [1.5]}]}, "token ids"),
        ({"prompt": [{"input_ids": [1]}, {"text": "x"}]}, "part of a prompt"),
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


def test_answer_not_begun_is_kept_while_a_request_waits_for_it() -> None:
    cache = AgentPromptCache(max_finished=2)
    writing = [cache.begin(key_of(name), ()) for name in "ab"]
    waited_for = cache.read(key_of("x"))
    for number in range(100):
        cache.read(key_of(f"unbegun-{number}"))
    # Answers that are being written stay, however many there are.
    writing.append(cache.begin(key_of("c"), ()))
    assert [cache.read(key_of(name)) for name in "abc"] == writing and len(cache) == 3
    assert cache.begin(key_of("x"), ()) is waited_for
    for one in (*writing, waited_for):
        one.close()
    cache.begin(key_of("d"), ())
    assert len(cache) == 2


def test_agent_asked_again_writes_another_answer() -> None:
    cache = AgentPromptCache()
    waited_for = cache.read(key_of("a"))
    first = cache.begin(key_of("a"), ())
    assert first is waited_for
    first.add("one", [1])
    second = cache.begin(key_of("a"), ())
    assert second is not first and cache.read(key_of("a")) is second


def test_agents_that_wait_for_each_other_are_refused() -> None:
    cache = AgentPromptCache()
    with pytest.raises(ValueError, match="would wait"):
        cache.begin(key_of("a"), [key_of("a")])
    a = cache.begin(key_of("a"), [key_of("b")])
    cache.begin(key_of("b"), [key_of("c")])
    with pytest.raises(ValueError, match="would wait"):
        cache.begin(key_of("c"), [key_of("a")])
    # Nobody waits for a finished answer, and an agent may read its own previous one.
    a.close()
    cache.begin(key_of("c"), [key_of("a")])
    cache.begin(key_of("a"), [key_of("a")])


def test_least_recently_used_answer_is_forgotten() -> None:
    cache = AgentPromptCache(max_finished=2)
    first, other = (cache.begin(key_of(name), ()) for name in "ab")
    first.close()
    other.close()
    cache.read(key_of("a"))
    cache.begin(key_of("c"), ()).close()
    assert cache.read(key_of("a")) is first and len(cache) == 2
    assert cache.read(key_of("b")) is not other
    cache.begin(key_of("b"), [key_of("c")])


@given(pieces=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=6), seen=st.integers(0, 6))
async def test_token_prompt_takes_tokens_as_they_come(pieces: list[list[int]], seen: int) -> None:
    prompt, answer, taken = TokenPrompt([(1,), "a", (2, 3), "a"]), GrowingAnswer("a"), list[int]()
    written = [token for piece in pieces for token in piece]
    async with anyio.create_task_group() as group:
        group.start_soon(prompt.follow, answer, lambda: taken.extend(prompt.take()))
        for number, piece in enumerate(pieces):
            answer.add("", piece)
            if number == seen:
                await anyio.wait_all_tasks_blocked()
                assert taken == [1, *written][: len(taken)]
                assert not prompt.is_complete
        answer.close()
    assert prompt.is_complete and taken == [1, *written, 2, 3, *written]


async def test_text_fills_its_slot_and_a_failed_text_raises() -> None:
    prompt, answer = TextPrompt(["Plan: ", Slot("a"), "!"]), GrowingAnswer("a")
    answer.add("walk", None)
    assert prompt.take() == "Plan: "
    answer.close()
    await prompt.follow(answer, lambda: None)
    assert prompt.stable() == "Plan: walk!" and prompt.is_complete
    with pytest.raises(AgentFailed, match="tokens are not known"):
        await TokenPrompt(["a"]).follow(answer, lambda: None)
    failing = GrowingAnswer("a")
    failing.fail(AgentFailed("gone"))
    with pytest.raises(AgentFailed, match="gone"):
        await TextPrompt([Slot("a")]).follow(failing, lambda: None)


def events(*bodies: dict[str, Any]) -> bytes:
    return (
        b"".join(f"data: {json.dumps(body)}\n\n".encode() for body in bodies) + b"data: [DONE]\n\n"
    )


def generation(text: str, ids: list[int], reason: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"text": text, "output_ids": ids, "meta_info": {"finish_reason": reason}}


@given(cut=st.integers(1, 40))
def test_generation_is_recorded_however_its_stream_is_cut(cut: int) -> None:
    answer = GrowingAnswer("a")
    recorder = AnswerRecorder(answer, ShellMetrics(), is_stream=True)
    stop = {"type": "stop", "matched": 9}
    content = events(generation("wa", [1], None), generation("walk", [1, 2, 9], stop))
    for start in range(0, len(content), cut):
        recorder.receive(content[start : start + cut])
    recorder.end("answered")
    # The token that ended the answer is not part of it.
    assert (answer.written, answer.tokens, answer.is_complete) == ("walk", [1, 2], True)
    assert recorder.last["text"] == "walk"


def test_chat_is_recorded_as_text_streamed_or_not() -> None:
    streamed, whole = GrowingAnswer("a"), GrowingAnswer("b")
    chunks = [{"choices": [{"delta": {"content": part}}]} for part in ("wa", None, "lk")]
    AnswerRecorder(streamed, ShellMetrics(), is_stream=True).receive(
        events(*chunks, {"choices": []})
    )
    message = {"choices": [{"message": {"content": "walk"}}]}
    AnswerRecorder(whole, ShellMetrics(), is_stream=False).receive(json.dumps(message).encode())
    assert streamed.written == whole.written == "walk"
    assert streamed.tokens is None


async def test_aborted_chat_fails_its_answer() -> None:
    answer = GrowingAnswer("a")
    choice = {"delta": {"content": "wa"}, "finish_reason": "abort"}
    recorder = AnswerRecorder(answer, ShellMetrics(), is_stream=True)
    recorder.receive(events({"choices": [choice]}))
    recorder.end("answered")
    with pytest.raises(AgentFailed, match="aborted"):
        await answer.complete()


@pytest.mark.parametrize(
    ("content", "ending", "message"),
    [
        (events({"error": {"message": "no room"}}), "answered", "no room"),
        (events(generation("", [], {"type": "abort", "message": "full"})), "answered", "full"),
        (events({"text": "x"}), "answered", "cannot be read"),
        (events(generation("x", [1])), "lost", "was lost"),
        (b"", "left", "was left"),
    ],
)
async def test_unusable_response_fails_its_answer(
    content: bytes, ending: str, message: str
) -> None:
    answer = GrowingAnswer("a")
    recorder = AnswerRecorder(answer, ShellMetrics(), is_stream=True)
    recorder.receive(content)
    recorder.end(ending)
    with pytest.raises(AgentFailed, match=message):
        await answer.complete()


async def test_a_failed_answer_says_how_its_request_ended() -> None:
    answer = GrowingAnswer("a")
    AnswerRecorder(answer, ShellMetrics()).end("left")
    with pytest.raises(AgentFailed, match="a's request was left by its client, which disconn"):
        await answer.complete()
