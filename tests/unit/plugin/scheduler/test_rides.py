"""Mixed steps: the tokens of streams and prompts that ride along with decodes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from flashmoa_sglang.costs import UNMEASURED
from flashmoa_sglang.scheduler import apply
from flashmoa_sglang.scheduler.request import is_increment, state_of
from flashmoa_sglang.sglang.options import Options

from tests.unit.plugin.scheduler.fakes import COSTS, Build, engine, request, step

pytestmark = pytest.mark.usefixtures("fake_release")
SETTINGS = {"mixed": True, "full": False, "logprobs": False}
FINAL = request(40, 5, stream="b", final=True)


def chunked(total: int = 2000, computed: int = 1600) -> Any:
    """Make a prompt between two of its chunks."""
    req = request(total, 5)
    req.computed = computed
    return req


@pytest.mark.parametrize("full", [False, True])
def test_streams_ride_before_waiting_requests(*, full: bool) -> None:
    busy = engine(decoding=2, full=full, a=2500)
    newcomer, waiting = request(7, 5), [request(10, 5), request(20, 5)] if full else []
    busy.waiting_queue = [*waiting]
    built = step(busy, Build(takes=is_increment, newcomers=[newcomer]))
    assert built.clients() == [] and built.increments() == [62]
    assert built.settings == {**SETTINGS, "chunk": 64, "rows": 16}
    assert busy.waiting_queue == [*waiting, newcomer] and busy.running.batch_is_full == full
    assert busy.chunked_prefill_size == 8192 and not busy.is_mixed_chunk
    assert busy.flashmoa.rode_along == 62 and not busy.flashmoa.only_streams


def test_increments_know_how_long_decodes_wait_for_them() -> None:
    def delays(decoding: int, joins: Any, **streams: int) -> list[float]:
        batch = Build(takes=joins)
        step(engine(decoding=decoding, **streams), batch)
        return [state_of(req).delay for req in batch.queues[0] if is_increment(req)]

    assert delays(2, is_increment, a=40, b=22) == pytest.approx(
        [COSTS.added(2, 62) * part / 62 for part in (40, 22)]
    )
    assert delays(0, is_increment, a=40) == [0.0]


@pytest.mark.parametrize(
    ("mixed", "others", "expected"),
    [
        (True, 0, COSTS.added(2, 40, 5000)),
        (False, 0, COSTS.prefill(40, 5000)),
        # The forward would have run without the increments.
        (False, 100, COSTS.prefill(140) - COSTS.prefill(100) + COSTS.per_pair * 40 * 5000),
    ],
)
def test_the_delay_of_decodes(mixed: bool, others: int, expected: float) -> None:
    assert apply._delay(COSTS, 2, 40, 5000, others, mixed=mixed) == pytest.approx(expected)
    assert apply._delay(UNMEASURED, 2, 40, 5000, others, mixed=mixed) is None


@pytest.mark.parametrize(
    ("given", "rides", "mixed"),
    [
        ({}, [62], True),
        # It is the first step after a prefill of others.
        ({"last_batch": SimpleNamespace(reqs=[request(400, 5)])}, [62], True),
        ({"chunked_prefill_size": 60}, [60], True),
        ({"options": Options(intra_turn="off", itl_budget=1.0)}, [], False),
        ({"no_rides": "the engine decodes speculatively"}, [], False),
    ],
)
def test_streams_ride_as_the_engine_allows(
    given: dict[str, Any], rides: list[int], mixed: bool
) -> None:
    busy = engine(decoding=2)
    # Known text of a prompt does not ride.
    busy.open_stream("resting", 5000, grows=False)
    busy.open_stream("a", 2500)
    for name, value in given.items():
        setattr(busy.flashmoa if name in ("options", "no_rides") else busy, name, value)
    built = step(busy)
    assert built.increments() == rides and bool(built.queues) == bool(rides)
    built = step(busy, waiting_queue=[FINAL])
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
    busy.waiting_queue = [request(300, 5)]
    built = step(busy)
    assert built.queues and not built.increments()
    busy.open_stream("small", 40, output=1, ended=True)
    assert step(busy).increments() == [40, 22]
    busy.streams.end("small")
    assert step(busy, waiting_queue=[]).increments() == [62]


def test_many_streams_get_large_increments() -> None:
    busy = engine(decoding=2, **{f"n{number}": 20 for number in range(299)})
    assert not step(busy).queues
    busy.open_stream("long", 140)
    assert step(busy).increments() == [62]
    # Each of a few streams gets a small increment.
    busy = engine(decoding=2, **{f"n{number}": 20 for number in range(20)})
    assert step(busy).increments() == [20, 20, 20]


@pytest.mark.parametrize("joins", [True, False])
def test_streams_ride_with_log_probabilities(*, joins: bool) -> None:
    """SGLang would mix nothing with log-probabilities, and gets its flag back afterwards."""
    busy = engine(decoding=2, a=2500)
    busy.running.return_logprob = busy.running.reqs[0].return_logprob = True
    built = step(busy, Build(takes=lambda _: joins))
    assert built.increments() == [62] and built.settings["mixed"]
    assert not built.settings["logprobs"] and busy.running.return_logprob


def test_prompts_ride_while_there_are_streams() -> None:
    busy = engine(decoding=2)
    final = request(40, 5, stream="a", final=True)
    for waiting in ([final], [request(400, 5, stream="a", final=True)], [final, request(20, 5)]):
        built = step(busy, waiting_queue=waiting)
        assert built.clients() == waiting
        assert built.settings["mixed"] and built.settings["chunk"] == 256
        assert not busy.is_mixed_chunk and busy.chunked_prefill_size == 8192
    assert not step(busy, waiting_queue=[request(40, 5)]).settings["mixed"]
    busy.open_stream("b", 5)
    assert step(busy).settings["mixed"]
    # The rest of a chunked prompt rides, too.
    busy = engine(decoding=2, full=True, a=5)
    built = step(busy, waiting_queue=[request(7000, 5)], chunked_req=chunked())
    assert built.settings == {**SETTINGS, "chunk": 256, "full": True, "rows": 0}
    # Streams take the tokens that prompts leave.
    built = step(engine(decoding=2, a=2500), waiting_queue=[request(10, 5)])
    assert built.increments() == [116]


@pytest.mark.parametrize(
    ("room", "given"),
    [
        # The rest, a page before and after the rest, and two tokens of each decode.
        (400 + 2 + 8, {"chunked_req": chunked()}),
        (300 + 20 + 2 + 8, {"waiting_queue": [request(300, 20), request(1, 1)]}),
    ],
)
def test_a_prompt_rides_while_its_rest_fits(room: int, given: dict[str, Any]) -> None:
    """SGLang retracts no decode in a step that prefills something."""
    busy = engine(decoding=4, a=5)
    for free in (room, room - 1):
        busy.tree_cache.free = free
        assert step(busy, **given).settings["mixed"] == (free == room)


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
    busy = engine(decoding=2, a=5)
    assert step(busy, waiting_queue=[request(400, 5)]).settings["mixed"]
    vars(busy.waiting_queue[0]).update(of_request)
    built = step(busy, **given)
    assert not built.settings["mixed"] and built.settings["chunk"] == 8192


def test_nothing_rides_beside_a_beam_search() -> None:
    """SGLang would compute such a step without its decodes."""
    busy = engine(decoding=2, a=2500)
    assert step(busy).settings["mixed"]
    busy.running.reqs[0].beam_group = SimpleNamespace(beam_width=4)
    # As where nothing may ride: a forward of the stream's own, after some decode steps.
    for _ in range(20):
        built = step(busy, Build(takes=is_increment))
        assert not built.settings.get("mixed")
        if built.increments():
            break
    assert built.increments() == [1024] and busy.flashmoa.steps_without_streams == 0


def test_a_chunked_prompt_takes_a_place() -> None:
    busy = engine(decoding=2, a=5)
    busy.max_running_requests = 3
    busy.chunked_req, busy.waiting_queue = chunked(), [request(400, 5)]
    # SGLang cannot mix this request, but it has no place in the step's forward.
    busy.waiting_queue[0].return_logprob = True
    assert step(busy).settings["mixed"]


@pytest.mark.parametrize("decoding", [0, 2])
def test_streams_do_not_wait_for_a_grammar(decoding: int) -> None:
    """The request joins no batch of streams: nobody knows whether it can be mixed."""
    busy = engine(decoding=decoding, a=2500)
    grammars = busy.grammar_manager
    grammars.ready = [compiled] = [request(400, 5)]
    waited: list[bool] = []
    build = Build(takes=lambda _: waited.append(busy.grammar_manager.has_waiting_grammars()))
    built = step(busy, build)
    assert built.increments() and built.settings["mixed"] == bool(decoding)
    assert waited == [False] and busy.grammar_manager is grammars
    assert busy.waiting_queue == [compiled]


def test_a_compiled_grammar_joins_without_a_batch() -> None:
    busy = engine(decoding=2, a=5)
    busy.grammar_manager.ready = [compiled] = [request(400, 5)]
    assert not step(busy).queues and busy.waiting_queue == [compiled]


def test_rides_leave_pages_for_decodes() -> None:
    busy, kept = engine(decoding=2, a=2500), list[bool]()

    def build(scheduler: Any) -> Any:
        kept.append(scheduler.flashmoa.needs_pages)
        return Build()(scheduler)

    step(busy, build)
    busy.flashmoa.no_rides = "of the test"
    step(busy, build, waiting_queue=[request(400, 5)])
    # Stock SGLang mixes all prefill if the user wants it.
    step(busy, build, is_mixed_chunk=True)
    assert kept == [True, False, True]


@pytest.mark.parametrize(
    ("limits", "priorities", "rides"),
    [
        ("", (None, None), True),
        ("50", (None, None), True),
        # A step of two requests takes 10 ms, and 62 tokens add 1 ms.
        ("10.2", (None, None), False),
        ("50,5=10.2", (None, 5), False),
        ("50,5=10.2", (None, 4), True),
        ("5=10.2", (None, None), True),
        ("10.2,5=50", (5, 5), True),
    ],
)
def test_the_strictest_running_limit_counts(
    limits: str, priorities: tuple[int | None, ...], rides: bool
) -> None:
    busy, build = engine(decoding=2, a=5000), Build()
    busy.flashmoa.options = Options(intra_turn="off", itl_ms=limits)
    for req, priority in zip(busy.running.reqs, priorities, strict=True):
        req.priority = priority
    for _ in range(10):
        step(busy, build)
    assert any(is_increment(req) for queue in build.queues for req in queue) == rides


@pytest.mark.parametrize(("per_pair", "ridden"), [(0.0, [62]), (1e-9, [30]), (1e-7, [])])
def test_long_contexts_shrink_rides(per_pair: float, ridden: list[int]) -> None:
    """A long context makes a decode step longer, but less than it makes a ride longer."""
    busy = engine(decoding=2, a=25_000)
    busy.flashmoa.costs = replace(COSTS, per_pair=per_pair)
    busy.flashmoa.options = Options(intra_turn="off", itl_ms="12")
    for req in busy.running.reqs:
        req.priority = None
    busy.streams._open["a"].prefilled = 20_000
    assert [end - 20_000 for end in step(busy).increments()] == ridden
