"""Test what a client takes its model for while its engine does not answer."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from autogen_core.models import UserMessage

from flashmoa.autogen import FlashMoAChatCompletionClient
from tests.unit.openai.fake_server import TEXT, URL, serve

pytestmark = pytest.mark.anyio
BLIND = {"has_image_understanding": False, "tool_call_parser": None}
SEEING = {"has_image_understanding": True, "tool_call_parser": "hermes"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Engine:
    """Answers synchronous requests; is down as long as it has no answer.

    Attributes:
        threads: those in which it was asked.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer: dict[str, Any] | None = None
        self.status = 200
        self.threads: list[int] = []
        self.now = 0.0
        monkeypatch.setattr(httpx, "request", self.request)
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("flashmoa.autogen._client.time", clock)

    def request(self, method: str, url: str, **more: Any) -> httpx.Response:
        self.threads.append(threading.get_ident())
        self.now += 1.0
        request = httpx.Request(method, url)
        if self.answer is None:
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(self.status, json=self.answer, request=request)


def make() -> FlashMoAChatCompletionClient:
    return FlashMoAChatCompletionClient(model="m", base_url=URL)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


def by_pickle(client: FlashMoAChatCompletionClient) -> FlashMoAChatCompletionClient:
    return pickle.loads(pickle.dumps(client))


def by_dump(client: FlashMoAChatCompletionClient) -> FlashMoAChatCompletionClient:
    return FlashMoAChatCompletionClient.load_component(client.dump_component())


async def test_an_engine_that_was_down_is_asked_again_and_the_guess_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(monkeypatch)
    client = make()
    (warning,) = warnings(caplog)
    assert URL in warning and "refused" in warning and "asked again" in warning
    # It is not asked all the time: each try may block.
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


async def test_a_call_asks_again_without_blocking_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)
    engine = Engine(monkeypatch)
    client = make()
    engine.now += 10
    engine.answer = BLIND
    answer = await client.create([UserMessage(content="Go.", source="user")])
    assert answer.content == TEXT
    assert len(engine.threads) == 2 and engine.threads[1] != threading.get_ident()
    assert client.model_info["function_calling"] is False
    await client.close()


@pytest.mark.parametrize("copy", [by_pickle, by_dump])
async def test_a_copy_of_a_client_takes_no_guess_for_what_the_engine_told(
    monkeypatch: pytest.MonkeyPatch,
    copy: Callable[[FlashMoAChatCompletionClient], FlashMoAChatCompletionClient],
) -> None:
    engine = Engine(monkeypatch)
    guessing = make()
    engine.answer = SEEING
    told = copy(guessing)
    assert told.model_info["vision"] is True
    engine.answer = BLIND
    assert copy(told).model_info["vision"] is True


@pytest.mark.parametrize(("status", "tries"), [(404, 1), (503, 2)])
async def test_a_server_without_the_route_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: int, tries: int
) -> None:
    engine = Engine(monkeypatch)
    engine.answer, engine.status = {}, status
    client = make()
    engine.now += 1000
    assert client.model_info["function_calling"] is True
    assert len(engine.threads) == tries and len(warnings(caplog)) == tries - 1
