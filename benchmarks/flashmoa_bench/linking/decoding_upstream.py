"""Measure handoffs between two engines, with an upstream agent that really decodes (§6.1).

Agents A and B run on two SGLang engines with a tiny model, one per core. The time from A's first
token to B's first token is measured in three ways: B's prompt is sent after A's last token
(*sequential*), its growing prefix is sent in stateless prefill requests (*probe*: what a client can
do with any server), or it is *linked*.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Literal

import anyio
from rich.table import Table

from flashmoa.engine import EngineClient
from flashmoa.engine.tiny_models import tiny_model
from flashmoa.linking.link import Link
from flashmoa.linking.prompt import Prompt, Slot
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.engines import (
    Role,
    model_cache,
    single_token_words,
    tokenizer_texts,
)
from flashmoa_bench.harness.report import Report, make_table
from flashmoa_bench.harness.rounds import RoundPlayer, run_concurrently

PairWay = Literal["sequential", "probe", "linked"]
WAYS: tuple[PairWay, ...] = ("sequential", "probe", "linked")
_PROBE_CHUNK = 32
# Tokens of an event. On a CPU, sending every token by itself costs several per cent of the two
# cores, which the engines share with this client.
_STREAM_INTERVAL = 4
_SUFFIX = " and so it ends"
_POOL_TOKENS = 16_000


@dataclass(frozen=True, slots=True)
class Pair:
    """The seconds of one pair of agents from A's first token to A's last, and to B's first."""

    upstream_end: float
    downstream_first: float
    late_tokens: int | None


@dataclass(frozen=True, slots=True)
class PairCell:
    """The figures of one workload at one concurrency; medians over rounds of means over pairs.

    Attributes:
        sequential, probe, linked: seconds from A's first token to B's first, by way.
        decode_a, prefill_b: T_decode of A and T_prefill of B, sequential.
        hidden: (sequential - linked) / min(decode_a, prefill_b), FlashAgents Eq. 4.
        hidden_own: the same with A's decode time taken from the linked run itself, as in Eq. 3:
            two engines on one machine slow each other down, so A decodes longer while B computes.
        hidden_probe: ``hidden`` of the probe.
        handoff: seconds from A's last token to B's first, linked.
    """

    prefix: int
    streamed: int
    concurrency: int
    sequential: float
    probe: float
    linked: float
    decode_a: float
    prefill_b: float
    hidden: float
    hidden_own: float
    hidden_probe: float
    handoff: float
    late_tokens: float


class PairBench:
    """Plays rounds of pairs on two engines; ``words`` are single tokens, each with a space."""

    def __init__(self, a: EngineClient, b: EngineClient, words: list[str], seed: int = 0) -> None:
        self._a = a
        self._b = b
        self._words = words
        self._dice = random.Random(seed)

    def _make_text(self, tokens: int) -> str:
        return "The" + "".join(self._dice.choices(self._words, k=tokens - 1))

    async def play_round(
        self, way: PairWay, prefix: int, streamed: int, concurrency: int
    ) -> list[Pair]:
        """Run ``concurrency`` pairs at once, on empty caches and with fresh random texts.

        Args:
            prefix: number of tokens known of B's prompt beforehand.
            streamed: number of tokens that A writes.
        """
        await self._a.flush_cache()
        await self._b.flush_cache()
        run: Callable[[str, int], Awaitable[Pair]] = {
            "sequential": self._run_sequentially,
            "probe": self._run_with_probes,
            "linked": self._run_linked,
        }[way]
        texts = [self._make_text(prefix) for _ in range(concurrency)]
        return await run_concurrently(lambda text: run(text, streamed), texts)

    async def _decode(
        self, streamed: int, on_text: Callable[[str, list[int]], None] = lambda text, ids: None
    ) -> tuple[float, float, str]:
        """Generate A's answer; return when its first and last token came, and its text."""
        sampling = {
            "max_new_tokens": streamed,
            "temperature": 0,
            "ignore_eos": True,
            "stream_interval": _STREAM_INTERVAL,
        }
        first, pieces = 0.0, list[str]()
        async with self._a.generate(text=self._make_text(32), sampling=sampling) as deltas:
            async for delta in deltas:
                first = first or clock.now()
                pieces.append(delta.text)
                on_text(delta.text, delta.token_ids)
        return first, clock.now(), "".join(pieces)

    async def _ask_b(
        self, prompt: str, stream_id: str | None = None, tokens: int = 1
    ) -> tuple[float, int | None]:
        """Return when B's first token came, and how many prompt tokens its request computed."""
        sampling = {"max_new_tokens": tokens, "temperature": 0}
        generation = self._b.generate(text=prompt, sampling=sampling, prompt_stream_id=stream_id)
        first, late = 0.0, None
        async with generation as deltas:
            async for delta in deltas:
                first = first or clock.now()
                late = delta.usage.late_tokens if delta.usage else None
        return first, late

    async def _run_sequentially(self, prefix: str, streamed: int) -> Pair:
        first, last, text = await self._decode(streamed)
        done, late = await self._ask_b(prefix + text + _SUFFIX)
        return Pair(last - first, done - first, late)

    async def _run_with_probes(self, prefix: str, streamed: int) -> Pair:
        """Send prefill requests with ever longer prompts, one at a time, 32 new tokens each."""
        pieces: list[str] = []
        sent_tokens, tokens, has_grown, is_finished = 0, 0, anyio.Event(), False
        first, last, text = 0.0, 0.0, ""

        def on_text(text: str, ids: list[int]) -> None:
            nonlocal tokens
            pieces.append(text)
            tokens += len(ids)
            has_grown.set()

        async def follow() -> None:
            nonlocal sent_tokens, has_grown
            await self._ask_b(prefix, tokens=0)
            while not is_finished:
                await has_grown.wait()
                has_grown = anyio.Event()
                if not is_finished and tokens - sent_tokens >= _PROBE_CHUNK:
                    sent_tokens = tokens
                    await self._ask_b(prefix + "".join(pieces), tokens=0)

        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            first, last, text = await self._decode(streamed, on_text)
            is_finished = True
            has_grown.set()
        done, late = await self._ask_b(prefix + text + _SUFFIX)
        return Pair(last - first, done - first, late)

    async def _run_linked(self, prefix: str, streamed: int) -> Pair:
        link = Link(self._b, Prompt([prefix, Slot("A"), _SUFFIX]), agent="B")
        first, last, done, late = 0.0, 0.0, 0.0, None
        async with anyio.create_task_group() as group:
            group.start_soon(link.run)
            first, last, text = await self._decode(streamed, lambda text, _: link.feed("A", text))
            link.close_slot("A")
            done, late = await self._ask_b(prefix + text + _SUFFIX, link.claim())
        return Pair(last - first, done - first, late)


