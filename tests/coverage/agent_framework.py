"""Programs of Microsoft Agent Framework: its builders, and an agent as a tool."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

from agent_framework import (
    Agent,
    AgentExecutorResponse,
    Executor,
    Workflow,
    WorkflowBuilder,
    WorkflowContext,
    handler,
)
from agent_framework.orchestrations import (
    ConcurrentBuilder,
    GroupChatBuilder,
    HandoffBuilder,
    MagenticBuilder,
    SequentialBuilder,
)

from flashmoa.agent_framework import FlashMoAChatClient, link
from flashmoa.observe import Listener
from tests.coverage.answers import LOOK, Body, Script, agent_of, call
from tests.coverage.measure import Program, instructions, look, task

# Makes an agent, given its name.
Make = Callable[..., Any]
NAMES = ("one", "two", "three")


def agent(client: FlashMoAChatClient, looks: bool, name: str, **more: Any) -> Any:
    own: dict[str, Any] = {"tools": [look]} if looks else {}
    return Agent(client, instructions(name), name=name, **{**own, **more})


def sequential(make: Make) -> Workflow:
    return SequentialBuilder(participants=[*map(make, NAMES)], output_from="all").build()


def concurrent(make: Make) -> Workflow:
    return ConcurrentBuilder(participants=[*map(make, NAMES)]).build()


def graph_chain(make: Make) -> Workflow:
    one, two, three = map(make, NAMES)
    builder = WorkflowBuilder(start_executor=one, output_from="all")
    return builder.add_edge(one, two).add_edge(two, three).build()


class Join(Executor):
    """Puts the texts of several agents together: an agent cannot read them itself."""

    @handler
    async def join(
        self, answers: list[AgentExecutorResponse], context: WorkflowContext[str]
    ) -> None:
        texts = [answer.agent_response.text for answer in answers]
        await context.send_message("\n\n".join(texts))


def graph_fan(make: Make) -> Workflow:
    one, two, three, four = map(make, (*NAMES, "four"))
    builder = WorkflowBuilder(start_executor=one, output_from="all")
    builder = builder.add_fan_out_edges(one, [two, three])
    join = Join("join")
    return builder.add_fan_in_edges([two, three], join).add_edge(join, four).build()


def graph_condition(make: Make) -> Workflow:
    one, two, three = map(make, NAMES)
    builder = WorkflowBuilder(start_executor=one, output_from="all")
    builder = builder.add_edge(one, two, lambda answer: len(answer.agent_response.text) > 0)
    return builder.add_edge(one, three, lambda answer: not answer.agent_response.text).build()


def nested(make: Make) -> Workflow:
    one, two, three = map(make, NAMES)
    inner = SequentialBuilder(participants=[one, two]).build()
    members = [inner.as_agent(name="inner"), three]
    return SequentialBuilder(participants=members, output_from="all").build()


def by_function(make: Make) -> Workflow:
    return GroupChatBuilder(
        participants=[*map(make, NAMES)],
        selection_func=lambda state: NAMES[state.current_round % 3],
        max_rounds=5,
        output_from="all",
    ).build()


def by_manager(make: Make) -> Workflow:
    return GroupChatBuilder(
        participants=[*map(make, NAMES)],
        orchestrator_agent=make("boss", tools=[]),
        max_rounds=4,
        output_from="all",
    ).build()


def magentic(make: Make) -> Workflow:
    return MagenticBuilder(
        participants=[*map(make, NAMES)],
        manager_agent=make("boss", tools=[]),
        max_round_count=3,
        output_from="all",
    ).build()


def handoff(make: Make) -> Workflow:
    more = {"require_per_service_call_history_persistence": True}
    one, two, three = (make(name, **more) for name in NAMES)
    builder = HandoffBuilder(participants=[one, two, three]).with_start_agent(one)
    return builder.add_handoff(one, [two]).add_handoff(two, [three]).build()


def agent_tool(make: Make) -> Workflow:
    helper = make("helper").as_tool(name="helper", arg_name="task")
    members = [make("one", tools=[helper]), make("two")]
    return SequentialBuilder(participants=members, output_from="all").build()


def decide() -> Script:
    speakers = cycle(NAMES)

    def answer(body: Body) -> str:
        said = {"terminate": False, "reason": "", "next_speaker": next(speakers)}
        return json.dumps({**said, "final_message": None})

    return _managed(answer)


def orchestrate() -> Script:
    speakers = cycle(NAMES)

    def answer(body: Body) -> str | None:
        if "is_request_satisfied" not in json.dumps(body["messages"][-1]):
            return None
        said: dict[str, Any] = dict.fromkeys(("is_request_satisfied", "is_in_loop"), False)
        said |= {"is_progress_being_made": True, "next_speaker": next(speakers)}
        said |= {"instruction_or_question": "Go on with the plan."}
        return json.dumps({key: {"reason": "", "answer": value} for key, value in said.items()})

    return _managed(answer)


def _managed(answer: Callable[[Body], str | None]) -> Script:
    class Managed(Script):
        def answer(self, body: Body) -> str | None:
            return answer(body) if agent_of(body) == "boss" else super().answer(body)

    return Managed()


def hand_off(tools: bool) -> Script:
    looked = [LOOK] if tools else []
    return Script({
        "one": [*looked, call("handoff_to_two")],
        "two": [*looked, call("handoff_to_three")],
    })  # fmt: skip


def ask_helper() -> Script:
    return Script({"one": [call("helper", task="Look for a lake.")]})


async def play(
    build: Callable[[Make], Workflow], tools: bool, url: str, listener: Listener | None
) -> list[str]:
    async with FlashMoAChatClient("tiny", base_url=url) as client:
        workflow = build(partial(agent, client, tools))
        if listener is not None:
            link(workflow, listener=listener)
        outputs = (await workflow.run(task())).get_outputs()
    messages = [message for output in outputs for message in getattr(output, "messages", ())]
    return sorted(message.text for message in messages)


BUILDS = {
    "SequentialBuilder": sequential,
    "ConcurrentBuilder": concurrent,
    "WorkflowBuilder, chain": graph_chain,
    "WorkflowBuilder, fan-out and fan-in": graph_fan,
    "WorkflowBuilder, conditions": graph_condition,
    "workflow in a workflow": nested,
    "GroupChatBuilder, function": by_function,
    "GroupChatBuilder, manager": by_manager,
    "MagenticBuilder": magentic,
    "HandoffBuilder": handoff,
    "Agent.as_tool": agent_tool,
}
SCRIPTS: dict[Any, Callable[[bool], Script]] = {
    by_manager: lambda _: decide(),
    magentic: lambda _: orchestrate(),
    handoff: hand_off,
    agent_tool: lambda _: ask_helper(),
}
PROGRAMS = [
    Program(
        name, tools, partial(play, build, tools),
        partial(SCRIPTS.get(build, lambda _: Script()), tools), adapter=True,
    )
    for name, build in BUILDS.items()
    for tools in (False, True)
]  # fmt: skip
