"""Test when a linked team replaces a trace; no engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat

from flashmoa.autogen import FlashMoAChatCompletionClient, link
from flashmoa.observe import LinkDeclined
from flashmoa.observe.trace import read

pytestmark = pytest.mark.anyio


async def test_linking_a_team_again_replaces_its_trace(tmp_path: Path) -> None:
    """As when a cell of a notebook is run once more."""
    client = FlashMoAChatCompletionClient(model="m", base_url="http://127.0.0.1:9/v1")
    team = RoundRobinGroupChat([AssistantAgent("one", client)], max_turns=1)
    file, event = tmp_path / "run.jsonl", LinkDeclined(agent="one", engine="", reason="test")
    link(team, trace=file)._planner.listener(event)
    assert read(file) == [event]
    second = link(team, trace=file)
    assert read(file) == []
    await second.close()
    await client.close()
