"""Measure the CPU time, for each token, of hearing answers while they are written.

An OpenAI client asks an engine for the same answers as *whole* answers, with the header that names
a call (*marked*), named with a channel that brings the text (*heard*), and *streamed*. The CPU time
of the client is measured, and of a local engine's HTTP process and detokenizer.
"""

from __future__ import annotations

import os
import time
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import anyio
from openai import AsyncOpenAI

from flashmoa._concurrency import TaskHost
from flashmoa.engine import EngineClient
from flashmoa.engine.wire import CALL_HEADER
from flashmoa.errors import EngineError
from flashmoa.link.hearing import CallChannel
from flashmoa_bench.harness.command_line import Option, command, positive
from flashmoa_bench.harness.engines import Role
from flashmoa_bench.harness.report import Column, Report
from flashmoa_bench.harness.rounds import RoundPlayer, run_concurrently

Way = Literal["whole", "marked", "heard", "streamed"]
WAYS: tuple[Way, ...] = get_args(Way)
ROLES = (Role("flashmoa", plugin=True),)


@dataclass(frozen=True, slots=True)
class AnsweredRound:
    """One way's answers: seconds of CPU time in all, number of pieces of text, and the texts."""

    client: float
    engine: float
    pieces: int
    texts: list[str]


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of CPU time for each token in one way; medians."""

    calls: Annotated[int, Column("calls at once")]
    way: Annotated[Way, Column("way")]
    client: Annotated[float, Column("client", "{:.0f} us", 1e6)]
    engine: Annotated[float, Column("HTTP and detokenizer", "{:.0f} us", 1e6)]
    pieces: Annotated[float, Column("pieces of a text", "{:.0f}")]


async def _measure(report: Report) -> None:
    options, costs = report.options, list[Cost]()
    ways = len(WAYS) * len(options.calls)
    async with report.connect(ROLES, 65536) as engines, AsyncExitStack() as stack:
        engine = engines["flashmoa"]
        player = stack.enter_context(RoundPlayer(report.console, options.repeats, ways))
        host = TaskHost("The benchmark's channel has failed")
        stack.push_async_callback(host.close)
        client = await stack.enter_async_context(
            AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="EMPTY", timeout=600)
        )
        for calls in options.calls:
            play = partial(_play, client, engine, host, calls, options.tokens)
            rounds = await player.play(WAYS, play, f"{calls} calls:")
            if len({tuple(each.texts) for way in WAYS for each in rounds[way]}) > 1:
                raise EngineError("the engine has answered the same question in several ways")
            costs += [
                Cost(
                    calls=calls,
                    way=way,
                    client=median(each.client for each in rounds[way]) / (calls * options.tokens),
                    engine=median(each.engine for each in rounds[way]) / (calls * options.tokens),
                    pieces=median(each.pieces for each in rounds[way]) / calls,
                )
                for way in WAYS
            ]
    report.show("CPU time for each token", costs)
    report.save({"costs": costs})


async def _play(
    client: AsyncOpenAI, engine: EngineClient, host: TaskHost, calls: int, tokens: int, way: Way
) -> AnsweredRound:
    """Ask for all answers at once, in one way."""
    pieces: list[str] = []

    async def ask(number: int) -> str:
        request: dict[str, Any] = {
            "model": "default",
            "messages": [{"role": "user", "content": f"Go on from {number}."}],
            "max_tokens": tokens,
            "temperature": 0,
            "extra_body": {"ignore_eos": True},
        }
        create: Any = client.chat.completions.create  # Its overloads accept no such dictionary.
        if way == "streamed":
            chunks = await create(**request, stream=True)
            found = [each.choices[0].delta.content async for each in chunks if each.choices]
            own = [text for text in found if text]
            pieces.extend(own)
            return "".join(own)
        if way == "heard":
            with channel.hearing(pieces.append) as call:
                answer = await create(**request, extra_headers=channel.headers(call))
        else:
            headers = {CALL_HEADER: str(uuid.uuid4())} if way == "marked" else {}
            answer = await create(**request, extra_headers=headers)
        return answer.choices[0].message.content

    channel = CallChannel(engine, host)
    if way == "heard":
        channel.open()
        await anyio.sleep(0.3)
    try:
        before, engine_before = time.process_time(), _engine_seconds(engine.url)
        texts = await run_concurrently(ask, range(calls))
        seconds = time.process_time() - before
        engine_seconds = _engine_seconds(engine.url) - engine_before
        return AnsweredRound(seconds, engine_seconds, len(pieces), texts)
    finally:
        channel.close()


def _engine_seconds(url: str) -> float:
    """Return the CPU time of an engine's HTTP process and detokenizer; 0 if it runs elsewhere."""
    import psutil  # SGLang has it.

    own, port = psutil.Process(os.getpid()), urlsplit(url).port
    for process in own.children(recursive=True):
        if any(each.laddr.port == port for each in process.net_connections("tcp")):
            detokenizers = [each for each in process.children() if "detoken" in each.name()]
            times = [each.cpu_times() for each in (process, *detokenizers)]
            return sum(each.user + each.system for each in times)
    return 0.0


main = command(
    "client",
    __doc__,
    _measure,
    ROLES,
    Option("--tokens", positive, 400, "of an answer"),
    Option("--calls", positive, [1, 8], "at once"),
)
