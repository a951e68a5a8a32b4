"""Run a LangGraph graph, linked: draft -> review -> summary. The nodes call ChatOpenAI.

The first run of the graph is watched. In later ones, the text of each node is streamed into the
prompts of the nodes that will read it.

    python examples/langgraph_chain.py [--engine http://HOST:30000 --model NAME]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

from engines import GUIDE, one_engine, one_engine_arguments, run_program
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph

from flashmoa.openai import instrument, run

TASKS = ["Plan three days in Nepal.", "Plan a week in Nepal for people who like walking."]


class State(TypedDict, total=False):
    """The state that the nodes share: the task and their texts."""

    task: str
    draft: str
    review: str
    summary: str


Messages = list[dict[str, str]]


def make_prompt(role: str, question: str) -> Messages:
    """Return the prompt of a node: the guide, its role and its question."""
    system = f"{GUIDE.read_text()[:4000]}\n\nYou {role}."
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


# Each node's prompt, made from the state when its turn comes.
PROMPTS: dict[str, Callable[[State], Messages]] = {
    "draft": lambda state: make_prompt("propose plans", state["task"]),
    "review": lambda state: make_prompt("check plans", f"Check this plan:\n{state['draft']}"),
    "summary": lambda state: make_prompt(
        "summarise", f"Plan:\n{state['draft']}\n\nRemarks:\n{state['review']}\n\nSum it up."
    ),
}


def build_graph(model: ChatOpenAI) -> Any:
    """Return the graph, which is stock LangGraph."""

    def make_node(name: str) -> Any:
        async def node(state: State) -> State:
            answer = await model.ainvoke(PROMPTS[name](state))
            return {name: str(answer.content)}  # type: ignore[return-value]

        return node

    graph = StateGraph(State)
    for name in PROMPTS:
        graph.add_node(name, make_node(name))
    for before, after in zip([START, *PROMPTS], PROMPTS, strict=False):
        graph.add_edge(before, after)
    return graph.compile()


def chat(url: str, model: str) -> ChatOpenAI:
    """Make LangChain's own client for an engine, and have its calls linked."""
    return instrument(
        ChatOpenAI(
            model=model,
            base_url=f"{url}/v1",
            api_key="none",  # type: ignore[arg-type]
            temperature=0,
            max_completion_tokens=64,
        )
    ).client


async def main() -> None:
    """Run the graph twice linked, and once unlinked."""
    arguments = one_engine_arguments(__doc__)
    async with one_engine(arguments.engine) as url:
        model = chat(url, arguments.model)
        graph = build_graph(model)
        state: State = {}
        for task in TASKS:
            async with run("graph", listener=print):  # The one line.
                state = await graph.ainvoke({"task": task})
        same = await graph.ainvoke({"task": TASKS[-1]})
        await model.root_async_client.close()
    print(state["summary"])
    print("The same unlinked:", same == state)


if __name__ == "__main__":
    run_program(main)
