"""Test how KV events are found, followed and applied: pages, gaps and rejoins."""

import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import pairwise

import anyio
import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from flashmoa.router import kv_events
from flashmoa.router.application import application
from flashmoa.router.cache_tables import Blocks, EngineTraits, token_blocks
from flashmoa.router.dispatcher import Dispatcher
from flashmoa.router.engines import RouterOptions
from flashmoa.router.flops import TOKENS
from flashmoa.router.policy import PrefixAware
from tests.integration.router.serving import serve
from tests.unit.router.support import PROMPTS, SIZE, FakeEngine, blocks, running

PROMPT = token_blocks([1] * 32)
PUBLISHES = {"publisher": "zmq", "endpoint": "tcp://*:7000"}


def stored(first: int, blocks: int) -> list[object]:
    """Return the event of a prompt of equal tokens, whose pages are numbered from ``first`` on."""
    pages = list(range(first, first + blocks))
    return ["BlockStored", pages, None, [first] * 16 * blocks, 16, None, "GPU"]


STORED = stored(1, 2)


def batch(*events: object) -> bytes:
    return msgspec.msgpack.encode([0.0, events, 0])


@given(
    prompts=st.lists(PROMPTS, max_size=10),
    page=st.sampled_from([1, 2, 3, 4, 8]),
    seed=st.integers(0, 1000),
)
def test_reported_pages_become_hashes_of_prompts(
    prompts: list[list[int]], page: int, seed: int
) -> None:
    """Compare with an engine whose cache is a set of page prefixes, evicted from their ends."""
    dice = random.Random(seed)
    mirror = kv_events.PageMirror(SIZE)
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
    mirror, tokens = kv_events.PageMirror(SIZE), [1, 2, 3, 4, 5, 6, 7, 8]
    assert mirror.add([5], 4, tokens[:4], 4) == mirror.remove([9]) == []
    assert mirror.add([1, 2], None, tokens, 4) == list(blocks(tokens).hashes)
    assert mirror.remove([9]) == []


@pytest.fixture
def policy() -> PrefixAware:
    return PrefixAware()


@pytest.fixture
def dispatcher(policy: PrefixAware) -> Dispatcher:
    policy.join("a", EngineTraits(TOKENS))
    return Dispatcher(policy)


def named(event: list[object], **more: object) -> dict[str, object]:
    """Return an event in the form of SGLang 0.5.21 and later."""
    names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id")
    return {**dict(zip(names, event, strict=False)), **more}


SALTED, UNITS = token_blocks([1] * 32, salt="x"), list(range(33))
# With speculative decoding, pages consist of pairs of tokens.
PAIRS = [*STORED[:3], list(pairwise(UNITS)), *STORED[4:]]


@pytest.mark.parametrize(
    "rows",
    [
        [
            (0, batch(named(STORED, medium="GPU", session_id="s")), PROMPT, 31),
            (1, batch(named(["BlockRemoved", [2]], medium="CPU_PINNED")), PROMPT, 31),
            (2, batch(named(["BlockRemoved", [2]])), PROMPT, 16),
            (3, batch(named(["AllBlocksCleared"])), PROMPT, 0),
            (4, batch(named(STORED, cache_salt="x")), SALTED, 31),
        ],
        [
            (4, batch(STORED), PROMPT, 31),
            (5, batch(["BlockRemoved", [2], "CPU_PINNED"]), PROMPT, 31),
            (6, batch(["BlockRemoved", [2], "GPU"]), PROMPT, 16),
            (8, batch(), PROMPT, 0),
            (9, batch([*STORED, {"cache_salt": "x"}]), SALTED, 31),
            (10, batch(["AllBlocksCleared"]), SALTED, 0),
            (11, batch(STORED), PROMPT, 31),
            (12, b"\xc1", PROMPT, 0),
            (13, batch(PAIRS), token_blocks(UNITS), 32),
            (14, batch(["BlockStored", [1], None, [-1] * 16, 16]), token_blocks(UNITS), 0),
            (15, batch(STORED), PROMPT, 31),
            (16, b"\x91" * 10_000, PROMPT, 0),
        ],
    ],
    ids=["named", "positional"],
)
def test_events_change_a_table_and_gaps_empty_it(
    rows: list[tuple[int, bytes, Blocks, int]], policy: PrefixAware, dispatcher: Dispatcher
) -> None:
    reader = kv_events.KvEventReader(dispatcher, "a")
    for sequence, message, prompt, matched in rows:
        reader.receive(sequence, message)
        assert policy.matched_tokens("a", prompt) == matched, sequence


