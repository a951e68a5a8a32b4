"""Test the shell router's parts without engines: asks, the agent prompt cache, prompts, answers."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa import cli
from flashmoa.linking.prompt import Slot
from flashmoa.router.client_requests import CHAT
from flashmoa.router.errors import AgentFailed
from flashmoa.router.metrics import ShellMetrics
from flashmoa.router.shell.agent_answers import (
    AgentKey,
    AgentPromptCache,
    AnswerRecorder,
    GrowingAnswer,
)
from flashmoa.router.shell.agent_requests import parse_request
from flashmoa.router.shell.early_prefill import TextPrompt, TokenPrompt

pytestmark = pytest.mark.anyio


def named(agent: str, client: str = "", workflow: str = "w") -> AgentKey:
    return AgentKey(client, workflow, agent)


def test_parts_of_a_prompt_become_the_body_that_is_sent() -> None:
    prompt = [{"text": "Plan: "}, {"agent": "a"}, {"text": "\nAgain: "}, {"agent": "a"}]
    ask = parse_request(
        "/generate", {"prompt": prompt, "agent": "b", "workflow": "w", "stream": True}
    )
    assert (ask.form, ask.agent, ask.workflow, ask.reads) == ("text", "b", "w", ("a",))
    assert ask.with_texts({"a": "X"}) == {"text": "Plan: X\nAgain: X", "stream": True}
    assert [piece for piece in ask.pieces() if piece not in ask.marks.values()] == [
        "Plan: ", "\nAgain: ", ""
    ]  # fmt: skip

    prompt = [{"input_ids": [1, 2]}, {"agent": "a"}, {"input_ids": [3]}]
    ask = parse_request("/generate", {"prompt": prompt})
    assert (ask.form, ask.reads, ask.is_ordinary) == ("tokens", ("a",), False)
    assert ask.with_tokens({"a": [7, 8]}) == {"input_ids": [1, 2, 7, 8, 3]}


def test_parts_of_a_chat_become_messages() -> None:
    image = {"type": "image_url", "image_url": {"url": "u"}}
    agent = {"type": "agent", "agent": "a"}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Judge: "}, agent]},
        {"role": "user", "content": [image, agent]},
    ]
    ask = parse_request(CHAT, {"messages": messages, "temperature": 0})
    assert ask.with_texts({"a": "X"}) == {
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
    ask = parse_request(path, body)
    assert ask.is_ordinary and ask.body == body


@pytest.mark.parametrize(
    ("body", "said"),
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
def test_malformed_request_is_refused_with_the_reason(body: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_request("/generate", body)


def test_salted_prompt_is_not_prefilled_early() -> None:
    prompt = [{"agent": "a"}]
    assert parse_request("/generate", {"prompt": prompt}).can_prefill_early
    assert not parse_request("/generate", {"prompt": prompt, "cache_salt": "s"}).can_prefill_early


def test_agents_differ_between_workflows_and_clients() -> None:
    cache = AgentPromptCache()
    mine = cache.read(named("a"))
    assert cache.read(named("a")) is mine
    assert cache.read(named("a", workflow="v")) is not mine
    assert cache.read(named("a", client="Bearer x")) is not mine


def test_answer_not_begun_is_kept_while_a_request_waits_for_it() -> None:
    cache = AgentPromptCache(max_finished=2)
    writing = [cache.begin(named(name), ()) for name in "ab"]
    waited_for = cache.read(named("x"))
    for number in range(100):
        cache.read(named(f"unbegun-{number}"))
    # Answers that are being written are kept, whatever their number.
    writing.append(cache.begin(named("c"), ()))
    assert [cache.read(named(name)) for name in "abc"] == writing and len(cache) == 3
    assert cache.begin(named("x"), ()) is waited_for
    for one in (*writing, waited_for):
        one.close()
    cache.begin(named("d"), ())
    assert len(cache) == 2


def test_agent_asked_again_writes_another_answer() -> None:
    cache = AgentPromptCache()
    waited_for = cache.read(named("a"))
    first = cache.begin(named("a"), ())
    assert first is waited_for
    first.add("one", [1])
    second = cache.begin(named("a"), ())
    assert second is not first and cache.read(named("a")) is second


def test_agents_that_wait_for_each_other_are_refused() -> None:
    cache = AgentPromptCache()
    with pytest.raises(ValueError, match="would wait"):
        cache.begin(named("a"), [named("a")])
    a = cache.begin(named("a"), [named("b")])
    cache.begin(named("b"), [named("c")])
    with pytest.raises(ValueError, match="would wait"):
        cache.begin(named("c"), [named("a")])
    # Nobody waits for a finished answer, and an agent may read its own previous one.
    a.close()
    cache.begin(named("c"), [named("a")])
    cache.begin(named("a"), [named("a")])


def test_least_recently_used_answer_is_forgotten() -> None:
    cache = AgentPromptCache(max_finished=2)
    first, other = (cache.begin(named(name), ()) for name in "ab")
    first.close()
    other.close()
    cache.read(named("a"))
    cache.begin(named("c"), ()).close()
    assert cache.read(named("a")) is first and len(cache) == 2
    assert cache.read(named("b")) is not other
    cache.begin(named("b"), [named("c")])


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


def events(*told: dict[str, Any]) -> bytes:
    return b"".join(f"data: {json.dumps(one)}\n\n".encode() for one in told) + b"data: [DONE]\n\n"


def generation(text: str, ids: list[int], reason: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"text": text, "output_ids": ids, "meta_info": {"finish_reason": reason}}


@given(cut=st.integers(1, 40))
def test_generation_is_recorded_however_its_stream_is_cut(cut: int) -> None:
    answer = GrowingAnswer("a")
    writing = AnswerRecorder(answer, ShellMetrics(), streams=True)
    stop = {"type": "stop", "matched": 9}
    told = events(generation("wa", [1], None), generation("walk", [1, 2, 9], stop))
    for start in range(0, len(told), cut):
        writing.heard(told[start : start + cut])
    writing.ended("answered")
    # The token that ended the answer is not part of it.
    assert (answer.written, answer.tokens, answer.is_complete) == ("walk", [1, 2], True)
    assert writing.last["text"] == "walk"


def test_chat_is_recorded_as_text_streamed_or_not() -> None:
    streamed, whole = GrowingAnswer("a"), GrowingAnswer("b")
    chunks = [{"choices": [{"delta": {"content": part}}]} for part in ("wa", None, "lk")]
    AnswerRecorder(streamed, ShellMetrics(), streams=True).heard(events(*chunks, {"choices": []}))
    message = {"choices": [{"message": {"content": "walk"}}]}
    AnswerRecorder(whole, ShellMetrics(), streams=False).heard(json.dumps(message).encode())
    assert streamed.written == whole.written == "walk"
    assert streamed.tokens is None


async def test_aborted_chat_fails_its_answer() -> None:
    answer = GrowingAnswer("a")
    choice = {"delta": {"content": "wa"}, "finish_reason": "abort"}
    writing = AnswerRecorder(answer, ShellMetrics(), streams=True)
    writing.heard(events({"choices": [choice]}))
    writing.ended("answered")
    with pytest.raises(AgentFailed, match="aborted"):
        await answer.complete()


@pytest.mark.parametrize(
    ("told", "ending", "said"),
    [
        (events({"error": {"message": "no room"}}), "answered", "no room"),
        (events(generation("", [], {"type": "abort", "message": "full"})), "answered", "full"),
        (events({"text": "x"}), "answered", "cannot be read"),
        (events(generation("x", [1])), "lost", "was lost"),
        (b"", "left", "was left"),
    ],
)
async def test_unusable_response_fails_its_answer(told: bytes, ending: str, said: str) -> None:
    answer = GrowingAnswer("a")
    writing = AnswerRecorder(answer, ShellMetrics(), streams=True)
    writing.heard(told)
    writing.ended(ending)
    with pytest.raises(AgentFailed, match=said):
        await answer.complete()


@pytest.mark.parametrize(
    "arguments",
    [[], ["--prefill", "a:1"], ["--engine", "a:1", "--prefill", "a:1", "--pd-router", "b:1"]],
)
def test_command_accepts_engines_or_a_pair(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["flashmoa", "router", *arguments])
    with pytest.raises(SystemExit):
        cli.main()
    assert "--prefill and --pd-router" in capsys.readouterr().err
