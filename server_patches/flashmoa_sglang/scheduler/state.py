"""``SchedulerState``, which the plugin keeps for a scheduler, and handlers of its messages."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from flashmoa_sglang.costs import FEWEST_RIDING, UNMEASURED, TimedForward
from flashmoa_sglang.messages import (
    CountUpdate,
    ForwardTimes,
    HearAnswers,
    KvQuery,
    KvReport,
    MeasuredCosts,
    ReleaseStream,
    RequestMark,
    StreamTokens,
    handle,
)
from flashmoa_sglang.moe import asyncep, kv_free
from flashmoa_sglang.moe.saturation import SaturationGate
from flashmoa_sglang.scheduler.pins import StreamPins, can_pin
from flashmoa_sglang.scheduler.request import state_of
from flashmoa_sglang.scheduler.shared_prefill import QueuedTokens, SharedPrefill
from flashmoa_sglang.scheduler.streams import SchedulerStreams, end_unserved
from flashmoa_sglang.scheduler.written import WrittenAnswers
from flashmoa_sglang.sglang.options import Options, device_slowdown
from flashmoa_sglang.sglang.releases import RELEASE

logger = logging.getLogger(__name__)

# Rows for requests that are added to SGLang's table, which is the most increments in a batch.
SPARE_ROWS = 16
# The most forwards that are launched and not processed, and the most times that are told together.
_MOST_LAUNCHED, _MOST_TIMES = 64, 256


class SchedulerState:
    """The plugin's state of one SGLang scheduler, as ``scheduler.flashmoa``.

    Attributes:
        streams: the open prompt streams.
        written: the requests that clients hear while they are running.
        pins: locks on the KV of prompt streams.
        shared: lets requests wait for what others of the batch that is being built compute;
            ``None`` if nothing is shared.
        held_back: the requests that wait outside of the queue while a batch is built.
        only_streams: whether the batch that is being built is for prompt streams only.
        needs_pages: whether that batch is mixed, and room for its decodes has not been kept yet.
        increments_ended: whether increments have given back KV since a batch was built.
        work: the work that the engine has done so far, in prefill tokens.
        no_rides: why no tokens ride along with decode steps; empty if some do.
        late_kv: why KV is put into the radix tree, and pinned there, only with the results of its
            forward; empty if once that is launched.
        launched: requests of the last forward whose KV is put there when the next step begins.
        elsewhere: how many requests decode on another rank that steps together with this one, or in
            another batch of a pipeline.
        steps_without_streams: the decode steps since streams had a forward of their own.
        duplicates_avoided, rode_along: numbers of tokens so far; see ``KvReport``.
    """

    def __init__(self, scheduler: Any) -> None:
        self.options = Options.from_environment()
        self.pins = StreamPins(
            scheduler.tree_cache,
            lambda stream: self.streams.lose(stream),
            lambda stream: self.streams.stage(stream),
        )
        self.streams = SchedulerStreams(scheduler, self.pins)
        self.written = WrittenAnswers(device_slowdown())
        self.tokenizer_channel = RELEASE.tokenizer_channel(scheduler)
        # The engine's role in a PD pair, "prefill" or "decode"; otherwise "null".
        self.role: str = scheduler.server_args.disaggregation_mode
        self.no_rides = RELEASE.why_no_rides(scheduler)
        self.late_kv = RELEASE.why_late(scheduler) if can_pin(scheduler) else ""
        self.costs = UNMEASURED
        self.saturation_gate: SaturationGate | None = None
        self.queued = QueuedTokens(scheduler.page_size)
        self.shared: SharedPrefill | None = None
        self.held_back: list[Any] = []
        self.launched: list[Any] = []
        self.only_streams = self.needs_pages = self.increments_ended = False
        self.timer = ForwardTimer(scheduler)
        self.work, self.steps_without_streams = 0.0, 0
        self.elsewhere = 0
        self.duplicates_avoided = 0
        self.rode_along = 0
        self._reported = CountUpdate(0, 0)

    def report_counts(self, scheduler: Any) -> None:
        """Tell the HTTP process what ``/metrics`` and the states of streams show, if it changed."""
        self.streams.report()
        now, before = CountUpdate(self.duplicates_avoided, self.pins.gave_way), self._reported
        if now == before:
            return
        self._reported = now
        update = CountUpdate(
            now.duplicates_avoided - before.duplicates_avoided, now.gave_way - before.gave_way
        )
        RELEASE.to_tokenizer(scheduler, update)

    def shares(self, scheduler: Any) -> bool | None:
        """Return whether requests can share tokens that are not computed yet.

        Return ``None`` if they share nothing at all, because no KV of prompts is kept.
        """
        if scheduler.disable_radix_cache:
            return None
        return self.options.intra_turn != "off" and not self.late_kv and can_pin(scheduler)

    def start_sharing(self, scheduler: Any) -> None:
        """Prepare sharing for the batch that is built next, if requests can share tokens."""
        self.shared = SharedPrefill(scheduler.page_size) if self.shares(scheduler) else None


class _Watched:
    """Notes when the scheduler has waited for a device's event, which it stands for."""

    def __init__(self, event: Any) -> None:
        import torch  # "flashmoa doctor" reads the hooks without it.

        self._event = event
        # Whether the event had occurred before the scheduler looked.
        self.is_late: bool = event.query()
        # A CPU's event says nothing: what is launched has occurred.
        self.is_on_cpu = isinstance(event, torch.cpu.Event)
        self.at: float | None = None

    def synchronize(self) -> None:
        self._event.synchronize()
        self.at = self.at or time.perf_counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)


