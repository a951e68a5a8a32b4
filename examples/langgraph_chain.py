"""Run a LangGraph graph, linked: draft -> review -> summary. The nodes call ChatOpenAI.

The text of each node is streamed into the prompts of the nodes that will read it.

    python examples/langgraph_chain.py [--engine http://HOST:30000 --model NAME]
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypedDict

from engines import GUIDE, one_engine, one_engine_arguments, run_program
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph

from flashmoa import EngineClient, PendingRequest, Text, Workflow

TASK = "Plan three days in Nepal for two people who like walking and food."


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


class LinkedGraph:
    """Runs the nodes in a row.

    Args:
        flow: links the nodes; ``None`` leaves them unlinked.
    """

    def __init__(self, model: ChatOpenAI, flow: Workflow | None) -> None:
        self._model = model
        self._flow = flow
        self._texts: dict[str, Text] = {}
        self._expected: dict[str, PendingRequest[Any]] = {}
        graph = StateGraph(State)
        for name in PROMPTS:
            graph.add_node(name, self._node(name))
        for before, after in zip([START, *PROMPTS], PROMPTS, strict=False):
            graph.add_edge(before, after)
        self._graph = graph.compile()

    async def run(self, task: str) -> State:
        """Run the graph, and return its last state."""
        if self._flow is not None:
            # A state with texts that are still to be written, to make the later nodes' prompts.
            self._texts = {name: self._flow.text(name) for name in PROMPTS}
            future: Any = {"task": task} | {name: f"{text}" for name, text in self._texts.items()}
            for name in ("review", "summary"):
                self._expected[name] = await self._flow.expect(PROMPTS[name](future), name=name)
        return await self._graph.ainvoke({"task": task})

    def _node(self, name: str) -> Any:
        async def node(state: State) -> State:
            expected, text = self._expected.get(name), self._texts.get(name)
            body = expected.claim() if expected is not None else {}
            pieces: list[str] = []
            with text or nullcontext():
                async for chunk in self._model.astream(PROMPTS[name](state), extra_body=body):
                    pieces.append(str(chunk.content))
                    if text is not None:
                        text.write(pieces[-1])
            return {name: "".join(pieces)}  # type: ignore[return-value]

        return node


def chat(url: str, model: str) -> ChatOpenAI:
    """Make LangChain's own client for an engine."""
    return ChatOpenAI(
        model=model,
        base_url=f"{url}/v1",
        api_key="none",  # type: ignore[arg-type]
        temperature=0,
        max_completion_tokens=64,
    )


async def main() -> None:
    """Run the graph linked and unlinked."""
    arguments = one_engine_arguments(__doc__)
    async with one_engine(arguments.engine) as url, EngineClient(url) as client:
        model = chat(client.url, arguments.model)
        async with Workflow(client, listener=print) as flow:
            state = await LinkedGraph(model, flow).run(TASK)
        same = await LinkedGraph(model, None).run(TASK)
    print(state["summary"])
    print("The same unlinked:", same == state)


if __name__ == "__main__":
    run_program(main)
