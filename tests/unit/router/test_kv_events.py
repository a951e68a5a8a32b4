"""Test how KV events are found, followed and applied: pages, gaps, replays and rejoins."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import anyio
import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.router.application import application
from flashmoa.router.blocks import token_blocks
from flashmoa.router.dispatcher import Dispatcher
from flashmoa.router.engines import RouterOptions
from flashmoa.router.flops import TOKENS
from flashmoa.router.kv_events import (
    EventSource,
    KvEventSubscriber,
    PageMirror,
    parse_event_sources,
)
from flashmoa.router.policies import EngineTraits, WaitingRequest
from flashmoa.router.prefix_aware import PrefixAware
from tests.integration.router.serving import serve
from tests.unit.router.fake_engines import FakeEngine, RouterClient, running
from tests.unit.router.support import PROMPTS, SIZE, blocks

pytestmark = pytest.mark.anyio
PROMPT = token_blocks([1] * 32)
STORED: list[object] = ["BlockStored", [1, 2], None, [1] * 32, 16, None, "GPU"]
UNUSED = EventSource("tcp://unused:1")
OTHER: list[object] = ["BlockStored", [3, 4, 5], None, [2] * 48, 16, None, "GPU"]
CONFIG = json.dumps(
    {
        "publisher": "zmq",
        "endpoint": "tcp://*:7000",
        "replay_endpoint": "tcp://*:7100",
        "topic": "kv",
    }
)


def batch(*events: list[object], written: float = 0.0) -> bytes:
    return msgspec.msgpack.encode([written, events, 0])


@given(
    prompts=st.lists(PROMPTS, max_size=10),
    page=st.sampled_from([1, 2, 3, 4, 8]),
    seed=st.integers(0, 1000),
)
def test_reported_pages_become_the_hashes_of_prompts(
    prompts: list[list[int]], page: int, seed: int
) -> None:
    """Compare with an engine whose cache is a set of page prefixes, evicted from their ends."""
    dice = random.Random(seed)
    mirror = PageMirror(SIZE)
    held: Counter[int] = Counter()
    cache: set[tuple[int, ...]] = set()
    for prompt in prompts:
        for end in range(page, len(prompt) + 1, page):
            if (pages := tuple(prompt[:end])) not in cache:
                parent = hash(pages[:-page]) if end > page else None
                for _ in range(dice.choice((1, 2))):  # A repeated event changes nothing.
                    held.update(mirror.add([hash(pages)], parent, pages[-page:], page))
                cache.add(pages)
        parents = {pages[:-page] for pages in cache}
        leaves = [pages for pages in cache if pages not in parents]
        if leaves and dice.random() < 0.5:
            leaf = dice.choice(sorted(leaves))
            held.subtract(mirror.remove([hash(leaf)]))
            cache.discard(leaf)
    ends = {pages[: n * SIZE] for pages in cache for n in range(1, len(pages) // SIZE + 1)}
    if page <= SIZE and SIZE % page == 0:
        known = {block for block, count in held.items() if count > 0}
        assert known == {blocks(end).hashes[-1] for end in ends}
    assert len(mirror) == len(cache)


def test_pages_after_a_lost_event_are_ignored() -> None:
    mirror = PageMirror(SIZE)
    assert mirror.add([5], 4, [1, 2, 3, 4], 4) == []
    assert mirror.add([1, 2], None, [1, 2, 3, 4, 5, 6, 7, 8], 4) == list(
        blocks([1, 2, 3, 4, 5, 6, 7, 8]).hashes
    )
    assert mirror.remove([9]) == []
    assert len(mirror.blocks()) == 2
    mirror.clear()
    assert len(mirror) == 0 and mirror.blocks() == []


def one_engine() -> tuple[PrefixAware, Dispatcher]:
    policy = PrefixAware()
    dispatcher = Dispatcher(policy)
    dispatcher.join("a", EngineTraits(TOKENS))
    return policy, dispatcher


def test_gap_in_an_engines_events_empties_its_table() -> None:
    policy, dispatcher = one_engine()
    subscriber = KvEventSubscriber(dispatcher, "a", UNUSED)
    subscriber.receive(4, batch(STORED))
    assert policy.matched_tokens("a", PROMPT) == 31
    subscriber.receive(5, batch(["BlockRemoved", [2], "CPU_PINNED"], ["BlockRemoved", [2], "GPU"]))
    assert policy.matched_tokens("a", PROMPT) == 16
    subscriber.receive(7, batch())
    assert len(policy.engines["a"].blocks) == 0
    subscriber.receive(8, batch([*STORED, {"cache_salt": "x"}]))
    assert policy.matched_tokens("a", token_blocks([1] * 32, salt="x")) == 31
    subscriber.receive(9, batch(["AllBlocksCleared"]))
    assert len(policy.engines["a"].blocks) == 0
    subscriber.receive(10, batch(STORED))
    subscriber.receive(11, b"\xc1")
    assert len(policy.engines["a"].blocks) == 0


def test_pairs_of_tokens_of_speculative_decoding_are_read() -> None:
    policy, dispatcher = one_engine()
    subscriber = KvEventSubscriber(dispatcher, "a", UNUSED)
    tokens = list(range(33))
    kind, pages, parent, _, size, *more = STORED
    subscriber.receive(0, batch([kind, pages, parent, list(pairwise(tokens)), size, *more]))
    assert policy.matched_tokens("a", token_blocks(tokens)) == 32


@pytest.mark.parametrize(
    ("url", "info", "expected"),
    [
        ("host", {}, []),
        ("host", {"kv_events_config": None}, []),
        ("host", {"kv_events_config": "no JSON"}, []),
        ("host", {"kv_events_config": json.dumps({"publisher": "null"})}, []),
        ("host", {"kv_events_config": json.dumps({"publisher": "zmq"})}, ["host:5557"]),
        ("host", {"kv_events_config": CONFIG, "dp_size": 2}, ["host:7000", "host:7001"]),
        ("[::1]", {"kv_events_config": CONFIG}, ["[::1]:7000"]),
    ],
)
def test_event_sources_of_server_info(url: str, info: dict[str, Any], expected: list[str]) -> None:
    sources = parse_event_sources(f"http://{url}:30000", info)
    assert [source.address for source in sources] == [f"tcp://{address}" for address in expected]
    replays = [f"tcp://{a.replace(':70', ':71')}" for a in expected if ":70" in a]
    assert [source.replay for source in sources if source.replay] == replays
    assert all(source.topic == "kv" for source in sources if source.replay)


def test_events_without_a_port_are_an_error_that_says_what_to_do() -> None:
    config = json.dumps({"publisher": "zmq", "endpoint": "ipc:///tmp/x"})
    with pytest.raises(ValueError, match=r"need a port.*--kv-events-config"):
        parse_event_sources("http://host:30000", {"kv_events_config": config})


class Publisher:
    """Does what SGLang's publisher does on its two sockets, and can lose messages."""

    def __init__(self, live: zmq.asyncio.Socket, replay: zmq.asyncio.Socket) -> None:
        self._live = live
        self._replay = replay
        self._kept: list[tuple[int, bytes]] = []
        self.replays: list[int] = []

    async def publish(self, sequence: int, payload: bytes, *, lost: bool = False) -> None:
        self._kept.append((sequence, payload))
        if not lost:
            await self._live.send_multipart([b"kv", sequence.to_bytes(8, "big"), payload])

    def restart(self) -> None:
        self._kept.clear()

    async def publish_other(self) -> None:
        """Publish a message that is no KV event."""
        await self._live.send_multipart([b"kv"])

    async def run(self) -> None:
        while True:
            client, _, first = await self._replay.recv_multipart()
            self.replays.append(int.from_bytes(first, "big"))
            for sequence, payload in self._kept:
                if sequence >= self.replays[-1]:
                    number = sequence.to_bytes(8, "big")
                    await self._replay.send_multipart([client, b"", number, payload])
            await self._replay.send_multipart([client, b"", b"\xff" * 8, b""])


