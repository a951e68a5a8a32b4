"""Measure chains of two agents that share one engine and start one after another.

While one chain's agent A decodes, other chains prefill and decode on the same engine. So prefilling
ahead for an agent B costs others time. The latency from a chain's start to B's last token is
compared with stock SGLang, without mixed chunks and with several sizes of them, and with
prefilling ahead B's known text alone. Tokens are random, and chains share no prefix.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from typing import Annotated

from flashmoa.engine import EngineClient
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import Option, command, mixed_roles, stock_forwards
from flashmoa_bench.harness.engines import Role
from flashmoa_bench.harness.report import Column, Report
from flashmoa_bench.harness.requests import TimedAnswer, ask, feeding, random_ids
from flashmoa_bench.harness.rounds import RoundPlayer, run_concurrently

ROLES = (
    Role("stock", plugin=False),
    Role("stock_mixed", plugin=False, arguments=("--enable-mixed-chunk",), optional=True),
    Role("flashmoa", plugin=True),
)
# From light to heavy. The last rows' prompts have the length of prompts with documents.
DEFAULT_ROWS = ("1:1200/300:16000/100", "8:1200/150:2000/60", "8:1200/300:8000/100")


@dataclass(frozen=True, slots=True)
class Chains:
    """One row of the benchmark; lengths in tokens.

    Attributes:
        count: number of chains.
        prompts, answers: lengths for A and for B. B's prompt includes A's answer.
    """

    count: int
    prompts: tuple[int, int]
    answers: tuple[int, int]

    @classmethod
    def read(cls, text: str) -> Chains:
        """Read ``COUNT:PROMPT/ANSWER:PROMPT/ANSWER``, with the lengths of A and of B.

        Raises: ArgumentTypeError if the text has another form.
        """
        try:
            count, *agents = text.split(":")
            (a, b), (c, d) = (map(int, agent.split("/")) for agent in agents)
            chains = cls(int(count), (a, c), (b, d))
        except ValueError as error:
            message = f"{text!r} is not COUNT:PROMPT/ANSWER:PROMPT/ANSWER, as {DEFAULT_ROWS[0]} is"
            raise argparse.ArgumentTypeError(message) from error
        if min(chains.count, *chains.prompts, *chains.answers) < 1 or c < b:
            raise argparse.ArgumentTypeError(f"in {text!r}, B's prompt must hold A's answer")
        return chains

    def __str__(self) -> str:
        agents = zip(self.prompts, self.answers, strict=True)
        return ":".join([str(self.count), *(f"{prompt}/{answer}" for prompt, answer in agents)])


@dataclass(frozen=True, slots=True)
class ChainRun:
    """One chain: its latency, and the time from A's last to B's first token, in seconds."""

    seconds: float
    gap: float
    late: int


@dataclass(frozen=True, slots=True)
class ChainRow:
    """One way of a row: medians over rounds of the mean over chains, in seconds.

    ``of_stock`` is ``seconds`` over the best stock engine's. ``late`` is the median number of B's
    prompt tokens that are computed after its request.
    """

    chains: Annotated[str, Column("chains")]
    way: Annotated[str, Column("")]
    seconds: Annotated[float, Column("mean", "{:.2f}")]
    of_stock: Annotated[float, Column("of stock", "{:.2f}")]
    gap: Annotated[float, Column("A's last to B's first", "{:.3f}")]
    late: Annotated[float, Column("late", "{:.0f}")]


async def _measure(report: Report) -> None:
    options = report.options
    all_chains = [Chains.read(row) for row in options.rows]
    needs = (each.count * (sum(each.prompts) + sum(each.answers) + 64) for each in all_chains)
    mixed = mixed_roles(options.stock_forwards)
    roles = [*ROLES[:2], *mixed.values(), ROLES[2]]
    dice = random.Random(options.seed)
    rows: list[ChainRow] = []
    async with report.connect(roles, 4096 + max(needs)) as engines:
        # For each way: the engine's role, and the text that is prefilled ahead.
        ways = {
            "stock": ("stock", ""),
            "stock mixed": ("stock_mixed", ""),
            **{way: (role.name, "") for way, role in mixed.items()},
            "known": ("flashmoa", "known"),
            "linked": ("flashmoa", "all"),
        }
        ways = {way: each for way, each in ways.items() if each[0] in engines}

        async def run(way: str, chains: Chains) -> list[ChainRun]:
            role, ahead = ways[way]
            await engines[role].flush_cache()
            seed, start = dice.random(), clock.now()

            async def play(number: int) -> ChainRun:
                await clock.sleep_until(start + number * options.apart)
                return await _play(engines[role], chains, random.Random(seed + number), ahead)

            return await run_concurrently(play, range(chains.count))

        with RoundPlayer(report.console, options.repeats, len(all_chains) * len(ways)) as player:
            for way in ways:
                await run(way, Chains(2, (64, 64), (8, 8)))
            for chains in all_chains:
                play_chains = partial(run, chains=chains)
                rounds = await player.play(list(ways), play_chains, str(chains), warm_up=False)
                rows += summarise(chains, rounds)
    report.show(
        "Chains of two agents on one engine, seconds",
        rows,
        "of stock: over the best of stock SGLang without mixed chunks, and with mixed chunks of "
        "8,192 tokens on large GPUs or of the given size. late: tokens of B's prompt that were "
        "computed after its request came.",
    )
    report.save({"rows": rows})


async def _play(engine: EngineClient, chains: Chains, dice: random.Random, ahead: str) -> ChainRun:
    """Play one chain; ``ahead`` is the part of B's prompt that is prefilled ahead."""
    prompt = random_ids(dice, chains.prompts[0])
    known = random_ids(dice, chains.prompts[1] - chains.answers[0])
    first, second = TimedAnswer(), TimedAnswer()
    started = clock.now()
    source = first.ids if ahead == "all" else []
    async with feeding(engine, known, lambda: source, is_linked=bool(ahead)) as claim:
        await ask(engine, prompt, chains.answers[0], into=first)
        await ask(engine, [*known, *first.ids], chains.answers[1], claim(), second)
    return ChainRun(second.last - started, second.first - first.last, second.late_tokens)


def summarise(chains: Chains, rounds: dict[str, list[list[ChainRun]]]) -> list[ChainRow]:
    """Summarise a row's rounds; each round has one run for each chain."""
    seconds = {
        way: median(mean(run.seconds for run in runs) for runs in played)
        for way, played in rounds.items()
    }
    stock = min(mean for way, mean in seconds.items() if way.startswith("stock"))
    return [
        ChainRow(
            chains=str(chains),
            way=way,
            seconds=seconds[way],
            of_stock=seconds[way] / stock,
            gap=median(run.gap for runs in played for run in runs),
            late=median(run.late for runs in played for run in runs),
        )
        for way, played in rounds.items()
    ]


main = command(
    "shared_engine",
    __doc__,
    _measure,
    ROLES,
    Option(
        "--rows",
        lambda text: str(Chains.read(text)),
        list(DEFAULT_ROWS),
        "COUNT:PROMPT/ANSWER:PROMPT/ANSWER: number of chains, and tokens of A and of B",
    ),
    Option("--apart", float, 0.07, "seconds from one chain's start to the next"),
    stock_forwards(256, 1024),
)