class ForwardTimer:
    """Times an engine's forwards. Tells the HTTP process the times until the costs are known.

    A device computes one forward after the other, and under the overlap schedule the next one is
    launched before a result is processed. So each takes from the result before it to its own. On a
    CPU, a forward is computed while it is launched.

    Only this class reads a clock in a scheduler. The times decide nothing here.

    Attributes:
        seconds: how long the last forward took that has ended.
    """

    def __init__(self, scheduler: Any) -> None:
        self.seconds = 0.0
        self._scheduler = scheduler
        self._has_stages = RELEASE.pipeline_stages(scheduler) > 1
        # For each forward whose result is not processed yet: its result, what it computes, when it
        # was launched, and for how long.
        self._launched: deque[tuple[Any, TimedForward, float, float]] = deque(maxlen=_MOST_LAUNCHED)
        # That of the result that is processed, until its end is noted.
        self._ending: tuple[Any, TimedForward, float, float] | None = None
        self._done: _Watched | None = None
        self._ended_at, self._was_late = 0.0, False
        self._forwards: deque[TimedForward] = deque(maxlen=_MOST_TIMES)

    def launch(self, original: Callable[[], Any], batch: Any) -> Any:
        """Let SGLang launch the forward of a batch; return what it returns."""
        forward, offloader = _describe(self._scheduler, batch), asyncep.own_offloader()
        # A step that also decodes does not tell how long a layer takes to prefill N tokens.
        if offloader and not forward.decodes and _is_timed(forward, batch.reqs):
            offloader.time_next(forward.tokens)
        began = time.perf_counter()
        result = original()
        self._launched.append((result, forward, began, time.perf_counter() - began))
        return result

    def process(self, original: Callable[[], None], result: Any, reqs: list[Any]) -> None:
        """Let SGLang process a result; it calls :meth:`stop` once the forward has ended."""
        while self._launched and self._ending is None:
            launch = self._launched.popleft()
            # Pipeline stages copy a result into another object, but results keep their order.
            if launch[0] is result or self._has_stages:
                self._ending = launch
        self._done = None
        if getattr(result, "copy_done", None) is not None:
            self._done = result.copy_done = _Watched(result.copy_done)
        original()
        self.stop(reqs)

    def stop(self, reqs: list[Any]) -> None:
        """Note once that the forward has ended whose result is processed; ``reqs``: its batch's."""
        if self._ending is None:
            return
        (_, forward, began, launching), self._ending = self._ending, None
        done = self._done
        now = done.at if done and done.at else time.perf_counter()
        before, self._ended_at = self._ended_at, now
        was_late, self._was_late = self._was_late, bool(done and done.is_late)
        self.seconds = now - max(began, before)
        # Its beginning is unknown if the end of the forward before it was noticed late.
        is_known = began >= before or not (self._has_stages or (was_late and not self._was_late))
        if done and done.is_on_cpu:
            self.seconds, is_known = launching, True
        if is_known and self._scheduler.flashmoa.costs is UNMEASURED:
            self._forwards.append(forward._replace(seconds=self.seconds))
        is_timed, offloader = _is_timed(forward, reqs), asyncep.own_offloader()
        layers = None
        if offloader and is_timed and not forward.decodes:
            layers = offloader.take_times()
        if is_timed:
            report = ForwardTimes(tuple(self._forwards), layers)
            self._forwards.clear()
            RELEASE.to_tokenizer(self._scheduler, report)


