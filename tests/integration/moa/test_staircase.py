"""Staircases on real engines."""

from __future__ import annotations

from itertools import islice, pairwise
from typing import Any

import pytest

from flashmoa.engine import EngineClient
from flashmoa.linking.link import Ahead
from flashmoa.moa import AggregationPrompt, MixtureFailed, Model, Schedule, Staircase
from flashmoa.moa.chunks import ChunkedText
from flashmoa.workflow import Answer, Workflow
from tests.integration.moa.agents import QUESTION
from tests.integration.support import settled

pytestmark = pytest.mark.anyio

PROMPT = AggregationPrompt("question-first", "Weigh these:", "\n{number}. ")
SAMPLING: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def staircase(pair: tuple[EngineClient, EngineClient], **more: Any) -> Staircase:
    small, large = pair
    lengths = (40, 25)
    proposers = [Model(small, sampling={**SAMPLING, "max_tokens": length}) for length in lengths]
    last = Model(large, sampling={**SAMPLING, "max_tokens": 50})
    return Staircase(proposers, last, prompt=PROMPT, **more)


def test_schedules() -> None:
    assert list(islice(Schedule(), 7)) == [8, 16, 32, 64, 128, 128, 128]
    assert list(islice(Schedule(4, 1.5, 10), 4)) == [4, 6, 9, 10]
    with pytest.raises(ValueError, match="first is 0; a chunk needs"):
        Schedule(first=0)


async def test_chunks_do_not_depend_on_how_events_cut_a_text(
    pair: tuple[EngineClient, EngineClient],
) -> None:
    whole = "".join(chr(97 + n % 26) for n in range(150))
    async with Workflow(pair[0]) as flow:
        for size in (1, 7, 150):
            answer = Answer("p")
            for begin in range(0, len(whole), size):
                answer.write(whole[begin : begin + size])
            answer.close()
            proposal = ChunkedText(flow, answer, "1. ", Schedule())
            await proposal.cut()
            chunks = [await proposal.chunk(number) for number in range(4)]
            assert [len(chunk.removeprefix("1. ")) for chunk in chunks] == [32, 64, 54, 0]
            assert "".join(chunk.removeprefix("1. ") for chunk in chunks) == whole
            assert proposal.ends_before(3) and not proposal.ends_before(2)


@pytest.mark.parametrize("order", ["contiguous", "rounds", "interleaved"])
async def test_linked_and_unlinked_are_the_same(
    pair: tuple[EngineClient, EngineClient], order: Any
) -> None:
    ways: list[Ahead] = ["nothing", "text"]
    results = []
    for ahead in ways:
        for engine in pair:
            await engine.flush_cache()
        steps = staircase(pair, ahead=ahead, order=order)
        async with steps.answering(QUESTION) as run:
            pieces = [piece async for piece in run]
            results.append(await run.result())
        assert "".join(pieces) == results[-1].text
    unlinked, linked = results
    assert unlinked.text == linked.text and unlinked.proposals == linked.proposals
    # The aggregator may write 50 tokens: 8, 16, and the rest of 32.
    assert len(linked.rounds) == 3 and linked.tokens == 50
    assert 0 < linked.time_to_first_token < linked.seconds
    streams = [done.usage.prompt_stream for done in linked.rounds if done.usage]
    assert {use.status for use in streams if use is not None} == {"hit"}
    await settled(pair[1])


async def test_nothing_is_computed_twice_where_chunks_are_appended(
    pair: tuple[EngineClient, EngineClient],
) -> None:
    again: dict[str, list[int]] = {}
    computed: dict[str, int] = {}
    for order in ("contiguous", "rounds", "interleaved"):
        await pair[1].flush_cache()
        result = await staircase(pair, order=order).answer(QUESTION)
        usage = [done.usage for done in result.rounds if done.usage is not None]
        # Of each prompt, how much was computed although it stood in the one before.
        again[order] = [
            before.prompt_tokens - (after.cached_tokens or 0) for before, after in pairwise(usage)
        ]
        # Without streams, which may compute what the round before is just writing, too.
        await pair[1].flush_cache()
        unlinked = await staircase(pair, order=order, ahead="nothing").answer(QUESTION)
        usage = [done.usage for done in unlinked.rounds if done.usage is not None]
        computed[order] = sum(one.prompt_tokens - (one.cached_tokens or 0) for one in usage)
    # A prompt's end: the template's, and in rounds the answer so far, which moves on.
    assert max(again["interleaved"]) <= 8
    assert max(again["rounds"]) <= 8 + 24
    assert computed["contiguous"] > max(computed["rounds"], computed["interleaved"])


