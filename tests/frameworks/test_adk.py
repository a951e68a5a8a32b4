"""Test the adapter for Google ADK, mostly on real engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import anyio
import httpx
import httpx2
import openai
import pytest
from google.adk.agents import (
    BaseAgent,
    LlmAgent,
    LoopAgent,
    ParallelAgent,
    RunConfig,
    SequentialAgent,
)
from google.adk.agents.run_config import StreamingMode
from google.adk.artifacts import InMemoryArtifactService
from google.adk.integrations.openai import OpenAILlm
from google.adk.planners import BuiltInPlanner
from google.adk.runners import InMemoryRunner
from google.adk.tools import ToolContext
from google.adk.workflow import Workflow
from google.genai import types

from flashmoa._concurrency import all_of
from flashmoa.adk import FlashMoALlm, LinkPlugin
from flashmoa.engine import EngineClient
from flashmoa.frameworks.adk import RunPlanner
from flashmoa.frameworks.conformance import check_adapter, status
from flashmoa.link.link import Link
from flashmoa.observe import Event, LinkDeclined, LinkOpened, Listener
from flashmoa.observe.calls import calls
from flashmoa.observe.events import FIRST
from flashmoa.openai import run
from tests.frameworks.conftest import URLS
from tests.integration.openai.programs import TASK, Clients, closed, play_linked, statuses
from tests.integration.scripted import call_until, script
from tests.unit.openai.fake_server import TEXT, URL, FakeServer, serve, whole

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Models = tuple[FlashMoALlm, FlashMoALlm]
Build = Callable[[Models, str], Any]


@asynccontextmanager
async def open_models(extra_body: dict[str, Any]) -> AsyncGenerator[Models]:
    first, second = (FlashMoALlm(model="tiny", base_url=url, extra_body=extra_body) for url in URLS)
    try:
        yield first, second
    finally:
        await first.close()
        await second.close()


def agent(name: str, model: FlashMoALlm, guide: str, tokens: int = 40, **more: Any) -> LlmAgent:
    settings = types.GenerateContentConfig(temperature=0, max_output_tokens=tokens)
    more = {"instruction": f"{guide}\nYou are {name}.", **more}
    return LlmAgent(name=name, model=model, generate_content_config=settings, **more)


def chain(models: Models, guide: str) -> Any:
    places = (("planner", 0), ("local", 0), ("summary", 1))
    return SequentialAgent(
        name="root", sub_agents=[agent(name, models[place], guide) for name, place in places]
    )


def fan(models: Models, guide: str) -> Any:
    """Make a team whose last agent reads the keys of others, and the message that comes last."""
    reviewers = [
        agent(name, models[place], guide, tokens, output_key=name)
        for name, place, tokens in (("one", 0, 80), ("two", 1, 8))
    ]
    parallel = ParallelAgent(name="both", sub_agents=reviewers)
    reads = {"instruction": guide + "\nFirst: {one}\nSecond: {two}", "include_contents": "none"}
    return SequentialAgent(
        name="root",
        sub_agents=[
            agent("planner", models[0], guide), parallel, agent("chair", models[1], guide, **reads),
        ],
    )  # fmt: skip


def loop(models: Models, guide: str) -> Any:
    both = [agent("writer", models[0], guide), agent("critic", models[1], guide)]
    return LoopAgent(name="root", max_iterations=2, sub_agents=both)


def tools(models: Models, guide: str) -> Any:
    """Make a team whose first agent calls a tool, and whose others read the call, too."""

    def look(far: bool) -> str:
        """Look."""
        return f"A fine place, far: {far}."

    def force(callback_context: Any, llm_request: Any) -> None:
        is_first = not any(part.function_response for part in llm_request.contents[-1].parts)
        choice = types.FunctionCallingConfig(mode="ANY" if is_first else "NONE")
        llm_request.config.tool_config = types.ToolConfig(function_calling_config=choice)

    looker = agent("looker", models[0], guide, 100, tools=[look], before_model_callback=force)
    rest = [agent(name, models[1], guide) for name in ("local", "summary")]
    return SequentialAgent(name="root", sub_agents=[looker, *rest])


async def run_team(build: Build, guide: str, stream: bool, listener: Listener | None) -> list[str]:
    plugins = [] if listener is None else [LinkPlugin(listener=listener)]
    config = RunConfig(streaming_mode=StreamingMode.SSE if stream else StreamingMode.NONE)
    # A call of a tool ends with its grammar.
    body = {"parallel_tool_calls": False} if build is tools else {"ignore_eos": True}
    async with open_models(body) as models:
        runner = InMemoryRunner(agent=build(models, guide), app_name="test", plugins=plugins)
        texts: dict[str, str] = {}
        try:
            async for event in await begin(runner, run_config=config):
                if not event.partial and event.content:
                    text = "".join(part.text or "" for part in event.content.parts or [])
                    texts[f"{len(texts)} {event.author}" if build is loop else event.author] = text
        finally:
            await runner.close()
    return [texts[name] for name in sorted(texts)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("build", "linkable"), [(chain, 2), (fan, 3), (loop, 3), (tools, 2)])
async def test_a_team_conforms(build: Build, linkable: int, stream: bool, guide: str) -> None:
    team = partial(run_team, build, guide[:2000], stream)
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(EngineClient(url)) for url in URLS]
        events = await check_adapter(team, engines, linkable=linkable)
    print(build.__name__, [(call.agent, status(call)) for call in calls(events)])


@pytest.mark.parametrize("how", ["left", "fails", "cancelled"])
async def test_a_run_that_does_not_end_well_leaves_nothing_and_the_next_is_linked(
    how: str, guide: str
) -> None:
    async with open_models({"ignore_eos": True}) as models:
        events: list[Event] = []
        team = chain(models, guide[:2000])
        if how == "fails":
            team.sub_agents[1].before_model_callback = fail_once()
        plugin = LinkPlugin(listener=events.append)
        runner = InMemoryRunner(agent=team, app_name="test", plugins=[plugin])
        with pytest.raises(LookupError) if how == "fails" else anyio.CancelScope() as scope:
            async with aclosing(await begin(runner)) as run:
                async for event in run:
                    if how == "left" and event.author == "planner":
                        break
                    if how == "cancelled":
                        scope.cancel()
        assert not plugin._runs
        for model in models:
            with anyio.fail_after(30):
                while (await model.engine.info()).prompt_streams:  # noqa: ASYNC110
                    await anyio.sleep(0.02)
        events.clear()
        # Two runs at once, in two sessions.
        await all_of([partial(_read, await begin(runner)) for _ in range(2)])
        await runner.close()
    found = Counter((call.agent, status(call)) for call in calls(events))
    assert found["planner", "unlinked"] == 2 and found["summary", "hit"]
    assert bool(found["local", "hit"]) == (how != "fails")


async def test_the_plugin_links_within_a_run_too(guide: str) -> None:
    events: list[Event] = []
    async with open_models({"ignore_eos": True}) as models:
        plugin = LinkPlugin(listener=events.append)
        runner = InMemoryRunner(agent=chain(models, guide[:2000]), plugins=[plugin])
        async with runner, run("chain") as report:
            await _read(await begin(runner))
    assert [call.agent for call in calls(events)] == ["planner", "local", "summary"]
    assert "hit" in map(status, calls(events)) and not report.calls


@pytest.mark.parametrize("ends", [False, True], ids=["asks again", "ends with its tools"])
async def test_what_an_agent_asks_after_its_tools_is_linked_in_the_first_run(
    ends: bool, guide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, call_until(1, [("look", {"place": "lake"}), ("walk", {"place": "hill"})]))
    fine = "A fine place. " * 20
    events: list[Event] = []

    async def play(plugin: LinkPlugin | None) -> list[str]:
        def links() -> list[Link]:
            return [link for run in plugin._runs.values() for link in run.links] if plugin else []

        async def look(place: str) -> str:
            """Look."""
            await until(lambda: plugin is None or any(link.stream_id for link in links()))
            return fine

        async def walk(place: str, tool_context: ToolContext) -> dict[str, str]:
            """Walk."""
            await until(
                lambda: plugin is None or any(fine in each.prompt.stable() for each in links())
            )
            tool_context.actions.skip_summarization = ends
            return {"there": place}

        async def wait_for_end(callback_context: Any, llm_request: Any) -> None:
            await until(lambda: plugin is None or bool(closed(events)))

        async with open_models({}) as models:
            looker = agent("looker", models[0], guide[:2000], tools=[look, walk])
            local = agent("local", models[1], guide[:2000], before_model_callback=wait_for_end)
            team = SequentialAgent(name="root", sub_agents=[looker, local])
            plugins = [] if plugin is None else [plugin]
            async with InMemoryRunner(agent=team, plugins=plugins) as runner:
                shown = [event.content async for event in await begin(runner)]
        return [part.text for content in shown if content for part in content.parts if part.text]

    unlinked = await play(None)
    assert await play(LinkPlugin(listener=events.append)) == unlinked
    found = [status(call) for call in calls(events)]
    assert found == ["unlinked", *([] if ends else ["hit"]), "unlinked"]
    opened = [event.upstream for event in events if isinstance(event, LinkOpened)]
    assert opened == [("look()", "walk()")] and closed(events) == ["unused" if ends else "used"]


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("names", [("a", "b"), ("a",)], ids=["two agents", "one agent"])
async def test_calls_of_tools_with_equal_ids_keep_their_own_results(
    names: tuple[str, ...], rounds: int, guide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some models number their calls, in each answer anew."""
    called = [("look", {"place": "lake"}), ("walk", {"place": "hill"})]
    script(monkeypatch, call_until(2 * rounds, called))
    events: list[Event] = []

    async def play(plugin: LinkPlugin | None) -> list[Any]:
        said, walked = Counter[str](), Counter[str]()

        def link_of(name: str) -> Link | None:
            runs = plugin._runs.values() if plugin else ()
            links = (link for run in runs for link in run.links)
            return next((link for link in links if link.agent == name and link.stream_id), None)

        async def look(place: str, tool_context: ToolContext) -> str:
            """Look."""
            name = tool_context.agent_name
            await until(lambda: plugin is None or link_of(name) is not None)
            said[name] += 1
            return f"What {name} saw, {said[name]}. " * 20

        async def walk(place: str, tool_context: ToolContext) -> dict[str, str]:
            """Walk."""
            name = tool_context.agent_name
            walked[name] += 1  # Both tools run at once, in any order.
            seen = f"{name} saw, {walked[name]}"

            def is_streamed() -> bool:
                link = link_of(name)
                return link is not None and seen in link.prompt.stable()

            await until(lambda: plugin is None or is_streamed())
            return {"there": f"{name} {walked[name]}"}

        async with open_models({}) as models:
            members = [agent(name, models[0], guide[:500], tools=[look, walk]) for name in names]
            plugins = [] if plugin is None else [plugin]
            team = ParallelAgent(name="both", sub_agents=members)
            async with InMemoryRunner(agent=team, plugins=plugins) as runner:
                shown = [event async for event in await begin(runner)]
        parts = [(e.author, part) for e in shown if e.content for part in e.content.parts or ()]
        return sorted((author, repr(part)) for author, part in parts)

    unlinked = await play(None)
    assert await play(LinkPlugin(listener=events.append)) == unlinked
    for name in names:
        _, *after_tools = [status(call) for call in calls(events) if call.agent == name]
        assert after_tools == ["hit"] * rounds


