"""First tokens of streamed prompts by the length of the prompt.

A prompt is prefilled through its stream; then its request comes with ten tokens more. What is
left to compute is the same at every length, but those tokens attend to all before them: the
same request without a stream on a cached prompt, and a decode step at that length, show how
much of the time that is.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import anyio
from rich.console import Console
from rich.table import Table

from flashmoa.engine import EngineClient
from flashmoa_bench.harness.command_line import command_line, positive
from flashmoa_bench.harness.engines import Role, connected
from flashmoa_bench.harness.report import Report, progress, terminal
from flashmoa_bench.harness.requests import TimedAnswer, ask, random_ids
from flashmoa_bench.harness.rounds import alternating

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
    """Medians over rounds of one prompt length; ``growth``: over the shortest length's."""

    tokens: int
    linked: float
    cached: float
    decode_step: float
    late_tokens: float
    growth: float


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench first_token``; return the exit status."""
    parser = command_line("first_token", __doc__, ROLES)
    parser.add_argument(
        "--prompts", type=positive, nargs="+", default=[1000, 4000, 16000], help="tokens each"
    )
    anyio.run(_main, parser.parse_args(arguments))
    return 0


async def _main(arguments: argparse.Namespace) -> None:
    console = terminal()
    report = Report("first_token", arguments)
    pool = 8192 + 2 * max(arguments.prompts)
    async with connected(ROLES, arguments, pool, console) as engines:
        await report.describe(engines)
        report.head(console)
        rounds = await _measure(engines["flashmoa"], arguments, console)
    lengths = summarise(rounds)
    show(lengths, console)
    report.save(console, {"lengths": [asdict(one) for one in lengths]})


async def _measure(
    engine: EngineClient, arguments: argparse.Namespace, console: Console
) -> dict[int, list[FirstTokenRound]]:
    dice = random.Random(arguments.seed)
    names = [str(tokens) for tokens in sorted(set(arguments.prompts))]
    rounds: dict[int, list[FirstTokenRound]] = {int(name): [] for name in names}
    with progress(console) as bars:
        bar = bars.add_task("warming up", total=arguments.repeats * len(names))
        await _play(engine, int(names[0]), dice)
        for name in alternating(arguments.repeats, names):
            bars.update(bar, description=f"{name} tokens")
            rounds[int(name)].append(await _play(engine, int(name), dice))
            bars.advance(bar)
    return rounds


async def _play(engine: EngineClient, tokens: int, dice: random.Random) -> FirstTokenRound:
    """Play one prompt on an empty cache."""
    await engine.flush_cache()
    prompt = random_ids(dice, tokens)
    stream = await engine.open_stream(input_ids=prompt)
    with anyio.fail_after(_PREFILL_SECONDS):
        while (await engine.stream_state(stream.id)).prefilled_tokens < tokens:  # noqa: ASYNC110
            await anyio.sleep(_POLL_SECONDS)
    linked, first = await _timed(engine, [*prompt, *random_ids(dice, _LATE_TOKENS)], stream.id)
    _, cached = await _timed(engine, [*prompt, *random_ids(dice, _LATE_TOKENS)], None)
    step = (linked.last - linked.first) / (_DECODED - 1)
    return FirstTokenRound(first, cached, step, linked.late_tokens)


async def _timed(
    engine: EngineClient, prompt: Sequence[int], stream_id: str | None
) -> tuple[TimedAnswer, float]:
    """Return an answer and the seconds to its first token."""
    started = time.perf_counter()
    answer = await ask(engine, prompt, _DECODED, stream_id)
    return answer, answer.first - started


def summarise(rounds: Mapping[int, Sequence[FirstTokenRound]]) -> list[PromptLength]:
    """Summarise ``rounds``, which are by prompt tokens."""
    shortest = median(one.linked for one in rounds[min(rounds)])
    return [
        PromptLength(
            tokens=tokens,
            linked=median(one.linked for one in group),
            cached=median(one.cached for one in group),
            decode_step=median(one.decode_step for one in group),
            late_tokens=median(one.late_tokens for one in group),
            growth=median(one.linked for one in group) / shortest,
        )
        for tokens, group in sorted(rounds.items())
    ]


def show(lengths: Sequence[PromptLength], console: Console) -> None:
    """Print the table."""
    title = "Time to first token by prompt length, ms"
    table = Table(title=title, title_justify="left")
    for name in ("prompt", "late", "linked", "growth", "cached prompt", "decode step"):
        table.add_column(name, justify="right")
    for one in lengths:
        table.add_row(
            str(one.tokens),
            f"{one.late_tokens:.0f}",
            f"{one.linked * 1000:.1f}",
            f"{one.growth:.2f}x",
            f"{one.cached * 1000:.1f}",
            f"{one.decode_step * 1000:.1f}",
        )
    console.print(table)
    console.print(
        "late: prompt tokens left when the request came. cached prompt: the same request without "
        "a stream, on a prompt that is in the cache.\n"
    )
