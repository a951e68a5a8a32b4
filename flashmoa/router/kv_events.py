"""Follow SGLang's KV events over ZMQ (``--kv-events-config``), which report an engine's cache."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import zmq
import zmq.asyncio
from anyio.abc import TaskGroup

from flashmoa.router.blocks import PageMirror
from flashmoa.router.dispatcher import Dispatcher
from flashmoa.router.event_sources import EventSource

logger = logging.getLogger(__name__)

# The most seconds for a replay: a publisher looks for requests to replay ten times a second.
_REPLAY_SECONDS = 5.0
# The sequence number that ends a replay.
_REPLAY_END = (1 << 64) - 1


class EngineBlocks:
    """Merges the blocks of an engine's data-parallel ranks, and reports them to the dispatcher.

    A block counts as cached as long as at least one rank has it.
    """

    def __init__(self, dispatcher: Dispatcher, engine: str, ranks: int = 1) -> None:
        self._dispatcher = dispatcher
        self.engine = engine
        self._ranks = ranks
        # The number of ranks that have each block.
        self._counts = Counter[int]()

    def add(self, blocks: Collection[int]) -> None:
        """Add blocks that a rank has cached."""
        self._counts.update(blocks)
        self._dispatcher.add_blocks(self.engine, blocks)

    def remove(self, blocks: Collection[int]) -> None:
        """Remove blocks that a rank has evicted."""
        self._counts.subtract(blocks)
        evicted = [block for block in blocks if self._counts[block] <= 0]
        for block in evicted:
            del self._counts[block]
        self._dispatcher.remove_blocks(self.engine, evicted)

    def reconsider(self) -> None:
        """Place waiting requests, after all events of a message were applied."""
        self._dispatcher.reconsider()

    def report_all(self) -> None:
        """Report all blocks again, to a dispatcher that has forgotten the engine meanwhile."""
        self._dispatcher.add_blocks(self.engine, tuple(self._counts))
        self.reconsider()

    def clear(self, blocks: Collection[int]) -> None:
        """Remove all blocks of a rank that has emptied its cache."""
        self.remove(blocks)
        if self._ranks == 1:
            # This also removes blocks that were only guessed to be cached.
            self._dispatcher.clear_blocks(self.engine)


class KvEventSubscriber:
    """Follows the events of one rank.

    It requests events that were published before the subscription or got lost, if the engine
    replays events. Otherwise a gap in the events empties the table of the engine's blocks, because
    they may have been evicted.
    """

    def __init__(self, blocks: EngineBlocks, source: EventSource) -> None:
        self._blocks = blocks
        self._source = source
        self._mirror = PageMirror()
        # The expected sequence number; ``None`` before the first message.
        self._next: int | None = None
        # When the last applied message was written, by the engine's clock.
        self._newest = 0.0

    async def run(self) -> None:
        """Apply events until cancelled, or until a message is not a KV event.

        Then the blocks that it has told of are forgotten, since nobody would tell of their end.
        """
        try:
            async with _socket(zmq.SUB) as socket:
                socket.subscribe(self._source.topic.encode())
                socket.connect(self._source.address)
                # The socket buffers events that are published during the replay.
                await self._replay(0)
                while True:
                    _, sequence, payload = (await socket.recv_multipart())[:3]
                    await self._receive_live(int.from_bytes(sequence, "big"), payload)
        except (zmq.ZMQError, ValueError) as error:
            text = (
                "The router no longer follows the KV events of %s: %s. Check the "
                "engine's --kv-events-config and restart the router"
            )
            logger.warning(text, self._blocks.engine, error)
            self._clear()

    async def _receive_live(self, sequence: int, payload: bytes) -> None:
        if self._next is not None and sequence > self._next:
            await self._replay(self._next)
        elif (
            self._next is not None
            and sequence < self._next
            and _time_written(payload) > self._newest
        ):
            # A replayed message is received a second time with an old number. This one is newer, so
            # it comes from a restarted engine, which counts from 0 again.
            self._clear()
            self._next = None
            await self._replay(0)
        self.receive(sequence, payload)

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
        logger.info(text, self._blocks.engine, self._source.replay, _REPLAY_SECONDS)

    def receive(self, sequence: int, payload: bytes) -> None:
        """Apply the events of a message, in msgpack, unless it was received before."""
        if self._next is not None and sequence != self._next:
            if sequence < self._next:
                return
            self._clear()
        self._next = sequence + 1
        try:
            written, events, *_ = msgspec.msgpack.decode(payload)
            self._newest = max(self._newest, float(written))
            for event in events:
                self._apply(*event)
        except (msgspec.DecodeError, ValueError, TypeError, IndexError, AttributeError) as error:
            text = "A KV event of %s cannot be read, so the engine's blocks are forgotten: %s"
            logger.warning(text, self._blocks.engine, error)
            self._clear()
        self._blocks.reconsider()

    def _clear(self) -> None:
        self._blocks.clear(self._mirror.clear())

    def _apply(self, kind: str, *values: Any) -> None:
        if kind == "AllBlocksCleared":
            self._clear()
        elif kind == "BlockRemoved":
            if _is_on_device(values, 1):
                self._blocks.remove(self._mirror.remove(values[0]))
        elif kind == "BlockStored" and _is_on_device(values, 5):
            pages, parent, tokens, size = values[:4]
            if tokens and not isinstance(tokens[0], int):
                # With speculative decoding a page has pairs of each token and the next one.
                tokens = [token for token, _ in tokens]
            salt = str(values[6].get("cache_salt", "")) if len(values) > 6 else ""
            self._blocks.add(self._mirror.add(pages, parent, tokens, size, salt))


class EventFollower:
    """Follows the KV events of one engine, as the engine advertises them whenever it joins.

    Args:
        tasks: the group in which events are received.
    """

    def __init__(self, dispatcher: Dispatcher, tasks: TaskGroup) -> None:
        self._dispatcher = dispatcher
        self._tasks = tasks
        self._advertised: tuple[Sequence[str], Sequence[EventSource]] = ((), ())
        self._tables: list[EngineBlocks] = []
        self._scope = anyio.CancelScope()

    def follow(self, places: Sequence[str], sources: Sequence[EventSource]) -> None:
        """Follow an engine that has joined, and report the blocks that it is known to have.

        If it advertises what it did before, its events were followed while it was away, so its
        cache is known; if another engine runs there now, that one's first event says so. Otherwise
        everything starts again.

        Args:
            places: the names of the engine's places, which it joined as.
            sources: one for each of its ranks, which belong to the places in turns.
        """
        if (places, sources) == self._advertised:
            for table in self._tables:
                table.report_all()
            return
        self._advertised = (places, sources)
        self._scope.cancel()
        ranks_each = len(sources) // len(places)
        self._tables = [EngineBlocks(self._dispatcher, place, ranks_each) for place in places]
        tables = itertools.cycle(self._tables)
        subscribers = [KvEventSubscriber(next(tables), source) for source in sources]
        self._scope = anyio.CancelScope()
        self._tasks.start_soon(self._receive, self._scope, subscribers)

    async def _receive(
        self, scope: anyio.CancelScope, subscribers: Sequence[KvEventSubscriber]
    ) -> None:
        with scope:
            async with anyio.create_task_group() as group:
                for subscriber in subscribers:
                    group.start_soon(subscriber.run)


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


def _time_written(payload: bytes) -> float:
    try:
        return float(msgspec.msgpack.decode(payload)[0])
    except (msgspec.DecodeError, ValueError, TypeError, IndexError):
        return 0.0


def _is_on_device(values: Sequence[Any], index: int) -> bool:
    """Return whether an event is about the KV pool, given the index of the field that says so."""
    return len(values) <= index or values[index] in (None, "GPU")
