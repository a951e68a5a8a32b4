"""Which requests join a batch: their order, and room in the KV pool, where streams give way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.costs import Costs
from flashmoa_sglang.messages import RequestMark
from flashmoa_sglang.scheduler import admission, streams
from flashmoa_sglang.scheduler.apply import next_prefill_batch
from flashmoa_sglang.scheduler.pins import Pin, Stage, StreamPins
from flashmoa_sglang.scheduler.plan import StepView
from flashmoa_sglang.scheduler.request import RequestState
from flashmoa_sglang.scheduler.state import SchedulerState
from flashmoa_sglang.scheduler.view import read
from flashmoa_sglang.sglang.options import Options
from flashmoa_sglang.sglang.releases import RELEASE, TESTED, Release, Release0521, class_for
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugin.scheduler.fake_scheduler import FakeScheduler, Tree, request

pytestmark = pytest.mark.usefixtures("fake_release", "any_increment")


class Adder:
    """Stands for SGLang's ``PrefillAdder``: each request takes its tokens from those free."""

    def __init__(self, tree: Any) -> None:
        self.tree_cache = tree
        self.can_run_list: list[Any] = []
        self.taken = 0
        self.asked = 0
        self.rem_chunk_tokens: int | None = None
        # Releases have one for each place where KV is.
        self.log_hit_tokens = self.log_device_hit_tokens = 0

    page_size = 1

    @property
    def rem_total_tokens(self) -> int:
        return self.left

    @property
    def left(self) -> int:
        return self.tree_cache.available_size() - self.taken

    def budget_state(self) -> str:
        return "continue" if self.left > 0 else "no token"

    def add(self, req: Any) -> str:
        self.asked += 1
        tokens = len(req.origin_input_ids) + req.sampling_params.max_new_tokens
        if tokens > self.left:
            return "no token"
        self.taken += tokens
        self.log_hit_tokens += 5
        self.log_device_hit_tokens = self.log_hit_tokens
        self.can_run_list.append(req)
        return self.budget_state()


@pytest.fixture
def gave_way() -> list[str]:
    """The streams whose pins were given up."""
    return []


@pytest.fixture
def adder(gave_way: list[str]) -> Adder:
    """An adder for a pool in which 1,000 tokens are free and eight streams hold 1,000 each."""
    tree: Any = Tree(1000)
    pins = StreamPins(tree, gave_way.append, lambda _: Stage.NEXT)
    for stream in "abcdefgh":
        pins.replace(stream, Pin(None, None))
    tree.flashmoa = SimpleNamespace(pins=pins, shared=None, needs_pages=False)
    return Adder(tree)


def test_streams_stay_while_a_prompt_is_chunked(adder: Adder, gave_way: list[str]) -> None:
    """SGLang would cut the request, too, and ends if two are cut."""

    def add(adder: Adder, req: Any, *, has_chunked_req: bool) -> str:
        assert has_chunked_req
        return adder.add(req)

    assert admission.admit(add, adder, request(500, 850), has_chunked_req=True) == "no token"
    assert not gave_way and adder.asked == 1


def test_no_stream_gives_way_without_need(adder: Adder, gave_way: list[str]) -> None:
    assert admission.admit(Adder.add, adder, request(500, 499)) == "continue"
    assert gave_way == []


def test_sglangs_adder_is_asked_only_once_more(adder: Adder) -> None:
    """SGLang may count how often a request found no room."""
    assert admission.admit(Adder.add, adder, request(4000, 4000)) == "continue"
    assert adder.asked == 2


def test_an_increment_without_room_is_skipped(adder: Adder, gave_way: list[str]) -> None:
    """There only seems to be room: the stream's own cached prefix counts as evictable."""
    assert admission.admit(Adder.add, adder, request(1500, 0, stream="z")) == "other"
    assert gave_way == [] and adder.can_run_list == []
    assert admission.admit(Adder.add, adder, request(900, 0, stream="y")) == "continue"


def test_increments_are_no_cache_hits(adder: Adder) -> None:
    for req in (request(10, 0), request(10, 0, stream="z"), request(10, 0)):
        assert admission.admit(Adder.add, adder, req) == "continue"
    assert adder.log_hit_tokens == adder.log_device_hit_tokens == 10


