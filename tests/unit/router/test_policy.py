"""Test where the policy sends requests."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoa.router.cache_tables import EngineTraits
from flashmoa.router.flops import TOKENS, Measure
from flashmoa.router.policy import EngineCandidate, WaitingRequest, choose_engine
from flashmoa.router.saturation import FullLoad
from tests.unit.router.support import MEASURES, blocks, load, place, policy

DOCUMENT = [7] * 16
CANDIDATES = st.lists(
    st.builds(
        EngineCandidate,
        engine=st.uuids().map(str),
        matched=st.integers(0, 3),
        cost=st.integers(0, 4),
        delay=st.integers(0, 6),
        load=st.tuples(st.integers(0, 3), st.integers(0, 2), st.just(0)),
        saturated=st.booleans(),
        is_popular=st.booleans(),
    ),
    max_size=6,
)


@given(candidates=CANDIDATES)
def test_the_papers_choice_has_no_patience(candidates: list[EngineCandidate]) -> None:
    chosen = choose_engine(candidates, patience=0)
    free = [one for one in candidates if not one.saturated]
    if not free:
        assert chosen is None
        return
    assert chosen in free
    best = min((-one.matched, one.load) for one in free)
    assert (-chosen.matched, chosen.load) == best


@given(candidates=CANDIDATES, patience=st.sampled_from([1, 8]))
def test_choice_weighs_delay_against_saved_work(
    candidates: list[EngineCandidate], patience: int
) -> None:
    chosen = choose_engine(candidates, patience)
    longest = max((one.matched for one in candidates), default=0)
    if any(one.is_popular for one in candidates if one.matched == longest):
        patience = 1
    prices = {one.engine: one.delay + patience * one.cost for one in candidates}
    free = [one for one in candidates if not one.saturated]
    best = min((prices[one.engine] for one in free), default=None)
    if chosen is not None:
        assert not chosen.saturated and prices[chosen.engine] == best
    elif free:
        # A saturated engine with a longer match is cheaper than all that are free.
        least = max(one.matched for one in free if prices[one.engine] == best)
        assert any(
            one.saturated and one.matched > least and prices[one.engine] < (best or 0)
            for one in candidates
        )


@given(
    measure=MEASURES,
    engines=st.integers(1, 4),
    limit=st.integers(1, 200),
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), max_size=60),
)
def test_a_round_overfills_engines_by_one_request(
    measure: Measure, engines: int, limit: int, prompts: list[list[int]]
) -> None:
    routing = policy(engines, measure, limit)
    most = max((measure.work(0, len(prompt)) for prompt in prompts), default=1)
    queue = [WaitingRequest(str(number), blocks(prompt)) for number, prompt in enumerate(prompts)]
    placed = routing.route(queue)
    # Requests are placed in order of arrival, so no request is overtaken.
    assert list(placed) == [one.request for one in queue[: len(placed)]]
    loads = [load(routing, f"e{number}") for number in range(engines)]
    assert all(work < limit + most for work in loads)
    assert len(placed) == len(queue) or all(work >= limit for work in loads)
    # When all requests have ended, no load is left.
    for one in queue:
        routing.end(one.request)
    assert not any(routing.engines[f"e{number}"].load.total for number in range(engines))


@given(
    measure=MEASURES,
    engines=st.integers(1, 4),
    limit=st.integers(1, 100),
    patience=st.sampled_from([0.5, 1.0, 8.0]),
    rounds=st.lists(
        st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), max_size=12), max_size=5
    ),
)
def test_requests_wait_only_for_saturated_engines(
    measure: Measure, engines: int, limit: int, patience: float, rounds: list[list[list[int]]]
) -> None:
    routing = policy(engines, measure, limit, patience)
    names = [f"e{number}" for number in range(engines)]
    queue: list[WaitingRequest] = []
    for number, prompts in enumerate(rounds):
        queue += [WaitingRequest(f"{number}/{n}", blocks(one)) for n, one in enumerate(prompts)]
        placed = routing.route(queue)
        queue = [one for one in queue if one.request not in placed]
        room = {name for name in names if not routing.engines[name].is_saturated}
        for one in queue if room else ():
            matched = {name: routing.matched_tokens(name, one.blocks) for name in names}
            # Nothing is computed yet, so each engine has yet to compute even the matched tokens.
            finish = {
                name: routing.engines[name].load.total
                - measure.work(0, matched[name])
                + measure.work(matched[name], one.blocks.length)
                for name in names
            }
            # An engine stays idle only if it would finish the request later than another one.
            idle = [name for name in names if routing.engines[name].load.total == 0]
            assert all(finish[name] > min(finish.values()) for name in idle)
            assert any(matched[name] for name in names if name not in room)


@pytest.mark.parametrize(
    ("limit", "prefix", "rest", "requests", "slack"),
    [
        (200, 4, 60, 12, 0),  # A few tokens that all prompts share leave no engine idle.
        (400, 40, 20, 40, 4),  # A prefix of more work than its own is worth computing again.
    ],
)
def test_shared_prefixes_spread_over_engines(
    limit: int, prefix: int, rest: int, requests: int, slack: int
) -> None:
    routing = policy(4, TOKENS, limit, patience=8.0)
    prompts = [blocks([9] * prefix + [n] * rest) for n in range(requests)]
    placed = routing.route([WaitingRequest(str(n), one) for n, one in enumerate(prompts)])
    counts = [list(placed.values()).count(f"e{number}") for number in range(4)]
    assert sum(counts) == requests and 0 < max(counts) <= min(counts) + slack


def test_waiting_requests_delay_later_ones() -> None:
    """The work that waits for the first engine becomes more than its prefix saves."""
    routing = policy(2, TOKENS, 60, patience=2.0)
    document = [9] * 40
    assert routing.route([WaitingRequest("first", blocks([*document, 1] * 2))]) == {"first": "e0"}
    queue = [WaitingRequest(str(n), blocks([*document, *[n] * 30])) for n in range(2, 8)]
    placed = routing.route(queue)
    assert "2" not in placed and "e1" in placed.values()


def test_a_request_that_waits_is_overtaken() -> None:
    routing = policy(2, TOKENS, 10, patience=2.0)
    queue = [WaitingRequest("first", blocks(DOCUMENT)), WaitingRequest("other", blocks([1] * 4))]
    assert routing.route(queue) == {"first": "e0", "other": "e1"}
    # The sibling saves 16 of 17 tokens, so it waits for e0, and the stranger overtakes it.
    queue = [
        WaitingRequest("sibling", blocks([*DOCUMENT, 1])),
        WaitingRequest("stranger", blocks([2] * 4)),
    ]
    assert routing.route(queue) == {"stranger": "e1"}
    # The cousin saves 4 of 8 tokens; twice that is not more than the 8 that e0 has more to do.
    routing.finish_prefill("other")
    assert place(routing, "cousin", blocks([*DOCUMENT[:4], 3, 3, 3, 3])) == "e1"
    routing.add_blocks("e0", blocks(DOCUMENT).hashes[:2])
    assert load(routing, "e0") == 8
    assert routing.route(queue[:1]) == {"sibling": "e0"}


@pytest.mark.parametrize("batch", [10, 300, 1000])
def test_a_long_queue_for_a_full_engine_is_overtaken(batch: int) -> None:
    routing = policy(2, TOKENS, 10, patience=8.0)
    document = [7] * 16_000
    routing.add_blocks("e0", blocks(document).hashes)
    siblings = [
        WaitingRequest(str(number), blocks([*document, number + 8])) for number in range(batch)
    ]
    stranger = WaitingRequest("stranger", blocks([2] * 5))
    placed = routing.route([*siblings, stranger])
    assert placed.pop("stranger") == "e1" and set(placed.values()) == {"e0"}


@pytest.mark.parametrize(
    ("limit", "busy", "first", "engine"),
    [
        # Computing 16 tokens again takes less than waiting for 20; the others wait for either.
        (10, 20, "0", "e1"),
        # A prefix that is being computed is not computed again: e1 would not finish them sooner.
        (10, 0, "0", "e0"),
        # An engine with room for them attracts all once it has the prefix.
        (30, 40, "012", "e1"),
    ],
)
def test_siblings_go_where_they_finish_first(
    limit: int, busy: int, first: str, engine: str
) -> None:
    routing = policy(2, TOKENS, limit, patience=9.0)
    queue = [WaitingRequest(str(number), blocks([*DOCUMENT, number])) for number in range(3)]
    if busy:
        routing.add_blocks("e0", blocks(DOCUMENT).hashes)
        routing.admit(WaitingRequest("long", blocks([1] * busy)), "e0")
    assert routing.route(queue) == dict.fromkeys(first, engine)
    routing.finish_prefill("0")
    left = queue[len(first) :]
    assert routing.route(left) == {one.request: engine for one in left}


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1 << 30), measure=MEASURES, limit=st.one_of(st.none(), st.integers(1, 300))
)
def test_loads_are_always_those_of_the_work_left(
    seed: int, measure: Measure, limit: int | None
) -> None:
    """Requests arrive, are computed and end; engines report blocks, leave and join again."""
    dice = random.Random(seed)
    routing = policy(3, measure, limit)
    names, placed = list(routing.engines), list[str]()
    for number in range(80):
        engine = dice.choice(names)
        step = dice.choices(["arrive", "end", "report", "leave", "join"], [10, 5, 3, 1, 1])[0]
        if step == "arrive":
            prompt = blocks(dice.choices([0, 1], k=dice.randrange(1, 24)))
            if place(routing, str(number), prompt) is not None:
                placed.append(str(number))
        elif step == "end" and placed:
            name = placed.pop(dice.randrange(len(placed)))
            if dice.random() < 0.6:
                routing.finish_prefill(name)
            routing.end(name)
        elif step == "report":
            part = blocks(dice.choices([0, 1], k=12)).hashes
            dice.choice([routing.add_blocks, routing.remove_blocks])(engine, part)
        elif step == "leave":
            routing.leave(engine)
        elif step == "join" and engine not in routing.engines:
            routing.join(engine, EngineTraits(measure, limit and FullLoad(limit)))
        for tables in routing.engines.values():
            assert tables.load.total >= 0 and (tables.load.total > 0) == (tables.load.tokens > 0)
    for name in placed:
        routing.end(name)
    assert all(one.load.total == 0 for one in routing.engines.values())


def test_a_burst_of_siblings_spills_when_full() -> None:
    routing = policy(2, TOKENS, 30)
    siblings = [blocks([*DOCUMENT, number, number]) for number in range(14)]
    places = [place(routing, str(number), one) for number, one in enumerate(siblings)]
    # The first costs 18 tokens and each other one 2, until 30 are reached; then e1 does the same.
    assert places == ["e0"] * 7 + ["e1"] * 7
    assert place(routing, "late", siblings[0]) is None
    # The engine reports the document's first half, which is 8 tokens of work.
    routing.add_blocks("e1", siblings[0].hashes[:2])
    assert load(routing, "e1") == 22
    assert place(routing, "late", siblings[0]) == "e1"


def test_engine_that_left_is_forgotten() -> None:
    routing = policy(2, TOKENS, None)
    prompt = blocks([1] * 17)
    assert place(routing, "a", prompt) == "e0"
    routing.finish_prefill("a")
    routing.leave("e0")
    assert place(routing, "b", prompt) == "e1"
    routing.end("a")
    routing.change_full_load("e0", FullLoad(1))
    assert list(routing.engines) == ["e1"]
    routing.join("e0", EngineTraits())
    assert routing.matched_tokens("e0", prompt) == 0 and load(routing, "e0") == 0
    routing.leave("e0")
    routing.leave("e1")
    assert place(routing, "c", prompt) is None


def test_a_failed_request_removes_promised_blocks() -> None:
    routing = policy(1, TOKENS, None)
    prompt = blocks([1] * 17)
    place(routing, "a", prompt)
    assert routing.matched_tokens("e0", prompt) == 16
    routing.end("a")
    assert routing.matched_tokens("e0", prompt) == 0
    place(routing, "b", prompt)
    routing.finish_prefill("b")
    routing.end("b")
    assert (routing.matched_tokens("e0", prompt), load(routing, "e0")) == (16, 0)
    routing.remove_blocks("e0", prompt.hashes[2:])
    assert routing.matched_tokens("e0", prompt) == 8
    routing.remove_blocks("e0")
    assert routing.matched_tokens("e0", prompt) == 0
