"""Link your own framework: a toy framework of 40 lines, and its whole adapter.

python examples/own_framework.py [--engine http://HOST:30000 --model NAME]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

from flashmoa.frameworks import (
    CallObserver,
    CallRequest,
    CallResult,
    ChatRequest,
    EngineClient,
    ExpectedRequest,
    LinkOptions,
    LinkPlanner,
    LinkSettings,
    ObservedCall,
    Placeholders,
    Report,
    Turn,
)


@dataclass
class Speaker:
    """An agent of the framework."""

    name: str
    engine: EngineClient
    settings: dict[str, Any] = field(default_factory=dict[str, Any])

    def read(self, said: Sequence[str]) -> list[dict[str, str]]:
        """Return the agent's messages, given the earlier messages."""
        return [{"role": "user", "content": text} for text in [f"You are {self.name}.", *said]]


@dataclass
class Relay:
    """The framework: runs agents in turn. Each reads the whole conversation."""

    agents: list[Speaker]
    said: list[str] = field(default_factory=list[str])
    link: RelayLink | None = None
    is_running: bool = False

    async def run(self, task: str) -> str:
        """Return what the last agent says."""
        self.said, self.is_running = [task], True
        try:
            for agent in self.agents:
                self.said.append(await self._ask(agent))
        finally:
            self.is_running = False
        return self.said[-1]

    async def _ask(self, agent: Speaker) -> str:
        # This is the framework's client. If it is not linked, the observer has no effect.
        observer = CallObserver() if self.link is None else self.link.observe(agent)
        messages, text, usage = agent.read(self.said), "", None
        with ObservedCall([observer]) as call:
            stream_id = call.prompt_stream_id
            async with agent.engine.chat(
                messages, prompt_stream_id=stream_id, **agent.settings
            ) as deltas:
                async for delta in deltas:
                    call.add_text(delta.text)
                    text, usage = text + delta.text, delta.usage or usage
            call.finish(CallResult(text, usage, "stop", is_forwarded=True))
        return text


class RelayLink(LinkPlanner):
    """The adapter: who may call next, and what will they send?"""

    def __init__(self, relay: Relay, **options: Unpack[LinkOptions]) -> None:
        settings = LinkSettings(**options)
        self.report = Report(settings.listen())
        super().__init__(self.report, settings)
        self._relay = relay
        self._names = [agent.name for agent in relay.agents]
        relay.link = self

    def observe(self, agent: Speaker) -> CallObserver:
        """Note that an agent is about to call. Return the observer of its call."""
        return self.begin(agent.name, CallRequest(agent.engine.url, "toy"))

    @property
    def is_running(self) -> bool:
        return self._relay.is_running

    async def upcoming(self, caller: str) -> Sequence[Turn]:
        names = self._names[self._names.index(caller) :]
        steps = [frozenset([name]) for name in names]
        return [Turn(names[place], tuple(steps[:place])) for place in range(1, len(names))]

    async def expect(self, turn: Turn) -> ExpectedRequest:
        placeholders = Placeholders(turn.writers)
        agent = self._relay.agents[self._names.index(turn.agent)]
        said = [*self._relay.said, *map(placeholders.padded, turn.writers)]
        request = ChatRequest(agent.engine, {"messages": agent.read(said)})
        return ExpectedRequest(turn, [request], placeholders)


async def main() -> None:
    """Run a relay unlinked and linked, and print what the link has gained."""
    from engines import GUIDE, one_engine, one_engine_arguments

    arguments = one_engine_arguments(__doc__)
    settings = {"temperature": 0, "max_tokens": 64}
    async with (
        one_engine(arguments.engine) as url,
        EngineClient(url, model=arguments.model) as engine,
    ):
        relay = Relay([Speaker(name, engine, settings) for name in ("planner", "critic", "writer")])
        task = f"{GUIDE.read_text()[:2000]}\nPlan three days in Nepal."
        unlinked = await relay.run(task)
        link = RelayLink(relay)
        same = await relay.run(task) == unlinked
        await link.host.close()
    print(link.report)
    print("The same unlinked:", same)


if __name__ == "__main__":
    from engines import run_program

    run_program(main)
