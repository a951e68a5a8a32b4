"""The part of an SGLang scheduler that decides about its queue, for tests without SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from flashmoa_sglang.costs import UNMEASURED
from flashmoa_sglang.messages import RequestMark
from flashmoa_sglang.options import Options
from flashmoa_sglang.scheduler.pins import StreamPins
from flashmoa_sglang.scheduler.request import RequestState


class Tree:
    """A radix tree in which each pin holds 1,000 tokens."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.token_to_kv_pool_allocator = self

    def available_size(self) -> int:
        return self.free

    def evictable_size(self) -> int:
        return 0

    def dec_lock_ref(self, _node: object, _unlock: object) -> None:
        self.free += 1000


class Grammars:
    """Holds the requests whose grammar has been compiled."""

    def __init__(self) -> None:
        self.ready: list[Any] = []

    def has_waiting_grammars(self) -> bool:
        return bool(self.ready)

    def get_ready_grammar_requests(self) -> list[Any]:
        ready, self.ready = self.ready, []
        return ready


def request(tokens: int, output: int, written: int = 0, stream: str | None = None) -> Any:
    """Make a waiting request; with a ``stream``, an increment of that stream."""
    sampling = SimpleNamespace(max_new_tokens=output, ignore_eos=False)
    mark = RequestMark(stream) if stream is not None else None
    return SimpleNamespace(
        rid="some",
        origin_input_ids=[1] * tokens,
        output_ids=[1] * written,
        sampling_params=sampling,
        flashmoa=RequestState(mark, uncached=tokens),
    )


class FakeScheduler:
    """A scheduler with a queue, running requests and a radix tree."""

    def __init__(self, free: int, ratio: float, running: list[Any], total: int = 60_000) -> None:
        self.tree_cache = Tree(free)
        self.waiting_queue: list[Any] = []
        self.chunked_req: Any = None
        self.chunked_prefill_size = 8192
        self.is_mixed_chunk = False
        self.page_size = 1
        self.max_total_num_tokens = total
        self.max_running_requests = 64
        self.enable_hierarchical_cache = False
        self.enable_priority_preemption = False
        self.grammar_manager = Grammars()
        # SGLang 0.5.12 has the first attribute, later releases the second.
        self.new_token_ratio = ratio
        self.new_token_ratio_tracker = SimpleNamespace(current=ratio)
        self.running = SimpleNamespace(
            reqs=running, batch_is_full=True, is_prefill_only=False, is_empty=lambda: not running
        )
        self.flashmoa: Any = SimpleNamespace(
            options=Options(),
            pins=StreamPins(self.tree_cache),
            costs=UNMEASURED,
            saturation_gate=None,
            shared=None,
            work=0.0,
            pause=0,
            refused={},
            start_sharing=lambda _: None,
            report_counts=lambda _: None,
        )

    def _add_request_to_queue(self, req: Any) -> None:
        self.waiting_queue.append(req)
