"""Streams are kept alive as long as their link, and not much longer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from autogen_core.models import ChatCompletionClient

from flashmoa import EngineClient, EngineSettings, Workflow
from flashmoa.agent_framework import FlashMoAChatClient
from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.link.link import Link
from flashmoa.link.prompt import Prompt, Slot
from flashmoa.observe import Event, LinkClosed, LinkOpened
from flashmoa.observe.events import ignore
from tests.unit.link.hung_engine import HungEngine, Route, hung_engine
from tests.unit.openai.test_observed_calls import INFO

# Seconds that a stream lives; short, since the tests wait for a part of it.
TTL = 0.3


@asynccontextmanager
async def linked(
    engine: HungEngine, events: list[Event] | None = None, ttl: float = TTL, **more: Any
) -> AsyncGenerator[Link]:
    """Yield a link to a prompt with two slots, once its stream is open."""
    prompt = Prompt(["Go. ", Slot("a"), Slot("b")])
    listener = events.append if events is not None else ignore
    async with (
        EngineClient(engine.url, timeout=25.0, engine_settings=EngineSettings(ttl)) as client,
        anyio.create_task_group() as group,
    ):
        link = Link(client, prompt, agent="reader", listener=listener, **more)
        group.start_soon(link.run)
        await engine.until("open")
        yield link
        group.cancel_scope.cancel()


@pytest.mark.parametrize("hangs", [(), ("keep_alive",)])
async def test_a_link_of_a_slow_writer_is_kept_alive(hangs: tuple[Route, ...]) -> None:
    """Also while the engine does not answer that it keeps the stream."""
    async with hung_engine(*hangs) as engine, linked(engine) as link:
        await engine.until("keep_alive", 1 if hangs else 3)
        link.feed("a", "some ")
        await engine.until("append")
        await engine.until("keep_alive", 2 if hangs else 5)
        assert not link.is_over


async def test_a_shorter_life_is_kept_alive_in_time() -> None:
    async with hung_engine() as engine:
        engine.ttl_seconds = TTL
        async with linked(engine, ttl=100_000.0):
            await engine.until("keep_alive", 3)


async def test_unsent_text_keeps_no_stream_alive() -> None:
    async with hung_engine() as engine, linked(engine) as link, anyio.create_task_group() as group:

        async def write() -> None:
            while True:
                link.feed("b", "more ")
                await anyio.sleep(0.01)

        group.start_soon(write)
        await engine.until("keep_alive", 3)
        assert "append" not in engine.routes()
        group.cancel_scope.cancel()


async def test_a_complete_prompt_is_kept_alive() -> None:
    async with hung_engine() as engine, linked(engine) as link:
        for name in ("a", "b"):
            link.feed(name, "some ")
            link.close_slot(name)
        await engine.until("append")
        await engine.until("keep_alive", 3)
        assert link.claim() == "s0"
        requests = len(engine.requests)
        await anyio.sleep(TTL)
        assert len(engine.requests) == requests


async def test_an_unused_stream_is_released_in_time() -> None:
    events: list[Event] = []
    async with hung_engine() as engine, linked(engine, events, unused_seconds=2 * TTL) as link:
        for name in ("a", "b"):
            link.close_slot(name)
        await engine.until("delete")
        assert "keep_alive" in engine.routes() and link.has_expired
    (closed,) = [event for event in events if isinstance(event, LinkClosed)]
    assert closed.reason == "unused"


async def test_a_plugin_without_keep_alive_is_linked() -> None:
    async with hung_engine() as engine:
        engine.lacks.add("keep_alive")
        async with linked(engine) as link:
            await engine.until("keep_alive")
            await anyio.sleep(TTL)
            link.feed("a", "some ")
            await engine.until("append")
            assert engine.routes().count("keep_alive") == 1
            assert not link.is_over


async def test_an_expired_stream_ends_its_link() -> None:
    """Answers to keep_alive are not reported."""
    events: list[Event] = []
    async with hung_engine() as engine, linked(engine, events):
        await engine.until("keep_alive", 2)
        engine.gone.add("s0")
        await engine.until("delete")
    assert [type(event) for event in events] == [LinkOpened, LinkClosed]
    assert isinstance(events[-1], LinkClosed) and events[-1].reason.startswith("StreamGone")


async def test_stream_ttl_seconds_reaches_the_engine() -> None:
    async with hung_engine() as engine:
        for number, settings in enumerate([EngineSettings(7.0), None], 1):
            async with (
                EngineClient(engine.url, engine_settings=settings) as client,
                Workflow(client) as flow,
            ):
                flow.expect([{"role": "user", "content": f"Read {flow.text()}"}])
                await engine.until("open", number)
    opened = [body["ttl_seconds"] for route, body in engine.requests if route == "open"]
    assert opened == [7.0, 30.0]


async def test_settings_of_clients_reach_the_engine() -> None:
    settings = EngineSettings(7.0, without_plugin="off")
    chat = FlashMoAChatCompletionClient(
        model="m", base_url="http://127.0.0.1:9", model_info=INFO, engine_settings=settings
    )
    loaded = ChatCompletionClient.load_component(chat.dump_component())
    assert isinstance(loaded, FlashMoAChatCompletionClient)
    other = FlashMoAChatClient("m", base_url="http://127.0.0.1:9", engine_settings=settings)
    for client in (chat, loaded, other):
        assert client.engine.settings == settings
        await client.close()
    for wrong in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="stream_ttl_seconds must be a positive number"):
            EngineSettings(wrong)
