"""``SchedulerStreams``: a scheduler's prompt streams, and the increments that it makes of them.

The HTTP process sends each new token once. When the scheduler builds a batch, it makes increments
from the latest tokens of all streams (FlashAgents §3.1 and Algorithm 2). An increment is an
ordinary request of SGLang that generates nothing, so adapters, tensor parallelism and the radix
tree work as for any request. It joins the batch that is being built, or is discarded.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from flashmoa_sglang.messages import STREAM_OPENED, RequestMark, StreamProgress, StreamTokens
from flashmoa_sglang.scheduler.pins import Stage, can_pin, match_and_pin, pin_published
from flashmoa_sglang.scheduler.plan import Growth, Rank, choose_increments, fewest_tokens
from flashmoa_sglang.scheduler.request import state_of, total_tokens
from flashmoa_sglang.sglang.releases import RELEASE

if TYPE_CHECKING:
    from flashmoa_sglang.scheduler.pins import StreamPins

# Messages about a stream may arrive after its end, and must not open it again.
_MAX_REMEMBERED_ENDINGS = 4096
# A stream that has grown by fewer tokens is not matched with the radix tree again: hardly any
# other request can have computed exactly these.
_FEWEST_MATCHED = 64
# A prompt is overdue once the engine has done the work of computing the prompt this many times.
# Evicting it sooner costs more than it saves: most tools end within a second, while an engine
# computes a prompt once.
_OVERDUE_AFTER = 8


@dataclass(slots=True, eq=False)
class SchedulerStream:
    """A prompt stream in a scheduler.

    Attributes:
        number: position in opening order.
        tokens: all tokens of the prompt so far.
        message: SGLang's message of the request that opened the stream; ``None`` until it comes.
        opener: that request. It has the namespace of the stream's KV. It is ended uncomputed,
            because SGLang would wait for its end before changes of the engine.
        output: expected number of tokens of the answer to the final request; 0 if unknown.
        opened_at: the engine's work when the stream was opened, in prefill tokens.
        prefilled: number of leading tokens that have KV, or get it in a running forward.
        grows: whether the upstream agent writes already, so that the final request may come soon.
        ended: whether no more tokens come.
        claimed: whether the final request has come, which computes the rest.
        increment: the increment that was made and is not in the radix tree yet.
        kept: number of leading tokens of the increment that the stream still has.
        is_pin_stale: whether tokens were taken back since the stream's KV was pinned.
        gave_way: whether the pin was given up because a request needed the room.
    """

    id: str
    number: int
    tokens: array[int] = field(default_factory=lambda: array("q"))
    message: Any = None
    opener: Any = None
    output: int = 0
    opened_at: float = 0.0
    prefilled: int = 0
    grows: bool = False
    ended: bool = False
    claimed: bool = False
    increment: Any = None
    kept: int = 0
    is_pin_stale: bool = False
    gave_way: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether all tokens have KV and no more come."""
        return self.ended and self.prefilled >= len(self.tokens)

    @property
    def is_due(self) -> bool:
        """Whether the upstream agent has written its last token, so that the request is due."""
        return self.ended and self.grows and not self.claimed

    @property
    def may_grow(self) -> bool:
        return self.opener is not None and not self.claimed and self.increment is None


class Returning(NamedTuple):
    """A request that has ended, whose agent is likely to return with the results of tools.

    Attributes:
        tokens: number of its tokens, with its answer.
        prompt: number of tokens of its prompt; ``last`` is the last one.
        ended_at: the engine's work when it ended, in prefill tokens.
    """

    tokens: int
    prompt: int
    last: int
    ended_at: float