def test_an_increment_is_not_chunked(adder: Adder) -> None:
    adder.rem_chunk_tokens = 500
    assert admission.admit(Adder.add, adder, request(501, 0, stream="z")) == "other"
    assert adder.asked == 0
    assert admission.admit(Adder.add, adder, request(500, 0, stream="z")) == "continue"
    # Requests of clients are.
    assert admission.admit(Adder.add, adder, request(501, 0)) != "other"


@pytest.mark.parametrize("final", [False, True])
def test_unsent_prefills_of_a_pair_keep_their_kv(adder: Adder, final: bool) -> None:
    """SGLang takes such a prefill for one of its own warm-ups; a final request is sent on."""
    req = request(100, 0, stream="z", final=final)
    req.skip_radix_cache_insert = True
    admission.admit(Adder.add, adder, req)
    assert req.skip_radix_cache_insert == final


def test_the_last_requests_streams_give_way_first() -> None:
    tree: Any = Tree(0)
    gave_way = list[str]()
    stages = dict.fromkeys("ace", Stage.KNOWN) | dict.fromkeys("bfh", Stage.TOOLS)
    pins = StreamPins(tree, gave_way.append, lambda stream: stages.get(stream, Stage.NEXT))
    for stream in "abcdefgh":
        pins.replace(stream, Pin(None, None))
    pins.replace("b", Pin(None, None))
    while pins.give_way():
        pass
    assert gave_way == [*"eca", *"bfh", *"gd"] and not pins


@pytest.fixture
def lost() -> Any:
    """A request whose stream has given way."""
    return request(1500, 100, stream="z", final=True)


@pytest.fixture
def busy(lost: Any) -> FakeScheduler:
    """A scheduler with a running request, in which two prompts are held that fill the pool."""
    scheduler = FakeScheduler(1000, running=[request(100, 10)])
    for stream in "ab":
        scheduler.open_stream(stream, 1000, grows=False, ended=True)
        scheduler.flashmoa.pins.replace(stream, Pin(None, None))
        scheduler.streams._open[stream].prefilled = 1000
    scheduler.open_stream("z", 1500, grows=False, ended=True)
    scheduler.streams._open["z"].prefilled = 1000
    scheduler.streams.lose("z")
    scheduler.waiting_queue = [lost, request(500, 100)]
    return scheduler


def queued(scheduler: FakeScheduler) -> list[int]:
    """Return the prompts' lengths of the requests that may join a batch."""
    with admission.deferred(scheduler, scheduler.running):
        return [len(req.origin_input_ids) for req in scheduler.waiting_queue]


def test_a_lost_prompt_evicts_no_others(busy: FakeScheduler, lost: Any) -> None:
    """A request without a stream does not wait."""
    new = request(200, 0)
    with admission.deferred(busy, busy.running):
        assert [len(req.origin_input_ids) for req in busy.waiting_queue] == [500]
        busy.waiting_queue = [new]
    assert busy.waiting_queue == [lost, new] and len(busy.flashmoa.pins) == 2


@pytest.mark.parametrize("never", ["opened", "pinned", "given up"])
def test_a_prompt_that_never_gave_way_starts(busy: FakeScheduler, never: str) -> None:
    busy.streams.end("z")
    if never != "opened":
        busy.waiting_queue[0].flashmoa.mark = RequestMark("y", final=True)
        busy.open_stream("y", 1500, grows=False, ended=True)
    if never == "given up":
        # All streams were flushed.
        busy.streams._open["y"].prefilled = 1000
        busy.streams.lose()
    assert queued(busy) == [1500, 500]


def test_a_lost_prompt_starts_where_there_is_room(busy: FakeScheduler) -> None:
    busy.tree_cache.free = 2000
    assert queued(busy) == [1500, 500]


def test_a_small_lost_prompt_overtakes_none(busy: FakeScheduler) -> None:
    """Both have lost theirs. There is room for the small one, which the first would lack longer."""
    small = request(500, 100, stream="y", final=True)
    busy.open_stream("y", 500, grows=False, ended=True)
    busy.streams._open["y"].prefilled = 500
    busy.streams.lose("y")
    busy.waiting_queue.insert(1, small)
    assert queued(busy) == [500]
    busy.tree_cache.free = 2400
    assert queued(busy) == [1500, 500, 500]


def test_a_lost_prompt_evicts_an_overdue_one(busy: FakeScheduler) -> None:
    busy.flashmoa.work = 8000
    busy.open_stream("c", 1000, grows=False, ended=True)
    assert queued(busy) == [1500, 500]
    assert "a" not in busy.flashmoa.pins and "b" in busy.flashmoa.pins


