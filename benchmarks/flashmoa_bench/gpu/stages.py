"""Check and measure what no benchmark of ``flashmoa bench`` does, on one GPU.

The stages ask whether answers are exact, what the plugin costs without streams, and how long
forwards take.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import anyio

from flashmoa.engine import EngineClient, KvState
from flashmoa_bench.gpu.forwards import DECODES, PREFILLS, Expected, errors
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.requests import TimedAnswer, ask, random_ids
from flashmoa_bench.harness.rounds import alternate, run_concurrently
from flashmoa_bench.link.pipelines import SUFFIX_TOKENS, Pipeline, ask_downstream

_ANSWER_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the stages; lengths in tokens.

    Attributes:
        kv, chunk: KV pool and largest forward of an engine.
        streams: number of prompt streams whose answers are compared.
        prompts: the streams' shortest and longest prompt.
        writing: shortest and longest time, in seconds, to write the unknown part of a prompt.
        load: requests that decode meanwhile.
        handoff, chains, stranger: arguments of the benchmarks of stages 3 and 4.
        requests: stage 5's number of prompts, and length of each prompt and answer.
        divisor: divides the lengths of stage 6.
        experts: arguments of the benchmark of stage 7.
        expert_forward: largest forward of stage 7.
    """

    kv: int
    chunk: int
    streams: int
    prompts: tuple[int, int]
    writing: tuple[float, float]
    load: int
    handoff: str
    chains: Sequence[str]
    stranger: str
    requests: tuple[int, int, int]
    divisor: int
    experts: str
    expert_forward: int


GPU_SIZES = Sizes(
    kv=100_000,
    chunk=8192,
    streams=50,
    prompts=(200, 3000),
    writing=(0.2, 1.5),
    load=6,
    handoff="--tps 100 --prefix 4096 16384 --upstream 64 256 --concurrency 1 4 --repeats 3",
    chains=("8:1000/200:3000/32", "10:1200/300:8000/64"),
    stranger="--pipelines 8 --prefix 3000 --repeats 1",
    requests=(64, 512, 64),
    divisor=1,
    experts="--tokens 2048 8192 16384 32768 --prompt 2048 --repeats 2 --peak-tflops 989",
    expert_forward=32_768,
)
CPU_SIZES = Sizes(
    kv=12_000,
    chunk=1024,
    streams=8,
    prompts=(40, 200),
    writing=(0.2, 0.8),
    load=2,
    handoff="--tps 100 --prefix 256 --upstream 24 --concurrency 1 --repeats 1",
    chains=("3:60/20:90/8",),
    stranger="--pipelines 2 --prefix 200 --upstream 20 --tokens 10 --repeats 1",
    requests=(6, 32, 8),
    divisor=32,
    experts="--tokens 64 256 --prompt 64 --repeats 1 --peak-tflops 1",
    expert_forward=256,
)


def _same(one: Sequence[Sequence[int]], two: Sequence[Sequence[int]]) -> dict[str, int]:
    """Count the equal answers, and the answers with equal first tokens."""
    pairs = list(zip(one, two, strict=True))
    return {
        "equal": sum(a == b for a, b in pairs),
        "first_token_equal": sum(a[:1] == b[:1] for a, b in pairs),
        "of": len(pairs),
    }


async def repeat(engines: Sequence[EngineClient], dice: random.Random) -> dict[str, Any]:
    """Ask each engine for answers: greedy answers must repeat, and depend on the prompt."""
    prompt, other = random_ids(dice, 500), random_ids(dice, 500)
    answers: list[list[list[int]]] = []
    for engine in engines:
        own: list[list[int]] = []
        for ids, is_cached in ((prompt, False),) * 3 + ((prompt, True), (other, True)):
            if not is_cached:
                await engine.flush_cache()
            own.append((await ask(engine, ids, _ANSWER_TOKENS)).ids)
        answers.append(own)
    return {
        "repeats": [own[0] == own[1] == own[2] for own in answers],
        "cached_equals": [own[3] == own[0] for own in answers],
        "depends_on_prompt": [own[4] != own[0] for own in answers],
        "engines_agree": all(own[0] == answers[0][0] for own in answers),
    }


async def compare_streams(
    engine: EngineClient, stock: EngineClient, sizes: Sizes, dice: random.Random
) -> dict[str, Any]:
    """Compare answers to prompts that are streamed under load with the stock engine's answers.

    In bfloat16, forwards of other sizes round otherwise. So even the stock engine's answers change
    with the requests beside them. The control, two runs of the stock engine, shows how often.

    Returns: the counts, the use of the streams, and whether the KV pool is as before.
    """
    await engine.flush_cache()
    before = (await engine.info()).kv
    begin = clock.now()
    pipelines = [_make_pipeline(sizes, dice, begin) for _ in range(sizes.streams)]
    linked: list[TimedAnswer] = []
    async with anyio.create_task_group() as load:
        for _ in range(sizes.load):
            load.start_soon(_decode_on, engine, random.Random(dice.random()))
        linked = await run_concurrently(partial(_stream, engine), pipelines, limit=16)
        load.cancel_scope.cancel()
    alone: list[list[list[int]]] = []
    for limit in (8, 3):
        await stock.flush_cache()
        answers = await run_concurrently(
            lambda each: ask(stock, each.prompt, _ANSWER_TOKENS), pipelines, limit
        )
        alone.append([answer.ids for answer in answers])
    used = [answer.usage.prompt_stream for answer in linked if answer.usage is not None]
    return {
        "linked_and_unlinked": _same([answer.ids for answer in linked], alone[0]),
        "unlinked_and_unlinked": _same(alone[0], alone[1]),
        "status": Counter(use.status if use is not None else "none" for use in used),
        "streamed_tokens": sum(answer.ahead_tokens for answer in linked),
        "late_tokens": sum(answer.late_tokens for answer in linked),
        **await _read_kv(engine, before),
    }


