"""Measure prefill-only requests on stock SGLang and on FlashMoA (MoE-Prefill §8.2, Table 2).

The requests are the paper's mix of datasets, with synthetic texts and fewer requests. On one
engine, stock SGLang generates one token for each, in order of arrival (fcfs) and by the longest
cached prefix (lpm), and FlashMoA scores two candidates. On several engines, FlashMoA scores them
with the engines in turn, behind sglang-router (if it is installed), and behind FlashMoA's router,
which listens to the engines' KV events.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import anyio
import httpx
from rich.console import Console

from flashmoa.engine import EngineClient
from flashmoa.engine.local import free_port
from flashmoa_bench.harness import clock, routers
from flashmoa_bench.harness.command_line import make_parser, positive
from flashmoa_bench.harness.engines import Engines, Role
from flashmoa_bench.harness.report import Report
from flashmoa_bench.harness.requests import FIRST_ID, ID_COUNT
from flashmoa_bench.harness.rounds import RoundPlayer
from flashmoa_bench.prefill.mix import TABLE_2, Dataset, prompts
from flashmoa_bench.prefill.passes import (
    PassRow,
    PrefillAnswer,
    PrefillPass,
    PrefillRequest,
    PrefillSender,
    ScoreSender,
    SendFunction,
    TokenSender,
    median_seconds,
    play,
    show,
    summarise,
    unique_tokens,
)

FCFS, LPM, OURS = "fcfs", "lpm", "flashmoa"
IN_TURN = "round_robin"
ROLES = (
    Role(FCFS, plugin=False, arguments=("--schedule-policy", "fcfs"), core=0),
    Role(LPM, plugin=False, arguments=("--schedule-policy", "lpm"), core=0, optional=True),
    Role(OURS, plugin=True, core=0),
    Role(f"{OURS}_2", plugin=True, core=1, optional=True),
)
PARTS = ("one", "several")
# Throughput over the better stock policy on one engine, and over taking turns on several.
GOALS = {OURS: 1.35, routers.OURS: 1.16}
_TIMEOUT_SECONDS = 600.0


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench prefill-only`` and return the exit status."""
    parser = make_parser("prefill_only", __doc__, ROLES)
    parser.set_defaults(shape="small")
    parser.add_argument(
        "--scale", type=float, default=0.004, help="share of Table 2's 73,800 requests"
    )
    parser.add_argument(
        "--lengths",
        type=float,
        default=0.25,
        help="lengths of prompts and forwards over the paper's",
    )
    parser.add_argument(
        "--longest", type=positive, default=32_000, help="tokens of a prompt: a model's context"
    )
    parser.add_argument(
        "--spread", type=float, default=0.05, help="part of the mix in which siblings come"
    )
    parser.add_argument(
        "--concurrency", type=positive, default=64, help="requests at a time, per engine"
    )
    parser.add_argument(
        "--forward", type=positive, default=8192, help="tokens of a forward at --lengths 1"
    )
    parser.add_argument(
        "--stock-forward", type=positive, help="the same for stock engines, if different"
    )
    parser.add_argument("--kv-tokens", type=positive, default=65_536, help="tokens of a cache")
    parser.add_argument(
        "--engines", type=positive, default=2, help="engines behind routers, if started here"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="on one engine, on several"
    )
    anyio.run(_main, parser.parse_args(arguments))
    return 0


async def _main(options: argparse.Namespace) -> None:
    report = Report("prefill_only", options)
    requests = make_requests(options)
    async with (
        report.connect(_make_roles(options), options.kv_tokens) as engines,
        httpx.AsyncClient(timeout=clock.machine_seconds(_TIMEOUT_SECONDS)) as http,
    ):
        bench = _PrefillBench(engines, requests, options, http, report.console)
        expected = await bench.ask_stock_engine()
        one_engine = await bench.measure_one_engine(expected) if "one" in options.parts else {}
        several = await bench.measure_several(expected) if "several" in options.parts else {}
    unique, tokens = unique_tokens(requests), sum(len(request.ids) for request in requests)
    report.console.print(f"{len(requests):,} requests, {tokens:,} tokens, {unique:,} unique\n")
    tables: dict[str, list[PassRow]] = {}
    if one_engine:
        stock = [way for way in one_engine if way != OURS]
        fastest = min(stock, key=lambda way: median_seconds(one_engine[way]))
        tables["one engine"] = summarise(one_engine, fastest, expected, unique)
    if several:
        tables[f"{len(bench.ours)} engines"] = summarise(several, IN_TURN, expected, unique)
    for title, rows in tables.items():
        show(title, rows, GOALS, report.console)
    mix = {"requests": len(requests), "tokens": tokens, "unique": unique}
    rows = {title: [asdict(row) for row in rows] for title, rows in tables.items()}
    report.save({"mix": mix, **rows})


