"""Staircases with aggregators that start over, since no tiny model does that by itself."""

from __future__ import annotations

import pytest

from flashmoa.moa import Model, Staircase
from tests.unit.moa.scripted_engine import scripted_engine

pytestmark = pytest.mark.anyio

NUMBERS = "one two three four five six seven eight nine ten"


async def test_repetitions_of_an_aggregator_that_starts_over_are_dropped() -> None:
    script = NUMBERS.replace(" ", " |").split("|")
    async with scripted_engine({"default": script}) as (_, client):
        model = Model(client)
        async with Staircase([model, model], model).answering("Count.") as run:
            pieces = [piece async for piece in run]
            result = await run.result()
        assert "".join(pieces) == result.text == NUMBERS
        assert [round_.finish_reason for round_ in result.rounds] == ["length", "stop"]
        assert result.dropped_words == 8 and not result.in_one_request_for
        result = await Staircase([model], model, drop_repeats=False).answer("Count.")
        assert len(result.text) > len(NUMBERS) and result.dropped_words == 0
