"""A call of a linked team, without engines."""

from __future__ import annotations

import pytest

from flashmoa import EngineClient, Prompt
from flashmoa.autogen._calls import Request
from flashmoa.autogen._turn import RunningTurn
from flashmoa.links import Link
from flashmoa.observe import CallStarted, Event

pytestmark = pytest.mark.anyio


class Nobody:
    """Who hears a call: events alone."""

    streams = True

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.listener = self.events.append

    def waiting_for(self, agent: str) -> list[Link]:
        return []

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
