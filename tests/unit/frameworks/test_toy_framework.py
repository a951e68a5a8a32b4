"""Test the toy framework of examples/own_framework.py on a fake engine."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from examples.own_framework import Relay, RelayLink, Speaker
from flashmoa import EngineClient
from flashmoa.engine import Delta
from flashmoa.observe import LinkOpened
from tests.unit.engine.faulty_engine import TEXT
from tests.unit.link.hung_engine import hung_engine
from tests.waiting import until


async def test_a_linked_run_equals_an_unlinked_one() -> None:
    async with hung_engine() as server, WaitingEngine(server.url) as engine:
        relay = Relay([Speaker(name, engine) for name in ("planner", "writer", "editor")])
        assert await relay.run("Go.") == TEXT
        unlinked = server.bodies("chat")
        server.requests.clear()
        engine.link = RelayLink(relay)
        assert await relay.run("Go.") == TEXT
        await engine.link.host.close()
        linked = server.bodies("chat")
        streams = [body.pop("prompt_stream_id", None) for body in linked]
        assert streams[0] is None and {*streams[1:]} == {"s0", "s1"}
        assert linked == unlinked


class WaitingEngine(EngineClient):
    """Sends no request of a linked relay before the prompts of the later agents are linked."""

    link: RelayLink | None = None

    @asynccontextmanager
    async def chat(self, messages: Any, **more: Any) -> AsyncGenerator[AsyncGenerator[Delta]]:
        await until(lambda: self.link is None or self._opened() >= 2)
        async with super().chat(messages, **more) as deltas:
            yield deltas

    def _opened(self) -> int:
        assert self.link is not None
        return sum(isinstance(event, LinkOpened) for event in self.link.report.events)
