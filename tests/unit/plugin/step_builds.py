"""Fake steps of a scheduler: which batch each one builds, and a table of costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from flashmoa_sglang.costs import Costs
from flashmoa_sglang.scheduler.admission import allocatable_requests
from flashmoa_sglang.scheduler.batches import next_prefill_batch
from flashmoa_sglang.scheduler.request import is_increment

from tests.unit.plugin.fake_scheduler import FakeScheduler, request

# Up to 64 tokens take as long as one. With a decode step of 10 ms, 64 tokens add 1 ms, and each
# further one adds 0.1 ms, as in a prefill.
COSTS = Costs(
    ((1, 0.01), (64, 0.01), (1064, 0.11)),
    0.01,
    tuple((n, *step) for n in (1, 32) for step in ((0, 0.01), (64, 0.011), (256, 0.0302))),
)


@dataclass
class Build:
    """Stands for SGLang's ``_get_new_batch_prefill_raw``: notes how it is called.

    ``takes``: whether a request joins the batch.
    """

    takes: Callable[[Any], bool] = lambda _: False
    newcomers: list[Any] = field(default_factory=list)
    queues: list[list[Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def __call__(self, scheduler: FakeScheduler) -> Any:
        queue = scheduler.waiting_queue
        self.queues.append([*queue])
        self.settings = {
            "mixed": scheduler.is_mixed_chunk,
            "chunk": scheduler.chunked_prefill_size,
            "full": scheduler.running.batch_is_full,
            "logprobs": scheduler.running.return_logprob,
            "rows": allocatable_requests(lambda *_: 0, scheduler),
        }
        joined = [req for req in queue if self.takes(req)]
        scheduler.waiting_queue = [req for req in queue if req not in joined] + self.newcomers
        tokens = sum(len(req.origin_input_ids) for req in joined)
        batch = SimpleNamespace(reqs=joined, extend_num_tokens=tokens, decoding_reqs=None)
        return (batch if joined else None), scheduler.running

    def increments(self) -> list[int]:
        """Return the lengths of the increments in the queue of the last batch."""
        return [len(req.origin_input_ids) for req in self.queues[-1] if is_increment(req)]

    def clients(self) -> list[Any]:
        return [req for req in self.queues[-1] if not is_increment(req)]


def scheduler(decoding: int = 0, *, full: bool = False) -> FakeScheduler:
    """Make a scheduler with so many requests that decode, and whose KV is published late."""
    made = FakeScheduler(running=[request(100, 50, 1) for _ in range(decoding)])
    made.flashmoa.costs = COSTS
    made.flashmoa.late_kv = "of the test"
    made.running.batch_is_full = full
    return made


def step(scheduler: FakeScheduler, build: Build | None = None) -> Build:
    """Run a step; return how its batch was built."""
    build = build or Build()
    next_prefill_batch(build, scheduler)
    return build
