"""Measure the event loop's time that links cost an OpenAI client, in microseconds for each token.

A scripted transport answers in this process, so that no engine, socket or waiting counts. Each way
asks for an answer as a whole, as a stream, and as a stream with log-probabilities, with the stock
client and with one whose calls are observed in a run. Times are CPU seconds, the least of several
rounds, since whatever else the machine does only adds to them.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
from openai import AsyncOpenAI

from flashmoa.openai import instrument, run
from flashmoa_bench.harness.command_line import Option, command, positive
from flashmoa_bench.harness.report import Column, Report

_US = 1e6
_KINDS = ("whole", "streamed", "logprobs")


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of CPU for each token of an answer: of the stock client, and what a run adds."""

    tokens: Annotated[int, Column("tokens of the answer")]
    whole: Annotated[float, Column("whole: alone", "{:.1f}", _US)]
    whole_added: Annotated[float, Column("in a run, more", "{:.1f}", _US)]
    streamed: Annotated[float, Column("streamed: alone", "{:.1f}", _US)]
    streamed_added: Annotated[float, Column("in a run, more", "{:.1f}", _US)]
    logprobs: Annotated[float, Column("with logprobs: alone", "{:.1f}", _US)]
    logprobs_added: Annotated[float, Column("in a run, more", "{:.1f}", _US)]


class ScriptedTransport(httpx.AsyncBaseTransport):
    """Answers chat completions with as many tokens, as SGLang does: an event for each token."""

    def __init__(self, tokens: int) -> None:
        logprob = {"token": " word", "logprob": -0.5, "bytes": [1, 2, 3]}
        tops = {"content": [{**logprob, "top_logprobs": [logprob] * 3}]}
        begin = _event({"role": "assistant", "content": ""})
        end = _event({}, "stop"), b"data: [DONE]\n\n"
        word = {"content": " word", "reasoning_content": None, "tool_calls": None}
        self._events = {
            kind: [begin, *([_event(word, None, more)] * tokens), *end]
            for kind, more in (("streamed", None), ("logprobs", tops))
        }
        message = {"role": "assistant", "content": " word" * tokens}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self._whole = json.dumps(
            {**_TOP, "object": "chat.completion", "choices": [choice]}
        ).encode()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body: dict[str, Any] = json.loads(request.content or b"{}")
        if not request.url.path.endswith("/chat/completions"):
            return httpx.Response(404, request=request)
        if not body.get("stream"):
            headers = {"content-type": "application/json"}
            return httpx.Response(200, headers=headers, content=self._whole, request=request)
        stream = _Events(self._events["logprobs" if body.get("logprobs") else "streamed"])
        headers = {"content-type": "text/event-stream"}
        return httpx.Response(200, headers=headers, stream=stream, request=request)


class _Events(httpx.AsyncByteStream):
    def __init__(self, events: list[bytes]) -> None:
        self._events = events

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        for event in self._events:
            yield event


_TOP = {"id": "1" * 32, "created": 1, "model": "m"}


def _event(delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
    chunk = {**_TOP, "object": "chat.completion.chunk", "choices": [choice], "usage": None}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


async def _measure(report: Report) -> None:
    costs = [await _measure_length(tokens, report) for tokens in report.options.tokens]
    report.show("CPU time for each token, in microseconds", costs)
    report.save({"costs": costs})


async def _measure_length(tokens: int, report: Report) -> Cost:
    http = httpx.AsyncClient(transport=ScriptedTransport(tokens))
    client = AsyncOpenAI(base_url="http://engine/v1", api_key="EMPTY", http_client=http)
    instrument(client)

    async def ask(kind: str) -> None:
        options: dict[str, Any] = {
            "stream": kind != "whole",
            "logprobs": kind == "logprobs" or None,
        }
        create: Any = client.chat.completions.create  # Its overloads take no such dictionary.
        answer = await create(
            model="m", messages=[{"role": "user", "content": "Go on."}], **options
        )
        if kind != "whole":
            async for _ in answer:
                pass

    async def ask_in_run(kind: str) -> None:
        async with run("client"):
            await ask(kind)

    found: dict[str, float] = {}
    for kind in _KINDS:
        alone, observed = await _least_seconds((ask, ask_in_run), kind, report.options.repeats)
        found |= {kind: alone / tokens, f"{kind}_added": (observed - alone) / tokens}
    await client.close()
    return Cost(tokens, **found)


async def _least_seconds(
    ways: Sequence[Callable[[str], Awaitable[None]]], kind: str, repeats: int
) -> list[float]:
    """Return the least CPU seconds of each way, which take turns."""
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(1 + repeats):
        for way, found in zip(ways, seconds, strict=True):
            start = time.process_time()
            await way(kind)
            found.append(time.process_time() - start)
    return [min(found[1:]) for found in seconds]  # The first round warms up.


main = command(
    "client",
    __doc__,
    _measure,
    (),
    (
        Option("--tokens", positive, [500, 2000, 8000], "of an answer"),
        Option("--repeats", positive, 7, "rounds, of which the least time counts"),
    ),
)