@asynccontextmanager
async def publishing() -> AsyncGenerator[tuple[Publisher, EventSource]]:
    context = zmq.asyncio.Context()
    live, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    try:
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (live, replay)]
        source = EventSource(*(f"tcp://127.0.0.1:{port}" for port in ports), topic="kv")
        publisher = Publisher(live, replay)
        async with anyio.create_task_group() as group:
            group.start_soon(publisher.run)
            yield publisher, source
            group.cancel_scope.cancel()
    finally:
        live.close(linger=0)
        replay.close(linger=0)
        context.term()


async def test_missed_events_are_replayed() -> None:
    policy, dispatcher = one_engine()
    other: list[object] = ["BlockStored", [3, 4], None, [2] * 32, 16, None, "GPU"]
    third: list[object] = ["BlockStored", [5, 6], None, [3] * 32, 16, None, "GPU"]

    async def until(blocks: int) -> None:
        with anyio.fail_after(20):
            while len(policy.engines["a"].blocks) != blocks:  # noqa: ASYNC110
                await anyio.sleep(0.005)

    async with publishing() as (publisher, source), anyio.create_task_group() as group:
        # This event is published before the router subscribes.
        await publisher.publish(0, batch(STORED, written=1.0))
        group.start_soon(KvEventSubscriber(dispatcher, "a", source).run)
        await until(2)
        # A subscription takes a moment: the next events are received, replayed, or both.
        await publisher.publish(1, batch(other, written=2.0), lost=True)
        await publisher.publish(2, batch(third, written=3.0), lost=True)
        sequence = 3
        with anyio.fail_after(20):
            while len(policy.engines["a"].blocks) != 6:
                await publisher.publish(sequence, batch(written=sequence + 1.0))
                sequence += 1
                await anyio.sleep(0.005)
        assert publisher.replays[:2] == [0, 1]
        # Now another engine publishes at the same address.
        publisher.restart()
        await publisher.publish(0, batch(STORED, written=1000.0))
        await until(2)
        assert publisher.replays[-1] == 0
        group.cancel_scope.cancel()


