"""What a client asks its engine and sends it, and which linked teams observe its calls."""

import pickle
import sys
import threading
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from autogen_core import Image
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from openai import APIConnectionError

from flashmoa.agent_framework import FlashMoAChatClient
from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.errors import BadAnswer
from flashmoa.frameworks.autogen.client import SynchronousEngine
from flashmoa.frameworks.autogen.dry_run import CapturingClient
from flashmoa.link.calls import CallObserver, CallRequest
from flashmoa.link.expected import first_request
from flashmoa.openai import OpenAI
from tests.unit.events import warnings
from tests.unit.openai.fake_server import TEXT, URL, serve

BLIND = {"has_image_understanding": False, "tool_call_parser": None}
SEEING = {"has_image_understanding": True, "tool_call_parser": "hermes"}
ASK = [UserMessage(content="Go.", source="user")]


def test_a_client_without_a_model_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client does not ask the engine first."""
    monkeypatch.setattr(httpx, "request", None)
    for options in ({}, {"model": None}, {"model": ""}):
        with pytest.raises(ValueError, match="FlashMoAChatCompletionClient needs model=NAME"):
            FlashMoAChatCompletionClient(base_url=URL, **options)


class Engine:
    """Answers synchronous requests; is down while it has no answer.

    Attributes:
        threads: the threads of the requests.
        requests: the options of the requests.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer: dict[str, Any] | None = None
        self.status = 200
        self.threads: list[int] = []
        self.requests: list[dict[str, Any]] = []
        self.now = 0.0
        monkeypatch.setattr(httpx, "request", self.request)
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("flashmoa.frameworks.autogen.client.time", clock)

    def request(self, method: str, url: str, **more: Any) -> httpx.Response:
        self.threads.append(threading.get_ident())
        self.requests.append(more)
        self.now += 1.0
        request = httpx.Request(method, url)
        if self.answer is None:
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(self.status, json=self.answer, request=request)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def make() -> FlashMoAChatCompletionClient:
    return FlashMoAChatCompletionClient(model="m", base_url=URL)


async def test_only_an_unreachable_engine_is_called_so() -> None:
    client = FlashMoAChatCompletionClient(model="m", base_url="http://127.0.0.1:9", max_retries=0)
    with pytest.raises(APIConnectionError) as raised:
        await client.create(ASK)
    assert any("cannot be reached" in each for each in raised.value.__notes__)
    await client.close()
    with pytest.raises(APIConnectionError) as raised:
        await client.create(ASK)
    assert not getattr(raised.value, "__notes__", [])


