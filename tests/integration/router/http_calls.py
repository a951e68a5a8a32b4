"""Make requests to engines and routers, and read the answers."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import httpx

from flashmoa._concurrency import all_of
from flashmoa.router.forwarding import CHAT
from tests.integration.support import GREEDY, Words, post_json


def chat(content: Any, **more: Any) -> dict[str, Any]:
    """Return the body of a chat completion with one message."""
    # ``ignore_eos``: a model with random weights must not end its answer by chance.
    body = {"model": "default", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    return body | {"messages": [{"role": "user", "content": content}]} | more


async def streamed_text(answer: httpx.Response) -> str:
    """Return the text of a streamed chat completion."""
    written = ""
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                written += choice["delta"].get("content") or ""
    return written


def generation(text: str, tokens: int = 4, **more: Any) -> dict[str, Any]:
    return {"text": text, "sampling_params": {**GREEDY, "max_new_tokens": tokens}, **more}


async def generated(client: httpx.AsyncClient, text: str, **more: Any) -> dict[str, Any]:
    return await post_json(client, "/generate", generation(text, **more))


async def flush(client: httpx.AsyncClient) -> None:
    assert (await client.post("/flush_cache?timeout=20")).status_code == 200


async def wait_for_metric(client: httpx.AsyncClient, line: str, above: float = 0) -> None:
    """Wait until a metric is above a number."""
    with anyio.fail_after(60):
        while await metric(client, line) <= above:  # noqa: ASYNC110 - it sends no event
            await anyio.sleep(0.02)


async def metric(client: httpx.AsyncClient, line: str) -> float:
    """Return the sum of the metrics whose lines begin with ``line``; 0 if there are none."""
    page = (await client.get("/metrics")).text
    return sum(float(row.rsplit(" ", 1)[1]) for row in page.splitlines() if row.startswith(line))


def read(agent: str) -> dict[str, Any]:
    """Return the part of a message that stands for an agent's answer."""
    return {"type": "agent", "agent": agent}


class PlannerAndReader:
    """Two chats. The second chat reads the answer of the first chat between two texts."""

    def __init__(self, words: Words, seed: int) -> None:
        self._plan = words(200, seed)
        self._texts = [words(400, seed + 1), words(20, seed + 2)]

    async def run(
        self, shell: httpx.AsyncClient, is_read: Callable[[], Awaitable[None]]
    ) -> list[Any]:
        """Return the planner's text, and the reader's answer.

        The first request is sent once ``is_read`` has returned.
        """
        before, after = ({"type": "text", "text": text} for text in self._texts)
        question = chat([before, read("planner"), after], workflow="w")

        async def plan() -> str:
            await is_read()
            body = chat(self._plan, max_tokens=120, stream=True, workflow="w", agent="planner")
            async with shell.stream("POST", CHAT, json=body) as answer:
                return await streamed_text(answer)

        return await all_of([plan, lambda: post_json(shell, CHAT, question)])

    async def compare(self, answers: list[Any], engine_url: str) -> list[dict[str, Any]]:
        """Check that an engine answers the same without agents. Return the usages."""
        plan, answer = answers
        async with httpx.AsyncClient(base_url=engine_url, timeout=60) as direct:
            alone = await post_json(direct, CHAT, chat(self._plan, max_tokens=120))
            assert plan == alone["choices"][0]["message"]["content"]
            expected = await post_json(direct, CHAT, chat(plan.join(self._texts)))
        assert answer["choices"] == expected["choices"]
        usage = answer["usage"]
        return [alone["usage"], usage | usage["prompt_tokens_details"]]
