"""Load a user's team from a file (``TeamFile``), and find the agents that call a model."""

from __future__ import annotations

import inspect
import itertools
import json
import sys
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from autogen_agentchat.agents import MessageFilterAgent, SocietyOfMindAgent, UserProxyAgent
from autogen_agentchat.teams import BaseGroupChat, GraphFlow, RoundRobinGroupChat
from autogen_core.models import ChatCompletionClient, ModelFamily, ModelInfo
from autogen_core.tools import BaseTool, Workbench

from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.errors import FlashMoAError

# Names of a team, or of the function that builds it.
_TEAM_NAMES = ("build_team", "team")
_TASK_NAMES = ("TASK", "task")
# Clients that stand for a function's parameters have this. They never send a request.
_ANY_MODEL = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=True,
    family=ModelFamily.UNKNOWN,
    structured_output=True,
    multiple_system_messages=False,
)
_numbers = itertools.count()


class PlanError(FlashMoAError):
    """Raised when a team cannot be planned; the message says what to change."""


@dataclass(frozen=True, slots=True)
class LoadedTeam:
    """A team that has not run yet, and the file's task if there is one."""

    team: BaseGroupChat
    task: str | None = None


@dataclass(frozen=True, slots=True)
class TeamFile:
    """A file with a team: a Python program, or the JSON of a team's ``dump_component``.

    Args:
        path: the file. A program is imported, so ``if __name__ == "__main__"`` guards code from
            running.
        name: the program's variable with the team, or its function that returns the team; by
            default ``build_team`` or ``team``.
    """

    path: Path
    name: str | None = None

    async def load(self) -> LoadedTeam:
        """Load the file again, and return its team.

        Each parameter without a default of a function gets a model client, which stands for an
        engine of its own.

        Raises: PlanError if the file cannot be read, fails, or has no team.
        """
        if not self.path.is_file():
            raise PlanError(f"{self.path} is not a file; give a Python file that builds a team")
        try:
            if self.path.suffix == ".json":
                return LoadedTeam(BaseGroupChat.load_component(json.loads(self.path.read_text())))
            with _import_file(self.path) as module:
                team = await self._build(module)
        except PlanError:
            raise
        # The file is the user's. Whatever it raises, even by sys.exit, is the reason.
        except (Exception, SystemExit) as error:
            # asyncio.run says this if an event loop runs already, as here.
            runs = isinstance(error, SystemExit) or "running event loop" in str(error)
            hint = '; what runs the team belongs under if __name__ == "__main__"' if runs else ""
            raise PlanError(
                f"{self.path} could not be loaded, {type(error).__name__}: {error}{hint}"
            ) from error
        tasks = [getattr(module, name, None) for name in _TASK_NAMES]
        return LoadedTeam(team, next((task for task in tasks if isinstance(task, str)), None))

    async def _build(self, module: ModuleType) -> BaseGroupChat:
        names = _TEAM_NAMES if self.name is None else (self.name,)
        found: Any = next((vars(module)[name] for name in names if name in vars(module)), None)
        if callable(found):
            found = found(**_clients_for(found))
        if inspect.isawaitable(found):
            found = await found
        if not isinstance(found, BaseGroupChat):
            expected = " or ".join(names)
            is_there = "nothing" if found is None else f"a {type(found).__name__}"
            raise PlanError(
                f"{self.path} has no AgentChat team named {expected}, nor a function of that name "
                f"that returns one (there is {is_there}); name yours with --team"
            )
        return found


@contextmanager
def _import_file(path: Path) -> Generator[ModuleType]:
    """Import a file under a fresh name. Within the context, it can import its neighbours.

    The next load imports the neighbours again, because their agents keep messages.
    """
    name = f"flashmoa_planned_{next(_numbers)}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PlanError(f"{path} is neither Python (.py) nor a dumped team (.json)")
    module = module_from_spec(spec)
    folder = path.resolve().parent
    loaded_before = set(sys.modules)
    # Like Python for a program, put the program's folder first.
    sys.path.insert(0, str(folder))
    # Annotations of dataclasses and tools are looked up in this module.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(folder))
        for other in set(sys.modules) - loaded_before:
            if _is_beside(sys.modules[other], folder):
                del sys.modules[other]


