"""Test that runs of a program are linked from the second on, and answer the same."""

import asyncio
import sys
from functools import partial
from pathlib import Path

import anyio
import openai
import pytest

from flashmoa import EngineSettings
from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import Event, LinkOpened
from flashmoa.observe.calls import calls
from flashmoa.observe.summary import summary
from flashmoa.openai import AsyncOpenAI, instrument, run
from tests.integration.openai.programs import (
    BODY,
    PROGRAMS,
    SETTINGS,
    TASK,
    Agent,
    Clients,
    ask,
    chain,
    closed,
    links_opened,
    play,
    play_linked,
    random_program,
    statuses,
)
from tests.integration.support import slow_except, wait_until_idle


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
    whole = summary(calls(events))
    assert (whole.linked, whole.untold) == (2, 2 if stream else 0)
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
        await links_opened(1)
        return await ask(clients.second, f"{guide}\nYou read plans.", f"{verb} faults:\n{plan}")

    await play_linked("way", partial(program, "Find"))
    events: list[Event] = []
    mended = partial(program, "Mend")
    assert await play_linked("way", mended, events) == await mended()
    assert statuses(events) == [None, "mispredicted"]


async def test_reviewers_at_once_are_linked_to_the_draft(clients: Clients, guide: str) -> None:
    async def program() -> list[str]:
        draft = await ask(clients.first, TASK)
        await links_opened(2)
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
    # With another key than the other client of this server, it may be another user's.
    key = clients.second.api_key
    async with openai.AsyncOpenAI(base_url=f"{downstream.url}/v1", api_key=key) as stock:

        async def check(plan: str) -> str:
            messages = [{"role": "user", "content": f"{guide}\nCheck:\n{plan}"}]
            request = {"messages": messages, "extra_body": BODY, **SETTINGS}
            client = instrument(stock).client if way == "linked" else clients.second
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
            plan = await ask(clients.first, TASK)
            await links_opened(1)
            return await check(plan)

        unlinked = await program()
        await play_linked(way, program)
        events: list[Event] = []
        assert await play_linked(way, program, events) == unlinked
        assert closed(events) == ["used"]


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
        instrument(plain, EngineSettings(without_plugin="off"))
        async with run("plain", listener=events.append):
            assert await program() == unlinked
        assert not [event for event in events if isinstance(event, LinkOpened)]


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_random_programs_answer_the_same_linked(clients: Clients, guide: str) -> None:
    async def call(agent: Agent, content: str) -> str:
        chosen = clients.first if agent.is_first else clients.second
        return await ask(chosen, f"{guide[:2000]}\n{agent.role}", content, stream=agent.streams)

    reasons: list[str] = []
    for seed in range(PROGRAMS):
        program = partial(play, random_program(seed), call)
        unlinked = await program()
        await play_linked(f"random {seed}", program)
        events: list[Event] = []
        assert await play_linked(f"random {seed}", program, events) == unlinked
        reasons += closed(events)
    assert reasons.count("used") > 0.9 * len(reasons)


REMEMBERING = """
import asyncio, sys
from flashmoa.observe.calls import calls
from flashmoa.observe.summary import link_status
from flashmoa.openai import AsyncOpenAI, agent, run

async def main(url, folder, guide):
    async with AsyncOpenAI(base_url=url) as client, run("trip", remember=folder) as report:
        text = "Go."
        for name, start in (("writer", guide[:1000]), ("reader", guide[1000:5000])):
            messages = [{"role": "user", "content": f"{start} {text}"}]
            with agent(name):
                answer = await client.chat.completions.create(
                    model="m", messages=messages, temperature=0, max_tokens=200
                )
            text = answer.choices[0].message.content
    print(*[link_status(call) for call in report.calls], text)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_the_first_run_of_a_second_process_is_linked(
    engine: LocalEngine, client: EngineClient, guide: str, tmp_path: Path
) -> None:
    said: list[str] = []
    for _ in range(2):
        await client.flush_cache()
        command = [sys.executable, "-c", REMEMBERING, engine.url, str(tmp_path), guide]
        said.append((await anyio.run_process(command)).stdout.decode())
    assert said[0].startswith("none none ") and said[1].startswith("first hit ")
    assert said[0].split()[2:] == said[1].split()[2:]
    await wait_until_idle(client)
