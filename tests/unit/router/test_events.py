"""Test how KV events are applied: pages, gaps, replays and ranks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise

import anyio
import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.router.blocks import PageMirror, token_blocks
from flashmoa.router.dispatcher import Dispatcher
from flashmoa.router.event_sources import EventSource
from flashmoa.router.flops import TokenCount
from flashmoa.router.kv_events import EngineBlocks, KvEventSubscriber
from flashmoa.router.policies import EngineTraits, WaitingRequest
from flashmoa.router.prefix_aware import PrefixAware
from tests.unit.router.support import PROMPTS, SIZE, blocks

pytestmark = pytest.mark.anyio
PROMPT = token_blocks([1] * 32)
STORED: list[object] = ["BlockStored", [1, 2], None, [1] * 32, 16, None, "GPU"]
UNUSED = EventSource("tcp://unused:1")


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
    mirror.clear()
    assert len(mirror) == 0


def one_engine() -> tuple[PrefixAware, Dispatcher]:
    policy = PrefixAware()
    dispatcher = Dispatcher(policy)
    dispatcher.join("a", EngineTraits(TokenCount()))
    return policy, dispatcher


def test_gap_in_an_engines_events_empties_its_table() -> None:
    policy, dispatcher = one_engine()
    subscriber = KvEventSubscriber(EngineBlocks(dispatcher, "a"), UNUSED)
    subscriber.receive(4, batch(STORED))
    assert policy.matched_tokens("a", PROMPT) == 31
    subscriber.receive(5, batch(["BlockRemoved", [2], "CPU_PINNED"], ["BlockRemoved", [2], "GPU"]))
    assert policy.matched_tokens("a", PROMPT) == 16
    subscriber.receive(7, batch())
    assert policy.cached_blocks("a") == 0
    subscriber.receive(8, batch([*STORED, {"cache_salt": "x"}]))
    assert policy.matched_tokens("a", token_blocks([1] * 32, salt="x")) == 31
    subscriber.receive(9, batch(["AllBlocksCleared"]))
    assert policy.cached_blocks("a") == 0
    subscriber.receive(10, batch(STORED))
    subscriber.receive(11, b"\xc1")
    assert policy.cached_blocks("a") == 0


def test_pairs_of_tokens_of_speculative_decoding_are_read() -> None:
    policy, dispatcher = one_engine()
    subscriber = KvEventSubscriber(EngineBlocks(dispatcher, "a"), UNUSED)
    tokens = list(range(33))
    kind, pages, parent, _, size, *more = STORED
    subscriber.receive(0, batch([kind, pages, parent, list(pairwise(tokens)), size, *more]))
    assert policy.matched_tokens("a", token_blocks(tokens)) == 32


def test_block_counts_as_long_as_one_rank_has_it() -> None:
    policy, dispatcher = one_engine()
    shared = EngineBlocks(dispatcher, "a", ranks=2)
    ranks = [KvEventSubscriber(shared, UNUSED) for _ in range(2)]
    for rank in ranks:
        rank.receive(0, batch(STORED))
    ranks[0].receive(1, batch(["BlockRemoved", [2], "GPU"]))
    assert policy.matched_tokens("a", PROMPT) == 31
    ranks[1].receive(1, batch(["BlockRemoved", [2], "GPU"]))
    assert policy.matched_tokens("a", PROMPT) == 16
    ranks[1].receive(2, batch(["AllBlocksCleared"]))
    assert policy.matched_tokens("a", PROMPT) == 16
    ranks[0].receive(3, batch())
    assert policy.cached_blocks("a") == 0


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
            while policy.cached_blocks("a") != blocks:  # noqa: ASYNC110
                await anyio.sleep(0.005)

    async with publishing() as (publisher, source), anyio.create_task_group() as group:
        # This event is published before the router subscribes.
        await publisher.publish(0, batch(STORED, written=1.0))
        group.start_soon(KvEventSubscriber(EngineBlocks(dispatcher, "a"), source).run)
        await until(2)
        # A subscription takes a moment: the next events are received, replayed, or both.
        await publisher.publish(1, batch(other, written=2.0), lost=True)
        await publisher.publish(2, batch(third, written=3.0), lost=True)
        sequence = 3
        with anyio.fail_after(20):
            while policy.cached_blocks("a") != 6:
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
    table = EngineBlocks(dispatcher, "a")
    async with publishing() as (publisher, source), anyio.create_task_group() as group:
        await publisher.publish(0, batch(STORED, written=1.0))
        group.start_soon(KvEventSubscriber(table, source).run)
        with anyio.fail_after(20):
            while policy.cached_blocks("a") != 2:  # noqa: ASYNC110
                await anyio.sleep(0.005)
            while policy.cached_blocks("a"):
                await publisher.publish_other()
                await anyio.sleep(0.005)
    table.report_all()
    assert policy.cached_blocks("a") == 0


async def test_a_message_of_many_events_places_waiting_requests_once() -> None:
    class Counting(PrefixAware):
        rounds = 0

        def route(self, queue: Sequence[WaitingRequest]) -> dict[str, str]:
            self.rounds += 1
            return super().route(queue)

    policy = Counting(patience=0.0)
    dispatcher = Dispatcher(policy)
    dispatcher.join("a", EngineTraits(TokenCount(), saturation=40))
    policy.admit(WaitingRequest("long", token_blocks([1] * 64)), "a")
    placed = anyio.Event()

    async def wait_for_place() -> None:
        async with dispatcher.place(token_blocks([2] * 16)):
            placed.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait_for_place)
        await anyio.wait_all_tasks_blocked()
        assert dispatcher.waiting == 1 and policy.rounds == 1
        subscriber = KvEventSubscriber(EngineBlocks(dispatcher, "a"), UNUSED)
        pages = [["BlockStored", [n], n - 1 or None, [1] * 16, 16, None, "GPU"] for n in (1, 2, 3)]
        subscriber.receive(0, batch(*pages[:1]))
        assert policy.rounds == 1  # The engine is still saturated.
        subscriber.receive(1, batch(*pages[1:]))
        assert policy.rounds == 2
        with anyio.fail_after(5):
            await placed.wait()
