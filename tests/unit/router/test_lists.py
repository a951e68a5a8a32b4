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
from flashmoa.router.prompts import count_samples

pytestmark = pytest.mark.anyio
# Ten prompts: 32 tokens of the first one, and 96 of the others that are not shared.
LIST = replace(token_blocks([1] * 32), length=128, items=10)
DONE = b"data: [DONE]\n\n"


def events(*indexes: int) -> bytes:
    """Return events that each belong to the prompt with this number."""
    return b"".join(
        b'data: {"text": "\\"index\\": 9", "index": %d}\n\n' % index for index in indexes
    )


async def loads_during(
    pieces: Iterable[bytes], ending: str = "answered", samples: int = 1
) -> list[int]:
    """Return an engine's load before a list's answer, after each piece, and at its end."""
    policy = PrefixAware()
    dispatcher = Dispatcher(policy)
    dispatcher.join("a", EngineTraits())
    metrics = RouterMetrics(dispatcher, [], policy)
    async with dispatcher.place(LIST) as placement:
        observer = PlacementObserver(metrics, "a", placement, samples)
        loads = [policy.load("a")]
        for piece in pieces:
            observer.receive(piece)
            loads.append(policy.load("a"))
        observer.end(ending)
        return [*loads, policy.load("a")]


async def test_load_falls_with_each_event_of_a_streamed_answer() -> None:
    one = events(4)
    pieces = [events(0), events(1, 2, 3), one[:-1], one[-1:], events(*range(5, 10)), DONE]
    # Before, and after 1, 4, 4, 5 and 10 prompts of ten.
    assert await loads_during(pieces) == [128, 115, 76, 76, 64, 0, 0, 0]


async def test_prompt_of_a_list_counts_with_its_first_event_only() -> None:
    """Each token of an answer is an event, on routes that generate."""
    pieces = [events(3, 3, 3), events(3) * 9, events(8, 3)]
    assert await loads_during(pieces) == [128, 115, 115, 102, 0]


async def test_answers_to_one_prompt_count_once() -> None:
    pieces = [events(7), events(6), events(5)]
    assert await loads_during(pieces, samples=2) == [128, 115, 115, 102, 0]


@pytest.mark.parametrize(
    ("body", "samples"),
    [({}, 1), ({"n": 3}, 3), ({"sampling_params": {"n": 2}}, 2), ({"n": None}, 1), ({"n": "x"}, 1)],
)
def test_number_of_answers_to_a_prompt_is_in_the_body(
    body: dict[str, object], samples: int
) -> None:
    assert count_samples(body) == samples


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
