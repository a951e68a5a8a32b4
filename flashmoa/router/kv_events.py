"""Follow SGLang's KV events over ZMQ (``--kv-events-config``). They report an engine's cache."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import anyio
import httpx
import msgspec
import zmq
import zmq.asyncio

from flashmoa.router.cache_tables import BLOCK_TOKENS, first_hash, next_hash
from flashmoa.router.dispatcher import Dispatcher
from flashmoa.router.forwarding import parse_object

logger = logging.getLogger(__name__)

_UNREADABLE = (
    msgspec.MsgspecError,  # It is a ValueError from 0.21 on.
    *(OverflowError, RecursionError, ValueError, TypeError, LookupError, AttributeError),
)
_STORED = (
    *("block_hashes", "parent_block_hash", "token_ids"),
    *("block_size", "lora_id", "medium", "salts"),
)


def parse_event_source(url: str, settings: Mapping[str, Any]) -> str | None:
    """Return an engine's ZMQ address, or ``None``. Raises: ValueError if it is unusable."""
    config = parse_object(str(settings.get("kv_events_config")))
    if config.get("publisher") != "zmq":
        return None
    if settings.get("dp_size", 1) != 1:
        raise ValueError("each data-parallel rank has its own, and the engine chooses among them")
    try:
        host = httpx.URL(url).host
        port = int(str(config.get("endpoint", "tcp://*:5557")).rpartition(":")[2])
    except ValueError as error:
        raise ValueError(
            f"they need a port, which {config!r} does not have; start the engine with "
            """--kv-events-config '{"publisher": "zmq", "endpoint": "tcp://*:5557"}'"""
        ) from error
    host = f"[{host}]" if ":" in host else host
    return f"tcp://{host}:{port}"


class _Page(NamedTuple):
    """A prompt up to the end of one page: its last block, and the tokens after that block."""

    block: int
    rest: tuple[int, ...] = ()
    # The blocks that end in this page.
    completed: tuple[int, ...] = ()


class PageMirror:
    """Translates the pages in one engine's cache into the router's block hashes.

    KV events name a page by a hash that only the engine can compute, and tell its tokens and its
    parent page. Pages may be shorter than blocks (``size``), down to one token.
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
        """Record consecutive pages with a known parent. Return the new blocks that end in them."""
        last = _Page(first_hash(salt)) if parent is None else self._pages.get(parent)
        completed: list[int] = []
        if last is None:
            return completed
        for index, page in enumerate(pages):
            last = self._next_page(last, tokens[index * page_size : (index + 1) * page_size])
            completed += () if page in self._pages else last.completed
            self._pages[page] = last
        return completed

    def _next_page(self, before: _Page, tokens: Sequence[int]) -> _Page:
        block, rest, completed = before.block, (*before.rest, *tokens), list[int]()
        while len(rest) >= self._size:
            block = next_hash(block, array("I", rest[: self._size]).tobytes())
            rest = rest[self._size :]
            completed.append(block)
        return _Page(block, rest, tuple(completed))

    def remove(self, pages: Sequence[int]) -> list[int]:
        """Forget pages, and return the blocks that ended in them."""
        removed = [self._pages.pop(page) for page in pages if page in self._pages]
        return [block for page in removed for block in page.completed]


async def follow_events(
    dispatcher: Dispatcher, engine: str, address: str, scope: anyio.CancelScope
) -> None:
    """Apply an engine's events until ``scope`` is cancelled, or a message is not a KV event."""
    context = zmq.asyncio.Context()
    reader = KvEventReader(dispatcher, engine)
    try:
        with scope:
            socket = context.socket(zmq.SUB)  # The host may have reached a limit.
            socket.setsockopt(zmq.IPV6, 1)  # IPv4 still works.
            socket.subscribe(b"")
            socket.connect(address)
            while True:
                _, number, payload = (await socket.recv_multipart())[:3]
                reader.receive(int.from_bytes(number, "big"), payload)
    except (zmq.ZMQError, ValueError) as error:
        text = "KV events of %s are not followed any more (check its --kv-events-config): %s"
        logger.warning(text, engine, error)
        reader.clear()  # The router would not notice that these blocks are evicted.
    finally:
        context.destroy(linger=0)


class KvEventReader:
    """Applies one engine's events to the policy. A gap in them empties the engine's table."""

    def __init__(self, dispatcher: Dispatcher, engine: str) -> None:
        self._dispatcher = dispatcher
        self._engine = engine
        self._mirror = PageMirror()
        # The expected sequence number; ``None`` before the first message.
        self._next: int | None = None

    def receive(self, sequence: int, payload: bytes) -> None:
        """Apply the events of a message, in msgpack."""
        if self._next not in (None, sequence):
            self.clear()
        self._next = sequence + 1
        try:
            for event in msgspec.msgpack.decode(payload)[1]:
                self._apply(event)
        except _UNREADABLE as error:
            logger.warning("A KV event of %s cannot be read: %s", self._engine, error)
            self.clear()
        self._dispatcher.reconsider()

    def clear(self) -> None:
        """Forget the engine's blocks, reported and guessed."""
        self._mirror = PageMirror()
        self._dispatcher.policy.remove_blocks(self._engine)

    def _apply(self, event: Any) -> None:
        if not isinstance(event, dict):  # Before SGLang 0.5.21.
            kind, *values = event
            names = ("block_hashes", "medium") if kind == "BlockRemoved" else _STORED
            event = {"type": kind, **dict(zip(names, values, strict=False))}
            event.update(event.pop("salts", None) or {})
        policy, fields = self._dispatcher.policy, cast("dict[str, Any]", event)
        if fields["type"] == "AllBlocksCleared":
            self.clear()
        elif fields.get("medium") not in (None, "GPU"):
            return  # The event is about another cache than the KV pool.
        elif fields["type"] == "BlockRemoved":
            policy.remove_blocks(self._engine, self._mirror.remove(fields["block_hashes"]))
        elif fields["type"] == "BlockStored":
            pages, parent, tokens, size = (fields[name] for name in _STORED[:4])
            if tokens and not isinstance(tokens[0], int):
                # With speculative decoding, a page consists of pairs of successive tokens.
                tokens = [token for token, _ in tokens]
            salt = fields.get("cache_salt") or ""
            policy.add_blocks(self._engine, self._mirror.add(pages, parent, tokens, size, salt))
