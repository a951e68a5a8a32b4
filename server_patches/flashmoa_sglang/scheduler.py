"""The scheduler side: one hook around prefill batching, and what it needs.

Time is never looked at here: tensor-parallel ranks run this independently and must decide
alike, so everything follows from the queue, the batch and the radix tree.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from flashmoa_sglang import releases
from flashmoa_sglang.messages import KvQuery, KvReport, ReleaseStream, RequestMark, mark_of

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

_REMEMBERED_RELEASES = 4096
# SGLang reserves at most this many output tokens when it admits a request.
_RESERVED_OUTPUT = 4096
_HELD_STEPS = 16
_LITTLE_LEFT = 128


class StreamPins:
    """Locks on the KV of prompt streams, the least recently extended first.

    A pin is a convenience, never a claim: it is given up as soon as anybody else needs the
    room, and the stream's KV is then ordinary evictable cache.
    """

    def __init__(self, tree_cache: Any) -> None:
        self._tree_cache = tree_cache
        self._pins: OrderedDict[str, releases.Pin] = OrderedDict()
        self._released: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pins)

    def replace(self, stream: str, new: releases.Pin) -> None:
        """Pin a stream's longer prefix, then give up the shorter one."""
        old = self._pins.pop(stream, None)
        if stream in self._released:
            releases.unpin(self._tree_cache, new)
        else:
            self._pins[stream] = new
        if old is not None:
            releases.unpin(self._tree_cache, old)

    def release(self, stream: str) -> None:
        """The stream is over; later increments of it, already on their way, pin nothing."""
        self._released[stream] = None
        if len(self._released) > _REMEMBERED_RELEASES:
            self._released.popitem(last=False)
        old = self._pins.pop(stream, None)
        if old is not None:
            releases.unpin(self._tree_cache, old)

    def make_room(self, tokens: int) -> bool:
        """Give up pins until ``tokens`` could be allocated; whether any had to go."""
        gave_up = False
        while self._pins and releases.free_tokens(self._tree_cache) < tokens:
            stream, old = self._pins.popitem(last=False)
            releases.unpin(self._tree_cache, old)
            gave_up = True
            logger.debug("Prompt stream %s gives way: its KV is evictable now", stream)
        return gave_up

    def forget(self) -> None:
        """The tree was reset, and the locked nodes with it."""
        self._pins.clear()


def attach(_result: None, scheduler: Any) -> None:
    """After ``Scheduler.init_request_dispatcher``: listen for the plugin's messages."""
    pins = StreamPins(scheduler.tree_cache)
    scheduler.flashmoa_pins = pins
    # Batches and output streamers know the tree, not the scheduler.
    scheduler.tree_cache.flashmoa_pins = pins
    scheduler.tree_cache.flashmoa_direct = releases.tokenizer_channel(scheduler)
    dispatcher = scheduler._request_dispatcher
    releases.handle(dispatcher, ReleaseStream, lambda message: pins.release(message.stream))
    releases.handle(dispatcher, KvQuery, lambda message: _report_kv(scheduler, message))


def _report_kv(scheduler: Any, message: KvQuery) -> None:
    tree = scheduler.tree_cache
    report = KvReport(
        query=message.query,
        dp_rank=releases.dp_rank(scheduler),
        total=scheduler.max_total_num_tokens,
        free=tree.token_to_kv_pool_allocator.available_size(),
        evictable=tree.evictable_size(),
        protected=tree.protected_size(),
        pinned_streams=len(scheduler.flashmoa_pins),
    )
    releases.to_tokenizer(scheduler, releases.wrapped(report))


