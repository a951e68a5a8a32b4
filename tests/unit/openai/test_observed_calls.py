"""Watching an answer changes neither the answer nor the errors of its call."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import httpx
import openai
import pytest
from agent_framework import Message
from autogen_core.models import UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from openai import AsyncOpenAI

from flashmoa import EngineClient
from flashmoa._concurrency import TaskHost
from flashmoa.agent_framework import FlashMoAChatClient
from flashmoa.engine.wire import CALL_HEADER
from flashmoa.frameworks.agent_framework import client as _client
from flashmoa.link.calls import CallObserver, CallRequest, ObservedCall, current_attempts
from flashmoa.link.hearing import CallChannel
from flashmoa.observe.calls import CallReporter
from flashmoa.observe.events import ignore
from flashmoa.openai import OpenAI, run
from flashmoa.openai.http import observe_completions
from tests.unit.engine.faulty_engine import OTHER, TEXT, WORDS, Fate, FaultyEngine, faulty_engine
from tests.unit.frameworks.autogen.teams import INFO, make_client
from tests.unit.openai.fake_server import URL, Recorder, chunk, serve, stream
from tests.unit.openai.fake_server import whole as whole_answer

ASK = [UserMessage(content="Go.", source="user")]
# A timeout long enough for an answer without pauses, and short enough to wait for.
BRIEF = httpx.Timeout(5.0, read=0.5)
# Asks an engine, observed or not, with options of OpenAI's client. Appends the answer.
Way = Callable[[list[Any], FaultyEngine, bool, dict[str, Any]], Awaitable[None]]


@pytest.fixture(autouse=True)
def retry_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have OpenAI's client retry at once, and not after half a second and more."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


def autogen(engine: FaultyEngine, *, is_stock: bool = False, **options: Any) -> Any:
    if is_stock:
        options |= {"base_url": f"{engine.url}/v1", "api_key": "x"}
        return OpenAIChatCompletionClient(model="m", model_info=INFO, **options)
    return make_client(engine.url, **options)


def by_autogen(*, is_stream: bool = False, **own: Any) -> Way:
    """Ask with the stock client, or with FlashMoA's client and these options."""

    async def ask(
        got: list[Any], engine: FaultyEngine, is_observed: bool, options: dict[str, Any]
    ) -> None:
        options = {**options, **(own if is_observed else {})}
        client = autogen(engine, is_stock=not is_observed, **options)
        try:
            if is_stream:
                async for item in client.create_stream(ASK, include_usage=True):
                    got.append(getattr(item, "content", item))  # noqa: PERF401 - it may break off.
            else:
                got.append((await client.create(ASK)).content)
        finally:
            await client.close()

    return ask


def by_agent_framework(*, is_stream: bool = False) -> Way:
    async def ask(
        got: list[Any], engine: FaultyEngine, is_observed: bool, options: dict[str, Any]
    ) -> None:
        workflow: Any = WatchedWorkflow()
        question: Any = [Message("user", ["Go."])]
        async with FlashMoAChatClient("m", base_url=engine.url) as client:
            vars(client.client).update(options)
            if is_observed:
                client.linked_teams.add(workflow)
            if is_stream:
                async for update in client.get_response(question, stream=True):
                    got.append(update.text)  # noqa: PERF401 - it may break off.
            else:
                got.append((await client.get_response(question)).text)

    return ask


async def by_a_blocking_run(
    got: list[Any], engine: FaultyEngine, is_observed: bool, options: dict[str, Any]
) -> None:
    def ask() -> None:
        kind: Any = OpenAI if is_observed else openai.OpenAI
        messages: Any = [{"role": "user", "content": "Go."}]
        with (
            kind(base_url=f"{engine.url}/v1", api_key="x", **options) as client,
            run("faults") if is_observed else nullcontext(),
        ):
            answer = client.chat.completions.create(model="m", messages=messages)
            got.append(answer.choices[0].message.content)

    await asyncio.to_thread(ask)


