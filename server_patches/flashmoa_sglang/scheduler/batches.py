"""The scheduler side: one hook around prefill batching, and what it needs.

Time is never looked at here: tensor-parallel ranks run this independently and must decide
alike, so everything follows from the queue, the batch and the radix tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flashmoa_sglang import asyncep, kv_free, releases
from flashmoa_sglang.costs import UNMEASURED, Costs
from flashmoa_sglang.messages import (
    Happened,
    KvQuery,
    KvReport,
    MeasuredCosts,
    ReleaseStream,
    mark_of,
)
from flashmoa_sglang.options import Options
from flashmoa_sglang.scheduler.gathering import Gathering
from flashmoa_sglang.scheduler.pins import StreamPins
from flashmoa_sglang.scheduler.scheduling import chunk_tokens, pause_steps, ride_tokens
from flashmoa_sglang.scheduler.sharing import QueuedTokens, SharedBatch
from flashmoa_sglang.scheduler.timer import ForwardTimer
from flashmoa_sglang.scheduler.waiting import (
    gathers,
    is_increment,
    left_of_chunked,
    look_in,
    one_at_a_time,
    prepare,
)

# How soon memory is short, in tokens of each decoding request: more than a step, and a speculative
# one is of several.
_SOON = 64
_UNBOUNDED = 1 << 30


class Side:
    """What the plugin keeps beside one SGLang scheduler.

    ``batch``: the prefill batch that is being put together. ``work``: what the engine has
    done so far, in prefill tokens. ``pause``: decode steps until prompt streams may go on.
    """

    def __init__(self, scheduler: Any) -> None:
        self.options = Options.from_environment()
        self.pins = StreamPins(scheduler.tree_cache)
        self.direct = releases.tokenizer_channel(scheduler)
        self.role = releases.role(scheduler)
        self.costs = UNMEASURED
        self.batch: SharedBatch | None = None
        self.gathering: Gathering | None = None
        self.queued = QueuedTokens(scheduler.page_size)
        self.timer = ForwardTimer(scheduler)
        self.work = 0.0
        self.pause = 0
        self.avoided = 0
        self.rode_along = 0
        self._told = Happened(0, 0)

    def tell(self, scheduler: Any) -> None:
        """Let the HTTP process know what it shows on ``/metrics``."""
        now = Happened(self.avoided, self.pins.gave_way)
        if now == self._told:
            return
        news = Happened(
            now.duplicates_avoided - self._told.duplicates_avoided,
            now.gave_way - self._told.gave_way,
        )
        self._told = now
        releases.to_tokenizer(scheduler, releases.wrapped(news))

    def shares(self, scheduler: Any) -> bool | None:
        """Whether equal tokens can be shared before they are computed.

        ``None``: nor afterwards, since no KV of prompts is kept.
        """
        if scheduler.disable_radix_cache:
            return None
        return self.options.intra_turn != "off" and releases.can_pin(scheduler)

    def shared_batch(self, scheduler: Any) -> SharedBatch | None:
        """A new one, where equal tokens can be shared at all."""
        if not self.shares(scheduler):
            return None
        # A prefill engine of a PD pair sends cached KV on before the forward that computes this.
        within = (
            self.options.intra_turn == "auto"
            and self.role != "prefill"
            and releases.shares_within_forward(scheduler)
        )
        return SharedBatch(scheduler.page_size, within_forward=within)


def attach(_result: None, scheduler: Any) -> None:
    """After ``Scheduler.init_request_dispatcher``: listen for the plugin's messages."""
    kv_free.verify(scheduler)
    side = Side(scheduler)
    scheduler.flashmoa = side
    # Batches, policies and output streamers know the tree, not the scheduler.
    scheduler.tree_cache.flashmoa = side
    dispatcher = scheduler._request_dispatcher
    releases.handle(dispatcher, ReleaseStream, lambda message: side.pins.release(message.stream))
    releases.handle(dispatcher, KvQuery, lambda message: _report_kv(scheduler, message))
    releases.handle(dispatcher, MeasuredCosts, lambda message: _use_costs(scheduler, message))


