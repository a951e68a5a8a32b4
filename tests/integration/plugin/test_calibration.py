"""An engine measures its costs while it is already in use."""

from functools import partial
from itertools import count
from pathlib import Path

import anyio
import httpx
import pytest
from flashmoa_bench.modelled_gpu.gpu import Forward, MeasuredTables, Prefills
from flashmoa_sglang.costs import Costs

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines, wait_for_costs
from tests.integration.support import (
    RIDING,
    Words,
    generate,
    start_special_engine,
    wait_until_idle,
)
from tests.waiting import LAG

CHUNK = 64


@pytest.mark.slow
async def test_measuring_between_the_first_requests_loses_no_kv(
    engines: LocalEngines, model: Path
) -> None:
    """A request that arrives can force a prefill that is measured to be cut into chunks."""
    arguments = ["--page-size", "16", "--chunked-prefill-size", str(CHUNK)]
    async with (
        start_special_engine(engines, model, *arguments, measures=True, has_costs=False) as engine,
        EngineClient(engine.url, timeout=60) as client,
    ):
        for number in range(0, 12, 3):
            async with anyio.create_task_group() as group:
                for sent in range(number, number + 3):
                    ids = [1000 + sent % 2000] * (8 + sent * 7 % (CHUNK - 8))
                    group.start_soon(partial(client.prefill_only, input_ids=ids))
        costs = (await wait_for_costs(engine.url)).costs
        assert costs is not None and costs.decode_step > 0
        times = [seconds for _, seconds in costs.points]
        assert times == sorted(times) and times[0] > 0
        await wait_until_idle(client)


async def test_an_engine_takes_the_costs_of_another_one(
    engines: LocalEngines, engine: LocalEngine, client: EngineClient, model: Path
) -> None:
    """The costs come from an answer of ``GET /flashmoa/info``, and nothing is measured."""
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as http:
        engine.log.with_suffix(".info").write_bytes((await http.get("/flashmoa/info")).content)
    environment = {"FLASHMOA_COSTS": str(engine.log.with_suffix(".info"))}
    async with (
        start_special_engine(engines, model, measures=True, environment=environment) as other,
        EngineClient(other.url, timeout=60) as reader,
    ):
        assert (await reader.info()).costs == (await client.info()).costs
        # Measured prefills would stay in the cache.
        state = (await reader.info()).kv[0]
        assert state.free == state.total


@pytest.mark.slow
async def test_on_an_engine_that_is_never_idle_streams_ride_before_it_has_measured(
    engines: LocalEngines, model: Path, words: Words
) -> None:
    """Requests come from its first second on, so that it has no moment to measure anything."""
    rode = 0
    async with (
        start_special_engine(
            engines, f"hash:{model}", measures=True, has_costs=False, environment=RIDING
        ) as engine,
        EngineClient(engine.url, timeout=60) as client,
        anyio.create_task_group() as group,
    ):

        async def ask(client_id: int) -> None:
            for number in count():
                text = words(40 + 90 * ((number + client_id) % 5), 100 * client_id + number)
                await generate(client, text, 40)

        for client_id in range(3):
            group.start_soon(ask, client_id)
        with anyio.fail_after(90):
            # A waiting stream may also be prefilled in a moment without decodes.
            for number in count():
                stream = await client.open_stream(text="The", ttl_seconds=60)
                state = await client.append(stream.id, 0, text=words(800, 9000 + number)[3:])
                while state.prefilled_tokens < state.received_tokens - LAG:
                    await anyio.sleep(0.05)
                    state = await client.stream_state(stream.id)
                await client.delete_stream(stream.id)
                if rode := (await client.info()).kv[0].rode_along:
                    break
        group.cancel_scope.cancel()
    assert rode


@pytest.mark.slow
async def test_costs_are_those_of_the_gpu_also_behind_a_long_context(
    engines: LocalEngines, model: Path
) -> None:
    slow = {**RIDING, "FLASHMOA_DEVICE_SLOWDOWN": "3"}
    async with (
        start_special_engine(
            engines, f"hash:{model}", measures=True, pool=40000, environment=slow
        ) as engine,
        httpx.AsyncClient(base_url=engine.url, timeout=60) as http,
    ):
        found = (await http.get("/flashmoa/info")).json()["costs"]
    points, mixed = (tuple(map(tuple, found[name])) for name in ("points", "mixed"))
    costs = Costs(**{**found, "points": points, "mixed": mixed})
    seconds = MeasuredTables(RIDING["FLASHMOA_DEVICE"], RIDING["FLASHMOA_DEVICE_MODEL"]).seconds
    for context in (1, 16384):
        for tokens in (128, 1024):
            expected = seconds(Forward(Prefills(1, tokens, context)))
            assert costs.prefill(tokens, context) == pytest.approx(expected, rel=0.15)
        for decodes in (8, 32):
            expected = seconds(Forward(decodes=decodes, context=context))
            assert costs.decode(decodes, decodes * context) == pytest.approx(expected, rel=0.15)
