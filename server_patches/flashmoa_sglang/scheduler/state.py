"""``SchedulerState``, which the plugin keeps for a scheduler, and handlers of its messages."""

from __future__ import annotations

import time
from typing import Any

from flashmoa_sglang import asyncep, kv_free
from flashmoa_sglang.costs import UNMEASURED, Costs
from flashmoa_sglang.messages import (
    CountUpdate,
    ForwardTime,
    KvQuery,
    KvReport,
    MeasuredCosts,
    ReleaseStream,
    handle,
)
from flashmoa_sglang.options import Options
from flashmoa_sglang.releases import RELEASE
from flashmoa_sglang.scheduler.pins import StreamPins
from flashmoa_sglang.scheduler.policy import SaturationGate
from flashmoa_sglang.scheduler.request import state_of
from flashmoa_sglang.scheduler.shared_prefill import QueuedTokens, SharedPrefill


class SchedulerState:
    """The plugin's state of one SGLang scheduler, as ``scheduler.flashmoa``.

    Attributes:
        pins: locks on the KV of prompt streams.
        refused: prompt streams that found no room in the KV pool, and the tokens that each needs.
        shared: decides what the batch shares that is being built; ``None`` if nothing is shared.
        lack_concerns_streams: whether it is only for streams that the batch which is being built
            finds no room.
        work: the work that the engine has done so far, in prefill tokens.
        pause: number of decode steps before prompt streams may have a forward again.
        publishes_early: whether KV is put into the radix tree before its forward has run.
        pins_results: whether increments are pinned when they have been computed instead.
        duplicates_avoided, rode_along: numbers of tokens so far; see ``KvReport``.
    """

    def __init__(self, scheduler: Any) -> None:
        self.options = Options.from_environment()
        self.pins = StreamPins(scheduler.tree_cache)
        self.tokenizer_channel = RELEASE.tokenizer_channel(scheduler)
        # The engine's role in a PD pair, "prefill" or "decode"; otherwise "null".
        self.role: str = scheduler.server_args.disaggregation_mode
        # A prefill engine of a PD pair sends a request's cached KV before the request's forward has
        # run. Under the overlap schedule, the forward before may still be writing published KV.
        self.publishes_early = not (self.role == "prefill" and scheduler.enable_overlap)
        self.pins_results = not self.publishes_early and can_pin(scheduler)
        self.costs = UNMEASURED
        self.saturation_gate: SaturationGate | None = None
        self.queued = QueuedTokens(scheduler.page_size)
        self.shared: SharedPrefill | None = None
        self.lack_concerns_streams = False
        self.timer = ForwardTimer(scheduler)
        self.work = 0.0
        self.pause = 0
        self.refused: dict[str, int] = {}
        self.duplicates_avoided = 0
        self.rode_along = 0
        self._reported = CountUpdate(0, 0)

    def end_stream(self, stream: str) -> None:
        """Turn the KV of a prompt stream that has ended into ordinary cache; forget its refusal."""
        self.refused.pop(stream, None)
        self.pins.release(stream)

    def report_counts(self, scheduler: Any) -> None:
        """Send the counts that ``/metrics`` shows to the HTTP process, if they have changed."""
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
        return self.options.intra_turn != "off" and self.publishes_early and can_pin(scheduler)

    def start_sharing(self, scheduler: Any) -> None:
        """Prepare sharing for the batch that is built next, if requests can share tokens."""
        self.shared = None
        if self.shares(scheduler):
            # A prefill engine of a PD pair would send KV before the forward that computes it.
            within_forward = (
                self.options.intra_turn == "auto"
                and self.role != "prefill"
                and RELEASE.shares_within_forward(scheduler)
            )
            self.shared = SharedPrefill(scheduler.page_size, within_forward=within_forward)


class ForwardTimer:
    """Times requests that are marked ``timed``, from the built batch to its result.

    Only this class reads a clock in a scheduler. The times are reported and decide nothing here.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._started: dict[str, float] = {}

    def start(self, reqs: list[Any], tokens: int) -> None:
        """Note the time at which a batch of ``tokens`` tokens is about to run."""
        for req in reqs:
            mark = state_of(req).mark
            if mark is not None and mark.timed:
                # If the request is cut into chunks, the time of the first chunk stays.
                self._started.setdefault(req.rid, time.perf_counter())
                asyncep.time_next(tokens)

    def stop(self, reqs: list[Any]) -> None:
        """Report the times of requests that have been computed."""
        if not self._started:
            return
        for req in reqs:
            started = self._started.pop(req.rid, None)
            if started is not None:
                seconds = time.perf_counter() - started
                report = ForwardTime(req.rid, seconds, asyncep.take_times())
                RELEASE.to_tokenizer(self._scheduler, report)


def can_pin(scheduler: Any) -> bool:
    """Return whether a request's KV can be published before its forward, and be pinned.

    It cannot without a radix tree, or in hybrid pools, which keep a state or a window besides KV.
    """
    return not (
        scheduler.disable_radix_cache
        or getattr(scheduler, "is_hybrid_swa", False)
        or getattr(scheduler, "is_hybrid_ssm", False)
    )


def attach(_result: None, scheduler: Any) -> None:
    """Add the plugin's state and message handlers; runs after ``init_request_dispatcher``."""
    kv_free.verify(scheduler)
    state = SchedulerState(scheduler)
    scheduler.flashmoa = state
    # Batches, policies and output streamers have the tree, but not the scheduler.
    scheduler.tree_cache.flashmoa = state
    dispatcher = scheduler._request_dispatcher
    handle(dispatcher, ReleaseStream, lambda message: state.end_stream(message.stream))
    handle(dispatcher, KvQuery, lambda message: _report_kv(scheduler, message))
    handle(dispatcher, MeasuredCosts, lambda message: _use_costs(scheduler, message))


def _use_costs(scheduler: Any, message: MeasuredCosts) -> None:
    state: SchedulerState = scheduler.flashmoa
    state.costs = Costs(message.points, message.decode_step)
    # If ranks step together, no rank may hold back a step on its own.
    together = scheduler.require_mlp_sync or RELEASE.pipeline_stages(scheduler) > 1
    if message.waits_for is not None and not together:
        state.saturation_gate = SaturationGate(message.waits_for, state.options.saturation_wait)


def _report_kv(scheduler: Any, message: KvQuery) -> None:
    tree = scheduler.tree_cache
    state: SchedulerState = scheduler.flashmoa
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
        experts=asyncep.memory(),
        kv_bytes=kv_free.bytes_of(scheduler),
        peak_bytes=kv_free.peak_memory(scheduler),
        shares=state.shares(scheduler),
    )
    RELEASE.to_tokenizer(scheduler, report)
