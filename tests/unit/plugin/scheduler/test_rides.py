"""What rides along with decode steps: how many tokens, of which streams and prompts, and when."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.scheduler.request import is_increment
from flashmoa_sglang.sglang.options import Options

from tests.unit.plugin.scheduler.fake_scheduler import (
    COSTS,
    Build,
    engine,
    request,
    step,
)

pytestmark = pytest.mark.usefixtures("fake_release")


@pytest.mark.parametrize("full", [False, True])
def test_streams_ride_before_waiting_requests(*, full: bool) -> None:
    busy = engine(decoding=2, full=full)
    busy.open_stream("a", 2500)
    newcomer, waiting = request(7, 5), [request(10, 5), request(20, 5)] if full else []
    busy.waiting_queue = [*waiting]
    built = step(busy, Build(takes=is_increment, newcomers=[newcomer]))
    assert built.clients() == [] and built.increments() == [62]
    settings = {"mixed": True, "chunk": 64, "full": False, "logprobs": False, "rows": 16}
    assert built.settings == settings
    assert busy.waiting_queue == [*waiting, newcomer] and busy.running.batch_is_full == full
    assert busy.chunked_prefill_size == 8192 and not busy.is_mixed_chunk
    assert busy.flashmoa.rode_along == 62 and not busy.flashmoa.only_streams


FINAL = request(40, 5, stream="b", final=True)


@pytest.mark.parametrize(
    ("given", "rides", "mixed"),
    [
        ({}, [62], True),
        # It is the first step after a prefill of others.
        ({"last_batch": SimpleNamespace(reqs=[request(400, 5)])}, [62], True),
        ({"chunked_prefill_size": 60}, [60], True),
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


def test_known_text_fills_rides() -> None:
    busy = engine(decoding=2)
    busy.open_stream("resting", 5000, grows=False)
    assert not step(busy).queues
    busy.open_stream("a", 40, ended=True)
    assert step(busy).increments() == [40, 22]


def test_larger_jobs_only_fill_rides_with_sjf() -> None:
    busy = engine(decoding=2, full=True)
    busy.flashmoa.options = replace(busy.flashmoa.options, schedule="sjf")
    busy.open_stream("large", 2500, output=100)
    waiting = busy.waiting_queue = [request(300, 5)]
    assert not step(busy).increments()
    busy.open_stream("small", 40, output=1, ended=True)
    assert step(busy).increments() == [40, 22]
    busy.streams.end("small")
    busy.waiting_queue = []
    assert step(busy).increments() == [62]
    assert waiting


def test_many_streams_get_large_increments() -> None:
    busy = engine(decoding=2)
    for number in range(299):
        busy.open_stream(f"{number}", 20)
    assert not step(busy).queues
    busy.open_stream("long", 140)
    assert step(busy).increments() == [62]
    # Each stream would have a small increment, if they were few.
    busy = engine(decoding=2)
    for number in range(20):
        busy.open_stream(f"{number}", 20)
    assert step(busy).increments() == [20, 20, 20]


@pytest.mark.parametrize("joins", [True, False])
def test_streams_ride_with_log_probabilities(*, joins: bool) -> None:
    """SGLang would mix nothing with them, and is told of them again afterwards."""
    busy = engine(decoding=2)
    busy.open_stream("a", 2500)
    busy.running.return_logprob = busy.running.reqs[0].return_logprob = True
    built = step(busy, Build(takes=lambda _: joins))
    assert built.increments() == [62] and built.settings["mixed"]
    assert not built.settings["logprobs"] and busy.running.return_logprob


def test_prompts_ride_while_there_are_streams() -> None:
    busy = engine(decoding=2)
    final = request(40, 5, stream="a", final=True)
    for waiting in ([final], [request(400, 5, stream="a", final=True)], [final, request(20, 5)]):
        busy.waiting_queue = waiting
        built = step(busy)
        assert built.clients() == waiting
        assert built.settings["mixed"] and built.settings["chunk"] == 256
        assert not busy.is_mixed_chunk and busy.chunked_prefill_size == 8192
    busy.waiting_queue = [request(40, 5)]
    assert not step(busy).settings["mixed"]
    busy.open_stream("b", 5)
    assert step(busy).settings["mixed"]


def test_the_rest_of_a_chunked_prompt_rides() -> None:
    busy = engine(decoding=2, full=True)
    busy.open_stream("a", 5)
    busy.waiting_queue = [request(7000, 5)]
    busy.chunked_req = request(2000, 5)
    busy.chunked_req.computed = 1600
    assert step(busy).settings == {
        "mixed": True,
        "chunk": 256,
        "full": True,
        "logprobs": False,
        "rows": 0,
    }


def test_a_prompt_rides_while_its_rest_fits() -> None:
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
    ("given", "of_request"),
    [
        # SGLang does not mix these.
        ({}, {"return_logprob": True}),
        ({}, {"input_embeds": True}),
        ({}, {"multimodal_inputs": True}),
        # Kernels need longer chunks.
        ({"truncation_align_size": 4096}, {}),
    ],
)
def test_prompts_are_not_cut_where_sglang_cannot(
    given: dict[str, Any], of_request: dict[str, Any]
) -> None:
    busy = engine(decoding=2)
    busy.open_stream("a", 5)
    busy.waiting_queue = [request(400, 5)]
    assert step(busy).settings["mixed"]
    for name, value in given.items():
        setattr(busy, name, value)
    vars(busy.waiting_queue[0]).update(of_request)
    built = step(busy)
    assert not built.settings["mixed"] and built.settings["chunk"] == 8192


@pytest.mark.parametrize("decoding", [0, 2])
def test_streams_do_not_wait_for_a_grammar(decoding: int) -> None:
    """The request joins no batch for streams, as nobody knows whether it can be mixed."""
    busy = engine(decoding=decoding)
    busy.open_stream("a", 2500)
    grammars = busy.grammar_manager
    grammars.ready = [compiled] = [request(400, 5)]
    waited: list[bool] = []
    build = Build(takes=lambda _: waited.append(busy.grammar_manager.has_waiting_grammars()))
    built = step(busy, build)
    assert built.increments() and built.settings["mixed"] == bool(decoding)
    assert waited == [False] and busy.grammar_manager is grammars
    assert busy.waiting_queue == [compiled]


def test_a_compiled_grammar_joins_without_a_batch() -> None:
    busy = engine(decoding=2)
    busy.open_stream("a", 5)
    busy.grammar_manager.ready = [compiled] = [request(400, 5)]
    assert not step(busy).queues and busy.waiting_queue == [compiled]


def test_a_chunked_prompt_takes_a_place() -> None:
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
    assert step(busy).increments() == [116]


def test_rides_leave_pages_for_decodes() -> None:
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
def test_the_strictest_running_limit_counts(
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


def test_long_contexts_shrink_rides() -> None:
    """The step without them takes longer, too, but by less than they add."""

    def ridden(per_pair: float) -> int:
        busy = engine(decoding=2)
        busy.flashmoa.costs = replace(COSTS, per_pair=per_pair)
        busy.flashmoa.options = Options(intra_turn="off", itl_ms="12")
        for req in busy.running.reqs:
            req.priority = None
        busy.open_stream("a", 25_000)
        busy.streams._open["a"].prefilled = 20_000
        built = step(busy)
        return max(built.increments(), default=20_000) - 20_000 if built.queues else 0

    assert ridden(0.0) == 62 and ridden(1e-9) == 30
    assert ridden(1e-7) == 0
