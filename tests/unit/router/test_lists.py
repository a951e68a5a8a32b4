"""Test that the load of a list of prompts falls as its prompts are computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from flashmoa.router.blocks import token_blocks
from flashmoa.router.dispatcher import Dispatcher
from flashmoa.router.forwarding import PlacementObserver
from flashmoa.router.metrics import RouterMetrics
from flashmoa.router.policies import EngineTraits
from flashmoa.router.prefix_aware import PrefixAware

pytestmark = pytest.mark.anyio
# Ten prompts: 32 tokens of the first one, and 96 of the others that are not shared.
LIST = replace(token_blocks([1] * 32), length=128, items=10)
EVENT = b'data: {"index": 0}\n\n'


async def loads_during(pieces: Iterable[bytes], ending: str = "answered") -> list[int]:
    """Return an engine's load before a list's answer, after each piece, and at its end."""
    policy = PrefixAware()
    dispatcher = Dispatcher(policy)
    dispatcher.join("a", EngineTraits())
    metrics = RouterMetrics(dispatcher, [], policy)
    async with dispatcher.place(LIST) as placement:
        observer = PlacementObserver(metrics, "a", placement)
        loads = [policy.load("a")]
        for piece in pieces:
            observer.receive(piece)
            loads.append(policy.load("a"))
        observer.end(ending)
        return [*loads, policy.load("a")]


async def test_load_falls_with_each_event_of_a_streamed_answer() -> None:
    pieces = [EVENT, EVENT * 3, EVENT[:5], EVENT[5:], EVENT * 5, b"data: [DONE]\n\n"]
    # Before, and after 1, 4, 4, 5 and 10 prompts of ten.
    assert await loads_during(pieces) == [128, 115, 76, 76, 64, 0, 0, 0]


async def test_whole_answer_shows_that_all_prompts_are_computed() -> None:
    assert (await loads_during([b'{"scores": []}']))[-1] == 0
    assert (await loads_during([b'{"error": {}}'], "refused"))[-1] > 0


async def test_blocks_that_no_prompt_announced_are_those_of_a_list() -> None:
    policy = PrefixAware()
    dispatcher = Dispatcher(policy)
    dispatcher.join("a", EngineTraits())
    async with dispatcher.place(LIST), dispatcher.place(token_blocks([5] * 32)):
        assert policy.load("a") == 32 + 128
        dispatcher.add_blocks("a", LIST.hashes)
        assert policy.load("a") == 32 + 96
        dispatcher.add_blocks("a", token_blocks([2] * 64).hashes)
        assert policy.load("a") == 32 + 32
        # Further ones are answers, or prompts of others; they are no news of the single prompt.
        dispatcher.add_blocks("a", token_blocks([3] * 640).hashes)
        assert policy.load("a") == 32
