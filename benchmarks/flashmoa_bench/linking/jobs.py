"""Workflows of three agents on one engine, each agent really decoding (FlashAgents §6.6)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import anyio

from flashmoa.engine import EngineClient
from flashmoa_bench.harness.requests import Answer, Feeder, ask, random_ids

_TASK_TOKENS = 32
_SUFFIX_TOKENS = 10


@dataclass(frozen=True, slots=True)
class Agent:
    """What is known of an agent from profiling: tokens of its fixed prefix, of its output."""

    prefix: int
    output: int


Kind = tuple[Agent, ...]
# Three kinds of different length, so that there is a shortest job to put first.
KINDS: tuple[Kind, ...] = (
    (Agent(96, 16), Agent(192, 8), Agent(128, 16)),
    (Agent(256, 32), Agent(384, 16), Agent(512, 24)),
    (Agent(384, 64), Agent(768, 32), Agent(512, 48)),
)


@dataclass(frozen=True, slots=True)
class Step:
    """One agent's call: its prompt is ``prefix`` + what the agent before wrote + ``suffix``."""

    prefix: list[int]
    suffix: list[int]
    output: int


Workflow = tuple[Step, ...]


def workflows(count: int, dice: random.Random, *, shared: bool) -> list[Workflow]:
    """``count`` workflows with fresh tokens, the kinds in turn.

    Args:
        shared: workflows of a kind have the same prefixes, as agents of one role do; else
            every workflow has its own.
    """
    fixed = [_prefixes(kind, dice) for kind in KINDS]
    made: list[Workflow] = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        prefixes = fixed[number % len(KINDS)] if shared else _prefixes(kind, dice)
        task = random_ids(dice, _TASK_TOKENS)
        steps = [
            Step(prefix, random_ids(dice, _SUFFIX_TOKENS), agent.output)
            for prefix, agent in zip(prefixes, kind, strict=True)
        ]
        first = Step([*steps[0].prefix, *task], steps[0].suffix, steps[0].output)
        made.append((first, *steps[1:]))
    return made


def _prefixes(kind: Kind, dice: random.Random) -> list[list[int]]:
    return [random_ids(dice, agent.prefix) for agent in kind]


def pool_tokens(count: int) -> int:
    """KV that ``count`` workflows at once can need at most."""
    most = max(sum(agent.prefix + 2 * agent.output + 64 for agent in kind) for kind in KINDS)
    return 4096 + count * most


async def play(engine: EngineClient, batch: Sequence[Workflow], *, linked: bool) -> list[float]:
    """All workflows at once, on an empty cache: seconds to the last token of each, in order."""
    await engine.flush_cache()
    seconds = [0.0] * len(batch)
    started = time.perf_counter()

    async def one(place: int) -> None:
        run = _linked if linked else _sequential
        await run(engine, batch[place])
        seconds[place] = time.perf_counter() - started

    async with anyio.create_task_group() as group:
        for place in range(len(batch)):
            group.start_soon(one, place)
    return seconds


async def _sequential(engine: EngineClient, workflow: Workflow) -> None:
    before = Answer()
    for step in workflow:
        before = await ask(engine, [*step.prefix, *before.ids, *step.suffix], step.output)


async def _linked(engine: EngineClient, workflow: Workflow) -> None:
    """The later agents' streams are open from the start, and fed what is being written."""
    answers = [Answer() for _ in workflow]
    async with AsyncExitStack() as stack:
        feeders: list[Feeder | None] = [None]
        for before, step in zip(answers, workflow[1:], strict=False):
            feeder = Feeder(engine, step.prefix, _written(before))
            feeders.append(await stack.enter_async_context(feeder))
        before = Answer()
        for step, answer, feeder in zip(workflow, answers, feeders, strict=True):
            prompt = [*step.prefix, *before.ids, *step.suffix]
            stream = feeder.take_over() if feeder is not None else None
            await ask(engine, prompt, step.output, stream, answer)
            before = answer


def _written(answer: Answer) -> Callable[[], Sequence[int]]:
    return lambda: answer.ids