async def measure_cell(
    bench: PairBench, player: RoundPlayer, prefix: int, streamed: int, concurrency: int
) -> PairCell:
    """Play all rounds of one workload, and summarise them."""

    async def run(way: PairWay) -> list[Pair]:
        return await bench.play_round(way, prefix, streamed, concurrency)

    rounds = await player.play(WAYS, run, f"{prefix}/{streamed} C={concurrency}")

    def middle(way: PairWay, value: Callable[[Pair], float]) -> float:
        return median(mean(value(pair) for pair in pairs) for pairs in rounds[way])

    times = {way: middle(way, lambda pair: pair.downstream_first) for way in WAYS}
    decode = middle("sequential", lambda pair: pair.upstream_end)
    prefill = middle("sequential", lambda pair: pair.downstream_first - pair.upstream_end)
    bound = min(decode, prefill)
    handoff = middle("linked", lambda pair: pair.downstream_first - pair.upstream_end)
    return PairCell(
        prefix=prefix,
        streamed=streamed,
        concurrency=concurrency,
        **times,
        decode_a=decode,
        prefill_b=prefill,
        hidden=(times["sequential"] - times["linked"]) / bound,
        hidden_own=(prefill - handoff) / bound,
        handoff=handoff,
        hidden_probe=(times["sequential"] - times["probe"]) / bound,
        late_tokens=middle("linked", lambda pair: pair.late_tokens or 0),
    )


def _make_table(cells: list[PairCell]) -> Table:
    table = make_table(
        "From A's first token to B's first token",
        *("prefix", "streamed", "C", "sequential", "probe", "linked", "T_decode A"),
        *("T_prefill B", "A end to B", "seq/probe", "seq/linked"),
        *("hidden probe", "hidden", "hidden own", "late tokens"),
    )
    for cell in cells:
        times = (cell.sequential, cell.probe, cell.linked, cell.decode_a, cell.prefill_b)
        table.add_row(
            *(str(value) for value in (cell.prefix, cell.streamed, cell.concurrency)),
            *(f"{value:.2f} s" for value in times),
            f"{cell.handoff * 1000:.0f} ms",
            f"{cell.sequential / cell.probe:.2f}x",
            f"{cell.sequential / cell.linked:.2f}x",
            f"{cell.hidden_probe:.2f}",
            f"{cell.hidden:.2f}",
            f"{cell.hidden_own:.2f}",
            f"{cell.late_tokens:.0f}",
        )
    return table


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this setting has."""
    group = parser.add_argument_group("an upstream that decodes")
    group.add_argument(
        "--upstream-decodes",
        action="store_true",
        help="on a separate engine; both are started here, on --core and the next core",
    )
    group.add_argument("--text", type=Path, help="trains the tokenizer; random words if not given")


def check_options(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    """Set this setting's defaults, and exit with a message for options that it does not have."""
    urls = (chosen.stock_url, chosen.lpm_url, chosen.flashmoa_url)
    if chosen.tps or chosen.full or chosen.picture or any(urls):
        parser.error("--upstream-decodes starts its engines; it has no pace, grid or picture")
    chosen.prefix = chosen.prefix or [2000]
    chosen.upstream = chosen.upstream or [256, 128]
    chosen.concurrency = chosen.concurrency or [1, 2, 4]


async def measure(arguments: argparse.Namespace) -> None:
    """Measure every combination, print the table and write the report."""
    model = tiny_model(arguments.shape, tokenizer_texts(arguments), model_cache(arguments))
    roles = [
        Role(name, plugin=True, core=arguments.core + place, model=model)
        for place, name in enumerate(("upstream", "downstream"))
    ]
    grid = list(product(arguments.prefix, arguments.upstream, arguments.concurrency))
    report = Report("handoff", arguments)
    async with report.connect(roles, _POOL_TOKENS) as engines:
        words = single_token_words(model)
        a, b = engines.clients.values()
        bench = PairBench(a, b, words, arguments.seed)
        with RoundPlayer(report.console, arguments.repeats, len(grid) * len(WAYS)) as player:
            await bench.play_round("linked", arguments.prefix[0], 64, 1)
            cells = [await measure_cell(bench, player, *workload) for workload in grid]
    report.console.print(_make_table(cells))
    report.save({"cells": [asdict(cell) for cell in cells]})
