"""Which requests join a batch: their order, and room in the KV pool, where streams give way."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.costs import Costs
from flashmoa_sglang.messages import RequestMark
from flashmoa_sglang.scheduler import admission, streams
from flashmoa_sglang.scheduler.apply import next_prefill_batch
from flashmoa_sglang.scheduler.pins import Stage, StreamPins
from flashmoa_sglang.scheduler.plan import StepView
from flashmoa_sglang.scheduler.request import RequestState
from flashmoa_sglang.scheduler.state import SchedulerState
from flashmoa_sglang.scheduler.view import read
from flashmoa_sglang.sglang.options import Options
from flashmoa_sglang.sglang.releases import RELEASE, TESTED, Release, Release0521, class_for
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugin.scheduler.fakes import PIN, FakeScheduler, Tree, request

pytestmark = pytest.mark.usefixtures("fake_release", "any_increment")
EACH_RELEASE = pytest.mark.parametrize("release", [class_for(one)() for one in TESTED])


class Adder:
    """Stands for SGLang's ``PrefillAdder``: each request takes its tokens from the free tokens."""

    page_size = 1

    def __init__(self, tree: Any) -> None:
        self.tree_cache = tree
        self.can_run_list: list[Any] = []
        self.taken = self.asked = 0
        self.rem_chunk_tokens: int | None = None
        # Releases have one for each place where KV is.
        self.log_hit_tokens = self.log_device_hit_tokens = 0

    @property
    def rem_total_tokens(self) -> int:
        return self.tree_cache.available_size() - self.taken

    def budget_state(self) -> str:
        return "continue" if self.rem_total_tokens > 0 else "no token"

    def add(self, req: Any, **given: bool) -> str:
        self.asked, self.given = self.asked + 1, given
        tokens = len(req.origin_input_ids) + req.sampling_params.max_new_tokens
        if tokens > self.rem_total_tokens:
            return "no token"
        self.taken += tokens
        self.log_hit_tokens += 5
        self.log_device_hit_tokens = self.log_hit_tokens
        self.can_run_list.append(req)
        return self.budget_state()

    def admit(self, req: Any, **given: bool) -> str:
        return admission.admit(Adder.add, self, req, **given)


@pytest.fixture
def gave_way() -> list[str]:
    """The streams whose pins were given up."""
    return []


@pytest.fixture
def adder(gave_way: list[str]) -> Adder:
    """An adder for a pool with 1,000 free tokens. Eight streams hold 1,000 tokens each."""
    tree: Any = Tree(1000)
    pins = StreamPins(tree, gave_way.append, lambda _: Stage.NEXT)
    for stream in "abcdefgh":
        pins.replace(stream, PIN)
    tree.flashmoa = SimpleNamespace(pins=pins, shared=None, needs_pages=False)
    return Adder(tree)


@pytest.mark.parametrize(
    ("req", "chunked", "expected"),
    [
        (request(500, 499), False, ("continue", 1, False)),
        # SGLang's adder is asked only once more: it may count how often there was no room.
        (request(4000, 4000), False, ("continue", 2, True)),
        # SGLang would cut this request, too, and fails if two requests are cut.
        (request(500, 850), True, ("no token", 1, False)),
    ],
)
def test_streams_give_way_if_that_helps(
    adder: Adder, gave_way: list[str], req: Any, chunked: bool, expected: tuple[str, int, bool]
) -> None:
    verdict = adder.admit(req, has_chunked_req=chunked)
    assert (verdict, adder.asked, bool(gave_way)) == expected
    assert adder.given == {"has_chunked_req": chunked}


def test_an_increment_without_room_is_skipped(adder: Adder, gave_way: list[str]) -> None:
    """There only seems to be room: the stream's own cached prefix counts as evictable."""
    assert adder.admit(request(1500, 0, stream="z")) == "other"
    assert gave_way == [] and adder.can_run_list == []
    assert adder.admit(request(900, 0, stream="y")) == "continue"


def test_increments_are_no_cache_hits(adder: Adder) -> None:
    for req in (request(10, 0), request(10, 0, stream="z"), request(10, 0)):
        assert adder.admit(req) == "continue"
    assert adder.log_hit_tokens == adder.log_device_hit_tokens == 10


def test_an_increment_is_not_chunked(adder: Adder) -> None:
    adder.rem_chunk_tokens = 500
    assert adder.admit(request(501, 0, stream="z")) == "other"
    assert adder.asked == 0
    assert adder.admit(request(500, 0, stream="z")) == "continue"
    # Requests of clients are.
    assert adder.admit(request(501, 0)) != "other"


