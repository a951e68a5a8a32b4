"""Experts on the device and in host memory: tokens per forward against throughput (MoE-Prefill §4).

The same prompts in forwards of ever more tokens, on an engine whose experts are on the device and
on one that copies them there, layer by layer. The longer a forward, the more of the copying is
hidden; what is not is exposed. A batch is answered with one token each, and is one forward. A third
engine has its experts on the device and keeps no KV (§6.3): what that saves is in the second table.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import anyio
from rich.console import Console
from rich.table import Table

from flashmoa.engine import EngineClient, EngineError
from flashmoa.router.flops import UnknownShape, true_flops
from flashmoa_bench.harness.command_line import command_line, positive
from flashmoa_bench.harness.engines import Engines, Role, connected, peak_resident
from flashmoa_bench.harness.report import Report, progress, terminal
from flashmoa_bench.harness.requests import ask_batch, random_ids
from flashmoa_bench.harness.rounds import alternating

RESIDENT, H2D, KV_FREE = "resident", "h2d", "kv_free"
# A CUDA graph looks for experts where they were when it was made.
_NO_GRAPHS = "--disable-cuda-graph"
_KEEP_NOTHING = (
    "--flashmoa-kv-cache", "off", "--disable-radix-cache", "--chunked-prefill-size", "-1",
    "--skip-server-warmup",
)  # fmt: skip
ROLES = (
    Role(RESIDENT, plugin=True, arguments=(_NO_GRAPHS,)),
    Role(H2D, plugin=True, arguments=("--flashmoa-asyncep", "h2d", _NO_GRAPHS)),
    Role(KV_FREE, plugin=True, arguments=(*_KEEP_NOTHING, _NO_GRAPHS), optional=True),
)
_COMPARED_TOKENS = 64
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """Forwards of one size on one engine; seconds are medians over rounds.

    Attributes:
        exposed: seconds longer than with the experts on the device.
        teraflops: per second, by the model's shape; ``None`` where that is not known.
        mfu: these over the peak, where it was given.
    """

    way: str
    tokens: int
    seconds: float
    tokens_per_second: float
    of_resident: float
    exposed: float
    teraflops: float | None
    mfu: float | None


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """What one engine has of a model, in bytes.

    Attributes:
        device_experts: on the device. host_experts: in host memory.
        misses: how often a layer waited for experts that were not on their way.
        kv: the pool.
        peak: the scheduler process's resident memory at most, where it was started here.
    """

    way: str
    device_experts: int | None
    host_experts: int
    misses: int
    kv: int | None
    peak: int | None


def main(arguments: Sequence[str]) -> int:
    """Run ``flashmoa bench asyncep``; return the exit status."""
    parser = command_line("asyncep", __doc__, ROLES)
    parser.set_defaults(shape="experts")
    parser.add_argument(
        "--tokens", type=positive, nargs="+", default=[256, 1024, 4096], help="of a forward"
    )
    parser.add_argument("--prompt", type=positive, default=1024, help="tokens of each prompt")
    parser.add_argument("--peak-tflops", type=float, help="of the device, for its MFU")
    parser.add_argument(
        "--model-config", type=Path, metavar="FILE", help="config.json, where it is not found"
    )
    anyio.run(_main, parser.parse_args(arguments))
    return 0


async def _main(options: argparse.Namespace) -> None:
    console, report = terminal(), Report("asyncep", options)
    most = max(options.tokens)
    sizes = ("--chunked-prefill-size", str(most), "--max-prefill-tokens", str(most))
    options.engine_arguments = [*sizes, *options.engine_arguments]
    async with connected(ROLES, options, 2 * most, console) as engines:
        await report.describe(engines)
        report.head(console)
        apart = await _difference(engines, random.Random(options.seed))
        seconds = await _measure(engines, options, console)
        memory = await _memory(engines)
        config = options.model_config or await _config(engines[RESIDENT])
    rows = summarise(seconds, options, config)
    show(rows, memory, console)
    for way, most in apart.items():
        console.print(f"{way}'s log-probabilities differ by {most:.1e} at most.")
    report.save(
        console,
        {
            "rows": [asdict(row) for row in rows],
            "memory": [asdict(one) for one in memory],
            "logprobs_apart": apart,
            "seconds": seconds,
        },
    )


async def _difference(engines: Engines, dice: random.Random) -> dict[str, float]:
    """Return the largest difference of one prompt's log-probabilities from the first engine's."""
    prompt, rest = random_ids(dice, _COMPARED_TOKENS), random_ids(dice, _COMPARED_TOKENS)
    told = {
        way: (await client.next_logprobs(prompt, continuation=rest)).continuation
        for way, client in engines.clients.items()
    }
    expected = told.pop(RESIDENT)
    return {
        way: max(abs(one - other) for one, other in zip(each, expected, strict=True))
        for way, each in told.items()
    }


def batch(tokens: int, prompt: int, dice: random.Random) -> list[list[int]]:
    """Make random prompts of ``prompt`` tokens, the last one shorter, ``tokens`` in all."""
    lengths = [min(prompt, tokens - begin) for begin in range(0, tokens, prompt)]
    return [random_ids(dice, length) for length in lengths]


Seconds = dict[str, dict[int, list[float]]]


async def _measure(engines: Engines, options: argparse.Namespace, console: Console) -> Seconds:
    dice = random.Random(options.seed)
    ways = list(engines.clients)
    seconds: Seconds = {way: {size: [] for size in options.tokens} for way in ways}
    with progress(console) as bars:
        bar = bars.add_task("", total=options.repeats * len(ways) * len(options.tokens))
        for size in options.tokens:
            bars.update(bar, description=f"{size} tokens, warming up")
            for way in ways:
                await _forward(engines[way], batch(size, options.prompt, dice))
            bars.update(bar, description=f"{size} tokens")
            for way in alternating(options.repeats, ways):
                prompts = batch(size, options.prompt, dice)
                seconds[way][size].append(await _forward(engines[way], prompts))
                bars.advance(bar)
    return seconds


async def _forward(engine: EngineClient, prompts: Sequence[Sequence[int]]) -> float:
    """Return the seconds until the last of one batch has its first token."""
    await engine.flush_cache()
    started = time.perf_counter()
    answers = await ask_batch(engine, prompts)
    return max(answer.first for answer in answers) - started


async def _memory(engines: Engines) -> list[EngineMemory]:
    """Return each engine's memory; one without copies has all experts on the device."""
    told = {way: (await client.info()).kv[0] for way, client in engines.clients.items()}
    experts = [rank.experts for rank in told.values() if rank.experts is not None]
    whole = next((one.resident + one.on_host for one in experts), None)
    found: list[EngineMemory] = []
    for way, rank in told.items():
        one = rank.experts
        started = engines.started.get(way)
        found.append(
            EngineMemory(
                way=way,
                device_experts=whole if one is None else one.resident + one.in_slots,
                host_experts=0 if one is None else one.on_host,
                misses=0 if one is None else one.misses,
                kv=rank.kv_bytes,
                peak=None if started is None else peak_resident(started.pid),
            )
        )
    return found


