"""Test runs that fail, are cancelled or leave calls out: they give everything back."""

import asyncio
from functools import partial
from typing import Any

import anyio
import httpx
import openai
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.observe import Event, LinkOpened
from flashmoa.observe.calls import calls
from flashmoa.openai import run
from tests.integration.openai.programs import (
    BODY,
    SETTINGS,
    TASK,
    Clients,
    ask,
    chain,
    play_linked,
    statuses,
)
from tests.integration.support import wait_for_streams, wait_until_idle


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


async def test_a_run_waits_for_its_streams_to_be_released(
    clients: Clients, downstream_client: EngineClient, guide: str
) -> None:
    """The second call never comes; its stream is given back when the run ends."""
    await play_linked("short", partial(chain, clients, guide, TASK))
    async with run("short"):
        await ask(clients.first, TASK)
        await wait_for_streams(downstream_client)
    assert (await downstream_client.info()).prompt_streams == 0
