"""SGLang's KV events over ZMQ (``--kv-events-config``), and what they say of an engine's cache."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import anyio
import httpx
import msgspec
import zmq
import zmq.asyncio

from flashmoa.router.blocks import PageMirror
from flashmoa.router.dispatcher import Dispatcher

logger = logging.getLogger(__name__)

# A publisher looks for requests to replay ten times a second.
_REPLAY_SECONDS = 5.0
# The sequence number that ends a replay.
_REPLAY_END = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class EventSource:
    """The publisher of one data-parallel rank: ZMQ addresses as the router reaches them.

    Attributes:
        replay: the address that repeats missed events, if there is one.
        topic: the beginning of its messages.
    """

    address: str
    replay: str | None = None
    topic: str = ""


def event_sources(url: str, info: Mapping[str, Any]) -> tuple[EventSource, ...]:
    """Return one source for each rank of an engine, or none where it does not publish.

    The ports of the ranks follow one another.

    Args:
        info: the engine's ``/server_info``. ``kv_events`` has the address, in the releases that
            tell it; ``kv_events_config``, what the engine was started with, has the replay's.
    """
    config = _json_object(info.get("kv_events_config"))
    described: Any = info.get("kv_events")
    try:
        if described is None:
            if config.get("publisher") != "zmq":
                return ()
            described = {
                "endpoint_port_base": _port(config.get("endpoint", "tcp://*:5557")),
                "topic": config.get("topic", ""),
                "dp_size": info.get("dp_size", 1),
            }
        host = httpx.URL(url).host
        first, topic = int(described["endpoint_port_base"]), str(described.get("topic") or "")
        replay = config.get("replay_endpoint")
        first_replay = _port(replay) if replay else None
        return tuple(
            EventSource(
                f"tcp://{host}:{first + rank}",
                f"tcp://{host}:{first_replay + rank}" if first_replay is not None else None,
                topic,
            )
            for rank in range(max(1, int(described.get("dp_size") or 1)))
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return ()


def _json_object(text: object) -> dict[str, Any]:
    try:
        config: Any = json.loads(str(text))
    except ValueError:
        return {}
    return cast("dict[str, Any]", config) if isinstance(config, dict) else {}


def _port(endpoint: object) -> int:
    return int(str(endpoint).rpartition(":")[2])


class EngineBlocks:
    """The blocks of an engine: those that at least one of its data-parallel ranks has."""

    def __init__(self, dispatcher: Dispatcher, engine: str, ranks: int = 1) -> None:
        self._dispatcher = dispatcher
        self.engine = engine
        self._ranks = ranks
        self._held = Counter[int]()

    def stored(self, blocks: Collection[int]) -> None:
        """Add blocks that a rank has stored."""
        self._held.update(blocks)
        self._dispatcher.stored(self.engine, blocks)

    def removed(self, blocks: Collection[int]) -> None:
        """Take away blocks that a rank has evicted."""
        self._held.subtract(blocks)
        gone = [block for block in blocks if self._held[block] <= 0]
        for block in gone:
            del self._held[block]
        self._dispatcher.removed(self.engine, gone)

    def cleared(self, blocks: Collection[int]) -> None:
        """Take away all the blocks of a rank that has emptied its cache."""
        self.removed(blocks)
        if self._ranks == 1:
            self._dispatcher.cleared(self.engine)


class KvEventSubscriber:
    """Follows the events of one rank.

    Events that were published before the subscription, or got lost, are asked for where the engine
    replays them. A gap that stays empties the table: blocks count only where they are certain.
    """

    def __init__(self, blocks: EngineBlocks, source: EventSource) -> None:
        self._blocks = blocks
        self._source = source
        self._mirror = PageMirror()
        self._next: int | None = None
        # When the last applied batch was written, by its engine's clock.
        self._newest = 0.0

    async def run(self) -> None:
        """Apply events until cancelled, or until a message turns out to be no KV event."""
        try:
            async with _socket(zmq.SUB) as socket:
                socket.subscribe(self._source.topic.encode())
                socket.connect(self._source.address)
                # Events that are published during the replay wait in the socket.
                await self._replay(0)
                while True:
                    _, sequence, payload = (await socket.recv_multipart())[:3]
                    await self._receive_live(int.from_bytes(sequence, "big"), payload)
        except (zmq.ZMQError, ValueError) as error:
            logger.warning("KV events of %s are not followed: %s", self._blocks.engine, error)

    async def _receive_live(self, sequence: int, payload: bytes) -> None:
        if self._next is not None and sequence > self._next:
            await self._replay(self._next)
        elif self._is_after_restart(sequence, payload):
            self._clear()
            self._next = None
            await self._replay(0)
        self.receive(sequence, payload)

    def _is_after_restart(self, sequence: int, payload: bytes) -> bool:
        # A restarted engine counts from 0 again, but replayed messages come twice as well: only
        # the time at which they were written tells the two apart.
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
                    if (sequence := int.from_bytes(number, "big")) == _REPLAY_END:
                        return
                    self.receive(sequence, payload)
        logger.info("%s replays no KV events; only new ones are followed", self._blocks.engine)

    def receive(self, sequence: int, payload: bytes) -> None:
        """Apply one message unless it is known: events in SGLang's and vLLM's msgpack format."""
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
                # Pages for speculative decoding hold pairs: each token with the next one.
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
    """Return whether an event is about the KV pool, as its value at ``place`` says."""
    return len(values) <= place or values[place] in (None, "GPU")