def test_overdue_prompts_stay_if_they_do_not_suffice(busy: FakeScheduler) -> None:
    busy.flashmoa.work, busy.tree_cache.free = 8000, -1000
    assert queued(busy) == [500] and len(busy.flashmoa.pins) == 2
    busy.tree_cache.free = 0
    assert queued(busy) == [1500, 500] and not busy.flashmoa.pins


def test_streams_leave_room_for_deferred_requests(busy: FakeScheduler) -> None:
    busy.tree_cache.free, busy.max_total_num_tokens = 1600, 0
    before = room(busy)
    with admission.deferred(busy, busy.running):
        assert len(busy.waiting_queue) == 1
        assert room(busy) == before
    assert room(busy) == before


def test_overdue_prompts_give_way_to_growing_streams(busy: FakeScheduler) -> None:
    busy.waiting_queue, busy.max_total_num_tokens = [], 0
    busy.tree_cache.free = free = 0
    less = free - room(busy)
    busy.flashmoa.work = 8000
    # A stream that does not grow takes no room from others.
    busy.open_stream("known", 500, grows=False)
    assert room(busy) == -less and len(busy.flashmoa.pins) == 2
    busy.open_stream("grows", 500)
    assert room(busy) == 1000 - less and len(busy.flashmoa.pins) == 1
    # Those that are not overdue stay, and those that would leave no room, too.
    busy.flashmoa.work = 7999
    busy.tree_cache.free = 0
    assert room(busy) == -less and len(busy.flashmoa.pins) == 1
    busy.flashmoa.work = 8000
    busy.tree_cache.free = less - 1000
    assert room(busy) == -1000 and len(busy.flashmoa.pins) == 1


def test_one_request_always_runs(busy: FakeScheduler, lost: Any) -> None:
    busy.running.reqs, busy.waiting_queue = [], [lost]
    assert queued(busy) == [1500]
    # Those that also wait leave it the room.
    busy.waiting_queue = [lost, request(1400, 100, stream="z", final=True)]
    assert queued(busy) == [1500]


def test_patience_ends(busy: FakeScheduler) -> None:
    # Their own requests have come, so that they are not overdue.
    for stream in "ab":
        busy.streams.claim(stream)
    assert queued(busy) == [500]
    busy.flashmoa.work = 32 * 1500 - 1
    assert queued(busy) == [500]
    busy.flashmoa.work = 32 * 1500
    assert queued(busy) == [1500, 500]
    assert len(busy.flashmoa.pins) == 2


def test_an_ended_answer_keeps_room_for_its_agent(busy: FakeScheduler) -> None:
    busy.tree_cache.free = 2500
    busy.flashmoa.options = Options(hold_tool_calls=60)
    streams = busy.streams
    assert queued(busy) == [1500, 500]
    ended = request(1000, 300, 300, stream="y", final=True)
    ended.origin_input_ids = [*range(1000)]
    before = room(busy)
    streams.note_end(ended)
    assert queued(busy) == [500] and room(busy) == before - 1300
    busy.open_stream("other", 900, grows=False, ended=True)
    busy.open_stream("next", 1350, grows=False, ended=True)
    busy.tree_cache.cached = [[*range(1300)]]
    streams.keep_cached()
    assert streams.returning_tokens() == 0
    streams.note_end(ended)
    busy.flashmoa.work = 1299
    assert streams.returning_tokens() == 1300
    busy.flashmoa.work = 1300
    assert streams.returning_tokens() == 0


def test_priorities_are_not_deferred(busy: FakeScheduler) -> None:
    busy.enable_priority_scheduling = True
    assert queued(busy) == [1500, 500]


@pytest.mark.parametrize("before", ["a preemption", "the rest of a prompt", "a retraction"])
def test_streams_give_way_before_sglang_takes_room(before: str) -> None:
    scheduler = FakeScheduler(100 if before == "a retraction" else 500)
    for stream in "abc":
        scheduler.flashmoa.pins.replace(stream, Pin(None, None))
    if before == "a preemption":
        scheduler.waiting_queue = [request(1500, 0)]
        scheduler.enable_priority_preemption = True
    elif before == "the rest of a prompt":
        scheduler.chunked_req = request(3000, 0)
        scheduler.chunked_req.computed = 1000
    else:
        batch = SimpleNamespace(
            tree_cache=scheduler.tree_cache, new_tokens_required_next_decode=lambda: 1500
        )
        fits = admission.check_decode_memory(lambda _: scheduler.tree_cache.free >= 1500, batch)
        assert fits
    admission.make_room(scheduler, scheduler.running)
    assert len(scheduler.flashmoa.pins) == 1


