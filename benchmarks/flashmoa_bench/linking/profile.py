"""Say where the time between an agent's last token and the next agent's first token goes.

Pipelines as in ``flashmoa bench handoff`` are linked. The engine notes, for each request, when its
HTTP process received it, when its scheduler got to it, and when its forward had ended
(``--enable-metrics``). The same requests are sent again without a stream on the prompts that are
cached now, with as many tokens left to compute: what they take, no link can save.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import mean, median

import anyio
import httpx
from rich.console import Console

from flashmoa.engine import BadAnswer, EngineClient
from flashmoa.engine.modelled_gpus import counted_since, read_device
from flashmoa_bench.harness import clock
from flashmoa_bench.harness.command_line import make_parser, positive
from flashmoa_bench.harness.engines import Role
from flashmoa_bench.harness.report import Report, make_table
from flashmoa_bench.harness.requests import Feeder, random_ids
from flashmoa_bench.harness.rounds import RoundPlayer, run_concurrently
from flashmoa_bench.linking.pipelines import SUFFIX_TOKENS, Pipeline

ROLES = (Role("flashmoa", plugin=True, arguments=("--enable-metrics",)),)
# What passes between two moments of a request, and the name of the later moment: of SGLang's in its
# answer's ``meta_info``, or of ours.
STAGES = {
    "client: from A's last token to B's request": "sent",
    "until the HTTP process has read the request": "request_received_ts",
    "HTTP process: to the scheduler": "api_server_dispatch_finish_ts",
    "scheduler: until the request is in a batch": "forward_entry_time",
    "forward, and the scheduler around it": "prefill_finished_time",
    "scheduler, detokenizer, HTTP process: the answer": "response_sent_to_client_ts",
    "the answer reaches the client": "read",
}
DEVICE, TOTAL = "device", "total"
# Seconds of each stage, of all together, and of the device for the request's forward by itself.
_Times = Mapping[str, float]


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench handoff_profile`` and return the exit status."""
    parser = make_parser("handoff_profile", __doc__, ROLES)
    parser.add_argument("--tps", type=float, default=100.0, help="upstream tokens per second")
    parser.add_argument("--prefix", type=positive, default=2000, help="tokens known beforehand")
    parser.add_argument("--upstream", type=positive, default=200, help="upstream tokens")
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1, 8])
    chosen = parser.parse_args(arguments)
    if chosen.tps <= 0:
        parser.error("--tps must be above 0")
    if chosen.device_slowdown != 1:
        parser.error("--device-slowdown stretches one of the stages alone: leave it out")
    anyio.run(_main, chosen)
    return 0


async def _main(arguments: argparse.Namespace) -> None:
    report = Report("handoff_profile", arguments)
    most = max(arguments.concurrency)
    pool = 4096 + most * (arguments.prefix + arguments.upstream + 64)
    results: dict[int, dict[str, _Times]] = {}
    async with (
        report.connect(ROLES, pool) as engines,
        httpx.AsyncClient(timeout=600) as http,
    ):
        dice, engine = random.Random(arguments.seed), engines["flashmoa"]

        async def run(concurrency: int) -> dict[str, _Times]:
            return await _play(engine, http, arguments, concurrency, dice)

        with RoundPlayer(report.console, arguments.repeats, len(arguments.concurrency)) as player:
            await run(most)
            rounds = await player.play(arguments.concurrency, run, "pipelines:")
    for concurrency, each in rounds.items():
        results[concurrency] = {
            way: _fold(median, [round_[way] for round_ in each]) for way in each[0]
        }
        show(concurrency, results[concurrency], report.console)
    report.save({"stages": results})