def _use_costs(scheduler: Any, message: MeasuredCosts) -> None:
    side: Side = scheduler.flashmoa
    side.costs = Costs(message.points, message.decode_step)
    # Ranks that step together must not be kept from it, one by one.
    together = scheduler.require_mlp_sync or releases.pipeline_stages(scheduler) > 1
    if message.waits_for is not None and not together:
        side.gathering = Gathering(message.waits_for, side.options.saturation_wait)


def _report_kv(scheduler: Any, message: KvQuery) -> None:
    tree, side = scheduler.tree_cache, scheduler.flashmoa
    report = KvReport(
        query=message.query,
        dp_rank=releases.dp_rank(scheduler),
        total=scheduler.max_total_num_tokens,
        free=tree.token_to_kv_pool_allocator.available_size(),
        evictable=tree.evictable_size(),
        protected=tree.protected_size(),
        pinned_streams=len(side.pins),
        gave_way=side.pins.gave_way,
        duplicates_avoided=side.avoided,
        rode_along=side.rode_along,
        experts=asyncep.memory(),
        kv_bytes=kv_free.bytes_of(scheduler),
        peak_bytes=kv_free.peak_memory(scheduler),
        shares=side.shares(scheduler),
    )
    releases.to_tokenizer(scheduler, releases.wrapped(report))


