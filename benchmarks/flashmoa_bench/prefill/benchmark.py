"""Prefill-only requests in bulk: stock SGLang and FlashMoA (MoE-Prefill §8.2, Table 2).

The paper's mix of datasets, with synthetic texts and so many times fewer requests, so many at a
time. Stock SGLang generates one token for each, in order of arrival (fcfs) and by the longest
cached prefix (lpm); FlashMoA scores two candidates. Then the same on two engines with the plugin:
in turn, behind sglang-router if it is installed, and behind FlashMoA's router, which hears the
engines' KV events.
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
from flashmoa_bench.harness import routers as gateways
from flashmoa_bench.harness.command_line import command_line, positive
from flashmoa_bench.harness.engines import Engines, Role, connected
from flashmoa_bench.harness.report import Report, progress, terminal
from flashmoa_bench.harness.rounds import alternating
from flashmoa_bench.prefill.mix import TABLE_2, Dataset, prompts
from flashmoa_bench.prefill.passes import (
    AskFunction,
    OneToken,
    PrefillAnswer,
    PrefillPass,
    PrefillRequest,
    Scored,
    play,
    seconds_of,
    show,
    summarise,
    unique_tokens,
)

FCFS, LPM, OURS, SECOND = "fcfs", "lpm", "flashmoa", "second"
IN_TURN = "round_robin"
ROLES = (
    Role(FCFS, plugin=False, arguments=("--schedule-policy", "fcfs"), core=0),
    Role(LPM, plugin=False, arguments=("--schedule-policy", "lpm"), core=0, optional=True),
    Role(OURS, plugin=True, core=0),
    Role(SECOND, plugin=True, core=1, optional=True),
)
# One engine against the best of stock SGLang; two engines against taking turns.
GOALS = {OURS: 1.35, gateways.OURS: 1.16}
# Every vocabulary has these ids, and none has special tokens among them.
_FIRST_ID, _IDS = 1000, 3000
_SECONDS = 600.0


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench prefill-only``; return the exit status."""
    parser = command_line("prefill_only", __doc__, ROLES)
    parser.set_defaults(shape="small")
    parser.add_argument(
        "--scale", type=float, default=0.004, help="of Table 2's 73,800 requests (37.9M tokens)"
    )
    parser.add_argument(
        "--lengths", type=float, default=0.25, help="of prompts and forwards, over the paper's"
    )
    parser.add_argument(
        "--longest", type=positive, default=32_000, help="prompt's tokens; a model's context"
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
        "--stock-forward", type=positive, help="the same of stock engines, where it is another"
    )
    parser.add_argument("--kv-tokens", type=positive, default=65_536, help="of engines' caches")
    anyio.run(_main, parser.parse_args(arguments))
    return 0


async def _main(options: argparse.Namespace) -> None:
    console, report = terminal(), Report("prefill_only", options)
    requests = mixed(options)
    async with (
        connected(_roles(options), options, options.kv_tokens, console) as engines,
        httpx.AsyncClient(timeout=_SECONDS) as http,
    ):
        await report.describe(engines)
        report.head(console)
        bench = _Bench(engines, requests, options, http)
        expected, one = await bench.one_engine(console)
        two = await bench.two_engines(expected, console) if SECOND in engines else {}
    unique, tokens = unique_tokens(requests), sum(len(request.ids) for request in requests)
    console.print(f"{len(requests):,} requests, {tokens:,} tokens, {unique:,} unique\n")
    stock = min((way for way in one if way != OURS), key=lambda way: seconds_of(one[way]))
    tables = {
        "one engine": summarise(one, stock, expected, unique),
        "two engines": summarise(two, IN_TURN, expected, unique) if two else [],
    }
    for title, rows in tables.items():
        show(title, rows, GOALS, console)
    mix = {"requests": len(requests), "tokens": tokens, "unique": unique}
    rows = {title: [asdict(row) for row in rows] for title, rows in tables.items()}
    report.save(console, {"mix": mix, **rows})