def _make_roles(options: argparse.Namespace) -> list[Role]:
    """Return the roles of this run, with the size of a forward, which is scaled like prompts."""

    def arguments(role: Role) -> tuple[str, ...]:
        size = options.forward if role.plugin else options.stock_forward or options.forward
        tokens = str(max(1, round(size * options.lengths)))
        sizes = ("--chunked-prefill-size", tokens, "--max-prefill-tokens", tokens)
        return (*role.arguments, *sizes, *(_event_arguments() if role.plugin else ()))

    more = [
        Role(f"{OURS}_{number}", plugin=True, core=(number - 1) % 2, optional=True)
        for number in range(3, options.engines + 1)
    ]
    roles = [*ROLES[: 2 + min(options.engines, 2)], *more]
    if "one" not in options.parts:
        roles = [role for role in roles if role.name != LPM]
    return [replace(role, arguments=arguments(role)) for role in roles]


def _event_arguments() -> tuple[str, str]:
    """Return the arguments with which an engine publishes events about its cache."""
    config = {"publisher": "zmq", "endpoint": f"tcp://*:{free_port()}"}
    return "--kv-events-config", json.dumps(config)


def make_requests(options: argparse.Namespace) -> list[PrefillRequest]:
    """Return the mix at the scale of this run."""
    table = tuple(_scale(dataset, options.lengths, options.longest) for dataset in TABLE_2)
    return [
        PrefillRequest(prompt.name, [FIRST_ID + token % ID_COUNT for token in prompt.tokens])
        for prompt in prompts(options.scale, options.spread, options.seed, table)
    ]


def _scale(dataset: Dataset, lengths: float, longest: int) -> Dataset:
    """Scale the lengths of a dataset's prompts, to at most ``longest`` tokens."""

    def tokens(count: int) -> int:
        return round(count * lengths)

    return replace(
        dataset,
        tokens=min(tokens(dataset.tokens), longest * dataset.requests),
        shortest=min(max(1, tokens(dataset.shortest)), longest - 1),
        longest=min(tokens(dataset.longest), longest),
        instruction=tokens(dataset.instruction),
        own=tokens(dataset.own),
    )


@dataclass(frozen=True, slots=True)
class _PrefillWay:
    """How the requests are sent to the engines: by senders in turn, or through a named router."""

    engines: Sequence[EngineClient]
    senders: Sequence[SendFunction] = ()
    router: str | None = None


class _PrefillBench:
    """Plays all passes of all ways.

    Attributes:
        ours: the engines with the plugin.
    """

    def __init__(
        self,
        engines: Engines,
        requests: Sequence[PrefillRequest],
        options: argparse.Namespace,
        http: httpx.AsyncClient,
        console: Console,
    ) -> None:
        self._engines = engines
        self._requests = requests
        self._options = options
        self._http = http
        self._console = console
        self.ours = [engines[name] for name in engines.clients if name.startswith(OURS)]

    async def ask_stock_engine(self) -> dict[str, PrefillAnswer]:
        """Return the answers of stock SGLang with log-probabilities, to compare others with."""
        stock = self._engines[FCFS]
        way = _PrefillWay([stock], [TokenSender(self._http, stock.url, logprobs=True)])
        return dict((await self._play_pass(way, {})).answers)

    async def measure_one_engine(
        self, expected: Mapping[str, PrefillAnswer]
    ) -> dict[str, list[PrefillPass]]:
        """Return the passes of stock SGLang's policies and of FlashMoA, on one engine each."""
        ways = {
            name: _PrefillWay(
                [self._engines[name]], [TokenSender(self._http, self._engines[name].url)]
            )
            for name in (FCFS, LPM)
            if name in self._engines
        }
        ways[OURS] = _PrefillWay(self.ours[:1], [ScoreSender(self.ours[0], _likeliest(expected))])
        return await self._play_rounds(ways, expected)

    async def measure_several(
        self, expected: Mapping[str, PrefillAnswer]
    ) -> dict[str, list[PrefillPass]]:
        """Return the passes of each router over the same engines; nothing if there is only one."""
        if len(self.ours) < 2:
            return {}
        scorers = [PrefillSender(engine, _likeliest(expected)) for engine in self.ours]
        ways = {IN_TURN: _PrefillWay(self.ours, scorers)}
        ways |= {name: _PrefillWay(self.ours, router=name) for name in routers.installed_routers()}
        return await self._play_rounds(ways, expected)

    async def _play_rounds(
        self, ways: Mapping[str, _PrefillWay], expected: Mapping[str, PrefillAnswer]
    ) -> dict[str, list[PrefillPass]]:
        async def run(name: str) -> PrefillPass:
            return await self._play_pass(ways[name], expected)

        with RoundPlayer(self._console, self._options.repeats, len(ways)) as player:
            for name in ways:
                await run(name)
            return await player.play(list(ways), run)

    async def _play_pass(
        self, way: _PrefillWay, expected: Mapping[str, PrefillAnswer]
    ) -> PrefillPass:
        for engine in way.engines:
            await engine.flush_cache()
        limit = self._options.concurrency * len(way.engines)
        if way.router is None:
            return await play(way.senders, self._requests, limit)
        urls = [engine.url for engine in way.engines]
        # Each pass has a new router: one that has seen the prompts would believe them cached.
        async with routers.start_router(way.router, urls) as url, EngineClient(url) as client:
            sender = PrefillSender(client, _likeliest(expected))
            return await play([sender], self._requests, limit)


def _likeliest(expected: Mapping[str, PrefillAnswer]) -> dict[str, int]:
    return {name: answer.token for name, answer in expected.items()}
