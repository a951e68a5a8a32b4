"""The models of ``flashmoa_bench.family`` answer questions on a real engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from itertools import islice
from typing import Any

import pytest
from flashmoa_bench.family import AGGREGATOR, model_folder
from flashmoa_bench.family.prompts import AGGREGATION
from flashmoa_bench.family.questions import is_right, questions

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngines
from flashmoa.moa import MixtureOfAgents, Model
from flashmoa.workflow import Workflow

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

QUESTIONS = list(islice(questions(1, "easy", held_out=True), 8))
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 48}


@pytest.fixture(scope="module", params=["small", AGGREGATOR])
async def family(
    request: pytest.FixtureRequest, engines: LocalEngines
) -> AsyncGenerator[EngineClient]:
    folder = model_folder(request.param)
    started = await engines.start(folder, core=0, arguments=["--max-total-tokens", "8000"])
    try:
        async with EngineClient(started.url, timeout=60) as connected:
            yield connected
    finally:
        await started.stop()


async def test_single_model_answers_most_easy_questions(family: EngineClient) -> None:
    async with Workflow(family) as flow:
        answers = [
            flow.ask([{"role": "user", "content": question.text}], **GREEDY)
            for question in QUESTIONS
        ]
        texts = [str(await answer) for answer in answers]
    right = sum(map(is_right, QUESTIONS, texts))
    assert right >= len(QUESTIONS) * 0.6, texts


@pytest.mark.parametrize("family", [AGGREGATOR], indirect=True)
async def test_aggregator_finds_the_right_answer_among_others(family: EngineClient) -> None:
    random = Model(family, sampling={**GREEDY, "temperature": 0.8})
    greedy = Model(family, sampling=GREEDY)
    mixture = MixtureOfAgents(
        [[random, random, greedy], [greedy]], prompt=AGGREGATION["question-first"]
    )
    results = [await mixture.answer(question.text) for question in QUESTIONS]
    texts = [result.text for result in results]
    right = sum(map(is_right, QUESTIONS, texts))
    assert right >= len(QUESTIONS) * 0.6, texts
