"""Whole answers of an engine that separates reasoning are the stock client's, linked or not."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import openai
import pytest
from agent_framework import Agent
from agent_framework.orchestrations import SequentialBuilder
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

import flashmoa
import flashmoa.agent_framework
import flashmoa.autogen
from flashmoa.agent_framework import FlashMoAChatClient
from flashmoa.autogen import FlashMoAChatCompletionClient
from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from flashmoa.link.link import Ahead
from flashmoa.observe import Event, LinkClosed, LinkWaits
from flashmoa.observe.calls import calls
from flashmoa.openai import AsyncOpenAI, OpenAI, instrument, run
from tests.integration import forced
from tests.integration.sent_bodies import record_bodies
from tests.integration.support import start_special_engine, wait_until_idle

LITERAL = "The tag <think> opens a thought."
# Takes so long to write that links are opened meanwhile.
LONG = f"{LITERAL} The tag </think> ends it.{' It has an end.' * 40}"
PLAIN = "It has no tag." + " It has an end." * 40
THOUGHT = "<think>\nOne has to think about this first.\n</think>\n\nSo be it. \n"
NOT_THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
AHEAD: tuple[Ahead | None, ...] = (None, "nothing", "known", "text")


@pytest.fixture(scope="module")
async def thinking(engines: LocalEngines, model: Any) -> AsyncGenerator[LocalEngine]:
    """An engine with a reasoning parser, which writes what a request names."""
    arguments = ("--enable-cache-report", "--reasoning-parser", "qwen3", *forced.ARGUMENTS)
    async with start_special_engine(engines, model, *arguments, has_costs=False) as started:
        yield started


@pytest.fixture
async def engine(thinking: LocalEngine) -> AsyncGenerator[EngineClient]:
    async with EngineClient(thinking.url, timeout=60) as client:
        await client.flush_cache()
        yield client
        await wait_until_idle(client)


def read(answer: Any) -> tuple[Any, ...]:
    choice = answer.choices[0]
    return choice.message.content, choice.message.reasoning_content, choice.finish_reason


@pytest.mark.parametrize(
    ("text", "more"),
    [
        (LITERAL, NOT_THINKING),
        (LITERAL, {}),
        (THOUGHT, {}),
        (THOUGHT, {"max_tokens": 6, "chat_template_kwargs": {"force_nonempty_content": True}}),
        (LITERAL, {**NOT_THINKING, "separate_reasoning": False}),
    ],
    ids=["literal", "unended", "thought", "cut", "not separated"],
)
async def test_answers_in_runs_are_the_stock_clients(
    engine: EngineClient, text: str, more: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = record_bodies(monkeypatch)
    body = {**await forced.forcing(engine, text), **more}
    messages: Any = [{"role": "user", "content": "What does it do?"}]
    asked: dict[str, Any] = {"model": "tiny", "messages": messages, "extra_body": body}
    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="-") as stock:
        expected = read(await stock.chat.completions.create(**asked))
    async with AsyncOpenAI(base_url=engine.url) as client:
        for _ in range(2):
            async with run(text):
                assert read(await client.chat.completions.create(**asked)) == expected
    with OpenAI(base_url=engine.url) as blocking, run(text):
        assert read(blocking.chat.completions.create(**asked)) == expected
    assert len(sent) == 4 and len(set(sent)) == 1


async def test_answers_of_an_instrumented_framework_are_those_outside_of_runs(
    engine: EngineClient,
) -> None:
    body = {**await forced.forcing(engine, LONG), **NOT_THINKING}

    def model() -> ChatOpenAI:
        key = SecretStr("-")
        return ChatOpenAI(model="tiny", base_url=f"{engine.url}/v1", api_key=key, extra_body=body)

    expected = (await model().ainvoke("Go.")).content
    instrumented = model()
    with instrument(instrumented):
        for _ in range(2):
            async with run("instrumented"):
                assert (await instrumented.ainvoke("Go.")).content == expected


def check_linked(events: Sequence[Event], *, is_same: bool = False) -> None:
    """Check that text reached the reader's link as it was written.

    SGLang's parser may make another text of the whole answer, which ``LONG`` brings about; its
    reader's request then comes sooner than the link can take back what differs.
    """
    assert not [event for event in events if isinstance(event, LinkWaits)]
    assert [event.reason for event in events if isinstance(event, LinkClosed)] == ["used"]
    reader = calls(events)[-1]
    assert reader.usage is not None and reader.usage.prompt_stream is not None
    expected = "hit" if is_same else "mispredicted"
    assert reader.usage.prompt_stream.status in ("hit", expected)


@pytest.mark.parametrize("written", [LONG, PLAIN])
async def test_a_linked_run_reads_what_an_unlinked_one_reads(
    engine: EngineClient, written: str
) -> None:
    bodies = [{**await forced.forcing(engine, text), **NOT_THINKING} for text in (written, "Ok.")]
    events: list[Event] = []

    async def ask(client: openai.AsyncOpenAI, body: Mapping[str, Any], content: str) -> str:
        messages: Any = [{"role": "user", "content": content}]
        create: Any = client.chat.completions.create
        answer = await create(model="tiny", messages=messages, extra_body=body)
        return answer.choices[0].message.content

    async def program(client: openai.AsyncOpenAI) -> list[str]:
        draft = await ask(client, bodies[0], "Write. " * 40)
        return [draft, await ask(client, bodies[1], f"Read this. {'Well. ' * 40} {draft} Done.")]

    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="-") as stock:
        expected = await program(stock)
    async with AsyncOpenAI(base_url=engine.url) as client:
        for _ in range(2):
            events.clear()
            async with run("reads", listener=events.append):
                assert await program(client) == expected
    check_linked(events, is_same=written == PLAIN)


async def play_autogen(engine: EngineClient, ahead: Ahead | None, events: list[Event]) -> Any:
    async with AsyncExitStack() as stack:
        agents: list[AssistantAgent] = []
        for name, text in (("writer", LONG), ("reader", "Ok.")):
            body = {**await forced.forcing(engine, text), **NOT_THINKING}
            client = FlashMoAChatCompletionClient(
                model="tiny", base_url=engine.url, extra_body=body
            )
            stack.push_async_callback(client.close)
            agents.append(AssistantAgent(name, client, system_message=f"You are {name}. " * 40))
        team = RoundRobinGroupChat([*agents], max_turns=2)
        if ahead is not None:
            flashmoa.autogen.link(team, ahead=ahead, listener=events.append)
        result = await team.run(task="Go.")
        contexts = [await agent.model_context.get_messages() for agent in agents]
    messages = [message.to_text() for message in result.messages]
    return messages, [[str(each.content) for each in context] for context in contexts]


async def play_agent_framework(
    engine: EngineClient, ahead: Ahead | None, events: list[Event]
) -> Any:
    async with FlashMoAChatClient("tiny", base_url=engine.url) as client:
        agents: list[Agent[Any]] = []
        for name, text in (("writer", LONG), ("reader", "Ok.")):
            body = {**await forced.forcing(engine, text), **NOT_THINKING}
            given: Any = {"extra_body": body}
            agents.append(Agent(client, f"You are {name}. " * 40, name=name, default_options=given))
        workflow = SequentialBuilder(participants=[*agents], output_from="all").build()
        if ahead is not None:
            flashmoa.agent_framework.link(workflow, ahead=ahead, listener=events.append)
        result = await workflow.run("Go.")
        return [output.text for output in result.get_outputs()]


async def play_workflow(engine: EngineClient, ahead: Ahead | None, events: list[Event]) -> Any:
    async with flashmoa.Workflow(engine, ahead=ahead or "nothing", listener=events.append) as flow:
        bodies = [await forced.forcing(engine, text) for text in (LONG, "Ok.")]
        draft = flow.ask([{"role": "user", "content": "Go."}], **bodies[0], **NOT_THINKING)
        messages = [{"role": "user", "content": f"{'Well. ' * 40} {draft} Done."}]
        return [await draft, await flow.ask(messages, **bodies[1], **NOT_THINKING)]


@pytest.mark.parametrize("play", [play_autogen, play_agent_framework, play_workflow])
async def test_a_linked_team_reads_what_an_unlinked_one_reads(
    engine: EngineClient, play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = record_bodies(monkeypatch)
    events: dict[Ahead | None, list[Event]] = {ahead: [] for ahead in AHEAD}
    found: dict[Ahead | None, Any] = {}
    bodies: dict[Ahead | None, list[bytes]] = {}
    for ahead in AHEAD:
        sent.clear()
        found[ahead] = await play(engine, ahead, events[ahead])
        bodies[ahead] = sent.copy()
    assert found == dict.fromkeys(AHEAD, found[None])
    if play is not play_workflow:  # It asks for streams, and names prompt streams in bodies.
        assert bodies == dict.fromkeys(AHEAD, bodies[None])
        check_linked(events["text"])
