"""Measure what many growing prompt streams cost the processes of an engine.

Requests decode on one engine while prompt streams are open on it, each of which grows at the pace
of an agent that writes. Counted are the CPU seconds of the HTTP process, and those of the scheduler
for each step of the decoding requests; both also without streams, and with streams that are open
and do not grow. The scheduler's seconds have those of the streams' increments, but not those in
which a modelled GPU's forwards are computed on the CPU. If streams of several lengths are given,
these take turns on the engine, and what an increment costs is compared between them.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from functools import partial
from itertools import count

import anyio
from rich.console import Console

from flashmoa.engine import EngineClient, EngineError
from flashmoa.engine.local import LocalEngine
from flashmoa.engine.modelled_gpus import read_device
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import make_parser, positive
from flashmoa_bench.harness.engines import Role
from flashmoa_bench.harness.processes import cpu_seconds
from flashmoa_bench.harness.report import Report, make_table
from flashmoa_bench.harness.requests import Feeder, TimedAnswer, ask, random_ids
from flashmoa_bench.harness.rounds import RoundPlayer
from flashmoa_bench.linking.stream_costs import (
    StreamLoad,
    Way,
    compare,
    describe,
    increment_ms,
    summarise,
)

ROLES = (Role("flashmoa", plugin=True),)
# The tokens of a decoding request's prompt.
_PROMPT = 500
# Answers must not end before the measurement does.
_MOST_STEPS_PER_SECOND = 400
# The most tokens that the engine leaves for the request of an open stream.
_LEFT = 128
# Time between two looks of a stream's client at what its agent has written.
_LOOK_SECONDS = 0.1


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench stream_load`` and return the exit status."""
    parser = make_parser("stream_load", __doc__, ROLES)
    parser.add_argument("--streams", type=positive, default=256)
    parser.add_argument("--tps", type=positive, default=50, help="tokens a second of each stream")
    parser.add_argument(
        "--known",
        type=positive,
        nargs="+",
        default=[500],
        help="tokens that a stream is opened with; several numbers are compared",
    )
    parser.add_argument("--decoding", type=positive, default=8, help="requests that decode")
    parser.add_argument("--seconds", type=positive, default=5, help="length of a measurement")
    anyio.run(_main, parser.parse_args(arguments))
    return 0


async def _main(arguments: argparse.Namespace) -> None:
    report = Report("stream_load", arguments)
    lengths: list[int] = arguments.known
    ways = {
        str(way): way
        for way in (Way(), *(Way(known, grows) for known in lengths for grows in (False, True)))
    }
    # Half of a round's time may pass while streams are opened. Nothing is evicted in the meantime,
    # since that would be counted, too.
    growth = 2 * arguments.tps * arguments.seconds * len(lengths) * (arguments.repeats + 1)
    answers = arguments.decoding * _MOST_STEPS_PER_SECOND * arguments.seconds
    pool = 4096 + arguments.streams * (sum(lengths) + growth) + answers
    async with report.connect(ROLES, pool) as engines:
        if not (started := engines.started.get("flashmoa")):
            raise EngineError("stream_load reads its engine's processes: leave --flashmoa-url out")
        seeds = count(arguments.seed)

        async def run(name: str) -> StreamLoad:
            return await play(
                engines["flashmoa"], started, arguments, ways[name], random.Random(next(seeds))
            )

        with RoundPlayer(report.console, arguments.repeats, len(ways)) as player:
            for known in lengths:
                await run(str(Way(known, grows=True)))
            rounds = await player.play(list(ways), run)
    loads = {way: summarise(played) for way, played in rounds.items()}
    ratios = compare(rounds, lengths)
    show(loads, arguments, report.console)
    for figure, values in ratios.items():
        report.console.print(describe(figure, values, lengths))
    report.save({"loads": {way: asdict(load) for way, load in loads.items()}, "ratios": ratios})


async def play(
    engine: EngineClient,
    started: LocalEngine,
    arguments: argparse.Namespace,
    way: Way,
    dice: random.Random,
) -> StreamLoad:
    """Measure one of the ways while requests decode.

    What streams and requests begin with is the same in every call, and so is in the cache from the
    second one on. What streams grow by is not.

    Raises: EngineError if none of the requests decodes.
    """
    streams = 0 if way.known is None else arguments.streams
    tps = arguments.tps if way.grows else 0
    written = random_ids(dice, 100_000)
    async with (
        _open_streams(engine, streams, way.known or 0, tps, written) as feeders,
        _decode(engine, arguments) as answer,
    ):
        return await _measure(engine, started, answer, feeders, arguments.seconds)


