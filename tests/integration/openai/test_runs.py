"""Test that runs of a program are linked from the second on, and answer the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import Event, LinkOpened
from flashmoa.observe.calls import calls
from flashmoa.observe.prefix_breaks import find_breaks
from flashmoa.observe.trace import read
from flashmoa.openai import AsyncOpenAI, link, run
from tests.integration.openai.programs import (
    BODY,
    SETTINGS,
    Agent,
    Clients,
    ask,
    chain,
    closed,
    open_clients,
    play,
    play_linked,
    random_program,
    statuses,
)
from tests.integration.support import slow_except, wait_for_streams, wait_until_idle

pytestmark = pytest.mark.anyio

TASK = "Plan three days in Nepal for two people."


@pytest.fixture
async def clients(
    engine: LocalEngine,
    downstream: LocalEngine,
    client: EngineClient,
    downstream_client: EngineClient,
) -> AsyncGenerator[Clients]:
    for each in (client, downstream_client):
        await each.flush_cache()
    async with open_clients(engine.url, downstream.url) as opened:
        yield opened
    for each in (client, downstream_client):
        await wait_until_idle(each)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_second_run_is_linked_and_answers_the_same(
    clients: Clients, guide: str, stream: bool
) -> None:
    program, name = partial(chain, clients, guide, TASK, stream=stream), f"twice {stream}"
    unlinked = await program()
    events: list[Event] = []
    assert await play_linked(name, program) == unlinked
    assert await play_linked(name, program, events) == unlinked
    assert closed(events) == ["used", "used"]
    if not stream:  # OpenAI's client asks for no usage in streams.
        assert statuses(events) == [None, "hit", "hit"]


async def test_a_run_with_another_task_is_linked_too(clients: Clients, guide: str) -> None:
    await play_linked("task", partial(chain, clients, guide, TASK))
    program = partial(chain, clients, guide, "Plan two weeks in Norway for a family.")
    events: list[Event] = []
    linked = await play_linked("task", program, events)
    assert statuses(events) == [None, "hit", "hit"] and linked == await program()


async def test_a_program_that_goes_another_way_answers_the_same(
    clients: Clients, guide: str
) -> None:
    async def program(verb: str) -> str:
        plan = await ask(clients.first, TASK)
        return await ask(clients.second, f"{guide}\nYou read plans.", f"{verb} faults:\n{plan}")

    await play_linked("way", partial(program, "Find"))
    events: list[Event] = []
    mended = partial(program, "Mend")
    assert await play_linked("way", mended, events) == await mended()
    assert statuses(events) == [None, "mispredicted"]


async def test_reviewers_at_once_are_linked_to_the_draft(clients: Clients, guide: str) -> None:
    async def program() -> list[str]:
        draft = await ask(clients.first, TASK)
        reviews = [ask(clients.second, f"{guide}\nYou are {who}.", draft) for who in ("A", "B")]
        return [draft, *await asyncio.gather(*reviews)]

    unlinked = await program()
    await play_linked("reviewers", program)
    events: list[Event] = []
    assert await play_linked("reviewers", program, events) == unlinked
    assert statuses(events) == [None, "hit", "hit"]


@pytest.mark.parametrize(
    "way", slow_except(["stream", "parse", "raw", "copy", "linked"], "raw", "linked")
)
async def test_every_way_to_call_the_client_is_linked(
    clients: Clients, downstream: LocalEngine, guide: str, way: str
) -> None:
    async with openai.AsyncOpenAI(base_url=f"{downstream.url}/v1", api_key="none") as stock:

        async def check(plan: str) -> str:
            messages = [{"role": "user", "content": f"{guide}\nCheck:\n{plan}"}]
            request = {"messages": messages, "extra_body": BODY, **SETTINGS}
            client = link(stock) if way == "linked" else clients.second
            if way in ("stream", "parse"):
                # Both refuse an answer that is cut, and their error has it.
                with pytest.raises(openai.LengthFinishReasonError) as cut:
                    if way == "stream":
                        async with client.chat.completions.stream(**request) as stream:  # type: ignore[arg-type]
                            await stream.get_final_completion()
                    else:
                        await client.chat.completions.parse(**request)  # type: ignore[arg-type]
                return cut.value.completion.choices[0].message.content or ""
            if way == "raw":
                raw = await client.chat.completions.with_raw_response.create(**request)  # type: ignore[arg-type]
                return raw.parse().choices[0].message.content or ""
            if way == "copy":
                client = client.with_options(timeout=60)
            answer = await client.chat.completions.create(**request)  # type: ignore[arg-type]
            return answer.choices[0].message.content or ""

        async def program() -> str:
            return await check(await ask(clients.first, TASK))

        unlinked = await program()
        await play_linked(way, program)
        events: list[Event] = []
        assert await play_linked(way, program, events) == unlinked
        assert closed(events) == ["used"]


async def test_calls_outside_of_runs_and_in_closed_ones_are_plain(
    clients: Clients, engine: LocalEngine
) -> None:
    events: list[Event] = []
    started, release = anyio.Event(), anyio.Event()

    async def late() -> str:
        started.set()
        await release.wait()
        return await ask(clients.first, TASK)

    async with run("closed", listener=events.append):
        task = asyncio.create_task(late())
        await started.wait()
    release.set()
    assert await task == await ask(clients.first, TASK)
    assert events == []


async def test_a_run_within_a_run_is_part_of_it(clients: Clients, guide: str) -> None:
    async def program() -> list[str]:
        async with run("inner"):
            return await chain(clients, guide, TASK)

    await play_linked("outer", program)
    events: list[Event] = []
    await play_linked("outer", program, events)
    assert statuses(events) == [None, "hit", "hit"]


async def test_a_failed_call_ends_its_links_and_its_run_is_not_learned(
    clients: Clients, guide: str
) -> None:
    async def failing() -> list[str]:
        request = {"messages": [{"role": "user", "content": TASK}], **SETTINGS, "max_tokens": -1}
        await clients.first.chat.completions.create(**request)  # type: ignore[call-overload]
        raise AssertionError

    program = partial(chain, clients, guide, TASK)
    await play_linked("failing", program)
    with pytest.raises(openai.BadRequestError):
        await play_linked("failing", failing)
    events: list[Event] = []
    await play_linked("failing", program, events)
    assert statuses(events) == [None, "hit", "hit"]


async def test_a_cancelled_run_gives_everything_back(
    clients: Clients, client: EngineClient, downstream_client: EngineClient, guide: str
) -> None:
    program = partial(chain, clients, guide, TASK)
    await play_linked("cancelled", program)
    opened = anyio.Event()

    def listener(event: Event) -> None:
        if isinstance(event, LinkOpened):
            opened.set()

    async def cancelled() -> None:
        async with run("cancelled", listener=listener):
            await program()

    task = asyncio.create_task(cancelled())
    await opened.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for each in (client, downstream_client):
        assert (await wait_until_idle(each)).pinned_streams == 0


async def test_a_stream_that_is_left_early_gives_everything_back(
    clients: Clients, downstream_client: EngineClient, guide: str
) -> None:
    async def program(pieces: int) -> str:
        messages = [{"role": "user", "content": TASK}]
        request = {"messages": messages, "extra_body": BODY, **SETTINGS}
        text = ""
        async with await clients.first.chat.completions.create(**request, stream=True) as chunks:  # type: ignore[call-overload]
            async for chunk in chunks:
                text += chunk.choices[0].delta.content or ""
                pieces -= 1
                if not pieces:
                    return text
        return await ask(clients.second, guide, f"Check:\n{text}")

    whole = await play_linked("left", partial(program, 1000))
    assert await play_linked("left", partial(program, 5))
    await wait_until_idle(downstream_client)
    assert await play_linked("left", partial(program, 1000)) == whole


async def test_a_server_without_the_plugin_prefills_in_steps_unless_told_not_to(
    plain_engine: LocalEngine, guide: str
) -> None:
    async with AsyncOpenAI(base_url=plain_engine.url) as plain:
        program = partial(chain, Clients(plain, plain), guide, TASK)
        unlinked = await program()
        assert await play_linked("plain", program) == unlinked
        events: list[Event] = []
        assert await play_linked("plain", program, events) == unlinked
        assert [event.plain for event in events if isinstance(event, LinkOpened)] == [True, True]
        events.clear()
        async with run("plain", without_plugin="off", listener=events.append):
            assert await program() == unlinked
        assert not [event for event in events if isinstance(event, LinkOpened)]
    with pytest.raises(ValueError, match="without_plugin"):
        run("plain", without_plugin="on")  # type: ignore[arg-type]


async def test_a_retried_request_is_one_call(
    clients: Clients, guide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = partial(chain, clients, guide, TASK)
    unlinked = await play_linked("retries", program)
    retrying = Clients(clients.first, clients.second.with_options(max_retries=2))
    http: Any = clients.second._client
    send, failures = http.send, 1

    async def flaky(self: Any, request: Any, **options: Any) -> Any:
        nonlocal failures
        if self is http and failures:
            failures -= 1
            raise httpx.ConnectError("no network", request=request)
        return await httpx.AsyncClient.send(self, request, **options)

    # Below FlashMoA's hook, which calls the class's method.
    monkeypatch.setattr(type(http), "send", flaky, raising=False)
    events: list[Event] = []
    assert await play_linked("retries", partial(chain, retrying, guide, TASK), events) == unlinked
    assert failures == 0 and http.send is send
    assert [call.agent for call in calls(events)].count(calls(events)[1].agent) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_fifty_random_programs_answer_the_same_linked(clients: Clients, guide: str) -> None:
    async def call(agent: Agent, content: str) -> str:
        chosen = clients.first if agent.is_first else clients.second
        return await ask(chosen, f"{guide[:2000]}\n{agent.role}", content, stream=agent.streams)

    reasons: list[str] = []
    for seed in range(50):
        program = partial(play, random_program(seed), call, TASK)
        unlinked = await program()
        await play_linked(f"random {seed}", program)
        events: list[Event] = []
        assert await play_linked(f"random {seed}", program, events) == unlinked
        reasons += closed(events)
    assert reasons.count("used") > 0.9 * len(reasons)


async def test_a_run_waits_for_its_streams_to_be_released(
    clients: Clients, downstream_client: EngineClient, guide: str
) -> None:
    """The second call never comes; its stream is given back when the run ends."""
    await play_linked("short", partial(chain, clients, guide, TASK))
    async with run("short"):
        await ask(clients.first, TASK)
        await wait_for_streams(downstream_client)
    assert (await downstream_client.info()).prompt_streams == 0


async def test_a_trace_says_why_a_prefix_broke(
    clients: Clients, guide: str, tmp_path: Path
) -> None:
    async with run("trace", trace=tmp_path / "run.jsonl", trace_prompts=True):
        for time in ("12:01", "12:07"):
            await ask(clients.first, f"It is {time}. {guide}", TASK)
    (broken,) = find_breaks(calls(read(tmp_path / "run.jsonl")))
    assert "12:0" in broken.describe()
