"""Find who calls a model in a team (``find_callers``), and refuse teams that cannot be planned."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

from autogen_agentchat.agents import MessageFilterAgent, SocietyOfMindAgent, UserProxyAgent
from autogen_agentchat.base import (
    AndTerminationCondition,
    OrTerminationCondition,
    TerminationCondition,
)
from autogen_agentchat.conditions import MaxMessageTermination, TokenUsageTermination
from autogen_agentchat.teams import BaseGroupChat, GraphFlow, RoundRobinGroupChat
from autogen_core.models import ChatCompletionClient
from autogen_core.tools import BaseTool, Workbench

from flashmoa.plan.errors import PlanError
from flashmoa.plan.placement import Address


@dataclass(frozen=True, slots=True)
class Holder:
    """An object with a model client, in its attribute ``attribute``."""

    owner: Any
    attribute: str


@dataclass(frozen=True, slots=True)
class Caller:
    """An agent that calls a model, and all places where it holds the client."""

    name: str
    client: ChatCompletionClient
    holders: tuple[Holder, ...]

    @property
    def address(self) -> Address:
        """What its client is configured for."""
        config: dict[str, Any] = getattr(self.client, "_raw_config", {})
        return str(config.get("base_url") or type(self.client).__name__), str(config.get("model"))

    @property
    def max_tokens(self) -> int | None:
        """How many tokens it may write, if its client says so."""
        config: dict[str, Any] = getattr(self.client, "_raw_config", {})
        return config.get("max_tokens") or config.get("max_completion_tokens")

    def replace_client(self, client: ChatCompletionClient) -> None:
        """Let the agent call another client."""
        for holder in self.holders:
            setattr(holder.owner, holder.attribute, client)


def find_callers(team: BaseGroupChat) -> list[Caller]:
    """Return the agents of a team, and of teams within it, that call a model.

    Raises: PlanError if none does, two of them have one name, or one holds a client in a place
        where it cannot be replaced.
    """
    callers = list(_callers_of(team))
    names = [caller.name for caller in callers]
    if not callers:
        raise PlanError("no agent of this team has a model client; there is nothing to plan")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise PlanError(f"two agents are named {twice!r}; give them different names")
    _check_all_found(team, callers)
    return callers


def _callers_of(member: Any) -> Iterator[Caller]:
    if isinstance(member, BaseGroupChat):
        for participant in member._participants:
            yield from _callers_of(participant)
        return
    agent = _unwrap(member)
    if isinstance(agent, SocietyOfMindAgent):
        yield from _callers_of(agent._team)
    found = [*_held_clients(agent), *_held_clients(getattr(agent, "_model_context", None))]
    if found:
        holders = tuple(place for place, _ in found)
        yield Caller(member.name, found[0][1], holders)


def _unwrap(member: Any) -> Any:
    """Return the agent within a ``MessageFilterAgent``; any other one itself."""
    while isinstance(member, MessageFilterAgent):
        member = member._wrapped_agent
    return member


def _held_clients(owner: Any) -> Iterator[tuple[Holder, ChatCompletionClient]]:
    for attribute, value in getattr(owner, "__dict__", {}).items():
        if isinstance(value, ChatCompletionClient):
            yield Holder(owner, attribute), value


def _check_all_found(team: BaseGroupChat, callers: Sequence[Caller]) -> None:
    """Check that agents hold no clients but those of ``callers``. Raises: PlanError if one does."""
    owners = {id(holder.owner) for caller in callers for holder in caller.holders}
    for member in team._participants:
        seen: set[int] = set()
        waiting: list[Any] = [member]
        while waiting:
            owner = waiting.pop()
            # Modelled engines call no tools.
            if id(owner) in seen or isinstance(owner, BaseTool | Workbench | type | ModuleType):
                continue
            seen.add(id(owner))
            held = _contents(owner)
            clients = [value for value in held if isinstance(value, ChatCompletionClient)]
            if clients and id(owner) not in owners:
                raise PlanError(
                    f"{member.name} holds a {type(clients[0]).__name__} in a {type(owner).__name__}"
                    ", where the plan cannot replace it; give the client to the agent itself, or "
                    "put the agent that has it into the team"
                )
            waiting += [value for value in held if not isinstance(value, ChatCompletionClient)]


def _contents(owner: Any) -> list[Any]:
    """Return the items of a collection, or the attributes of another object."""
    if isinstance(owner, dict):
        return list(cast("dict[Any, Any]", owner).values())
    if isinstance(owner, list | tuple | set | frozenset):
        return list(cast("Collection[Any]", owner))
    return list(getattr(owner, "__dict__", {}).values())


def check_plannable(team: BaseGroupChat, within: str | None = None) -> None:
    """Check that a team's course does not depend on what its agents say.

    Modelled engines write words that mean nothing: no tool is called, no speaker is named, and no
    condition on the text is met.

    Args:
        within: the name of the member that the team is within; ``None`` for the user's team.

    Raises: PlanError if someone is chosen by a model, a person is asked, an answer has to be
        structured, or the team might never end.
    """
    if not isinstance(team, RoundRobinGroupChat | GraphFlow):
        raise PlanError(
            f"a {type(team).__name__} is not planned: its speakers are chosen by what models say, "
            "and a modelled engine says nothing; give a RoundRobinGroupChat or GraphFlow with the "
            "turns that you expect"
        )
    if not _ends(team):
        name = f"team {team.name}" if within is None else f"inner team of {within}"
        remedy = "give --max-turns N" if within is None else "give it max_turns in the file"
        raise PlanError(
            f"the {name} might never end, since no agent says what its termination condition waits "
            f"for; {remedy}"
        )
    for member in team._participants:
        agent = _unwrap(member)
        if isinstance(agent, UserProxyAgent):
            raise PlanError(f"{agent.name} asks a person; leave it out of the team to plan")
        if getattr(agent, "_output_content_type", None) is not None:
            raise PlanError(
                f"{agent.name} answers with structured output, which a modelled engine does not "
                "write; leave out output_content_type"
            )
        inner = agent._team if isinstance(agent, SocietyOfMindAgent) else agent
        if isinstance(inner, BaseGroupChat):
            check_plannable(inner, agent.name)


def _ends(team: BaseGroupChat) -> bool:
    """Return whether a team ends whatever is said in it."""
    if team._max_turns is not None or _is_met(team._termination_condition):
        return True
    return isinstance(team, GraphFlow) and not team._graph.get_has_cycles()


def _is_met(condition: TerminationCondition | None) -> bool:
    """Return whether a condition is met after enough messages, whatever they say."""
    if isinstance(condition, AndTerminationCondition):
        return all(map(_is_met, condition._conditions))
    if isinstance(condition, OrTerminationCondition):
        return any(map(_is_met, condition._conditions))
    return isinstance(condition, MaxMessageTermination | TokenUsageTermination)
