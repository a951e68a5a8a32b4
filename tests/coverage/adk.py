"""Programs of Google's Agent Development Kit: its team agents, transfers, tools and graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from google.adk.agents import LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.integrations.openai import OpenAILlm
from google.adk.runners import InMemoryRunner
from google.adk.tools.agent_tool import AgentTool
from google.adk.workflow import Workflow
from google.genai import types

from flashmoa.adk import FlashMoALlm, LinkPlugin
from flashmoa.observe import Listener
from flashmoa.openai import AsyncOpenAI
from tests.coverage.answers import LOOK, Script, ask_experts, call
from tests.coverage.measure import Program, instructions, learned, look, task

# Makes an agent, given its name.
Make = Callable[..., LlmAgent]


def agent(model: Any, looks: bool, name: str, **more: Any) -> LlmAgent:
    own: dict[str, Any] = {"tools": [look]} if looks else {}
    return LlmAgent(name=name, model=model, **{"instruction": instructions(name), **own, **more})


def sequential(make: Make) -> Any:
    return SequentialAgent(name="root", sub_agents=[*map(make, ("one", "two", "three"))])


def parallel(make: Make) -> Any:
    """Let the last agent read the others' texts in its instruction."""
    both = ParallelAgent(
        name="both", sub_agents=[make(name, output_key=name) for name in ("two", "three")]
    )
    reads = instructions("four") + "\nFirst: {two}\nSecond: {three}"
    four = make("four", instruction=reads, include_contents="none")
    return SequentialAgent(name="root", sub_agents=[make("one"), both, four])


def loop(make: Make) -> Any:
    return LoopAgent(name="root", max_iterations=2, sub_agents=[make("one"), make("two")])


def transfer(make: Make) -> Any:
    three = make("three")
    return make("one", sub_agents=[make("two", sub_agents=[three])])


def agent_tool(make: Make) -> Any:
    experts = [AgentTool(make(name)) for name in ("one", "two")]
    boss = make("boss", tools=list(experts))
    return SequentialAgent(name="root", sub_agents=[boss, make("three")])


def graph(make: Make) -> Any:
    nodes = [*map(make, ("one", "two", "three"))]
    return Workflow(name="graph", edges=[("START", nodes[0]), *pairwise(nodes)])


def hand_off(tools: bool) -> Script:
    looked = [LOOK] if tools else []
    return Script({
        "one": [*looked, call("transfer_to_agent", agent_name="two")],
        "two": [*looked, call("transfer_to_agent", agent_name="three")],
        "three": looked,
    })  # fmt: skip


async def read(runner: InMemoryRunner) -> list[str]:
    session = await runner.session_service.create_session(app_name="grid", user_id="me")
    message = types.Content(role="user", parts=[types.Part(text=task())])
    texts: list[str] = []
    async with runner:
        async for event in runner.run_async(
            user_id="me", session_id=session.id, new_message=message
        ):
            parts = (event.content.parts if event.content else None) or []
            # The reader also gets the message of the agent that ended last, which is chance.
            texts += [part.text for part in parts if part.text and event.author != "four"]
    return sorted(texts)


async def play(
    build: Callable[[Make], Any], tools: bool, url: str, listener: Listener | None
) -> list[str]:
    model = FlashMoALlm(model="tiny", base_url=url)
    plugins = [] if listener is None else [LinkPlugin(listener=listener)]
    try:
        team = build(partial(agent, model, tools))
        return await read(InMemoryRunner(agent=team, app_name="grid", plugins=plugins))
    finally:
        await model.close()


async def play_learned(build: Callable[[Make], Any], tools: bool, url: str) -> list[str]:
    async with AsyncOpenAI(base_url=url) as client:
        model = OpenAILlm(model="tiny", client=client)
        node = build(partial(agent, model, tools))
        return await read(InMemoryRunner(node=node, app_name="grid"))


BUILDS: dict[str, tuple[Callable[[Make], Any], Callable[[bool], Script]]] = {
    "SequentialAgent": (sequential, lambda _: Script()),
    "ParallelAgent, then a reader": (parallel, lambda _: Script()),
    "LoopAgent": (loop, lambda _: Script()),
    "AgentTool": (agent_tool, lambda _: ask_experts("one", "two", argument="request")),
}
PROGRAMS = [
    Program(name, tools, partial(play, build, tools), partial(script, tools), adapter=True)
    for name, (build, script) in BUILDS.items()
    for tools in (False, True)
] + [
    learned(
        f"{name}, in run()",
        tools,
        partial(play_learned, build, tools),
        make_script=partial(script, tools),
    )
    for name, build, script in [
        ("Workflow", graph, lambda _: Script()),
        ("transfer to sub-agents", transfer, hand_off),
    ]
    for tools in (False, True)
]
