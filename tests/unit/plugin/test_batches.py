"""What a step prefills, and what rides along with its decodes, with a fake scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.costs import Costs
from flashmoa_sglang.messages import RequestMark
from flashmoa_sglang.options import Options
from flashmoa_sglang.releases import RELEASE
from flashmoa_sglang.scheduler import batches, results
from flashmoa_sglang.scheduler.admission import allocatable_requests
from flashmoa_sglang.scheduler.batches import next_prefill_batch
from flashmoa_sglang.scheduler.pins import Pin
from flashmoa_sglang.scheduler.request import is_increment

from tests.unit.plugin.fake_scheduler import FakeScheduler, new_tokens, request

pytestmark = pytest.mark.usefixtures("fake_release")

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


def engine(decoding: int = 0, *, full: bool = False) -> FakeScheduler:
    """Make a scheduler with so many requests that decode, and whose KV is published late."""
    made = FakeScheduler(running=[request(100, 50, 1) for _ in range(decoding)])
    made.flashmoa.costs = COSTS
    made.flashmoa.options = Options(intra_turn="off", itl_budget=2.0)
    made.flashmoa.late_kv = "of the test"
    made.running.batch_is_full = full
    return made


def step(scheduler: FakeScheduler, build: Build | None = None) -> Build:
    """Run a step; return how its batch was built."""
    build = build or Build()
    next_prefill_batch(build, scheduler)
    return build


def test_streams_have_a_forward_of_their_own_while_nothing_else_runs() -> None:
    idle = engine()
    for stream in "ab":
        idle.open_stream(stream, 100, grows=False)
    built = step(idle)
    assert built.increments() == [100, 100]
    assert built.settings["chunk"] == 8192 and built.settings["rows"] == 16
    assert not built.settings["mixed"] and not built.settings["full"]


@pytest.mark.parametrize(
    ("tokens", "most", "increment"), [(5000, 8192, 512), (5000, 100, 100), (1500, 8192, 256)]
)
def test_a_forward_for_streams_is_larger_where_more_waits_and_fits_a_chunk(
    tokens: int, most: int, increment: int
) -> None:
    idle = engine()
    idle.chunked_prefill_size = most
    idle.open_stream("a", tokens)
    assert step(idle).increments() == [increment]


def test_increments_of_the_smallest_jobs_go_first_if_jobs_are_ordered() -> None:
    idle = engine()
    idle.open_stream("long answer", 50, output=1000)
    idle.open_stream("short answer", 70, output=1)
    assert step(idle).increments() == [50, 70]
    idle.flashmoa.options = Options(intra_turn="off", schedule="sjf")
    assert step(idle).increments() == [70, 50]


def test_a_stream_that_has_ended_is_prefilled_before_others_and_alone() -> None:
    idle = engine()
    idle.open_stream("opened first", 50)
    idle.open_stream("ended", 2000, ended=True)
    assert step(idle).increments() == [512]


@pytest.mark.parametrize(("factor", "waits"), [(1, 0), (10, 4)])
def test_a_slow_idle_engine_waits_a_moment_for_the_request_of_a_stream_that_has_ended(
    factor: int, waits: int
) -> None:
    idle = engine()
    idle.flashmoa.costs = Costs(tuple((n, t * factor) for n, t in COSTS.points), 0.01)
    idle.open_stream("ended", 0, ended=True)
    idle.flashmoa.streams._open["ended"].grows = True
    idle.open_stream("other", 128)
    steps = 0
    while not (built := step(idle)).queues:
        steps += 1
    assert steps == waits and built.increments() == [128]


def test_few_tokens_have_no_forward_until_the_text_has_ended() -> None:
    idle = engine()
    idle.open_stream("a", 73)
    assert step(idle).increments() == []
    idle.flashmoa.streams.extend(new_tokens("a", [], ended=True))
    assert step(idle).increments() == [73]


def test_streams_fill_a_small_forward_of_clients() -> None:
    idle = engine()
    idle.open_stream("a", 5000)
    idle.waiting_queue = [request(30, 5)]
    built = step(idle)
    assert built.clients() == idle.waiting_queue and built.increments() == [44]
    idle.waiting_queue = [request(30, 5), request(50, 5)]
    built = step(idle)
    assert built.clients() == idle.waiting_queue and built.increments() == []
    idle.waiting_queue, idle.chunked_req = [], request(4000, 5)
    idle.chunked_req.computed = 2000
    assert step(idle).increments() == []


def test_there_are_no_more_increments_than_rows() -> None:
    idle = engine()
    for number in range(20):
        idle.open_stream(str(number), 10, ended=True)
    assert step(idle).increments() == [10] * 16
    idle.req_to_token_pool = SimpleNamespace(available_size=lambda: 3)
    assert step(idle).increments() == [10] * 3


def test_requests_that_are_left_keep_their_order_before_newcomers() -> None:
    idle = engine()
    idle.open_stream("a", 2500)
    first, second, third = idle.waiting_queue = [request(10 + n, 5) for n in range(3)]
    newcomer = request(7, 5)
    step(idle, Build(takes=lambda req: req is second, newcomers=[newcomer]))
    assert idle.waiting_queue == [first, third, newcomer]


def test_an_increment_that_does_not_join_is_made_again_from_the_latest_tokens() -> None:
    idle = engine()
    idle.open_stream("a", 100)
    assert step(idle).increments() == [100] and idle.waiting_queue == []
    idle.flashmoa.streams.extend(new_tokens("a", range(100, 150)))
    assert step(idle).increments() == [150]


def test_an_increment_that_joins_is_not_made_again_before_its_result() -> None:
    idle = engine()
    idle.open_stream("a", 100)
    built = step(idle, Build(takes=lambda _: True))
    assert idle.flashmoa.work == 100
    idle.flashmoa.streams.extend(new_tokens("a", range(100, 250)))
    assert not idle.flashmoa.streams.can_prefill_more()
    idle.flashmoa.streams.finish(built.queues[0][0], 0.1)
    assert step(idle).increments() == [250]


def test_a_request_that_lacked_the_room_of_increments_is_tried_again_after_them() -> None:
    """SGLang takes the batch for full meanwhile, which nothing else would end."""
    busy = engine(decoding=2, full=True)
    busy.waiting_queue = [request(100, 5)]
    assert step(busy).settings["full"]
    busy.flashmoa.increments_ended = True
    assert not step(busy).settings["full"]
    busy.running.batch_is_full = True
    assert step(busy).settings["full"]
    idle = engine(full=True)
    idle.waiting_queue = [request(100, 5)]
    assert not step(idle).settings["full"]


def test_streams_ride_along_with_decodes() -> None:
    busy = engine(decoding=2)
    busy.open_stream("a", 2500)
    built = step(busy)
    assert built.increments() == [62]
    assert built.settings["chunk"] == 64 and built.settings["rows"] == 16
    assert built.settings["mixed"] and not built.settings["full"]
    assert busy.chunked_prefill_size == 8192 and not busy.is_mixed_chunk
    assert not busy.flashmoa.only_streams


FINAL = request(40, 5, stream="b", final=True)


@pytest.mark.parametrize(
    ("given", "rides", "mixed"),
    [
        ({}, [62], True),
        # It is the first step after a prefill of others.
        ({"last_batch": SimpleNamespace(reqs=[request(400, 5)])}, [62], True),
        ({"chunked_prefill_size": 40}, [30], True),
        ({"options": Options(intra_turn="off", itl_budget=1.0)}, None, False),
        ({"no_rides": "the engine decodes speculatively"}, None, False),
    ],
)
def test_streams_and_prompts_ride_as_the_engine_allows(
    given: dict[str, Any], rides: list[int] | None, mixed: bool
) -> None:
    busy = engine(decoding=2)
    # What is known of a prompt before the agent before writes does not ride.
    busy.open_stream("resting", 5000, grows=False)
    busy.open_stream("a", 2500)
    for name, value in given.items():
        setattr(busy.flashmoa if name in ("options", "no_rides") else busy, name, value)
    built = step(busy)
    assert (built.increments() if built.queues else None) == rides
    busy.waiting_queue = [FINAL]
    built = step(busy)
    assert built.clients() == [FINAL] and built.settings["mixed"] == mixed


def test_what_is_known_does_not_wait_for_a_stream_of_which_a_few_tokens_wait_for_more() -> None:
    busy = engine(2)
    busy.flashmoa.no_rides = "the engine decodes speculatively"
    busy.open_stream("resting", 700, grows=False)
    busy.open_stream("a", 10)
    done: list[int] = []
    for _ in range(12):
        for queue in step(busy, Build(takes=lambda _: True)).queues:
            done += [len(req.origin_input_ids) for req in queue]
            for req in queue:
                busy.flashmoa.streams.settle(req)
    assert done[-1] == 700


@pytest.mark.parametrize(("budget", "steps"), [(1.03, 16), (1.25, 40)])
def test_fewer_than_half_of_the_steps_are_longer_than_most_may_be(
    budget: float, steps: int
) -> None:
    busy = engine(decoding=2)
    # 62 tokens take 0.98 ms longer than a step of 10.
    busy.flashmoa.options = Options(intra_turn="off", itl_budget=budget)
    busy.open_stream("a", 62 * 40)
    rides: list[int] = []
    for _ in range(40):
        built = step(busy, Build(takes=lambda _: True))
        for req in built.queues[0] if built.queues else ():
            busy.flashmoa.streams.settle(req)
        rides.append(len(built.queues))
    assert sum(rides) == steps
    assert budget == 1.25 or rides[:10] == [0, 0, 1, 0, 1, 0, 0, 1, 0, 1]


def test_steps_in_which_nothing_rides_leave_time_for_one_ride_only() -> None:
    busy = engine(decoding=2)
    busy.flashmoa.options = Options(intra_turn="off", itl_budget=1.03)
    busy.open_stream("a", 10)
    for _ in range(100):
        step(busy)
    busy.flashmoa.streams.extend(new_tokens("a", range(10, 2500)))
    rides: list[int] = []
    for _ in range(4):
        built = step(busy, Build(takes=lambda _: True))
        for req in built.queues[0] if built.queues else ():
            busy.flashmoa.streams.settle(req)
        rides.append(len(built.queues))
    assert rides == [1, 0, 1, 0]


def test_steps_may_be_longer_if_only_linked_workflows_decode() -> None:
    busy = engine(decoding=2)
    busy.flashmoa.options = Options(intra_turn="off", itl_budget=1.03)
    final, writer = busy.running.reqs
    final.flashmoa.mark = RequestMark("claimed", final=True)
    busy.open_stream("a", 62 * 40)

    def rides() -> int:
        """Return how many of 20 steps are longer."""
        found = 0
        for _ in range(20):
            built = step(busy, Build(takes=lambda _: True))
            found += len(built.queues)
            for req in built.queues[0] if built.queues else ():
                busy.flashmoa.streams.settle(req)
        return found

    writer.output_ids = [7000 + n for n in range(40)]
    assert rides() == 8
    # The stream gets the answer a little later, and not all of it.
    busy.flashmoa.streams.extend(new_tokens("a", [1, 2, *range(7003, 7070), 3]))
    assert rides() == 8
    writer.output_ids += range(7040, 7080)
    assert rides() == 20


# A step that mixes takes 1.8 ms longer, whatever rides.
MIXING = Costs(COSTS.points, 0.01, ((2, 0, 0.01), (2, 30, 0.0118), (2, 62, 0.012)))


def test_what_is_known_of_other_prompts_fills_what_those_that_grow_leave_of_a_ride() -> None:
    busy = engine(decoding=2)
    busy.flashmoa.costs = MIXING
    busy.open_stream("resting", 5000, grows=False)
    assert not step(busy).queues
    busy.open_stream("a", 40, ended=True)
    assert step(busy).increments() == [40, 22]


def test_streams_of_larger_jobs_than_one_that_waits_only_fill_rides_if_jobs_are_ordered() -> None:
    busy = engine(decoding=2, full=True)
    busy.flashmoa.costs = MIXING
    busy.flashmoa.options = replace(busy.flashmoa.options, schedule="sjf")
    busy.open_stream("large", 2500, output=100)
    waiting = busy.waiting_queue = [request(300, 5)]
    assert not step(busy).increments()
    busy.open_stream("small", 40, output=1, ended=True)
    assert step(busy).increments() == [40, 22]
    busy.flashmoa.streams.end("small")
    busy.waiting_queue = []
    assert step(busy).increments() == [62]
    assert waiting


def of_decodes(*requests: int) -> Any:
    """Make the last batch of ranks that step together, with what each of them has decoded."""
    return SimpleNamespace(is_extend_in_batch=False, global_num_tokens=[*requests])


OF_A_PREFILL = SimpleNamespace(is_extend_in_batch=True, global_num_tokens=[512, 0])


@pytest.mark.parametrize(
    ("decoding", "given"),
    [
        (2, {"no_rides": "the engine decodes speculatively"}),
        (0, {"require_mlp_sync": True, "last_batch": of_decodes(0, 2)}),
    ],
)
def test_streams_have_forwards_for_which_decodes_leave_time_where_nothing_rides(
    decoding: int, given: dict[str, Any]
) -> None:
    busy = engine(decoding)
    for name, value in given.items():
        setattr(busy.flashmoa if name == "no_rides" else busy, name, value)
    busy.open_stream("resting", 700, grows=False)
    busy.open_stream("a", 1024)

    def twelve_steps() -> list[int]:
        """Return how many tokens of streams each step computes, and by that the decodes wait."""
        done: list[int] = []
        for _ in range(12):
            built = step(busy, Build(takes=lambda _: True))
            made = [req for queue in built.queues for req in queue]
            assert not made or (not built.settings["mixed"] and built.settings["rows"] == 16)
            for req in made:
                busy.flashmoa.streams.settle(req)
            done.append(sum(len(req.origin_input_ids) for req in made))
        return done

    # Decodes have half of the time: 512 tokens take as long as five and a half of their steps.
    assert twelve_steps() == [0, 0, 0, 0, 0, 512, 0, 0, 0, 0, 0, 1024]
    # What is known of a prompt before another agent writes comes when nothing grows.
    assert twelve_steps() == [0, 0, 0, 0, 0, 512, 0, 0, 700, 0, 0, 0]


@pytest.mark.parametrize("known", [(0, 2), (0,), ()])
def test_a_forward_of_streams_is_that_of_an_idle_engine_once_no_rank_decodes(
    known: tuple[int, ...],
) -> None:
    rank = engine()
    rank.require_mlp_sync = True
    rank.open_stream("a", 9000)
    # With moe_dense_tp_size and some backends, SGLang gives a rank its own number alone.
    rank.last_batch = of_decodes(*known)
    assert not step(rank).queues
    # The ranks that decode take part in a prefill of one of them, and go on afterwards.
    rank.last_batch = OF_A_PREFILL
    assert not step(rank).queues
    rank.last_batch = None
    assert step(rank).increments() == [1024]
    # Meanwhile another rank may have begun to decode.
    rank.last_batch = OF_A_PREFILL
    assert not step(rank).queues
    rank.last_batch = None
    assert step(rank).increments() == [1024]


def test_decodes_leave_their_time_to_streams_until_a_forward_is_built() -> None:
    busy = engine(decoding=2)
    busy.flashmoa.no_rides = "the engine decodes speculatively"
    busy.open_stream("a", 2500)
    for _ in range(5):
        assert not step(busy).queues
    assert step(busy).increments() == [512]  # SGLang has no room for it in this step.
    assert step(busy, Build(takes=lambda _: True)).increments() == [512]
    assert busy.flashmoa.earned == 0


def test_all_is_as_before_if_no_batch_can_be_built() -> None:
    busy = engine(decoding=2, full=True)
    busy.open_stream("a", 2500)
    busy.waiting_queue = [request(10, 5)]

    def fail(_: object) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        next_prefill_batch(fail, busy)
    assert len(busy.waiting_queue) == 1 and busy.running.batch_is_full
    assert busy.chunked_prefill_size == 8192 and not busy.is_mixed_chunk
    assert not busy.flashmoa.only_streams and busy.flashmoa.streams.can_prefill_more()


def test_more_tokens_ride_where_a_request_ends_soon() -> None:
    """An agent that reads its answer may ask then, and what is left stops the decodes."""
    for written, ride in ((1, 61), (49, 125)):
        busy = engine(decoding=2)
        busy.open_stream("a", 2500)
        busy.running.reqs.append(request(100, 50, written))
        assert step(busy).increments() == [ride]


def test_many_streams_ride_in_few_steps_with_large_increments() -> None:
    busy = engine(decoding=2)
    # As many as 128 tokens are worth a forward.
    busy.flashmoa.costs = Costs(((1, 0.01), (128, 0.01), (1128, 0.11)), 0.01, COSTS.mixed)
    busy.open_stream("long", 140)
    assert step(busy).increments() == [62]
    for number in range(299):
        busy.open_stream(f"{number}", 9)
    assert step(busy).increments() == [126]


@pytest.mark.parametrize("joins", [True, False])
def test_streams_ride_along_with_decodes_that_return_log_probabilities(*, joins: bool) -> None:
    """SGLang would mix nothing with them, and is told of them again afterwards."""
    busy = engine(decoding=2)
    busy.open_stream("a", 2500)
    busy.running.return_logprob = busy.running.reqs[0].return_logprob = True
    built = step(busy, Build(takes=lambda _: joins))
    assert built.increments() == [62] and built.settings["mixed"]
    assert not built.settings["logprobs"] and busy.running.return_logprob


def test_streams_ride_although_no_more_requests_may_run() -> None:
    busy = engine(decoding=2, full=True)
    busy.open_stream("a", 2500)
    busy.waiting_queue = waiting = [request(10, 5), request(20, 5)]
    built = step(busy, Build(takes=is_increment))
    assert built.clients() == [] and built.increments() == [62]
    assert not built.settings["full"] and built.settings["rows"] == 16
    assert busy.waiting_queue == waiting and busy.running.batch_is_full
    assert busy.flashmoa.rode_along == 62


def test_requests_that_come_while_streams_ride_are_queued_last() -> None:
    busy = engine(decoding=2, full=True)
    busy.open_stream("a", 2500)
    waiting, newcomer = request(10, 5), request(7, 5)
    busy.waiting_queue = [waiting]
    step(busy, Build(newcomers=[newcomer]))
    assert busy.waiting_queue == [waiting, newcomer]


def test_prompts_ride_along_with_decodes_while_there_are_streams() -> None:
    busy = engine(decoding=2)
    final = request(40, 5, stream="a", final=True)
    for waiting in ([final], [request(400, 5, stream="a", final=True)], [final, request(20, 5)]):
        busy.waiting_queue = waiting
        built = step(busy)
        assert built.clients() == waiting
        assert built.settings["mixed"] and built.settings["chunk"] == 64
        assert not busy.is_mixed_chunk and busy.chunked_prefill_size == 8192
    busy.waiting_queue = [request(40, 5)]
    assert not step(busy).settings["mixed"]
    busy.open_stream("b", 5)
    assert step(busy).settings["mixed"]


def test_the_rest_of_a_prompt_that_is_cut_into_chunks_rides() -> None:
    busy = engine(decoding=2, full=True)
    busy.open_stream("a", 5)
    busy.waiting_queue = [request(7000, 5)]
    busy.chunked_req = request(2000, 5)
    busy.chunked_req.computed = 1600
    assert step(busy).settings == {
        "mixed": True,
        "chunk": 64,
        "full": True,
        "logprobs": False,
        "rows": 0,
    }


def test_a_prompt_rides_only_while_its_rest_fits_the_pool_whatever_the_decodes_take() -> None:
    """SGLang retracts no decode in a step that prefills something."""
    busy = engine(decoding=4)
    busy.open_stream("a", 5)
    busy.chunked_req = request(2000, 5)
    busy.chunked_req.computed = 1600
    # The rest, a page at each end of it, and two tokens of each decode.
    for free, rides in ((400 + 2 + 8, True), (400 + 2 + 7, False)):
        busy.tree_cache.free = free
        assert step(busy).settings["mixed"] == rides
    busy.chunked_req, busy.waiting_queue = None, [request(300, 20), request(1, 1)]
    for free, rides in ((300 + 20 + 2 + 8, True), (300 + 20 + 2 + 7, False)):
        busy.tree_cache.free = free
        assert step(busy).settings["mixed"] == rides


@pytest.mark.parametrize(
    ("prompts", "given", "of_request"),
    [
        # Each would wait for all the decode steps in which they ride.
        (30, {}, {}),
        # SGLang does not mix these.
        (1, {}, {"return_logprob": True}),
        (1, {}, {"input_embeds": True}),
        (1, {}, {"multimodal_inputs": True}),
        # Kernels need longer chunks.
        (1, {"truncation_align_size": 4096}, {}),
        # Others that are shorter, or more important, would have to wait.
        (1, {"enable_priority_scheduling": True}, {}),
        (1, {"options": Options(intra_turn="off", schedule="sjf")}, {}),
    ],
)
def test_prompts_are_not_cut_to_ride_where_that_is_worse_or_impossible(
    prompts: int, given: dict[str, Any], of_request: dict[str, Any]
) -> None:
    busy = engine(decoding=2)
    busy.open_stream("a", 5)
    busy.waiting_queue = [request(400, 5) for _ in range(prompts)]
    assert step(busy).settings["mixed"] == (prompts == 1)
    for name, value in given.items():
        setattr(busy.flashmoa if name == "options" else busy, name, value)
    vars(busy.waiting_queue[0]).update(of_request)
    built = step(busy)
    assert not built.settings["mixed"] and built.settings["chunk"] == 8192
    if "enable_priority_scheduling" in given or "options" in given:
        busy.waiting_queue = [request(40, 5)]
        assert step(busy).settings["mixed"]


def test_a_prompt_that_is_cut_into_chunks_takes_one_of_the_places() -> None:
    busy = engine(decoding=2)
    busy.open_stream("a", 5)
    busy.max_running_requests = 3
    busy.chunked_req, busy.waiting_queue = request(2000, 5), [request(400, 5)]
    busy.chunked_req.computed = 1600
    # It is not in this step's forward, so it does not matter that it cannot be mixed.
    busy.waiting_queue[0].return_logprob = True
    assert step(busy).settings["mixed"]


def test_streams_take_what_prompts_leave_of_a_ride() -> None:
    busy = engine(decoding=2)
    busy.open_stream("a", 2500)
    busy.waiting_queue = [request(10, 5)]
    assert step(busy).increments() == [20]


def test_a_step_with_rides_leaves_pages_for_the_decodes() -> None:
    busy = engine(decoding=2)
    busy.open_stream("a", 2500)
    kept: list[bool] = []

    class Noticed(Build):
        def __call__(self, scheduler: Any) -> Any:
            kept.append(scheduler.flashmoa.needs_pages)
            return super().__call__(scheduler)

    step(busy, Noticed())
    busy.flashmoa.no_rides = "of the test"
    busy.waiting_queue = [request(400, 5)]
    step(busy, Noticed())
    # Stock SGLang mixes all prefill if the user wants it.
    busy.is_mixed_chunk = True
    step(busy, Noticed())
    assert kept == [True, False, True]


@pytest.mark.parametrize(
    ("late", "overlap", "is_first"),
    [("", True, False), ("", True, True), ("", False, True), ("of the test", True, False)],
)
def test_kv_is_published_and_pinned_once_its_forward_is_launched_or_with_its_results(
    monkeypatch: pytest.MonkeyPatch, late: str, overlap: bool, is_first: bool
) -> None:
    published: list[Any] = []
    monkeypatch.setattr(RELEASE, "publish", lambda _, req: published.append(req))
    monkeypatch.setattr(RELEASE, "radix_key", lambda *_: None)
    monkeypatch.setattr(batches, "pin_published", lambda *_: Pin("launched", None))
    monkeypatch.setattr(results, "match_and_pin", lambda *_: (Pin("with its result", None), 5))
    idle = engine()
    idle.flashmoa.late_kv, idle.enable_overlap = late, overlap
    idle.open_stream("a", 100)
    (increment,) = step(idle, Build(takes=lambda _: True)).queues[0]

    def send_results() -> None:
        results.stream_output(
            lambda *_: None, SimpleNamespace(tree_cache=idle.tree_cache), [increment], False
        )
        increment.finished = lambda: True

    # The forward is not launched yet.
    assert not published and "a" not in idle.flashmoa.pins
    if is_first:
        send_results()
    step(idle)
    is_early = not (late or is_first)
    assert published == ([increment] if is_early else [])
    # What has been published is not inserted once more.
    assert getattr(increment, "skip_radix_cache_insert", False) is is_early
    if not is_first:
        send_results()
    assert idle.flashmoa.pins._pins["a"].node == ("launched" if is_early else "with its result")
    step(idle)
    assert len(published) == is_early


def test_a_request_that_has_lost_its_kv_since_its_launch_is_not_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published: list[Any] = []
    monkeypatch.setattr(RELEASE, "publish", lambda _, req: published.append(req))
    monkeypatch.setattr(RELEASE, "shares_within_forward", lambda _: False)
    monkeypatch.setattr(batches, "is_shareable", lambda _: True)
    idle = engine()
    idle.flashmoa.late_kv, idle.flashmoa.options = "", Options()
    idle.waiting_queue = chunked, other = [request(100, 50), request(100, 50)]
    step(idle, Build(takes=lambda _: True))
    # A pause that retracts all requests gives up a prompt within its chunks, too.
    chunked.is_retracted = True
    step(idle)
    assert published == [other]


@pytest.mark.parametrize(
    ("limits", "priorities", "rides"),
    [
        ("", (None, None), 62),
        ("50", (None, None), 62),
        # A step of two requests takes 10 ms, and 62 tokens add 1 ms.
        ("10.2", (None, None), 0),
        ("50,5=10.2", (None, 5), 0),
        ("50,5=10.2", (None, 4), 62),
        ("5=10.2", (None, None), 62),
        ("10.2,5=50", (5, 5), 62),
    ],
)
def test_no_step_is_longer_than_the_strictest_limit_of_those_that_decode(
    limits: str, priorities: tuple[int | None, ...], rides: int
) -> None:
    busy = engine(decoding=2)
    busy.flashmoa.options = Options(intra_turn="off", itl_ms=limits)
    for req, priority in zip(busy.running.reqs, priorities, strict=True):
        req.priority = priority
    busy.open_stream("a", 5000)
    build = Build()
    for _ in range(10):
        step(busy, build)
    ridden = max(sum(is_increment(req) for req in queue) for queue in build.queues or [[]])
    assert bool(ridden) == bool(rides)


def test_fewer_tokens_ride_where_the_context_makes_them_dear() -> None:
    """The step without them takes longer, too, but by less than they add."""

    def ridden(per_pair: float) -> int:
        busy = engine(decoding=2)
        busy.flashmoa.costs = replace(COSTS, per_pair=per_pair)
        busy.flashmoa.options = Options(intra_turn="off", itl_ms="12")
        for req in busy.running.reqs:
            req.priority = None
        busy.open_stream("a", 25_000)
        busy.flashmoa.streams._open["a"].prefilled = 20_000
        built = step(busy)
        return max(built.increments(), default=20_000) - 20_000 if built.queues else 0

    assert ridden(0.0) > ridden(1e-9) > 0
    assert ridden(1e-7) == 0
