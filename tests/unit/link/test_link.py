"""What links send, as texts grow and are taken back, and how long their streams live."""

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import pytest
from autogen_core.models import ChatCompletionClient

from flashmoa import EngineClient, EngineSettings, Text, Workflow
from flashmoa.agent_framework import FlashMoAChatClient
from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.link.link import Link
from flashmoa.link.prompt import Prompt, Slot
from flashmoa.observe import Event, LinkClosed, LinkOpened
from tests.unit.frameworks.autogen.teams import make_client
from tests.unit.link.hung_engine import HungEngine, Route, hung_engine, linked, user

# Seconds that a stream lives; short, because tests wait for a part of the time.
TTL = 0.3


def waiting(
    engine: HungEngine, *, ttl: float = TTL, **more: Any
) -> AbstractAsyncContextManager[Link]:
    """Run a link that waits for two writers."""
    return linked(engine, "Go. ", Slot("a"), Slot("b"), ttl=ttl, **more)


@pytest.mark.parametrize("hangs", [(), ("keep_alive",)])
async def test_a_slow_writers_link_is_kept_alive(hangs: tuple[Route, ...]) -> None:
    """Also while the engine does not answer the request to keep the stream."""
    async with hung_engine(*hangs) as engine, waiting(engine) as link:
        await engine.until("keep_alive", 1 if hangs else 3)
        link.feed("a", "some ")
        await engine.until("append")
        await engine.until("keep_alive", 2 if hangs else 5)
        assert not link.is_over


async def test_a_shorter_life_is_kept_alive_in_time() -> None:
    async with hung_engine() as engine:
        engine.ttl_seconds = TTL
        async with waiting(engine, ttl=100_000.0):
            await engine.until("keep_alive", 3)


async def test_unsent_text_keeps_no_stream_alive() -> None:
    async with hung_engine() as engine, waiting(engine) as link, anyio.create_task_group() as group:

        async def write() -> None:
            while True:
                link.feed("b", "more ")
                await anyio.sleep(0.01)

        group.start_soon(write)
        await engine.until("keep_alive", 3)
        assert "append" not in engine.routes()
        group.cancel_scope.cancel()


async def test_a_complete_prompt_is_kept_alive() -> None:
    async with hung_engine() as engine, waiting(engine) as link:
        for name in ("a", "b"):
            link.feed(name, "some ")
            link.close_slot(name)
        await engine.until("append")
        await engine.until("keep_alive", 3)
        assert link.claim() == "s0"
        requests = len(engine.requests)
        await anyio.sleep(TTL)
        assert len(engine.requests) == requests


async def test_an_unused_stream_is_released_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashmoa.link.link.UNUSED_SECONDS", 2 * TTL)
    events: list[Event] = []
    async with hung_engine() as engine, waiting(engine, listener=events.append) as link:
        for name in ("a", "b"):
            link.close_slot(name)
        await engine.until("delete")
        assert "keep_alive" in engine.routes() and link.has_expired
    assert [each.reason for each in events if isinstance(each, LinkClosed)] == ["unused"]


async def test_an_expired_stream_ends_its_link() -> None:
    """Answers to keep_alive are not reported."""
    events: list[Event] = []
    async with hung_engine() as engine, waiting(engine, listener=events.append):
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
                flow.expect(user(f"Read {flow.text()}"))
                await engine.until("open", number)
    assert [body["ttl_seconds"] for body in engine.bodies("open")] == [7.0, 30.0]


async def test_settings_of_clients_reach_the_engine() -> None:
    settings = EngineSettings(7.0, without_plugin="off")
    chat = make_client("http://127.0.0.1:9", engine_settings=settings)
    loaded = ChatCompletionClient.load_component(chat.dump_component())
    assert isinstance(loaded, FlashMoAChatCompletionClient)
    other = FlashMoAChatClient("m", base_url="http://127.0.0.1:9", engine_settings=settings)
    for client in (chat, loaded, other):
        assert client.engine.settings == settings
        await client.close()
    for wrong in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="stream_ttl_seconds must be a positive number"):
            EngineSettings(wrong)