async def _play(
    engine: EngineClient,
    http: httpx.AsyncClient,
    arguments: argparse.Namespace,
    concurrency: int,
    dice: random.Random,
) -> dict[str, _Times]:
    """Return the mean seconds over pipelines of each stage, linked and on cached prompts."""
    await engine.flush_cache()
    prefix, started = random_ids(dice, arguments.prefix), clock.now()
    pipelines = [
        Pipeline(
            prefix,
            random_ids(dice, arguments.upstream),
            random_ids(dice, SUFFIX_TOKENS),
            arguments.tps,
            started,
        )
        for _ in range(concurrency)
    ]
    late: list[int] = []

    async def run_linked(pipeline: Pipeline) -> _Times:
        async with Feeder(engine, pipeline.prefix, pipeline.written) as feeder:
            await clock.sleep_until(pipeline.end)
            # The clocks of the pipelines and of the engine differ.
            ended = time.time() - (clock.now() - pipeline.end)
            times, tokens = await _ask(http, engine.url, pipeline.prompt, feeder.claim())
            late.append(tokens)
            return stages(ended, times)

    linked = await run_concurrently(run_linked, pipelines)
    left = max(1, round(mean(late)))

    async def run_cached(pipeline: Pipeline) -> _Times:
        prompt = [*pipeline.prompt[:-left], *random_ids(dice, left)]
        asked = time.time()
        return stages(asked, (await _ask(http, engine.url, prompt, None))[0])

    cached = await run_concurrently(run_cached, pipelines)
    ways: dict[str, _Times] = {"linked": _fold(mean, linked), "cached": _fold(mean, cached)}
    prompts = [[*pipeline.prompt[:-left], *random_ids(dice, left)] for pipeline in pipelines]
    if device := await _device_seconds(engine, prompts):
        ways = {way: {**times, DEVICE: device} for way, times in ways.items()}
    return ways


async def _device_seconds(engine: EngineClient, prompts: Sequence[Sequence[int]]) -> float | None:
    """Return the mean seconds of a prompt's forward, by itself; ``None`` on a real device."""
    before = await read_device(engine.url)
    for prompt in prompts:
        await engine.prefill_only(input_ids=prompt)
    after = await read_device(engine.url)
    if not before or not after:
        return None
    counts = counted_since(before, after)
    return counts["device_seconds"] / max(1, counts["forwards"])


async def _ask(
    http: httpx.AsyncClient, url: str, prompt: Sequence[int], stream_id: str | None
) -> tuple[dict[str, float], int]:
    """Ask for one token; return the request's moments, and how many prompt tokens it computed.

    Raises: BadAnswer if the answer lacks a moment: the engine needs ``--enable-metrics``.
    """
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        "prompt_stream_id": stream_id,
        "stream": True,
    }
    sent = time.time()
    async with http.stream("POST", f"{url}/generate", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                moments = {**json.loads(line[6:])["meta_info"], "sent": sent, "read": time.time()}
                if missing := set(STAGES.values()) - moments.keys():
                    names = ", ".join(sorted(missing))
                    raise BadAnswer(f"{url} does not say {names}: start it with --enable-metrics")
                late = int(moments["prompt_tokens"] - moments["cached_tokens"])
                return moments, late
    raise BadAnswer(f"{url} answered without a token")


def stages(began: float, moments: Mapping[str, float]) -> _Times:
    """Return the seconds of each stage of a request, and of all stages together.

    Args:
        began: when the first stage began.
        moments: the request's moments by name, in the same clock.
    """
    ends = [began, *(moments[name] for name in STAGES.values())]
    spans = (after - before for before, after in pairwise(ends))
    return {**dict(zip(STAGES, spans, strict=True)), TOTAL: ends[-1] - began}


def _fold(fold: Callable[[list[float]], float], several: Sequence[_Times]) -> _Times:
    return {stage: fold([times[stage] for times in several]) for stage in several[0]}


def show(concurrency: int, ways: Mapping[str, _Times], console: Console) -> None:
    """Print the table."""
    title = f"From A's last token to B's first, {concurrency} at once, ms"
    table = make_table(title, "", "linked", "on a cached prompt")
    for stage in (*STAGES, TOTAL):
        table.add_row(stage, *(f"{1000 * ways[way][stage]:.2f}" for way in ("linked", "cached")))
    if device := ways["linked"].get(DEVICE):
        table.add_row("of the forward: device, by itself", *[f"{1000 * device:.2f}"] * 2)
    console.print(table)
    console.print(
        "Means over pipelines, medians over rounds. On a cached prompt: the same request without a "
        "stream, with as many tokens left to compute.\n",
        highlight=False,
    )