class SchedulerStreams:
    """The open prompt streams of a scheduler.

    Tensor-parallel ranks get the same messages in the same steps, and so make the same increments.

    Attributes:
        beyond: number of tokens of an increment that the radix tree does not keep.
    """

    def __init__(self, scheduler: Any, pins: StreamPins) -> None:
        self._scheduler = scheduler
        self._pins = pins
        # With EAGLE, the radix tree has pairs of tokens: it keeps the KV of a token with the next.
        self.beyond = int(scheduler.spec_algorithm.is_eagle())
        self._open: dict[str, SchedulerStream] = {}
        # Streams with uncomputed tokens and their numbers of such tokens, by opening number, and
        # the same in opening order. In a step few of hundreds of streams change.
        self._growing: dict[int, tuple[SchedulerStream, int]] = {}
        self._ordered: list[tuple[SchedulerStream, int]] = []
        self._changed: dict[str, SchedulerStream] = {}
        # For keep_cached().
        self._new: dict[str, SchedulerStream] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._returning: dict[str, Returning] = {}
        self._numbers = count()
        self._make: Callable[[Any], Any] | None = None
        self._progress: list[tuple[str, int, int, float, float | None]] = []
        # The streams without room for their tokens, now and as last reported.
        self._waiting: set[str] = set()
        self._reported_waiting: set[str] = set()
        # Tokens of duplicates avoided, and pins that gave way, as last reported.
        self._reported_counts = 0, 0

    def __len__(self) -> int:
        """Return the number of streams whose opener this rank got, and that may prefill more.

        A prompt that is held complete, while tools run for instance, changes no step.
        """
        return sum(
            stream.opener is not None and not stream.is_complete for stream in self._open.values()
        )

    def can_prefill_more(self) -> bool:
        return bool(self._growths())

    def leading_tokens(self, before: float | None) -> tuple[int, bool]:
        """Return how many tokens could be prefilled, and whether one of their streams has ended.

        Args: before: if given, count only streams that grow, and are smaller jobs than this one.
        """
        leading = [
            (stream, new)
            for stream, new in self._growths()
            if before is None or self._leads(stream, new, before)
        ]
        return sum(new for _, new in leading), any(stream.ended for stream, _ in leading)

    def context(self) -> int:
        """Return how many computed tokens precede an uncomputed token, on average."""
        growths = self._growths()
        new = sum(new for _, new in growths)
        return sum(stream.prefilled * new for stream, new in growths) // new if new else 0

    def _leads(self, stream: SchedulerStream, new: int, before: float) -> bool:
        """Compare the stream's request, if it came now, with a place of ``admission.place``."""
        if not stream.grows or before == inf:
            return stream.grows
        state = self._scheduler.flashmoa
        return state.work + new + state.costs.decode_weight * stream.output < before

    def _growths(self) -> list[tuple[SchedulerStream, int]]:
        """Return the streams with uncomputed tokens, in opening order, and these numbers."""
        if self._changed:
            for stream in self._changed.values():
                if new := self._growth(stream):
                    self._growing[stream.number] = stream, new
                else:
                    self._growing.pop(stream.number, None)
            self._changed.clear()
            self._ordered = [self._growing[number] for number in sorted(self._growing)]
        return self._ordered

    def _growth(self, stream: SchedulerStream) -> int:
        return self._cacheable(len(stream.tokens)) - stream.prefilled if stream.may_grow else 0

    def _cacheable(self, tokens: int) -> int:
        """Return how many of a prompt's leading tokens the radix tree keeps: whole pages."""
        page = self._scheduler.page_size
        return max(0, tokens - self.beyond) // page * page

    # Messages of the HTTP process and of SGLang.

    def extend(self, message: StreamTokens) -> None:
        for id_, kept in message.kept:
            if id_ not in self._ended:
                stream = self._stream(id_)
                del stream.tokens[kept:]
                stream.kept = min(stream.kept, kept)
                stream.prefilled = min(stream.prefilled, self._cacheable(kept))
                stream.is_pin_stale = True
        for id_, tokens, grows in message.tokens:
            if id_ not in self._ended:
                stream = self._stream(id_)
                stream.tokens.frombytes(tokens)
                stream.grows = grows
        for id_ in message.ended:
            if id_ not in self._ended:
                self._stream(id_).ended = True
        for id_ in message.unclaimed:
            self.claim(id_, claimed=False)

    def open(self, id_: str, message: Any, make: Callable[[Any], Any], output: int = 0) -> None:
        """Open a stream in answer to the request that opens it.

        Args:
            message: SGLang's message of the request.
            make: lets SGLang make a request from such a message and put it into its queue.
            output: expected number of tokens of the answer to the stream's final request.
        """
        self._make = make
        message.sampling_params.custom_params = RequestMark(id_, own=True).to_custom_params()
        opener = take_request(self._scheduler, message, make, runs=False)
        if opener is None:
            return  # SGLang has refused it, and told the HTTP process.
        # With this status SGLang releases what the request uses, such as its adapter.
        status = HTTPStatus.SERVICE_UNAVAILABLE
        end_unserved(self._scheduler, opener, status, STREAM_OPENED)
        let_go(self._scheduler, opener)
        if id_ not in self._ended:
            stream = self._stream(id_)
            stream.message, stream.opener, stream.output = message, opener, output
            stream.opened_at = self._scheduler.flashmoa.work
            self._new[id_] = stream

    def _stream(self, id_: str) -> SchedulerStream:
        """Return a stream that changes; open it if this is its first message."""
        stream = self._open.get(id_)
        if stream is None:
            stream = self._open[id_] = SchedulerStream(id_, next(self._numbers))
        self._changed[stream.id] = stream
        return stream

    def stage(self, id_: str) -> Stage:
        stream = self._open.get(id_)
        if stream is None:
            return Stage.KNOWN
        if stream.grows or stream.claimed:
            return Stage.NEXT
        return Stage.TOOLS if stream.ended else Stage.KNOWN

    def is_overdue(self, id_: str) -> bool:
        """Return whether a stream's request is so late that others may evict its KV."""
        stream = self._open.get(id_)
        if stream is None:
            return True
        waited = self._scheduler.flashmoa.work - stream.opened_at
        return self.stage(id_) is not Stage.NEXT and waited >= _OVERDUE_AFTER * stream.prefilled

    def overdue_tokens(self) -> int:
        """Return how much room the overdue streams would leave at most, in tokens."""
        pinned = (stream for stream in self._open.values() if stream.id in self._pins)
        return sum(stream.prefilled for stream in pinned if self.is_overdue(stream.id))

    def claim(self, id_: str, *, claimed: bool = True) -> None:
        """Make no more increments of a stream whose final request has come and is not refused."""
        if id_ in self._open:
            self._stream(id_).claimed = claimed

    def end(self, id_: str) -> None:
        """End a stream, or stop expecting the agent of a request that has ended."""
        if self._returning.pop(id_, None) is not None:
            return
        self._ended[id_] = None
        if len(self._ended) > _MAX_REMEMBERED_ENDINGS:
            self._ended.popitem(last=False)
        self._pins.release(id_)
        self._new.pop(id_, None)
        stream = self._open.pop(id_, None)
        if stream is not None:
            stream.claimed, self._changed[id_] = True, stream

    def lose(self, id_: str | None = None) -> None:
        """Note that a stream gave way and may be evicted, or that all streams were flushed."""
        for stream in self._open.values() if id_ is None else [self._open.get(id_)]:
            if stream is not None and stream.prefilled:
                stream.prefilled, stream.gave_way = 0, id_ is not None
                self._changed[stream.id] = stream
                self._progress.append((stream.id, 0, 0, 0.0, 0.0))

    def any_has_lost(self) -> bool:
        return any(map(self.has_lost, self._open))

    def has_lost(self, id_: str | None) -> bool:
        """Return whether a stream's KV gave way, and none has been pinned since."""
        stream = self._open.get(id_ or "")
        return stream is not None and stream.gave_way and id_ not in self._pins

    # Agents that are likely to return with the results of tools (--flashmoa-hold-tool-calls).

    def note_end(self, req: Any) -> None:
        """Keep room for the KV of a final request that has ended, if its agent may return."""
        state = self._scheduler.flashmoa
        if not state.options.hold_tool_calls or req.finished_reason.to_json()["type"] != "stop":
            return
        prompt = req.origin_input_ids
        ended = Returning(total_tokens(req), len(prompt), prompt[-1], state.work)
        returning = [*self._still_returning().items(), (req.rid, ended)]
        self._returning = dict(returning[-256:])  # At most 256 streams may be open.

    def returning_tokens(self) -> int:
        """Return the tokens of ended requests whose agents may return.

        Nothing pins their KV until the HTTP process has rendered the agents' next prompts.
        """
        self._returning = self._still_returning()
        return sum(returning.tokens for returning in self._returning.values())

    def _still_returning(self) -> dict[str, Returning]:
        now = self._scheduler.flashmoa.work
        return {rid: r for rid, r in self._returning.items() if now - r.ended_at < r.tokens}

    def _note_return(self, stream: SchedulerStream) -> None:
        tokens = stream.tokens
        for rid, returning in self._returning.items():
            if returning.prompt <= len(tokens) and tokens[returning.prompt - 1] == returning.last:
                del self._returning[rid]
                return

    # Increments.

    def keep_cached(self) -> None:
        """Pin the prefixes of new streams that other requests have computed.

        A busy engine may not prefill these streams for a while, and could evict the prefixes: for
        instance an agent's earlier turns while its tool runs. The whole prefix is pinned, because
        it uses no new room, and a part of a prompt is worth little.
        """
        for stream in list(self._new.values()):
            if self._growth(stream):
                self._match(stream, len(stream.tokens))
                self._note_return(stream)
            if stream.tokens:
                del self._new[stream.id]

    def make(self, tokens: int, room: int, most: int, *, before: float | None = None) -> list[Any]:
        """Make increments for the batch that is built next, and return them.

        Args:
            tokens: the most new tokens of all increments, without ``beyond`` for each.
            room: number of KV slots that streams may take.
            most: the most increments.
            before: streams that grow, and are smaller jobs than this one, come first.
        """
        page = self._scheduler.page_size
        fewest = fewest_tokens(len(self), tokens, page)
        growths = self._growths()
        # While many streams are open, none has enough tokens in most steps.
        if not any(new >= fewest or stream.ended for stream, new in growths):
            self._waiting = set()
            return []

        def size(stream: SchedulerStream, new: int) -> Growth:
            leads = before is None or self._leads(stream, new, before)
            rank = Rank.FILLS if not leads else Rank.DUE if stream.is_due else Rank.GROWS
            return Growth(stream.prefilled, new, stream.ended, rank)

        streams = [stream for stream, _ in growths]
        sizes = [size(stream, new) for stream, new in growths]
        # Matching takes time in proportion to the prompt, so only chosen streams are matched. A
        # stream that turns out to be computed leaves its place in the batch to another one.
        matched: set[int] = set()
        while True:
            chosen = choose_increments(sizes, min(tokens, room), fewest, page)[:most]
            fresh = [position for position, _ in chosen if position not in matched]
            if not fresh:
                break
            for position in fresh:
                room -= self._match(streams[position], room)
                sizes[position] = size(streams[position], self._growth(streams[position]))
            matched.update(fresh)
        lack_room = room < tokens and not chosen and choose_increments(sizes, tokens, fewest, page)
        self._waiting = {stream.id for stream in streams if lack_room and self._growth(stream)}
        made = (self._make_increment(streams[position], end) for position, end in chosen)
        return [req for req in made if req is not None]

    def _match(self, stream: SchedulerStream, room: int) -> int:
        """Pin a stream's cached prefix; return how many tokens that gains, at most ``room``."""
        end = min(len(stream.tokens), stream.prefilled + room)
        if end - stream.prefilled < _FEWEST_MATCHED or not can_pin(self._scheduler):
            return 0
        # Matching compares the whole prompt, so it is not done where it can find nothing.
        if self._pins.is_complete(stream.id) and not stream.is_pin_stale:
            return 0
        key = RELEASE.key_of(stream.tokens[:end], stream.opener)
        pin, tokens = match_and_pin(self._scheduler.tree_cache, key)
        added = tokens - stream.prefilled
        if added <= 0:
            self._pins.unlock(pin)
            return 0
        self._pins.replace(stream.id, pin)
        stream.prefilled = tokens
        self._changed[stream.id] = stream
        self._progress.append((stream.id, tokens, 0, 0.0, 0.0))
        return added

    def _make_increment(self, stream: SchedulerStream, end: int) -> Any:
        message = copy(stream.message)
        message.rid = f"{stream.id}-{next(self._numbers)}"
        message.input_ids = RELEASE.token_ids(stream.tokens[: end + self.beyond])
        message.priority = None  # It goes after requests of clients, and preempts none.
        assert self._make is not None
        req = take_request(self._scheduler, message, self._make)
        if req is not None:
            stream.increment, stream.kept = req, len(req.origin_input_ids)
            self._changed[stream.id] = stream
        return req

    def discard(self, req: Any) -> None:
        let_go(self._scheduler, req)
        if (stream := self._stream_of(req)) is not None:
            stream.increment = None
            self._changed[stream.id] = stream

    def publish(self, req: Any) -> None:
        """Pin an increment whose KV has just been published, so that the next one can follow."""
        if (stream := self._stream_of(req)) is not None:
            self._pins.replace(stream.id, pin_published(self._scheduler, req))
        self.settle(req)

    def settle(self, req: Any) -> None:
        """Note that an increment's KV is in the radix tree."""
        if (stream := self._stream_of(req)) is not None:
            # The stream may have changed the increment's last tokens since.
            stream.prefilled, stream.increment = self._cacheable(stream.kept), None
            stream.is_pin_stale = False
            self._changed[stream.id] = stream

    def finish(self, req: Any, seconds: float) -> None:
        """Note that an increment has been computed, ``seconds`` after its batch was built.

        Pin its KV, unless it was published once its forward was launched.
        """
        stream = self._stream_of(req)
        if stream is not None and can_pin(self._scheduler):
            key = RELEASE.key_of(array("q", req.origin_input_ids), req)
            pin, _ = match_and_pin(self._scheduler.tree_cache, key)
            self._pins.replace(stream.id, pin)
        self.settle(req)
        id_ = state_of(req).increment_of
        assert id_ is not None
        if (stream := self._open.get(id_)) is not None:
            tokens = min(len(req.origin_input_ids), stream.prefilled)
            computed = max(0, tokens - req.cached_tokens)
            self._progress.append((id_, tokens, computed, seconds, state_of(req).delay))

    def _stream_of(self, req: Any) -> SchedulerStream | None:
        stream = self._open.get(state_of(req).increment_of or "")
        return stream if stream is not None and stream.increment is req else None

    def report(self) -> None:
        """Tell the HTTP process how streams and counts have changed since the last report."""
        changed = self._waiting ^ self._reported_waiting
        avoided, gave_way = self._scheduler.flashmoa.duplicates_avoided, self._pins.gave_way
        if self._progress or changed or (avoided, gave_way) != self._reported_counts:
            waiting = tuple((id_, id_ in self._waiting) for id_ in sorted(changed))
            before_avoided, before_gave_way = self._reported_counts
            grown = avoided - before_avoided, gave_way - before_gave_way
            progress = StreamProgress(tuple(self._progress), waiting, *grown)
            RELEASE.to_tokenizer(self._scheduler, progress)
            self._progress, self._reported_waiting = [], self._waiting
            self._reported_counts = avoided, gave_way