@pytest.mark.parametrize("final", [False, True])
def test_unsent_prefills_of_a_pair_keep_their_kv(adder: Adder, final: bool) -> None:
    """SGLang takes such a prefill for one of its own warm-ups. A final request is sent on."""
    req = request(100, 0, stream="z", final=final)
    req.skip_radix_cache_insert = True
    adder.admit(req)
    assert req.skip_radix_cache_insert == final


def test_pages_of_decodes_are_reserved_once(adder: Adder, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[Any] = []
    monkeypatch.setattr(RELEASE, "reserve_pages", reserved.append)
    adder.tree_cache.flashmoa.needs_pages = True
    for _ in range(2):
        adder.admit(request(100, 0))
    assert reserved == [adder]


def test_the_last_requests_streams_give_way_first(gave_way: list[str]) -> None:
    tree: Any = Tree(0)
    stages = dict.fromkeys("ace", Stage.KNOWN) | dict.fromkeys("bfh", Stage.TOOLS)
    pins = StreamPins(tree, gave_way.append, lambda stream: stages.get(stream, Stage.NEXT))
    for stream in "abcdefghb":
        pins.replace(stream, PIN)
    while pins.give_way():
        pass
    assert gave_way == [*"eca", *"bfh", *"gd"] and not pins


@pytest.fixture
def lost() -> Any:
    """A request whose stream has given way."""
    return request(1500, 100, stream="z", final=True)


def lose(scheduler: FakeScheduler, stream: str, tokens: int) -> None:
    """Open a stream that has given way."""
    scheduler.open_known(stream, tokens, min(tokens, 1000))
    scheduler.streams.lose(stream)


@pytest.fixture
def busy(lost: Any) -> FakeScheduler:
    """A scheduler with a running request. Two pinned prompts fill the pool."""
    scheduler = FakeScheduler(1000, running=[request(100, 10)])
    for stream in "ab":
        scheduler.open_known(stream, 1000, 1000)
        scheduler.flashmoa.pins.replace(stream, PIN)
    lose(scheduler, "z", 1500)
    scheduler.waiting_queue = [lost, request(500, 100)]
    return scheduler


def queued(scheduler: FakeScheduler, free: int | None = None, work: int | None = None) -> list[int]:
    """Return the prompts' lengths of the requests that may join a batch."""
    if free is not None:
        scheduler.tree_cache.free = free
    if work is not None:
        scheduler.flashmoa.work = work
    with admission.deferred(scheduler, scheduler.running):
        return [len(req.origin_input_ids) for req in scheduler.waiting_queue]


def room(scheduler: FakeScheduler, free: int | None = None) -> int:
    if free is not None:
        scheduler.tree_cache.free = free
    return admission.room_for_streams(scheduler, scheduler.running)


def test_a_lost_prompt_evicts_no_others(busy: FakeScheduler, lost: Any) -> None:
    """A request without a stream does not wait."""
    new = request(200, 0)
    with admission.deferred(busy, busy.running):
        assert [len(req.origin_input_ids) for req in busy.waiting_queue] == [500]
        busy.waiting_queue = [new]
    assert busy.waiting_queue == [lost, new] and len(busy.flashmoa.pins) == 2
    # It starts where there is room.
    assert queued(busy, free=2000) == [1500, 200]


@pytest.mark.parametrize("never", ["opened", "pinned", "given up"])
def test_a_prompt_that_never_gave_way_starts(busy: FakeScheduler, never: str) -> None:
    busy.streams.end("z")
    if never != "opened":
        busy.waiting_queue[0].flashmoa.mark = RequestMark("y", final=True)
        busy.open_known("y", 1500)
    if never == "given up":
        # All streams were flushed.
        busy.streams._open["y"].prefilled = 1000
        busy.streams.lose()
    assert queued(busy) == [1500, 500]


def test_priorities_are_not_deferred(busy: FakeScheduler) -> None:
    busy.enable_priority_scheduling = True
    assert queued(busy) == [1500, 500]


def test_a_small_lost_prompt_overtakes_none(busy: FakeScheduler) -> None:
    """Both streams gave way. The first request would wait longer for the room of the small one."""
    lose(busy, "y", 500)
    busy.waiting_queue.insert(1, request(500, 100, stream="y", final=True))
    assert queued(busy) == [500]
    assert queued(busy, free=2400) == [1500, 500, 500]


@pytest.mark.parametrize(
    ("free", "opened", "expected", "pinned"),
    [
        (1000, "c", [1500, 500], "b"),
        (0, "", [1500, 500], ""),
        # Overdue prompts stay if their room is not enough.
        (-1000, "", [500], "ab"),
    ],
)
def test_a_lost_prompt_evicts_overdue_ones(
    busy: FakeScheduler, free: int, opened: str, expected: list[int], pinned: str
) -> None:
    busy.flashmoa.work = 8000
    for stream in opened:
        busy.open_known(stream, 1000)
    assert queued(busy, free) == expected
    assert {*busy.flashmoa.pins._pins} == {*pinned}


def test_streams_leave_room_for_deferred_requests(busy: FakeScheduler) -> None:
    before = room(busy, free=1600)
    with admission.deferred(busy, busy.running):
        assert len(busy.waiting_queue) == 1
        assert room(busy) == before
    assert room(busy) == before


def test_overdue_prompts_yield_to_growing_streams(busy: FakeScheduler) -> None:
    busy.waiting_queue, busy.max_total_num_tokens = [], 0
    less = -room(busy, free=0)
    busy.flashmoa.work = 8000
    # A stream that does not grow takes no room from others.
    busy.open_stream("known", 500, grows=False)
    assert room(busy) == -less and len(busy.flashmoa.pins) == 2
    busy.open_stream("grows", 500)
    assert room(busy) == 1000 - less and len(busy.flashmoa.pins) == 1
    # Prompts stay if they are not overdue, or if their room is not enough.
    busy.flashmoa.work = 7999
    assert room(busy, free=0) == -less and len(busy.flashmoa.pins) == 1
    busy.flashmoa.work = 8000
    assert room(busy, free=less - 1000) == -1000 and len(busy.flashmoa.pins) == 1


def test_one_request_always_runs(busy: FakeScheduler, lost: Any) -> None:
    busy.running.reqs, busy.waiting_queue = [], [lost]
    assert queued(busy) == [1500]
    # Other waiting requests leave it the room.
    busy.waiting_queue = [lost, request(1400, 100, stream="z", final=True)]
    assert queued(busy) == [1500]


def test_patience_ends(busy: FakeScheduler) -> None:
    # Their own requests have come, so that they are not overdue.
    for stream in "ab":
        busy.streams.claim(stream)
    for work, expected in ((0, [500]), (32 * 1500 - 1, [500]), (32 * 1500, [1500, 500])):
        assert queued(busy, work=work) == expected
    assert len(busy.flashmoa.pins) == 2


def test_an_ended_answer_keeps_room_for_its_agent(busy: FakeScheduler) -> None:
    busy.flashmoa.options = Options(hold_tool_calls=60)
    assert queued(busy, free=2500) == [1500, 500]
    ended = request(1000, 300, 300, stream="y", final=True)
    ended.origin_input_ids = [*range(1000)]
    before = room(busy)
    busy.streams.note_end(ended)
    assert queued(busy) == [500] and room(busy) == before - 1300
    busy.open_known("other", 900)
    busy.open_known("next", 1350)
    busy.tree_cache.cached = [[*range(1300)]]
    busy.streams.keep_cached()
    assert busy.streams.returning_tokens() == 0
    busy.streams.note_end(ended)
    for work, tokens in ((1299, 1300), (1300, 0)):
        busy.flashmoa.work = work
        assert busy.streams.returning_tokens() == tokens


@pytest.mark.parametrize("before", ["a preemption", "the rest of a prompt", "a retraction"])
def test_streams_give_way_before_sglang_takes_room(before: str) -> None:
    scheduler = FakeScheduler(100 if before == "a retraction" else 500)
    tree = scheduler.tree_cache
    for stream in "abc":
        scheduler.flashmoa.pins.replace(stream, PIN)
    if before == "a preemption":
        scheduler.waiting_queue = [request(1500, 0)]
        scheduler.enable_priority_preemption = True
    elif before == "the rest of a prompt":
        scheduler.chunked_req = request(3000, 0)
        scheduler.chunked_req.computed = 1000
    else:
        batch = SimpleNamespace(tree_cache=tree, new_tokens_required_next_decode=lambda: 1500)
        assert admission.check_decode_memory(lambda _: tree.free >= 1500, batch)
    admission.make_room(scheduler, scheduler.running)
    assert len(scheduler.flashmoa.pins) == 1


def test_unlimited_chats_leave_room_for_streams() -> None:
    chats = [request(500, 100_000, 100) for _ in range(16)]
    assert room(FakeScheduler(60_000 - 16 * 600, 0.1, chats)) > 2000
    assert room(FakeScheduler(60_000 - 16 * 600, 1.0, chats)) < 0


def test_a_lone_stream_may_take_the_whole_pool() -> None:
    scheduler = FakeScheduler(5000, total=16_000)
    scheduler.open_stream("a")
    assert room(scheduler) == 5000
    # Several streams leave a sixteenth of the pool for later requests.
    scheduler.open_stream("b")
    assert room(scheduler) == 4000


class Long(list[Any]):
    """A queue that counts how many of its requests were looked at."""

    looked_at = 0

    def __iter__(self) -> Iterator[Any]:
        for req in super().__iter__():
            self.looked_at += 1
            yield req


def test_a_long_queue_is_not_walked_in_each_step() -> None:
    scheduler = FakeScheduler(5000, total=16_000)
    scheduler.waiting_queue = queue = Long(request(1500, 100) for _ in range(1000))
    with admission.deferred(scheduler, scheduler.running):
        assert scheduler.waiting_queue is queue and not queue.looked_at
    # Requests that fill the pool leave no room, whoever else waits.
    assert room(scheduler) < 0 and queue.looked_at < 16


def test_waiting_requests_come_before_streams() -> None:
    scheduler = FakeScheduler(5000)
    # SGLang requires two more slots for each than it takes.
    scheduler.waiting_queue = [request(1500, 100), request(400, 0)]
    assert room(scheduler) == 5000 - 1602 - 402
    # So does the rest of a prompt in chunks.
    scheduler.waiting_queue, scheduler.chunked_req = [], request(9000, 50)
    scheduler.chunked_req.computed = 4000
    assert room(scheduler, free=7000) == 7000 - 5000 - 50 - 2


def test_a_final_request_needs_its_uncached_tokens() -> None:
    scheduler = FakeScheduler(5000)
    scheduler.flashmoa.pins.replace("a", PIN)
    scheduler.waiting_queue = [final] = [request(1500, 100, stream="a", final=True)]
    final.flashmoa.uncached = 300
    assert room(scheduler) == 5000 - 402
    # The KV of a stream whose pin gave way may be evicted before its request runs.
    scheduler.flashmoa.pins.give_way()
    assert room(scheduler) == 6000 - 1602


def test_each_decode_may_begin_a_page() -> None:
    scheduler = FakeScheduler(20_000, 0.0, [request(64, 50, 1) for _ in range(90)])
    taken = room(scheduler)
    scheduler.page_size = 64
    assert room(scheduler) == taken - 90 * 63


def order(scheduler: FakeScheduler, waiting: list[Any], priorities: bool = False) -> list[Any]:
    """Return requests in their order in the queue."""
    ordered, tree = [*waiting], scheduler.tree_cache
    policy: Any = SimpleNamespace(
        tree_cache=tree, enable_priority_scheduling=priorities, priority_sign=-1
    )
    admission.order_queue(None, policy, ordered)
    return ordered


def test_the_shortest_job_goes_first() -> None:
    scheduler = FakeScheduler()
    waiting = increment, long, short = request(9, 0, stream="a"), request(800, 500), request(7, 5)
    assert order(scheduler, [*waiting]) == [long, short, increment]
    scheduler.flashmoa.options = Options(schedule="sjf")
    assert order(scheduler, [*waiting]) == [short, long, increment]
    long.priority, short.priority = 5, 1
    assert order(scheduler, [*waiting], priorities=True) == [long, short, increment]


def test_prefills_wait_for_saturation() -> None:
    scheduler = FakeScheduler(running=[request(500, 1000, 10)])
    waits, structured = request(10, 5), request(20, 5)
    scheduler.waiting_queue, scheduler.grammar_manager.ready = [waits], [structured]
    state: Any = scheduler.flashmoa
    state.saturation_gate = SimpleNamespace(tokens=9000, must_wait=lambda *_: True)
    state.queued = SimpleNamespace(count=lambda *_: 10)
    # The loop does not sleep while a request decodes.
    assert read(scheduler, scheduler.running) == StepView(waits=True, decodes=1)
    # A compiled grammar is noticed all the same.
    assert next_prefill_batch(pytest.fail, scheduler) == (None, scheduler.running)
    assert scheduler.waiting_queue == [waits, structured]
    # Measurements do not wait.
    waits.flashmoa = RequestState(RequestMark(timed=True))
    assert not read(scheduler, scheduler.running).waits


@EACH_RELEASE
def test_a_dropped_requests_prefetch_is_released(
    release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[str] = []
    monkeypatch.setattr(RELEASE, "release_prefetch", release.release_prefetch)
    scheduler = SimpleNamespace(
        server_args=SimpleNamespace(disaggregation_mode="null"),
        enable_hicache_storage=True,
        tree_cache=SimpleNamespace(release_aborted_request=released.append),
        _release_aborted_request=lambda req: released.append(req.rid),
    )
    streams.let_go(scheduler, SimpleNamespace(rid="dropped"))
    assert released == ["dropped"]


@EACH_RELEASE
def test_room_is_kept_for_expected_output(release: Release) -> None:
    scheduler, req = FakeScheduler(ratio=0.3), request(1, 1)
    assert release.reserved_output(scheduler, req) == 0.3
    req.sampling_params.ignore_eos = True
    expected = 0.3 if isinstance(release, Release0521) else 1.0
    assert release.reserved_output(scheduler, req) == expected


@pytest.mark.parametrize(
    ("given", "shares"),
    [
        ({}, True),
        ({"intra_turn": "off"}, False),
        ({"is_hybrid_swa": True}, False),
        ({"is_hybrid_ssm": True}, False),
        ({"disable_radix_cache": True}, None),
        ({"disable_radix_cache": True, "intra_turn": "off"}, None),
    ],
)
def test_sharing_is_off_if_kv_cannot_be_shared(given: dict[str, Any], shares: bool | None) -> None:
    scheduler: dict[str, Any] = {"disable_radix_cache": False, **given}
    options = Options(intra_turn=scheduler.pop("intra_turn", "auto"))
    state: Any = SimpleNamespace(options=options, late_kv="")
    assert SchedulerState.shares(state, SimpleNamespace(**scheduler)) is shares


def test_no_kv_of_increments_is_prefetched() -> None:
    """It would wait in the queue for the answer, but it leaves the queue after one step."""
    asked: list[Any] = []
    final, scheduler = request(900, 0, stream="a", final=True), FakeScheduler()
    for req in (request(900, 0, stream="a"), final, request(900, 5)):
        admission.prefetch(lambda _, req: asked.append(req), scheduler, req)
    assert len(asked) == 2 and asked[0] is final


def test_an_increment_leaves_the_bootstrap_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang keeps it there while it has no buffer for its metadata."""
    other, increment = request(5, 5), request(900, 0, stream="a")
    increment.rid = "increment"
    bootstrap = SimpleNamespace(queue=[other], pop_bootstrapped=list)
    scheduler: Any = SimpleNamespace(
        waiting_queue=[],
        server_args=SimpleNamespace(disaggregation_mode="prefill"),
        disagg_prefill_bootstrap_queue=bootstrap,
    )
    released: list[Any] = []
    monkeypatch.setattr(streams, "let_go", lambda _, req: released.append(req))
    make: Callable[[Any], None] = lambda _: bootstrap.queue.append(increment)  # noqa: E731
    assert streams.take_request(scheduler, SimpleNamespace(rid="increment"), make) is None
    assert bootstrap.queue == [other] and scheduler.waiting_queue == []
    assert released == [increment]


def job(uncached: int, output: int, queued_at: float, priority: int = 0) -> Any:
    req = request(1, output)
    req.priority = priority
    req.flashmoa = RequestState(queued_at=queued_at, uncached=uncached)
    return req


def shortest_first(jobs: list[Any]) -> list[Any]:
    """Return jobs in their order in the queue. A decode step takes the time of 100 tokens."""
    scheduler = FakeScheduler()
    scheduler.flashmoa.options = Options(schedule="sjf")
    scheduler.flashmoa.costs = Costs(((1, 0.0101), (1001, 0.1101)), decode_step=0.01)
    return order(scheduler, jobs, priorities=True)


TOKENS, OUTPUT = st.integers(0, 5000), st.integers(0, 500)


@given(st.lists(st.builds(job, TOKENS, OUTPUT, st.floats(0, 1e5), st.integers(-1, 1)), max_size=10))
def test_jobs_are_ordered_by_priority_then_size(jobs: list[Any]) -> None:
    ordered = shortest_first(jobs)
    assert sorted(map(id, ordered)) == sorted(map(id, jobs))
    priorities = [req.priority for req in ordered]
    assert priorities == sorted(priorities, reverse=True)


@given(uncached=TOKENS, output=OUTPUT, later=st.floats(1, 1e5))
def test_no_job_starves(uncached: int, output: int, later: float) -> None:
    long = job(uncached, output, queued_at=0.0)
    short = job(0, 0, queued_at=uncached + 100 * output + later)
    assert shortest_first([short, long]) == [long, short]