@asynccontextmanager
async def _decode(
    engine: EngineClient, arguments: argparse.Namespace
) -> AsyncGenerator[TimedAnswer]:
    """Let requests decode meanwhile, from their first tokens on; yield one of the answers."""
    dice = random.Random(arguments.seed)
    answers = [TimedAnswer() for _ in range(arguments.decoding)]
    most_tokens = 2 * _MOST_STEPS_PER_SECOND * arguments.seconds
    async with anyio.create_task_group() as group:
        for answer in answers:
            prompt = random_ids(dice, _PROMPT)
            group.start_soon(ask, engine, prompt, most_tokens, None, answer)
        for answer in answers:
            await answer.has_begun.wait()
        yield answers[0]
        group.cancel_scope.cancel()


@asynccontextmanager
async def _open_streams(
    engine: EngineClient, streams: int, known: int, tps: int, written: Sequence[int]
) -> AsyncGenerator[list[Feeder]]:
    """Open streams, and wait until most of what they were opened with is prefilled."""
    async with AsyncExitStack() as stack:
        feeders: list[Feeder] = []
        for number in range(streams):
            source = partial(_written_since, clock.now(), tps, written[number:])
            prompt = random_ids(random.Random(f"{known} {number}"), known)
            feeder = Feeder(engine, prompt, source, _LOOK_SECONDS)
            feeders.append(await stack.enter_async_context(feeder))
        for feeder in feeders:
            while not feeder.stream_id or (
                (await engine.stream_state(feeder.stream_id)).prefilled_tokens < known - _LEFT
            ):
                await clock.sleep(_LOOK_SECONDS)
        yield feeders


def _written_since(began: float, tps: int, tokens: Sequence[int]) -> Sequence[int]:
    return tokens[: round((clock.now() - began) * tps)]


async def _measure(
    engine: EngineClient,
    started: LocalEngine,
    answer: TimedAnswer,
    feeders: Sequence[Feeder],
    seconds: float,
) -> StreamLoad:
    async def increments() -> tuple[int, float]:
        ids = [feeder.stream_id for feeder in feeders if feeder.stream_id]
        states = [await engine.stream_state(id_) for id_ in ids]
        received = sum(state.received_tokens for state in states)
        prefilled = sum(state.prefilled_tokens for state in states)
        return sum(state.increments for state in states), prefilled / max(1, received)

    async def cpu() -> tuple[float, float]:
        computing = (await read_device(engine.url) or {}).get("computing_seconds", 0.0)
        http, scheduler = cpu_seconds(started.pid)
        return http, scheduler - computing

    made = (await increments())[0]
    http, scheduler = await cpu()
    began, steps = clock.now(), len(answer.ids)
    await clock.sleep(seconds)
    passed, steps = clock.now() - began, len(answer.ids) - steps
    http_after, scheduler_after = await cpu()
    if not steps:
        raise EngineError("no request has decoded while streams were open: give a longer --seconds")
    made_after, ahead = await increments()
    return StreamLoad(
        http_share=(http_after - http) / passed,
        step_ms=1000 * (scheduler_after - scheduler) / steps,
        steps_per_second=steps / passed,
        increments_per_second=(made_after - made) / passed,
        ahead=ahead,
    )


def show(loads: dict[str, StreamLoad], arguments: argparse.Namespace, console: Console) -> None:
    """Print the table."""
    title = f"{arguments.streams} streams at {arguments.tps} tokens/s, {arguments.decoding} decodes"
    table = make_table(
        title,
        *("", "HTTP, cores", "scheduler, ms a step", "steps/s"),
        *("increments/s", "ms an increment", "prefilled"),
    )
    for way, load in loads.items():
        each = increment_ms(load, loads[way.replace("growing", "open")])
        table.add_row(
            way,
            f"{load.http_share:.3f}",
            f"{load.step_ms:.2f}",
            f"{load.steps_per_second:.1f}",
            f"{load.increments_per_second:.1f}",
            "" if each is None else f"{each:.2f}",
            f"{load.ahead:.0%}",
        )
    console.print(table)