async def _config(engine: EngineClient) -> Path | None:
    """Return the model's ``config.json``, if it is on this machine."""
    path = (await engine.info()).model.get("path")
    config = Path(path) / "config.json" if path else None
    return config if config is not None and await anyio.Path(config).exists() else None


def summarise(
    seconds: Seconds, options: argparse.Namespace, config: Path | None
) -> list[ForwardRow]:
    """Return rows by size, the engine with its experts on the device first."""
    rows: list[ForwardRow] = []
    for size in options.tokens:
        base = median(seconds[RESIDENT][size])
        work = flops(config, size, options.prompt)
        for way, by_size in seconds.items():
            took = median(by_size[size])
            rate = None if work is None else work / took / 1e12
            peak = options.peak_tflops
            rows.append(
                ForwardRow(
                    way=way,
                    tokens=size,
                    seconds=took,
                    tokens_per_second=size / took,
                    of_resident=base / took,
                    exposed=took - base,
                    teraflops=rate,
                    mfu=None if rate is None or peak is None else rate / peak,
                )
            )
    return rows


def flops(config: Path | None, tokens: int, prompt: int) -> int | None:
    """Return the FLOPs of one batch; ``None`` if the model's shape is not known.

    Raises: EngineError for a file that is no model's configuration.
    """
    if config is None:
        return None
    try:
        measure = true_flops(json.loads(config.read_text()))
    except UnknownShape:
        return None
    except (ValueError, AttributeError) as error:
        raise EngineError(f"{config} is not a model's config.json: {error}") from error
    lengths = (min(prompt, tokens - begin) for begin in range(0, tokens, prompt))
    return sum(measure.work(0, length) for length in lengths)


def show(rows: Sequence[ForwardRow], memory: Sequence[EngineMemory], console: Console) -> None:
    """Print both tables."""
    table = Table(title="Forwards", title_justify="left")
    for name in ("tokens", "way", "ms", "tokens/s", "of resident", "exposed", "TFLOP/s", "MFU"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for row in rows:
        table.add_row(
            f"{row.tokens:,}",
            row.way,
            f"{row.seconds * 1000:,.1f}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.of_resident:.2f}",
            f"{row.exposed * 1000:,.1f} ms" if row.way == H2D else "",
            _or_nothing(row.teraflops, "{:.3g}"),
            _or_nothing(row.mfu, "{:.1%}"),
        )
    console.print(table)
    table = Table(title="EngineMemory, MiB", title_justify="left")
    table.add_column("")
    for name in ("experts on the device", "on the host", "misses", "KV pool", "peak of process"):
        table.add_column(name, justify="right")
    for one in memory:
        sizes = (one.device_experts, one.host_experts, one.kv, one.peak)
        device, host, kv, peak = (_or_nothing(size and size / _MIB, "{:,.1f}") for size in sizes)
        table.add_row(one.way, device, host, f"{one.misses:,}", kv, peak)
    console.print(table)


def _or_nothing(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
