"""``StreamTable``: all prompt streams of a server, from their opening to their end.

A stream is an append-only prompt whose KV is built while it grows (FlashAgents §3.1, Algorithm 1).
This process receives and tokenises it, and ``Handover`` hands the tokens over; schedulers decide
when they are computed. Tasks run only while streams are open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from flashmoa_sglang.http import metrics
from flashmoa_sglang.http.errors import (
    EngineDraining,
    MalformedRequest,
    PromptTooLarge,
    StreamOutOfOrder,
    StreamUnknown,
    TooManyStreams,
    shown,
)
from flashmoa_sglang.http.handover import Handover
from flashmoa_sglang.http.hearing.following import FollowedCalls, Follower
from flashmoa_sglang.http.stream import (
    CallText,
    Ending,
    PromptStream,
    Terms,
    gone,
    over_context,
)
from flashmoa_sglang.http.tokens.token_buffer import LONG_TEXT, common_length, tokenize_aside
from flashmoa_sglang.sglang.options import device_slowdown

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
    from typing import Any

    from flashmoa_sglang.http.engine import Engine
    from flashmoa_sglang.http.tokens.token_buffer import TokenBuffer

logger = logging.getLogger(__name__)

# Seconds between checks of deadlines, and of draining, a flag that SGLang sets without an event.
# A task that has failed restarts after the same time.
_CHECK_SECONDS = 0.1
# A client that deletes no stream leaves the figures here. They take up to 80 kB for each stream.
_MAX_KEPT_FIGURES = 512
_RANK_HEADER = "x-data-parallel-rank"
Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for clients, which ``GET /flashmoa/info`` reports.

    ``streams``: open streams. ``characters_per_token``: a prompt with more characters for each
    token of the context is not text. ``remembered``: ended streams whose ending is still known. Of
    one scoring request: ``scored_items``; ``scores``, items times candidates;
    ``repeated_characters``, shared characters times prompts.
    """

    streams: int = 256
    ttl_seconds: float = 3600.0
    default_ttl_seconds: float = 30.0
    characters_per_token: int = 64
    remembered: int = 4096
    scored_items: int = 10_000
    scores: int = 1_000_000
    repeated_characters: int = 250_000_000


