"""Linking a team: who speaks next, and the links to everyone who will."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_agentchat.teams._group_chat._chat_agent_container import ChatAgentContainer
from autogen_agentchat.teams._group_chat._round_robin_group_chat import RoundRobinGroupChatManager
from autogen_core import AgentId
from autogen_core.models import CreateResult

from flashmoa.autogen._client import FlashMoAChatCompletionClient
from flashmoa.autogen._forecast import NotForecastable, client_of, forecast
from flashmoa.autogen._tasks import TaskHost
from flashmoa.engine import EngineError, PluginMissing, PromptUsage
from flashmoa.links import FailurePolicy, Link, report_plain_engine
from flashmoa.observe import (
    CallFailed,
    CallFinished,
    CallStarted,
    FirstToken,
    Listener,
    contained,
    ignore,
)

logger = logging.getLogger(__name__)

# What is sent ahead of a call: nothing, what is known when the team starts, or also the text
# of its upstream agents as they write it.
Ahead = Literal["nothing", "known", "text"]


def link(
    team: RoundRobinGroupChat,
    *,
    stream: bool = True,
    on_failure: FailurePolicy = "abort",
    listener: Listener = ignore,
) -> TeamLink:
    """Link a team's agents: each one's tokens stream into the prompts of those after it.

    One call after building the team is all; runs, prompts and answers stay the same. What is
    known of every later prompt (system prompt, tools, task) is prefilled as soon as the team
    starts.

    Args:
        team: its agents' model clients must be ``FlashMoAChatCompletionClient``; agents with
            other clients, and agents that are not stock ``AssistantAgent``s, run unlinked.
        stream: ``False`` prefills only what is known beforehand, and streams no tokens.
        on_failure: what becomes of a link whose upstream agent fails, see :class:`Link`.
        listener: is told everything that happens.

    Raises:
        TypeError: not a team that can be linked.
        ValueError: no agent of the team uses a FlashMoA client.
    """
    clients = _clients(team)
    ahead: Ahead = "text" if stream else "known"
    return TeamLink(team, clients, ahead=ahead, on_failure=on_failure, listener=listener)


def watch(team: RoundRobinGroupChat, listener: Listener) -> TeamLink:
    """Tell ``listener`` about a team's calls and link nothing; to compare with.

    Raises: as :func:`link`.
    """
    return TeamLink(team, _clients(team), ahead="nothing", listener=listener)


def _clients(team: object) -> set[FlashMoAChatCompletionClient]:
    if not isinstance(team, RoundRobinGroupChat):
        raise TypeError(f"only a RoundRobinGroupChat can be linked, not {type(team).__name__}")
    clients = {c for agent in team._participants if (c := client_of(agent)) is not None}
    if not clients:
        raise ValueError(
            "no agent of this team uses FlashMoAChatCompletionClient; there is nothing to link"
        )
    return clients


class TeamLink:
    """The links of one team; made by :func:`link`, closed with its clients or by itself."""

    def __init__(
        self,
        team: RoundRobinGroupChat,
        clients: set[FlashMoAChatCompletionClient],
        *,
        ahead: Ahead,
        on_failure: FailurePolicy = "abort",
        listener: Listener = ignore,
    ) -> None:
        self._team = team
        self._clients = clients
        self._ahead: Ahead = ahead
        self._on_failure: FailurePolicy = on_failure
        self._listener = contained(listener)
        self._links: dict[str, Link] = {}
        self._unlinkable: set[str] = set()
        self._host = TaskHost()
        self._current: _Call | None = None
        self._turn = 0
        for client in clients:
            client.add_watcher(self)

    async def close(self) -> None:
        """End every link and wait until their engines have the KV back; the team runs on."""
        for client in self._clients:
            client.remove_watcher(self)
        for running in self._links.values():
            running.end("closed")
        self._links.clear()
        await self._host.close()

    def begin(self, agent_type: str, agent_key: str, engine_url: str) -> _Call | None:
        """A client is about to send a request for one of this team's agents."""
        suffix = f"_{self._team._team_id}"
        if agent_key != self._team._team_id or not agent_type.endswith(suffix):
            return None
        name = agent_type.removesuffix(suffix)
        own = self._links.pop(name, None)
        call = self._current = _Call(self, name, engine_url, own)
        # In the background: nothing the user waits for waits for a link.
        if self._ahead != "nothing":
            self._host.start(lambda: self._look_ahead(call))
        return call

    async def _look_ahead(self, call: _Call) -> None:
        """Open a link to everyone who will speak after this call and has none yet."""
        try:
            manager = await self._manager()
            upcoming = _upcoming(manager, call.agent)
        except NotForecastable as reason:
            self._unlinkable_once(call.agent, str(reason))
            return
        for position, name in enumerate(upcoming):
            writers = [call.agent, *upcoming[:position]]
            self._drop_stale(name, writers)
            if name not in self._links and name not in self._unlinkable:
                await self._open(name, writers, call)

    def _drop_stale(self, name: str, writers: list[str]) -> None:
        """A link that waits for somebody who has spoken already was predicted wrong."""
        known = self._links.get(name)
        if known is None or self._ahead != "text":
            return
        waiting = {slot.name for slot in known.prompt.slots if slot.is_open}
        if known.is_over or waiting - set(writers):
            known.end("mispredicted")
            del self._links[name]

    async def _open(self, name: str, writers: list[str], call: _Call) -> None:
        container = await self._container(name)
        agent = container._agent
        client = client_of(agent)
        if call is not self._current or any(
            m.source == call.agent for m in container._message_buffer[-1:]
        ):
            return  # The call is over; the next one looks ahead with its text known.
        try:
            prompt = await forecast(agent, container._message_buffer, writers)
        except NotForecastable as reason:
            self._unlinkable_once(name, str(reason))
            return
        except PluginMissing as problem:
            self._unlinkable.add(name)
            assert client is not None
            report_plain_engine(client.engine.url, problem)
            return
        except EngineError as error:
            logger.warning("No link to %s this time: %s", name, error)
            return
        except Exception as error:
            # The agent's own code: its tools, its context. It must not cost the others theirs.
            self._unlinkable_once(name, f"its next prompt could not be told: {error!r}")
            return
        assert client is not None
        opened = Link(
            client.engine,
            prompt,
            agent=name,
            on_failure=self._on_failure,
            listener=self._listener,
        )
        if call is not self._current:
            return
        call.replay(opened)
        self._links[name] = opened
        self._host.start(opened.run)

    def _unlinkable_once(self, name: str, reason: str) -> None:
        if name not in self._unlinkable:
            self._unlinkable.add(name)
            logger.warning("%s runs unlinked: %s", name, reason)

    async def _manager(self) -> RoundRobinGroupChatManager:
        manager = await self._instance(self._team._group_chat_manager_topic_type)
        if not isinstance(manager, RoundRobinGroupChatManager):
            raise NotForecastable("the team's manager is not the stock one")
        if manager._current_turn < self._turn:  # A new run; the last one may have left links.
            for old in self._links.values():
                old.end("unused")
            self._links.clear()
        self._turn = manager._current_turn
        return manager

    async def _container(self, name: str) -> ChatAgentContainer:
        instance = await self._instance(f"{name}_{self._team._team_id}")
        if not isinstance(instance, ChatAgentContainer):
            raise NotForecastable(f"{name} is not held by the stock container")
        return instance

    async def _instance(self, agent_type: str) -> Any:
        agent_id = AgentId(agent_type, self._team._team_id)
        return await self._team._runtime.try_get_underlying_agent_instance(agent_id)  # type: ignore[attr-defined]


