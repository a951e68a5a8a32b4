"""Follow SGLang's KV events over ZMQ (``--kv-events-config``), which report an engine's cache."""

from __future__ import annotations

import logging
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import httpx
import msgspec
import zmq
import zmq.asyncio

from flashmoa.router.cache_tables import BLOCK_TOKENS, first_hash, next_hash
from flashmoa.router.client_requests import parse_object
from flashmoa.router.dispatcher import Dispatcher

logger = logging.getLogger(__name__)

# The most seconds for a replay: a publisher looks for requests to replay ten times a second.
_REPLAY_SECONDS = 5.0
# The sequence number that ends a replay.
_REPLAY_END = (1 << 64) - 1
_UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, IndexError, AttributeError)


@dataclass(frozen=True, slots=True)
class EventSource:
    """Gives the ZMQ addresses at which one data-parallel rank publishes its events.

    Attributes:
        address: where events are published.
        replay: where missed events can be requested; ``None`` if they cannot.
        topic: the topic that every message begins with.
    """

    address: str
    replay: str | None = None
    topic: str = ""


def parse_event_sources(url: str, settings: Mapping[str, Any]) -> tuple[EventSource, ...]:
    """Return one source for each rank of an engine, or none if the engine publishes no events.

    The ranks have consecutive ports. Raises: ValueError if it cannot be read where they publish.

    Args:
        url: the engine's URL, which has the host.
        settings: the engine's ``/server_info``.
    """
    config = parse_object(str(settings.get("kv_events_config")))
    if config.get("publisher") != "zmq":
        return ()
    try:
        host = httpx.URL(url).host
        host = f"[{host}]" if ":" in host else host
        topic, replay = str(config.get("topic") or ""), config.get("replay_endpoint")
        ports = [_parse_port(config.get("endpoint", "tcp://*:5557"))]
        ports += [_parse_port(replay)] if replay else []
        return tuple(
            EventSource(*(f"tcp://{host}:{port + rank}" for port in ports), topic=topic)
            for rank in range(int(settings.get("dp_size") or 1))
        )
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"they need a port, which {config!r} does not have; start the engine with "
            """--kv-events-config '{"publisher": "zmq", "endpoint": "tcp://*:5557"}'"""
        ) from error


def _parse_port(endpoint: object) -> int:
    return int(str(endpoint).rpartition(":")[2])


@dataclass(frozen=True, slots=True)
class _Page:
    """The state of a prompt at the end of one page.

    Attributes:
        block: hash of the last whole block.
        rest: tokens after that block.
        completed: hashes of the blocks that end in this page.
    """

    block: int
    rest: tuple[int, ...] = ()
    completed: tuple[int, ...] = ()

    def next_page(self, tokens: Sequence[int], block_size: int) -> _Page:
        """Return the state at the end of the next page, which has these tokens."""
        rest = (*self.rest, *tokens)
        block, completed = self.block, list[int]()
        while len(rest) >= block_size:
            block = next_hash(block, array("I", rest[:block_size]).tobytes())
            rest = rest[block_size:]
            completed.append(block)
        return _Page(block, rest, tuple(completed))


class PageMirror:
    """Translates the pages in one engine's cache into the router's block hashes.

    An engine's KV events identify a page by a hash that only the engine can compute, and give its
    tokens and the page before it. Pages may be shorter than the router's blocks, down to one token.

    Args:
        size: number of tokens in a block.
    """

    def __init__(self, size: int = BLOCK_TOKENS) -> None:
        self._size = size
        self._pages: dict[int, _Page] = {}

    def add(
        self,
        pages: Sequence[int],
        parent: int | None,
        tokens: Sequence[int],
        page_size: int,
        salt: str = "",
    ) -> list[int]:
        """Record consecutive pages, and return the blocks that end in those that are new.

        Pages are ignored if their parent is unknown, because the event with the parent was lost.
        """
        last = _Page(first_hash(salt)) if parent is None else self._pages.get(parent)
        if last is None:
            return []
        completed: list[int] = []
        for index, page in enumerate(pages):
            last = last.next_page(tokens[index * page_size : (index + 1) * page_size], self._size)
            if page not in self._pages:
                completed += last.completed
            self._pages[page] = last
        return completed

    def remove(self, pages: Sequence[int]) -> list[int]:
        """Forget pages, and return the blocks that ended in them."""
        removed = [self._pages.pop(page) for page in pages if page in self._pages]
        return [block for page in removed for block in page.completed]

    def clear(self) -> None:
        self._pages.clear()


