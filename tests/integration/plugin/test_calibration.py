"""An engine learns its costs while it is already in use."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio
import httpx
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines
from tests.integration.support import start_special_engine, wait_until_idle

pytestmark = pytest.mark.anyio

CHUNK = 64


@pytest.mark.slow
async def test_learning_from_the_first_requests_loses_no_kv(
    engines: LocalEngines, model: Path
) -> None:
    """A request that arrives can force a prefill of the warm-up to be cut into chunks."""
    arguments = ["--page-size", "16", "--chunked-prefill-size", str(CHUNK)]
    sent = 0
    async with (
        start_special_engine(engines, model, *arguments, measures=True, has_costs=False) as engine,
        EngineClient(engine.url, timeout=60) as client,
    ):
        with anyio.fail_after(60):
            while (await client.info()).costs is None:
                async with anyio.create_task_group() as group:
                    for _ in range(3):
                        sent += 1
                        ids = [1000 + sent % 2000] * (8 + sent * 7 % (CHUNK - 8))
                        group.start_soon(partial(client.prefill_only, input_ids=ids))
        assert sent > 3
        info = await client.info()
        assert info.costs is not None and info.costs.decode_step > 0
        times = [seconds for _, seconds in info.costs.points]
        assert times == sorted(times) and times[0] > 0
        await wait_until_idle(client)


async def test_an_engine_takes_the_costs_of_another_one(
    engines: LocalEngines, engine: LocalEngine, client: EngineClient, model: Path
) -> None:
    """They come from an answer of ``GET /flashmoa/info``, and nothing is measured."""
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as http:
        engine.log.with_suffix(".info").write_bytes((await http.get("/flashmoa/info")).content)
    environment = {"FLASHMOA_COSTS": str(engine.log.with_suffix(".info"))}
    async with (
        start_special_engine(engines, model, measures=True, environment=environment) as other,
        EngineClient(other.url, timeout=60) as reader,
    ):
        assert (await reader.info()).costs == (await client.info()).costs
        # What is measured stays in the cache.
        state = (await reader.info()).kv[0]
        assert state.free == state.total
