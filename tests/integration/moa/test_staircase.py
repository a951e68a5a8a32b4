"""Test staircases on real engines."""

from itertools import pairwise
from typing import Any

import anyio
import pytest

from flashmoa.engine import EngineClient
from flashmoa.link.link import Ahead
from flashmoa.moa import AggregationPrompt, Model, Result, Staircase, Steps
from flashmoa.moa.settings import RUNNING_USAGE, Order
from tests.integration.moa.agents import QUESTION
from tests.integration.support import wait_until_idle

PROMPT = AggregationPrompt("question-first", "Weigh these:", "\n{number}. ")
SAMPLING: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def staircase(pair: tuple[EngineClient, EngineClient], **more: Any) -> Staircase:
    small, large = pair
    lengths = (40, 25)
    proposers = [Model(small, sampling={**SAMPLING, "max_tokens": length}) for length in lengths]
    last = Model(large, sampling={**SAMPLING, "max_tokens": 50})
    return Staircase(proposers, last, prompt=PROMPT, **more)


def texts(result: Result) -> list[str]:
    """Return what every agent wrote."""
    return [agent.text for agent in result.agents]


def written(result: Result) -> int:
    """Return how many tokens the aggregator wrote."""
    assert result.final.usage is not None
    return result.final.usage.completion_tokens


@pytest.mark.parametrize("order", ["contiguous", "prefix-cached"])
async def test_linked_staircase_equals_unlinked(
    pair: tuple[EngineClient, EngineClient], order: Any
) -> None:
    ways: list[Ahead] = ["nothing", "text"]
    results = []
    for ahead in ways:
        for engine in pair:
            await engine.flush_cache()
        async with staircase(pair, ahead=ahead, steps=Steps(order=order)).answering(
            QUESTION
        ) as run:
            pieces = [piece async for piece in run]
            results.append(await run.result())
        assert "".join(pieces) == results[-1].text
    unlinked, linked = results
    assert unlinked.text == linked.text and texts(unlinked) == texts(linked)
    # The aggregator may write 50 tokens: 8, 16, and the rest of 32.
    assert len(linked.final.steps) == 3 and written(linked) == 50
    assert 0 < linked.time_to_first_token < linked.seconds
    streams = [round_.usage.prompt_stream for round_ in linked.final.steps if round_.usage]
    assert {use.status for use in streams if use is not None} == {"hit"}
    await wait_until_idle(pair[1])


async def test_an_engine_tells_each_token_of_an_answer_that_is_cut_into_chunks(
    pair: tuple[EngineClient, EngineClient],
) -> None:
    """A letter is a token of its own at most. Several answers at once keep HTTP busy."""
    counts: list[list[int]] = []

    async def ask(number: int) -> None:
        messages = [{"role": "user", "content": f"{QUESTION} {number}"}]
        sampling = {"temperature": 1, "max_tokens": 150, "regex": "[a-z]{2000}"}
        async with pair[0].chat(messages, **sampling, **RUNNING_USAGE) as deltas:
            told = [each.usage.completion_tokens async for each in deltas if each.usage]
        counts.append(told)

    async with anyio.create_task_group() as group:
        for number in range(12):
            group.start_soon(ask, number)
    # The usage at the end repeats the last count.
    assert counts == [[*range(1, 151), 150]] * 12


async def test_appended_chunks_are_prefilled_once(
    pair: tuple[EngineClient, EngineClient],
) -> None:
    recomputed: dict[str, list[int]] = {}
    computed: dict[str, int] = {}
    orders: list[Order] = ["contiguous", "prefix-cached"]
    for order in orders:
        steps = Steps(order=order)
        await pair[1].flush_cache()
        result = await staircase(pair, steps=steps).answer(QUESTION)
        usages = [round_.usage for round_ in result.final.steps if round_.usage is not None]
        # Tokens that were computed although the prompt of the round before had them.
        recomputed[order] = [
            before.prompt_tokens - (after.cached_tokens or 0) for before, after in pairwise(usages)
        ]
        # All computed tokens are counted without streams, which may also compute text that the
        # round before still writes.
        await pair[1].flush_cache()
        unlinked = await staircase(pair, steps=steps, ahead="nothing").answer(QUESTION)
        usages = [round_.usage for round_ in unlinked.final.steps if round_.usage is not None]
        computed[order] = sum(usage.prompt_tokens - (usage.cached_tokens or 0) for usage in usages)
    # The template's tokens at the end are computed again, and the answer so far.
    assert max(recomputed["prefix-cached"]) <= 8 + 24
    assert computed["contiguous"] > computed["prefix-cached"]


async def test_answer_ends_before_a_stop_text_that_two_rounds_write(
    pair: tuple[EngineClient, EngineClient],
) -> None:
    whole = await staircase(pair).answer(QUESTION)
    end = len(whole.final.steps[0].text)
    stop = whole.text[end - 6 : end + 6]
    stopped = await staircase(pair).answer(QUESTION, {"stop": [stop, "not there"]})
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.finish_reason == "stop" and len(stopped.final.steps) == 2
    for engine in pair:
        await wait_until_idle(engine)


@pytest.mark.parametrize("order", ["contiguous", "prefix-cached"])
async def test_chunks_that_do_not_fit_are_not_read(
    pair: tuple[EngineClient, EngineClient], monkeypatch: pytest.MonkeyPatch, order: Any
) -> None:
    steps = Steps(order=order)
    whole = await staircase(pair, steps=steps).answer(QUESTION)
    second = whole.final.steps[1].usage
    assert second is not None and not any(round_.out_of_room for round_ in whole.final.steps)
    # There is room for this answer after the second chunks, but not after the third ones.
    context = second.prompt_tokens + 40

    async def context_length(_: str) -> int:
        return context

    monkeypatch.setattr(pair[1], "context_length", context_length)
    sampling = {**SAMPLING, "max_tokens": 40}
    results = []
    for ahead in ("nothing", "text"):
        for engine in pair:
            await engine.flush_cache()
        proposers = staircase(pair).layers[0]
        last = Model(pair[1], sampling=sampling)
        cut = Staircase(proposers, last, prompt=PROMPT, steps=steps, ahead=ahead)
        results.append(await cut.answer(QUESTION))
    unlinked, linked = results
    assert [round_.out_of_room for round_ in linked.final.steps] == [False, False, True]
    assert unlinked.text == linked.text and written(linked) == 40
    await wait_until_idle(pair[1])
