"""The scheduler side: hooks around prefill batching.

Time is never looked at here: tensor-parallel ranks run this independently and must decide
alike, so everything follows from the queue, the batch and the radix tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flashmoa_sglang import releases
from flashmoa_sglang.messages import is_increment, mark_of
from flashmoa_sglang.scheduler import room
from flashmoa_sglang.scheduler.scheduling import chunk_tokens, pause_steps, ride_tokens
from flashmoa_sglang.scheduler.waiting import gathers, look_in, one_at_a_time, prepare

if TYPE_CHECKING:
    from flashmoa_sglang.scheduler.side import Side

# How soon memory is short, in tokens of each decoding request: more than a step, and a speculative
# one is of several.
_SOON = 64
_UNBOUNDED = 1 << 30


def next_prefill_batch(
    original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around ``Scheduler._get_new_batch_prefill_raw``: hold, call, share, publish, pin."""
    running = releases.running_batch(scheduler, kwargs)
    side: Side = scheduler.flashmoa
    room.offer(scheduler, running)
    if not _anybody_waits(scheduler):
        return original(scheduler, *args, **kwargs)
    if scheduler.enable_priority_preemption:
        room.make(scheduler, running)
    turns = {id(req): turn for turn, req in enumerate(scheduler.waiting_queue)}
    held = prepare(scheduler, running)
    try:
        if gathers(scheduler, running):
            return _nobody(scheduler, running)
        if not _only_streams_want(scheduler):
            return _build(original, scheduler, running, *args, **kwargs)
        with _in_the_gaps(scheduler, running) as may_go:
            if not may_go:
                return _nobody(scheduler, running)
            return _build(original, scheduler, running, *args, **kwargs)
    finally:
        side.batch = None
        if held:
            # Whoever joined the queue meanwhile comes last.
            everybody = held + scheduler.waiting_queue
            scheduler.waiting_queue = sorted(
                everybody, key=lambda req: turns.get(id(req), len(turns))
            )
        side.tell(scheduler)


def _anybody_waits(scheduler: Any) -> bool:
    """Whether a prefill may be built: also of a request whose grammar is compiled by now."""
    return bool(
        scheduler.waiting_queue
        or scheduler.chunked_req is not None
        or scheduler.grammar_manager.has_waiting_grammars()
    )


def _nobody(scheduler: Any, running: Any) -> Any:
    look_in(scheduler)
    return releases.no_batch(running)


def _build(
    original: Callable[..., Any], scheduler: Any, running: Any, *args: Any, **kwargs: Any
) -> Any:
    side: Side = scheduler.flashmoa
    side.batch = side.shared_batch(scheduler)
    side.is_short_for_streams = _only_streams_want(scheduler)
    full = running.batch_is_full
    result = original(scheduler, *args, **kwargs)
    if side.is_short_for_streams:
        # That an increment found no room says nothing about requests.
        releases.running_after(scheduler, result).batch_is_full = full
    batch = releases.new_batch(result)
    if batch is not None:
        _settle(scheduler, batch)
    return result


def admit(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``PrefillAdder.add_one_req``: share what the batch computes already, and have
    streams give way to a request that finds no room.

    Here SGLang knows what each request takes beside those that joined the batch before it, so
    that any number of them find the room that streams hold.
    """
    side: Side | None = getattr(adder.tree_cache, "flashmoa", None)
    if side is None:
        return original(adder, req, *args, **kwargs)

    def ask() -> Any:
        if side.batch is None:
            return original(adder, req, *args, **kwargs)
        return side.batch.admit(lambda: original(adder, req, *args, **kwargs), adder, req)

    def joined() -> bool:
        return bool(adder.can_run_list) and adder.can_run_list[-1] is req

    result = ask()
    if is_increment(req) and releases.is_without_room(result):
        side.is_short_for_streams = True
        # It leaves the queue before the next batch, so that nobody waits behind it.
        req.flashmoa_found_no_room = not joined()
        return result
    while releases.is_without_room(result) and side.pins.give_way():
        if joined():
            result = adder.budget_state()
            continue
        # Asked as seldom as possible: SGLang may count how often a request found no room.
        needs = room.asked_of_pool(req, adder.page_size)
        while adder.rem_total_tokens <= needs and side.pins.give_way():
            pass
        result = ask()
    return result


def _only_streams_want(scheduler: Any) -> bool:
    chunked, queue = scheduler.chunked_req, scheduler.waiting_queue
    if chunked is None and not queue:
        return False
    return (chunked is None or is_increment(chunked)) and all(map(is_increment, queue))


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
    left, step = room.left_of_chunked(scheduler), decoding * page
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
    if not scheduler.flashmoa.publishes_early:
        return False
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
