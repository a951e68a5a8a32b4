"""Clients of agents with tools, and a watch on the links to what they ask next."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import anyio
from autogen_agentchat.base import TaskResult
from autogen_agentchat.teams import BaseGroupChat
from autogen_core.models import CreateResult

from flashmoa.autogen import FlashMoAChatCompletionClient, link
from flashmoa.autogen import watch as report_calls
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import Event, LinkClosed, LinkOpened
from tests.integration.autogen.exactness import CallOutcome, finished_calls
from tests.integration.support import LAG, wait_until_idle

Client = FlashMoAChatCompletionClient


class RequiringClient(Client):
    """Lets the engine's grammar force a call of a tool where there are tools."""

    async def create(self, messages: Any, *, tools: Any = (), **more: Any) -> CreateResult:  # type: ignore[override]
        if tools:
            more["tool_choice"] = "required"
            more["extra_create_args"] = {"parallel_tool_calls": False}
        return await super().create(messages, tools=tools, **more)


def make(engine: LocalEngine, kind: type[Client] = Client, **more: Any) -> Client:
    settings = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}, **more}
    return kind(model="tiny", base_url=engine.url, **settings)


class Watch:
    """Lets the tools of a linked team wait for what becomes of its links.

    In an unlinked team, nothing is waited for.
    """

    def __init__(self, client: Client, *, is_linked: bool) -> None:
        self.events: list[Event] = []
        # The events of the same team, unlinked.
        self.unlinked: list[Event] = []
        self.client = client
        self.is_linked = is_linked

    @property
    def own_links(self) -> list[LinkOpened]:
        """The links to what agents ask after their tools."""
        opened = [event for event in self.events if isinstance(event, LinkOpened)]
        return [event for event in opened if event.upstream and event.upstream[0].endswith(")")]

    def reasons(self, links: list[LinkOpened]) -> list[str]:
        """Return why these links were closed."""
        ids = [opened.stream_id for opened in links]
        closed = [event for event in self.events if isinstance(event, LinkClosed)]
        return [event.reason for event in closed if event.stream_id in ids]

    async def until(self, is_so: Callable[[], bool]) -> None:
        with anyio.fail_after(20):
            while self.is_linked and not is_so():  # noqa: ASYNC110
                await anyio.sleep(0.002)

    async def prefilled(self, tokens: int = 0, links: int = 1) -> int:
        """Wait until the latest link to an own request has KV for nearly all that is certain.

        Args:
            tokens: at least how many tokens are certain.
            links: which one it is.

        Return the number of tokens that are certain.
        """
        await self.until(lambda: len(self.own_links) >= links)
        with anyio.fail_after(20):
            while self.is_linked:
                state = await self.client.engine.stream_state(self.own_links[-1].stream_id)
                if tokens <= state.received_tokens <= state.prefilled_tokens + LAG:
                    return state.received_tokens
                await anyio.sleep(0.002)
        return 0


def messages_of(result: TaskResult) -> list[tuple[str, str]]:
    """Return the messages without the ids of calls, which engines choose at random."""
    texts = [(message.source, message.to_text()) for message in result.messages]
    return [(source, re.sub("call_[0-9a-f]+", "", text)) for source, text in texts]


async def run_both_ways(
    client: Client, build: Callable[[Watch], BaseGroupChat]
) -> tuple[list[CallOutcome], Watch]:
    """Run a team linked and unlinked; its messages must be the same.

    Return the linked team's calls, and its watch.
    """
    watch = Watch(client, is_linked=True)
    await client.engine.flush_cache()
    team = build(watch)
    linked = link(team, listener=watch.events.append)
    messages = messages_of(await team.run(task="Go."))
    await linked.close()
    await wait_until_idle(client.engine)
    await client.engine.flush_cache()
    plain = build(Watch(client, is_linked=False))
    report_calls(plain, watch.unlinked.append)
    assert messages_of(await plain.run(task="Go.")) == messages
    return finished_calls(watch.events), watch
