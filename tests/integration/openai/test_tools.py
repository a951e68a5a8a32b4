"""Agents whose tools run: their own next request is prefilled meanwhile, and answered the same."""

import asyncio
import contextlib
import random
from functools import partial
from typing import Any

import anyio
import pytest

from flashmoa.engine import EngineClient
from flashmoa.link import after_tools
from flashmoa.observe import Event
from flashmoa.observe.calls import calls
from flashmoa.openai import run
from tests.integration.openai.programs import (
    SETTINGS,
    TASK,
    Clients,
    ask,
    play_linked,
    statuses,
)
from tests.integration.openai.tool_agents import (
    Tool,
    Watch,
    agent,
    fine,
    look_when_linked,
    look_when_prefilled,
    offer,
)
from tests.integration.scripted import call_until, script
from tests.integration.support import (
    wait_until_idle,
)
from tests.waiting import LAG

# Most tokens left to compute for a request, if only a short result in it was not known before.
FEW = LAG + 64
LOOK = ("look", {"place": "lake"})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_after_a_tool_was_prefilled_while_the_tool_ran(
    clients: Clients,
    client: EngineClient,
    guide: str,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
) -> None:
    script(monkeypatch, call_until(2, LOOK))

    async def program(tool: Tool) -> list[str]:
        answer = await agent(clients.first, guide[:3000], TASK, tool, stream=stream)
        return [answer, await ask(clients.second, guide, f"Check:\n{answer}")]

    unlinked = await program(fine)
    for is_first in (True, False):
        watch = Watch(client)

        async def look(name: str, arguments: dict[str, Any]) -> str:
            await (watch.prefilled() if is_first else watch.linked())  # noqa: B023
            return await fine(name, arguments)

        await client.flush_cache()
        assert await play_linked(f"look {stream}", partial(program, look), watch.events) == unlinked
        assert statuses(watch.events) == [None, "hit", "hit", None if is_first else "hit"]
        late = [call.usage and call.usage.late_tokens for call in calls(watch.events)[1:3]]
        assert all(tokens is not None and tokens < FEW for tokens in late)
        # The second run expects the results of the first run.
        assert watch.reasons() == (["used", "used"] if is_first else [])


