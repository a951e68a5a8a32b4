"""What a step prefills, for clients and for prompt streams, with a fake scheduler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from flashmoa_sglang.options import Options
from flashmoa_sglang.scheduler.batches import next_prefill_batch

from tests.unit.plugin.fake_scheduler import new_tokens, request
from tests.unit.plugin.step_builds import Build, scheduler, step

pytestmark = pytest.mark.usefixtures("fake_release")


def test_streams_have_a_forward_of_their_own_while_nothing_else_runs() -> None:
    idle = scheduler()
    for stream in "ab":
        idle.open_stream(stream, 100, grows=False)
    built = step(idle)
    assert built.increments() == [100, 100]
    assert built.settings["chunk"] == 8192 and built.settings["rows"] == 16
    assert not built.settings["mixed"] and not built.settings["full"]


def test_a_forward_for_streams_is_of_bounded_size() -> None:
    idle = scheduler()
    idle.open_stream("a", 5000)
    assert step(idle).increments() == [2048]
    idle.chunked_prefill_size = 100
    assert step(idle).increments() == [100]


def test_a_forward_for_streams_has_half_of_what_waits() -> None:
    idle = scheduler()
    idle.open_stream("a", 1500)
    assert step(idle).increments() == [750]


def test_increments_of_the_smallest_jobs_go_first_if_jobs_are_ordered() -> None:
    idle = scheduler()
    idle.open_stream("long answer", 100, output=1000)
    idle.open_stream("short answer", 150, output=1)
    assert step(idle).increments() == [100, 150]
    idle.flashmoa.options = Options(intra_turn="off", schedule="sjf")
    assert step(idle).increments() == [150, 100]


def test_few_tokens_have_no_forward_until_the_text_has_ended() -> None:
    idle = scheduler()
    idle.open_stream("a", 73)
    assert step(idle).increments() == []
    idle.flashmoa.streams.extend(new_tokens("a", [], ended=True))
    assert step(idle).increments() == [73]


def test_streams_fill_a_small_forward_of_clients() -> None:
    idle = scheduler()
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
    idle = scheduler()
    for number in range(20):
        idle.open_stream(str(number), 10, ended=True)
    assert step(idle).increments() == [10] * 16
    idle.req_to_token_pool = SimpleNamespace(available_size=lambda: 3)
    assert step(idle).increments() == [10] * 3


def test_requests_that_are_left_keep_their_order_before_newcomers() -> None:
    idle = scheduler()
    idle.open_stream("a", 2500)
    first, second, third = idle.waiting_queue = [request(10 + n, 5) for n in range(3)]
    newcomer = request(7, 5)
    step(idle, Build(takes=lambda req: req is second, newcomers=[newcomer]))
    assert idle.waiting_queue == [first, third, newcomer]


def test_an_increment_that_does_not_join_is_made_again_from_the_latest_tokens() -> None:
    idle = scheduler()
    idle.open_stream("a", 100)
    assert step(idle).increments() == [100] and idle.waiting_queue == []
    idle.flashmoa.streams.extend(new_tokens("a", range(100, 150)))
    assert step(idle).increments() == [150]


def test_an_increment_that_joins_is_not_made_again_before_its_result() -> None:
    idle = scheduler()
    idle.open_stream("a", 100)
    built = step(idle, Build(takes=lambda _: True))
    assert idle.flashmoa.work == 100
    idle.flashmoa.streams.extend(new_tokens("a", range(100, 250)))
    assert not idle.flashmoa.streams.want()
    idle.flashmoa.streams.finish(built.queues[0][0], 0.1)
    assert step(idle).increments() == [250]


def test_all_is_as_before_if_no_batch_can_be_built() -> None:
    busy = scheduler(decoding=2, full=True)
    busy.open_stream("a", 2500)
    busy.waiting_queue = [request(10, 5)]

    def fail(_: object) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        next_prefill_batch(fail, busy)
    assert len(busy.waiting_queue) == 1 and busy.running.batch_is_full
    assert busy.chunked_prefill_size == 8192 and not busy.is_mixed_chunk
    assert not busy.flashmoa.only_streams and busy.flashmoa.streams.want()


def test_a_request_that_lacked_the_room_of_increments_is_tried_again_after_them() -> None:
    """SGLang takes the batch for full meanwhile, which nothing else would end."""
    busy = scheduler(decoding=2, full=True)
    busy.waiting_queue = [request(100, 5)]
    assert step(busy).settings["full"]
    busy.flashmoa.increments_ended = True
    assert not step(busy).settings["full"]
    busy.running.batch_is_full = True
    assert step(busy).settings["full"]
    idle = scheduler(full=True)
    idle.waiting_queue = [request(100, 5)]
    assert not step(idle).settings["full"]
