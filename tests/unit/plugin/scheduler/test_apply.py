"""What a step prefills, with a fake scheduler. ``test_rides`` has mixed steps."""

from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.scheduler import apply, results, streams
from flashmoa_sglang.scheduler.apply import next_prefill_batch
from flashmoa_sglang.scheduler.pins import Pin
from flashmoa_sglang.sglang.options import Options
from flashmoa_sglang.sglang.releases import RELEASE, Release

from tests.unit.plugin.scheduler.fakes import Build, engine, join_all, new_tokens, request, step

pytestmark = pytest.mark.usefixtures("fake_release")
SPECULATES = "the engine decodes speculatively"


def test_idle_engines_prefill_streams_alone() -> None:
    idle = engine(a=100, b=100)
    built = step(idle)
    assert built.increments() == [100, 100]
    assert built.settings["chunk"] == 8192 and built.settings["rows"] == 16
    assert not built.settings["mixed"] and not built.settings["full"]
    # Increments that no batch takes are made again.
    assert idle.waiting_queue == []
    idle.streams.extend(new_tokens("a", range(100, 150)))
    assert step(idle).increments() == [150, 100]
    # Streams join no prefill of clients.
    idle.waiting_queue = [request(30, 5)]
    built = step(idle)
    assert built.clients() == idle.waiting_queue and built.increments() == []
    assert not built.settings["mixed"]


@pytest.mark.parametrize(
    ("tokens", "most", "increment"), [(5000, 8192, 512), (5000, 100, 100), (300, 8192, 300)]
)
def test_a_forward_of_streams_fits_a_chunk(tokens: int, most: int, increment: int) -> None:
    assert step(engine(a=tokens), chunked_prefill_size=most).increments() == [increment]


def test_an_ended_stream_comes_first() -> None:
    idle = engine(first=50)
    idle.open_stream("ended", 2000, ended=True)
    assert step(idle).increments() == [512]


def test_there_are_no_more_increments_than_rows() -> None:
    idle = engine()
    for number in range(20):
        idle.open_stream(str(number), 10, ended=True)
    assert step(idle).increments() == [10] * 16
    few = SimpleNamespace(available_size=lambda: 3)
    assert step(idle, req_to_token_pool=few).increments() == [10] * 3


def test_left_requests_precede_newcomers() -> None:
    idle, newcomer = engine(a=2500), request(7, 5)
    first, second, third = idle.waiting_queue = [request(10 + n, 5) for n in range(3)]
    step(idle, Build(takes=lambda req: req is second, newcomers=[newcomer]))
    assert idle.waiting_queue == [first, third, newcomer]


def test_a_joined_increment_is_not_made_again() -> None:
    idle = engine(a=100)
    built = join_all(idle)
    assert idle.flashmoa.work == 100
    idle.streams.extend(new_tokens("a", range(100, 250)))
    assert not idle.streams.can_prefill_more()
    idle.streams.finish(built.queues[0][0], 0.1)
    assert step(idle).increments() == [250]


def test_freed_increments_reopen_a_full_batch() -> None:
    """SGLang marks the batch as full meanwhile. Nothing else would reset the mark."""
    busy = engine(decoding=2, full=True)
    busy.waiting_queue = [request(100, 5)]
    assert step(busy).settings["full"]
    busy.flashmoa.increments_ended = True
    assert not step(busy).settings["full"]
    busy.running.batch_is_full = True
    assert step(busy).settings["full"]
    assert not step(engine(full=True), waiting_queue=[request(100, 5)]).settings["full"]


def run(busy: Any, steps: int) -> list[int]:
    """Return the number of stream tokens of each step. No decode is in such a step."""
    done: list[int] = []
    for _ in range(steps):
        built = join_all(busy)
        made = [req for queue in built.queues for req in queue]
        assert not made or (not built.settings["mixed"] and built.settings["rows"] == 16)
        for req in made:
            busy.streams.settle(req)
        done.append(sum(len(req.origin_input_ids) for req in made))
    return done


def of_decodes(*requests: int) -> Any:
    """Make the last batch of ranks that step together, with the decoding requests of each rank."""
    return SimpleNamespace(is_extend_in_batch=False, global_num_tokens=[*requests])


OF_A_PREFILL = SimpleNamespace(is_extend_in_batch=True, global_num_tokens=[512, 0])
# Pipeline stages take turns with two batches.
STAGES = [SimpleNamespace(reqs=[]), SimpleNamespace(reqs=[1, 2])]