def take_request(
    scheduler: Any, message: Any, make: Callable[[Any], Any], *, runs: bool = True
) -> Any:
    """Let SGLang make a request and take it out of its queue; ``None`` if it was refused.

    Args: see ``SchedulerStreams.open``; ``runs``: whether the request will be computed.
    """
    # SGLang must not refuse it because the queue is full, since it does not wait there.
    queue, scheduler.waiting_queue = scheduler.waiting_queue, []
    make(message)
    if scheduler.server_args.disaggregation_mode == "prefill":
        bootstrap = scheduler.disagg_prefill_bootstrap_queue
        if runs:
            # A request that is sent nowhere is ready for its prefill at once.
            scheduler.waiting_queue.extend(bootstrap.pop_bootstrapped())
            # SGLang leaves it there while no metadata buffer is free, and others would join it.
            for req in [req for req in bootstrap.queue if req.rid == message.rid]:
                bootstrap.queue.remove(req)
                let_go(scheduler, req)
        elif bootstrap.queue and bootstrap.queue[-1].rid == message.rid:
            scheduler.waiting_queue.append(bootstrap.queue.pop())
    made, scheduler.waiting_queue = scheduler.waiting_queue, queue
    queue.extend(req for req in made if req.rid != message.rid)
    return next((req for req in made if req.rid == message.rid), None)


def end_unserved(scheduler: Any, req: Any, status: HTTPStatus, message: str) -> None:
    """Tell the HTTP process why a request is not computed; ``req`` may be SGLang's message."""
    from sglang.srt.managers.io_struct import AbortReq

    reason: Any = {"type": "abort", "status_code": status, "message": message}
    abort = AbortReq(rid=req.rid, finished_reason=reason)
    RELEASE.tokenizer_channel(scheduler).send_output(abort, req)


def let_go(scheduler: Any, req: Any) -> None:
    """Release the resources of a request that has left the queue unserved."""
    RELEASE.release_prefetch(scheduler, req)
    if scheduler.server_args.disaggregation_mode == "prefill":
        RELEASE.release_metadata_buffer(scheduler, req)