async def test_an_engine_that_was_down_is_asked_again(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    client = make()
    (warning,) = warnings(caplog)
    assert URL in warning and "refused" in warning and "asked again" in warning
    # It is not asked all the time, as each request may block.
    assert [client.model_info["function_calling"] for _ in range(3)] == [True] * 3
    assert len(engine.threads) == 1
    engine.now += 10
    assert client.model_info["vision"] is False and len(engine.threads) == 2
    engine.now += 10
    engine.answer = SEEING
    assert client.model_info["vision"] is True
    engine.now += 1000
    assert client.model_info["vision"] is True and len(engine.threads) == 3
    assert warnings(caplog) == [warning]


async def test_a_call_asks_again_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """A call with tools explains once why the model calls none."""
    serve(monkeypatch)
    client = make()
    caplog.clear()
    engine.now += 10
    engine.answer = BLIND
    assert (await client.create(ASK)).content == TEXT
    assert len(engine.threads) == 2 and engine.threads[1] != threading.get_ident()
    assert client.model_info["function_calling"] is False
    tool: Any = {"name": "search", "description": "Search."}
    for _ in range(2):
        with pytest.raises(ValueError, match="function calling"):
            await client.create(ASK, tools=[tool])
    assert [("--tool-call-parser" in text) for text in warnings(caplog)] == [True]
    await client.close()


@pytest.mark.parametrize(
    "copy",
    [
        lambda client: pickle.loads(pickle.dumps(client)),
        lambda client: FlashMoAChatCompletionClient.load_component(client.dump_component()),
    ],
    ids=["pickle", "dump"],
)
def test_a_copy_of_a_client_keeps_no_guess(engine: Engine, copy: Callable[[Any], Any]) -> None:
    guessing = make()
    engine.answer = SEEING
    told = copy(guessing)
    assert told.model_info["vision"] is True
    engine.answer = BLIND
    assert copy(told).model_info["vision"] is True


@pytest.mark.parametrize(("status", "tries"), [(404, 1), (503, 2)])
def test_a_server_without_the_route_is_asked_once(
    engine: Engine, caplog: pytest.LogCaptureFixture, status: int, tries: int
) -> None:
    engine.answer, engine.status = {}, status
    client = make()
    engine.now += 1000
    assert client.model_info["function_calling"] is True
    assert len(engine.threads) == tries and len(warnings(caplog)) == tries - 1


PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAA"
    "DUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def test_images_are_for_models_with_vision(engine: Engine) -> None:
    message = UserMessage(content=["Look:", Image.from_base64(PIXEL)], source="user")
    engine.answer = SEEING
    assert "image_url" in str(make()._request([message]).body["messages"])
    engine.answer = BLIND
    with pytest.raises(ValueError, match="vision"):
        make()._request([message])


def test_the_default_url_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert FlashMoAChatCompletionClient(model="gpt-4o").engine.url == "http://127.0.0.1:30000"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere:1/v1")
    assert FlashMoAChatCompletionClient(model="gpt-4o").engine.url == "http://elsewhere:1"
    with pytest.raises(ValueError, match="give http://HOST:PORT"):
        FlashMoAChatCompletionClient(model="gpt-4o", base_url="localhost:30000")


@pytest.mark.parametrize(
    "make",
    [FlashMoAChatCompletionClient, FlashMoAChatClient, OpenAI],
)
def test_the_environments_key_is_for_the_environments_url(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(**given: str) -> str:
        client = make(**({} if make is OpenAI else {"model": "gpt-4o"}), **given)
        while not isinstance(client, openai.OpenAI | openai.AsyncOpenAI):
            client = client.client if make is FlashMoAChatClient else client._client
        return client.api_key

    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert key() == "EMPTY"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere:1/v1")
    assert key() == "secret"
    assert key(api_key="own") == "own"
    assert key(base_url="http://other:1") == "EMPTY"


MODELS = {"data": [{"id": "other", "max_model_len": 111}, {"id": "m", "max_model_len": 9999}]}


@pytest.mark.parametrize(("model", "expected"), [("m", 9999), ("other", 111), ("unlisted", 111)])
def test_the_context_length_is_asked_for_once(engine: Engine, model: str, expected: int) -> None:
    engine.answer = MODELS
    asked = SynchronousEngine(URL, {"x-tenant": "a"})
    assert [asked.context_length(model) for _ in range(2)] == [expected] * 2
    assert [request["headers"] for request in engine.requests] == [{"x-tenant": "a"}]


@pytest.mark.parametrize(
    "answer", [{}, {"data": []}, {"data": None}, {"data": [{"id": "m", "max_model_len": None}]}]
)
def test_an_engine_that_tells_no_context_is_named(engine: Engine, answer: Any) -> None:
    engine.answer = answer
    with pytest.raises(BadAnswer, match=f"{URL}/v1/models is not an engine's"):
        SynchronousEngine(URL, {}).context_length("m")


ARGS = {"enable_thinking": False}


def look(place: str) -> str:
    """Look at a place."""
    return place


@pytest.fixture
def client() -> FlashMoAChatCompletionClient:
    return FlashMoAChatCompletionClient(
        model="tiny",
        base_url="http://127.0.0.1:9",
        reasoning_effort="high",
        extra_body={"chat_template_kwargs": ARGS, "reasoning": {"enabled": True}},
    )


async def test_a_predicted_call_has_its_fields(client: FlashMoAChatCompletionClient) -> None:
    tools = [FunctionTool(look, "Look.")]
    own = {"tools": tools, "tool_choice": tools[0], "json_output": False}
    effort = {"reasoning_effort": "low"}
    created = CapturingClient(client).create(ASK, extra_create_args=effort, **own)
    fields = (await first_request(created)).fields
    assert [tool["function"]["name"] for tool in fields.pop("tools")] == ["look"]
    assert fields == {
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "reasoning_effort": "low",
        "reasoning": {"enabled": True},
        "chat_template_kwargs": ARGS,
    }
    scored = await first_request(CapturingClient(client).score(ASK, ["yes", "no"]))
    assert scored.fields == {"chat_template_kwargs": ARGS}


def test_tokens_are_counted_with_its_fields(
    client: FlashMoAChatCompletionClient, engine: Engine
) -> None:
    engine.answer = {"tokens": [1, 2, 3]}
    assert client.count_tokens(ASK) == 3
    body = engine.requests[-1]["json"]
    assert body["reasoning_effort"] == "high" and body["chat_template_kwargs"] == ARGS


class Team:
    def observe(self, caller: object, request: CallRequest) -> CallObserver | None:
        return None


@pytest.fixture
def frequent_switches() -> Generator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("frequent_switches")
def test_calls_find_teams_while_threads_link() -> None:
    linked: Any = FlashMoAChatCompletionClient(model="gpt-4o", base_url=URL).linked_teams
    kept, ended = [Team() for _ in range(100)], threading.Event()
    for team in kept:
        linked.add(team)

    def link() -> None:
        while not ended.is_set():
            teams = [Team() for _ in range(20)]
            for team in teams:
                linked.add(team)
            for team in teams[:10]:
                linked.discard(team)

    other = threading.Thread(target=link)
    other.start()
    try:
        found = [linked.observe(None, CallRequest(URL, "m", None)) for _ in range(3000)]
    finally:
        ended.set()
        other.join()
    assert found == [[]] * 3000
    assert set(map(id, linked)) >= set(map(id, kept))
