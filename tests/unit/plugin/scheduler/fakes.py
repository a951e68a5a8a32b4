"""The part of an SGLang scheduler that decides about its queue, for tests without SGLang."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

from flashmoa_sglang.costs import Costs
from flashmoa_sglang.messages import RequestMark, StreamTokens
from flashmoa_sglang.scheduler.admission import allocatable_requests
from flashmoa_sglang.scheduler.apply import next_prefill_batch
from flashmoa_sglang.scheduler.pins import Pin
from flashmoa_sglang.scheduler.request import RequestState, is_increment, state_of
from flashmoa_sglang.scheduler.state import SchedulerState
from flashmoa_sglang.scheduler.streams import SchedulerStreams
from flashmoa_sglang.sglang.options import Options

# A limit that no test reaches.
MANY = 1 << 20
PIN = Pin(None, None)


class Tree:
    """A radix tree. Each pin locks 1,000 tokens.

    Attributes:
        free: free tokens of the KV pool.
        cached: the cached prompts.
        locks: number of locks on nodes.
    """

    def __init__(self, free: int) -> None:
        self.free = free
        self.cached: list[list[int]] = []
        self.locks = 0
        self.token_to_kv_pool_allocator = self

    def match_and_pin(self, tokens: list[int]) -> tuple[Pin, int]:
        """Lock the longest cached prefix, as ``pins.match_and_pin`` does."""
        self.locks += 1
        self.free -= 1000
        pairs = (zip(tokens, one, strict=False) for one in self.cached)
        same = (sum(1 for _ in takewhile(lambda two: two[0] == two[1], one)) for one in pairs)
        return PIN, max(same, default=0)

    def available_size(self) -> int:
        return self.free

    def evictable_size(self) -> int:
        return 0

    def protected_size(self) -> int:
        return 1000 * self.locks

    def dec_lock_ref(self, _node: object, _unlock: object) -> None:
        self.locks -= 1
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


def request(
    tokens: int, output: int, written: int = 0, stream: str | None = None, *, final: bool = False
) -> Any:
    """Make a client's request, or the final request or an increment of a ``stream``."""
    mark = RequestMark(stream, final=final, own=not final) if stream is not None else None
    return SimpleNamespace(
        rid="some",
        to_finish=None,
        finished=lambda: False,
        is_retracted=False,
        finished_output=None,
        finished_reason=SimpleNamespace(to_json=lambda: {"type": "stop"}),
        origin_input_ids=[1] * tokens,
        output_ids=[1] * written,
        sampling_params=SimpleNamespace(max_new_tokens=output, ignore_eos=False),
        cached_tokens=0,
        computed=tokens,
        return_logprob=False,
        input_embeds=None,
        multimodal_inputs=None,
        flashmoa=RequestState(mark, uncached=tokens),
    )


def opening(stream: str) -> Any:
    """Make the message of a request that opens a stream."""
    mark = RequestMark(stream, opens=True).to_custom_params()
    sampling = SimpleNamespace(custom_params=mark, max_new_tokens=0)
    return SimpleNamespace(rid=f"open-{stream}", input_ids=[0], sampling_params=sampling)


def new_tokens(
    stream: str, tokens: Sequence[int], *, grows: bool = True, ended: bool = False
) -> StreamTokens:
    """Make the message with new tokens of a stream, and the stream's end if ``ended``."""
    ids = ((stream, array("q", tokens).tobytes(), grows),) if tokens else ()
    return StreamTokens(ids, (stream,) if ended else ())


