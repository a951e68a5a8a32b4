"""Measure prefill-only requests on stock SGLang and on FlashMoA (MoE-Prefill §8.2, Table 2).

The requests are the paper's mix of datasets, with synthetic texts and fewer requests. Stock SGLang
generates one token for each, in order of arrival (fcfs) and by the longest cached prefix (lpm).
FlashMoA scores two candidates. ``flashmoa bench router-measured`` has several engines.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace

from flashmoa_bench.harness.command_line import Option, command, positive
from flashmoa_bench.harness.engines import Role
from flashmoa_bench.harness.report import Report
from flashmoa_bench.harness.rounds import RoundPlayer
from flashmoa_bench.prefill.mix import TABLE_2, Mix
from flashmoa_bench.prefill.passes import (
    PrefillPass,
    PrefillRequest,
    SendFunction,
    median_seconds,
    play,
    score_sender,
    summarise,
    to_requests,
    token_sender,
    unique_tokens,
)

FCFS, LPM, OURS = "fcfs", "lpm", "flashmoa"
ROLES = (
    Role(FCFS, plugin=False, arguments=("--schedule-policy", "fcfs")),
    Role(LPM, plugin=False, arguments=("--schedule-policy", "lpm"), optional=True),
    Role(OURS, plugin=True),
)


async def _measure(report: Report) -> None:
    options = report.options
    requests = make_requests(options)
    roles = [replace(role, arguments=_arguments(role, options)) for role in ROLES]
    async with report.connect(roles, options.kv_tokens) as engines:

        async def send(way: str, sender: SendFunction) -> PrefillPass:
            await engines[way].flush_cache()
            return await play([sender], requests, options.concurrency)

        # The first pass has log-probabilities, to compare the other passes with.
        expected = (await send(FCFS, token_sender(engines[FCFS], logprobs=True))).answers
        likeliest = {name: answer.token for name, answer in expected.items()}
        senders = {name: token_sender(engines[name]) for name in (FCFS, LPM) if name in engines}
        senders[OURS] = score_sender(engines[OURS], likeliest)

        async def run(way: str) -> PrefillPass:
            return await send(way, senders[way])

        with RoundPlayer(report.console, options.repeats, len(senders)) as player:
            passes = await player.play(list(senders), run)
    unique, tokens = unique_tokens(requests), sum(len(request.ids) for request in requests)
    report.console.print(f"{len(requests):,} requests, {tokens:,} tokens, {unique:,} unique\n")
    stock_ways = [way for way in passes if way != OURS]
    fastest = min(stock_ways, key=lambda way: median_seconds(passes[way]))
    rows = summarise(passes, fastest, expected, unique)
    report.show("One engine; over the better stock policy the paper gains 1.16 to 1.18", rows)
    mix: Mapping[str, int] = {"requests": len(requests), "tokens": tokens, "unique": unique}
    report.save({"mix": mix, "one engine": rows})


def _arguments(role: Role, options: argparse.Namespace) -> tuple[str, ...]:
    size = options.forward if role.plugin else options.stock_forward or options.forward
    tokens = str(max(1, round(size * options.lengths)))
    return *role.arguments, "--chunked-prefill-size", tokens, "--max-prefill-tokens", tokens


def make_requests(options: argparse.Namespace) -> list[PrefillRequest]:
    table = tuple(dataset.scaled(options.lengths) for dataset in TABLE_2)
    return to_requests(Mix(table, options.scale).prompts(options.seed))


main = command(
    "prefill_only",
    __doc__,
    _measure,
    ROLES,
    Option("--scale", float, 0.004, "share of Table 2's 73,800 requests"),
    Option("--lengths", float, 0.25, "lengths of prompts and forwards over the paper's"),
    Option("--concurrency", positive, 64, "requests at a time"),
    Option("--forward", positive, 8192, "tokens of a forward at --lengths 1"),
    Option("--stock-forward", positive, None, "the same for stock engines, if different"),
    Option("--kv-tokens", positive, 65_536, "tokens of a cache"),
    defaults={"shape": "small"},
)
