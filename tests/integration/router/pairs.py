"""Run PD pairs of tiny models with their shell routers, and count the KV that they transfer."""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from flashmoa_bench.harness.routers import PairStart, StartEngine, start_pd_pairs

from flashmoa.engine.local import LocalEngine, LocalEngines, wait_for_costs
from tests.integration.engine_costs import known_costs
from tests.integration.router.http_calls import metric
from tests.integration.support import STRICT

_ARGUMENTS = ("--max-total-tokens", "12000", "--enable-metrics", "--enable-cache-report")
_TCP = {"MOONCAKE_PROTOCOL": "tcp", "MC_FORCE_TCP": "1"}


@dataclass
class Pair:
    prefill: LocalEngine
    decode: LocalEngine
    model: Path
    shell: httpx.AsyncClient
    prefill_metrics: httpx.AsyncClient

    async def transferred_bytes(self) -> float:
        """Return the bytes of KV that were sent to the decode engine so far."""
        megabytes = await metric(self.prefill_metrics, "sglang:kv_transfer_total_mb_sum")
        return megabytes * (1 << 20)

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of a token's KV."""
        config = json.loads((self.model / "config.json").read_text())
        heads, width = config["num_key_value_heads"], config["head_dim"]
        return 2 * 4 * config["num_hidden_layers"] * heads * width


@asynccontextmanager
async def running_pairs(
    engines: LocalEngines, models: Mapping[str, Path], costs_of: Path, transport: str = "nixl"
) -> AsyncGenerator[dict[str, Pair]]:
    """Run a pair for each model; the engines must be alive at the end.

    Args: costs_of: the model whose costs they take, if they are known.
    """
    started: list[LocalEngine] = []

    def make_start(model: Path) -> StartEngine:
        async def start(arguments: Sequence[str]) -> LocalEngine:
            started.append(
                await engines.start(
                    model,
                    core=len(started) % 2,
                    arguments=[*_ARGUMENTS, *arguments],
                    environment={**_TCP, **STRICT, **known_costs(costs_of)},
                )
            )
            return started[-1]

        return start

    starts = {
        name: PairStart(make_start(model), transport=transport) for name, model in models.items()
    }
    try:
        async with start_pd_pairs(starts) as pairs, AsyncExitStack() as stack:

            async def connect(url: str) -> httpx.AsyncClient:
                client = httpx.AsyncClient(base_url=url, timeout=120)
                return await stack.enter_async_context(client)

            running = {
                name: Pair(
                    pair.prefill,
                    pair.decode,
                    models[name],
                    await connect(pair.url),
                    await connect(pair.prefill.url),
                )
                for name, pair in pairs.items()
            }
            for pair in running.values():
                assert (await wait_for_costs(pair.prefill.url)).costs
            yield running
        for engine in started:
            assert engine.is_running() and "leak" not in engine.log.read_text()
    finally:
        for engine in started:
            await engine.stop()
