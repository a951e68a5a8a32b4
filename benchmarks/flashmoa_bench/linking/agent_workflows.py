"""Workflows of agents that are called one after another, and how they are played on one engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from flashmoa.engine import EngineClient
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.requests import Feeder, TimedAnswer, ask, random_ids
from flashmoa_bench.harness.rounds import run_concurrently

_TASK_TOKENS = 32
_SUFFIX_TOKENS = 10


@dataclass(frozen=True, slots=True)
class AgentProfile:
    """The number of tokens of an agent's fixed prefix and of its output."""

    prefix: int
    output: int


WorkflowKind = tuple[AgentProfile, ...]
Kinds = Sequence[WorkflowKind]
# The kinds differ in length, so that there is a shortest job to put first.
KINDS: tuple[WorkflowKind, ...] = (
    (AgentProfile(96, 16), AgentProfile(192, 8), AgentProfile(128, 16)),
    (AgentProfile(256, 32), AgentProfile(384, 16), AgentProfile(512, 24)),
    (AgentProfile(384, 64), AgentProfile(768, 32), AgentProfile(512, 48)),
)


@dataclass(frozen=True, slots=True)
class AgentCall:
    """A call for ``output`` tokens; its prompt is ``prefix`` + the previous answer + ``suffix``."""

    prefix: list[int]
    suffix: list[int]
    output: int


WorkflowCalls = tuple[AgentCall, ...]


def scale_kinds(factor: int) -> Kinds:
    """Return the kinds of workflows with all lengths times ``factor``."""
    return [
        tuple(AgentProfile(factor * agent.prefix, factor * agent.output) for agent in kind)
        for kind in KINDS
    ]


def make_batches(
    count: int, dice: random.Random, kinds: Kinds = KINDS, *, shared: bool
) -> list[list[WorkflowCalls]]:
    """Make batches of ``count`` workflows; as many batches as it takes for every kind to occur."""
    batch_count = max(1, -(-len(kinds) // count))
    workflows = make_workflows(count * batch_count, dice, kinds, shared=shared)
    return [workflows[i : i + count] for i in range(0, len(workflows), count)]


def make_workflows(
    count: int, dice: random.Random, kinds: Kinds = KINDS, *, shared: bool
) -> list[WorkflowCalls]:
    """Make ``count`` workflows with fresh tokens, the kinds in turn.

    Args:
        shared: whether workflows of a kind have the same prefixes, as agents of one role do.
    """
    prefixes_of_kinds = [_make_prefixes(kind, dice) for kind in kinds]
    workflows: list[WorkflowCalls] = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        prefixes = prefixes_of_kinds[number % len(kinds)] if shared else _make_prefixes(kind, dice)
        task = random_ids(dice, _TASK_TOKENS)
        calls = [
            AgentCall(prefix, random_ids(dice, _SUFFIX_TOKENS), agent.output)
            for prefix, agent in zip(prefixes, kind, strict=True)
        ]
        first = AgentCall([*calls[0].prefix, *task], calls[0].suffix, calls[0].output)
        workflows.append((first, *calls[1:]))
    return workflows


def _make_prefixes(kind: WorkflowKind, dice: random.Random) -> list[list[int]]:
    return [random_ids(dice, agent.prefix) for agent in kind]


def pool_tokens(count: int, kinds: Kinds) -> int:
    """Return the most tokens of KV that ``count`` workflows at once can need."""
    most = max(sum(agent.prefix + 2 * agent.output + 64 for agent in kind) for kind in kinds)
    return 4096 + count * most


async def play(
    engine: EngineClient, batch: Sequence[WorkflowCalls], *, linked: bool
) -> list[float]:
    """Play all workflows at once on an empty cache.

    Returns: the seconds from the start to each workflow's last token.
    """
    await engine.flush_cache()
    started = clock.now()

    async def run(workflow: WorkflowCalls) -> float:
        await (_run_linked if linked else _run_sequentially)(engine, workflow)
        return clock.now() - started

    return await run_concurrently(run, batch)


async def _run_sequentially(engine: EngineClient, workflow: WorkflowCalls) -> None:
    before = TimedAnswer()
    for call in workflow:
        before = await ask(engine, [*call.prefix, *before.ids, *call.suffix], call.output)


async def _run_linked(engine: EngineClient, workflow: WorkflowCalls) -> None:
    """Open the later agents' streams at the start, and feed them what is being written."""
    answers = [TimedAnswer() for _ in workflow]
    async with AsyncExitStack() as stack:
        feeders: list[Feeder | None] = [None]
        for before, call in zip(answers, workflow[1:], strict=False):
            source = _make_source(before)
            feeder = Feeder(engine, call.prefix, source, expected_output_tokens=call.output)
            feeders.append(await stack.enter_async_context(feeder))
        before = TimedAnswer()
        for call, answer, feeder in zip(workflow, answers, feeders, strict=True):
            prompt = [*call.prefix, *before.ids, *call.suffix]
            stream = feeder.claim() if feeder is not None else None
            await ask(engine, prompt, call.output, stream, answer)
            before = answer


def _make_source(answer: TimedAnswer) -> Callable[[], Sequence[int]]:
    """Make a function that returns the tokens of an answer that are written by now."""
    return lambda: answer.ids