async def test_blocks_are_forgotten_if_events_are_followed_no_longer() -> None:
    policy, dispatcher = one_engine()
    async with publishing() as (publisher, source), anyio.create_task_group() as group:
        await publisher.publish(0, batch(STORED, written=1.0))
        subscriber = KvEventSubscriber(dispatcher, "a", source)
        group.start_soon(subscriber.run)
        with anyio.fail_after(20):
            while len(policy.engines["a"].blocks) != 2:  # noqa: ASYNC110
                await anyio.sleep(0.005)
            while len(policy.engines["a"].blocks):
                await publisher.publish_other()
                await anyio.sleep(0.005)
    subscriber.report_all()
    assert len(policy.engines["a"].blocks) == 0


async def test_a_message_of_many_events_places_waiting_requests_once() -> None:
    class Counting(PrefixAware):
        rounds = 0

        def route(self, queue: Sequence[WaitingRequest]) -> dict[str, str]:
            self.rounds += 1
            return super().route(queue)

    policy = Counting(patience=0.0)
    dispatcher = Dispatcher(policy)
    dispatcher.join("a", EngineTraits(TOKENS, saturation=40))
    policy.admit(WaitingRequest("long", token_blocks([1] * 64)), "a")
    placed = anyio.Event()

    async def wait_for_place() -> None:
        async with dispatcher.place(token_blocks([2] * 16)):
            placed.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait_for_place)
        await anyio.wait_all_tasks_blocked()
        assert dispatcher.waiting == 1 and policy.rounds == 1
        subscriber = KvEventSubscriber(dispatcher, "a", UNUSED)
        pages = [["BlockStored", [n], n - 1 or None, [1] * 16, 16, None, "GPU"] for n in (1, 2, 3)]
        subscriber.receive(0, batch(*pages[:1]))
        assert policy.rounds == 1  # The engine is still saturated.
        subscriber.receive(1, batch(*pages[1:]))
        assert policy.rounds == 2
        with anyio.fail_after(5):
            await placed.wait()


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
