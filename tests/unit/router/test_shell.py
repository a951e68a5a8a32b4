"""Test the shell router without engines: requests, the cache, prompts, answers and pairs."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, cast

import anyio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter

from flashmoa.engine import EngineClient
from flashmoa.engine.local import free_port
from flashmoa.linking.prompt import Prompt, Slot
from flashmoa.linking.prompt_feed import PromptFeed
from flashmoa.router.client_requests import CHAT
from flashmoa.router.errors import AgentFailed
from flashmoa.router.shell.agent_answers import (
    AgentKey,
    AgentPromptCache,
    AnswerRecorder,
    GrowingAnswer,
)
from flashmoa.router.shell.agent_requests import parse_request
from flashmoa.router.shell.application import (
    ShellOptions,
    shell_application,
    shells_application,
)
from flashmoa.router.shell.early_prefill import EarlyPrefill, TokenPrompt
from tests.integration.router.serving import serve, serve_at
from tests.unit.router.fake_engines import KEY, FakeEngine, RouterClient, running
from tests.unit.router.test_forwarding import STREAM, Server

pytestmark = pytest.mark.anyio
ENDINGS = Counter("requests", "by ending", ["ending"], registry=CollectorRegistry())


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


class Feed:
    """Stands for a prompt feed, and takes what is certain of the prompt at each change."""

    def __init__(self, prompt: Prompt | TokenPrompt) -> None:
        self._prompt = prompt
        self.taken: list[Any] = []
        self.is_stopped = False

    def changed(self) -> None:
        self.taken.extend(self._prompt.take())

    def stop(self) -> None:
        self.is_stopped = True


async def follow(prompt: Prompt | TokenPrompt, feed: Feed, answer: GrowingAnswer) -> None:
    early = EarlyPrefill(cast("EngineClient", None), parse_request("/generate", {}), {})
    await early.follow(prompt, cast("PromptFeed", feed), answer)


@given(pieces=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=6), seen=st.integers(0, 6))
async def test_token_prompt_takes_tokens_as_they_come(pieces: list[list[int]], seen: int) -> None:
    prompt, answer = TokenPrompt([(1,), "a", (2, 3), "a"]), GrowingAnswer("a")
    feed, written = Feed(prompt), [token for piece in pieces for token in piece]
    async with anyio.create_task_group() as group:
        group.start_soon(follow, prompt, feed, answer)
        for number, piece in enumerate(pieces):
            answer.add("", piece)
            if number == seen:
                await anyio.wait_all_tasks_blocked()
                assert feed.taken == [1, *written][: len(feed.taken)]
                assert not prompt.is_complete and not feed.is_stopped
        answer.close()
    assert prompt.is_complete and feed.is_stopped
    assert feed.taken == [1, *written, 2, 3, *written]


async def test_text_fills_its_slot_and_a_failed_answer_stops_the_feed() -> None:
    answer = GrowingAnswer("a")
    answer.add("walk", None)
    answer.close()
    text = Prompt(["Plan: ", Slot("a"), "!"])
    await follow(text, Feed(text), answer)
    assert text.stable() == "Plan: walk!" and text.is_complete
    with pytest.raises(AgentFailed, match="tokens are not known"):
        answer.token_ids()
    failing = GrowingAnswer("a")
    failing.fail(AgentFailed("gone"))
    for prompt, unusable in ((TokenPrompt(["a"]), answer), (Prompt([Slot("a")]), failing)):
        await follow(prompt, feed := Feed(prompt), unusable)
        assert feed.is_stopped and not prompt.is_complete


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


async def test_a_prompt_that_no_text_can_have_is_left_to_its_request() -> None:
    answer = GrowingAnswer("a")
    answer.close()
    request = parse_request("/generate", {"prompt": [{"agent": "a"}, {"text": "x\ud800"}]})
    async with serve(FakeEngine().app()) as url, EngineClient(url, headers=KEY) as engine:
        early = EarlyPrefill(engine, request, {"a": answer})
        await early.run()
        assert await early.finish() is None
        await early.release()


def events(*bodies: dict[str, Any]) -> bytes:
    return (
        b"".join(f"data: {json.dumps(body)}\n\n".encode() for body in bodies) + b"data: [DONE]\n\n"
    )


def generation(text: str, ids: list[int], reason: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"text": text, "output_ids": ids, "meta_info": {"finish_reason": reason}}


@given(cut=st.integers(1, 40))
def test_generation_is_recorded_however_its_stream_is_cut(cut: int) -> None:
    answer = GrowingAnswer("a")
    recorder = AnswerRecorder(answer, ENDINGS, is_stream=True)
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
    AnswerRecorder(streamed, ENDINGS, is_stream=True).receive(events(*chunks, {"choices": []}))
    message = {"choices": [{"message": {"content": "walk"}}]}
    AnswerRecorder(whole, ENDINGS, is_stream=False).receive(json.dumps(message).encode())
    assert streamed.written == whole.written == "walk"
    assert streamed.tokens is None


async def test_aborted_chat_fails_its_answer() -> None:
    answer = GrowingAnswer("a")
    choice = {"delta": {"content": "wa"}, "finish_reason": "abort"}
    recorder = AnswerRecorder(answer, ENDINGS, is_stream=True)
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
    recorder = AnswerRecorder(answer, ENDINGS, is_stream=True)
    recorder.receive(content)
    recorder.end(ending)
    with pytest.raises(AgentFailed, match=message):
        await answer.complete()


async def test_a_failed_answer_says_how_its_request_ended() -> None:
    answer = GrowingAnswer("a")
    AnswerRecorder(answer, ENDINGS).end("left")
    with pytest.raises(AgentFailed, match="a's request was left by its client, which disconn"):
        await answer.complete()


@asynccontextmanager
async def shells(
    *engines: FakeEngine, seconds: float = 30
) -> AsyncGenerator[tuple[AgentPromptCache, list[str], list[RouterClient]]]:
    """Run a shell router for each engine. Yield their answers, the engines' URLs, and clients."""
    answers = AgentPromptCache()
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serve(engine.app())) for engine in engines]
        apps = [shell_application(ShellOptions(url, url, seconds), answers) for url in urls]
        clients = [await stack.enter_async_context(running(app)) for app in apps]
        yield answers, urls, clients


