"""Test links between real engines: exact, and closed on every path."""

import anyio

from flashmoa.engine import EngineClient
from flashmoa.link.link import Link
from flashmoa.link.prompt import Prompt, Slot
from tests.integration.support import GREEDY, Words, generate, wait_until_idle
from tests.waiting import until


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
            await until(lambda: link.stream_id)
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
        await until(lambda: link.stream_id)
        _, usage = await generate(client, f"{text} go", 3, link.claim())
    assert usage.prompt_stream is not None and usage.prompt_stream.status == "hit"
    await wait_until_idle(client)