def _is_beside(module: ModuleType, folder: Path) -> bool:
    """Return whether a module is the user's own, below ``folder``.

    Packages of an environment there are not: some cannot be imported twice.
    """
    # A package without __init__.py has a path only.
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    paths = [Path(place) for place in places if place]
    return any(path.is_relative_to(folder) and "site-packages" not in path.parts for path in paths)


def _clients_for(build: Any) -> dict[str, FlashMoAChatCompletionClient]:
    return {
        name: FlashMoAChatCompletionClient(
            model=name, base_url=f"http://{name}", model_info=_ANY_MODEL
        )
        for name, parameter in inspect.signature(build).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


@dataclass(frozen=True, slots=True)
class Caller:
    """An agent that calls a model.

    Attributes:
        holders: all places that hold the client: an object, and the name of its attribute.
    """

    name: str
    client: ChatCompletionClient
    holders: tuple[tuple[Any, str], ...]

    @property
    def address(self) -> tuple[str, str]:
        """The address, or class, of its client, and its model's name."""
        config: dict[str, Any] = getattr(self.client, "_raw_config", {})
        return str(config.get("base_url") or type(self.client).__name__), str(config.get("model"))

    @property
    def max_tokens(self) -> int | None:
        """The largest number of tokens of an answer, if the client has one."""
        config: dict[str, Any] = getattr(self.client, "_raw_config", {})
        return config.get("max_tokens") or config.get("max_completion_tokens")

    def replace_client(self, client: ChatCompletionClient) -> None:
        for owner, attribute in self.holders:
            setattr(owner, attribute, client)


def find_callers(team: BaseGroupChat) -> list[Caller]:
    """Return the agents of a team, and of teams within it, that call a model.

    Raises: PlanError if there is none, two have the same name, or one holds a client in a place
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
    while isinstance(member, MessageFilterAgent):
        member = member._wrapped_agent
    return member


def _held_clients(owner: Any) -> Iterator[tuple[tuple[Any, str], ChatCompletionClient]]:
    for attribute, value in getattr(owner, "__dict__", {}).items():
        if isinstance(value, ChatCompletionClient):
            yield (owner, attribute), value


def _check_all_found(team: BaseGroupChat, callers: Sequence[Caller]) -> None:
    """Check that agents hold only the clients of ``callers``. Raises: PlanError otherwise."""
    owners = {id(owner) for caller in callers for owner, _attribute in caller.holders}
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


def limit_turns(team: BaseGroupChat, turns: int | None) -> None:
    """Make a team end after this number of turns; ``None`` leaves it as it is.

    Raises: PlanError as :func:`check_plannable`.
    """
    if turns is not None:
        team._max_turns = turns
    check_plannable(team)


def check_plannable(team: BaseGroupChat, within: str | None = None) -> None:
    """Check that a team's course does not depend on its agents' words.

    Modelled engines write words without meaning: they call no tool, name no speaker and meet no
    condition on the text.

    Args:
        within: name of the member that contains the team; ``None`` for the user's team.

    Raises: PlanError if a model chooses speakers, a person is asked, an answer must be structured,
        or the team might never end.
    """
    if not isinstance(team, RoundRobinGroupChat | GraphFlow):
        raise PlanError(
            f"a {type(team).__name__} is not planned: its speakers are chosen by what models say, "
            "and a modelled engine says nothing; give a RoundRobinGroupChat or GraphFlow with the "
            "turns that you expect"
        )
    is_acyclic = isinstance(team, GraphFlow) and not team._graph.get_has_cycles()
    if team._max_turns is None and not is_acyclic:
        name = f"team {team.name}" if within is None else f"inner team of {within}"
        remedy = "give --max-turns N" if within is None else "give it max_turns in the file"
        raise PlanError(
            f"the {name} might never end, since modelled engines do not say what a termination "
            f"condition waits for; {remedy}"
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