@pytest.mark.parametrize(
    ("decoding", "given", "growing", "done"),
    [
        # Decodes have half of the time: 1,024 tokens take the time of ten and a half steps.
        # Known text of a prompt waits until no stream grows.
        *(
            (decoding, given, 1024, [0] * 11 + [1024] + [0] * 9 + [700] + [0] * 10)
            for decoding, given in (
                (2, {}),
                (0, {"require_mlp_sync": True, "last_batch": of_decodes(0, 2)}),
                (0, {"running_mbs": STAGES}),
            )
        ),
        # Known text does not wait for few tokens.
        (2, {}, 10, [0] * 9 + [700] + [0] * 2),
    ],
)
def test_decodes_leave_time_to_streams(
    decoding: int, given: dict[str, Any], growing: int, done: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = engine(decoding)
    monkeypatch.setattr(RELEASE, "pipeline_stages", lambda _: 1 + ("running_mbs" in given))
    vars(busy).update(given)
    busy.flashmoa.no_rides = "" if given else SPECULATES
    busy.open_stream("resting", 700, grows=False)
    busy.open_stream("a", growing)
    assert run(busy, len(done)) == done


@pytest.mark.parametrize("known", [(0, 2), (0,), ()])
def test_idle_ranks_prefill_streams_alone(known: tuple[int, ...]) -> None:
    """With moe_dense_tp_size and some backends, SGLang gives a rank only its own number."""
    rank = engine(a=9000)
    rank.require_mlp_sync = True
    # Decoding ranks take part when another rank prefills, and then go on.
    for last in (of_decodes(*known), OF_A_PREFILL):
        assert not step(rank, last_batch=last).queues
    assert step(rank, last_batch=None).increments() == [512]
    # Meanwhile another rank may have begun to decode.
    assert not step(rank, last_batch=OF_A_PREFILL).queues
    assert step(rank, last_batch=None).increments() == [512]


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["replicas", "attention"])
def test_ranks_together_leave_half_the_time(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int]
) -> None:
    counts_both = type(RELEASE).data_parallel_ranks is Release.data_parallel_ranks
    if sizes[0] == 1 and not counts_both:
        pytest.skip("this release counts the ranks of DP attention in dp_size")
    # SGLang may choose the number of ranks itself.
    resolved = SimpleNamespace(dp_size=sizes[0], attn_dp_size=sizes[1])
    monkeypatch.setattr(RELEASE, "resolve_arguments", lambda _: resolved)
    rank = engine(a=1024)
    rank.require_mlp_sync, rank.last_batch = True, of_decodes(0, 2)
    # With one rank it would be the twelfth step.
    assert [bool(step(rank).queues) for _ in range(23)] == [False] * 22 + [True]


def test_eagle_increments_have_one_more_token() -> None:
    eagle = engine(eagle=True)
    eagle.page_size = 64
    eagle.open_stream("a", 65, ended=True)
    assert step(eagle).increments() == [65]


def test_eagle_increments_fit_a_chunk_with_these_tokens() -> None:
    eagle = engine(eagle=True, a=100, b=100)
    # 16 increments may each have one more token.
    increments = step(eagle, chunked_prefill_size=66).increments()
    assert sum(increments) <= 66 and sum(increments) - len(increments) == 50


@pytest.mark.parametrize("mixes", [True, False])
def test_streams_keep_their_turn_until_a_forward(mixes: bool) -> None:
    """Steps of streams alone are never mixed: mixed steps may be wrong on this engine."""
    busy = engine(decoding=2, a=2500)
    busy.flashmoa.no_rides, busy.is_mixed_chunk = SPECULATES, mixes
    for _ in range(11):
        assert not step(busy).queues
    built = step(busy)  # SGLang has no room for the increment in this step.
    assert built.increments() == [1024] and not built.settings["mixed"]
    assert busy.is_mixed_chunk == mixes
    assert join_all(busy).increments() == [1024]
    assert busy.flashmoa.steps_without_streams == 0


def test_a_failed_build_restores_everything() -> None:
    busy = engine(decoding=2, full=True, a=2500)
    busy.waiting_queue = [request(10, 5)]

    def fail(_: object) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        next_prefill_batch(fail, busy)
    assert len(busy.waiting_queue) == 1 and busy.running.batch_is_full
    assert busy.chunked_prefill_size == 8192 and not busy.is_mixed_chunk
    assert not busy.flashmoa.only_streams and busy.streams.can_prefill_more()


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests whose KV is published when their forward is launched."""
    found: list[Any] = []
    monkeypatch.setattr(RELEASE, "publish", lambda _, req: found.append(req))
    monkeypatch.setattr(streams, "pin_published", lambda *_: Pin("launched", None))
    return found


@pytest.mark.parametrize(
    ("late", "overlap", "is_first"),
    [("", True, False), ("", True, True), ("", False, True), ("of the test", True, False)],
)
def test_kv_is_published_once_early_or_late(
    monkeypatch: pytest.MonkeyPatch, published: list[Any], late: str, overlap: bool, is_first: bool
) -> None:
    idle = engine(a=100)
    idle.flashmoa.late_kv, idle.enable_overlap = late, overlap
    (increment,) = join_all(idle).queues[0]
    monkeypatch.setattr(streams, "match_and_pin", lambda *_: (Pin("with its result", None), 5))
    tree = SimpleNamespace(tree_cache=idle.tree_cache)

    def send_results() -> None:
        results.stream_output(lambda *_: None, tree, [increment], False)
        increment.finished = lambda: True

    # The forward is not launched yet.
    assert not published and "a" not in idle.flashmoa.pins
    if is_first:
        send_results()
    step(idle)
    is_early = not (late or is_first)
    assert published == ([increment] if is_early else [])
    # Published KV is not inserted a second time.
    assert getattr(increment, "skip_radix_cache_insert", False) is is_early
    if not is_first:
        send_results()
    assert idle.flashmoa.pins._pins["a"].node == ("launched" if is_early else "with its result")
    step(idle)
    assert len(published) == is_early


@pytest.mark.usefixtures("published")
def test_a_stream_that_ends_early_is_not_pinned() -> None:
    idle = engine(a=100, b=100)
    idle.flashmoa.late_kv = ""
    join_all(idle)
    idle.streams.end("a")
    step(idle)
    assert "a" not in idle.flashmoa.pins and "b" in idle.flashmoa.pins


def test_retracted_requests_are_not_published(
    published: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "is_shareable", lambda _: True)
    idle = engine()
    idle.flashmoa.late_kv, idle.flashmoa.options = "", Options()
    idle.waiting_queue = chunked, other = [request(100, 50), request(100, 50)]
    join_all(idle)
    # A pause that retracts all requests also stops a prompt between its chunks.
    chunked.is_retracted = True
    step(idle)
    assert published == [other]
