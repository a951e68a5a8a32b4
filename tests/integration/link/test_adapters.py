"""Test each adapter on real engines: linked equals unlinked, and nothing is left behind.

The adapter for Google ADK is tested in an environment of its own; see tests/frameworks.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import CancellationToken

from examples.own_framework import Relay, RelayLink, Speaker
from flashmoa import agent_framework, autogen
from flashmoa.agent_framework import FlashMoAChatClient
from flashmoa.engine import EngineClient
from flashmoa.frameworks import CallObserver, ExpectedRequest, Turn, conformance
from flashmoa.frameworks.conformance import check_adapter
from flashmoa.observe import CallFinished, LinkOpened, Listener
from tests.integration.frameworks.agent_framework import workflows
from tests.integration.frameworks.autogen.runs import Client
from tests.integration.frameworks.autogen.teams import agent
from tests.integration.support import wait_until_idle

Engines = tuple[EngineClient, EngineClient]
NAMES = ("planner", "local", "summary")


async def run_autogen(
    engines: Engines, guide: str, stream: bool, listener: Listener | None
) -> list[str]:
    settings = {"temperature": 0, "max_tokens": 40, "extra_body": {"ignore_eos": True}}
    clients = [Client(model="tiny", base_url=each.url, **settings) for each in engines]
    more = {"system_message": guide[:2000], "model_client_stream": stream}
    members = [agent(clients[name == "summary"], name, **more) for name in NAMES]
    team, token = RoundRobinGroupChat(members, max_turns=3), CancellationToken()
    if listener is not None:
        autogen.link(team, listener=listener)
    try:
        result = await team.run(task="Go.", cancellation_token=token)
        return [message.to_text() for message in result.messages[1:]]
    finally:
        token.cancel()  # AutoGen's agents do not notice that their team's task is cancelled.
        for client in clients:
            await client.close()


async def run_agent_framework(
    engines: Engines, guide: str, stream: bool, listener: Listener | None
) -> list[str]:
    async with (
        FlashMoAChatClient("tiny", base_url=engines[0].url) as first,
        FlashMoAChatClient("tiny", base_url=f"{engines[1].url}/v1") as second,
    ):
        workflow = workflows.chain((first, second), guide)
        if listener is not None:
            agent_framework.link(workflow, listener=listener)
        return await workflows.run(workflow, stream)


async def run_own_framework(
    engines: Engines,
    guide: str,
    stream: bool,
    listener: Listener | None,
    adapter: Callable[..., RelayLink] = RelayLink,
) -> list[str]:
    """Run a relay, and close its link, unless the adapter is ``Endless``: its runs do not end."""
    settings = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    relay = Relay([Speaker(name, engines[name == "summary"], settings) for name in NAMES])
    link = None if listener is None else adapter(relay, listener=listener)
    try:
        await relay.run(guide[:2000])
        return relay.said[1:]
    finally:
        if link is not None and not isinstance(link, Endless):
            await link.host.close()


Run = Callable[[Engines, str, bool, Listener | None], Awaitable[Sequence[str]]]


@pytest.mark.parametrize(
    ("run", "stream"),
    [
        (run_autogen, False),
        (run_autogen, True),
        (run_agent_framework, False),
        (run_agent_framework, True),
        (run_own_framework, True),
    ],
)
async def test_an_adapter_links_a_chain_and_leaves_nothing(
    client: EngineClient, downstream_client: EngineClient, guide: str, run: Run, stream: bool
) -> None:
    engines = client, downstream_client
    team = partial(run, engines, guide, stream)
    events = await check_adapter(team, engines, linkable=2)
    finished = [event.agent for event in events if isinstance(event, CallFinished)]
    assert finished == list(NAMES)
    for place, event in enumerate(events):
        if isinstance(event, LinkOpened):
            # On a busy machine a link may be late: it waits for agents that have not finished.
            before = NAMES[: NAMES.index(event.agent)]
            done = {each.agent for each in events[:place] if isinstance(each, CallFinished)}
            assert event.upstream and event.upstream == before[-len(event.upstream) :]
            assert {*before} - done <= {*event.upstream}


class Silent(RelayLink):
    async def upcoming(self, caller: str) -> Sequence[Turn]:
        return []


class Wrong(RelayLink):
    async def expect(self, turn: Turn) -> ExpectedRequest:
        return await super().expect(replace(turn, after=()))


class Endless(RelayLink):
    is_running = True  # type: ignore[assignment]

    async def upcoming(self, caller: str) -> Sequence[Turn]:
        return [*await super().upcoming(caller), Turn(NAMES[0])]


class Deaf(RelayLink):
    def observe(self, agent: Speaker) -> CallObserver:
        call = super().observe(agent)
        call.on_finish = lambda result: None  # type: ignore[method-assign]
        return call


@pytest.mark.parametrize(
    ("adapter", "finds"),
    [
        (Silent, "only 0 of 2 calls were forecast"),
        (Wrong, "forecasts were wrong"),
        (Endless, "still hold KV"),
        (Deaf, "a call's end was not reported"),
    ],
)
async def test_a_broken_adapter_is_refused(
    client: EngineClient,
    downstream_client: EngineClient,
    guide: str,
    monkeypatch: pytest.MonkeyPatch,
    adapter: type[RelayLink],
    finds: str,
) -> None:
    monkeypatch.setattr(conformance, "_RELEASE_SECONDS", 2.0)
    engines = client, downstream_client
    made: list[RelayLink] = []

    def make(relay: Relay, listener: Listener) -> RelayLink:
        made.append(adapter(relay, listener=listener))
        return made[-1]

    team = partial(run_own_framework, engines, guide, True, adapter=make)
    with pytest.raises(AssertionError, match=finds):
        await check_adapter(team, engines, linkable=2)
    for link in made:
        await link.host.close()
    for engine in engines:
        await wait_until_idle(engine)


async def test_an_adapter_that_changes_answers_is_refused(client: EngineClient) -> None:
    async def run(listener: Listener | None) -> list[str]:
        return ["linked" if listener else "unlinked"]

    with pytest.raises(AssertionError, match="has changed the answers"):
        await check_adapter(run, [client], linkable=0)
