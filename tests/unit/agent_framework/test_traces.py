"""Test which linked workflows write to a trace; no engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_framework import Agent, Workflow
from agent_framework.orchestrations import SequentialBuilder

from flashmoa.agent_framework import FlashMoAChatClient, link
from flashmoa.agent_framework._workflow_link import WorkflowLink
from flashmoa.observe import LinkDeclined
from flashmoa.observe.trace import read

pytestmark = pytest.mark.anyio


def chain() -> Workflow:
    client = FlashMoAChatClient("m", base_url="http://127.0.0.1:9/v1")
    return SequentialBuilder(participants=[Agent(client, name=name) for name in "ab"]).build()


async def test_workflows_share_a_trace_until_their_links_are_closed(tmp_path: Path) -> None:
    file, workflows = tmp_path / "run.jsonl", [chain(), chain()]
    events = [LinkDeclined(agent=name, engine="", reason="test") for name in ("1", "2")]
    links: list[WorkflowLink] = []
    for workflow, event in zip(workflows, events, strict=True):
        links.append(link(workflow, trace=file))
        links[-1]._planner.listener(event)
    assert read(file) == events
    for each in links:
        await each.close()
    assert read(file) == events
    await link(chain(), trace=file).close()
    assert read(file) == []


async def test_linking_a_workflow_again_replaces_its_trace(tmp_path: Path) -> None:
    file, workflow = tmp_path / "run.jsonl", chain()
    event = LinkDeclined(agent="1", engine="", reason="test")
    link(workflow, trace=file)._planner.listener(event)
    assert read(file) == [event]
    second = link(workflow, trace=file)
    assert read(file) == []
    await second.close()