def _upcoming(manager: RoundRobinGroupChatManager, speaker: str) -> list[str]:
    """Who speaks after ``speaker``, in order and once each, until it speaks again.

    Its own next prompt is known only when it has finished: its text becomes an assistant
    message there.
    """
    names = list(manager._participant_names)
    position = names.index(speaker)
    order = names[position + 1 :] + names[:position]
    if manager._max_turns is not None:
        # The turn being taken is counted when it ends.
        order = order[: max(0, manager._max_turns - manager._current_turn - 1)]
    return order


class _Call:
    """One call of an agent of a linked team (a ``CallObserver``)."""

    def __init__(self, team: TeamLink, agent: str, engine: str, own: Link | None) -> None:
        self.agent = agent
        self.prompt_stream_id = own.take_over() if own is not None else None
        self._own = own
        self._streams = team._ahead == "text"
        self._team = team
        self._engine = engine
        self._text: list[str] = []
        self._complete = False
        self._listener = team._listener
        self._listener(CallStarted(agent=agent, engine=engine, stream_id=self.prompt_stream_id))

    def replay(self, opened: Link) -> None:
        """Give a link that was opened after the first tokens what it missed."""
        if self._streams and self._text:
            opened.feed(self.agent, "".join(self._text))
        if self._streams and self._complete:
            opened.close_slot(self.agent)

    def on_text(self, text: str) -> None:
        if not self._text:
            self._listener(FirstToken(agent=self.agent, engine=self._engine))
        self._text.append(text)
        if self._streams:
            self._each(lambda link: link.feed(self.agent, text))

    def on_finish(self, result: CreateResult, usage: PromptUsage | None, raw: bool) -> None:
        text = result.content if isinstance(result.content, str) else None
        self._listener(
            CallFinished(agent=self.agent, engine=self._engine, text=text or "", usage=usage)
        )
        if not self._streams:
            return
        streamed = "".join(self._text)
        if raw and text is not None and text.startswith(streamed):
            self._text, self._complete = [text], True
            self._each(lambda link: link.feed(self.agent, text[len(streamed) :]))
            self._each(lambda link: link.close_slot(self.agent))
        elif streamed:
            # A tool call, or text that is rewritten: what flows on is something else.
            self._over()
            self._each(self._give_up)

    def on_failure(self, error: BaseException) -> None:
        self._listener(CallFailed(agent=self.agent, engine=self._engine, error=repr(error)))
        self._over()
        self._each(lambda link: link.fail_slot(self.agent))
        if self._own is not None:
            # The request may not have reached the engine, which then still keeps its stream.
            self._team._host.start(self._own.delete_stream)

    def _over(self) -> None:
        """No link is to be opened on this call's text any more."""
        if self._team._current is self:
            self._team._current = None

    def _give_up(self, running: Link) -> None:
        if running.waits_for(self.agent):
            running.end("abort")

    def _each(self, act: Callable[[Link], object]) -> None:
        for running in list(self._team._links.values()):
            act(running)
