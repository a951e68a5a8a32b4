"""Measure the time to the first token of streamed prompts, by the length of the prompt.

A prompt is prefilled through its stream; then its request comes, with ten tokens more. The same
number of tokens is left to compute at every length, but they attend to all tokens before them. The
same request without a stream on a cached prompt, and a decode step at that length, show how much of
the time this attention takes.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import anyio
from rich.console import Console

from flashmoa.engine import EngineClient
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import make_parser, positive
from flashmoa_bench.harness.engines import Role
from flashmoa_bench.harness.report import Report, make_table
from flashmoa_bench.harness.requests import TimedAnswer, ask, random_ids
from flashmoa_bench.harness.rounds import RoundPlayer
from flashmoa_bench.linking.pipelines import LONGEST_STEP

ROLES = (Role("flashmoa", plugin=True),)
_LATE_TOKENS = 10
_DECODED = 9
_POLL_SECONDS = 0.02
_PREFILL_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class FirstTokenRound:
    """Seconds to the first token with a stream and on a cached prompt, and per decode step."""

    linked: float
    cached: float
    decode_step: float
    late_tokens: int


@dataclass(frozen=True, slots=True)
class PromptLength:
    """One prompt length, medians over rounds; ``growth``: over the shortest length's ``linked``."""

    tokens: int
    linked: float
    cached: float
    decode_step: float
    late_tokens: float
    growth: float


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench first_token`` and return the exit status."""
    parser = make_parser("first_token", __doc__, ROLES)
    parser.add_argument(
        "--prompts", type=positive, nargs="+", default=[1000, 4000, 16000], help="tokens each"
    )
    anyio.run(_main, parser.parse_args(arguments))
    return 0


async def _main(arguments: argparse.Namespace) -> None:
    report = Report("first_token", arguments)
    pool = 8192 + 2 * max(arguments.prompts)
    async with report.connect(ROLES, pool) as engines:
        rounds = await _measure(engines["flashmoa"], arguments, report.console)
    lengths = summarise(rounds)
    show(lengths, report.console)
    report.save({"lengths": [asdict(length) for length in lengths]})


async def _measure(
    engine: EngineClient, arguments: argparse.Namespace, console: Console
) -> dict[int, list[FirstTokenRound]]:
    dice = random.Random(arguments.seed)
    lengths = sorted(set(arguments.prompts))

    async def run(tokens: int) -> FirstTokenRound:
        return await _play_round(engine, tokens, dice)

    with RoundPlayer(console, arguments.repeats, len(lengths)) as player:
        await run(lengths[0])
        return await player.play(lengths, run, "tokens:")


async def _play_round(engine: EngineClient, tokens: int, dice: random.Random) -> FirstTokenRound:
    """Play one prompt on an empty cache."""
    await engine.flush_cache()
    prompt = random_ids(dice, tokens)
    stream = await engine.open_stream(input_ids=prompt)
    # Otherwise the engine would leave some tokens, as more may come.
    await engine.append(stream.id, 0, end=True)
    with anyio.fail_after(clock.machine_seconds(_PREFILL_SECONDS)):
        while (await engine.stream_state(stream.id)).prefilled_tokens < tokens:
            await clock.sleep(_POLL_SECONDS)
    linked, seconds = await _ask(engine, [*prompt, *random_ids(dice, _LATE_TOKENS)], stream.id)
    # The overlap schedule may have begun another step for that answer.
    await clock.sleep(LONGEST_STEP)
    _, cached = await _ask(engine, [*prompt, *random_ids(dice, _LATE_TOKENS)], None)
    step = (linked.last - linked.first) / (_DECODED - 1)
    return FirstTokenRound(seconds, cached, step, linked.late_tokens)


async def _ask(
    engine: EngineClient, prompt: Sequence[int], stream_id: str | None
) -> tuple[TimedAnswer, float]:
    """Return an answer and the seconds to its first token."""
    started = clock.now()
    answer = await ask(engine, prompt, _DECODED, stream_id)
    return answer, answer.first - started


def summarise(rounds: Mapping[int, Sequence[FirstTokenRound]]) -> list[PromptLength]:
    """Summarise ``rounds``, which are by number of prompt tokens."""
    shortest = median(each.linked for each in rounds[min(rounds)])
    return [
        PromptLength(
            tokens=tokens,
            linked=median(each.linked for each in group),
            cached=median(each.cached for each in group),
            decode_step=median(each.decode_step for each in group),
            late_tokens=median(each.late_tokens for each in group),
            growth=median(each.linked for each in group) / shortest,
        )
        for tokens, group in sorted(rounds.items())
    ]


def show(lengths: Sequence[PromptLength], console: Console) -> None:
    """Print the table."""
    title = "Time to first token by prompt length, ms"
    names = ("prompt", "late", "linked", "growth", "cached prompt", "decode step")
    table = make_table(title, *names)
    for length in lengths:
        table.add_row(
            str(length.tokens),
            f"{length.late_tokens:.0f}",
            f"{length.linked * 1000:.1f}",
            f"{length.growth:.2f}x",
            f"{length.cached * 1000:.1f}",
            f"{length.decode_step * 1000:.1f}",
        )
    console.print(table)
    console.print(
        "late: prompt tokens left when the request came. cached prompt: the same request without "
        "a stream, on a prompt that is in the cache.\n"
    )
