"""Test chats on real engines: linked answers equal unlinked ones, and calls find their streams."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from agent_framework import Agent, Workflow
from agent_framework.orchestrations import (
    AgentBasedGroupChatOrchestrator,
    AgentOrchestrationOutput,
    GroupChatBuilder,
    HandoffBuilder,
    MagenticBuilder,
)
from agent_framework_orchestrations import _magentic

from flashmoa.agent_framework import FlashMoAChatClient, link
from flashmoa.engine import EngineClient
from flashmoa.frameworks.conformance import check_adapter, status
from flashmoa.observe import Listener
from flashmoa.observe.calls import calls
from tests.integration.frameworks.agent_framework.workflows import TASK, Pair, agent, options

Patch = pytest.MonkeyPatch
NAMES = ("planner", "local", "summary")


def members(clients: Pair, guide: str) -> list[Agent[Any]]:
    return [agent(name, clients[name == "local"], guide, tokens=40) for name in NAMES]


def by_function(clients: Pair, guide: str, _: Patch) -> Workflow:
    return GroupChatBuilder(
        participants=members(clients, guide),
        selection_func=lambda state: NAMES[state.current_round % 3],
        max_rounds=5,
        output_from="all",
    ).build()


def by_manager(clients: Pair, guide: str, patch: Patch) -> Workflow:
    """The tiny model's decisions are no decisions, so a script replaces them."""
    order = itertools.cycle(NAMES)

    def decide(_: object) -> AgentOrchestrationOutput:
        return AgentOrchestrationOutput(terminate=False, reason="", next_speaker=next(order))

    patch.setattr(AgentBasedGroupChatOrchestrator, "_parse_agent_output", staticmethod(decide))
    return GroupChatBuilder(
        participants=members(clients, guide),
        orchestrator_agent=agent("boss", clients[1], guide, tokens=40),
        max_rounds=3,
        output_from="all",
    ).build()


def magentic(clients: Pair, guide: str, patch: Patch) -> Workflow:
    order: Iterator[str] = itertools.cycle(NAMES)

    def decide(_: object) -> dict[str, Any]:
        said: dict[str, Any] = dict.fromkeys(("is_request_satisfied", "is_in_loop"), False)
        said |= {"is_progress_being_made": True, "next_speaker": next(order)}
        said |= {"instruction_or_question": "Go on."}
        return {name: {"reason": "", "answer": answer} for name, answer in said.items()}

    patch.setattr(_magentic, "_extract_json", decide)
    return MagenticBuilder(
        participants=members(clients, guide),
        manager_agent=agent("boss", clients[1], guide, tokens=40),
        max_round_count=3,
        output_from="all",
    ).build()


def handoff(clients: Pair, guide: str, _: Patch) -> Workflow:
    """Each agent must call its only tool, which hands off to the next agent."""
    called = options(400, tool_choice="required", extra_body={})
    agents = [
        Agent(
            clients[0],  # The other engine has no parser for tool calls.
            f"{guide[:2000]}\n\nYou are {name}.",
            name=name,
            default_options=called,  # type: ignore[arg-type]
            require_per_service_call_history_persistence=True,
        )
        for name in NAMES
    ]
    begun = itertools.count()
    builder = HandoffBuilder(
        participants=agents, termination_condition=lambda _: next(begun) >= 5
    ).with_start_agent(agents[0])
    for one, other in zip(agents, [*agents[1:], agents[0]], strict=True):
        builder = builder.add_handoff(one, [other])
    return builder.build()


async def run_chat(
    build: Callable[[Pair, str, Patch], Workflow],
    engines: tuple[EngineClient, EngineClient],
    guide: str,
    listener: Listener | None,
) -> list[str]:
    """Run a chat once. Return what its agents wrote: texts, and names of tools."""
    async with (
        FlashMoAChatClient("tiny", base_url=engines[0].url) as first,
        FlashMoAChatClient("tiny", base_url=engines[1].url) as second,
    ):
        with pytest.MonkeyPatch.context() as patch:
            workflow = build((first, second), guide, patch)
            if listener is not None:
                link(workflow, listener=listener)
            outputs = (await workflow.run(TASK)).get_outputs()
    messages = [message for output in outputs for message in output.messages]
    contents = [content for message in messages for content in message.contents]
    return [written for each in contents if (written := each.text or each.name)]


# Chats, and the number of calls that can be linked. Of the function's chat, these are all but the
# first; of the managers' chats, also the agents' first ones. Magentic's manager also writes facts
# and a plan, which are its own next calls.
CHATS = [(by_function, 4), (by_manager, 5), (magentic, 5), (handoff, 4)]


@pytest.mark.parametrize(("build", "linkable"), CHATS)
async def test_chats_are_linked_and_leave_nothing_behind(
    client: EngineClient,
    downstream_client: EngineClient,
    guide: str,
    build: Callable[[Pair, str, Patch], Workflow],
    linkable: int,
) -> None:
    engines = (client, downstream_client)
    events = await check_adapter(
        partial(run_chat, build, engines, guide), engines, linkable=linkable
    )
    unlinked = [call for call in calls(events) if status(call) == "unlinked"]
    assert len(unlinked) == len(calls(events)) - linkable
