"""The intra-turn cache does the same as a naive oracle with sets of prefixes."""

from array import array
from types import SimpleNamespace

import numpy as np
import pytest
from flashmoa_sglang.scheduler import shared_prefill
from flashmoa_sglang.scheduler.request import RequestState
from flashmoa_sglang.scheduler.shared_prefill import FEWEST_SHARED, BatchTree, SharedPrefill
from flashmoa_sglang.sglang.releases import RELEASE
from hypothesis import given
from hypothesis import strategies as st

Prefix = tuple[int, ...]


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
SEQUENCES = st.lists(TOKENS, min_size=1, max_size=10)
PAGES = st.sampled_from([1, 2, 4])


@given(sequences=SEQUENCES, page=PAGES)
def test_a_batch_knows_each_page_that_it_computes(sequences: list[Prefix], page: int) -> None:
    turn, known = BatchTree(page), set[Prefix]()
    for tokens in sequences:
        array = np.array(tokens, dtype=np.int64)
        assert turn.match("anchor", array) == shared_pages(tokens, known, page)
        turn.add("anchor", array)
        known |= pages(tokens, page)


@given(requests=SEQUENCES, page=PAGES)
def test_levels_compute_each_unique_page_once(requests: list[Prefix], page: int) -> None:
    """A request that waits finds tokens cached a step later."""
    # Each token is repeated, so that waiting is worth it for all shared tokens.
    waiting = [tuple(t for t in tokens for _ in range(FEWEST_SHARED)) for tokens in requests]
    unique = set[Prefix]().union(*(pages(tokens, page) for tokens in waiting))
    cached, computed = set[Prefix](), 0
    for _step in range(len(waiting)):
        turn = BatchTree(page)
        held, ran = list[Prefix](), list[Prefix]()
        for tokens in waiting:
            start = shared_pages(tokens, cached, page)
            rest = np.array(tokens[start:], dtype=np.int64)
            anchor = tokens[:start]
            if turn.match(anchor, rest) >= FEWEST_SHARED:
                held.append(tokens)
                continue
            turn.add(anchor, rest)
            ran.append(tokens)
            computed += len(pages(tokens, page)) - start // page
        cached |= set[Prefix]().union(*(pages(tokens, page) for tokens in ran))
        waiting = held
    assert not waiting
    assert computed == len(unique)


def test_other_anchors_share_nothing() -> None:
    turn = BatchTree(1)
    tokens = np.arange(100, dtype=np.int64)
    turn.add(("node", "salt"), tokens)
    assert turn.match(("node", "salt"), tokens) == 100
    assert turn.match(("node", "other salt"), tokens) == 0


class Request:
    """A waiting request whose cached prefix is ``prefix`` tokens long."""

    def __init__(self, prefix: int, length: int) -> None:
        self.flashmoa = RequestState()
        self.prefix, self.length = prefix, length
        self.last_node = prefix
        # The last token is of the answer so far.
        self.origin_input_ids = array("q", range(length - 1))
        self.output_ids = array("q", [length - 1])
        self.return_hidden_states = False


@pytest.fixture
def batch(fake_release: None, monkeypatch: pytest.MonkeyPatch) -> SharedPrefill:
    """A batch of requests for the beginning of the same text."""
    monkeypatch.setattr(shared_prefill, "is_shareable", lambda _: True)
    monkeypatch.setattr(RELEASE, "cached_tokens", lambda req: req.prefix)
    monkeypatch.setattr(RELEASE, "longest_prefix", lambda req: req.length - 1)
    monkeypatch.setattr(RELEASE, "namespace", lambda _: None)
    return SharedPrefill(1)


def joins(batch: SharedPrefill, taken: list[Request], req: Request) -> bool:
    """Offer a request to the batch, which has room for it; return whether it joins."""
    adder = SimpleNamespace(can_run_list=taken, rem_chunk_tokens=None)
    batch.admit(lambda: taken.append(req), adder, req)
    return taken[-1:] == [req]


def test_a_request_waits_once(batch: SharedPrefill) -> None:
    taken: list[Request] = []
    assert joins(batch, taken, Request(0, 1000))
    # A request does not wait for few shared tokens.
    assert joins(batch, taken, Request(0, FEWEST_SHARED))
    waits = Request(0, 800)
    assert not joins(batch, taken, waits)
    # The wait did not help.
    assert joins(batch, taken, waits) and batch.avoided == 0


def test_an_answer_with_hidden_states_waits_for_no_other(batch: SharedPrefill) -> None:
    """SGLang returns the states of computed tokens only."""
    taken = [Request(0, 1000)]
    states = Request(0, 800)
    states.return_hidden_states = True
    assert joins(batch, taken, states)


@pytest.mark.parametrize(("waited_from", "prefix", "avoided"), [(500, 700, 200), (500, 100, 0)])
def test_savings_exclude_evicted_tokens(
    batch: SharedPrefill, waited_from: int, prefix: int, avoided: int
) -> None:
    req = Request(prefix, 1000)
    req.flashmoa.first_wait = waited_from
    assert joins(batch, [], req)
    assert batch.avoided == avoided