def next_prefill_batch(
    original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around ``Scheduler._get_new_batch_prefill_raw``: hold, call, share, publish, pin."""
    running = releases.running_batch(scheduler, kwargs)
    if not scheduler.waiting_queue and scheduler.chunked_req is None:
        return original(scheduler, *args, **kwargs)
    side: Side = scheduler.flashmoa
    held = prepare(scheduler, running)
    try:
        if gathers(scheduler, running):
            return _nobody(scheduler, running)
        if not _only_streams_want(scheduler):
            return _build(original, scheduler, *args, **kwargs)
        with _in_the_gaps(scheduler, running) as may_go:
            if not may_go:
                return _nobody(scheduler, running)
            full = running.batch_is_full
            result = _build(original, scheduler, *args, **kwargs)
            # That an increment found no room says nothing about requests.
            releases.running_after(scheduler, result).batch_is_full = full
            return result
    finally:
        side.batch = None
        scheduler.waiting_queue = held + scheduler.waiting_queue
        side.tell(scheduler)


def _nobody(scheduler: Any, running: Any) -> Any:
    look_in(scheduler)
    return releases.no_batch(running)


def _build(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    side: Side = scheduler.flashmoa
    side.batch = side.shared_batch(scheduler)
    result = original(scheduler, *args, **kwargs)
    batch = releases.new_batch(result)
    if batch is not None:
        _settle(scheduler, batch)
    return result


def admit(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``PrefillAdder.add_one_req``: share what the batch computes already."""
    side: Side | None = getattr(adder.tree_cache, "flashmoa", None)
    if side is None or side.batch is None:
        return original(adder, req, *args, **kwargs)
    return side.batch.admit(lambda: original(adder, req, *args, **kwargs), adder, req)


def _only_streams_want(scheduler: Any) -> bool:
    chunked = scheduler.chunked_req
    return (chunked is None or is_increment(chunked)) and all(
        map(is_increment, scheduler.waiting_queue)
    )


@contextmanager
def _in_the_gaps(scheduler: Any, running: Any) -> Iterator[bool]:
    """Only streams want to prefill: how much of the engine they may take.

    On an idle engine, a forward short enough for a request that comes meanwhile. Where others
    decode, tokens of one stream ride along with each step; and where SGLang cannot mix the
    two, or too few tokens could, streams have a forward of their own now and then. Yields
    whether they may go in this step.
    """
    side: Side = scheduler.flashmoa
    page, decoding = scheduler.page_size, releases.decoding(running)
    chunk = min(chunk_tokens(side.costs, page), scheduler.chunked_prefill_size or _UNBOUNDED)
    ride = ride_tokens(side.costs, decoding, side.options.stream_share, page)
    if not decoding:
        side.pause = 0
        alone = len(scheduler.waiting_queue) <= 1
        with releases.chunking(scheduler, 4 * chunk if alone else chunk):
            yield True
    elif left := _last_chance(scheduler, decoding):
        with one_at_a_time(scheduler), _by_themselves(scheduler, left, decoding):
            yield True
    elif releases.free_tokens(scheduler.tree_cache) < chunk + decoding * page:
        yield False
    elif ride and releases.can_mix(scheduler, running):
        before = side.work
        with one_at_a_time(scheduler), releases.mixing(scheduler, ride + decoding):
            yield True
        side.rode_along += max(0, int(side.work - before) - decoding)
    elif side.pause > 0:
        yield False
    else:
        with _by_themselves(scheduler, chunk, decoding):
            yield True


@contextmanager
def _by_themselves(scheduler: Any, tokens: int, decoding: int) -> Iterator[None]:
    """A forward for streams alone, and how long they pause then."""
    side: Side = scheduler.flashmoa
    before = side.work
    with releases.chunking(scheduler, tokens):
        yield
    # Paid for what was computed, not for what could have been.
    if side.work > before:
        computed, share = int(side.work - before), side.options.stream_share
        side.pause = pause_steps(side.costs, computed, decoding, share)


def _last_chance(scheduler: Any, decoding: int) -> int:
    """Tokens left of an increment that is being cut, if there will soon be no room for them.

    Its KV cannot give way to decodes before it is whole. 0: there is time, or no such increment.
    """
    tree, page = scheduler.tree_cache, scheduler.page_size
    left, step = left_of_chunked(scheduler), decoding * page
    if not left or releases.free_tokens(tree) >= left + max(2 * step, decoding * _SOON):
        return 0
    scheduler.flashmoa.pins.make_room(left + step)
    return left if releases.free_tokens(tree) >= left + step else 0


def _settle(scheduler: Any, batch: Any) -> None:
    """The batch is built: share, publish, pin, count."""
    side: Side = scheduler.flashmoa
    side.work += batch.extend_num_tokens
    side.timer.start(batch.reqs, batch.extend_num_tokens)
    if side.batch is not None:
        side.batch.settle(scheduler, batch, lambda req: _publishes(scheduler, req))
        side.avoided += side.batch.avoided
    # Where a model keeps state beside plain KV, that state is not there before the forward.
    if not releases.can_pin(scheduler):
        return
    for req in batch.reqs:
        if is_increment(req) and _publishes(scheduler, req):
            if side.batch is None:
                releases.publish(scheduler, req)
            side.pins.replace(mark_of(req).stream, releases.pin(scheduler, req))


def _publishes(scheduler: Any, req: Any) -> bool:
    """Whether others should find the request's KV in the very next step.

    An increment's, for its stream. Under the overlap schedule anybody's: SGLang would put it
    into the tree a step late.
    """
    if req is scheduler.chunked_req or req.finished() or req.to_finish is not None:
        return False
    if is_increment(req):
        return True
    return scheduler.enable_overlap and releases.is_shareable(req) and not req.output_ids


def check_decode_memory(
    original: Callable[..., bool], batch: Any, *args: Any, **kwargs: Any
) -> bool:
    """Around ``ScheduleBatch.check_decode_mem``: streams give way before a decode does."""
    fits = original(batch, *args, **kwargs)
    side: Side | None = getattr(batch.tree_cache, "flashmoa", None)
    if side is None:
        return fits
    side.work += side.costs.decode_weight
    side.pause = max(0, side.pause - 1)
    if fits or not side.pins:
        return fits
    side.pins.make_room(batch.new_tokens_required_next_decode(*args, **kwargs))
    return original(batch, *args, **kwargs)


def flush_cache(original: Callable[..., bool], scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """Around ``Scheduler.flush_cache``: a flushed tree has nothing left to unlock."""
    flushed = original(scheduler, *args, **kwargs)
    if flushed:
        scheduler.flashmoa.pins.forget()
    return flushed
