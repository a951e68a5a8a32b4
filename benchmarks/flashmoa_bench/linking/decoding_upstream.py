"""Handoffs between two engines, the upstream agent really decoding: the setting of §6.1.

For each pair: the time from A's first token to B's first token, when B's prompt is sent after A's
last token (*sequential*), when its growing prefix is sent in stateless prefill requests (*probe*:
what a client can do with any server), and when it is *linked*. Engines A and B are two real SGLang
engines with a tiny model, one per core.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Literal

import anyio
from rich.table import Table

from flashmoa.engine import EngineClient
from flashmoa.engine.local import WITHOUT_OVERLAP, local_engines
from flashmoa.linking.link import Link
from flashmoa.linking.prompt import Prompt, Slot
from flashmoa_bench.harness.engines import single_token_words, texts, tiny_model
from flashmoa_bench.harness.report import Report, terminal
from flashmoa_bench.harness.rounds import alternating

PairWay = Literal["sequential", "probe", "linked"]
WAYS: tuple[PairWay, ...] = ("sequential", "probe", "linked")

_PROBE_CHUNK = 32
# On a CPU, sending every token by itself costs the engines and this client, which share its
# two cores, several per cent of them.
_STREAM_INTERVAL = 4
_SUFFIX = " and so it ends"


@dataclass(frozen=True, slots=True)
class Pair:
    """One pair's times, in seconds from A's first token."""

    upstream_end: float
    downstream_first: float
    late_tokens: int | None


@dataclass(frozen=True, slots=True)
class PairCell:
    """One workload at one concurrency; medians over rounds of the mean over pairs.

    ``hidden``: (sequential - linked) / min(T_decode of A, T_prefill of B), FlashAgents Eq. 4.
    Two engines on one machine slow each other down, so A also decodes longer while B computes;
    ``hidden_own`` takes A's decode time from the linked run itself, as Eq. 3 does.
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
    """Workloads on two engines.

    Args:
        words: single-token words, as the tokenizer writes them inside a text.
    """

    def __init__(self, a: EngineClient, b: EngineClient, words: list[str], seed: int = 0) -> None:
        self._a = a
        self._b = b
        self._words = words
        self._dice = random.Random(seed)

    def _text(self, tokens: int) -> str:
        return "The" + "".join(self._dice.choices(self._words, k=tokens - 1))

    async def round(self, way: PairWay, prefix: int, streamed: int, concurrency: int) -> list[Pair]:
        """Run ``concurrency`` pairs once, on empty caches and fresh random texts."""
        await self._a.flush_cache()
        await self._b.flush_cache()
        run: Callable[[str, int], Awaitable[Pair]] = {
            "sequential": self._sequential,
            "probe": self._probe,
            "linked": self._linked,
        }[way]
        pairs: list[Pair] = []

        async def one() -> None:
            pairs.append(await run(self._text(prefix), streamed))

        async with anyio.create_task_group() as group:
            for _ in range(concurrency):
                group.start_soon(one)
        return pairs

    async def _decode(
        self, streamed: int, on_text: Callable[[str, list[int]], None]
    ) -> tuple[float, float, str]:
        """Have A write; return when its first and last token came, and its text."""
        sampling = {
            "max_new_tokens": streamed,
            "temperature": 0,
            "ignore_eos": True,
            "stream_interval": _STREAM_INTERVAL,
        }
        first, parts = 0.0, list[str]()
        async with self._a.generate(text=self._text(32), sampling=sampling) as deltas:
            async for delta in deltas:
                first = first or time.perf_counter()
                parts.append(delta.text)
                on_text(delta.text, delta.token_ids)
        return first, time.perf_counter(), "".join(parts)

    async def _first_token(
        self, text: str, stream_id: str | None = None
    ) -> tuple[float, int | None]:
        sampling = {"max_new_tokens": 1, "temperature": 0}
        at, late = 0.0, None
        async with self._b.generate(
            text=text, sampling=sampling, prompt_stream_id=stream_id
        ) as deltas:
            async for delta in deltas:
                at = at or time.perf_counter()
                late = delta.usage.late_tokens if delta.usage else None
        return at, late

    async def _sequential(self, prefix: str, streamed: int) -> Pair:
        first, last, text = await self._decode(streamed, lambda _text, _ids: None)
        done, late = await self._first_token(prefix + text + _SUFFIX)
        return Pair(last - first, done - first, late)

    async def _probe(self, prefix: str, streamed: int) -> Pair:
        """Send prefill requests with ever longer prompts, one at a time, 32 new tokens each."""
        parts: list[str] = []
        sent, tokens, new, finished = 0, 0, anyio.Event(), False
        first, last, text = 0.0, 0.0, ""

        def on_text(text: str, ids: list[int]) -> None:
            nonlocal tokens
            parts.append(text)
            tokens += len(ids)
            new.set()

        async def follow() -> None:
            nonlocal sent, new
            await self._stateless_prefill(prefix)
            while not finished:
                await new.wait()
                new = anyio.Event()
                if not finished and tokens - sent >= _PROBE_CHUNK:
                    sent = tokens
                    await self._stateless_prefill(prefix + "".join(parts))

        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            first, last, text = await self._decode(streamed, on_text)
            finished = True
            new.set()
        done, late = await self._first_token(prefix + text + _SUFFIX)
        return Pair(last - first, done - first, late)

    async def _stateless_prefill(self, text: str) -> None:
        async with self._b.generate(text=text, sampling={"max_new_tokens": 0}) as deltas:
            async for _ in deltas:
                pass

    async def _linked(self, prefix: str, streamed: int) -> Pair:
        prompt = Prompt([prefix, Slot("A"), _SUFFIX])
        link = Link(self._b, prompt, agent="B")
        first, last, done = 0.0, 0.0, 0.0
        late: int | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(link.run)
            first, last, text = await self._decode(
                streamed, lambda text, _ids: link.feed("A", text)
            )
            link.close_slot("A")
            done, late = await self._first_token(prefix + text + _SUFFIX, link.take_over())
        return Pair(last - first, done - first, late)


