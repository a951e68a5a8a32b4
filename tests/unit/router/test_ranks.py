"""Test that each data-parallel rank of an engine is an engine to the router."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from flashmoa.router.dispatcher import Dispatcher
from flashmoa.router.engines import EngineMonitor, RoutedEngine, split_place
from flashmoa.router.flops import TokenCount
from flashmoa.router.policies import EngineTraits
from flashmoa.router.prefix_aware import PrefixAware
from tests.unit.router.fake_engines import KEY, FakeEngine, RouterClient, routing

pytestmark = pytest.mark.anyio
URL = "http://engine"
SETTINGS = {"dp_size": 2, "chunked_prefill_size": 100, "max_total_num_tokens": 1600}
EVENTS = json.dumps({"publisher": "zmq", "endpoint": "tcp://*:7"})


async def probed(
    settings: Mapping[str, Any], plugin: Mapping[str, Any] | None
) -> tuple[RoutedEngine, dict[str, EngineTraits]]:
    """Let an engine join that reports these settings. Return it, and what joined."""
    joined: dict[str, EngineTraits] = {}

    class RecordingPolicy(PrefixAware):
        def join(self, engine: str, traits: EngineTraits) -> None:
            joined[engine] = traits
            super().join(engine, traits)

    def reply(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/flashmoa/info":
            return httpx.Response(200, json=settings)
        return httpx.Response(404) if plugin is None else httpx.Response(200, json=plugin)

    engine = RoutedEngine(URL)
    async with httpx.AsyncClient(transport=httpx.MockTransport(reply)) as http:
        await EngineMonitor(http, Dispatcher(RecordingPolicy())).probe(engine)
    return engine, joined


async def test_each_rank_joins_with_the_settings_of_one() -> None:
    engine, joined = await probed(
        SETTINGS | {"kv_events_config": EVENTS}, {"data_parallel_ranks": 2}
    )
    traits = EngineTraits(TokenCount(), 120, 100)
    assert joined == {f"{URL}#0": traits, f"{URL}#1": traits}
    assert [split_place(place) for place in engine.places] == [(URL, 0), (URL, 1)]
    assert len(engine.events) == 2


@pytest.mark.parametrize("plugin", [None, {}, {"data_parallel_ranks": 3}])
async def test_engine_whose_ranks_cannot_be_named_or_told_apart_joins_as_one(
    plugin: dict[str, int] | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The third one publishes the events of two ranks and has three."""
    _, joined = await probed(SETTINGS | {"kv_events_config": EVENTS}, plugin)
    assert list(joined) == [URL]
    assert [record.message for record in caplog.records if "ranks" in record.message] == [
        f"{URL} chooses itself among its {3 if plugin else 2} data-parallel ranks, so prompts may "
        "be computed on several of them; requests name the rank on engines with this version's "
        "plugin"
    ]


async def ask(router: RouterClient, text: str, path: str = "/generate", **more: Any) -> None:
    status, _ = await router("POST", path, json.dumps({"text": text, **more}).encode(), KEY)
    assert status == 200


async def test_prefixes_spread_over_ranks_and_siblings_name_the_rank_of_theirs() -> None:
    engine = FakeEngine(ranks=2)
    async with routing(engine) as router:
        for text in ("a" * 400, "b" * 400, "b" * 400 + "c", "a" * 400 + "d"):
            await ask(router, text)
    assert engine.named_ranks == ["0", "1", "1", "0"]


async def test_stream_and_all_about_it_name_one_rank() -> None:
    engine = FakeEngine("s", ranks=2)
    async with routing(engine) as router:
        await ask(router, "a" * 400)
        await ask(router, "b" * 400, "/prompt_streams")
        await ask(router, "more", "/prompt_streams/s/append")
        await ask(router, "b" * 400, prompt_stream_id="s")
    assert engine.named_ranks == ["0", "1", "1", "1"]
    # A router that has restarted knows the engine of a stream only, which knows the rank.
    async with routing(engine) as router:
        await ask(router, "b" * 400, prompt_stream_id="s")
    assert engine.named_ranks[-1] is None


async def test_ranks_leave_with_their_engine() -> None:
    is_ready = True

    def reply(request: httpx.Request) -> httpx.Response:
        status = 200 if is_ready else 503
        return httpx.Response(status, json={"data_parallel_ranks": 2})

    dispatcher, engine = Dispatcher(PrefixAware()), RoutedEngine(URL)
    async with httpx.AsyncClient(transport=httpx.MockTransport(reply)) as http:
        monitor = EngineMonitor(http, dispatcher)
        for is_ready in (True, False, True):
            await monitor.probe(engine)
            assert len(dispatcher.engines) == (2 if is_ready else 0)


async def test_client_may_name_a_rank_of_an_engine_that_chooses_itself() -> None:
    engine = FakeEngine()
    async with routing(engine) as router:
        body = json.dumps({"text": "a"}).encode()
        await router("POST", "/generate", body, {**KEY, "X-Data-Parallel-Rank": "1"})
    assert engine.named_ranks == ["1"]
