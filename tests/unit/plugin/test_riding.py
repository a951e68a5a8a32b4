"""What rides along with decode steps, with a fake scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.costs import Costs
from flashmoa_sglang.options import Options
from flashmoa_sglang.scheduler.request import is_increment

from tests.unit.plugin.fake_scheduler import request
from tests.unit.plugin.step_builds import COSTS, Build, scheduler, step

pytestmark = pytest.mark.usefixtures("fake_release")


def test_streams_do_not_fill_a_forward_that_stops_decodes_alone() -> None:
    """Beside decodes a forward for streams alone is never built."""
    busy = scheduler(decoding=2)
    busy.open_stream("a", 5000, grows=False)
    assert step(busy).queues == []


def test_streams_ride_along_with_decodes() -> None:
    busy = scheduler(decoding=2)
    busy.open_stream("a", 2500)
    built = step(busy)
    assert built.increments() == [62]
    assert built.settings["chunk"] == 64 and built.settings["rows"] == 16
    assert built.settings["mixed"] and not built.settings["full"]
    assert busy.chunked_prefill_size == 8192 and not busy.is_mixed_chunk
    assert not busy.flashmoa.only_streams


def test_more_tokens_ride_where_a_request_ends_soon() -> None:
    """An agent that reads its answer may ask then, and what is left stops the decodes."""
    for written, ride in ((1, 61), (49, 125)):
        busy = scheduler(decoding=2)
        busy.open_stream("a", 2500)
        busy.running.reqs.append(request(100, 50, written))
        assert step(busy).increments() == [ride]


def test_many_streams_ride_in_few_steps_with_large_increments() -> None:
    busy = scheduler(decoding=2)
    # As many as 128 tokens are worth a forward.
    busy.flashmoa.costs = Costs(((1, 0.01), (128, 0.01), (1128, 0.11)), 0.01, COSTS.mixed)
    busy.open_stream("long", 140)
    assert step(busy).increments() == [62]
    for number in range(299):
        busy.open_stream(f"{number}", 9)
    assert step(busy).increments() == [126]


def test_nothing_rides_within_a_budget_of_one_step() -> None:
    busy = scheduler(decoding=2)
    busy.open_stream("a", 2500)
    busy.flashmoa.options = Options(intra_turn="off", itl_budget=1.0)
    assert step(busy).queues == []


@pytest.mark.parametrize("joins", [True, False])
def test_streams_ride_along_with_decodes_that_return_log_probabilities(*, joins: bool) -> None:
    """SGLang would mix nothing with them, and is told of them again afterwards."""
    busy = scheduler(decoding=2)
    busy.open_stream("a", 2500)
    busy.running.return_logprob = busy.running.reqs[0].return_logprob = True
    built = step(busy, Build(takes=lambda _: joins))
    assert built.increments() == [62] and built.settings["mixed"]
    assert not built.settings["logprobs"] and busy.running.return_logprob


def test_streams_ride_although_no_more_requests_may_run() -> None:
    busy = scheduler(decoding=2, full=True)
    busy.open_stream("a", 2500)
    busy.waiting_queue = waiting = [request(10, 5), request(20, 5)]
    built = step(busy, Build(takes=is_increment))
    assert built.clients() == [] and built.increments() == [62]
    assert not built.settings["full"] and built.settings["rows"] == 16
    assert busy.waiting_queue == waiting and busy.running.batch_is_full
    assert busy.flashmoa.rode_along == 62


def test_only_streams_that_grow_ride() -> None:
    busy = scheduler(decoding=2)
    busy.open_stream("a", 30, grows=False)
    busy.open_stream("b", 2500)
    (increment,) = step(busy).queues[-1]
    assert increment.flashmoa.stream == "b"


def test_requests_that_come_while_streams_ride_are_queued_last() -> None:
    busy = scheduler(decoding=2, full=True)
    busy.open_stream("a", 2500)
    waiting, newcomer = request(10, 5), request(7, 5)
    busy.waiting_queue = [waiting]
    step(busy, Build(newcomers=[newcomer]))
    assert busy.waiting_queue == [waiting, newcomer]


def test_prompts_ride_along_with_decodes_while_there_are_streams() -> None:
    busy = scheduler(decoding=2)
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
    busy = scheduler(decoding=2, full=True)
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
    busy = scheduler(decoding=4)
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


@pytest.mark.parametrize("order", ["sjf", "priority"])
def test_where_the_order_of_prompts_matters_none_is_cut_to_ride(order: str) -> None:
    busy = scheduler(decoding=2)
    busy.open_stream("a", 5)
    busy.enable_priority_scheduling = order == "priority"
    busy.flashmoa.options = Options(
        intra_turn="off", schedule="sjf" if order == "sjf" else "sglang"
    )
    for tokens, rides in ((40, True), (400, False)):
        busy.waiting_queue = [request(tokens, 5)]
        assert step(busy).settings["mixed"] == rides


def test_a_prompt_that_is_cut_into_chunks_takes_one_of_the_places() -> None:
    busy = scheduler(decoding=2)
    busy.open_stream("a", 5)
    busy.max_running_requests = 3
    busy.chunked_req, busy.waiting_queue = request(2000, 5), [request(400, 5)]
    busy.chunked_req.computed = 1600
    # It is not in this step's forward, so it does not matter that it cannot be mixed.
    busy.waiting_queue[0].return_logprob = True
    assert step(busy).settings["mixed"]


def test_no_ride_is_longer_than_the_longest_forward_that_the_user_allows() -> None:
    busy = scheduler(decoding=2)
    busy.open_stream("a", 2500)
    busy.chunked_prefill_size = 40
    assert step(busy).increments() == [30]


def test_neither_streams_nor_prompts_ride_where_there_is_a_reason_against_it() -> None:
    busy = scheduler(decoding=2)
    busy.open_stream("a", 2500)
    busy.flashmoa.no_rides = "the engine decodes speculatively"
    assert step(busy).queues == []
    busy.waiting_queue = [request(400, 5)]
    assert not step(busy).settings["mixed"]


def test_prompts_have_a_forward_of_their_own_if_many_wait() -> None:
    """Each would wait for all the decode steps in which they ride."""
    busy = scheduler(decoding=2)
    busy.open_stream("a", 5)
    busy.waiting_queue = [request(400, 5) for _ in range(30)]
    assert not step(busy).settings["mixed"]


@pytest.mark.parametrize("field", ["return_logprob", "input_embeds", "multimodal_inputs"])
def test_prompts_that_sglang_does_not_mix_are_not_cut_for_it(field: str) -> None:
    busy = scheduler(decoding=2)
    busy.open_stream("a", 5)
    busy.waiting_queue = [request(400, 5)]
    setattr(busy.waiting_queue[0], field, True)
    built = step(busy)
    assert not built.settings["mixed"] and built.settings["chunk"] == 8192


def test_prompts_are_not_cut_where_kernels_need_longer_chunks() -> None:
    busy = scheduler(decoding=2)
    busy.open_stream("a", 5)
    busy.waiting_queue, busy.truncation_align_size = [request(400, 5)], 4096
    assert not step(busy).settings["mixed"]


def test_streams_take_what_prompts_leave_of_a_ride() -> None:
    busy = scheduler(decoding=2)
    busy.open_stream("a", 2500)
    busy.waiting_queue = [request(10, 5)]
    assert step(busy).increments() == [20]


def test_tokens_ride_in_the_first_step_after_a_prefill_of_others() -> None:
    busy = scheduler(decoding=2)
    busy.last_batch = SimpleNamespace(reqs=[request(400, 5)])
    busy.open_stream("a", 2500)
    assert step(busy).increments() == [62]
    final = request(40, 5, stream="b", final=True)
    busy.waiting_queue = [final]
    built = step(busy)
    assert built.clients() == [final] and built.settings["mixed"]


def test_a_step_with_rides_leaves_pages_for_the_decodes() -> None:
    busy = scheduler(decoding=2)
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