def _is_timed(forward: TimedForward, reqs: list[Any]) -> bool:
    """Return whether a forward prefills a request that runs for the times of its forwards."""
    # Prefills come first in a batch.
    marks = (state_of(req).mark for req in reqs[: len(reqs) - forward.decodes])
    return forward.tokens > 0 and any(mark is not None and mark.timed for mark in marks)


def _describe(scheduler: Any, batch: Any) -> TimedForward:
    """Return what a batch computes; nothing if its time says nothing of other forwards'."""
    mode = batch.forward_mode
    if mode.is_extend():
        decodes = len(batch.decoding_reqs or ())
        rows = list(zip(batch.prefix_lens, batch.extend_lens, strict=True))
        prefills = rows[: len(rows) - decodes]
        tokens = sum(new for _, new in prefills)
        kv = sum(prefix + 1 for prefix, _ in rows[len(prefills) :])
        # Of many requests of a few tokens each, most of the time is for what each request takes.
        if tokens >= FEWEST_RIDING * len(prefills) or len(prefills) == 1:
            pairs = sum(prefix * new for prefix, new in prefills)
            return TimedForward(decodes, kv, tokens, pairs, 0.0)
    # A rank that prefills holds up the others, which step together with it.
    elif mode.is_decode() and not (scheduler.require_mlp_sync and batch.is_extend_in_batch):
        lengths = batch.seq_lens_cpu
        kv = 0 if lengths is None else int(lengths.sum())
        return TimedForward(len(batch.reqs), kv, 0, 0, 0.0)
    return TimedForward(0, 0, 0, 0, 0.0)