def reading(read: str, **more: Any) -> bytes:
    """Return a request that reads an agent's answer."""
    prompt = [{"input_ids": [5]}, {"agent": read}]
    return json.dumps({"prompt": prompt, "workflow": "w", **more}).encode()


@pytest.mark.parametrize(
    ("texts", "status"), [(("yes", "yes"), 200), (("yes", "no"), 424)], ids=["same", "other"]
)
async def test_tokens_cross_only_if_they_are_the_same_text_at_both_pairs(
    texts: tuple[str, str], status: int
) -> None:
    engines = [FakeEngine(text=text) for text in texts]
    async with shells(*engines) as (answers, urls, clients):
        answer = answers.begin(AgentKey(KEY["authorization"], "w", "a"), (), urls[0])
        answer.add("yes", [7, 8])
        answer.close()
        own, _ = await clients[0]("POST", "/generate", reading("a"), KEY)
        given, body = await clients[1]("POST", "/generate", reading("a"), KEY)
    assert (own, given) == (200, status)
    assert (status == 424) == (b"another tokenizer" in body)
    # At the pair that wrote them, nobody is asked what they mean.
    assert engines[0].requests.count("POST /generate") == 1
    assert engines[0].requests.count("POST /detokenize") == 1


async def test_tokens_that_cannot_be_compared_are_not_sent() -> None:
    engine = FakeEngine()
    async with shells(engine) as (answers, _, [client]):
        nowhere = "http://127.0.0.1:9"
        answer = answers.begin(AgentKey(KEY["authorization"], "w", "a"), (), nowhere)
        answer.add("yes", [7, 8])
        answer.close()
        status, body = await client("POST", "/generate", reading("a"), KEY)
    assert status == 424 and b"cannot be compared" in body
    assert "POST /generate" not in engine.requests


async def test_agents_of_two_pairs_that_wait_for_each_other_are_refused() -> None:
    async with (
        shells(FakeEngine(), FakeEngine()) as (answers, _, [first, second]),
        anyio.create_task_group() as group,
    ):
        group.start_soon(partial(first, "POST", "/generate", reading("b", agent="a"), KEY))
        with anyio.fail_after(10):
            while not len(answers):  # noqa: ASYNC110 - it sends no event
                await anyio.sleep(0.01)
        status, body = await second("POST", "/generate", reading("a", agent="b"), KEY)
        group.cancel_scope.cancel()
    assert status == 400 and b"would wait" in body


async def test_each_pair_is_behind_its_own_port() -> None:
    engines = [FakeEngine(), FakeEngine(), FakeEngine()]
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serve(engine.app())) for engine in engines]
        port = free_port(len(engines))
        app = shells_application([ShellOptions(url, url) for url in urls], port)
        ports = range(port, port + len(engines))
        served = await stack.enter_async_context(serve_at(app, ports))
        http = await stack.enter_async_context(httpx.AsyncClient(headers=KEY))
        # The port of the Host header may be that of a proxy.
        await http.get(f"{served[2]}/v1/models", headers={"host": f"router:{port}"})
        await http.get(f"{served[1]}/v1/models")
    assert [engine.requests for engine in engines] == [
        [],
        ["GET /v1/models"],
        ["GET /v1/models"],
    ]


async def test_answer_that_breaks_off_is_an_error() -> None:
    begun = events(generation("wa", [1])).partition(b"data: [DONE]")[0]
    prefill, broken = FakeEngine(), Server((STREAM + begun,))
    async with (
        serve(prefill.app()) as url,
        broken.listening() as pd_router,
        running(shell_application(ShellOptions(url, pd_router))) as client,
    ):
        writing = json.dumps({"text": "x", "agent": "a"}).encode()
        status, content = await client("POST", "/generate", writing, KEY)
        assert status == 502 and b"broke off" in content
        reads = json.dumps({"prompt": [{"text": "So: "}, {"agent": "a"}]}).encode()
        status, content = await client("POST", "/generate", reads, KEY)
        assert status == 424 and b"was lost" in content
