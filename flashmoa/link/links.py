"""Keep a team's links to the expected requests (:class:`Links`)."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import anyio

from flashmoa._concurrency import TaskHost, setting
from flashmoa._limits import MAX_REMEMBERED
from flashmoa.engine import EngineClient
from flashmoa.engine.client import request_headers
from flashmoa.errors import EngineError, PluginMissing
from flashmoa.link import reasons
from flashmoa.link.calls import OutputLengths
from flashmoa.link.expected import ExpectedRequest, Turn
from flashmoa.link.link import Link, kind_of, report_no_link
from flashmoa.link.options import LinkSettings, Session
from flashmoa.link.prompt import NotForecastable, Prompt
from flashmoa.link.prompt_feed import report_plain_engine
from flashmoa.link.reasons import Unlinked
from flashmoa.observe import LinkDeclined, Listener

logger = logging.getLogger(__name__)

# Returns whether a turn is still expected as it was when its request was predicted.
IsCurrent = Callable[[Turn], bool]


class Team(Protocol):
    """The part of :class:`~flashmoa.link.planner.LinkPlanner` that its links use."""

    listener: Listener
    settings: LinkSettings
    host: TaskHost
    session: Session
    output_lengths: OutputLengths
    reported_declines: set[tuple[str, str]]

    def agent_of(self, name: str) -> str: ...
    def session_of(self, agent: str) -> str: ...
    def link_opened(self, link: Link) -> None: ...
    def link_extended(self, link: Link) -> None: ...


@dataclass(frozen=True, slots=True)
class _Kept:
    link: Link
    expected: ExpectedRequest


class Links:
    """A team's links, at most one for each agent, and the reasons for which agents have none.

    A failure costs only the link.

    Args:
        kv_share: see :class:`~flashmoa.link.planner.LinkPlanner`.
    """

    def __init__(self, team: Team, kv_share: float) -> None:
        self._team = team
        self._kv_share = kv_share
        self._kept: dict[str, _Kept] = {}
        self._unlinked: dict[str, Unlinked] = {}
        # Agents with a link that :meth:`end_missing` did not find.
        self._missed: set[str] = set()
        # By URL: the links to an engine are made one after the other, the likeliest first.
        self._making: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)

    def __iter__(self) -> Generator[Link]:
        yield from [kept.link for kept in self._kept.values()]

    def why(self, agent: str) -> Unlinked | None:
        """Return why an agent has no link, if one was tried; else ``None``."""
        return self._unlinked.get(agent)

    def needs(self, turn: Turn) -> bool:
        """Return whether to predict a turn's request: it has no right link, but may get one."""
        if self._unlinked.get(turn.agent) is reasons.PLAIN_ENGINE:
            return False
        kept = self._kept.get(turn.agent)
        # Unless texts are streamed, a link is over once its request is prefilled.
        if kept is None or (kept.link.is_over and self._team.settings.ahead == "text"):
            return True
        return not kept.expected.holds(kept.link.prompt, turn)

    def take(self, agent: str, url: str) -> Link | None:
        """Remove the link for a call that is about to be sent to ``url``, and return it.

        End a link that was made for a different call, and return ``None``.
        """
        kept = self._kept.pop(agent, None)
        if kept is None:
            return None
        link = kept.link
        if link.engine.url == url and kept.expected.holds(link.prompt, None):
            return link
        link.end("mispredicted")
        self._unlinked.setdefault(agent, reasons.MISPREDICTED)
        return None

    def end(self, agent: str, reason: str) -> None:
        if kept := self._kept.pop(agent, None):
            kept.link.end(reason)

    def end_missing(self, possible: set[str]) -> None:
        """End the links to agents that are missing from ``possible`` for the second time in a row.

        Once is not enough, since a manager asks several agents to speak one after the other.
        """
        missing = self._kept.keys() - possible
        for agent in missing & self._missed:
            self.end(agent, "unused")
        self._missed = missing

    def end_all(self, reason: str) -> None:
        for agent in list(self._kept):
            self.end(agent, reason)
        unlinked = self._unlinked.items()
        self._unlinked = {agent: why for agent, why in unlinked if why.until == "prediction"}

    def begin_attempt(self, agent: str) -> None:
        """Note that an agent is unlinked until its link is open: its call may come before."""
        why = self._unlinked.get(agent)
        if why is None or why.until == "call":
            self._unlinked[agent] = reasons.UNFINISHED

    def end_attempt(self, agent: str) -> None:
        """Forget the last attempt to link an agent: it succeeded, or the agent has called."""
        if (why := self._unlinked.get(agent)) is not None and why.until == "call":
            del self._unlinked[agent]

    def forget(self, agent: str) -> None:
        """Forget an agent that does not come again."""
        self._unlinked.pop(agent, None)

    async def reconcile(self, expected: Iterable[ExpectedRequest], is_current: IsCurrent) -> None:
        """Keep, extend, replace or open a link for each request. No engine delays other engines."""
        by_url: defaultdict[str, list[ExpectedRequest]] = defaultdict(list)
        for request in expected:
            by_url[request.engine.url].append(request)

        async def link_in_order(url: str, requests: Sequence[ExpectedRequest]) -> None:
            async with self._making[url]:
                for request in requests:
                    with self.declining(request.agent, request.engine):
                        await self._link(request, is_current)

        async with anyio.create_task_group() as group:
            for url, requests in by_url.items():
                group.start_soon(link_in_order, url, requests)

    async def _link(self, expected: ExpectedRequest, is_current: IsCurrent) -> None:
        turn, agent = expected.turn, expected.agent
        # An earlier plan may have made the link while this one waited for the engine.
        if not is_current(turn) or not self.needs(turn):
            return
        prompt = await expected.prompt()
        if self._unlinked.get(agent) not in (None, reasons.PLAIN_ENGINE):
            self._unlinked[agent] = reasons.UNFINISHED
        if not is_current(turn):
            return
        kept = self._kept.get(agent)
        link = kept.link if kept is not None else None
        if link is not None and link.has_expired and _is_same(link.prompt, prompt):
            # No request came in time for this prompt.
            self.end_attempt(agent)
        elif link is None or link.is_over:
            await self._open(expected, prompt, is_current)
        elif _is_same(link.prompt, prompt) or link.become(prompt):
            self._kept[agent] = _Kept(link, expected)
            self._team.link_extended(link)
        else:
            # The new prompt does not begin with the text that was sent.
            self.end(agent, "mispredicted")
            await self._open(expected, prompt, is_current)

    async def _open(self, expected: ExpectedRequest, prompt: Prompt, is_current: IsCurrent) -> None:
        turn, engine, team = expected.turn, expected.engine, self._team
        if not turn.sure and (reason := await self._why_no_room(engine, prompt)) is not None:
            self._unlinked[turn.agent] = Unlinked(reason)
            team.listener(LinkDeclined(agent=turn.agent, engine=engine.url, reason=reason))
            return
        follows = await engine.follows_calls()
        if not is_current(turn):
            return
        link = Link(
            engine,
            prompt,
            agent=turn.agent,
            on_failure=team.settings.policy(turn.agent),
            namespace=expected.namespace,
            expected_output_tokens=team.output_lengths.expect(turn.agent),
            expect=team.output_lengths.expect,
            follows=follows,
            listener=team.listener,
        )
        self._kept[turn.agent] = _Kept(link, expected)
        self.end_attempt(turn.agent)
        team.link_opened(link)
        with setting(request_headers, team.session.headers(team.session_of(turn.agent))):
            await link.start(team.host)

    async def _why_no_room(self, engine: EngineClient, prompt: Prompt) -> str | None:
        """Return why there can be no link to an uncertain request; ``None`` if there can be one.

        Links to uncertain requests get a share of each engine's KV pool.

        Raises: EngineError if the engine does not report the size of its KV pool.
        """
        try:
            pool_tokens = await engine.kv_pool_tokens()
        except PluginMissing:
            return reasons.NO_PLUGIN_FOR_LIKELY
        others = [kept.link for kept in self._kept.values() if not kept.expected.turn.sure]
        there = [link for link in others if link.engine.url == engine.url and not link.is_over]
        characters = sum(len(each.stable()) for each in [prompt, *(link.prompt for link in there)])
        # A token is taken for 3 characters, fewer than in most texts.
        return None if characters <= 3 * self._kv_share * pool_tokens else reasons.NO_SHARE

    @contextmanager
    def declining(self, agent: str, engine: EngineClient | None) -> Generator[None]:
        """Leave an agent unlinked this time if an exception is raised inside."""
        try:
            yield
        except PluginMissing as problem:
            self._unlinked[agent] = reasons.PLAIN_ENGINE
            if engine is not None:
                report_plain_engine(engine, problem)
        except EngineError as error:
            self._unlinked[agent] = Unlinked(f"{error}")
            url = "" if engine is None else engine.url
            report_no_link(agent, url, error, self._team.listener)
        except Exception as error:
            self.decline(agent, error)

    def decline(self, agent: str, problem: Exception) -> None:
        """Leave an agent unlinked this time, and report why; each kind of reason is reported once.

        Args:
            problem: the exception of the prediction of its next prompt. Unless that is a
                NotForecastable, the agent's own code failed, in its tools or its context.
        """
        reason, kind = str(problem), kind_of(problem.__cause__ or problem)
        if not isinstance(problem, NotForecastable):
            reason = f"predicting its next prompt failed: {problem!r}"
        elif problem.__cause__ is None:
            kind = reason  # A sentence of FlashMoA.
        self._unlinked[agent] = Unlinked(reason, "prediction")
        self.end(agent, "unused")
        reported, name = self._team.reported_declines, self._team.agent_of(agent)
        if (name, kind) in reported:
            return
        if len(reported) >= MAX_REMEMBERED:
            reported.clear()
        reported.add((name, kind))
        logger.warning("%s runs unlinked: %s", agent, reason)
        self._team.listener(LinkDeclined(agent=agent, engine="", reason=reason))


def _is_same(prompt: Prompt, other: Prompt) -> bool:
    return prompt.is_complete and other.is_complete and prompt.stable() == other.stable()