def room(scheduler: FakeScheduler) -> int:
    return admission.room_for_streams(scheduler, scheduler.running)


def test_unlimited_chats_leave_room_for_streams() -> None:
    chats = [request(500, 100_000, 100) for _ in range(16)]
    assert room(FakeScheduler(60_000 - 16 * 600, 0.1, chats)) > 2000
    assert room(FakeScheduler(60_000 - 16 * 600, 1.0, chats)) < 0


def test_a_lone_stream_may_take_the_whole_pool() -> None:
    scheduler = FakeScheduler(5000, total=16_000)
    scheduler.open_stream("a")
    assert room(scheduler) == 5000
    # Others leave a sixteenth of it for requests to come.
    scheduler.open_stream("b")
    assert room(scheduler) == 4000


def test_waiting_requests_come_before_streams() -> None:
    scheduler = FakeScheduler(5000)
    # SGLang requires two more slots for each than it takes.
    scheduler.waiting_queue = [request(1500, 100), request(400, 0)]
    assert room(scheduler) == 5000 - 1602 - 402


def test_a_final_request_needs_its_uncached_tokens() -> None:
    scheduler = FakeScheduler(5000)
    scheduler.flashmoa.pins.replace("a", Pin(None, None))
    final = request(1500, 100, stream="a", final=True)
    final.flashmoa.uncached = 300
    scheduler.waiting_queue = [final]
    assert room(scheduler) == 5000 - 402
    # The KV of a stream whose pin gave way may be evicted before its request runs.
    scheduler.flashmoa.pins.give_way()
    assert room(scheduler) == 6000 - 1602


def test_a_chunked_prompt_keeps_room_for_its_rest() -> None:
    scheduler = FakeScheduler(7000)
    scheduler.chunked_req = chunked = request(9000, 50)
    chunked.computed = 4000
    assert room(scheduler) == 7000 - 5000 - 50 - 2


def test_each_decode_may_begin_a_page() -> None:
    scheduler = FakeScheduler(20_000, 0.0, [request(64, 50, 1) for _ in range(90)])
    taken = room(scheduler)
    scheduler.page_size = 64
    assert room(scheduler) == taken - 90 * 63


