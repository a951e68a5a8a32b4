"""Load a user's team from a file (``TeamFile``), again for each run."""

from __future__ import annotations

import inspect
import itertools
import json
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from autogen_agentchat.teams import BaseGroupChat
from autogen_core.models import ModelFamily, ModelInfo

from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.plan.errors import PlanError

# Names that a team, or the function that builds it, is looked for under.
_TEAM_NAMES = ("build_team", "team")
_TASK_NAMES = ("TASK", "task")
# Of clients that stand for the parameters of a function; no request is ever sent by them.
_ANY_MODEL = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=True,
    family=ModelFamily.UNKNOWN,
    structured_output=True,
    multiple_system_messages=False,
)
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class LoadedTeam:
    """Holds a team that has not run yet, and its task if the file has one."""

    team: BaseGroupChat
    task: str | None = None


@dataclass(frozen=True, slots=True)
class TeamFile:
    """A file with a team: a Python program, or the JSON of a team's ``dump_component``.

    Args:
        path: the file. A program is imported, so what its ``__name__ == "__main__"`` guards does
            not run.
        name: the program's variable with the team, or its function that returns one; by default
            ``build_team`` or ``team``.
    """

    path: Path
    name: str | None = None

    async def load(self) -> LoadedTeam:
        """Load the file again, and return its team.

        A function is called with a model client for each of its parameters that has no default;
        each stands for an engine of its own.

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
        # The file is the user's: whatever it raises, even by sys.exit, is the reason.
        except (Exception, SystemExit) as error:
            # asyncio.run says this where an event loop runs already, as here.
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
            positional, by_name = _clients_for(found)
            found = found(*positional, **by_name)
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
    """Import a file under a name of its own; its neighbours can be imported while that is held.

    The next load imports the neighbours again, since agents that they define keep what they heard.
    """
    name = f"flashmoa_planned_{next(_numbers)}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PlanError(f"{path} is neither Python (.py) nor a dumped team (.json)")
    module = module_from_spec(spec)
    folder = path.resolve().parent
    loaded_before = set(sys.modules)
    # Python puts a program's folder first, too.
    sys.path.insert(0, str(folder))
    # Annotations of dataclasses and tools are looked up in their module.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(folder))
        for other in set(sys.modules) - loaded_before:
            if _is_neighbour(sys.modules[other], folder):
                del sys.modules[other]


def _is_neighbour(module: ModuleType, folder: Path) -> bool:
    """Return whether a module was found in ``folder`` itself.

    One of an environment below the folder was not: some packages cannot be imported twice.
    """
    spec = getattr(module, "__spec__", None)
    if not isinstance(spec, ModuleSpec):
        return False
    top = folder / spec.name.partition(".")[0]
    # A package without __init__.py has folders only.
    places = [spec.origin or "", *(spec.submodule_search_locations or ())]
    return any(place == f"{top}.py" or Path(place).is_relative_to(top) for place in places)


def _clients_for(
    build: Callable[..., Any],
) -> tuple[
    list[FlashMoAChatCompletionClient],
    dict[str, FlashMoAChatCompletionClient],
]:
    """Make a client for each parameter of a function that has no default.

    Return those that are given in order, and those that are given by name.
    """
    positional: list[FlashMoAChatCompletionClient] = []
    by_name: dict[str, FlashMoAChatCompletionClient] = {}
    for parameter in inspect.signature(build).parameters.values():
        takes_many = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if takes_many or parameter.default is not parameter.empty:
            continue
        client = FlashMoAChatCompletionClient(
            model=parameter.name, base_url=f"http://{parameter.name}", model_info=_ANY_MODEL
        )
        if parameter.kind is parameter.KEYWORD_ONLY:
            by_name[parameter.name] = client
        else:
            positional.append(client)
    return positional, by_name
