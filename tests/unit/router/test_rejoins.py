"""Test what the router knows of an engine that has left and joins again."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest

from flashmoa.router.application import RouterOptions, application
from flashmoa.router.event_sources import EventSource
from tests.integration.router.serving import serve
from tests.unit.router.fake_engines import FakeEngine, RouterClient, running
from tests.unit.router.test_events import STORED, Publisher, batch, publishing

pytestmark = pytest.mark.anyio
OTHER: list[object] = ["BlockStored", [3, 4, 5], None, [2] * 48, 16, None, "GPU"]


@dataclass
class Rejoining:
    """An engine that can leave and join again, behind a router."""

    engine: FakeEngine
    url: str
    router: RouterClient

    async def until(self, *wanted: str) -> str:
        """Wait until the router's metrics have all of these lines; return the metrics."""
        with anyio.fail_after(20):
            while True:
                _, page = await self.router("GET", "/metrics")
                text = page.decode()
                if all(line in text for line in wanted):
                    return text
                await anyio.sleep(0.005)

    def line(self, gauge: str, value: int, rank: str = "") -> str:
        """Return the line of a gauge of the engine, or of one of its ranks."""
        return f'flashmoa_router_engine_{gauge}{{engine="{self.url}{rank}"}} {value}.0\n'

    async def leave(self) -> str:
        self.engine.refuses.add(("GET", "/health/ready"))
        return await self.until(self.line("up", 0))

    def join(self, source: EventSource) -> None:
        self.engine.advertise(source)
        self.engine.refuses.clear()


@asynccontextmanager
async def rejoining(source: EventSource) -> AsyncGenerator[Rejoining]:
    engine = FakeEngine(needs_key=False)
    engine.advertise(source)
    async with (
        serve(engine.app()) as url,
        running(application(RouterOptions([url], watch_seconds=0.01))) as router,
    ):
        yield Rejoining(engine, url, router)


@asynccontextmanager
async def publisher_of(*events: list[object]) -> AsyncGenerator[tuple[Publisher, EventSource]]:
    """Publish these events, which the router asks for when it subscribes."""
    async with publishing() as (publisher, source):
        await publisher.publish(0, batch(*events, written=1.0))
        yield publisher, source


async def test_engine_that_rejoins_has_the_blocks_that_its_events_told() -> None:
    async with publisher_of(STORED) as (publisher, source), rejoining(source) as rig:
        await rig.until(rig.line("blocks", 2))
        await rig.leave()
        rig.join(source)
        await rig.until(rig.line("blocks", 2))
        assert publisher.replays == [0]  # Its events were followed all the time.


async def test_events_are_followed_where_the_engine_publishes_them_when_it_rejoins() -> None:
    async with (
        publisher_of(STORED) as (_, before),
        publisher_of(OTHER) as (_, after),
        rejoining(before) as rig,
    ):
        await rig.until(rig.line("blocks", 2))
        await rig.leave()
        rig.join(after)
        await rig.until(rig.line("blocks", 3))


async def test_engine_that_rejoins_with_other_ranks_is_followed_by_rank() -> None:
    async with publisher_of(STORED) as (_, source), rejoining(source) as rig:
        await rig.until(rig.line("blocks", 2))
        await rig.leave()
        rig.engine.ranks = 2
        rig.join(source)
        # The second rank publishes at the port that follows, where nobody is.
        text = await rig.until(rig.line("blocks", 2, "#0"))
        assert rig.line("blocks", 0, "#1") in text


async def test_engine_that_is_down_has_no_gauges_but_that_it_is_down() -> None:
    async with publisher_of(STORED) as (_, source), rejoining(source) as rig:
        await rig.until(rig.line("blocks", 2), rig.line("load", 0), rig.line("saturated", 0))
        text = await rig.leave()
        assert "engine_blocks{" not in text
        assert "engine_load{" not in text and "engine_saturated{" not in text