def test_pages_of_decodes_are_reserved_once(adder: Adder, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[Any] = []
    monkeypatch.setattr(RELEASE, "reserve_pages", reserved.append)
    adder.tree_cache.flashmoa.needs_pages = True
    for _ in range(2):
        admission.admit(Adder.add, adder, request(100, 0))
    assert reserved == [adder]


def policy(scheduler: FakeScheduler, *, priorities: bool = False) -> Any:
    return SimpleNamespace(
        tree_cache=scheduler.tree_cache, enable_priority_scheduling=priorities, priority_sign=-1
    )


def test_requests_precede_increments() -> None:
    scheduler = FakeScheduler()
    increment, first, second = request(9, 0, stream="a"), request(8, 5), request(7, 5)
    waiting = [increment, first, second]
    admission.order_queue(None, policy(scheduler), waiting)
    assert waiting == [first, second, increment]


def test_the_shortest_job_goes_first() -> None:
    scheduler = FakeScheduler()
    scheduler.flashmoa.options = Options(schedule="sjf")
    increment, long, short = request(9, 0, stream="a"), request(800, 500), request(7, 5)
    waiting = [increment, long, short]
    admission.order_queue(None, policy(scheduler), waiting)
    assert waiting == [short, long, increment]
    long.priority, short.priority = 5, 1
    admission.order_queue(None, policy(scheduler, priorities=True), waiting)
    assert waiting == [long, short, increment]


def test_a_grammar_is_noticed_while_prefills_wait() -> None:
    scheduler = FakeScheduler(running=[request(500, 1000, 10)])
    first, structured = request(10, 5), request(20, 5)
    scheduler.waiting_queue, scheduler.grammar_manager.ready = [first], [structured]
    state: Any = scheduler.flashmoa
    state.saturation_gate = SimpleNamespace(tokens=9000, must_wait=lambda *_: True)
    state.queued = SimpleNamespace(count=lambda *_: 10)
    # The loop does not sleep while a request decodes.
    assert read(scheduler, scheduler.running) == StepView(waits=True, decodes=1)
    assert next_prefill_batch(_never, scheduler) == (None, scheduler.running)
    assert scheduler.waiting_queue == [first, structured]


def test_measurements_do_not_wait_for_saturation() -> None:
    scheduler = FakeScheduler()
    scheduler.waiting_queue = [timed] = [request(10, 5)]
    state: Any = scheduler.flashmoa
    state.saturation_gate = SimpleNamespace(tokens=9000, must_wait=lambda *_: True)
    state.queued = SimpleNamespace(count=lambda *_: 10)
    assert read(scheduler, scheduler.running).waits
    timed.flashmoa = RequestState(RequestMark(timed=True))
    assert not read(scheduler, scheduler.running).waits


def _never(*_: object, **__: object) -> None:
    raise AssertionError("a batch is built")


@pytest.mark.parametrize("release", [class_for(one)() for one in TESTED])
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


@pytest.mark.parametrize("release", [class_for(one)() for one in TESTED])
def test_room_is_kept_for_expected_output(release: Release) -> None:
    scheduler = FakeScheduler(ratio=0.3)
    assert release.reserved_output(scheduler, request(1, 1)) == 0.3
    fixed = request(1, 1)
    fixed.sampling_params.ignore_eos = True
    assert release.reserved_output(scheduler, fixed) == (
        0.3 if isinstance(release, Release0521) else 1.0
    )


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
    """It would wait for the answer in the queue, which it leaves after one step."""
    asked: list[Any] = []
    final = request(900, 0, stream="a", final=True)
    for req in (request(900, 0, stream="a"), final, request(900, 5)):
        admission.prefetch(lambda _, req: asked.append(req), None, req)
    assert len(asked) == 2 and asked[0] is final


def test_an_increment_leaves_the_bootstrap_queue() -> None:
    """SGLang keeps it there while it has no buffer for its metadata."""
    other = request(5, 5)
    bootstrap = SimpleNamespace(queue=[other], pop_bootstrapped=list)
    scheduler: Any = SimpleNamespace(
        waiting_queue=[],
        server_args=SimpleNamespace(disaggregation_mode="prefill"),
        disagg_prefill_bootstrap_queue=bootstrap,
    )
    message = SimpleNamespace(rid="increment")

    def make(_message: Any) -> None:
        req = request(900, 0, stream="a")
        req.rid = "increment"
        bootstrap.queue.append(req)

    released: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "let_go", lambda _, req: released.append(req.rid))
        assert streams.take_request(scheduler, message, make) is None
    assert bootstrap.queue == [other] and scheduler.waiting_queue == []
    assert released == ["increment"]


def job(uncached: int, output: int, queued_at: float, priority: int = 0) -> Any:
    req = request(1, output)
    req.priority = priority
    req.flashmoa = RequestState(queued_at=queued_at, uncached=uncached)
    return req


def shortest_first(jobs: list[Any]) -> list[Any]:
    """Return jobs in their order in the queue. A decode step takes as long as 100 tokens."""
    scheduler = FakeScheduler()
    scheduler.flashmoa.options = Options(schedule="sjf")
    scheduler.flashmoa.costs = Costs(((1, 0.0101), (1001, 0.1101)), decode_step=0.01)
    ordered = [*jobs]
    admission.order_queue(None, policy(scheduler, priorities=True), ordered)
    return ordered


@given(
    jobs=st.lists(
        st.builds(
            job,
            uncached=st.integers(0, 5000),
            output=st.integers(0, 500),
            queued_at=st.floats(0, 1e5),
            priority=st.integers(-1, 1),
        ),
        max_size=10,
    )
)
def test_jobs_are_ordered_by_priority_then_size(jobs: list[Any]) -> None:
    ordered = shortest_first(jobs)
    assert sorted(map(id, ordered)) == sorted(map(id, jobs))
    priorities = [req.priority for req in ordered]
    assert priorities == sorted(priorities, reverse=True)


@given(uncached=st.integers(0, 5000), output=st.integers(0, 500), later=st.floats(1, 1e5))
def test_no_job_starves(uncached: int, output: int, later: float) -> None:
    long = job(uncached, output, queued_at=0.0)
    short = job(0, 0, queued_at=uncached + 100 * output + later)
    assert shortest_first([short, long]) == [long, short]
