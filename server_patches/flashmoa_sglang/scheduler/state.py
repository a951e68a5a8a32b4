"""``SchedulerState``, the plugin's state of a scheduler, and handlers of its messages."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from flashmoa_sglang.costs import UNMEASURED
from flashmoa_sglang.messages import (
    CompareTexts,
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
from flashmoa_sglang.scheduler.shared_prefill import QueuedTokens, SharedPrefill
from flashmoa_sglang.scheduler.streams import SchedulerStreams, end_unserved
from flashmoa_sglang.scheduler.timer import ForwardTimer
from flashmoa_sglang.scheduler.token_states import TokenStates
from flashmoa_sglang.scheduler.written import WrittenAnswers
from flashmoa_sglang.sglang.options import Options, device_slowdown
from flashmoa_sglang.sglang.releases import RELEASE

logger = logging.getLogger(__name__)

# Rows for increments that are added to SGLang's table of requests: the most increments in a batch.
SPARE_ROWS = 16
# Options of SGLang that the plugin does not work with: a server without SGLang's HTTP process, and
# engines that change their role in a PD pair, with another scheduler's queues and another tree.
_UNSERVED = ("smg_grpc_mode", "grpc_mode", "enable_pd_role_switch")


class SchedulerState:
    """The plugin's state of an SGLang scheduler, as ``scheduler.flashmoa``.

    Attributes:
        role: the engine's role in a PD pair, "prefill" or "decode"; otherwise "null".
        ranks: number of schedulers that share the requests.
        no_rides, late_kv: see ``KvReport``.
        shared: lets requests wait for tokens that others in the current batch compute; ``None`` if
            nothing is shared.
        deferred: requests that wait outside of the queue while a batch is built.
        launched: requests of the last forward whose KV is published when the next step begins.
        only_streams: whether the current batch is for prompt streams only.
        needs_pages: whether the current batch is mixed, and its decodes' room is not reserved yet.
        increments_ended: whether increments have freed KV since a batch was built.
        work: the engine's work so far, in prefill tokens.
        elsewhere: see ``StepView``.
        steps_without_streams: number of decode steps since the last forward of streams alone.
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
        self.token_states = TokenStates()
        self.tokenizer_channel = RELEASE.tokenizer_channel(scheduler)
        self.role: str = scheduler.server_args.disaggregation_mode
        # SGLang may choose their number itself.
        arguments = RELEASE.resolve_arguments(scheduler.server_args)
        self.ranks = RELEASE.data_parallel_ranks(arguments)
        self.no_rides = RELEASE.why_no_rides(scheduler)
        self.late_kv = RELEASE.why_late(scheduler) if can_pin(scheduler) else ""
        self.costs = UNMEASURED
        self.saturation_gate: SaturationGate | None = None
        self.queued = QueuedTokens(scheduler.page_size)
        self.shared: SharedPrefill | None = None
        self.deferred: list[Any] = []
        self.launched: list[Any] = []
        self.only_streams = self.needs_pages = self.increments_ended = False
        self.timer = ForwardTimer(scheduler)
        self.work = 0.0
        self.elsewhere = self.steps_without_streams = 0
        self.duplicates_avoided = self.rode_along = 0

    def shares(self, scheduler: Any) -> bool | None:
        """Return whether requests share uncomputed tokens; ``None`` without KV of prompts."""
        if scheduler.disable_radix_cache:
            return None
        return self.options.intra_turn != "off" and not self.late_kv and can_pin(scheduler)


def stands_aside(arguments: Any) -> bool:
    """Return whether the plugin leaves SGLang as it is, because it cannot serve these arguments.

    Raises: SystemExit if one of the plugin's own options is given, which would have no effect.
    """
    # Not every release has each argument.
    given = {name for name in _UNSERVED if getattr(arguments, name, False)}
    if (arguments.tokenizer_worker_num or 1) > 1:
        problem = "needs one HTTP process: start without --tokenizer-worker-num"
    elif os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes", "y"):
        problem = "does not work with SGLANG_RUST_SERVER: unset it"
    elif given:
        flag = min(given).replace("_", "-")
        problem = f"does not work with --{flag}: start without it"
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
    handle(dispatcher, CompareTexts, lambda message: _compare(scheduler, message))
    handle(dispatcher, MeasuredCosts, lambda message: _use_costs(scheduler, message))


def handle_request(
    original: Callable[..., None], scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any
) -> None:
    """Keep requests that open a stream; wraps ``Scheduler.handle_generate_request``."""
    state: SchedulerState = scheduler.flashmoa
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

    So streams can ride along while the most requests run that may. The tables of models with a
    state besides KV stay as they are, because that state has to fit them.
    """
    spare = SPARE_ROWS if type(pool).__name__ == "ReqToTokenPool" else 0
    original(pool, size + spare, *args, **kwargs)


def largest_batch(original: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    """Return the number of requests for a forward's buffers; wraps ``RELEASE.LARGEST_BATCH``."""
    return original(*args, **kwargs) + SPARE_ROWS


def flush_cache(original: Callable[..., bool], scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """Forget all KV of streams once the tree is flushed; wraps ``Scheduler.flush_cache``."""
    flushed = original(scheduler, *args, **kwargs)
    state: SchedulerState = scheduler.flashmoa
    if flushed:
        state.pins.forget()
        state.streams.lose()
    return flushed


def _use_costs(scheduler: Any, message: MeasuredCosts) -> None:
    state: SchedulerState = scheduler.flashmoa
    if message.costs is not None:
        state.costs = message.costs
    # If ranks step together, no rank may delay a step on its own.
    if message.waits_for is not None and not _steps_together(scheduler):
        state.saturation_gate = SaturationGate(message.waits_for, state.options.saturation_wait)


def _steps_together(scheduler: Any) -> bool:
    return scheduler.require_mlp_sync or RELEASE.pipeline_stages(scheduler) > 1


def _compare(scheduler: Any, message: CompareTexts) -> None:
    state: SchedulerState = scheduler.flashmoa
    RELEASE.to_tokenizer(scheduler, state.token_states.compare(message))


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
        steps_together=_steps_together(scheduler),
    )
    RELEASE.to_tokenizer(scheduler, report)
