"""Test when a linked team replaces a trace; no engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from autogen_agentchat.agents import AssistantAgent, SocietyOfMindAgent
from autogen_agentchat.teams import RoundRobinGroupChat

from flashmoa.autogen import FlashMoAChatCompletionClient, link
from flashmoa.observe import LinkDeclined
from flashmoa.observe.trace import read

pytestmark = pytest.mark.anyio


def _make_team(client: FlashMoAChatCompletionClient, name: str) -> RoundRobinGroupChat:
    return RoundRobinGroupChat([AssistantAgent(name, client)], max_turns=1)


async def test_linking_a_team_again_replaces_its_trace(tmp_path: Path) -> None:
    """As when a cell of a notebook is run once more."""
    client = FlashMoAChatCompletionClient(model="m", base_url="http://127.0.0.1:9/v1")
    team = _make_team(client, "one")
    file, event = tmp_path / "run.jsonl", LinkDeclined(agent="one", engine="", reason="test")
    link(team, trace=file)._planner.listener(event)
    assert read(file) == [event]
    second = link(team, trace=file)
    assert read(file) == []
    await second.close()
    await client.close()


async def test_a_team_within_a_linked_team_does_not_end_its_trace(tmp_path: Path) -> None:
    """It may be linked on its own afterwards, and its link be closed."""
    client = FlashMoAChatCompletionClient(model="m", base_url="http://127.0.0.1:9/v1")
    inner = _make_team(client, "one")
    outer = link(
        RoundRobinGroupChat([SocietyOfMindAgent("group", inner, client)], max_turns=1),
        trace=(file := tmp_path / "run.jsonl"),
    )
    outer._planner.listener(event := LinkDeclined(agent="one", engine="", reason="test"))
    own = link(inner, trace=file)
    await own.close()
    another = link(_make_team(client, "two"), trace=file)
    assert read(file) == [event]
    for each in (outer, another):
        await each.close()
    link(_make_team(client, "three"), trace=file)
    assert read(file) == []
    await client.close()


async def test_a_link_that_cannot_be_made_ends_no_trace(tmp_path: Path) -> None:
    client = FlashMoAChatCompletionClient(model="m", base_url="http://127.0.0.1:9/v1")
    team, file = _make_team(client, "one"), tmp_path / "run.jsonl"
    link(team, trace=file)._planner.listener(
        event := LinkDeclined(agent="one", engine="", reason="test")
    )
    with pytest.raises(ValueError, match="web page"):
        link(team, trace=tmp_path / "page.html")
    link(_make_team(client, "two"), trace=file)
    assert read(file) == [event]
    await client.close()
