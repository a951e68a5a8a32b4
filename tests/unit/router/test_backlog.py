"""Test what counts as work before a request: engines report blocks before they compute them."""

from __future__ import annotations

from flashmoa.router.flops import TokenCount
from flashmoa.router.policies import WaitingRequest
from tests.unit.router.support import blocks, place, policy


def test_engine_that_computes_is_not_idle_although_it_has_reported_all_it_has() -> None:
    routing = policy(2, TokenCount(), 40)
    first = blocks([1] * 20)
    assert place(routing, "a", first) == "e0"
    routing.add_blocks("e0", first.hashes)
    assert (routing.load("e0"), routing.backlog("e0")) == (0, 20)
    assert place(routing, "b", blocks([2] * 24)) == "e1"
    assert place(routing, "c", blocks([3] * 8)) == "e0"
    routing.finish_prefill("a")
    assert (routing.load("e0"), routing.backlog("e0")) == (8, 8)


def test_answers_that_take_long_count_as_two_forwards_at_most() -> None:
    routing = policy(1, TokenCount(), 40)
    prompts = [blocks([number] * 40) for number in range(1, 7)]
    for number, prompt in enumerate(prompts):
        routing.admit(WaitingRequest(str(number), prompt), "e0")
        routing.add_blocks("e0", prompt.hashes)
        assert routing.load("e0") == 0
        assert routing.backlog("e0") == min(40 * (number + 1), 2 * 40)
    for number in range(len(prompts)):
        routing.end(str(number))
    assert routing.backlog("e0") == 0