@pytest.mark.parametrize(
    ("host", "config", "expected"),
    [
        ("host", None, None),
        ("host", "no JSON", None),
        ("host", json.dumps({"publisher": "null"}), None),
        ("host", json.dumps({"publisher": "zmq"}), "tcp://host:5557"),
        ("[::1]", json.dumps(PUBLISHES), "tcp://[::1]:7000"),
    ],
)
def test_event_source_of_server_info(host: str, config: str | None, expected: str | None) -> None:
    info = {"kv_events_config": config}
    assert kv_events.parse_event_source(f"http://{host}:30000", info) == expected


class Publisher:
    """Publishes events as SGLang does, and says what its first subscriber has missed."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self._numbers = itertools.count()

    async def publish(self, *events: list[object]) -> None:
        number = next(self._numbers).to_bytes(8, "big")
        await self._socket.send_multipart([b"kv", number, batch(*events)])

    async def publish_other(self) -> None:
        """Publish a message that is no KV event."""
        await self._socket.send_multipart([b"kv"])


@asynccontextmanager
async def publishing() -> AsyncGenerator[tuple[Publisher, str]]:
    with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as socket:
        socket.linger = 0
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        yield Publisher(socket), f"tcp://127.0.0.1:{port}"


async def test_blocks_are_forgotten_when_following_ends(
    policy: PrefixAware, dispatcher: Dispatcher
) -> None:
    async with publishing() as (publisher, source), anyio.create_task_group() as group:
        group.start_soon(kv_events.follow_events, dispatcher, "a", source, anyio.CancelScope())
        table = policy.engines["a"].blocks
        with anyio.fail_after(20):
            while len(table) != 2:  # A subscription takes a moment.
                await publisher.publish(STORED)
                await anyio.sleep(0.005)
            while len(table):
                await publisher.publish_other()
                await anyio.sleep(0.005)


def test_a_message_causes_one_round_of_routing(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[None] = []
    monkeypatch.setattr(dispatcher, "reconsider", lambda: rounds.append(None))
    events = [stored(first, 1) for first in (1, 2, 3)]
    kv_events.KvEventReader(dispatcher, "a").receive(0, batch(*events))
    assert len(rounds) == 1


async def test_a_rejoined_engines_events_are_followed() -> None:
    engine, refused = FakeEngine(needs_key=False), ("GET", "/health/ready")
    async with (
        publishing() as (publisher, before),
        publishing() as (other, after),
        serve(engine.app()) as url,
    ):
        engine.advertise(before)
        options = RouterOptions([url], watch_seconds=0.01)

        async def until(gauge: str, value: int) -> str:
            line = f'flashmoa_router_engine_{gauge}{{engine="{url}"}} {value}.0\n'
            with anyio.fail_after(20):
                while line not in (text := (await router("GET", "/metrics"))[1].decode()):
                    # A subscription takes a moment. Events at the old port are of another engine
                    # once this engine has moved.
                    await publisher.publish(STORED)
                    await other.publish(stored(3, 3))
                    await anyio.sleep(0.005)
            return text

        async with running(application(options)) as router:
            await until("blocks", 2)
            engine.refuses.add(refused)
            text = await until("up", 0)
            assert not any(f"engine_{name}{{" in text for name in ("blocks", "load"))
            engine.advertise(after)
            engine.refuses.discard(refused)
            await until("blocks", 3)
