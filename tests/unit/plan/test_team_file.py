"""Test that users' teams are loaded, and refused if their answers decide their course."""

import json
import sys
from pathlib import Path

import pytest
from flashmoa_bench.plan.runs import modelled_client
from flashmoa_bench.plan.team import (
    LoadedTeam,
    PlanError,
    TeamFile,
    check_plannable,
    find_callers,
    limit_turns,
)

from flashmoa.autogen import FlashMoAChatCompletionClient, link
from tests.conftest import ROOT
from tests.unit.plan import teams


async def load(
    folder: Path, text: str, name: str | None = None, file: str = "mine.py"
) -> LoadedTeam:
    (folder / file).write_text(text)
    return await TeamFile(folder / file, name).load()


async def test_a_team_is_loaded_anew_each_time(tmp_path: Path) -> None:
    loaded = await load(tmp_path, teams.ENDING)
    assert loaded.task == "Write about Bergen."
    writer, critic = find_callers(loaded.team)
    assert (writer.name, writer.address[1], writer.max_tokens) == ("writer", "gpt-4o", None)
    assert (critic.name, critic.address[1], critic.max_tokens) == ("critic", "gpt-4o-mini", 40)
    again = await load(tmp_path, teams.ENDING)
    assert again.team is not loaded.team
    assert find_callers(again.team)[0].client is not writer.client


@pytest.mark.parametrize("agents", ["agents.py", "agents/__init__.py", "agents/all.py"])
async def test_modules_beside_the_file_are_loaded_anew(tmp_path: Path, agents: str) -> None:
    beside = tmp_path / agents
    beside.parent.mkdir(exist_ok=True)
    beside.write_text(teams.TEAM)
    module = "agents.all as agents" if agents == "agents/all.py" else "agents"
    team = "agents.RoundRobinGroupChat([agents.writer, agents.critic], max_turns=2)"
    first, second = [await load(tmp_path, f"import {module}\nteam = {team}\n") for _ in range(2)]
    assert first.team._participants[0] is not second.team._participants[0]


async def test_installed_packages_are_imported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / ".venv" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "installed_once.py").touch()
    monkeypatch.syspath_prepend(str(packages))
    await load(tmp_path, f"import installed_once\n{teams.ENDING}")
    assert sys.modules.pop("installed_once")


@pytest.mark.parametrize(
    ("example", "names"),
    [("chain", ["first", "second"] * 2), ("mapreduce", ["small"] * 3 + ["large"])],
)
async def test_an_example_is_planned_as_it_is(example: str, names: list[str]) -> None:
    loaded = await TeamFile(ROOT / "examples" / f"{example}.py").load()
    check_plannable(loaded.team)
    callers = find_callers(loaded.team)
    assert [caller.address for caller in callers] == [(f"http://{n}/v1", n) for n in names]
    assert loaded.task


async def test_a_function_may_be_async_and_renamed(tmp_path: Path) -> None:
    text = f"{teams.TEAM}\nasync def make(first, rounds=1, *, second, **_):\n"
    text += "    agents = [AssistantAgent('one', first), AssistantAgent('two', second)]\n"
    text += "    return RoundRobinGroupChat(agents, max_turns=rounds)\n"
    one, two = find_callers((await load(tmp_path, text, "make")).team)
    assert one.address == ("http://first/v1", "first")
    assert two.address == ("http://second/v1", "second")


async def test_a_dumped_team_is_loaded(tmp_path: Path) -> None:
    dumped = (await load(tmp_path, teams.ENDING)).team.dump_component().model_dump(mode="json")
    loaded = await load(tmp_path, json.dumps(dumped), file="team.json")
    assert [caller.name for caller in find_callers(loaded.team)] == ["writer", "critic"]


ASYNCIO = """
import asyncio
async def main(): ...
run = main()
try:
    asyncio.run(run)
finally:
    run.close()
"""
ENDLESS_WITHIN = teams.NESTED.replace("max_turns=2", "termination_condition=approved")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1", "has no AgentChat team named build_team or team"),
        ("1 / 0", "ZeroDivisionError: division by zero$"),
        ("raise SystemExit(3)", "SystemExit: 3; what runs the team belongs under"),
        (ASYNCIO, "running event loop; what runs the team belongs under"),
        ("team = 3", "there is a int"),
        (teams.ENDLESS, "might never end.*--max-turns N"),
        (ENDLESS_WITHIN, "inner team of society might never end.*give it max_turns in the file"),
        (teams.SELECTED, "speakers are chosen by what models say"),
        (teams.STRUCTURED, "typed answers with structured output"),
    ],
)
async def test_an_unplannable_file_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        check_plannable((await load(tmp_path, text)).team)


async def test_a_team_that_ends_is_planned(tmp_path: Path) -> None:
    check_plannable((await load(tmp_path, teams.ENDING)).team)
    endless = (await load(tmp_path, teams.ENDLESS)).team
    limit_turns(endless, 2)
    assert endless._max_turns == 2


async def test_agents_within_agents_are_found(tmp_path: Path) -> None:
    callers = find_callers((await load(tmp_path, teams.NESTED)).team)
    assert [caller.name for caller in callers] == ["writer", "filtered", "society"]


@pytest.mark.parametrize(
    ("held", "is_refused"),
    [
        *[(held, True) for held in ("critic", "[small]", "{'one': (small,)}")],
        *[(held, False) for held in ("small", "team", "AgentTool(critic)")],
    ],
)
async def test_an_irreplaceable_client_is_refused(
    tmp_path: Path, held: str, is_refused: bool
) -> None:
    """It would send real requests. Clients in tools send none."""
    text = f"from autogen_agentchat.tools import AgentTool\n{teams.WRAPPED}wrapper.held = {held}\n"
    team = (await load(tmp_path, text)).team
    if is_refused:
        with pytest.raises(PlanError, match="wrapper holds a OpenAIChatCompletionClient in a"):
            find_callers(team)
    else:
        assert find_callers(team)


async def test_a_modelled_client_keeps_the_prompt(tmp_path: Path) -> None:
    text = teams.ENDING.replace("max_tokens=40", "add_name_prefixes=True, temperature=1")
    caller = find_callers((await load(tmp_path, text)).team)[1]
    client = modelled_client(caller, "http://127.0.0.1:9", 30)
    caller.replace_client(client)
    assert caller.holders[0][0]._model_client is client
    assert client._add_name_prefixes
    assert client._create_args["max_tokens"] == 30
    assert client._create_args["temperature"] == 0
    assert client.model_info == caller.client.model_info
    await client.close()


async def test_a_files_link_gives_way_to_the_plan(tmp_path: Path) -> None:
    team = (await load(tmp_path, teams.LINKED)).team
    callers = find_callers(team)
    old = callers[0].client
    assert isinstance(old, FlashMoAChatCompletionClient)
    clients = [modelled_client(caller, "http://127.0.0.1:9", 8) for caller in callers]
    for caller, client in zip(callers, clients, strict=True):
        caller.replace_client(client)
    watched = link(team, ahead="nothing")
    assert not old.linked_teams and all(client.linked_teams for client in clients)
    for each in (watched, old, *clients):
        await each.close()