class FakeScheduler:
    """A scheduler with a queue, running requests, streams and a radix tree.

    Tests with it use the fixture ``fake_release``.

    Attributes:
        refused: streams whose requests SGLang refuses.
        max_queued: most requests in the queue.
        sent: messages to the HTTP process.
    """

    chunked_req: Any = None
    chunked_prefill_size: int | None = 8192
    max_prefill_tokens = 16384
    is_mixed_chunk = False
    truncation_align_size: int | None = None
    page_size = 1
    max_running_requests = 64
    max_queued = 100
    enable_overlap = True
    enable_hierarchical_cache = enable_priority_preemption = enable_priority_scheduling = False
    disable_radix_cache = require_mlp_sync = False

    def __init__(
        self,
        free: int = 50_000,
        ratio: float = 0.1,
        running: Sequence[Any] = (),
        total: int = 60_000,
        eagle: bool = False,
    ) -> None:
        reqs = [*running]
        self.tree_cache: Any = Tree(free)
        self.policy = SimpleNamespace(enable_priority_scheduling=False)
        self.waiting_queue: list[Any] = []
        self.max_total_num_tokens = total
        self.spec_algorithm = SimpleNamespace(is_none=lambda: True, is_eagle=lambda: eagle)
        self.server_args = SimpleNamespace(
            disaggregation_mode="null", tokenizer_worker_num=1, dp_size=1, attn_dp_size=1
        )
        self.grammar_manager = Grammars()
        self.req_to_token_pool = SimpleNamespace(available_size=lambda: 16)
        # SGLang 0.5.12 has the first attribute, later releases the second.
        self.new_token_ratio = ratio
        self.new_token_ratio_tracker = SimpleNamespace(current=ratio)
        self.running = SimpleNamespace(
            reqs=reqs,
            batch_is_full=False,
            is_prefill_only=False,
            return_logprob=False,
            is_empty=lambda: not reqs,
        )
        self.last_batch: Any = SimpleNamespace(reqs=list(reqs))
        self.refused: set[str] = set()
        self.sent: list[Any] = []
        self.flashmoa = SchedulerState(self)
        self.flashmoa.options = Options(intra_turn="off")
        self.tree_cache.flashmoa = self.flashmoa

    @property
    def streams(self) -> SchedulerStreams:
        return self.flashmoa.streams

    def get_num_allocatable_reqs(self, running: int) -> int:
        return self.max_running_requests - running

    def _add_request_to_queue(self, req: Any) -> None:
        self.waiting_queue.append(req)

    def make_request(self, message: Any) -> None:
        """Put the request of a message into the queue, as SGLang does."""
        mark = RequestMark.read(message.sampling_params.custom_params)
        assert mark is not None and not mark.opens
        if mark.stream in self.refused or len(self.waiting_queue) >= self.max_queued:
            return
        req = request(len(message.input_ids), 0, stream=mark.stream)
        req.rid, req.origin_input_ids = message.rid, list(message.input_ids)
        self.waiting_queue.append(req)

    def send_output(self, message: Any, _req: Any) -> None:
        self.sent.append(message)

    def open_stream(self, stream: str, tokens: int = 0, *, output: int = 0, **state: bool) -> None:
        """Open a stream with the tokens 0, 1, 2 and so on. ``state``: see ``new_tokens``."""
        self.streams.open(stream, opening(stream), self.make_request, output)
        self.streams.extend(new_tokens(stream, range(tokens), **state))

    def open_known(self, stream: str, tokens: int, prefilled: int = 0) -> None:
        """Open a stream whose text has ended."""
        self.open_stream(stream, tokens, grows=False, ended=True)
        self.streams._open[stream].prefilled = prefilled


def make_increments(
    scheduler: FakeScheduler, tokens: int = MANY, room: int = MANY, most: int = 16
) -> dict[str | None, Any]:
    """Make increments. Return them by their streams."""
    made = scheduler.streams.make(tokens, room, most)
    return {state_of(req).increment_of: req for req in made}


# A prefill of 1 to 64 tokens takes 10 ms, and each further token 0.1 ms. A decode step takes 10 ms.
# 64 tokens lengthen it by 1 ms, and each further token by 0.1 ms.
COSTS = Costs(
    ((1, 0.01), (64, 0.01), (1064, 0.11)),
    0.01,
    tuple((n, *step) for n in (1, 32) for step in ((0, 0.01), (64, 0.011), (256, 0.0302))),
)


@dataclass
class Build:
    """Notes how SGLang's ``_get_new_batch_prefill_raw`` is called.

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
        """Return the lengths of the increments in the last queue."""
        queue = self.queues[-1] if self.queues else []
        return [len(req.origin_input_ids) for req in queue if is_increment(req)]

    def clients(self) -> list[Any]:
        return [req for req in self.queues[-1] if not is_increment(req)]


def engine(decoding: int = 0, *, full: bool = False, eagle: bool = False, **streams: int) -> Any:
    """Make a scheduler that publishes KV late.

    Args:
        decoding: number of requests that decode.
        streams: number of tokens of each open stream.
    """
    made = FakeScheduler(running=[request(100, 50, 1) for _ in range(decoding)], eagle=eagle)
    made.flashmoa.costs, made.flashmoa.late_kv = COSTS, "of the test"
    made.running.batch_is_full = full
    for stream, tokens in streams.items():
        made.open_stream(stream, tokens)
    return made


def step(scheduler: FakeScheduler, build: Any = None, **given: Any) -> Any:
    """Run a step, first with new attributes of the scheduler. Return how it built a batch."""
    vars(scheduler).update(given)
    build = build or Build()
    next_prefill_batch(build, scheduler)
    return build


def join_all(scheduler: FakeScheduler, **given: Any) -> Build:
    """Run a step whose batch takes all requests."""
    return step(scheduler, Build(takes=lambda _: True), **given)
