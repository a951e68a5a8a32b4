"""SGLang's KV events over ZMQ (``--kv-events-config``) into the router's tables."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import zmq
import zmq.asyncio

from flashmoa.router.dispatcher import Dispatcher
from flashmoa.router.event_sources import EventSource
from flashmoa.router.kv_events import PageMirror

logger = logging.getLogger(__name__)

# A publisher looks for such questions ten times a second.
_REPLAY_SECONDS = 5.0
# What ends a replay, as a sequence number.
_END = (1 << 64) - 1


class EngineBlocks:
    """The blocks of an engine: those that any of its data-parallel ranks has."""

    def __init__(self, dispatcher: Dispatcher, engine: str, ranks: int = 1) -> None:
        self._dispatcher = dispatcher
        self.engine = engine
        self._ranks = ranks
        self._held = Counter[int]()

    def stored(self, blocks: Collection[int]) -> None:
        """A rank has these now."""
        self._held.update(blocks)
        self._dispatcher.stored(self.engine, blocks)

    def removed(self, blocks: Collection[int]) -> None:
        """A rank does not have these any more."""
        self._held.subtract(blocks)
        gone = [block for block in blocks if self._held[block] <= 0]
        for block in gone:
            del self._held[block]
        self._dispatcher.removed(self.engine, gone)

    def cleared(self, blocks: Collection[int]) -> None:
        """A rank, which had these, has nothing any more."""
        self.removed(blocks)
        if self._ranks == 1:
            self._dispatcher.cleared(self.engine)


class Subscriber:
    """The events of one rank.

    What was published before it was heard, or got lost, is asked for where there is a replay. A gap
    that stays empties the table: what is not known is not there.
    """

    def __init__(self, blocks: EngineBlocks, source: EventSource) -> None:
        self._blocks = blocks
        self._source = source
        self._mirror = PageMirror()
        self._next: int | None = None
        # When the last batch that was applied was written, by its engine's clock.
        self._newest = 0.0

    async def run(self) -> None:
        """Until cancelled, or until what is heard there are no KV events."""
        try:
            async with _socket(zmq.SUB) as socket:
                socket.subscribe(self._source.topic.encode())
                socket.connect(self._source.address)
                # What is published meanwhile waits in the socket.
                await self._replay(0)
                while True:
                    _, sequence, payload = (await socket.recv_multipart())[:3]
                    await self._heard(int.from_bytes(sequence, "big"), payload)
        except (zmq.ZMQError, ValueError) as error:
            logger.warning("KV events of %s are not heard: %s", self._blocks.engine, error)

    async def _heard(self, sequence: int, payload: bytes) -> None:
        if self._next is not None and sequence > self._next:
            await self._replay(self._next)
        elif self._is_of_another_life(sequence, payload):
            self._clear()
            self._next = None
            await self._replay(0)
        self.receive(sequence, payload)

    def _is_of_another_life(self, sequence: int, payload: bytes) -> bool:
        """Whether an engine was restarted and counts from 0; what is replayed comes twice, too."""
        known = self._next is not None and sequence < self._next
        return known and _written_at(payload) > self._newest

    async def _replay(self, first: int) -> None:
        """Ask for what was published from message ``first`` on."""
        if self._source.replay is None:
            return
        async with _socket(zmq.DEALER) as socket:
            socket.connect(self._source.replay)
            with anyio.move_on_after(_REPLAY_SECONDS):
                await socket.send(b"", zmq.SNDMORE)
                await socket.send(first.to_bytes(8, "big"))
                while True:
                    _, number, payload = (await socket.recv_multipart())[:3]
                    if (sequence := int.from_bytes(number, "big")) == _END:
                        return
                    self.receive(sequence, payload)
        logger.info("%s replays no KV events; they are heard from now on", self._blocks.engine)

    def receive(self, sequence: int, payload: bytes) -> None:
        """One message, unless it is known: a batch of events, msgpack as SGLang and vLLM do it."""
        if self._next is not None and sequence < self._next:
            return
        if self._next is not None and sequence > self._next:
            self._clear()
        self._next = sequence + 1
        try:
            written, events, *_ = msgspec.msgpack.decode(payload)
            self._newest = max(self._newest, float(written))
            for event in events:
                self._apply(*event)
        except (msgspec.DecodeError, ValueError, TypeError, IndexError, AttributeError) as error:
            logger.warning("A KV event of %s cannot be read: %s", self._blocks.engine, error)
            self._clear()

    def _clear(self) -> None:
        self._blocks.cleared(self._mirror.clear())

    def _apply(self, kind: str, *values: Any) -> None:
        if kind == "AllBlocksCleared":
            self._clear()
        elif kind == "BlockRemoved":
            if _on_device(values, 1):
                self._blocks.removed(self._mirror.removed(values[0]))
        elif kind == "BlockStored" and _on_device(values, 5):
            pages, parent, tokens, size = values[:4]
            if tokens and not isinstance(tokens[0], int):
                # Pages for speculative decoding are of pairs: each token and the next one.
                tokens = [first for first, _ in tokens]
            salt = str(values[6].get("cache_salt", "")) if len(values) > 6 else ""
            self._blocks.stored(self._mirror.stored(pages, parent, tokens, size, salt))


@asynccontextmanager
async def _socket(kind: int) -> AsyncGenerator[zmq.asyncio.Socket]:
    context = zmq.asyncio.Context()
    socket = context.socket(kind)
    try:
        yield socket
    finally:
        socket.close(linger=0)
        context.term()


def _written_at(payload: bytes) -> float:
    try:
        return float(msgspec.msgpack.decode(payload)[0])
    except (msgspec.DecodeError, ValueError, TypeError, IndexError):
        return 0.0


def _on_device(values: Sequence[Any], place: int) -> bool:
    """Whether an event is about the engine's KV pool; ``place``: of the value that says so."""
    return len(values) <= place or values[place] in (None, "GPU")
