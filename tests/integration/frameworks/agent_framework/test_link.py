"""Test ``link(workflow)`` on real engines: same answers, and B's prompt computed while A writes."""

import pytest
from agent_framework import Agent, Workflow
from agent_framework.orchestrations import SequentialBuilder

from flashmoa.agent_framework import link
from flashmoa.observe import Event, LinkWaits
from flashmoa.observe.calls import calls
from tests.integration.frameworks.agent_framework.workflows import (
    TASK,
    Pair,
    agent,
    chain,
    options,
    run,
    statuses,
)
from tests.integration.support import slow


async def test_the_summary_was_prefilled_while_the_others_wrote(clients: Pair, guide: str) -> None:
    events: list[Event] = []
    workflow = chain(clients, guide)
    link(workflow, listener=events.append)
    result = await workflow.run(TASK)
    first, _, last = calls(events)
    assert last.usage is not None and last.usage.prompt_stream is not None
    assert last.usage.streamed_tokens is not None and last.usage.streamed_tokens > 300
    assert first.ended is not None
    assert min(span.start for span in last.usage.prompt_stream.prefills) < first.ended.at
    details = result.get_outputs()[-1].usage_details
    assert details["prompt/streamed_tokens"] == last.usage.streamed_tokens
    assert details["prompt/late_tokens"] == last.usage.late_tokens


async def test_a_workflow_that_runs_again(clients: Pair, guide: str) -> None:
    """Its agents remember the first run; each run is linked."""
    plain, linked = chain(clients, guide), chain(clients, guide)
    events: list[Event] = []
    link(linked, listener=events.append)
    for _ in range(2):
        assert await run(linked) == await run(plain)
    found = [call.usage for call in calls(events) if call.agent != "planner"]
    assert len(found) == 4
    assert all(u is not None and u.prompt_stream and u.prompt_stream.status == "hit" for u in found)


@pytest.mark.parametrize("calls_it", [False, slow(True)])
async def test_links_wait_for_an_agent_with_a_tool(
    clients: Pair, guide: str, calls_it: bool
) -> None:
    """Its text is not streamed as it is written.

    If it calls its tool, the next agent also gets the call and its result; the agent after that is
    linked again.
    """

    def look(place: bool) -> str:
        return f"a fine {place}"

    # The answer ends where the tool call does.
    called = options(400, tool_choice="required", allow_multiple_tool_calls=False, extra_body={})

    def build() -> Workflow:
        first = Agent(
            clients[0],
            "Be brief.",
            name="first",
            tools=[look],
            default_options=called if calls_it else options(),  # type: ignore[arg-type]
        )
        rest = [agent(name, clients[1], guide) for name in ("second", "third")]
        return SequentialBuilder(participants=[first, *rest], output_from="all").build()

    plain = await run(build())
    events: list[Event] = []
    workflow = build()
    link(workflow, listener=events.append)
    assert await run(workflow) == plain
    assert statuses(events)["third"] == "hit"
    waiting = {event.agent for event in events if isinstance(event, LinkWaits)}
    assert waiting == {"second", "third"} if calls_it else statuses(events)["second"] == "hit"


async def test_a_serialized_client_has_only_its_settings(clients: Pair) -> None:
    saved = clients[0].to_dict()
    assert saved["base_url"].endswith("/v1") and not {"engine", "linked_teams"} & saved.keys()
