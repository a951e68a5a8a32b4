"""The intra-turn cache does the same as a naive oracle with sets of prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from flashmoa_sglang.scheduler.request import RequestState
from flashmoa_sglang.scheduler.shared_prefill import (
    WORTH_WAITING,
    BatchTree,
    Shared,
    SharedPrefill,
    _Follower,
)
from hypothesis import given
from hypothesis import strategies as st

Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Request:
    tokens: Prefix
    # How many tokens it may compute in the batch, in addition to those that it shares.
    budget: int


def pages(tokens: Prefix, page: int) -> set[Prefix]:
    return {tokens[:end] for end in range(page, len(tokens) + 1, page)}


def shared_pages(tokens: Prefix, known: set[Prefix], page: int) -> int:
    """Look each prefix up, which is the naive way."""
    length = 0
    while length + page <= len(tokens) and tokens[: length + page] in known:
        length += page
    return length


# Few symbols and long runs, so that prefixes are shared, split and nested.
TOKENS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 5)), min_size=1, max_size=6).map(
    lambda runs: tuple(symbol for symbol, count in runs for _ in range(count))
)
REQUESTS = st.lists(st.builds(Request, TOKENS, st.integers(0, 40)), min_size=1, max_size=8)


@given(requests=REQUESTS, page=st.sampled_from([1, 2, 4]))
def test_a_batch_computes_each_unique_page_once(requests: list[Request], page: int) -> None:
    turn: BatchTree[int] = BatchTree(page)
    now: set[Prefix] = set()
    later: set[Prefix] = set()
    paths: list[Prefix] = []
    for number, request in enumerate(requests):
        tokens = np.array(request.tokens, dtype=np.int64)
        shared = turn.match("anchor", tokens)
        assert shared.now == shared_pages(request.tokens, now, page)
        assert shared.now + shared.later == shared_pages(request.tokens, now | later, page)
        if shared.now:
            # The owner comes before it and has computed, or shared, all of these tokens.
            assert shared.owner is not None and shared.owner < number
            assert paths[shared.owner][: shared.now] == request.tokens[: shared.now]
        end = min(len(request.tokens), shared.now + request.budget)
        if end < len(request.tokens):
            end = max(shared.now, end - end % page)
        turn.add(number, "anchor", tokens, end)
        fresh = pages(request.tokens[:end], page) - pages(request.tokens[: shared.now], page)
        assert not fresh & now, "a page is computed twice"
        now |= fresh
        later |= pages(request.tokens, page)
        paths.append(request.tokens[:end])


@given(requests=st.lists(TOKENS, min_size=1, max_size=10), page=st.sampled_from([1, 2, 4]))
def test_levels_compute_each_unique_page_once(requests: list[Prefix], page: int) -> None:
    """Without sharing within a forward, a request that waits finds tokens cached a step later."""
    # Each token is repeated, so that waiting is worth it for all shared tokens.
    waiting = [tuple(t for t in tokens for _ in range(WORTH_WAITING)) for tokens in requests]
    unique = set[Prefix]().union(*(pages(tokens, page) for tokens in waiting))
    cached: set[Prefix] = set()
    computed = 0
    for _step in range(len(waiting)):
        turn: BatchTree[int] = BatchTree(page)
        held: list[Prefix] = []
        ran: list[Prefix] = []
        for number, tokens in enumerate(waiting):
            start = shared_pages(tokens, cached, page)
            rest = np.array(tokens[start:], dtype=np.int64)
            anchor = tokens[:start]
            if turn.match(anchor, rest).take(within_forward=False) is None:
                held.append(tokens)
                continue
            turn.add(number, anchor, rest, len(rest))
            ran.append(tokens)
            computed += len(pages(tokens, page)) - start // page
        cached |= set[Prefix]().union(*(pages(tokens, page) for tokens in ran))
        waiting = held
    assert not waiting
    assert computed == len(unique)


def test_requests_with_different_anchors_share_nothing() -> None:
    turn: BatchTree[str] = BatchTree(1)
    tokens = np.arange(100, dtype=np.int64)
    turn.add("a", ("node", "salt"), tokens, 100)
    assert turn.match(("node", "other salt"), tokens) == Shared()


def test_a_request_waits_for_a_chunked_one_if_that_is_worth_it() -> None:
    turn: BatchTree[str] = BatchTree(1)
    tokens = np.arange(1000, dtype=np.int64)
    turn.add("long", None, tokens, 300)
    assert turn.match(None, tokens[:800]) == Shared(300, 500, "long")
    assert turn.match(None, tokens[:800]).take(within_forward=True) is None
    assert turn.match(None, tokens[:310]).take(within_forward=True) == 300
    assert turn.match(None, tokens[:310]).take(within_forward=False) is None
    assert turn.match(None, tokens[:20]).take(within_forward=False) == 0


def test_prefixes_evicted_while_a_request_waited_are_not_counted_as_saved() -> None:
    class Request:
        flashmoa = RequestState(first_wait=500)

    req = Request()
    batch = SharedPrefill(1, within_forward=True)
    adder = SimpleNamespace(can_run_list=[req])
    batch._take(lambda: None, adder, req, _Follower(100, 100, None))
    assert batch.avoided == 0
