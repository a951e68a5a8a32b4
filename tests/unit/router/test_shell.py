"""Test the shell router without engines: requests, the cache, prompts and answers."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.engine import EngineClient
from flashmoa.router.forwarding import CHAT
from flashmoa.router.shell import agents
from flashmoa.router.shell.application import EarlyPrefill, ShellOptions, shell_application
from tests.integration.router.serving import serve
from tests.unit.link.hung_engine import hung_engine
from tests.unit.router.support import KEY, FakeEngine, RouterClient, pair, running
from tests.unit.router.test_forwarding import STREAM, Server

DONE = b"data: [DONE]\n\n"


def key_of(agent: str, client: str = "", workflow: str = "w") -> tuple[str, str, str]:
    return client, workflow, agent


def reading(*parts: str | dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the body of a chat whose message has these parts. A name in brackets is an agent."""
    content = [
        part
        if isinstance(part, dict)
        else {"type": "agent", "agent": part[1:-1]}
        if part.startswith("[")
        else {"type": "text", "text": part}
        for part in parts
    ]
    return {"messages": [{"role": "user", "content": content}], **more}


def test_parts_of_a_chat_become_a_body() -> None:
    image, brief = {"type": "image_url", "image_url": {"url": "u"}}, "Be brief."
    body = reading("Judge: ", "[a]", "Again: ", "[a]", agent="b", workflow="w", stream=True)
    body["messages"].append({"role": "system", "content": brief})
    body["messages"] += reading(image, "[a]")["messages"]
    request = agents.parse_request(body)
    assert (request.agent, request.workflow, tuple(request.marks)) == ("b", "w", ("a",))
    assert request.filled({"a": "X"}) == {
        "messages": [
            {"role": "user", "content": "Judge: XAgain: X"},
            {"role": "system", "content": brief},
            {"role": "user", "content": [image, {"type": "text", "text": "X"}]},
        ],
        "stream": True,
    }


@pytest.mark.parametrize("body", [reading("x"), {"messages": 3}, {}, {"messages": ["x"], "n": 2}])
def test_request_without_agents_is_unchanged(body: dict[str, Any]) -> None:
    assert agents.parse_request(body) == agents.AgentRequest("", None, body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (reading({"type": "agent", "agent": 3}), "has none"),
        (reading({"type": "agent"}), "has none"),
        ({"agent": 3}, "must be strings"),
        ({"agent": "a", "workflow": 3}, "must be strings"),
        (reading("x", agent="a", n=2), "one answer"),
    ],
)
def test_a_malformed_request_is_refused(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        agents.parse_request(body)


def test_agents_differ_by_workflow_and_client() -> None:
    cache = agents.AgentPromptCache()
    mine = cache.read(key_of("a"))
    assert cache.read(key_of("a")) is mine
    assert cache.read(key_of("a", workflow="v")) is not mine
    assert cache.read(key_of("a", client="Bearer x")) is not mine


def test_used_and_latest_answers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "MAX_UNUSED_ANSWERS", 2)
    cache = agents.AgentPromptCache()
    writing, waited_for = cache.begin(key_of("a")), cache.read(key_of("x"))
    for number in range(100):
        cache.read(key_of(f"unbegun-{number}"))
        cache.begin(key_of(f"begun-{number}")).close()
    assert cache.read(key_of("a")) is writing and cache.begin(key_of("x")) is waited_for
    again = cache.begin(key_of("x"))  # An agent that is asked again writes another answer.
    assert again is not waited_for and cache.read(key_of("x")) is again
    for number in (0, 99):  # The two answers of `x` have replaced the latest one, too.
        assert not cache.read(key_of(f"begun-{number}")).is_over
    assert len(cache._answers) == 2