class KvEventSubscriber:
    """Follows the events of one engine, or of one of its ranks, and tells the policy of them.

    It requests events that were published before the subscription or got lost, if the engine
    replays events. Otherwise a gap in the events empties the table of the engine's blocks, because
    they may have been evicted.
    """

    def __init__(self, dispatcher: Dispatcher, engine: str, source: EventSource) -> None:
        self._dispatcher = dispatcher
        self._engine = engine
        self._source = source
        self._mirror = PageMirror()
        # The expected sequence number; ``None`` before the first message.
        self._next: int | None = None

    async def run(self) -> None:
        """Apply events until cancelled, or until a message is not a KV event.

        Then the blocks that it has told of are forgotten, since their end would not be noticed.
        """
        try:
            async with _socket(zmq.SUB) as socket:
                socket.subscribe(self._source.topic.encode())
                socket.connect(self._source.address)
                # The socket buffers events that are published during the replay.
                await self._replay(0)
                while True:
                    _, number, payload = (await socket.recv_multipart())[:3]
                    sequence = int.from_bytes(number, "big")
                    if self._next is not None and sequence > self._next:
                        await self._replay(self._next)
                    self.receive(sequence, payload)
        except (zmq.ZMQError, ValueError) as error:
            text = (
                "The router no longer follows the KV events of %s: %s. Check the "
                "engine's --kv-events-config and restart the router"
            )
            logger.warning(text, self._engine, error)
            self._clear()

    async def _replay(self, first: int) -> None:
        """Request and apply the messages that were published from number ``first`` on."""
        if self._source.replay is None:
            return
        async with _socket(zmq.DEALER) as socket:
            socket.connect(self._source.replay)
            with anyio.move_on_after(_REPLAY_SECONDS):
                await socket.send(b"", zmq.SNDMORE)
                await socket.send(first.to_bytes(8, "big"))
                while True:
                    _, number, payload = (await socket.recv_multipart())[:3]
                    if (sequence := int.from_bytes(number, "big")) == _REPLAY_END:
                        return
                    self.receive(sequence, payload)
        text = (
            "%s did not replay its KV events at %s within %g s, so some may be missing; check "
            "replay_endpoint in its --kv-events-config"
        )
        logger.info(text, self._engine, self._source.replay, _REPLAY_SECONDS)

    def receive(self, sequence: int, payload: bytes) -> None:
        """Apply the events of a message, in msgpack, unless it was received before."""
        if self._next is not None and sequence != self._next:
            if sequence < self._next:
                return
            self._clear()
        self._next = sequence + 1
        try:
            for event in msgspec.msgpack.decode(payload)[1]:
                self._apply(*event)
        except _UNREADABLE as error:
            text = "A KV event of %s cannot be read, so the engine's blocks are forgotten: %s"
            logger.warning(text, self._engine, error)
            self._clear()
        self._dispatcher.reconsider()

    def _clear(self) -> None:
        self._mirror.clear()
        # This also removes blocks that were only guessed to be cached.
        self._dispatcher.policy.clear_blocks(self._engine)

    def _apply(self, kind: str, *values: Any) -> None:
        if kind == "AllBlocksCleared":
            self._clear()
        elif kind == "BlockRemoved":
            if _is_on_device(values, 1):
                removed = self._mirror.remove(values[0])
                self._dispatcher.policy.remove_blocks(self._engine, removed)
        elif kind == "BlockStored" and _is_on_device(values, 5):
            pages, parent, tokens, size = values[:4]
            if tokens and not isinstance(tokens[0], int):
                # With speculative decoding a page has pairs of each token and the next one.
                tokens = [token for token, _ in tokens]
            salt = str(values[6].get("cache_salt", "")) if len(values) > 6 else ""
            added = self._mirror.add(pages, parent, tokens, size, salt)
            self._dispatcher.policy.add_blocks(self._engine, added)


async def follow_events(
    dispatcher: Dispatcher,
    places: Sequence[str],
    sources: Sequence[EventSource],
    scope: anyio.CancelScope,
) -> None:
    """Follow the KV events of an engine that has joined, until ``scope`` is cancelled.

    Args:
        places: the names of the engine's places, which it joined as.
        sources: one for each place; none if the engine publishes no events.
    """
    with scope:
        async with anyio.create_task_group() as group:
            for place, source in zip(places, sources, strict=False):
                group.start_soon(KvEventSubscriber(dispatcher, place, source).run)


@asynccontextmanager
async def _socket(kind: int) -> AsyncGenerator[zmq.asyncio.Socket]:
    context = zmq.asyncio.Context()
    socket = context.socket(kind)
    socket.setsockopt(zmq.IPV6, 1)  # IPv4 goes on working.
    try:
        yield socket
    finally:
        socket.close(linger=0)
        context.term()


def _is_on_device(values: Sequence[Any], index: int) -> bool:
    """Return whether an event is about the KV pool, given the index of the field that says so."""
    return len(values) <= index or values[index] in (None, "GPU")
