"""Programs of AutoGen: each of its teams, and its ways to put an agent into another one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from autogen_agentchat.agents import AssistantAgent, SocietyOfMindAgent
from autogen_agentchat.base import Team
from autogen_agentchat.conditions import MaxMessageTermination, SourceMatchTermination
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import (
    DiGraphBuilder,
    GraphFlow,
    MagenticOneGroupChat,
    RoundRobinGroupChat,
    SelectorGroupChat,
    Swarm,
)
from autogen_agentchat.tools import AgentTool

from flashmoa.autogen import FlashMoAChatCompletionClient, link
from flashmoa.observe import Listener
from tests.coverage.answers import LOOK, Body, Script, call
from tests.coverage.measure import Program, instructions, look, task

Client = FlashMoAChatCompletionClient
# Makes an agent, given its name.
Make = Callable[..., Any]
NAMES = ("one", "two", "three")


def agent(client: Client, looks: bool, name: str, **more: Any) -> Any:
    own: dict[str, Any] = {"tools": [look], "max_tool_iterations": 3} if looks else {}
    more = {"system_message": instructions(name), **own, **more}
    return AssistantAgent(name, client, **more)


def round_robin(make: Make, _: Client) -> Team:
    return RoundRobinGroupChat([*map(make, NAMES)], max_turns=4)


def graph(make: Make, names: str, edges: Sequence[tuple[str, str]], **conditions: str) -> Team:
    """Make a graph; an edge's condition is a word in the text of its start."""
    members = {name: make(name) for name in names.split()}
    builder = DiGraphBuilder()
    for member in members.values():
        builder.add_node(member)
    for start, end in edges:
        word = conditions.get(f"{start}_{end}")
        condition = None if word is None else partial(_holds, word)
        builder.add_edge(members[start], members[end], condition=condition)
    builder.set_entry_point(next(iter(members.values())))
    stop = MaxMessageTermination(6)
    return GraphFlow([*members.values()], graph=builder.build(), termination_condition=stop)


def _holds(word: str, message: Any) -> bool:
    return (word in message.to_text()) == (word != "otherwise")


def chain(make: Make, _: Client) -> Team:
    return graph(make, "one two three", [("one", "two"), ("two", "three")])


def fan(make: Make, _: Client) -> Team:
    edges = [("one", "two"), ("one", "three"), ("two", "four"), ("three", "four")]
    return graph(make, "one two three four", edges)


def loop(make: Make, _: Client) -> Team:
    """Send the writer round again until the team is stopped."""
    edges = [("one", "two"), ("two", "one"), ("two", "three")]
    return graph(make, "one two three", edges, two_one="", two_three="print!")


def selector(make: Make, client: Client) -> Team:
    members = [*map(make, NAMES)]
    stop = MaxMessageTermination(6)
    return SelectorGroupChat(members, client, termination_condition=stop)


def swarm(make: Make, _: Client) -> Team:
    members = [make("one", handoffs=["two"]), make("two", handoffs=["three"]), make("three")]
    return Swarm(members, termination_condition=SourceMatchTermination(["three"]))


def magentic(make: Make, client: Client) -> Team:
    return MagenticOneGroupChat([make("one"), make("two")], client, max_turns=6)


def nested(make: Make, _: Client) -> Team:
    inner = RoundRobinGroupChat([make("in1"), make("in2")], max_turns=2)
    return RoundRobinGroupChat([make("one"), inner, make("two")], max_turns=3)


def society(make: Make, client: Client) -> Team:
    inner = RoundRobinGroupChat([make("in1"), make("in2")], max_turns=2)
    minds = SocietyOfMindAgent("minds", inner, client)
    return RoundRobinGroupChat([make("one"), minds, make("two")], max_turns=3)


def agent_tool(make: Make, _: Client) -> Team:
    helper = AgentTool(make("helper"), return_value_as_last_message=True)
    boss = make("boss", tools=[helper], max_tool_iterations=3)
    return RoundRobinGroupChat([boss, make("two")], max_turns=2)


def select() -> Script:
    turns = iter(["one", "two", "three", "one", "two"])
    return Script(others=lambda _: next(turns))


def orchestrate() -> Script:
    """Write a ledger that lets the two agents speak in turn."""
    speakers = iter(["one", "two", "one", ""])

    def decide(body: Body) -> str | None:
        if "is_request_satisfied" not in json.dumps(body["messages"][-1]):
            return None
        speaker = next(speakers)
        answers = {
            "is_request_satisfied": not speaker,
            "is_progress_being_made": True,
            "is_in_loop": False,
            "instruction_or_question": "Go on with the plan.",
            "next_speaker": speaker or "one",
        }
        return json.dumps({key: {"reason": "so", "answer": a} for key, a in answers.items()})

    return Script(others=decide)


def hand_off(tools: bool) -> Script:
    looked = [LOOK] if tools else []
    return Script({
        "one": [*looked, call("transfer_to_two")],
        "two": [*looked, call("transfer_to_three")],
    })  # fmt: skip


def ask_helper() -> Script:
    return Script({"boss": [call("helper", task="Look for a lake.")]})


async def play(
    build: Callable[[Make, Client], Team], tools: bool, url: str, listener: Listener | None
) -> list[str]:
    client = Client(model="tiny", base_url=url)
    try:
        team: Any = build(partial(agent, client, tools), client)
        linked = link(team, listener=listener) if listener is not None else None
        result = await team.run(task=task())
        if linked is not None:
            await linked.close()
        # Parallel agents end in a random order. The next agent reads their texts in this order.
        last = "four" if build is fan else None
        texts = [m for m in result.messages if isinstance(m, TextMessage) and m.source != last]
        return sorted(message.content for message in texts)
    finally:
        await client.close()


BUILDS = {
    "RoundRobinGroupChat": round_robin,
    "GraphFlow, chain": chain,
    "GraphFlow, fan-out and fan-in": fan,
    "GraphFlow, loop with conditions": loop,
    "SelectorGroupChat": selector,
    "Swarm": swarm,
    "MagenticOneGroupChat": magentic,
    "team in a team": nested,
    "SocietyOfMindAgent": society,
    "AgentTool": agent_tool,
}
SCRIPTS: dict[Any, Callable[[bool], Script]] = {
    selector: lambda _: select(),
    swarm: hand_off,
    magentic: lambda _: orchestrate(),
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
