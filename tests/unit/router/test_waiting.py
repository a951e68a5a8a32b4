"""Test that requests that wait for an engine hide no others, and do not wait for ever."""

from __future__ import annotations

from flashmoa.router.flops import TokenCount
from flashmoa.router.policies import EngineTraits, WaitingRequest
from flashmoa.router.prefix_aware import PrefixAware
from tests.unit.router.support import SIZE, blocks

DOCUMENT = [7] * 16


def keep_busy(routing: PrefixAware, limit: int, long: int) -> None:
    """Let two engines join: a saturated one, which has the document, and one with room."""
    for name in ("hot", "other"):
        routing.join(name, EngineTraits(TokenCount(), limit))
    routing.add_blocks("hot", blocks(DOCUMENT).hashes)
    routing.admit(WaitingRequest("long", blocks([1] * long)), "hot")
    routing.admit(WaitingRequest("short", blocks([2] * 2)), "other")


def test_every_waiting_request_is_considered_some_time() -> None:
    routing = PrefixAware(patience=1000.0, window=4, ageing=1 << 30, short=0, block_tokens=SIZE)
    keep_busy(routing, limit=20, long=40)
    # All of these wait for the engine that has their document, and fill the head of the queue.
    queue = [WaitingRequest(str(number), blocks([*DOCUMENT, number])) for number in range(9)]
    queue.append(WaitingRequest("stranger", blocks([3] * 4)))
    rounds = [routing.route(queue) for _ in range(4)]
    assert [one for one in rounds if one] == [{"stranger": "other"}]


def test_request_that_is_overtaken_again_and_again_loses_patience() -> None:
    routing = PrefixAware(patience=8.0, ageing=5, short=0, block_tokens=SIZE)
    keep_busy(routing, limit=40, long=100)
    held = WaitingRequest("held", blocks([*DOCUMENT, 1]))
    overtaken = 0
    while "held" not in (placed := routing.route([held])):
        assert placed == {}
        overtaken += 1
        stranger = WaitingRequest(f"stranger {overtaken}", blocks([3] * 4))
        assert routing.route([held, stranger]) == {stranger.request: "other"}
        routing.finish_prefill(stranger.request)
    # It saves 16 tokens, and the engine that has them has 98 more to compute first.
    assert placed == {"held": "other"} and overtaken == 2
