"""Programs of LangGraph: graphs of nodes, its prebuilt agent, and a supervisor."""

from __future__ import annotations

import operator
from functools import partial
from typing import Annotated, Any, TypedDict

from langchain_core.messages import ToolMessage
from langchain_core.tools import InjectedToolCallId, tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, create_react_agent
from langgraph.types import Command, Send

from flashmoa.openai import instrument
from tests.coverage.answers import LOOK, Script, ask_experts, call
from tests.coverage.measure import instructions, learned, look, task


class State(TypedDict):
    """The texts so far, by the names of their agents."""

    texts: Annotated[dict[str, str], operator.or_]


def model(url: str) -> ChatOpenAI:
    chat = ChatOpenAI(model="tiny", base_url=f"{url}/v1", api_key="none")  # type: ignore[arg-type]
    return instrument(chat).client


def node(chat: ChatOpenAI, tools: bool, name: str, reads: str = "") -> Any:
    """Make a node whose prompt has the task and the texts of other nodes."""
    own = [tool(look)] if tools else []

    async def run(state: State) -> Any:
        texts = [state["texts"][each] for each in reads.split() if each in state["texts"]]
        prompt = [("system", instructions(name)), ("user", "\n\n".join([task(), *texts]))]
        if not tools:
            return {"texts": {name: str((await chat.ainvoke(prompt)).content)}}
        react = create_react_agent(chat, own)
        done = await react.ainvoke({"messages": prompt})
        return {"texts": {name: str(done["messages"][-1].content)}}

    return run


async def chain(url: str, tools: bool) -> list[str]:
    chat, graph = model(url), StateGraph(State)
    graph.add_sequence([
        ("one", node(chat, tools, "one")),
        ("two", node(chat, tools, "two", "one")),
        ("three", node(chat, tools, "three", "one two")),
    ])  # fmt: skip
    graph.add_edge(START, "one")
    return await finish(graph, chat)


async def fan(url: str, tools: bool) -> list[str]:
    chat, graph = model(url), StateGraph(State)
    reads = {"one": "", "two": "one", "three": "one", "four": "one two three"}
    for name, others in reads.items():
        graph.add_node(name, node(chat, tools, name, others))
    graph.add_edge(START, "one")
    for name in ("two", "three"):
        graph.add_edge("one", name)
    graph.add_edge(["two", "three"], "four")
    return await finish(graph, chat)


async def loop(url: str, tools: bool) -> list[str]:
    chat, graph = model(url), StateGraph(State)
    rounds = iter(range(2))
    graph.add_node("one", node(chat, tools, "one", "two"))
    graph.add_node("two", node(chat, tools, "two", "one"))
    graph.add_edge(START, "one")
    graph.add_edge("one", "two")
    graph.add_conditional_edges("two", lambda _: "one" if next(rounds, 1) == 0 else END)
    return await finish(graph, chat)


async def mapped(url: str, tools: bool) -> list[str]:
    chat, graph = model(url), StateGraph(State)
    workers = {name: node(chat, tools, name, "one") for name in ("two", "three")}

    async def worker(state: Any) -> Any:
        return await workers[state["who"]](state)

    graph.add_node("one", node(chat, tools, "one"))
    graph.add_node("worker", worker)
    graph.add_node("four", node(chat, tools, "four", "two three"))
    graph.add_edge(START, "one")
    graph.add_conditional_edges(
        "one", lambda state: [Send("worker", {**state, "who": who}) for who in workers], ["worker"]
    )
    graph.add_edge("worker", "four")
    return await finish(graph, chat)


async def subgraph(url: str, tools: bool) -> list[str]:
    chat, inner, graph = model(url), StateGraph(State), StateGraph(State)
    inner.add_sequence([
        ("one", node(chat, tools, "one")), ("two", node(chat, tools, "two", "one")),
    ])  # fmt: skip
    inner.add_edge(START, "one")
    graph.add_sequence([("inner", inner.compile()), ("three", node(chat, tools, "three", "two"))])
    graph.add_edge(START, "inner")
    return await finish(graph, chat)


async def handoffs(url: str, tools: bool) -> list[str]:
    """Let agents hand over the conversation by calling a tool."""
    chat, own = model(url), [tool(look)] if tools else []

    def hand_over(name: str) -> Any:
        @tool(f"transfer_to_{name}", description=f"Hand over to {name}.")
        def transfer(
            state: Annotated[Any, InjectedState], call_id: Annotated[str, InjectedToolCallId]
        ) -> Command[Any]:
            said = ToolMessage("Transferred.", tool_call_id=call_id)
            messages = [*state["messages"], said]
            return Command(goto=name, graph=Command.PARENT, update={"messages": messages})

        return transfer

    graph = StateGraph(MessagesState)
    for name, after in (("one", "two"), ("two", "three"), ("three", "")):
        given = [*own, *([hand_over(after)] if after else [])]
        graph.add_node(name, create_react_agent(chat, given, prompt=instructions(name)))
    graph.add_edge(START, "one")
    done = await graph.compile().ainvoke({"messages": [("user", task())]})
    return [str(message.content) for message in done["messages"]]


async def supervisor(url: str, tools: bool) -> list[str]:
    """Let an agent call the others as tools."""
    chat = model(url)
    experts = {
        name: create_react_agent(
            chat, [tool(look)] if tools else [], prompt=instructions(name), name=name
        )
        for name in ("one", "two")
    }

    async def ask(name: str, task: str) -> str:
        done = await experts[name].ainvoke({"messages": [("user", task)]})
        return str(done["messages"][-1].content)

    @tool
    async def ask_one(task: str) -> str:
        """Ask the first expert."""
        return await ask("one", task)

    @tool
    async def ask_two(task: str) -> str:
        """Ask the second expert."""
        return await ask("two", task)

    boss = create_react_agent(chat, [ask_one, ask_two], prompt=instructions("boss"), name="boss")
    done = await boss.ainvoke({"messages": [("user", task())]})
    return [str(message.content) for message in done["messages"]]


async def finish(graph: Any, chat: ChatOpenAI) -> list[str]:
    done = await graph.compile().ainvoke({"texts": {}})
    return list(done["texts"].values())


def hand_off(tools: bool) -> Script:
    looked = [LOOK] if tools else []
    return Script({
        "one": [*looked, call("transfer_to_two")],
        "two": [*looked, call("transfer_to_three")],
        "three": looked,
    })  # fmt: skip


PROGRAMS = [
    learned(name, tools, partial(play, tools=tools), make_script=partial(script, tools))
    for name, play, script in [
        ("StateGraph, chain", chain, lambda _: Script()),
        ("StateGraph, fan-out and fan-in", fan, lambda _: Script()),
        ("StateGraph, loop with a condition", loop, lambda _: Script()),
        ("StateGraph, Send", mapped, lambda _: Script()),
        ("graph in a graph", subgraph, lambda _: Script()),
        ("handoffs by Command", handoffs, hand_off),
        (
            "agents as tools of create_react_agent",
            supervisor,
            lambda _: ask_experts("ask_one", "ask_two"),
        ),
    ]
    for tools in (False, True)
]