WAYS: dict[str, Way] = {
    "autogen": by_autogen(listener=lambda _: None),
    "autogen without a listener": by_autogen(),
    "autogen's stream": by_autogen(is_stream=True, listener=lambda _: None),
    "agent framework": by_agent_framework(),
    "agent framework's stream": by_agent_framework(is_stream=True),
    "blocking run": by_a_blocking_run,
}
FATES: list[Fate] = ["fine", "no done", "cut", "error", 500, 429, 404, "hang", "slow", "html"]
REPEATED: list[Fate] = ["cut", "error", 500]


@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize(
    ("way", "fates"),
    [(way, (fate,)) for way in WAYS for fate in FATES]
    + [("autogen", (fate,) * 3) for fate in REPEATED],
)
async def test_an_observed_call_has_the_same_outcome(
    way: str, fates: tuple[Fate, ...], retries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outcome is the text, the exception, and the requests."""
    monkeypatch.setattr(_client, "find_calling_executor", object)
    outcomes: list[Any] = []
    for is_observed in (False, True):
        got: list[Any] = []
        async with faulty_engine(*fates) as engine:
            # A slow answer takes longer than the timeout, but none of its words does.
            timeout = BRIEF if fates[0] in ("hang", "slow") else 5.0
            options = {"max_retries": retries, "timeout": timeout}
            try:
                await WAYS[way](got, engine, is_observed, options)
            except Exception as error:
                status, body = (getattr(error, name, None) for name in ("status_code", "body"))
                got += [type(error), type(error.__cause__), status, body, f"{error}"]
        outcomes.append((got, engine.contents))
    assert outcomes[0] == outcomes[1]
    got, requests = outcomes[0]
    is_answered = got[-1:] == [TEXT]
    if fates[0] in ("fine", "no done"):
        assert (is_answered or "".join(got) == TEXT) and len(requests) == 1
    elif fates[0] not in (404, "html") and not way.endswith("stream"):
        assert is_answered == (len(fates) <= retries)
        assert len(requests) == min(len(fates), retries) + 1


def openai_of(engine: FaultyEngine, **more: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="x", **more)


async def ask_observed(client: AsyncOpenAI, observer: CallObserver, **more: Any) -> Any:
    """Ask for an answer; return it, or its text if it is a stream."""
    observe_completions(client._client, current_attempts)
    create: Any = client.chat.completions.create
    with ObservedCall([observer]) as call, call.making():
        answer = await create(model="m", messages=[], **more)
    if not more:
        return answer
    return "".join([c.choices[0].delta.content or "" async for c in answer if c.choices])


async def test_an_observed_answer_is_unchanged() -> None:
    async with faulty_engine() as engine, openai_of(engine) as stock, openai_of(engine) as ours:
        plain: Any = await stock.chat.completions.create(model="m", messages=[])
        whole = await ask_observed(ours, Recorder())
    assert whole.to_dict() == plain.to_dict()
    assert whole._request_id == plain._request_id == "r1"
    assert engine.contents[0] == engine.contents[1]


@pytest.mark.parametrize(
    ("told", "passed_on"),
    [
        ([WORDS[:3], WORDS[:2], WORDS], WORDS),
        # The text of an attempt that differs from the first attempt is not passed on.
        ([WORDS[:3], OTHER], WORDS[:3]),
        ([WORDS[:3], OTHER, WORDS], WORDS),
        ([["The", " q"], ["The qu"], ["T", "he qui", "ck"]], ["The", " q", "u", "i", "ck"]),
    ],
)
async def test_text_of_a_retried_request_passes_once(
    told: list[list[str]], passed_on: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt is told under an id of its own."""
    server, observer, host = serve(monkeypatch), Recorder(), TaskHost("Listening failed")
    attempts = iter(told)
    server.told = lambda _: next(attempts)
    server.chat = lambda _: whole_answer() if len(server.bodies()) == len(told) else broken()
    stock = AsyncOpenAI(base_url=f"{URL}/v1", api_key="x")
    async with EngineClient(URL) as engine, stock as client:
        observer.channel = CallChannel(engine, host)
        observer.channel.open()
        await ask_observed(client, observer)
        await host.close()
    assert observer.pieces() == passed_on
    calls = [headers[CALL_HEADER] for headers in server.headers()]
    assert len(set(calls)) == len(calls) == len(told)
    assert len(set(server.contents)) == 1


def broken() -> httpx.Response:
    raise httpx.ReadError("")


async def test_a_shared_http_client_is_observed_once() -> None:
    async with httpx.AsyncClient() as http, faulty_engine() as engine:
        one, other = (openai_of(engine, http_client=http) for _ in range(2))
        for client in (one, other, one):
            observer = Recorder()
            assert await ask_observed(client, observer, stream=True) == TEXT
            assert observer.pieces() == WORDS
        for client in (one, one.with_options(max_retries=1)):
            create: Any = client.chat.completions.create
            async for _ in await create(model="m", messages=[], stream=True):
                pass
            assert observer.pieces() == WORDS


async def test_a_patch_of_send_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    async with faulty_engine() as engine, openai_of(engine) as client:
        kind: Any = type(client._client)
        real = kind.send

        async def send(self: Any, request: Any, **options: Any) -> Any:
            seen.append(request.url.path)
            return await real(self, request, **options)

        observe_completions(client._client, current_attempts)
        monkeypatch.setattr(kind, "send", send)
        assert (await ask_observed(client, Recorder())).choices[0].message.content == TEXT
    assert seen == ["/v1/chat/completions"]


async def test_a_failing_observer_harms_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server, host = serve(monkeypatch), TaskHost("Listening failed")
    server.told = lambda _: WORDS
    failing, linked = Recorder("on_text"), Recorder()
    stock = AsyncOpenAI(base_url=f"{URL}/v1", api_key="x")
    async with EngineClient(URL) as engine, stock as client:
        failing.channel = linked.channel = CallChannel(engine, host)
        failing.channel.open()
        for observer in (failing, linked):
            assert (await ask_observed(client, observer)).choices
        await host.close()
    assert linked.pieces() == WORDS and len(server.channels) == 1 == 3 - len(server.bodies())
    assert caplog.text.count("An observer of a call failed") == 1


@pytest.mark.parametrize(
    ("fate", "note"), [(404, "is not an engine"), (401, "refuses this API key"), (500, None)]
)
@pytest.mark.parametrize("streams", [False, True])
async def test_an_error_says_what_to_do(fate: Fate, note: str | None, streams: bool) -> None:
    for way in (by_autogen(is_stream=streams), by_agent_framework(is_stream=streams)):
        async with faulty_engine(fate) as engine:
            with pytest.raises(Exception) as raised:
                await way([], engine, True, {"max_retries": 0})
        notes = getattr(raised.value, "__notes__", [])
        found = [note in text and engine.url in text for text in notes if note]
        assert found == [True] * bool(note)


async def test_streams_may_have_null_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_client, "find_calling_executor", object)
    last = {"index": 0, "delta": None, "finish_reason": "stop"}
    events = [chunk({"content": TEXT}), {**chunk({}), "choices": [last]}]
    serve(monkeypatch).chat = lambda _: stream(events)
    async with FlashMoAChatClient("m", base_url=URL) as client:
        workflow = WatchedWorkflow()
        client.linked_teams.add(workflow)  # type: ignore[arg-type]
        updates = client.get_response([Message("user", ["Go."])], stream=True)
        assert "".join([update.text async for update in updates]) == TEXT


class WatchedWorkflow:
    """A linked workflow that observes every request."""

    def observe(self, executor: object, request: CallRequest) -> CallObserver:
        return CallObserver(CallReporter(ignore, agent="a", engine=request.engine, model="m"))

    async def close(self) -> None: ...
