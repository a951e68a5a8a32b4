"""Make requests to engines and routers, and read the answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import anyio
import httpx

from flashmoa.engine import EngineClient
from tests.integration.support import GREEDY


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


async def request_reading(
    client: EngineClient, form: str, texts: Sequence[str], agent: str
) -> tuple[str, dict[str, Any]]:
    """Return a request that reads an agent's answer between two texts."""
    return await _request(client, form, texts, {"agent": agent})


async def request_with_answer(
    client: EngineClient, form: str, texts: Sequence[str], answer: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return the same request with the answer itself, as a client would send it to an engine."""
    ids = answer["output_ids"]
    path, body = await _request(client, form, texts, {"text": answer["text"], "input_ids": ids})
    if form == "chat":
        return path, chat("".join(part["text"] for part in body["messages"][0]["content"]))
    prompt = body.pop("prompt")
    if form == "tokens":
        return path, body | {"input_ids": [token for part in prompt for token in part["input_ids"]]}
    return path, body | {"text": "".join(part["text"] for part in prompt)}


async def _request(
    client: EngineClient, form: str, texts: Sequence[str], middle: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    if form == "chat":
        kind = {"type": "agent" if "agent" in middle else "text"}
        content = [{"type": "text", "text": text} for text in texts]
        content.insert(1, kind | middle)
        return "/v1/chat/completions", chat(content)
    if form == "tokens":
        parts = [{"input_ids": ids} for ids in await client.tokenize(texts)]
    else:
        parts = [{"text": text} for text in texts]
    body = generation("", 8) | {"prompt": [parts[0], middle, parts[1]]}
    del body["text"]
    return "/generate", body


def generation(text: str, tokens: int = 4, **more: Any) -> dict[str, Any]:
    return {"text": text, "sampling_params": {**GREEDY, "max_new_tokens": tokens}, **more}


async def post_json(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def generated(client: httpx.AsyncClient, text: str, **more: Any) -> dict[str, Any]:
    return await post_json(client, "/generate", generation(text, **more))


async def flush(client: httpx.AsyncClient) -> None:
    assert (await client.post("/flush_cache?timeout=20")).status_code == 200


async def wait_for_metric(client: httpx.AsyncClient, line: str) -> None:
    """Wait until a metric is not 0."""
    with anyio.fail_after(30):
        while not await metric(client, line):  # noqa: ASYNC110 - it sends no event
            await anyio.sleep(0.02)


async def metric(client: httpx.AsyncClient, line: str) -> float:
    """Return the sum of the metrics whose lines begin with ``line``; 0 if there are none."""
    page = (await client.get("/metrics")).text
    return sum(float(row.rsplit(" ", 1)[1]) for row in page.splitlines() if row.startswith(line))
