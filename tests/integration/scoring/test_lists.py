"""Lists of options and documents: their prefix is computed once, on any engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import httpx
import pytest

from flashmoa.engine import (
    EngineClient,
    PluginMissing,
)
from flashmoa.engine.local import LocalEngine, LocalEngines
from flashmoa.scoring import Scorer
from flashmoa.scoring.candidates import answer_candidate, with_question
from flashmoa.scoring.scorer import YES_OR_NO
from tests.integration.scoring.conftest import CHAT, EXACT
from tests.integration.support import (
    fetch_kv_state,
    start_special_engine,
    wait_until_idle,
)

pytestmark = pytest.mark.anyio


async def test_siblings_compute_their_prefix_once(
    client: EngineClient, words: Callable[[int, int], str]
) -> None:
    context, options = words(1500, 31), [words(8, 500 + number)[3:] for number in range(8)]
    alone = [await Scorer(client).select(context, [option]) for option in options]
    await client.flush_cache()
    found = await Scorer(client).select(context, options)
    assert found.options == options
    assert found.probabilities == pytest.approx([one.probabilities[0] for one in alone], abs=EXACT)
    assert found.usage.decoded_tokens == 0
    own = found.usage.prompt_tokens - found.usage.requests * 1500
    assert found.usage.computed_tokens is not None
    assert found.usage.computed_tokens <= 1500 + own + found.usage.requests
    everything = await Scorer(client).select(context, options, threshold=0)
    assert everything.chosen == options
    await wait_until_idle(client)


async def test_plain_engine_scores_alike_and_warns_once(
    client: EngineClient,
    plain_client: EngineClient,
    words: Callable[[int, int], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    context, options = words(600, 33), ["lakes", "hills", "temples", "food"]
    ours = await Scorer(client).select(context, options)
    plain = Scorer(plain_client)
    with caplog.at_level(logging.WARNING):
        found = await plain.select(context, options)
        await plain.select(CHAT, options)
    assert [one for one in caplog.messages if "others wait for the first" in one] == caplog.messages
    assert len(caplog.messages) == 1
    assert found.probabilities == pytest.approx(ours.probabilities, abs=EXACT)
    assert found.usage.decoded_tokens == 0
    # The siblings find the tokens of the first request in the cache.
    assert found.usage.computed_tokens is not None
    assert found.usage.computed_tokens < 2 * 600


async def test_plugin_scores_a_list_in_one_request(
    engine: LocalEngine, words: Callable[[int, int], str]
) -> None:
    paths: list[str] = []

    async def record(request: httpx.Request) -> None:
        paths.append(request.url.path)

    async with EngineClient(engine.url, timeout=60) as client:
        client._http.event_hooks = {"request": [record]}  # pyright: ignore[reportPrivateUsage]
        scorer = Scorer(client)
        for context in (words(40, 41), CHAT, [*CHAT, {"role": "assistant", "content": "No."}]):
            found = await scorer.select(context, ["lakes", "hills", "temples"])
            direct = await Scorer(client).score(
                with_question(context, f"hills\n{YES_OR_NO}"),
                [answer_candidate(context, answer) for answer in ("Yes", "No")],
                prompt_stream_id="none",
            )
            assert found.answers[1].logprobs == pytest.approx(direct.logprobs, abs=EXACT)
            assert found.usage.requests == 3 * direct.usage.requests
        assert paths.count("/v1/score") == 3


async def test_rerank_puts_the_most_relevant_documents_first(
    scorer: Scorer, plain_client: EngineClient
) -> None:
    documents = ["Tea grows in Ilam.", "Pokhara has a lake.", "Lukla has an airport."]
    ranking = await scorer.rerank("Where is a lake?", documents)
    scores = [one.score for one in ranking.documents]
    assert scores == sorted(scores, reverse=True)
    assert sorted(one.index for one in ranking.documents) == [0, 1, 2]
    assert all(documents[one.index] == one.document for one in ranking.documents)
    assert ranking.usage.requests > 0 and ranking.usage.decoded_tokens == 0
    best = await scorer.rerank("Where is a lake?", documents, top_n=1)
    assert [one.index for one in best.documents] == [ranking.documents[0].index]
    other = await scorer.rerank("Where is a lake?", documents, instruct="Judge.")
    assert [one.score for one in other.documents] != pytest.approx(scores, abs=1e-9)
    with pytest.raises(PluginMissing):
        await Scorer(plain_client).rerank("Where?", documents)
    with pytest.raises(ValueError, match="at least one document"):
        await scorer.rerank("Where?", [])


@pytest.mark.slow
async def test_engine_that_does_not_share_gets_one_request_first(
    engines: LocalEngines,
    model: Path,
    words: Callable[[int, int], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Siblings that wait in the queue together would all be computed in one forward."""
    context, options = words(600, 39), ["lakes", "hills", "temples", "food"]
    async with (
        start_special_engine(engines, model, "--flashmoa-intra-turn", "off") as engine,
        EngineClient(engine.url, timeout=60) as client,
        anyio.create_task_group() as group,
    ):
        assert [rank.shares for rank in (await client.info()).kv] == [False]
        group.start_soon(partial(client.prefill_only, text=words(6000, 40)))
        while not (await fetch_kv_state(client)).protected:  # noqa: ASYNC110 - it sends no event
            await anyio.sleep(0.01)
        with caplog.at_level(logging.WARNING):
            found = await Scorer(client).select(context, options)
    assert found.usage.computed_tokens is not None
    assert found.usage.computed_tokens < 2 * 600
    assert any("does not share prefixes" in one for one in caplog.messages)
