"""What a step prefills, with a fake scheduler; what rides along with decodes: ``test_rides``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.costs import Costs
from flashmoa_sglang.options import Options
from flashmoa_sglang.releases import RELEASE
from flashmoa_sglang.scheduler import batches, results
from flashmoa_sglang.scheduler.batches import next_prefill_batch
from flashmoa_sglang.scheduler.pins import Pin

from tests.unit.plugin.fake_scheduler import (
    COSTS,
    Build,
    engine,
    new_tokens,
    request,
    step,
)

pytestmark = pytest.mark.usefixtures("fake_release")


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


def of_decodes(*requests: int) -> Any:
    """Make the last batch of ranks that step together, with what each of them has decoded."""
    return SimpleNamespace(is_extend_in_batch=False, global_num_tokens=[*requests])


OF_A_PREFILL = SimpleNamespace(is_extend_in_batch=True, global_num_tokens=[512, 0])


@pytest.mark.parametrize(
    ("decoding", "given"),
    [
        (2, {"no_rides": "the engine decodes speculatively"}),
        (0, {"require_mlp_sync": True, "last_batch": of_decodes(0, 2)}),
        # Two of the batches that go through the pipeline's stages in turns.
        (0, {"running_mbs": [SimpleNamespace(reqs=[]), SimpleNamespace(reqs=[1, 2])]}),
    ],
)
def test_streams_have_forwards_for_which_decodes_leave_time_where_nothing_rides(
    decoding: int, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = engine(decoding)
    monkeypatch.setattr(RELEASE, "pipeline_stages", lambda _: 1 + ("running_mbs" in given))
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


def test_streams_of_all_ranks_that_step_together_leave_half_of_the_time_to_decodes() -> None:
    rank = engine()
    rank.require_mlp_sync, rank.last_batch = True, of_decodes(0, 2)
    rank.server_args.attn_dp_size = 2
    rank.open_stream("a", 1024)
    # With one rank it would be the sixth step.
    assert [bool(step(rank).queues) for _ in range(11)] == [False] * 10 + [True]


def test_with_eagle_a_page_is_a_forward_although_an_increment_has_another_token() -> None:
    eagle = engine(eagle=True)
    eagle.page_size = 64
    eagle.open_stream("a", 65, ended=True)
    assert step(eagle).increments() == [65]


def test_decodes_leave_their_time_to_streams_until_a_forward_is_built() -> None:
    busy = engine(decoding=2)
    busy.flashmoa.no_rides = "the engine decodes speculatively"
    busy.open_stream("a", 2500)
    for _ in range(5):
        assert not step(busy).queues
    assert step(busy).increments() == [512]  # SGLang has no room for it in this step.
    assert step(busy, Build(takes=lambda _: True)).increments() == [512]
    assert busy.flashmoa.earned == 0


def test_nothing_decodes_in_a_forward_of_streams_although_the_operator_lets_sglang_mix() -> None:
    """What keeps streams from riding may be that such steps would not be right."""
    busy = engine(decoding=2)
    busy.flashmoa.no_rides = "hidden states are returned"
    busy.is_mixed_chunk = True
    busy.open_stream("a", 2500)
    built = [step(busy) for _ in range(6)][-1]
    assert built.increments() == [512] and not built.settings["mixed"]
    assert busy.is_mixed_chunk


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