@pytest.mark.parametrize("order", ["rounds", "interleaved"])
async def test_who_begins_anew_in_every_round_says_it_once(
    pair: tuple[EngineClient, EngineClient], order: Any
) -> None:
    small = pair[0]
    numbers = "one two three four five six seven eight nine ten"
    steps = staircase(pair, order=order)
    last = Model(small, sampling={"temperature": 0, "regex": numbers, "max_tokens": 400})
    again = Staircase(steps.proposers, last, prompt=PROMPT, order=order)
    async with again.answering(QUESTION) as run:
        pieces = [piece async for piece in run]
        result = await run.result()
    assert "".join(pieces) == result.text == numbers
    assert result.dropped_words > 0
    assert result.rounds[0].finish_reason == "length"
    assert result.rounds[-1].finish_reason == "stop"
    again = Staircase([last], last, prompt=PROMPT, order=order, drop_repeats=False)
    result = await again.answer(QUESTION)
    assert len(result.text) > len(numbers) and result.dropped_words == 0
    await settled(small)


async def test_a_proposer_that_fails_is_missed_and_no_more(
    pair: tuple[EngineClient, EngineClient],
) -> None:
    steps = staircase(pair)
    broken = Model(pair[0], sampling={**SAMPLING, "max_tokens": -1})
    alone = Staircase([steps.proposers[0]], steps.aggregator, prompt=PROMPT)
    both = Staircase([steps.proposers[0], broken], steps.aggregator, prompt=PROMPT)
    assert (await alone.answer(QUESTION)).text == (await both.answer(QUESTION)).text
    with pytest.raises(MixtureFailed, match="no agent answered"):
        await Staircase([broken], steps.aggregator).answer(QUESTION)
    with pytest.raises(MixtureFailed, match="the aggregator failed"):
        async with EngineClient("http://127.0.0.1:9") as nowhere:
            await Staircase(steps.proposers, Model(nowhere)).answer(QUESTION)
    for engine in pair:
        await settled(engine)


@pytest.mark.parametrize("order", ["contiguous", "rounds", "interleaved"])
async def test_chunks_without_room_are_not_read(
    pair: tuple[EngineClient, EngineClient], order: Any
) -> None:
    whole = await staircase(pair, order=order).answer(QUESTION)
    second = whole.rounds[1].usage
    assert second is not None and not any(done.out_of_room for done in whole.rounds)
    # An answer for which there is room behind the second chunks, and not behind the third ones.
    most = (await pair[1].info()).context_length - second.prompt_tokens
    said = {"temperature": 0, "regex": "[a-e ]{60,90}", "max_tokens": most}
    results = []
    for ahead in ("nothing", "text"):
        for engine in pair:
            await engine.flush_cache()
        steps = staircase(pair, order=order, ahead=ahead)
        last = Model(pair[1], sampling=said)
        cut = Staircase(steps.proposers, last, prompt=PROMPT, order=order, ahead=steps.ahead)
        results.append(await cut.answer(QUESTION))
    unlinked, linked = results
    assert [done.out_of_room for done in linked.rounds] == [False, False, True]
    assert linked.rounds[-1].finish_reason == "stop"
    assert unlinked.text == linked.text and len(linked.text) >= 60
    await settled(pair[1])


async def test_a_staircase_that_is_left_gives_everything_back(
    pair: tuple[EngineClient, EngineClient],
) -> None:
    small, large = pair
    slow = [Model(engine, sampling={**SAMPLING, "max_tokens": 2000}) for engine in pair]
    for engine in pair:
        await engine.flush_cache()
    async with Staircase([slow[0]], slow[1], prompt=PROMPT).answering(QUESTION) as run:
        async for _ in run:
            break
    # An answer to its end would be in the cache.
    assert (await settled(small)).evictable < 2000
    assert (await settled(large)).evictable < 2000
