"""What a step prefills, with a fake scheduler; what rides along with decodes: ``test_rides``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.scheduler import apply, results, streams
from flashmoa_sglang.scheduler.apply import next_prefill_batch
from flashmoa_sglang.scheduler.pins import Pin
from flashmoa_sglang.sglang.options import Options
from flashmoa_sglang.sglang.releases import RELEASE

from tests.unit.plugin.scheduler.fake_scheduler import (
    Build,
    engine,
    new_tokens,
    request,
    step,
)

pytestmark = pytest.mark.usefixtures("fake_release")


def test_idle_engines_prefill_streams_alone() -> None:
    idle = engine()
    for stream in "ab":
        idle.open_stream(stream, 100, grows=False)
    built = step(idle)
    assert built.increments() == [100, 100]
    assert built.settings["chunk"] == 8192 and built.settings["rows"] == 16
    assert not built.settings["mixed"] and not built.settings["full"]


@pytest.mark.parametrize(
    ("tokens", "most", "increment"), [(5000, 8192, 512), (5000, 100, 100), (300, 8192, 300)]
)
def test_a_forward_of_streams_fits_a_chunk(tokens: int, most: int, increment: int) -> None:
    idle = engine()
    idle.chunked_prefill_size = most
    idle.open_stream("a", tokens)
    assert step(idle).increments() == [increment]


def test_an_ended_stream_comes_first() -> None:
    idle = engine()
    idle.open_stream("opened first", 50)
    idle.open_stream("ended", 2000, ended=True)
    assert step(idle).increments() == [512]


def test_streams_join_no_pure_prefill() -> None:
    idle = engine()
    idle.open_stream("a", 5000)
    idle.waiting_queue = [request(30, 5)]
    built = step(idle)
    assert built.clients() == idle.waiting_queue and built.increments() == []
    assert not built.settings["mixed"]


def test_there_are_no_more_increments_than_rows() -> None:
    idle = engine()
    for number in range(20):
        idle.open_stream(str(number), 10, ended=True)
    assert step(idle).increments() == [10] * 16
    idle.req_to_token_pool = SimpleNamespace(available_size=lambda: 3)
    assert step(idle).increments() == [10] * 3


def test_left_requests_precede_newcomers() -> None:
    idle = engine()
    idle.open_stream("a", 2500)
    first, second, third = idle.waiting_queue = [request(10 + n, 5) for n in range(3)]
    newcomer = request(7, 5)
    step(idle, Build(takes=lambda req: req is second, newcomers=[newcomer]))
    assert idle.waiting_queue == [first, third, newcomer]


def test_a_left_increment_is_made_again() -> None:
    idle = engine()
    idle.open_stream("a", 100)
    assert step(idle).increments() == [100] and idle.waiting_queue == []
    idle.streams.extend(new_tokens("a", range(100, 150)))
    assert step(idle).increments() == [150]


def test_a_joined_increment_is_not_made_again() -> None:
    idle = engine()
    idle.open_stream("a", 100)
    built = step(idle, Build(takes=lambda _: True))
    assert idle.flashmoa.work == 100
    idle.streams.extend(new_tokens("a", range(100, 250)))
    assert not idle.streams.can_prefill_more()
    idle.streams.finish(built.queues[0][0], 0.1)
    assert step(idle).increments() == [250]


def test_freed_increments_reopen_a_full_batch() -> None:
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


def test_known_text_does_not_wait_for_few_tokens() -> None:
    busy = engine(2)
    busy.flashmoa.no_rides = "the engine decodes speculatively"
    busy.open_stream("resting", 700, grows=False)
    busy.open_stream("a", 10)
    done: list[int] = []
    for _ in range(12):
        for queue in step(busy, Build(takes=lambda _: True)).queues:
            done += [len(req.origin_input_ids) for req in queue]
            for req in queue:
                busy.streams.settle(req)
    assert done == [700]


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
def test_decodes_leave_time_to_streams(
    decoding: int, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = engine(decoding)
    monkeypatch.setattr(RELEASE, "pipeline_stages", lambda _: 1 + ("running_mbs" in given))
    for name, value in given.items():
        setattr(busy.flashmoa if name == "no_rides" else busy, name, value)
    busy.open_stream("resting", 700, grows=False)
    busy.open_stream("a", 1024)

    def run(steps: int) -> list[int]:
        """Return how many tokens of streams each step computes, and by that the decodes wait."""
        done: list[int] = []
        for _ in range(steps):
            built = step(busy, Build(takes=lambda _: True))
            made = [req for queue in built.queues for req in queue]
            assert not made or (not built.settings["mixed"] and built.settings["rows"] == 16)
            for req in made:
                busy.streams.settle(req)
            done.append(sum(len(req.origin_input_ids) for req in made))
        return done

    # Decodes have half of the time: 1,024 tokens take the time of ten and a half steps.
    assert run(12) == [0] * 11 + [1024]
    # What is known of a prompt before another agent writes comes when nothing grows.
    assert run(20) == [0] * 9 + [700] + [0] * 10


@pytest.mark.parametrize("known", [(0, 2), (0,), ()])
def test_idle_ranks_prefill_streams_alone(known: tuple[int, ...]) -> None:
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
    assert step(rank).increments() == [512]
    # Meanwhile another rank may have begun to decode.
    rank.last_batch = OF_A_PREFILL
    assert not step(rank).queues
    rank.last_batch = None
    assert step(rank).increments() == [512]


def test_ranks_together_leave_half_the_time() -> None:
    rank = engine()
    rank.require_mlp_sync, rank.last_batch = True, of_decodes(0, 2)
    rank.server_args.attn_dp_size = 2
    rank.open_stream("a", 1024)
    # With one rank it would be the twelfth step.
    assert [bool(step(rank).queues) for _ in range(23)] == [False] * 22 + [True]


def test_eagle_increments_have_one_more_token() -> None:
    eagle = engine(eagle=True)
    eagle.page_size = 64
    eagle.open_stream("a", 65, ended=True)
    assert step(eagle).increments() == [65]


def test_streams_keep_their_turn_until_a_forward() -> None:
    busy = engine(decoding=2)
    busy.flashmoa.no_rides = "the engine decodes speculatively"
    busy.open_stream("a", 2500)
    for _ in range(11):
        assert not step(busy).queues
    assert step(busy).increments() == [1024]  # SGLang has no room for it in this step.
    assert step(busy, Build(takes=lambda _: True)).increments() == [1024]
    assert busy.flashmoa.steps_without_streams == 0


def test_a_forward_of_streams_is_never_mixed() -> None:
    """What keeps streams from riding may be that such steps would not be right."""
    busy = engine(decoding=2)
    busy.flashmoa.no_rides = "hidden states are returned"
    busy.is_mixed_chunk = True
    busy.open_stream("a", 2500)
    built = [step(busy) for _ in range(12)][-1]
    assert built.increments() == [1024] and not built.settings["mixed"]
    assert busy.is_mixed_chunk


def test_a_failed_build_restores_everything() -> None:
    busy = engine(decoding=2, full=True)
    busy.open_stream("a", 2500)
    busy.waiting_queue = [request(10, 5)]

    def fail(_: object) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        next_prefill_batch(fail, busy)
    assert len(busy.waiting_queue) == 1 and busy.running.batch_is_full
    assert busy.chunked_prefill_size == 8192 and not busy.is_mixed_chunk
    assert not busy.flashmoa.only_streams and busy.streams.can_prefill_more()


@pytest.mark.parametrize(
    ("late", "overlap", "is_first"),
    [("", True, False), ("", True, True), ("", False, True), ("of the test", True, False)],
)
def test_kv_is_published_once_early_or_late(
    monkeypatch: pytest.MonkeyPatch, late: str, overlap: bool, is_first: bool
) -> None:
    published: list[Any] = []
    monkeypatch.setattr(RELEASE, "publish", lambda _, req: published.append(req))
    monkeypatch.setattr(streams, "pin_published", lambda *_: Pin("launched", None))
    idle = engine()
    idle.flashmoa.late_kv, idle.enable_overlap = late, overlap
    idle.open_stream("a", 100)
    (increment,) = step(idle, Build(takes=lambda _: True)).queues[0]
    monkeypatch.setattr(streams, "match_and_pin", lambda *_: (Pin("with its result", None), 5))

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


def test_a_stream_that_ends_early_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RELEASE, "publish", lambda *_: None)
    monkeypatch.setattr(streams, "pin_published", lambda *_: Pin(None, None))
    idle = engine()
    idle.flashmoa.late_kv = ""
    for stream in "ab":
        idle.open_stream(stream, 100)
    step(idle, Build(takes=lambda _: True))
    idle.streams.end("a")
    step(idle)
    assert "a" not in idle.flashmoa.pins and "b" in idle.flashmoa.pins


def test_retracted_requests_are_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[Any] = []
    monkeypatch.setattr(RELEASE, "publish", lambda _, req: published.append(req))
    monkeypatch.setattr(apply, "is_shareable", lambda _: True)
    idle = engine()
    idle.flashmoa.late_kv, idle.flashmoa.options = "", Options()
    idle.waiting_queue = chunked, other = [request(100, 50), request(100, 50)]
    step(idle, Build(takes=lambda _: True))
    # A pause that retracts all requests gives up a prompt within its chunks, too.
    chunked.is_retracted = True
    step(idle)
    assert published == [other]
