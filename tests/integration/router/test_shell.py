"""Test requests that read each other's answers; one engine is both prefill engine and PD router."""

from collections.abc import AsyncGenerator
from typing import Any

import anyio
import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine
from flashmoa.router.forwarding import CHAT
from flashmoa.router.shell.application import ShellOptions
from tests.event_loop import own_task
from tests.integration.router.conftest import serve_router
from tests.integration.router.http_calls import (
    PlannerAndReader,
    chat,
    generation,
    read,
    streamed_text,
)
from tests.integration.support import Words, post_json, wait_for_streams, wait_until_idle


@pytest.fixture
async def shell(engine: LocalEngine) -> AsyncGenerator[httpx.AsyncClient]:
    options = ShellOptions(engine.url, engine.url, agent_seconds=30)
    async with own_task(serve_router(options)) as client:
        yield client


async def test_prompt_is_prefilled_while_its_agents_write(
    shell: httpx.AsyncClient, engine: LocalEngine, client: EngineClient, words: Words
) -> None:
    both = PlannerAndReader(words, 2000)
    answers = await both.run(shell, lambda: wait_for_prefill(client))
    _, usage = await both.compare(answers, engine.url)
    assert usage["cached_tokens"] >= 0.99 * usage["prompt_tokens"]
    await wait_until_idle(client)


async def wait_for_prefill(client: EngineClient) -> None:
    """Wait until the first text of a prompt stream is computed."""
    with anyio.fail_after(30):
        while (await client.info()).kv[0].protected < 380:  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def test_agent_reads_several_answers_and_streams_its_own(
    shell: httpx.AsyncClient, words: Words
) -> None:
    written: dict[str, str] = {}

    async def ask(name: str, body: dict[str, Any]) -> None:
        async with shell.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            written[name] = await streamed_text(answer)

    def agent(name: str, *reads: str) -> dict[str, Any]:
        content = [{"type": "text", "text": words(30, 2050)}]
        content += [read(one) for one in reads]
        return chat(content, agent=name, workflow="tree", stream=True)

    async with anyio.create_task_group() as group:
        group.start_soon(ask, "judge", agent("judge", "left", "right"))
        for name in ("left", "right"):
            group.start_soon(ask, name, agent(name))
    assert all(written[name] for name in ("left", "right", "judge"))
    content = words(30, 2050) + written["left"] + written["right"]
    await ask("again", chat(content, stream=True))
    assert written["again"] == written["judge"]


async def test_reader_of_a_failed_agent_gets_the_reason(
    engine: LocalEngine, client: EngineClient, words: Words
) -> None:
    options = ShellOptions(engine.url, engine.url, agent_seconds=0.2)
    question = chat([{"type": "text", "text": "So: "}, read("a")])
    async with serve_router(options) as shell:
        answer = await shell.post(CHAT, json=question)
        assert answer.status_code == 424 and "in time" in answer.json()["error"]["message"]
    async with serve_router(ShellOptions(engine.url, engine.url)) as shell:
        # The writer's client disconnects in the middle of the answer.
        responses: list[httpx.Response] = []

        async def wait() -> None:
            responses.append(await shell.post(CHAT, json=question))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await wait_for_streams(client)
            body = chat(words(20, 2020), max_tokens=4000, agent="a", stream=True)
            async with shell.stream("POST", CHAT, json=body) as writing:
                async for _ in writing.aiter_lines():
                    break
        assert responses[0].status_code == 424 and "was left" in responses[0].text
        refused = await shell.post(CHAT, json=chat("x", agent="a", temperature=-1))
        assert refused.status_code == 400
        answer = await shell.post(CHAT, json=question)
        assert answer.status_code == 424 and "was refused" in answer.text
    await wait_until_idle(client)


async def test_shell_router_looks_like_one_engine_to_clients(
    shell: httpx.AsyncClient, client: EngineClient, words: Words
) -> None:
    text, more = words(100, 2030), words(50, 2031)
    async with EngineClient(str(shell.base_url)) as linked:
        assert "prompt_streams" in (await linked.info()).capabilities
        stream = await linked.open_stream(text=text)
        await linked.append(stream.id, 0, text=more, end=True)
        body = generation(text + more, tokens=4) | {"prompt_stream_id": stream.id}
        answer = await post_json(shell, "/generate", body)
        assert answer["meta_info"]["prompt_tokens"] > 140
    assert (await shell.get("/v1/models")).json()["data"]
    await wait_until_idle(client)
