"""A call of a linked team, without engines."""

from __future__ import annotations

import pytest
from autogen_core.models import CreateResult, RequestUsage

from flashmoa import EngineClient, Prompt, Slot
from flashmoa.autogen._calls import Request
from flashmoa.autogen._turn import RunningTurn
from flashmoa.linking.link import Link
from flashmoa.observe import CallStarted, Event

pytestmark = pytest.mark.anyio


class Nobody:
    """Who hears a call: events, and links if need be."""

    streams = True

    def __init__(self, *links: Link) -> None:
        self.events: list[Event] = []
        self.listener = self.events.append
        self._links = links

    def waiting_for(self, agent: str) -> list[Link]:
        return [link for link in self._links if link.waits_for(agent)]

    def finished(self, turn: RunningTurn) -> None: ...

    def failed(self, turn: RunningTurn) -> None: ...

    def give_back(self, link: Link) -> None: ...


async def test_a_call_that_overtakes_the_opening_of_its_stream_is_late() -> None:
    heard, request = Nobody(), Request("http://engine", "m", None)
    async with EngineClient("http://127.0.0.1:9") as engine:
        link = Link(engine, Prompt(["a"]), agent="b")
        RunningTurn(heard, "b", request, link, rewritten=None, early=False)
    (started,) = heard.events
    assert isinstance(started, CallStarted)
    assert started.late and started.stream_id is None


async def test_an_answer_that_is_another_one_than_was_heard_ends_the_links_to_it() -> None:
    """Its request broke off, and when it was sent again it was answered otherwise."""
    request, usage = Request("http://engine", "m", None), RequestUsage(0, 0)
    other = CreateResult(finish_reason="stop", content="A dog.", usage=usage, cached=False)
    async with EngineClient("http://127.0.0.1:9") as engine:
        link = Link(engine, Prompt([Slot("a")]), agent="b")
        turn = RunningTurn(Nobody(link), "a", request, None, rewritten=None, early=False)
        turn.on_text("The quick")
        assert not link.is_over
        turn.on_finish(other, None, raw=True)
    assert link.is_over and link.take_over() is None
    assert not turn.complete
