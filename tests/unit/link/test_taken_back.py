"""Test that links send what takes the place of a text that was taken back."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from flashmoa import EngineClient, Text
from flashmoa.link.link import Link
from flashmoa.link.prompt import Prompt, Slot
from tests.unit.link.hung_engine import HungEngine, hung_engine


@asynccontextmanager
async def linked(
    text: Text, *segments: str | Slot, follows: bool = False
) -> AsyncGenerator[tuple[HungEngine, Link]]:
    """Yield an engine, and a link to a prompt there that follows a text."""
    async with (
        hung_engine() as engine,
        EngineClient(engine.url) as client,
        anyio.create_task_group() as group,
    ):
        link = Link(client, Prompt(segments), agent="reader", follows=follows)
        group.start_soon(link.run)
        text._feed_to(link)
        yield engine, link
        group.cancel_scope.cancel()


def appended(engine: HungEngine) -> list[dict[str, Any]]:
    """Return the appends so far, without their numbers, which count them."""
    bodies = [body for route, body in engine.requests if route == "append"]
    assert [body["seq"] for body in bodies] == list(range(len(bodies)))
    return [{name: body[name] for name in body.keys() - {"seq"}} for body in bodies]


async def test_an_answer_that_differs_replaces_the_end() -> None:
    text = Text("writer")
    async with linked(text, "Read: ", Slot("writer"), "!") as (engine, link):
        await engine.until("open")
        text.write("The quick fox")
        await engine.until("append")
        text.finish("The quick dog.")
        await engine.until("append", 2)
        start = len("Read: The quick ")
        assert appended(engine) == [
            {"text": "The quick fox", "end": False},
            {"text": "dog.!", "start": start, "end": True},
        ]
        assert link.claim() == "s0"


async def test_a_withdrawn_text_makes_room_for_the_next() -> None:
    draft, final = Text("writer"), Text("writer")
    async with linked(draft, "Read: ", Slot("writer"), "!") as (engine, link):
        await engine.until("open")
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
    async with linked(text, "Read: ", Slot("other"), Slot("writer")) as (engine, link):
        await engine.until("open")
        text.write("draft")
        text.finish("final")
        link.feed("other", "both: ")
        link.close_slot("other")
        await engine.until("append")
    assert appended(engine) == [{"text": "both: final", "end": True}]


async def test_text_taken_back_while_opening_is_replaced() -> None:
    text = Text("writer")
    text.write("draft")
    async with linked(text, Slot("writer")) as (engine, _):
        await engine.until("open")
        # The engine's answer has not come yet, or has: the stream has the draft.
        text.finish("final")
        await engine.until("append")
    assert [body["text"] for route, body in engine.requests if route == "open"] == ["draft"]
    assert appended(engine) == [{"text": "final", "start": 0, "end": True}]


async def test_a_text_that_has_ended_is_not_withdrawn() -> None:
    text = Text("writer")
    text.write("draft")
    text.withdraw()
    assert text.written == "" and not text.is_over
    text.finish("whole")
    text.withdraw()
    assert text.written == "whole"


async def test_a_followed_text_continues_in_a_new_prompt() -> None:
    """A call of the next run is followed by the link of the run before, until the next plan."""
    text = Text("writer")
    async with linked(text, "One. ", Slot("writer"), "!", follows=True) as (engine, link):
        text.name_call(engine.url, "a-call")
        await engine.until("append")
        assert link.become(Prompt(["One. Two. ", Slot("writer"), "!"]))
        text._feed_to(link)
        await engine.until("append", 3)
        text.finish("Three")
        await engine.until("append", 4)
    start = len("One. ")
    assert appended(engine) == [
        {"call": "a-call"},
        {"text": "Two. ", "start": start, "end": False},
        {"call": "a-call"},
        {"text": "Three!", "start": start + len("Two. "), "end": True},
    ]