async def test_another_call_than_before_is_linked_too(
    clients: Clients, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def program(tool: Tool) -> str:
        return await agent(clients.first, "You look.", TASK, tool)

    for place in ("lake", "hill"):
        script(monkeypatch, call_until(1, ("look", {"place": place})))
        unlinked, watch = await program(fine), Watch(client)
        tool = partial(look_when_prefilled, watch)
        assert await play_linked("other", partial(program, tool), watch.events) == unlinked
        assert statuses(watch.events) == [None, "hit"]
        assert watch.reasons() == ["used"]


async def test_another_result_than_before_changes_nothing_and_is_not_expected_again(
    clients: Clients, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, call_until(1, LOOK))

    async def program(weather: str, tool: Tool) -> str:
        async def look(name: str, arguments: dict[str, Any]) -> str:
            return f"{weather} {await tool(name, arguments)}"

        return await agent(clients.first, "You look.", TASK, look)

    found: list[list[str | None]] = []
    for number, weather in enumerate(("Sun.", "Rain.", "Snow.")):
        unlinked, watch = await program(weather, fine), Watch(client)
        # In the second run the result of the first is expected; in the third, none is.
        tool = partial(look_when_prefilled if number == 0 else look_when_linked, watch)
        linked = partial(program, weather, tool)
        assert await play_linked("result", linked, watch.events) == unlinked
        found.append(statuses(watch.events))
    assert (found[0], found[2]) == ([None, "hit"], [None, "hit"])


async def test_the_text_of_an_agent_that_is_a_tool_streams_into_its_callers_next_request(
    clients: Clients, client: EngineClient, guide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, call_until(1, LOOK))

    async def program(place: str) -> str:
        async def delegate(name: str, arguments: dict[str, Any]) -> str:
            return await ask(clients.second, guide[:2000], f"What of {place}?")

        return await agent(clients.first, guide[:3000], f"Go to {place}.", delegate)

    await play_linked("delegate", partial(program, "Atlantis"))
    watch = Watch(client)
    linked = await play_linked("delegate", partial(program, "Utopia"), watch.events)
    assert linked == await program("Utopia")
    assert statuses(watch.events) == [None, "hit", "hit"]
    caller, other, after = calls(watch.events)
    (opened,) = [event for event in watch.opened if event.stream_id == after.started.stream_id]
    assert opened.upstream == (other.agent,) and caller.agent != after.agent
    assert after.usage is not None and after.usage.late_tokens is not None
    assert after.usage.late_tokens < FEW


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("says", ["", "Let me look there first."])
async def test_the_text_before_a_tool_call_is_taken_back(
    clients: Clients,
    client: EngineClient,
    guide: str,
    monkeypatch: pytest.MonkeyPatch,
    says: str,
    stream: bool,
) -> None:
    """In the first run no tool is called, so that the text is expected by its reader."""

    async def program(tool: Tool) -> list[str]:
        answer = await agent(clients.first, "You look.", TASK, tool, stream=stream)
        return [answer, await ask(clients.second, guide[:2000], f"Check:\n{answer}")]

    await play_linked(f"back {says} {stream}", partial(program, fine))
    script(monkeypatch, call_until(1, [says, LOOK] if says else LOOK))
    unlinked, watch = await program(fine), Watch(client)
    tool = partial(look_when_prefilled, watch)
    assert (
        await play_linked(f"back {says} {stream}", partial(program, tool), watch.events) == unlinked
    )
    *_, reader = calls(watch.events)
    assert watch.reasons() == ["used"]
    to_reader = [event for event in watch.opened if event.agent == reader.agent]
    assert watch.reasons(to_reader) == ["used"]


async def test_a_tool_call_that_the_engine_parsed_is_predicted(
    clients: Clients, client: EngineClient
) -> None:
    async def program(tool: Tool) -> str:
        forced = {"tool_choice": "required", "parallel_tool_calls": False, "extra_body": {}}
        return await agent(clients.first, "You look.", TASK, tool, max_tokens=100, **forced)

    unlinked, watch = await program(fine), Watch(client)
    tool = partial(look_when_prefilled, watch)
    assert await play_linked("parsed", partial(program, tool), watch.events) == unlinked
    assert statuses(watch.events) == [None, "hit"]


@pytest.mark.parametrize("how", ["ends", "cancelled", "fails", "minute"])
async def test_what_is_held_is_given_back_if_the_request_does_not_come(
    clients: Clients, client: EngineClient, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    script(monkeypatch, call_until(1, LOOK))
    if how == "minute":
        monkeypatch.setattr(after_tools, "SLOWEST_TOOL_SECONDS", 0.2)
    watch, opened = Watch(client), anyio.Event()

    class Left(Exception):
        """Is raised by a tool."""

    async def leave(name: str, arguments: dict[str, Any]) -> str:
        await watch.prefilled()
        opened.set()
        if how == "cancelled":
            await anyio.sleep_forever()
        if how == "minute":
            await watch.until(lambda: bool(watch.reasons()))
            await wait_until_idle(client)
        raise Left

    async def program() -> None:
        async with run(f"left {how}", listener=watch.events.append):
            try:
                await agent(clients.first, "You look.", TASK, leave)
            except Left:
                if how == "fails":
                    raise

    task = asyncio.create_task(program())
    await opened.wait()
    if how == "cancelled":
        task.cancel()
    with contextlib.suppress(Left, asyncio.CancelledError):
        await task
    assert watch.reasons() == ["unused"]
    assert (await wait_until_idle(client)).pinned_streams == 0


async def test_nothing_is_held_where_no_request_followed_before(
    clients: Clients, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a handoff, or an output function."""
    script(monkeypatch, call_until(1, LOOK))
    watch = Watch(client)

    class Handoff(Exception):
        """Carries what the tool was called with out of the agent's loop."""

    async def hand_off(name: str, arguments: dict[str, Any]) -> str:
        raise Handoff

    async def program() -> str:
        with pytest.raises(Handoff):
            await agent(clients.first, "You hand off.", TASK, hand_off)
        return await ask(clients.second, TASK)

    unlinked = await program()
    await play_linked("handoff", program)
    assert await play_linked("handoff", program, watch.events) == unlinked
    assert statuses(watch.events) == [None, "hit"] and watch.reasons() == []


async def test_a_request_that_was_given_up_is_not_linked_again(
    clients: Clients, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(after_tools, "SLOWEST_TOOL_SECONDS", 0.2)

    async def program(tool: Tool) -> str:
        return await agent(clients.first, "You look.", TASK, tool)

    script(monkeypatch, call_until(1, LOOK))
    await play_linked("given up", partial(program, fine))
    script(monkeypatch, call_until(1, ("look", {"place": "hill"})))
    unlinked, watch = await program(fine), Watch(client)

    async def look(name: str, arguments: dict[str, Any]) -> str:
        # The link's stream may be gone right after it was opened.
        await watch.until(lambda: bool(watch.own_links and watch.reasons()))
        # Each call has the links planned anew.
        await ask(clients.second, TASK)
        return await fine(name, arguments)

    assert await play_linked("given up", partial(program, look), watch.events) == unlinked
    assert watch.reasons() == ["unused"] and statuses(watch.events) == [None, None, None]


@pytest.mark.parametrize("what", ["tools", "schema"])
async def test_tools_in_another_order_each_time_are_mispredicted_once_at_most(
    clients: Clients, client: EngineClient, guide: str, what: str
) -> None:
    dice = random.Random(3)

    def shuffled() -> list[dict[str, Any]]:
        tools = offer(*dice.sample(["look", "walk", "swim", "rest"], 4))
        if what == "schema":
            tools = offer("look")
            function = tools[0]["function"]
            tools[0]["function"] = dict(dice.sample([*function.items()], len(function)))
        return tools

    async def program() -> list[str]:
        texts = [TASK]
        for role in ("Plan.", "Check.", "Sum up."):
            messages = [
                {"role": "system", "content": f"{guide[:1000]}\n{role}"},
                {"role": "user", "content": texts[-1]},
            ]
            request: dict[str, Any] = {**SETTINGS, "tools": shuffled(), "messages": messages}
            answer: Any = await clients.first.chat.completions.create(**request)
            texts.append(answer.choices[0].message.content or "")
        return texts

    found: list[list[str | None]] = []
    for _ in range(5):
        await client.flush_cache()
        events: list[Event] = []
        await play_linked(f"{what} shuffled", program, events)
        found.append(statuses(events))
    of_all = [status for statuses_of_run in found for status in statuses_of_run]
    assert of_all.count("mispredicted") <= 1, found
    assert "hit" in found[-1]
