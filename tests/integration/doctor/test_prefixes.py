"""A run's prefixes that broke are found in its trace, on a real engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import SystemMessage, UserMessage
from pydantic import BaseModel

from flashmoa import Workflow
from flashmoa.autogen import FlashMoAChatCompletionClient, link
from flashmoa.cli import doctor
from flashmoa.cli import trace as trace_command
from flashmoa.doctor import check_prefixes
from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import Event, PromptSent
from flashmoa.observe.calls import calls
from flashmoa.observe.prefix_breaks import PrefixBreak, find_breaks
from flashmoa.observe.trace import read

pytestmark = pytest.mark.anyio
Client = FlashMoAChatCompletionClient


@pytest.fixture
async def make_client(engine: LocalEngine) -> AsyncGenerator[Callable[..., Client]]:
    made: list[Client] = []

    def make(**more: Any) -> Client:
        settings: dict[str, Any] = {"temperature": 0, "max_tokens": 16, **more}
        made.append(Client(model="tiny", base_url=engine.url, **settings))
        return made[-1]

    yield make
    for client in made:
        await client.close()


async def search(query: str) -> str:
    """Search the guide."""
    return query


async def read_page(number: int) -> str:
    """Read a page of the guide."""
    return str(number)


class Clock(AssistantAgent):
    """Says the time at the beginning of its prompts."""

    seconds = count(2)

    async def on_messages_stream(self, *args: Any) -> AsyncGenerator[Any]:
        (system,) = self._system_messages
        text = system.content.partition("Z. ")[2] or system.content
        time = f"It is 2025-11-23T10:15:{next(self.seconds):02}Z. "
        self._system_messages = [SystemMessage(content=time + text)]
        async for item in super().on_messages_stream(*args):
            yield item


class Shuffler(AssistantAgent):
    """Gives its tools in another order each time."""

    async def on_messages_stream(self, *args: Any) -> AsyncGenerator[Any]:
        tools: Any = self._workbench[0]
        tools._tools.reverse()
        async for item in super().on_messages_stream(*args):
            yield item


def make_team(client: Client, guide: str) -> RoundRobinGroupChat:
    """Make a team of which each agent has another part of the guide, and one changes nothing."""
    agents = [
        Clock("clock", client, system_message=guide[:3000]),
        Shuffler("shuffler", client, system_message=guide[3000:4500], tools=[search, read_page]),
        AssistantAgent("steady", client, system_message=guide[6000:9000]),
    ]
    return RoundRobinGroupChat(agents, max_turns=6)


def reused_tokens(broken: PrefixBreak) -> int:
    """Return how much of a prompt the engine found in its cache, as it says itself."""
    usage = broken.call.usage
    assert usage is not None and usage.cached_tokens is not None and not usage.streamed_tokens
    return usage.cached_tokens


async def test_agents_whose_prefixes_break_are_named_with_what_it_cost(
    engine: LocalEngine,
    make_client: Callable[..., Client],
    guide: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model_client, file = make_client(extra_body={"ignore_eos": True}), tmp_path / "run.jsonl"
    await model_client.engine.flush_cache()
    team = make_team(model_client, guide)
    linked = link(team, trace=file, trace_prompts=True)
    await team.run(task="Plan a trip.")
    await linked.close()

    assert trace_command.main([str(file)]) == 0
    shown = capsys.readouterr().out
    assert "clock, call 2: the system message differs" in shown
    assert "shuffler, call 2: the list of tools differs" in shown
    assert "steady, call" not in shown

    arguments = ["--trace", str(file), "--engine", engine.url]
    assert await anyio.to_thread.run_sync(partial(doctor.main, arguments)) == 0
    shown = capsys.readouterr().out
    found = {one.call.agent: one for one in find_breaks(calls(read(file)))}
    assert found.keys() == {"clock", "shuffler"}
    for agent, broken in found.items():
        # The engine's cache ends where the doctor, by the engine's tokens, sees the difference.
        (line,) = [line for line in shown.splitlines() if f"{agent}, call 2" in line]
        where = shown.splitlines()[shown.splitlines().index(line) + 1]
        assert f"from its prompt before at token {reused_tokens(broken)} (" in where
        computed, again = broken.computed_tokens, broken.again_tokens
        assert computed is not None and again is not None
        assert 0.7 * computed < again <= computed
        assert f"cost    {computed} of " in shown
    assert shown.count("which takes about") == 2


async def test_prompts_of_every_kind_of_call_are_recorded(
    engine: LocalEngine, client: EngineClient, make_client: Callable[..., Client]
) -> None:
    class Plan(BaseModel):
        is_long: bool

    events: list[Event] = []
    thinks = {"chat_template_kwargs": {"enable_thinking": False}}
    model_client = make_client(max_tokens=64, listener=events.append, extra_body=thinks)
    ask = [UserMessage(content="Plan a trip.", source="user")]
    sent = {"role": "user", "content": "Plan a trip.", "name": "user"}

    def take() -> PromptSent:
        (call,) = calls(events)
        assert call.prompt is not None and call.usage is not None, events
        assert call.usage.prompt_tokens > 0
        events.clear()
        return call.prompt

    await model_client.create(ask)
    assert take().messages == [sent]
    await model_client.create(ask, json_output=Plan)
    assert take().messages == [sent]
    for json_output in (None, Plan):
        async for _ in model_client.create_stream(ask, json_output=json_output):
            pass
        assert take().messages == [sent]
    await model_client.score(ask, [" yes", " no"])
    prompt = take()
    assert (prompt.messages, prompt.template_args) == ([sent], thinks["chat_template_kwargs"])
    async with Workflow(client, listener=events.append) as flow:
        await flow.ask([sent], max_tokens=4, chat_template_kwargs={"a": 1}, cache_salt="s")
    prompt = take()
    assert prompt.messages == [sent]
    assert (prompt.template_args, prompt.namespace) == ({"a": 1}, {"cache_salt": "s"})


async def test_engine_that_cannot_render_is_named_and_prompts_are_compared_as_sent(
    plain_engine: LocalEngine, make_client: Callable[..., Client], tmp_path: Path
) -> None:
    file = tmp_path / "run.jsonl"
    agents = [AssistantAgent("writer", make_client(), system_message="Be brief.")]
    team = RoundRobinGroupChat(list(agents), max_turns=2)
    link(team, trace=file, trace_prompts=True)
    await team.run(task="Plan a trip.")
    problem, finding = await check_prefixes(file, plain_engine.url)
    assert problem.level == "fix" and "without the flashmoa-sglang plugin" in problem.text
    assert (finding.level, finding.text) == (
        "ok",
        "no prompt had 32 tokens or more computed again as its prefix broke, of 2 prompts",
    )
