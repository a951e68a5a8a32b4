"""Measure throughput with experts on the device and in host memory (MoE-Prefill §4).

One engine has its experts on the device, and one copies them there layer by layer. Both prefill the
same prompts, in forwards of several sizes. A longer forward hides more of the copying; the rest is
exposed. Each batch is one forward, with one token as answer to each prompt. A third engine keeps no
KV (§6.3); the second table shows the memory that this saves. A running engine with SGLang's own
``--cpu-offload-gb``, which needs a GPU, can be compared too.

With ``--device`` no engine runs: the real offloader takes the time of a modelled GPU, and other
ways to divide the experts over its GPUs are computed from NVIDIA's tables.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import anyio

from flashmoa.engine import EngineClient
from flashmoa.errors import EngineError
from flashmoa.router.flops import UnknownShape, true_flops
from flashmoa_bench.harness.command_line import Option, command, positive
from flashmoa_bench.harness.engines import Engines, Role
from flashmoa_bench.harness.report import Column, Report
from flashmoa_bench.harness.requests import ask_batch, random_ids
from flashmoa_bench.harness.rounds import RoundPlayer
from flashmoa_bench.prefill.passes import prefill

RESIDENT, H2D, KV_FREE = "resident", "h2d", "kv_free"
# A CUDA graph would look for experts where they were when the graph was captured.
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
_OFFLOAD = Role(
    "cpu_offload", plugin=True, arguments=("--cpu-offload-gb", _NO_GRAPHS), optional=True
)
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """An engine's figures for forwards of a size; seconds are medians over rounds.

    Attributes:
        of_resident: throughput over the throughput with experts on the device.
        exposed: additional seconds over the forward with experts on the device.
        teraflops, mfu: per second, and over the peak; ``None`` if the shape or peak is unknown.
    """

    tokens: Annotated[int, Column("tokens", "{:,}")]
    way: Annotated[str, Column("way")]
    seconds: Annotated[float, Column("ms", "{:,.1f}", 1000)]
    tokens_per_second: Annotated[float, Column("tokens/s", "{:,.0f}")]
    of_resident: Annotated[float, Column("of resident", "{:.2f}")]
    exposed: Annotated[float, Column("exposed", "{:,.1f} ms", 1000)]
    teraflops: Annotated[float | None, Column("TFLOP/s", "{:.3g}")]
    mfu: Annotated[float | None, Column("MFU", "{:.1%}")]


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """The memory that one engine takes for a model, in bytes.

    Attributes:
        device_experts, host_experts: experts on the device and in host memory; ``None`` if unknown.
        misses: how often a layer waited for experts that were not being copied.
    """

    way: Annotated[str, Column("")]
    device_experts: Annotated[int | None, Column("experts on the device", "{:,.1f}", 1 / _MIB)]
    host_experts: Annotated[int | None, Column("on the host", "{:,.1f}", 1 / _MIB)]
    misses: Annotated[int, Column("misses", "{:,}")]
    kv: Annotated[int | None, Column("KV pool", "{:,.1f}", 1 / _MIB)]


def _check(options: argparse.Namespace) -> str | None:
    if not options.device:
        return None
    from flashmoa_bench.prefill.asyncep_modelled import check

    return check(options)


async def _run(report: Report) -> None:
    if report.options.device:
        # It needs the plugin, which running engines do not.
        from flashmoa_bench.prefill.asyncep_modelled import compute

        return await compute(report)
    report.options.tokens = report.options.tokens or [256, 1024, 4096]
    return await _measure(report)


async def _measure(report: Report) -> None:
    options, dice = report.options, random.Random(report.options.seed)
    most = max(options.tokens)
    sizes = ("--chunked-prefill-size", str(most), "--max-prefill-tokens", str(most))
    options.engine_arguments = [*sizes, *options.engine_arguments]
    roles = (*ROLES, _OFFLOAD) if options.cpu_offload_url else ROLES
    async with report.connect(roles, 2 * most) as engines:
        differences = await _compare_logprobs(engines, random.Random(options.seed))

        async def run(way: str, size: int) -> float:
            await engines[way].flush_cache()
            prompts = make_batch(size, options.prompt, dice)
            started = time.perf_counter()
            answers = await ask_batch(engines[way], prompts)
            return max(answer.first for answer in answers) - started

        ways = list(engines.clients)
        seconds: Seconds = {way: {} for way in ways}
        total = len(ways) * len(options.tokens)
        with RoundPlayer(report.console, options.repeats, total) as player:
            for size in options.tokens:
                rounds = await player.play(ways, partial(run, size=size), f"{size} tokens")
                for way, each in rounds.items():
                    seconds[way][size] = each
        memory = await _fetch_memory(engines)
        config = await _find_config(engines[RESIDENT])
    rows = summarise(seconds, options, config)
    report.show("Forwards", rows, left=("way",))
    report.show("Memory, MiB", memory)
    for way, difference in differences.items():
        report.console.print(f"{way}'s log-probabilities differ by {difference:.1e} at most.")
    report.save({"rows": rows, "memory": memory, "logprobs_apart": differences, "seconds": seconds})


async def _compare_logprobs(engines: Engines, dice: random.Random) -> dict[str, float]:
    """Return each engine's largest difference from the first engine's log-probabilities."""
    ids = random_ids(dice, 128)
    logprobs: dict[str, list[float]] = {}
    for way, client in engines.clients.items():
        meta = await prefill(client, ids, logprob_start_len=63)
        logprobs[way] = [logprob for logprob, *_ in meta["input_token_logprobs"][1:]]
    expected = logprobs.pop(RESIDENT)
    return {
        way: max(abs(value - known) for value, known in zip(values, expected, strict=True))
        for way, values in logprobs.items()
    }


def make_batch(tokens: int, prompt: int, dice: random.Random) -> list[list[int]]:
    """Make random prompts of ``tokens`` tokens in all."""
    return [random_ids(dice, length) for length in _prompt_lengths(tokens, prompt)]


def _prompt_lengths(tokens: int, prompt: int) -> list[int]:
    return [min(prompt, tokens - begin) for begin in range(0, tokens, prompt)]


# The seconds of each round, by way and by tokens of a forward.
Seconds = dict[str, dict[int, list[float]]]


async def _fetch_memory(engines: Engines) -> list[EngineMemory]:
    """Return each engine's memory.

    An engine that copies no experts does not report them. All its experts are on the device, unless
    SGLang offloads some.
    """
    ranks = {way: (await client.info()).kv[0] for way, client in engines.clients.items()}
    reported = [rank.experts for rank in ranks.values() if rank.experts is not None]
    whole = next((experts.resident + experts.on_host for experts in reported), None)
    rows: list[EngineMemory] = []
    for way, rank in ranks.items():
        experts = rank.experts
        if experts is not None:
            on_device = experts.resident + experts.in_slots
            rows.append(
                EngineMemory(way, on_device, experts.on_host, experts.misses, rank.kv_bytes)
            )
            continue
        # SGLang does not report which weights --cpu-offload-gb has moved to the host.
        known = (None, None) if way == _OFFLOAD.name else (whole, 0)
        rows.append(EngineMemory(way, *known, 0, rank.kv_bytes))
    return rows


async def _find_config(engine: EngineClient) -> Path | None:
    path = (await engine.info()).model.get("path")
    config = Path(path) / "config.json" if path else None
    return config if config is not None and await anyio.Path(config).exists() else None


def summarise(
    seconds: Seconds, options: argparse.Namespace, config: Path | None
) -> list[ForwardRow]:
    """Return the rows by size; the engine with experts on the device comes first."""
    rows: list[ForwardRow] = []
    for size in options.tokens:
        base = median(seconds[RESIDENT][size])
        work = flops(config, size, options.prompt)
        for way, by_size in seconds.items():
            typical = median(by_size[size])
            rate = None if work is None else work / typical / 1e12
            peak = options.peak_tflops
            rows.append(
                ForwardRow(
                    way=way,
                    tokens=size,
                    seconds=typical,
                    tokens_per_second=size / typical,
                    of_resident=base / typical,
                    exposed=typical - base,
                    teraflops=rate,
                    mfu=None if rate is None or peak is None else rate / peak,
                )
            )
    return rows


def flops(config: Path | None, tokens: int, prompt: int) -> int | None:
    """Return a batch's FLOPs; ``None`` if the model's shape is unknown.

    Raises: EngineError if the file is not a model's configuration.
    """
    if config is None:
        return None
    try:
        measure = true_flops(json.loads(config.read_text()))
    except UnknownShape:
        return None
    except ValueError as error:
        raise EngineError(f"{config} is not a model's config.json: {error}") from error
    return sum(measure.work(0, length) for length in _prompt_lengths(tokens, prompt))


main = command(
    "asyncep",
    __doc__,
    _run,
    (*ROLES, _OFFLOAD),
    Option(
        "--tokens",
        positive,
        [],
        "tokens of a forward (256, 1,024 and 4,096; with --device 1,024 to 131,072)",
    ),
    Option("--prompt", positive, 1024, "tokens of each prompt"),
    Option("--peak-tflops", float, None, "peak of the device, for the MFU"),
    Option("--tables", str, "sglang", "with --device: whose kernels", choices=("sglang", "vllm")),
    check=_check,
    defaults={"shape": "experts"},
)