def _roles(options: argparse.Namespace) -> list[Role]:
    """Return the roles with the forwards of this run, which are as long as its prompts."""

    def forwards(role: Role) -> tuple[str, ...]:
        asked = options.forward if role.plugin else options.stock_forward or options.forward
        tokens = str(max(1, round(asked * options.lengths)))
        sizes = ("--chunked-prefill-size", tokens, "--max-prefill-tokens", tokens)
        return (*role.arguments, *sizes, *(_events() if role.plugin else ()))

    return [replace(role, arguments=forwards(role)) for role in ROLES]


def _events() -> tuple[str, str]:
    """Return the arguments that have an engine tell routers of its cache."""
    told = {"publisher": "zmq", "endpoint": f"tcp://*:{free_port()}"}
    return "--kv-events-config", json.dumps(told)


def mixed(options: argparse.Namespace) -> list[PrefillRequest]:
    """Return the mix at the scale of this run."""
    table = tuple(_scaled(one, options.lengths, options.longest) for one in TABLE_2)
    return [
        PrefillRequest(one.name, [_FIRST_ID + token % _IDS for token in one.tokens])
        for one in prompts(options.scale, options.spread, options.seed, table)
    ]


def _scaled(dataset: Dataset, lengths: float, longest: int) -> Dataset:
    """Scale the range and the mean of a dataset's prompts; what is then too long is the longest."""

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


class _Bench:
    """Runs all ways, in turn."""

    def __init__(
        self,
        engines: Engines,
        requests: Sequence[PrefillRequest],
        options: argparse.Namespace,
        http: httpx.AsyncClient,
    ) -> None:
        self._engines = engines
        self._requests = requests
        self._options = options
        self._http = http

    async def one_engine(
        self, console: Console
    ) -> tuple[dict[str, PrefillAnswer], dict[str, list[PrefillPass]]]:
        """Return what stock SGLang answers with log-probabilities, and every way's passes."""
        stock = self._engines[FCFS]
        first = _Way([stock], [OneToken(self._http, stock.url, logprobs=True)])
        expected = dict((await self._pass(first, {})).answers)
        ways = {
            name: _Way([self._engines[name]], [OneToken(self._http, self._engines[name].url)])
            for name in (FCFS, LPM)
            if name in self._engines
        }
        ours = self._engines[OURS]
        ways[OURS] = _Way([ours], [_scored(ours, expected)])
        return expected, await self._rounds(ways, expected, console)

    async def two_engines(
        self, expected: Mapping[str, PrefillAnswer], console: Console
    ) -> dict[str, list[PrefillPass]]:
        """Return the passes of each router, over the same two engines."""
        both = [self._engines[OURS], self._engines[SECOND]]
        ways = {IN_TURN: _Way(both, [_scored(engine, expected) for engine in both])}
        ways |= {name: _Way(both, gateway=name) for name in gateways.available()}
        return await self._rounds(ways, expected, console)

    async def _rounds(
        self, ways: Mapping[str, _Way], expected: Mapping[str, PrefillAnswer], console: Console
    ) -> dict[str, list[PrefillPass]]:
        passes: dict[str, list[PrefillPass]] = {name: [] for name in ways}
        with progress(console) as bars:
            bar = bars.add_task("warming up", total=self._options.repeats * len(ways))
            for way in ways.values():
                await self._pass(way, expected)
            for name in alternating(self._options.repeats, list(ways)):
                bars.update(bar, description=name)
                passes[name].append(await self._pass(ways[name], expected))
                bars.advance(bar)
        return passes

    async def _pass(self, way: _Way, expected: Mapping[str, PrefillAnswer]) -> PrefillPass:
        for engine in way.engines:
            await engine.flush_cache()
        at_once = self._options.concurrency * len(way.engines)
        if way.gateway is None:
            return await play(way.asks, self._requests, at_once)
        urls = [engine.url for engine in way.engines]
        # A router that has seen the prompts before believes them cached: a new one each time.
        async with gateways.gateway(way.gateway, urls) as url, EngineClient(url) as client:
            return await play([_scored(client, expected)], self._requests, at_once)


@dataclass(frozen=True, slots=True)
class _Way:
    """How the engines are asked: directly, or through a gateway."""

    engines: Sequence[EngineClient]
    asks: Sequence[AskFunction] = ()
    gateway: str | None = None


def _scored(engine: EngineClient, expected: Mapping[str, PrefillAnswer]) -> AskFunction:
    return Scored(engine, {name: answer.token for name, answer in expected.items()})
