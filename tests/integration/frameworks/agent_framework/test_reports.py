"""Test what a workflow's report says if nothing in it is linked, on a real engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from agent_framework import AgentExecutor, Workflow
from agent_framework.orchestrations import (
    ConcurrentBuilder,
    GroupChatBuilder,
    GroupChatOrchestrator,
)
from agent_framework_orchestrations._base_group_chat_orchestrator import ParticipantRegistry

from flashmoa.agent_framework import link
from tests.integration.frameworks.agent_framework.workflows import TASK, Pair, agent


class Mine(GroupChatOrchestrator): ...


def own_rules(agents: list[Any]) -> Workflow:
    turns = iter(("planner", "local", "planner"))
    members = [AgentExecutor(agent) for agent in agents]
    mine = Mine("mine", ParticipantRegistry(members), lambda _: next(turns), max_rounds=3)
    return GroupChatBuilder(participants=members, orchestrator=mine).build()


def concurrent(agents: list[Any]) -> Workflow:
    return ConcurrentBuilder(participants=agents).build()


@pytest.mark.parametrize(
    ("build", "warning", "shown"),
    [
        (own_rules, "its workflow's Mine has rules", "local, planner: its workflow's Mine has"),
        (concurrent, "is certain to read", "why local: it reads no agent's text"),
    ],
)
async def test_a_workflow_that_is_not_linked_says_why(
    clients: Pair,
    guide: str,
    caplog: pytest.LogCaptureFixture,
    build: Callable[[list[Any]], Workflow],
    warning: str,
    shown: str,
) -> None:
    workflow = build([agent(name, clients[0], guide) for name in ("planner", "local")])
    with caplog.at_level(logging.WARNING, "flashmoa"):
        linked = link(workflow)
    assert warning in caplog.text
    await workflow.run(TASK)
    await linked.close()
    report = " ".join(str(linked).split())
    assert "0 of" in report and "links, by why they ended: none" in report
    assert shown in report and "What failed" not in report