def appended(engine: HungEngine) -> list[dict[str, Any]]:
    """Return the appends so far, without their sequence numbers."""
    bodies = engine.bodies("append")
    assert [body.pop("seq") for body in bodies] == list(range(len(bodies)))
    return bodies


@asynccontextmanager
async def reading(
    text: Text, *segments: str | Slot, **more: Any
) -> AsyncGenerator[tuple[HungEngine, Link]]:
    """Run an engine, and a link there that follows a text."""
    async with hung_engine() as engine, linked(engine, *segments, text=text, **more) as link:
        yield engine, link


async def test_an_answer_that_differs_replaces_the_end() -> None:
    text = Text("writer")
    async with reading(text, "Read: ", Slot("writer"), "!") as (engine, link):
        text.write("The quick fox")
        await engine.until("append")
        text.finish("The quick dog.")
        await engine.until("append", 2)
        assert link.claim() == "s0"
    assert appended(engine) == [
        {"text": "The quick fox", "end": False},
        {"text": "dog.!", "start": len("Read: The quick "), "end": True},
    ]


async def test_a_withdrawn_text_makes_room_for_the_next() -> None:
    draft, final = Text("writer"), Text("writer")
    async with reading(draft, "Read: ", Slot("writer"), "!") as (engine, link):
        draft.write("I look.")
        await engine.until("append")
        draft.withdraw()
        await engine.until("append", 2)
        assert not link.is_over and link.waits_for("writer")
        final._feed_to(link)
        final.write("Done")
        await engine.until("append", 3)
        final.finish("Done.")
        await engine.until("append", 4)
    assert appended(engine) == [
        {"text": "I look.", "end": False},
        {"text": "", "start": len("Read: "), "end": False},
        {"text": "Done", "end": False},
        {"text": ".!", "end": True},
    ]


async def test_text_taken_back_unsent_is_never_sent() -> None:
    text = Text("writer")
    async with reading(text, "Read: ", Slot("other"), Slot("writer")) as (engine, link):
        text.write("draft")
        text.finish("final")
        link.feed("other", "both: ")
        link.close_slot("other")
        await engine.until("append")
    assert appended(engine) == [{"text": "both: final", "end": True}]


async def test_text_taken_back_early_is_replaced() -> None:
    text = Text("writer")
    text.write("draft")
    async with reading(text, Slot("writer")) as (engine, _):
        # Whether the engine's answer has come or not, the stream has the draft.
        text.finish("final")
        await engine.until("append")
    assert [body["text"] for body in engine.bodies("open")] == ["draft"]
    assert appended(engine) == [{"text": "final", "start": 0, "end": True}]


def test_a_text_that_has_ended_is_not_withdrawn() -> None:
    text = Text("writer")
    text.write("draft")
    text.withdraw()
    assert text.written == "" and not text.is_over
    text.finish("whole")
    text.withdraw()
    assert text.written == "whole"


async def test_a_followed_text_continues_in_a_new_prompt() -> None:
    """Until the next plan, the previous run's link follows a call of the next run."""
    text = Text("writer")
    async with reading(text, "One. ", Slot("writer"), "!", follows=True) as (engine, link):
        text.name_call(engine.url, "a-call")
        await engine.until("append")
        assert link.become(Prompt(["One. Two. ", Slot("writer"), "!"]))
        text._feed_to(link)
        await engine.until("append", 3)
        text.finish("Three")
        await engine.until("append", 4)
    assert appended(engine) == [
        {"call": "a-call"},
        {"text": "Two. ", "start": len("One. "), "end": False},
        {"call": "a-call"},
        {"text": "Three!", "start": len("One. Two. "), "end": True},
    ]