async def measure_cell(
    bench: PairBench, prefix: int, streamed: int, concurrency: int, repeats: int
) -> PairCell:
    rounds: dict[PairWay, list[list[Pair]]] = {way: [] for way in WAYS}
    for way in alternating(repeats, WAYS):
        rounds[way].append(await bench.round(way, prefix, streamed, concurrency))

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
        sequential=times["sequential"],
        probe=times["probe"],
        linked=times["linked"],
        decode_a=decode,
        prefill_b=prefill,
        hidden=(times["sequential"] - times["linked"]) / bound,
        hidden_own=(prefill - handoff) / bound,
        handoff=handoff,
        hidden_probe=(times["sequential"] - times["probe"]) / bound,
        late_tokens=middle("linked", lambda pair: pair.late_tokens or 0),
    )


def table(cells: list[PairCell]) -> Table:
    shown = Table(title="From A's first token to B's first token", title_justify="left")
    names = ("prefix", "streamed", "C", "sequential", "probe", "linked", "T_decode A")
    hidden = ("hidden probe", "hidden", "hidden own")
    more = ("T_prefill B", "A end to B", "seq/probe", "seq/linked", *hidden, "late tokens")
    for name in (*names, *more):
        shown.add_column(name, justify="right")
    for cell in cells:
        times = (cell.sequential, cell.probe, cell.linked, cell.decode_a, cell.prefill_b)
        shown.add_row(
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
    return shown


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what only this setting has."""
    group = parser.add_argument_group("an upstream that decodes")
    group.add_argument(
        "--upstream-decodes",
        action="store_true",
        help="on an engine of its own, started here, one core after --core",
    )
    group.add_argument("--text", type=Path, help="trains the tokenizer; random words if not given")


def check_options(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    """Refuse what this setting does not have; set its defaults."""
    urls = (chosen.stock_url, chosen.lpm_url, chosen.flashmoa_url)
    if chosen.tps or chosen.full or chosen.picture or any(urls):
        parser.error("--upstream-decodes starts its engines; it has no pace, grid or picture")
    chosen.prefix = chosen.prefix or [2000]
    chosen.upstream = chosen.upstream or [256, 128]
    chosen.concurrency = chosen.concurrency or [1, 2, 4]


async def measure(arguments: argparse.Namespace) -> None:
    """Measure every combination, print the table and write the report."""
    console = terminal()
    model = tiny_model(arguments.shape, texts(arguments), arguments.cache / "models")
    words = single_token_words(model)
    cells: list[PairCell] = []
    report = Report("handoff", arguments)
    report.head(console)
    async with local_engines() as engines:
        settings = ["--max-total-tokens", "16000", *WITHOUT_OVERLAP]
        a = await engines.start(model, core=arguments.core, arguments=settings, wait=False)
        b = await engines.start(model, core=arguments.core + 1, arguments=settings)
        await a.wait_until_ready()
        async with EngineClient(a.url) as client_a, EngineClient(b.url) as client_b:
            bench = PairBench(client_a, client_b, words, arguments.seed)
            await bench.round("linked", arguments.prefix[0], 64, 1)
            grid = product(arguments.prefix, arguments.upstream, arguments.concurrency)
            for prefix, streamed, concurrency in grid:
                cell = await measure_cell(bench, prefix, streamed, concurrency, arguments.repeats)
                cells.append(cell)
                console.print(
                    f"{prefix} known, {streamed} streamed, C={concurrency}: "
                    f"hidden {cell.hidden:.2f} (probe {cell.hidden_probe:.2f})"
                )
    console.print(table(cells))
    report.save(console, {"cells": [asdict(cell) for cell in cells]})