def next_prefill_batch(
    original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around ``Scheduler._get_new_batch_prefill_raw``: hold, call, publish, pin."""
    if not scheduler.waiting_queue and scheduler.chunked_req is None:
        return original(scheduler, *args, **kwargs)
    _drop_superseded(scheduler)
    _make_room(scheduler, releases.running_batch(scheduler, kwargs))
    held = _hold(scheduler, _behind_chunk(scheduler))
    held += _hold(scheduler, _behind_requests(scheduler))
    held += _hold(scheduler, _behind_shorter(scheduler))
    try:
        result = original(scheduler, *args, **kwargs)
    finally:
        scheduler.waiting_queue += held
    batch = releases.new_batch(result)
    if batch is not None:
        _publish_increments(scheduler, batch)
    return result


def _mark(req: Any) -> RequestMark | None:
    return mark_of(req.sampling_params.custom_params)


def _stream(req: Any) -> str | None:
    mark = _mark(req)
    return mark.stream if mark is not None else None


def _drop_superseded(scheduler: Any) -> None:
    """An increment that has not started is pointless once a longer request is queued."""
    newest = {stream: req for req in scheduler.waiting_queue if (stream := _stream(req))}
    if not newest:
        return
    kept: list[Any] = []
    for req in scheduler.waiting_queue:
        if _is_increment(req) and newest[_stream(req)] is not req:
            _answer_superseded(scheduler, req)
        else:
            kept.append(req)
    scheduler.waiting_queue = kept


def _answer_superseded(scheduler: Any, req: Any) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    releases.to_tokenizer(scheduler, AbortReq(rid=req.rid), req)


def _hold(scheduler: Any, reqs: list[Any]) -> list[Any]:
    """Take requests out of the queue for this step."""
    if reqs:
        kept = set(map(id, scheduler.waiting_queue)) - set(map(id, reqs))
        scheduler.waiting_queue = [req for req in scheduler.waiting_queue if id(req) in kept]
    return reqs


def _patient(reqs: list[Any]) -> list[Any]:
    """Of these, the ones that have not been held too often; and count it."""
    for req in reqs:
        req.flashmoa_held_steps = getattr(req, "flashmoa_held_steps", 0) + 1
    return [req for req in reqs if req.flashmoa_held_steps <= _HELD_STEPS]


def _behind_chunk(scheduler: Any) -> list[Any]:
    """A stream's next request while its previous one is prefilled in chunks.

    Admitted beside the last chunk it would recompute what that chunk is computing.
    """
    chunked = scheduler.chunked_req
    stream = _stream(chunked) if chunked is not None else None
    if stream is None:
        return []
    return [req for req in scheduler.waiting_queue if _stream(req) == stream]


def _behind_requests(scheduler: Any) -> list[Any]:
    """Increments, while a request that somebody waits for is queued."""
    increments = [req for req in scheduler.waiting_queue if _is_increment(req)]
    if not increments or len(increments) == len(scheduler.waiting_queue):
        return []
    return _patient(increments)


def _behind_shorter(scheduler: Any) -> list[Any]:
    """Requests with much left to compute, while others of streams have little.

    In one batch the one whose stream is ready would wait for the one whose stream is not.
    """
    finals = [
        (mark.late, req) for req in scheduler.waiting_queue if (mark := _mark(req)) and mark.final
    ]
    if len(finals) < 2:
        return []
    bound = max(_LITTLE_LEFT, 2 * min(late for late, _ in finals))
    return _patient([req for late, req in finals if late > bound])


def _is_increment(req: Any) -> bool:
    mark = _mark(req)
    return mark is not None and mark.stream is not None and not mark.final


def _make_room(scheduler: Any, running_batch: Any) -> None:
    """Streams give way before any request waits for memory."""
    if not scheduler.flashmoa_pins or not scheduler.waiting_queue:
        return
    needed = max(
        len(req.origin_input_ids) + min(req.sampling_params.max_new_tokens or 0, _RESERVED_OUTPUT)
        for req in scheduler.waiting_queue
    )
    reserved = sum(
        max(0, min(req.sampling_params.max_new_tokens or 0, _RESERVED_OUTPUT) - len(req.output_ids))
        for req in running_batch.reqs
    )
    if scheduler.flashmoa_pins.make_room(needed + reserved):
        running_batch.batch_is_full = False


def _publish_increments(scheduler: Any, batch: Any) -> None:
    """KV of an increment can be hit by the very next step, and is locked for its stream."""
    # Where a model keeps state beside plain KV, that state is not there before the forward.
    if not releases.can_pin(scheduler):
        return
    for req in batch.reqs:
        if not _is_increment(req) or req is scheduler.chunked_req:
            continue
        if req.finished() or req.to_finish is not None:
            continue
        releases.publish(scheduler, req)
        scheduler.flashmoa_pins.replace(_stream(req), releases.pin(scheduler, req))


def check_decode_memory(
    original: Callable[..., bool], batch: Any, *args: Any, **kwargs: Any
) -> bool:
    """Around ``ScheduleBatch.check_decode_mem``: streams give way before a decode does."""
    fits = original(batch, *args, **kwargs)
    pins: StreamPins | None = getattr(batch.tree_cache, "flashmoa_pins", None)
    if fits or not pins:
        return fits
    needed = batch.new_tokens_required_next_decode(*args, **kwargs)
    pins.make_room(needed)
    return original(batch, *args, **kwargs)


def flush_cache(original: Callable[..., bool], scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """Around ``Scheduler.flush_cache``: a flushed tree has nothing left to unlock."""
    flushed = original(scheduler, *args, **kwargs)
    if flushed:
        scheduler.flashmoa_pins.forget()
    return flushed


def _is_ours(req: Any) -> bool:
    mark = _mark(req)
    return mark is not None and not mark.final and req.is_prefill_only and not req.return_logprob


def stream_output(
    original: Callable[..., None],
    streamer: Any,
    reqs: list[Any],
    return_logprob: bool,
    skip_req: Any = None,
) -> None:
    """Around ``releases.STREAM_OUTPUT``: prefill-only work has no text.

    Its answer goes straight to the HTTP process, which takes token-id batches too (that is
    what a server without tokenizer sends), and not through the detokenizer.
    """
    direct = getattr(streamer.tree_cache, "flashmoa_direct", None)
    ours = [req for req in reqs if _is_ours(req)]
    if not ours or direct is None:
        original(streamer, reqs, return_logprob, skip_req)
        return
    rest = [req for req in reqs if req not in ours]
    if rest:
        original(streamer, rest, return_logprob, skip_req)
    usual = streamer.send_to_detokenizer
    streamer.send_to_detokenizer = direct
    try:
        original(streamer, ours, False, skip_req)
    finally:
        streamer.send_to_detokenizer = usual