class StreamTable:
    """All open prompt streams of a server.

    Attributes:
        calls: the calls that streams can follow; ``None`` if this engine hears none.
        streamed: the tokens of ended text streams: ``total``, and ``ahead``, those known before
            the end.
    """

    def __init__(self, engine: Engine) -> None:
        self.limits = Limits()
        self.calls: FollowedCalls | None = None
        self.engine = engine
        self.streamed = {"total": 0, "ahead": 0}
        self._open: dict[str, PromptStream] = {}
        # How streams ended, and their requests' figures if the answers do not have them.
        self._ended: OrderedDict[str, Ending] = OrderedDict()
        self._figures: OrderedDict[str, dict[str, Any]] = OrderedDict()
        # The adapters that are being unloaded; ``None`` for each change of the whole engine.
        self._changing: list[str | None] = []
        self._pace = Pace(device_slowdown())
        self._handover = Handover(engine, self._open)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # The classes of errors that have been logged.
        self._logged: set[type[Exception]] = set()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, stream_id: str) -> PromptStream:
        """Return an open stream.

        Raises: StreamUnknown if there never was such a stream, StreamGone if it has ended.
        """
        stream = self._open.get(stream_id)
        if stream is not None:
            return stream
        ended = self._ended.get(stream_id)
        if ended is not None:
            raise gone(stream_id, ended)
        raise StreamUnknown(f"There is no prompt stream {shown(stream_id)}. Open one first.")

    def find(self, stream_id: str) -> tuple[PromptStream | None, str]:
        """Return a final request's stream and "open", or ``None`` and why it cannot be used."""
        stream = self._open.get(stream_id)
        if stream is not None:
            return (None, "used") if stream.claimed else (stream, "open")
        return None, self._ended.get(stream_id, "unknown")

    def unclaimed(self) -> list[PromptStream]:
        """Return the open streams whose requests have not come."""
        return [stream for stream in self._open.values() if not stream.claimed]

    def open(self, stream: PromptStream) -> None:
        """Open a stream. At the limit, close the oldest stream that the server itself has opened.

        Raises: TooManyStreams, or EngineDraining if the server is shutting down, its weights or the
            stream's adapter are being changed, or its memory is released.
        """
        if self.engine.draining:
            raise EngineDraining("The server is shutting down; use another engine.")
        changing = None in self._changing or stream.terms.lora_path in self._changing
        if changing or self.engine.lacks:
            raise EngineDraining("The engine is being changed; send the request without a stream.")
        if len(self._open) >= self.limits.streams:
            # Of prompts that the server holds, clients have asked for the ones from 0 (prewarming).
            held = [one for one in self.unclaimed() if one.pinned_from is not None]
            oldest = min(held, key=lambda one: one.pinned_from == 0, default=None)
            if oldest is None:
                raise TooManyStreams(
                    f"{self.limits.streams} prompt streams are open, which is the limit. "
                    "Delete some, or send the request without one."
                )
            self.close(oldest, "expired")
        self._open[stream.id] = stream
        metrics.set_open(len(self._open))
        self._handover.opening.append(stream)
        self._set_pace(stream)
        self._note_growth(stream, 0)
        # These are two tasks, so that streams expire even while others are being prefilled.
        self._ensure_runs("prompt streams, handover", self._handover.run)
        self._ensure_runs("prompt streams, lifetimes", self._watch_lifetimes)

    def add(self, stream: PromptStream, ids: Sequence[int]) -> None:
        """Buffer token ids.

        Raises: PromptTooLarge if the prompt would become too long; the stream is unchanged then.
        """
        room = self.engine.max_prompt_tokens
        if len(stream.ids) + len(ids) > room:
            raise over_context(room)
        stream.ids.extend(ids)

    async def add_text(
        self, stream: PromptStream, text: str, end: bool = False, start: int | None = None
    ) -> None:
        """Buffer text, and tokenise it.

        Args:
            end: whether this is the last text.
            start: this text replaces all text from this place on, as the client counts; ``None``:
                it is appended.

        Raises:
            PromptTooLarge: if the prompt would become too long; the stream is unchanged then.
            StreamGone: if the stream has ended or been used while a long text was tokenised.
        """
        room, own = self.engine.max_prompt_tokens, stream.buffer
        assert own is not None
        place = len(own.text) if start is None else stream.counted_from + start
        if place + len(text) > room * self.limits.characters_per_token:
            raise over_context(room)
        retokenized = own.unsettled_characters(place) if end or start is not None else 0
        characters = len(text) + retokenized
        # While a thread adds to a copy, requests may use the stream, or leave. The copy also
        # protects the text that a refused text would have replaced.
        is_copied = characters > LONG_TEXT or start is not None
        buffer = own.snapshot() if is_copied else own
        try:
            work = partial(_append, buffer, place, text, end, room)
            kept, tokens = await tokenize_aside(characters, work)
        except PromptTooLarge:
            stream.kept = min(stream.kept, len(own.tokens))
            raise
        if is_copied:
            stream.require_unused()
            stream.buffer = buffer
        stream.kept = min(stream.kept, kept)
        if end:
            stream.ids = tokens
            self.streamed["total"] += len(tokens)
            self.streamed["ahead"] += kept

    def make_pinned(
        self,
        obj: Any,
        meta: Mapping[str, Any],
        ids: Sequence[int],
        seconds: float,
        since: int = 0,
    ) -> PromptStream:
        """Make a stream, not open yet, that prefills a whole prompt and pins its KV.

        Args:
            obj: a ``GenerateReqInput`` in the prompt's namespace, and ``meta`` its ``meta_info``.
            since: number of tokens that the prompt has in common with ``obj``; 0: no request ends
                the stream, but only its time.

        Raises: as :meth:`add`.
        """
        rank = meta.get("dp_rank") if self.engine.data_parallel_ranks > 1 else None
        salt = getattr(obj, "cache_salt", None)
        stream = PromptStream(
            ttl_seconds=min(seconds, self.limits.ttl_seconds),
            buffer=None,
            terms=Terms(obj.priority, salt, obj.extra_key, obj.lora_path, rank),
            pinned_from=since,
            # The scheduler learns at once that nothing follows: it keeps this prompt rather than
            # the prompt of an agent that has not begun to write.
            ended_at=0.0,
        )
        self.add(stream, ids)
        return stream

    async def append(
        self,
        stream: PromptStream,
        seq: int,
        piece: str | Sequence[int] | CallText,
        end: bool,
        start: int | None = None,
    ) -> None:
        """Add piece number ``seq``; do nothing if it has been added before.

        Args: start: the place from which the piece replaces all text, as the client counts.

        Raises:
            MalformedRequest: if there is no such place, or the stream has followed a call and no
                place is given.
            StreamGone, EngineDraining: if the final request has come, or the server shuts down.
            StreamOutOfOrder: if the stream has ended, earlier pieces are missing, or another piece
                had this number.
            PromptTooLarge: if the prompt would become too long; the stream is unchanged then.
        """
        hashed = hash((piece if isinstance(piece, str) else tuple(piece), end, start))
        async with stream.growing:
            if not self._is_next(stream, seq, hashed):
                return
            stream.require_place(start)
            known = stream.known_tokens()
            text = "" if isinstance(piece, CallText) else piece
            if not isinstance(text, str):
                self.add(stream, text)
            elif text or start is not None or (end and stream.buffer is not None):
                await self.add_text(stream, text, end, start)
            self._stop_following(stream)
            if isinstance(piece, CallText) and self.calls is not None:
                # The stream grows by the call's text until the next append or the stream's end.
                stream.follower = Follower(stream, piece.call_id, self._add_followed)
                self.calls.follow(stream.follower)
            stream.next_seq += 1
            stream.last_append = hashed
            if end:
                stream.ended_at = time.monotonic()
            self._set_pace(stream)
            self._note_growth(stream, known)

    def _is_next(self, stream: PromptStream, seq: int, hashed: int) -> bool:
        """Return whether an append is the next one; ``False`` if it repeats an earlier one."""
        stream.require_unused()
        if seq < stream.next_seq:
            if seq == stream.next_seq - 1 and hashed != stream.last_append:
                raise StreamOutOfOrder(
                    f"Append {seq} has been added before, and was another one. Send what follows "
                    f"it as append {stream.next_seq}, or open a new stream.",
                    expected_seq=stream.next_seq,
                )
            return False
        if self.engine.draining:
            raise EngineDraining("The server is shutting down; send the whole request elsewhere.")
        if stream.ended_at is not None:
            raise StreamOutOfOrder(f"Prompt stream {stream.id} has ended; open a new one.")
        if seq > stream.next_seq:
            raise StreamOutOfOrder(
                f"Append {seq} came before append {stream.next_seq}; send the missing ones "
                "first, in order.",
                expected_seq=stream.next_seq,
            )
        return True

    def _stop_following(self, stream: PromptStream) -> None:
        if stream.follower is not None and self.calls is not None:
            self.calls.unfollow(stream.follower)
        stream.follower = None

    async def _add_followed(self, stream: PromptStream, text: str) -> None:
        known = stream.known_tokens()
        await self.add_text(stream, text)
        self._note_growth(stream, known)

    def _note_growth(self, stream: PromptStream, known_before: int) -> None:
        metrics.count("stream_tokens_buffered", stream.known_tokens() - known_before)
        self.keep_alive(stream)  # This also wakes the handover, which sends the tokens.

    def claim(self, stream: PromptStream) -> None:
        """Stop increments, because the final request has come and computes the rest."""
        stream.claimed = True

    def unclaim(self, stream: PromptStream) -> None:
        """Continue a stream whose final request was refused."""
        stream.claimed = False
        self._handover.unclaimed.append(stream.id)
        if stream.follower is not None:
            stream.follower.go_on()
        self.keep_alive(stream)

    def close(
        self, stream: PromptStream, ending: Ending, figures: dict[str, Any] | None = None
    ) -> None:
        """End a stream and let its KV be evicted; do nothing if it has ended already."""
        if stream.closed is not None:
            return
        stream.closed = ending
        self._stop_following(stream)
        del self._open[stream.id]
        self._ended[stream.id] = ending
        if figures is not None:
            self._figures[stream.id] = figures
        metrics.set_open(len(self._open))
        metrics.count("streams_ended", ending=ending)
        if len(self._ended) > self.limits.remembered:
            self._ended.popitem(last=False)
        if len(self._figures) > _MAX_KEPT_FIGURES:
            self._figures.popitem(last=False)
        self.engine.release(stream.id)
        self._handover.changed.set()

    def take_figures(self, stream_id: str) -> dict[str, Any] | None:
        """Return, once, how the request was computed that has found a stream by its prompt."""
        return self._figures.pop(stream_id, None)

    @contextlib.asynccontextmanager
    async def closing(self, adapter: str | None = None) -> AsyncGenerator[None]:
        """Close all streams, or an adapter's streams; open and compute none in the meantime."""
        self._changing.append(adapter)
        try:
            for stream in list(self._open.values()):
                if adapter in (None, stream.terms.lora_path):
                    self.close(stream, "drained")
            async with self.engine.change():
                # A scheduler finishes in one more step the forward that it has begun.
                for _ in range(2):
                    await self.engine.kv()
                yield
        finally:
            self._changing.remove(adapter)

    def keep_alive(self, stream: PromptStream) -> None:
        """Put off a stream's expiry."""
        stream.deadline = time.monotonic() + stream.ttl_seconds
        self._handover.changed.set()

    def named_rank(self, http_request: Any) -> int | None:
        """Return the data-parallel rank that a request's header names, if it names one.

        SGLang itself reads this header of chats and completions only.

        Raises: MalformedRequest if there is no such rank.
        """
        named = http_request.headers.get(_RANK_HEADER) if http_request is not None else None
        if named is None:
            return None
        ranks = self.engine.data_parallel_ranks
        if named not in map(str, range(ranks)):
            raise MalformedRequest(
                f"{_RANK_HEADER} must be a whole number below {ranks}, the number of data-parallel "
                f"ranks, not {shown(named)}; leave it out to let the engine choose."
            )
        return int(named)

    def rank_for(self, beginning: Prompt) -> int | None:
        """Choose the data-parallel rank for a stream by its beginning; ``None`` with one rank."""
        ranks = self.engine.data_parallel_ranks
        if ranks == 1:
            return None
        streams = [(s.terms.dp_rank or 0, s.beginning()) for s in self._open.values()]
        return choose_rank(ranks, streams, beginning)

    def _set_pace(self, stream: PromptStream) -> None:
        stream.pace_seconds = self._pace.next(time.monotonic(), len(self._open))

    def _ensure_runs(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Start ``work`` in a task, unless it is running; it returns when no stream is open."""
        task = self._tasks.get(name)
        if task is None or task.done():
            self._tasks[name] = asyncio.create_task(self._supervise(name, work), name=name)

    async def _supervise(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run a task while streams are open. After a bug, let the open streams fail and restart."""
        while self._open:
            try:
                await work()
            except Exception as raised:
                error = raised.exceptions[0] if isinstance(raised, ExceptionGroup) else raised
                if type(error) not in self._logged:
                    self._logged.add(type(error))
                    text = "The task %r failed: open streams stop prefilling, requests go on"
                    logger.error(text, name, exc_info=error)
                for stream in self._open.values():
                    stream.failure = stream.failure or f"{type(error).__name__}: {error}"
                await asyncio.sleep(_CHECK_SECONDS)

    async def _watch_lifetimes(self) -> None:
        while self._open:
            self._expire(time.monotonic())
            await asyncio.sleep(_CHECK_SECONDS)

    def _expire(self, now: float) -> None:
        for stream in list(self._open.values()):
            if self.engine.draining and not stream.claimed:
                self.close(stream, "drained")
            elif now >= stream.deadline and not (stream.claimed or stream.growing.locked()):
                if stream.pinned_from is None:
                    text = "Prompt stream %s expired, because its client sent nothing for %g s"
                    logger.info(text, stream.id, stream.ttl_seconds)
                self.close(stream, "expired")


class Pace:
    """Spreads the appends of all streams evenly. Times are in seconds, of any one clock.

    Answering an append takes the HTTP process about a millisecond, which a CPU engine takes from a
    forward. So each answer names a time for the next append, when no other client appends. The more
    streams are open, the longer each gathers its text.

    Args: slowdown: factor of all intervals, for a modelled GPU that is slowed down.
    """

    def __init__(self, slowdown: float = 1.0) -> None:
        self._slowdown = slowdown
        self._last = 0.0

    def next(self, now: float, streams: int) -> float:
        """Return how long the stream that has just appended should gather text."""
        soonest = 0.04 * self._slowdown
        # With 5 ms from append to append, appends take at most a quarter of a core. Each of 256
        # streams then gathers for 1.3 s. In that time agents write about as many tokens as are left
        # to the request anyway.
        interval = max(0.005 * self._slowdown * streams, soonest)
        next_turn = max(self._last + interval / max(streams, 1), now + soonest)
        self._last = min(next_turn, now + 2 * interval)
        return self._last - now


def choose_rank(ranks: int, streams: Iterable[tuple[int, Prompt]], beginning: Prompt) -> int:
    """Choose the data-parallel rank for a stream with this beginning.

    Ranks do not share KV. So one rank computes streams whose first 64 characters, or tokens, are
    equal, unless it has 16 streams more than another rank.

    Args: streams: rank and prompt of each open stream; token ids are an ``array("q")``.
    """
    compared = beginning[:2048]
    if not isinstance(compared, str):
        compared = array("q", compared)
    loads = [0] * ranks
    common = [0] * ranks
    for rank, prompt in streams:
        loads[rank] += 1
        if isinstance(prompt, str) == isinstance(compared, str):
            length = common_length(prompt, compared)
            if length >= 64:
                common[rank] = max(common[rank], length)
    best = max(range(ranks), key=lambda rank: (common[rank], -loads[rank]))
    if common[best] and loads[best] - min(loads) < 16:
        return best
    return loads.index(min(loads))


def _append(
    buffer: TokenBuffer, place: int, text: str, end: bool, room: int
) -> tuple[int, array[int]]:
    """Replace a buffer's text from ``place`` on.

    Return how many tokens are still the same, and all tokens.

    Raises: PromptTooLarge if there are more than ``room``; appended text is dropped then.
    """
    before = buffer.checkpoint()
    kept, tokens = buffer.replace(place, text, room), buffer.tokens
    if end and len(tokens) <= room:
        # The tokens that were uncertain so far count, too.
        tokens = array("q", buffer.all_tokens())
        kept = min(kept, common_length(tokens, buffer.tokens))
    if len(tokens) > room:
        buffer.restore(before)
        raise over_context(room)
    return kept, tokens
