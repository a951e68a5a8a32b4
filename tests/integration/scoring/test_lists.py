"""Lists of options and documents: one request, whose prefix is computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import httpx
import pytest

from flashmoa.engine import EngineClient, PluginMissing
from flashmoa.engine.local import LocalEngine
from flashmoa.scoring import Scorer
from flashmoa.scoring.questions import Context, answer_candidate, question_item
from flashmoa.scoring.scorer import YES_OR_NO
from tests.integration.scoring.conftest import CHAT, EXACT
from tests.integration.support import wait_until_idle

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
    own = found.usage.prompt_tokens - found.usage.requests * 1500
    assert found.usage.computed_tokens <= 1500 + own + found.usage.requests
    everything = await Scorer(client).select(context, options, threshold=0)
    assert everything.chosen == options
    await wait_until_idle(client)


async def test_a_list_is_scored_in_one_request(
    engine: LocalEngine, words: Callable[[int, int], str]
) -> None:
    paths: list[str] = []

    async def record(request: httpx.Request) -> None:
        paths.append(request.url.path)

    async with EngineClient(engine.url, timeout=60) as client:
        client._http.event_hooks = {"request": [record]}  # pyright: ignore[reportPrivateUsage]
        for context in (words(40, 41), CHAT, [*CHAT, {"role": "assistant", "content": "No."}]):
            found = await Scorer(client).select(context, ["lakes", "hills", "temples"])
            question = f"hills\n{YES_OR_NO}"
            direct = await Scorer(client).score(
                with_question(context, question),
                [answer_candidate(context, answer) for answer in ("Yes", "No")],
            )
            assert found.answers[1].logprobs == pytest.approx(direct.logprobs, abs=EXACT)
            assert found.usage.requests == 3 * direct.usage.requests
        assert paths == ["/v1/score"] * 6


def with_question(context: Context, question: str) -> Context:
    item = question_item(context, question)
    if isinstance(context, str):
        return context + item
    *before, last = cast("list[dict[str, Any]]", context)
    if last["role"] == "user":
        return [*before, {**last, "content": last["content"] + item}]
    return [*before, last, {"role": "user", "content": item}]


async def test_engine_without_the_plugins_routes_is_named(
    plain_client: EngineClient, words: Callable[[int, int], str]
) -> None:
    for call in (
        Scorer(plain_client).score(words(40, 41), [" the"]),
        Scorer(plain_client).select(CHAT, ["lakes"]),
        Scorer(plain_client).rerank("Where?", ["Here."]),
    ):
        with pytest.raises(PluginMissing, match="has no scoring routes of the flashmoa-sglang"):
            await call


async def test_rerank_puts_the_most_relevant_documents_first(
    scorer: Scorer,
) -> None:
    documents = ["Tea grows in Ilam.", "Pokhara has a lake.", "Lukla has an airport."]
    ranking = await scorer.rerank("Where is a lake?", documents)
    scores = [one.score for one in ranking.documents]
    assert scores == sorted(scores, reverse=True)
    assert sorted(one.index for one in ranking.documents) == [0, 1, 2]
    assert all(documents[one.index] == one.document for one in ranking.documents)
    assert ranking.usage.requests > 0
    best = await scorer.rerank("Where is a lake?", documents, top_n=1)
    assert [one.index for one in best.documents] == [ranking.documents[0].index]
    other = await scorer.rerank("Where is a lake?", documents, instruct="Judge.")
    assert [one.score for one in other.documents] != pytest.approx(scores, abs=1e-9)
    with pytest.raises(ValueError, match="at least one document"):
        await scorer.rerank("Where?", [])
