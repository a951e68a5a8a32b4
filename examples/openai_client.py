"""Link two calls of OpenAI's client: a review's prompt is prefilled while the draft is written.

python examples/openai_client.py [--engine http://HOST:30000 --model NAME]
"""

from __future__ import annotations

from typing import Any

from engines import GUIDE, one_engine, one_engine_arguments, run_program
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from flashmoa import EngineClient, Text, Workflow

SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 64}


def draft_prompt() -> list[dict[str, Any]]:
    """Return the prompt of the draft."""
    return [{"role": "user", "content": "Draft a plan for three days in Nepal."}]


def review_prompt(draft: Text | str) -> list[dict[str, Any]]:
    """Return the prompt of the review; the draft may still be unfinished."""
    guide = GUIDE.read_text()
    return [
        {"role": "system", "content": f"{guide}\n\nYou check plans against this guide."},
        {"role": "user", "content": f"Check this plan:\n{draft}"},
    ]


async def review_linked(openai: AsyncOpenAI, engine: EngineClient, model: str) -> ChatCompletion:
    """Return the review of a draft, linked to it."""
    async with Workflow(engine) as flow:
        draft = flow.text("draft")
        review = flow.expect(review_prompt(draft))
        chunks = await openai.chat.completions.create(
            model=model,
            messages=draft_prompt(),  # type: ignore[arg-type]
            stream=True,
            **SETTINGS,
        )
        with draft:
            async for chunk in chunks:
                if chunk.choices:
                    draft.write(chunk.choices[0].delta.content or "")
        return await openai.chat.completions.create(
            model=model,
            messages=await review.messages(),  # type: ignore[arg-type]
            extra_body=review.claim(),
            **SETTINGS,
        )


async def review_unlinked(openai: AsyncOpenAI, model: str) -> ChatCompletion:
    """Return the same review without FlashMoA."""
    draft = await openai.chat.completions.create(
        model=model,
        messages=draft_prompt(),  # type: ignore[arg-type]
        **SETTINGS,
    )
    return await openai.chat.completions.create(
        model=model,
        messages=review_prompt(draft.choices[0].message.content or ""),  # type: ignore[arg-type]
        **SETTINGS,
    )


async def main() -> None:
    """Print a linked review, how its prompt was computed, and whether it is the same unlinked."""
    arguments = one_engine_arguments(__doc__)
    async with (
        one_engine(arguments.engine) as url,
        EngineClient(url) as client,
        AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none") as openai,
    ):
        review = await review_linked(openai, client, arguments.model)
        print(review.choices[0].message.content)
        print(review.usage and review.usage.model_dump_json(indent=2))
        same = await review_unlinked(openai, arguments.model)
    print(
        "The same unlinked:", same.choices[0].message.content == review.choices[0].message.content
    )


if __name__ == "__main__":
    run_program(main)