async def test_an_early_chat_has_every_prompt_field() -> None:
    rendered: list[dict[str, Any]] = []

    class Engine:
        async def render(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> str:
            rendered.append(fields)
            return "".join(message["content"] for message in messages)

    fields = {"tool_choice": "none", "reasoning_effort": "low", "chat_template_kwargs": {"x": 1}}
    messages = [{"role": "user", "content": "Sum up."}]
    request = agents.parse_request({"messages": messages, "temperature": 0, **fields})
    prompt = await EarlyPrefill(cast("EngineClient", Engine()), request, {}).build_prompt()
    assert prompt.stable() == "Sum up." and rendered == [fields]


async def test_an_early_prompt_grows_with_its_answers() -> None:
    answer = agents.ReadableAnswer("a")
    request = agents.parse_request(reading("Judge: ", "[a]", "!"))
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
    sent = [(route, body.get("text")) for route, body in engine.requests]
    assert [text for route, text in sent if route in ("open", "append")][:2] == ["Judge: ", "walk"]
    assert [text for route, text in sent if route == "prefill"] == ["Judge: walk!"]
    assert engine.routes()[-1] == "delete" and not group.cancel_scope.cancelled_caught


async def test_an_impossible_prompt_is_not_sent_early() -> None:
    answer = agents.ReadableAnswer("a")
    answer.close()
    request = agents.parse_request(reading("[a]", "x\ud800"))
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
    return b"".join(f"data: {json.dumps(body)}\n\n".encode() for body in bodies) + DONE


def chunk(text: str | None, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": reason}]}


def recorded(pieces: Iterable[bytes], ending: str, is_stream: bool = True) -> agents.ReadableAnswer:
    answer = agents.ReadableAnswer("a")
    recorder = agents.AnswerRecorder(answer, is_stream=is_stream)
    for piece in pieces:
        recorder.receive(piece)
    recorder.end(ending)
    return answer


@given(cut=st.integers(1, 40), is_stream=st.booleans())
def test_answers_are_recorded_however_they_are_cut(cut: int, is_stream: bool) -> None:
    last = {"error": None, **chunk("k", "stop")}
    content = events(chunk("wa"), chunk(None), {"choices": []})[: -len(DONE)]
    content += events(chunk("l"), last).replace(b"data: ", b"data:").replace(b"\n", b"\r\n")
    whole = {"choices": [{"message": {"content": "walk"}, "finish_reason": "stop"}]}
    pieces = [content[start : start + cut] for start in range(0, len(content), cut)]
    answer = recorded(pieces if is_stream else [json.dumps(whole).encode()], "answered", is_stream)
    assert (answer.written, answer.is_complete) == ("walk", True)


@pytest.mark.parametrize(
    ("content", "ending", "message"),
    [
        (events({"error": {"message": "no room"}}), "answered", "no room"),
        (events(chunk("wa", "abort")), "answered", "a's request was aborted"),
        (events({"text": "x"}), "answered", "not read to its end"),
        (events(chunk("x")), "answered", "not read to its end"),
        (b"data: [1]\n\n", "answered", "none of OpenAI's"),
        (events(chunk("x")), "lost", "was lost"),
        (b"", "left", "a's request was left; send it again"),
    ],
)
async def test_unusable_answer_fails(content: bytes, ending: str, message: str) -> None:
    with pytest.raises(agents.AgentFailed, match=message):
        await recorded([content], ending).complete()


async def ask(client: RouterClient, *parts: str, **more: Any) -> tuple[int, bytes]:
    return await client("POST", CHAT, reading(*parts, **more), KEY)


async def test_a_writer_that_leaves_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, begin = anyio.Event(), agents.AgentPromptCache.begin

    def note(cache: agents.AgentPromptCache, key: tuple[str, str, str]) -> agents.ReadableAnswer:
        begun.set()
        return begin(cache, key)

    monkeypatch.setattr(agents.AgentPromptCache, "begin", note)
    async with pair(FakeEngine(), seconds=60) as client:
        async with anyio.create_task_group() as writer:
            writer.start_soon(lambda: ask(client, "So: ", "[absent]", agent="a"))
            await begun.wait()
            writer.cancel_scope.cancel()
        status, content = await ask(client, "So: ", "[a]")
    assert status == 424 and b"a's request failed: its client left" in content


async def test_answer_that_breaks_off_is_an_error() -> None:
    begun = events(chunk("wa")).partition(b"data: [DONE]")[0]
    prefill, broken = FakeEngine(), Server((STREAM + begun,))
    async with (
        serve(prefill.app()) as url,
        broken.listening() as pd_router,
        running(shell_application(ShellOptions(url, pd_router))) as client,
    ):
        _, content = await ask(client, "x", agent="a", stream=True)
        assert b"the engine is gone" in content
        status, content = await ask(client, "So: ", "[a]")
        assert status == 424 and b"was lost" in content
