"""Test links between real engines: exact, and closed on every path."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from flashmoa import Link, Prompt, Slot
from flashmoa.engine import EngineClient, StreamGone, StreamUnknown
from flashmoa.engine.local import LocalEngine
from flashmoa.linking.failure_policy import Action
from flashmoa.observe import Event, LinkClosed
from tests.integration.support import GREEDY, generate, wait_until_idle

pytestmark = pytest.mark.anyio
Words = Callable[[int, int], str]


async def test_sixteen_links_at_once_are_exact(
    client: EngineClient, downstream_client: EngineClient, words: Words
) -> None:
    """Sixteen agents write at once, each into the prompt of another one."""
    heads = [words(120, 100 + i) for i in range(16)]
    statuses: list[str] = []

    async def one(index: int) -> None:
        link = Link(downstream_client, Prompt([heads[index], Slot("A"), " go"]), agent="B")
        parts: list[str] = []
        async with anyio.create_task_group() as group:
            group.start_soon(link.run)
            sampling = {**GREEDY, "max_new_tokens": 40}
            async with client.generate(text=words(20, index), sampling=sampling) as deltas:
                async for delta in deltas:
                    parts.append(delta.text)
                    link.feed("A", delta.text)
            link.close_slot("A")
            with anyio.fail_after(30):
                while link.stream_id is None:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            prompt = f"{heads[index]}{''.join(parts)} go"
            got, usage = await generate(downstream_client, prompt, 6, link.claim())
        assert got == (await generate(client, prompt, 6))[0]
        assert usage.prompt_stream is not None
        statuses.append(usage.prompt_stream.status)

    async with anyio.create_task_group() as group:
        for index in range(16):
            group.start_soon(one, index)
    assert statuses == ["hit"] * 16
    await wait_until_idle(client)
    await wait_until_idle(downstream_client)


@pytest.mark.parametrize("policy", ["abort", "finalize"])
async def test_a_failing_upstream_aborts_or_finalizes_its_link(
    client: EngineClient, words: Words, policy: Action
) -> None:
    head = words(100, 81)
    link = Link(client, Prompt([head, Slot("A"), " go"]), agent="B", on_failure=policy)
    async with anyio.create_task_group() as group:
        group.start_soon(link.run)
        link.feed("A", " some of it")
        with anyio.fail_after(30):
            while link.stream_id is None:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        link.fail_slot("A")
        if policy == "finalize":
            answer, usage = await generate(client, f"{head} some of it go", 3, link.claim())
            assert answer
            assert usage.prompt_stream is not None and usage.prompt_stream.status == "hit"
        else:
            assert link.claim() is None
    await wait_until_idle(client)


async def test_a_prompt_that_begins_with_a_text_still_to_come_is_linked(
    client: EngineClient, words: Words
) -> None:
    link = Link(client, Prompt([Slot("A"), " go"]), agent="B")
    async with anyio.create_task_group() as group:
        group.start_soon(link.run)
        await anyio.wait_all_tasks_blocked()
        text = words(100, 86)
        link.feed("A", text)
        link.close_slot("A")
        with anyio.fail_after(30):
            while link.stream_id is None:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        _, usage = await generate(client, f"{text} go", 3, link.claim())
    assert usage.prompt_stream is not None and usage.prompt_stream.status == "hit"
    await wait_until_idle(client)


async def test_only_a_link_that_no_request_came_for_has_expired(
    client: EngineClient, words: Words
) -> None:
    unused = Link(client, Prompt([words(100, 87)]), agent="B", unused_seconds=0.05)
    await unused.run()
    assert unused.has_expired and unused.claim() is None
    used = Link(client, Prompt([words(100, 88)]), agent="B")
    async with anyio.create_task_group() as group:
        group.start_soon(used.run)
        with anyio.fail_after(30):
            while used.stream_id is None:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        assert used.claim() == used.stream_id
    assert not used.has_expired
    await client.delete_stream(used.stream_id or "")
    await wait_until_idle(client)


async def test_cancelling_a_link_closes_its_stream(client: EngineClient, words: Words) -> None:
    link = Link(client, Prompt([words(100, 82), Slot("A")]), agent="B")
    async with anyio.create_task_group() as group:
        group.start_soon(link.run)
        with anyio.fail_after(30):
            while link.stream_id is None:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        group.cancel_scope.cancel()
    assert (await wait_until_idle(client)).pinned_streams == 0


async def test_a_link_to_a_plain_engine_that_is_off_or_to_a_dead_one_ends_without_an_error(
    plain_engine: LocalEngine, words: Words
) -> None:
    for url in (plain_engine.url, "http://127.0.0.1:9"):
        events: list[Event] = []
        async with EngineClient(url, without_plugin="off") as other:
            link = Link(
                other, Prompt([words(20, 83), Slot("A")]), agent="B", listener=events.append
            )
            await link.run()
        assert link.claim() is None
        assert [type(event) for event in events] == [LinkClosed]


@pytest.mark.slow
async def test_a_slow_writer_keeps_its_stream(engine: LocalEngine, words: Words) -> None:
    """It pauses longer than a stream lives, before and after its text."""
    head, events = words(100, 84), list[Event]()
    async with EngineClient(engine.url, timeout=60, stream_ttl_seconds=2.0) as client:
        prompt = Prompt([head, Slot("A"), " go"])
        link = Link(client, prompt, agent="B", listener=events.append)
        async with anyio.create_task_group() as group:
            group.start_soon(link.run)
            await anyio.sleep(3.5)
            link.feed("A", " some of it")
            link.close_slot("A")
            await anyio.sleep(3.5)
            text = f"{head} some of it go"
            _, usage = await generate(client, text, 3, link.claim())
        assert usage.prompt_stream is not None and usage.prompt_stream.status == "hit"
        assert [event.reason for event in events if isinstance(event, LinkClosed)] == ["used"]
        await wait_until_idle(client)


async def test_a_vanished_clients_stream_expires(client: EngineClient, words: Words) -> None:
    opened = await client.open_stream(text=words(100, 85), ttl_seconds=1.0)
    assert opened.ttl_seconds == 1.0
    assert (await client.keep_alive(opened.id)).id == opened.id
    assert (await wait_until_idle(client)).pinned_streams == 0
    with pytest.raises(StreamGone):
        await client.keep_alive(opened.id)
    with pytest.raises(StreamUnknown):
        await client.keep_alive("no-such-stream")
