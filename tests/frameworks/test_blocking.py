"""Test that smolagents and DSPy, which call without an event loop, answer the same linked."""

from __future__ import annotations

from typing import Any

import dspy
import litellm
import openai
import pytest
import smolagents

from flashmoa.openai import OpenAI, instrument
from tests.frameworks.blocking import TOKENS, check_linked
from tests.frameworks.conftest import URLS
from tests.integration.openai.programs import TASK

pytestmark = [
    pytest.mark.usefixtures("clients"),
    # Of LiteLLM's own types and models, which newer pydantic does not like.
    pytest.mark.filterwarnings("ignore:Items? .* on TypedDict class:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning"),
    # Of the metadata in whole answers of SGLang 0.5.23, which are no texts, as OpenAI's should be.
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
]


async def test_smolagents_answers_the_same_linked(guide: str) -> None:
    models = [
        smolagents.OpenAIModel(
            "tiny", api_base=f"{url}/v1", api_key="none", temperature=0, max_tokens=TOKENS
        )
        for url in URLS
    ]
    for model in models:
        instrument(model)

    def answer(model: Any, task: str) -> str:
        # An answer of a tiny model is no code: it is told so, and asked once more for an answer.
        agent = smolagents.CodeAgent([], model, max_steps=2, verbosity_level=0)
        return str(agent.run(f"{guide[:2000]}\n{task}"))

    def program() -> list[str]:
        plan = answer(models[0], TASK)
        return [plan, answer(models[1], f"Check:\n{plan}")]

    await check_linked("smolagents", program)
    for model in models:
        model.client.close()


class Whole(dspy.ChatAdapter):
    """Takes an answer for the only field of an output, since tiny models write no fields."""

    def parse(self, signature: Any, completion: str) -> dict[str, Any]:
        return dict.fromkeys(signature.output_fields, completion)


async def test_dspy_answers_the_same_linked(guide: str, monkeypatch: pytest.MonkeyPatch) -> None:
    http = openai.DefaultHttpxClient()
    monkeypatch.setattr(litellm, "client_session", http)
    settings: Any = {"engine": "litellm", "api_key": "none", "cache": False}
    settings |= {"temperature": 0, "max_tokens": TOKENS}
    models = [dspy.LM("openai/tiny", api_base=f"{url}/v1", **settings) for url in URLS]
    write, review, end = (
        dspy.Predict(dspy.Signature(signature, f"{instructions}\n{guide[:2000]}"))
        for signature, instructions in [
            ("task -> plan", "Plan."),
            ("plan, who -> review", "Review."),
            ("plan, reviews -> result", "Improve the plan."),
        ]
    )

    def program() -> list[str]:
        with dspy.context(lm=models[0], adapter=Whole()):
            plan = write(task=TASK).plan
        with dspy.context(lm=models[1], adapter=Whole()):
            asked = [(review, {"plan": plan, "who": who}) for who in ("a guide", "a guest")]
            # These threads do not have the context of the run.
            reviews = [each.review for each in dspy.Parallel(num_threads=2)(asked)]
        with dspy.context(lm=models[0], adapter=Whole()):
            return [plan, *reviews, end(plan=plan, reviews="\n".join(reviews)).result]

    with OpenAI(base_url=URLS[0], http_client=http):
        await check_linked("DSPy", program)
