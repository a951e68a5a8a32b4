"""A toy agent framework, and all that it takes to link it: the example for a new adapter."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from flashmoa import EngineClient
from flashmoa.engine import Delta
from flashmoa.linking.calls import CallObserver, CallRequest, CallResult, ObservedCall
from flashmoa.linking.forecasts import Forecast, Turn
from flashmoa.linking.planner import LinkedCall, LinkPlanner
from flashmoa.linking.prompt import Placeholders
from flashmoa.observe import Event, LinkOpened
from tests.unit.engine.faulty_engine import TEXT
from tests.unit.linking.hung_engine import hung_engine
from tests.waiting import until

pytestmark = pytest.mark.anyio


@dataclass
class Agent:
    name: str
    engine: EngineClient

    def read(self, said: Sequence[str]) -> list[dict[str, str]]:
        return [{"role": "user", "content": text} for text in [f"You are {self.name}.", *said]]


@dataclass
class Relay:
    """Runs agents one after the other; each of them reads what those before it said."""

    agents: list[Agent]
    said: list[str] = field(default_factory=list[str])
    link: RelayLink | None = None
    is_running: bool = False

    async def run(self, task: str) -> str:
        self.said, self.is_running = [task], True
        for agent in self.agents:
            self.said.append(await self._ask(agent))
        self.is_running = False
        return self.said[-1]

    async def _ask(self, agent: Agent) -> str:
        call = CallObserver() if self.link is None else self.link.observe(agent)
        messages, text = agent.read(self.said), ""
        with ObservedCall([call], None) as observed:
            stream_id = observed.prompt_stream_id
            async with agent.engine.chat(messages, prompt_stream_id=stream_id) as deltas:
                async for delta in deltas:
                    call.on_text(delta.text)
                    text += delta.text
            observed.finish(CallResult(text, None, "stop", is_forwarded=True))
        return text


class RelayLink(LinkPlanner):
    """The adapter: who may call next, and what will they send?"""

    def __init__(self, relay: Relay) -> None:
        super().__init__(self._count)
        self.opened = 0
        self._relay = relay
        self._names = [agent.name for agent in relay.agents]

    def observe(self, agent: Agent) -> LinkedCall:
        return self.begin(agent.name, CallRequest(agent.engine.url, "toy", None))

    @property
    def is_running(self) -> bool:
        return self._relay.is_running

    async def upcoming(self, caller: str) -> Sequence[Turn]:
        names = self._names[self._names.index(caller) :]
        steps = [frozenset([name]) for name in names]
        return [Turn(names[place], tuple(steps[:place])) for place in range(1, len(names))]

    async def forecast(self, turn: Turn) -> Forecast:
        placeholders = Placeholders(turn.writers)
        agent = self._relay.agents[self._names.index(turn.agent)]
        said = [*self._relay.said, *map(placeholders.padded, turn.writers)]
        render = partial(agent.engine.render, agent.read(said))
        return Forecast(turn, agent.engine, placeholders, [render])

    def _count(self, event: Event) -> None:
        self.opened += isinstance(event, LinkOpened)


async def test_a_linked_run_equals_an_unlinked_one_and_its_prompts_were_prefilled() -> None:
    async with hung_engine() as server, WaitingEngine(server.url) as engine:
        relay = Relay([Agent(name, engine) for name in ("planner", "writer", "editor")])
        assert await relay.run("Go.") == TEXT
        unlinked = [body for route, body in server.requests if route == "chat"]
        server.requests.clear()
        relay.link = engine.link = RelayLink(relay)
        assert await relay.run("Go.") == TEXT
        await relay.link.host.close()
        linked = [body for route, body in server.requests if route == "chat"]
        streams = [body.pop("prompt_stream_id", None) for body in linked]
        assert streams[0] is None and {*streams[1:]} == {"s0", "s1"}
        assert linked == unlinked


class WaitingEngine(EngineClient):
    """Sends no request of a linked relay before the prompts of the agents after it are linked."""

    link: RelayLink | None = None

    @asynccontextmanager
    async def chat(self, messages: Any, **more: Any) -> AsyncGenerator[AsyncGenerator[Delta]]:
        await until(lambda: self.link is None or self.link.opened >= 2)
        async with super().chat(messages, **more) as deltas:
            yield deltas
