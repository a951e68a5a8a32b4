"""Measure what many growing prompt streams cost the processes of an engine.

Requests decode on one engine while prompt streams are open on it, each of which grows at the pace
of an agent that writes. Counted are the CPU seconds of the HTTP process, and those of the scheduler
for each step of the decoding requests; both also without streams, and with streams that are open
and do not grow. The scheduler's seconds have those of the streams' increments, but not those in
which a modelled GPU's forwards are computed on the CPU.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

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

ROLES = (Role("flashmoa", plugin=True),)
WAYS = ("no streams", "open", "growing")
# Answers must not end before the measurement does.
_MOST_STEPS_PER_SECOND = 400
# The most tokens that the engine leaves for the request of an open stream.
_LEFT = 128
# Time between two looks of a stream's client at what its agent has written.
_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """What the processes took during a measurement.

    Attributes:
        http_share: CPU seconds of the HTTP process by second.
        step_ms: CPU milliseconds of the scheduler by step of the decoding requests, without the
            computation of a modelled GPU's forwards.
        steps_per_second: such steps.
        increments_per_second: increments of all streams together.
        ahead: share of the streams' tokens that is prefilled in the end.
    """

    http_share: float
    step_ms: float
    steps_per_second: float
    increments_per_second: float
    ahead: float


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench stream_load`` and return the exit status."""
    parser = make_parser("stream_load", __doc__, ROLES)
    parser.add_argument("--streams", type=positive, default=256)
    parser.add_argument("--tps", type=positive, default=50, help="tokens a second of each stream")
    parser.add_argument(
        "--known", type=positive, default=500, help="tokens that a stream is opened with"
    )
    parser.add_argument("--decoding", type=positive, default=8, help="requests that decode")
    parser.add_argument("--seconds", type=positive, default=5, help="length of a measurement")
    anyio.run(_main, parser.parse_args(arguments))
    return 0


async def _main(arguments: argparse.Namespace) -> None:
    report = Report("stream_load", arguments)
    # Half of a round's time may pass while streams are opened.
    length = arguments.known + 2 * arguments.tps * arguments.seconds
    answers = arguments.decoding * _MOST_STEPS_PER_SECOND * arguments.seconds
    async with report.connect(ROLES, 4096 + arguments.streams * length + answers) as engines:
        if not (started := engines.started.get("flashmoa")):
            raise EngineError("stream_load reads its engine's processes: leave --flashmoa-url out")
        run = partial(play, engines["flashmoa"], started, arguments)
        with RoundPlayer(report.console, arguments.repeats, len(WAYS)) as player:
            await run("growing")
            rounds = await player.play(WAYS, run)
    loads = {way: summarise(played) for way, played in rounds.items()}
    show(loads, arguments, report.console)
    report.save({"loads": {way: asdict(load) for way, load in loads.items()}})


async def play(
    engine: EngineClient, started: LocalEngine, arguments: argparse.Namespace, way: str
) -> StreamLoad:
    """Measure one of the ways while requests decode.

    Raises: EngineError if none of them decodes.
    """
    await engine.flush_cache()
    dice = random.Random(arguments.seed)
    count = 0 if way == "no streams" else arguments.streams
    tps = arguments.tps if way == "growing" else 0
    async with (
        _open_streams(engine, count, arguments.known, tps, dice) as feeders,
        _decode(engine, arguments, dice) as answer,
    ):
        return await _measure(engine, started, answer, feeders, arguments.seconds)


@asynccontextmanager
async def _decode(
    engine: EngineClient, arguments: argparse.Namespace, dice: random.Random
) -> AsyncGenerator[TimedAnswer]:
    """Let requests decode meanwhile, from their first tokens on; yield one of the answers."""
    answers = [TimedAnswer() for _ in range(arguments.decoding)]
    most_tokens = 2 * _MOST_STEPS_PER_SECOND * arguments.seconds
    async with anyio.create_task_group() as group:
        for answer in answers:
            prompt = random_ids(dice, arguments.known)
            group.start_soon(ask, engine, prompt, most_tokens, None, answer)
        for answer in answers:
            await answer.has_begun.wait()
        yield answers[0]
        group.cancel_scope.cancel()


@asynccontextmanager
async def _open_streams(
    engine: EngineClient, count: int, known: int, tps: int, dice: random.Random
) -> AsyncGenerator[list[Feeder]]:
    """Open streams, and wait until most of what they were opened with is prefilled."""
    written = random_ids(dice, 100_000)
    async with AsyncExitStack() as stack:
        feeders: list[Feeder] = []
        for number in range(count):
            source = partial(_written_since, clock.now(), tps, written[number:])
            feeder = Feeder(engine, random_ids(dice, known), source, _LOOK_SECONDS)
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


def summarise(loads: Sequence[StreamLoad]) -> StreamLoad:
    """Return the median of each figure."""
    figures = [asdict(load) for load in loads]
    return StreamLoad(**{name: median(each[name] for each in figures) for name in figures[0]})


def show(loads: dict[str, StreamLoad], arguments: argparse.Namespace, console: Console) -> None:
    """Print the table."""
    title = f"{arguments.streams} streams at {arguments.tps} tokens/s, {arguments.decoding} decodes"
    table = make_table(
        title,
        *("", "HTTP, cores", "scheduler, ms a step", "steps/s"),
        *("increments/s", "ms an increment", "prefilled"),
    )
    for way, load in loads.items():
        each = increment_ms(load, loads["open"])
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


def increment_ms(load: StreamLoad, idle: StreamLoad) -> float | None:
    """Return the CPU milliseconds that the scheduler takes for an increment; ``None`` without any.

    Args: idle: the load of streams that do not grow.
    """
    if not load.increments_per_second:
        return None
    more = (load.step_ms - idle.step_ms) * load.steps_per_second
    return more / load.increments_per_second
