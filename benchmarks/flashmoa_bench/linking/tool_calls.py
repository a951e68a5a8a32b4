"""Play agents that answer with calls of tools, and ask again when the tools have run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import anyio

from flashmoa.engine import EngineClient
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.requests import Feeder, ask, random_ids
from flashmoa_bench.harness.rounds import run_concurrently


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that takes between ``least`` and ``most`` seconds, and returns ``tokens`` tokens."""

    least: float
    most: float
    tokens: int


@dataclass(frozen=True, slots=True)
class ToolAgents:
    """Agents that call tools, each several times; they begin at once and share no text.

    Attributes:
        prompt, answer: tokens of an agent's first prompt, and of each of its answers.
        calls: how often each agent calls its tools.
        tools: the tools of one call, which run at once, in the order in which they end.
        reflects: whether a prompt after tools begins in another way than the one before.
        strangers: how many requests come in a second that belong to none of the agents; each has
            half as many tokens as an agent's first prompt.
    """

    agents: int
    prompt: int
    answer: int
    calls: int
    tools: tuple[Tool, ...]
    reflects: bool = False
    strangers: float = 0.0

    @property
    def result(self) -> int:
        """Return the number of tokens of all results of one call."""
        return sum(tool.tokens for tool in self.tools)

    @property
    def context(self) -> int:
        """Return the number of tokens of an agent in the end."""
        return self.prompt + self.calls * (self.answer + self.result) + self.answer


@dataclass(frozen=True, slots=True)
class AfterTools:
    """A request after tools.

    Attributes:
        seconds: time to its first token.
        prompt, late: number of its tokens, and of those computed after the request had come.
    """

    seconds: float
    prompt: int
    late: int


async def play(
    engine: EngineClient, load: ToolAgents, dice: random.Random, *, is_linked: bool
) -> list[AfterTools]:
    """Play all agents on an empty cache, with fresh tokens. Return their requests after tools."""
    await engine.flush_cache()
    seed = dice.random()
    played: list[list[AfterTools]] = []

    async def run(number: int) -> list[AfterTools]:
        return await _play_agent(engine, load, random.Random(seed + number), is_linked)

    async with anyio.create_task_group() as group:
        if load.strangers:
            group.start_soon(_send_strangers, engine, load, random.Random(seed))
        played += await run_concurrently(run, range(load.agents))
        group.cancel_scope.cancel()
    return [request for requests in played for request in requests]


async def _play_agent(
    engine: EngineClient, load: ToolAgents, dice: random.Random, is_linked: bool
) -> list[AfterTools]:
    """Play one agent. If it is linked, its next prompt is fed to a stream as results come."""
    known = random_ids(dice, load.prompt)
    answer = await ask(engine, known, load.answer)
    requests: list[AfterTools] = []
    for _ in range(load.calls):
        start = random_ids(dice, load.prompt) if load.reflects else known[: load.prompt]
        known = [*start, *known[load.prompt :], *answer.ids]
        results: list[int] = []
        async with AsyncExitStack() as stack:
            feeder = Feeder(engine, known, lambda results=results: results) if is_linked else None
            if feeder is not None:
                await stack.enter_async_context(feeder)
            called = clock.now()
            for tool in load.tools:
                await clock.sleep_until(called + dice.uniform(tool.least, tool.most))
                results += random_ids(dice, tool.tokens)
            known, asked = [*known, *results], clock.now()
            stream = feeder.claim() if feeder is not None else None
            answer = await ask(engine, known, load.answer, stream)
        requests.append(AfterTools(answer.first - asked, len(known), answer.late_tokens))
    return requests


async def _send_strangers(engine: EngineClient, load: ToolAgents, dice: random.Random) -> None:
    """Send requests that nothing follows, at random times, until this is cancelled."""
    async with anyio.create_task_group() as group:
        while True:
            await clock.sleep(dice.expovariate(load.strangers))
            group.start_soon(ask, engine, random_ids(dice, load.prompt // 2), load.answer)


async def measure_alone(engine: EngineClient, tokens: int, late: int, dice: random.Random) -> float:
    """Return the seconds to the first token of one prompt on an idle engine.

    Args: late: how many of its ``tokens`` tokens are not in the cache.
    """
    await engine.flush_cache()
    prompt: Sequence[int] = random_ids(dice, tokens)
    if late < tokens:
        await ask(engine, prompt[: tokens - late], 1)
    asked = clock.now()
    return (await ask(engine, prompt, 1)).first - asked