async def test_a_message_that_has_come_extends_the_link_to_its_reader(guide: str) -> None:
    plugin = LinkPlugin()

    def links() -> list[Link]:
        return [link for run in plugin._runs.values() for link in run.links]

    async def wait_for_link(callback_context: Any, llm_request: Any) -> None:
        await until(lambda: any(link.agent == "chair" for link in links()))

    async def wait_for_short(callback_context: Any, llm_request: Any) -> None:
        await until(lambda: any("[short] said" in link.prompt.stable() for link in links()))

    async with open_models({"ignore_eos": True}) as models:
        short = agent("short", models[0], guide[:2000], 8, before_model_callback=wait_for_link)
        long = agent("long", models[0], guide[:2000], before_model_callback=wait_for_short)
        both = ParallelAgent(name="both", sub_agents=[short, long])
        chair = agent("chair", models[1], guide[:2000])
        members = [agent("planner", models[0], guide[:2000]), both, chair]
        team = SequentialAgent(name="root", sub_agents=members)
        async with InMemoryRunner(agent=team, plugins=[plugin]) as runner:
            await _read(await begin(runner))


async def test_code_of_the_users_is_not_run_for_a_forecast(
    guide: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    def instruct(context: Any) -> str:
        asked.append(context.agent_name)
        return guide[:2000]

    async with open_models({"ignore_eos": True}) as models:
        team = chain(models, guide[:2000])
        team.sub_agents[1].instruction = instruct
        runner = InMemoryRunner(agent=team, app_name="test", plugins=[LinkPlugin()])
        await _read(await begin(runner))
        await runner.close()
    assert asked == ["local"]
    assert "local runs unlinked: predicting its prompt would run its instruction" in caplog.text


async def test_the_report_of_a_run_that_the_plugin_does_not_link_says_so_once(guide: str) -> None:
    plugin = LinkPlugin()
    async with open_models({"ignore_eos": True}) as models:
        alone = agent("alone", models[0], guide[:500], 8)
        runner = InMemoryRunner(agent=alone, app_name="test", plugins=[plugin])
        for _ in range(2):
            await _read(await begin(runner))
        await runner.close()
    assert (
        f"{plugin}".splitlines()[-1] == "  alone: LinkPlugin links runs of ADK's team agents only"
    )


async def test_agents_without_a_link_say_why(guide: str) -> None:
    plugin = LinkPlugin()
    async with open_models({"ignore_eos": True}) as models:
        team = chain(models, guide[:2000])
        team.sub_agents[1].planner = BuiltInPlanner(thinking_config=types.ThinkingConfig())
        runner = InMemoryRunner(agent=team, app_name="test", plugins=[plugin])
        await _read(await begin(runner))
        await runner.close()
    reasons = [call.started.unlinked for call in plugin.report.calls]
    assert reasons[:2] == [FIRST, "predicting its prompt would run its planner"]


async def test_a_graph_is_linked_by_what_it_sent_the_last_time(
    guide: str, clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> list[str]:
        model = OpenAILlm(model="tiny", max_tokens=40, client=clients.first)
        nodes = [agent(name, model, guide[:2000]) for name in ("planner", "critic", "writer")]
        graph = Workflow(name="graph", edges=[("START", nodes[0]), *pairwise(nodes)])
        plugins = [LinkPlugin()]  # It does not know graphs.
        async with InMemoryRunner(node=graph, app_name="test", plugins=plugins) as runner:
            events = await runner.run_debug(TASK, quiet=True)
        return [event.content.parts[0].text for event in events if event.content]

    unlinked = await play()
    assert len(unlinked) == 3 and await play_linked("graph", play) == unlinked
    events: list[Event] = []
    assert await play_linked("graph", play, events) == unlinked
    assert len(statuses(events)) == 3 and "hit" in statuses(events)
    assert "unlinked" not in caplog.text


RAN: list[str] = []  # The code of users that has run, by the agent's or the file's name.


class CountingModel(FlashMoALlm):
    async def generate_content_async(self, *args: Any, **named: Any) -> AsyncGenerator[Any]:
        RAN.append(self.model)
        async for response in super().generate_content_async(*args, **named):
            yield response


class CountingAgent(LlmAgent):
    async def canonical_instruction(self, ctx: Any) -> tuple[str, bool]:
        RAN.append(self.name)
        return await super().canonical_instruction(ctx)


class CountingArtifacts(InMemoryArtifactService):
    async def load_artifact(self, *, filename: str, **place: Any) -> types.Part:
        RAN.append(filename)
        return types.Part(text="Notes.")


class Polisher(BaseAgent):
    """Asks an agent of its own several times; ADK calls that a custom agent."""

    helper: LlmAgent

    async def _run_async_impl(self, ctx: Any) -> AsyncGenerator[Any]:
        for _ in range(2):
            async for event in self.helper.run_async(ctx):
                yield event


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    async def handle(_: object, request: Any) -> Any:
        content = await request.aread()
        answer = server.answer(httpx.Request(request.method, f"{request.url}", content=content))
        return httpx2.Response(answer.status_code, json=answer.json())

    server = serve(monkeypatch)
    # OpenAI's client 3 is built on it.
    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", handle)
    return server


@pytest.mark.parametrize(
    ("kind", "model", "instruction", "reason"),
    [
        (
            LlmAgent,
            CountingModel,
            "Write.",
            "predicting its prompt would run its CountingModel.gen",
        ),
        (CountingAgent, FlashMoALlm, "Write.", "it is a CountingAgent, not a stock LlmAgent"),
        (LlmAgent, FlashMoALlm, "{ artifact.a?}", "predicting its prompt would run its artifact s"),
    ],
    ids=["model", "agent", "artifact"],
)
async def test_classes_and_services_of_the_users_are_not_run_for_a_forecast(
    kind: type[LlmAgent],
    model: type[FlashMoALlm],
    instruction: str,
    reason: str,
    server: FakeServer,
) -> None:
    RAN.clear()
    events: list[Event] = []

    def found() -> dict[str, str]:
        """Return the reason of each agent that was considered; it is empty for a link."""
        seen = [event for event in events if isinstance(event, LinkDeclined | LinkOpened)]
        return {event.agent: getattr(event, "reason", "") for event in seen}

    async def look() -> str:
        """Look."""
        await until(lambda: {*found()} >= {"one", "two"})
        return "A fine place."

    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    server.chat = lambda body: (
        whole(message=answer) if "tools" in body and len(body["messages"]) == 2 else whole()
    )
    stock, own = FlashMoALlm(model="m", base_url=URL), model(model="m", base_url=URL)
    # Of the first agent, the request after its tool is considered; of the second, the only one.
    one = kind(name="one", model=own, instruction=instruction, tools=[look])
    writer = LlmAgent(name="writer", model=stock, instruction="Write.", tools=[look])
    two = kind(name="two", model=own, instruction=instruction)
    rest = SequentialAgent(name="rest", sub_agents=[writer, two])
    team = ParallelAgent(name="root", sub_agents=[one, rest])
    async with InMemoryRunner(agent=team, plugins=[LinkPlugin(listener=events.append)]) as runner:
        runner.artifact_service = CountingArtifacts()
        await _read(await begin(runner))
    await all_of([stock.close, own.close])
    assert len(RAN) == 3 and len(server.bodies()) == 5
    assert all(found()[name].startswith(reason) for name in ("one", "two"))


async def test_an_agent_outside_the_tree_may_run_again(server: FakeServer) -> None:
    model, plugin = FlashMoALlm(model="m", base_url=URL), LinkPlugin()
    first, helper = agent("first", model, ""), agent("helper", model, "")
    team = SequentialAgent(name="root", sub_agents=[first, Polisher(name="own", helper=helper)])
    async with InMemoryRunner(agent=team, plugins=[plugin]) as runner:
        shown = [event.author async for event in await begin(runner)]
    await model.close()
    assert shown == ["first", "helper", "helper"] == [call.agent for call in plugin.report.calls]


async def test_an_error_in_the_plugin_costs_links_only(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("flashmoa.link.prompt_feed._logged", set())
    model = FlashMoALlm(model="m", base_url=URL)
    for name in ("begin_agent", "end_agent", "end_all"):
        monkeypatch.setattr(RunPlanner, name, fail)
    team = SequentialAgent(name="root", sub_agents=[agent(name, model, "") for name in "ab"])
    async with InMemoryRunner(agent=team, plugins=[LinkPlugin()]) as runner:
        shown = [event.content.parts[0].text async for event in await begin(runner)]
    await model.close()
    assert shown == [TEXT, TEXT]
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [f"{record.message}" for record in errors] == [
        "A call runs unlinked because of the error below"
    ]


def test_a_client_of_openai_is_refused() -> None:
    client = openai.AsyncOpenAI(base_url=URL, api_key="k")
    with pytest.raises(ValueError, match=r"client cannot be given to FlashMoALlm.*give base_url"):
        FlashMoALlm(model="m", client=client)


async def until(is_so: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not is_so():  # noqa: ASYNC110
            await anyio.sleep(0.002)


async def _read(events: AsyncGenerator[Any]) -> None:
    async for _ in events:
        pass


async def begin(runner: InMemoryRunner, **more: Any) -> AsyncGenerator[Any]:
    """Begin a run in a session of its own."""
    session = await runner.session_service.create_session(app_name=runner.app_name, user_id="me")
    message = types.Content(role="user", parts=[types.Part(text=TASK)])
    return runner.run_async(user_id="me", session_id=session.id, new_message=message, **more)


def fail_once() -> Callable[..., None]:
    """Make a callback before a model that raises an exception the first time."""
    errors = iter([LookupError("once")])

    def callback(callback_context: Any, llm_request: Any) -> None:
        for error in errors:
            raise error

    return callback