def run_batch(
    original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Time forwards; wraps ``Scheduler.run_batch``."""
    state: SchedulerState | None = getattr(scheduler, "flashmoa", None)
    run = partial(original, scheduler, batch, *args, **kwargs)
    return run() if state is None else state.timer.launch(run, batch)


def process_result(
    original: Callable[..., None], scheduler: Any, batch: Any, result: Any, *args: Any
) -> None:
    """Do the same; wraps ``Scheduler.process_batch_result``."""
    state: SchedulerState | None = getattr(scheduler, "flashmoa", None)
    work = partial(original, scheduler, batch, result, *args)
    if state is None:
        work()
    else:
        state.timer.process(work, result, batch.reqs)


def stands_aside(arguments: Any) -> bool:
    """Return whether the plugin leaves SGLang as it is, because it cannot serve these arguments.

    Raises: SystemExit if one of the plugin's own options is given, which would have no effect.
    """
    if (arguments.tokenizer_worker_num or 1) > 1:
        problem = "needs one HTTP process: start without --tokenizer-worker-num"
    elif os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true"):
        problem = "does not work with SGLANG_RUST_SERVER: unset it"
    else:
        return False
    if Options.from_environment() != Options():
        raise SystemExit(f"flashmoa-sglang {problem}, or leave the --flashmoa options out.")
    logger.warning("flashmoa-sglang is off, because it %s to use it.", problem)
    return True


def attach(_result: None, scheduler: Any) -> None:
    """Add the plugin's state and message handlers; runs after ``init_request_dispatcher``."""
    if stands_aside(RELEASE.resolve_arguments(scheduler.server_args)):
        return
    kv_free.verify(scheduler)
    state = SchedulerState(scheduler)
    scheduler.flashmoa = state
    # Batches, policies and output streamers have the tree, but not the scheduler.
    scheduler.tree_cache.flashmoa = state
    dispatcher = scheduler._request_dispatcher
    handle(dispatcher, StreamTokens, state.streams.extend)
    handle(dispatcher, HearAnswers, state.written.hear)
    handle(dispatcher, ReleaseStream, lambda message: state.streams.end(message.stream))
    handle(dispatcher, KvQuery, lambda message: _report_kv(scheduler, message))
    handle(dispatcher, MeasuredCosts, lambda message: _use_costs(scheduler, message))


def handle_request(
    original: Callable[..., None], scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any
) -> None:
    """Keep requests that open a stream; wraps ``Scheduler.handle_generate_request``."""
    state: SchedulerState | None = getattr(scheduler, "flashmoa", None)
    if state is None:
        original(scheduler, recv_req, *args, **kwargs)
        return
    mark = RequestMark.read(recv_req.sampling_params.custom_params)
    if mark is not None and mark.stream is not None and mark.opens:

        def make(message: Any) -> None:
            original(scheduler, message, *args, **kwargs)

        state.streams.open(mark.stream, recv_req, make, mark.expected_output or 0)
        return
    if mark is not None and mark.stream is not None:
        state.streams.claim(mark.stream)
    try:
        original(scheduler, recv_req, *args, **kwargs)
    except (LookupError, RuntimeError) as error:
        # SGLang's sessions raise these for requests that do not fit the earlier ones.
        if recv_req.session_params is None:
            raise
        reason = f"The session cannot take this request ({type(error).__name__}: {error})"
        end_unserved(scheduler, recv_req, HTTPStatus.BAD_REQUEST, reason)


def add_rows(
    original: Callable[..., None], pool: Any, size: int, *args: Any, **kwargs: Any
) -> None:
    """Add rows for increments to a new table of requests; wraps ``ReqToTokenPool.__init__``.

    So tokens of streams can ride along while as many requests run as may. The tables of models with
    a state besides KV are left as they are, because that state has to fit them.
    """
    spare = SPARE_ROWS if type(pool).__name__ == "ReqToTokenPool" else 0
    original(pool, size + spare, *args, **kwargs)


def largest_batch(original: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    """Return for how many requests a forward's buffers are; wraps ``RELEASE.LARGEST_BATCH``."""
    return original(*args, **kwargs) + SPARE_ROWS


def flush_cache(original: Callable[..., bool], scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """Forget all KV of streams once the tree is flushed; wraps ``Scheduler.flush_cache``."""
    flushed = original(scheduler, *args, **kwargs)
    state: SchedulerState | None = getattr(scheduler, "flashmoa", None)
    if flushed and state is not None:
        state.pins.forget()
        state.streams.lose()
    return flushed


def _use_costs(scheduler: Any, message: MeasuredCosts) -> None:
    state: SchedulerState = scheduler.flashmoa
    if message.costs is not None:
        state.costs = message.costs
    # If ranks step together, no rank may hold back a step on its own.
    together = scheduler.require_mlp_sync or RELEASE.pipeline_stages(scheduler) > 1
    if message.waits_for is not None and not together:
        state.saturation_gate = SaturationGate(message.waits_for, state.options.saturation_wait)


def _report_kv(scheduler: Any, message: KvQuery) -> None:
    tree = scheduler.tree_cache
    state: SchedulerState = scheduler.flashmoa
    offloader = asyncep.own_offloader()
    report = KvReport(
        query=message.query,
        dp_rank=RELEASE.dp_rank(scheduler),
        total=scheduler.max_total_num_tokens,
        free=tree.token_to_kv_pool_allocator.available_size(),
        evictable=RELEASE.evictable_tokens(tree),
        protected=RELEASE.protected_tokens(tree),
        pinned_streams=len(state.pins),
        gave_way=state.pins.gave_way,
        duplicates_avoided=state.duplicates_avoided,
        rode_along=state.rode_along,
        max_running=scheduler.max_running_requests,
        experts=offloader.memory() if offloader else None,
        kv_bytes=kv_free.bytes_of(scheduler),
        peak_bytes=kv_free.peak_memory(scheduler),
        shares=state.shares(scheduler),
        no_rides=state.no_rides,
        late_kv=state.late_kv,
    )
    RELEASE.to_tokenizer(scheduler, report)
