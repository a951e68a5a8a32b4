"""Sends a list of items to an engine, in one request or one by one, and times the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from flashmoa_bench.harness import clock
from flashmoa_bench.harness.rounds import run_concurrently

STOCK, OURS, STREAMED, SINGLE = "stock", "flashmoa", "flashmoa-streamed", "flashmoa-single"
EMBEDDING, CROSS_ENCODER, MIS = "embedding", "cross_encoder", "mis"
_LABELS = [1000, 1001]


@dataclass(frozen=True, slots=True)
class ListAnswer:
    """The answer to one list.

    Attributes:
        seconds: until all results were there.
        first: seconds until the first result was there.
        scores: the items' scores; ``None`` of a model that gives others.
        computed: number of prompt tokens that were computed; ``None`` if the engine does not tell.
    """

    seconds: float
    first: float
    scores: list[list[float]] | None
    computed: int | None


async def ask_list(
    http: httpx.AsyncClient, url: str, way: str, body: Mapping[str, Any]
) -> ListAnswer:
    """Ask an engine in one of the ways, such as ``SINGLE``.

    Args: body: the ``query`` and the ``items``, in token ids.

    Raises: httpx.HTTPError if it does not answer.
    """
    started = clock.now()
    if way == EMBEDDING:
        texts = {"model": "default", "input": [body["query"], *body["items"]]}
        (await http.post(f"{url}/v1/embeddings", json=texts)).raise_for_status()
        seconds = clock.now() - started
        return ListAnswer(seconds, seconds, None, sum(map(len, texts["input"])))
    request = {**body, "label_token_ids": _LABELS, "stream": way == STREAMED}
    if way == STREAMED:
        return await _read_stream(http, url, request, started)
    if way == SINGLE:
        return await _ask_one_by_one(http, url, request, started)
    reply = await http.post(f"{url}/v1/score", json=request)
    seconds = clock.now() - started
    answer = reply.raise_for_status().json()
    scores = None if way == CROSS_ENCODER else answer["scores"]
    return ListAnswer(seconds, seconds, scores, _computed(answer["usage"]))


async def _ask_one_by_one(
    http: httpx.AsyncClient, url: str, request: Mapping[str, Any], started: float
) -> ListAnswer:
    """Ask for each item by a request of its own, all at once."""
    done: list[float] = []

    async def ask(item: Any) -> Any:
        reply = await http.post(f"{url}/v1/score", json={**request, "items": [item]})
        done.append(clock.now() - started)
        return reply.raise_for_status().json()

    answers = await run_concurrently(ask, request["items"])
    computed = [_computed(answer["usage"]) or 0 for answer in answers]
    scores = [answer["scores"][0] for answer in answers]
    return ListAnswer(done[-1], done[0], scores, sum(computed))


async def _read_stream(
    http: httpx.AsyncClient, url: str, request: Mapping[str, Any], started: float
) -> ListAnswer:
    first: float | None = None
    scores: dict[int, list[float]] = {}
    usage: dict[str, Any] = {}
    async with http.stream("POST", f"{url}/v1/score", json=dict(request)) as reply:
        async for line in reply.raise_for_status().aiter_lines():
            if not line.startswith("data: {"):
                continue
            first = clock.now() - started if first is None else first
            event = json.loads(line.removeprefix("data: "))
            if "index" in event:
                scores[event["index"]] = event["scores"]
            usage = event.get("usage", usage)
    seconds = clock.now() - started
    in_order = [scores[index] for index in sorted(scores)]
    return ListAnswer(seconds, first or seconds, in_order, _computed(usage))


def _computed(usage: Mapping[str, Any]) -> int | None:
    details = usage.get("prompt_tokens_details")
    return usage["prompt_tokens"] - details["cached_tokens"] if details else None