def _make_pipeline(sizes: Sizes, dice: random.Random, begin: float) -> Pipeline:
    length = dice.randint(*sizes.prompts)
    known = dice.randint(1, length - 2)
    return Pipeline(
        prefix=random_ids(dice, known),
        upstream=random_ids(dice, length - known),
        suffix=random_ids(dice, SUFFIX_TOKENS),
        tps=(length - known) / dice.uniform(*sizes.writing),
        started=begin,
    )


async def _stream(engine: EngineClient, pipeline: Pipeline) -> TimedAnswer:
    """Return the answer to a prompt that is written from now on, and streamed meanwhile."""
    return await ask_downstream(
        engine, replace(pipeline, started=clock.now()), _ANSWER_TOKENS, linked=True
    )


async def _decode_on(engine: EngineClient, dice: random.Random) -> None:
    """Make the engine decode until this is cancelled."""
    while True:
        await ask(engine, random_ids(dice, 64), 256)


async def _read_kv(engine: EngineClient, before: Sequence[KvState]) -> dict[str, Any]:
    """Return the state of the emptied KV pool once it is as before, or after 20 seconds."""
    after = before
    with anyio.move_on_after(20):
        while True:
            await engine.flush_cache()
            after = (await engine.info()).kv
            if _in_use(after) == _in_use(before):
                break
            await anyio.sleep(0.2)
    return {
        "kv_is_back": _in_use(after) == _in_use(before),
        "kv": [rank.model_dump() for rank in after],
    }


def _in_use(kv: Sequence[KvState]) -> list[tuple[int, int, int]]:
    return [(rank.total - rank.free, rank.protected, rank.pinned_streams) for rank in kv]


async def compare_throughput(
    engines: dict[str, EngineClient], sizes: Sizes, dice: random.Random
) -> dict[str, Any]:
    """Measure the output tokens per second of engines in turn, without prompt streams."""
    count, length, answer = sizes.requests

    async def run(name: str) -> float:
        await engines[name].flush_cache()
        prompts = [random_ids(dice, length) for _ in range(count)]
        begin = clock.now()
        await run_concurrently(lambda ids: ask(engines[name], ids, answer), prompts, limit=32)
        return count * answer / (clock.now() - begin)

    names = list(engines)
    for name in names:
        await run(name)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for name in alternate(3, names):
        rates[name].append(await run(name))
    typical = {name: median(each) for name, each in rates.items()}
    return {
        "tokens_per_second": typical,
        "rounds": rates,
        "of_stock": {name: rate / typical["stock"] for name, rate in typical.items()},
    }


async def time_forwards(
    engine: EngineClient, sizes: Sizes, dice: random.Random, expected: Expected | None, gpu: str
) -> dict[str, Any]:
    """Measure an engine's prefills and decode steps, and the errors of the modelled times.

    A prefill's time is its time to first token, which includes the request's way.

    Args:
        expected: the result of ``flashmoa_bench.gpu.forwards.expected_times``, if known.
        gpu: the driver's name of the GPU.
    """
    prefills: dict[str, float] = {}
    decodes: dict[str, float] = {}
    for tokens in PREFILLS:
        length = max(1, tokens // sizes.divisor)
        prefills[str(tokens)] = min([await _prefill(engine, length, dice) for _ in range(4)])
    for requests, context in DECODES:
        if requests * context < 0.8 * sizes.kv:
            length = max(8, context // sizes.divisor)
            decodes[f"{requests}x{context}"] = await _decode_step(engine, requests, length, dice)
    measured = {"prefills": prefills, "decodes": decodes}
    return measured | (errors(expected, measured, gpu) if expected is not None else {})


async def _prefill(engine: EngineClient, tokens: int, dice: random.Random) -> float:
    await engine.flush_cache()
    begin = clock.now()
    return (await ask(engine, random_ids(dice, tokens), 1)).first - begin


async def _decode_step(
    engine: EngineClient, requests: int, context: int, dice: random.Random
) -> float:
    """Return the seconds of a decode step with ``requests`` requests."""
    await engine.flush_cache()
    prompts = [random_ids(dice, context) for _ in range(requests)]
    answers = await run_concurrently(lambda ids: ask(engine, ids, 64), prompts)
    # All requests decode between the last first token and the first last token.
    begin, end = max(each.first for each in answers), min(each.last for each in answers)
    steps = [sum(begin <= moment <= end for moment in each.times) - 1 for each in answers]
    return (end - begin) / max(1, median(steps))
