"""Test how KV events are found, followed and applied: pages, gaps, replays and rejoins."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
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
from flashmoa.router.cache_tables import EngineTraits, token_blocks
from flashmoa.router.dispatcher import Dispatcher
from flashmoa.router.engines import RouterOptions
from flashmoa.router.flops import TOKENS
from flashmoa.router.kv_events import (
    EventSource,
    KvEventSubscriber,
    PageMirror,
    parse_event_sources,
)
from flashmoa.router.policy import PrefixAware
from tests.integration.router.serving import serve
from tests.unit.router.support import PROMPTS, SIZE, FakeEngine, blocks, running

pytestmark = pytest.mark.anyio
PROMPT = token_blocks([1] * 32)
UNUSED = EventSource("tcp://unused:1")
PUBLISHES = {"publisher": "zmq", "endpoint": "tcp://*:7000"}
CONFIG = json.dumps({**PUBLISHES, "replay_endpoint": "tcp://*:7100", "topic": "kv"})


def stored(first: int, blocks: int) -> list[object]:
    """Return the event of a prompt of equal tokens, whose pages are numbered from ``first`` on."""
    pages = list(range(first, first + blocks))
    return ["BlockStored", pages, None, [first] * 16 * blocks, 16, None, "GPU"]


STORED = stored(1, 2)


def batch(*events: list[object]) -> bytes:
    return msgspec.msgpack.encode([0.0, events, 0])


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
    assert len(mirror._pages) == len(cache)


def test_pages_after_a_lost_event_are_ignored() -> None:
    mirror = PageMirror(SIZE)
    assert mirror.add([5], 4, [1, 2, 3, 4], 4) == []
    assert mirror.add([1, 2], None, [1, 2, 3, 4, 5, 6, 7, 8], 4) == list(
        blocks([1, 2, 3, 4, 5, 6, 7, 8]).hashes
    )
    assert mirror.remove([9]) == []
    mirror.clear()
    assert mirror.remove([1, 2]) == []


@pytest.fixture
def policy() -> PrefixAware:
    return PrefixAware()


@pytest.fixture
def dispatcher(policy: PrefixAware) -> Dispatcher:
    dispatcher = Dispatcher(policy)
    dispatcher.join("a", EngineTraits(TOKENS))
    return dispatcher


def test_events_change_an_engines_table_and_what_is_unreadable_or_missing_empties_it(
    policy: PrefixAware, dispatcher: Dispatcher
) -> None:
    salted, tokens = token_blocks([1] * 32, salt="x"), list(range(33))
    pairs = [*STORED[:3], list(pairwise(tokens)), *STORED[4:]]  # Of speculative decoding.
    subscriber = KvEventSubscriber(dispatcher, "a", UNUSED)
    for sequence, message, prompt, matched in [
        (4, batch(STORED), PROMPT, 31),
        (5, batch(["BlockRemoved", [2], "CPU_PINNED"]), PROMPT, 31),
        (6, batch(["BlockRemoved", [2], "GPU"]), PROMPT, 16),
        (8, batch(), PROMPT, 0),
        (9, batch([*STORED, {"cache_salt": "x"}]), salted, 31),
        (10, batch(["AllBlocksCleared"]), salted, 0),
        (11, batch(STORED), PROMPT, 31),
        (12, b"\xc1", PROMPT, 0),
        (13, batch(pairs), token_blocks(tokens), 32),
    ]:
        subscriber.receive(sequence, message)
        assert policy.matched_tokens("a", prompt) == matched, sequence


@pytest.mark.parametrize(
    ("url", "info", "expected"),
    [
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


async def until_blocks(policy: PrefixAware, count: int) -> None:
    with anyio.fail_after(20):
        while len(policy.engines["a"].blocks) != count:  # noqa: ASYNC110 - it sends no event
            await anyio.sleep(0.005)


async def test_missed_events_are_replayed(policy: PrefixAware, dispatcher: Dispatcher) -> None:
    async with publisher_of(STORED) as (publisher, source), anyio.create_task_group() as group:
        group.start_soon(KvEventSubscriber(dispatcher, "a", source).run)
        # This event was published before the router subscribed.
        await until_blocks(policy, 2)
        # A subscription takes a moment: the next events are received, replayed, or both.
        await publisher.publish(1, batch(stored(3, 2)), lost=True)
        await publisher.publish(2, batch(stored(5, 2)), lost=True)
        sequence = 3
        with anyio.fail_after(20):
            while len(policy.engines["a"].blocks) != 6:
                await publisher.publish(sequence, batch())
                sequence += 1
                await anyio.sleep(0.005)
        assert publisher.replays[:2] == [0, 1]
        group.cancel_scope.cancel()


async def test_blocks_are_forgotten_if_events_are_followed_no_longer(
    policy: PrefixAware, dispatcher: Dispatcher
) -> None:
    async with publisher_of(STORED) as (publisher, source), anyio.create_task_group() as group:
        group.start_soon(KvEventSubscriber(dispatcher, "a", source).run)
        await until_blocks(policy, 2)
        with anyio.fail_after(20):
            while len(policy.engines["a"].blocks):
                await publisher.publish_other()
                await anyio.sleep(0.005)


def test_a_message_of_many_events_is_one_reason_to_place_waiting_requests(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[None] = []
    monkeypatch.setattr(dispatcher, "reconsider", lambda: rounds.append(None))
    events = [stored(first, 1) for first in (1, 2, 3)]
    KvEventSubscriber(dispatcher, "a", UNUSED).receive(0, batch(*events))
    assert len(rounds) == 1


@asynccontextmanager
async def publisher_of(*events: list[object]) -> AsyncGenerator[tuple[Publisher, EventSource]]:
    """Publish these events, which the router asks for when it subscribes."""
    async with publishing() as (publisher, source):
        await publisher.publish(0, batch(*events))
        yield publisher, source


@pytest.mark.parametrize(
    ("moves", "ranks", "expected"),
    [(False, 1, {"": 2}), (True, 1, {"": 3}), (False, 2, {"#0": 2, "#1": 0})],
)
async def test_events_are_followed_as_the_engine_advertises_them_when_it_rejoins(
    moves: bool, ranks: int, expected: dict[str, int]
) -> None:
    """The second rank publishes at the port that follows, where nothing listens."""
    engine, refused = FakeEngine(needs_key=False), ("GET", "/health/ready")
    async with (
        publisher_of(STORED) as (publisher, before),
        publisher_of(stored(3, 3)) as (other, after),
        serve(engine.app()) as url,
    ):
        engine.advertise(before)
        options = RouterOptions([url], watch_seconds=0.01)

        def line(gauge: str, value: int, rank: str = "") -> str:
            return f'flashmoa_router_engine_{gauge}{{engine="{url}{rank}"}} {value}.0\n'

        async def until(*wanted: str) -> str:
            with anyio.fail_after(20):
                while True:
                    text = (await router("GET", "/metrics"))[1].decode()
                    if all(part in text for part in wanted):
                        return text
                    await anyio.sleep(0.005)

        async with running(application(options)) as router:
            await until(line("blocks", 2), line("load", 0), line("saturated", 0))
            engine.refuses.add(refused)
            text = await until(line("up", 0))
            assert not any(f"engine_{name}{{" in text for name in ("blocks", "load", "saturated"))
            engine.ranks = ranks
            engine.advertise(after if moves else before)
            engine.refuses.discard(refused)
            await until(*(line("blocks", value, rank) for rank, value in expected.items()))
            if moves:  # What is published at the old port is another engine's.
                await publisher.publish(1, batch(stored(20, 4)))
                await other.publish(1, batch(stored(30, 1)))
                await until(line("blocks", 4))
    # What one that comes back as it was has cached is asked for again.
    assert publisher.replays == [0] * (1 if moves else 2)
