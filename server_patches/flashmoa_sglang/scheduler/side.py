"""What the plugin keeps beside one SGLang scheduler, and the messages it answers there."""

from __future__ import annotations

from typing import Any

from flashmoa_sglang import asyncep, kv_free, releases
from flashmoa_sglang.costs import UNMEASURED, Costs
from flashmoa_sglang.messages import Happened, KvQuery, KvReport, MeasuredCosts, ReleaseStream
from flashmoa_sglang.options import Options
from flashmoa_sglang.scheduler.gathering import Gathering
from flashmoa_sglang.scheduler.pins import StreamPins
from flashmoa_sglang.scheduler.sharing import QueuedTokens, SharedBatch
from flashmoa_sglang.scheduler.timer import ForwardTimer


class Side:
    """What the plugin keeps beside one SGLang scheduler.

    ``batch``: the prefill batch that is being put together. ``work``: what the engine has
    done so far, in prefill tokens. ``pause``: decode steps until prompt streams may go on.
    ``refused``: prompt streams that found no room in the KV pool, and the tokens each needs.
    ``is_short_for_streams``: what SGLang says of room while a batch is built concerns streams only.
    """

    def __init__(self, scheduler: Any) -> None:
        self.options = Options.from_environment()
        self.pins = StreamPins(scheduler.tree_cache)
        self.direct = releases.tokenizer_channel(scheduler)
        self.role = releases.role(scheduler)
        # A prefill engine of a PD pair sends cached KV on before its own forward has run; under the
        # overlap schedule, the forward before it may still be writing what was published early.
        self.publishes_early = not (self.role == "prefill" and scheduler.enable_overlap)
        self.pins_results = not self.publishes_early and releases.can_pin(scheduler)
        self.costs = UNMEASURED
        self.batch: SharedBatch | None = None
        self.gathering: Gathering | None = None
        self.queued = QueuedTokens(scheduler.page_size)
        self.timer = ForwardTimer(scheduler)
        self.work = 0.0
        self.pause = 0
        self.refused: dict[str, int] = {}
        self.is_short_for_streams = False
        self.avoided = 0
        self.rode_along = 0
        self._told = Happened(0, 0)

    def end(self, stream: str) -> None:
        """A prompt stream is over: its KV is ordinary cache, and it needs no room."""
        self.refused.pop(stream, None)
        self.pins.release(stream)

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
        return (
            self.options.intra_turn != "off"
            and self.publishes_early
            and releases.can_pin(scheduler)
        )

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
    releases.handle(dispatcher, ReleaseStream, lambda message: side.end(message.stream))
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
