"""A scoring call of a model client, told of and linked as its other calls are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autogen_core import CancellationToken
from autogen_core.models import CreateResult, LLMMessage, RequestUsage

from flashmoa.autogen._calls import Reporting
from flashmoa.completions import Watch
from flashmoa.engine import PromptUsage
from flashmoa.scoring import Candidate, Scorer, Scores

if TYPE_CHECKING:
    from flashmoa.autogen._client import FlashMoAChatCompletionClient

# Why agents after this one are not sent its answer as it is written.
_HELD = "its answer is scored, not written"


async def score(
    client: FlashMoAChatCompletionClient,
    messages: Sequence[LLMMessage],
    candidates: Sequence[Candidate],
    length_normalised: bool,
    cancellation_token: CancellationToken | None,
) -> Scores:
    """As :meth:`FlashMoAChatCompletionClient.score`."""
    prompt = client._process_create_args(messages, (), "auto", None, {}).messages
    extra_body: dict[str, Any] = client._create_args.get("extra_body") or {}
    scorer = Scorer(client.engine, template_args=extra_body.get("chat_template_kwargs"))
    observers = client._begin(_HELD, None)
    watch = Watch()
    with Reporting(observers, watch, raw=False) as report:
        offering = [one for one in observers if one.prompt_stream_id is not None]
        for other in offering[:-1]:
            other.give_back()
        asking = asyncio.ensure_future(
            scorer.score(
                [dict(message) for message in prompt],
                candidates,
                length_normalised=length_normalised,
                prompt_stream_id=offering[-1].prompt_stream_id if offering else None,
            )
        )
        if cancellation_token is not None:
            cancellation_token.link_future(asking)
        try:
            scores = await asking
        finally:
            asking.cancel()
        watch.usage = _usage(scores)
        report(_result(scores))
        return scores


def _usage(scores: Scores) -> PromptUsage:
    usage = scores.usage
    return PromptUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.decoded_tokens,
        cached_tokens=usage.cached_tokens,
        streamed_tokens=usage.streamed_tokens,
        late_tokens=usage.computed_tokens,
        prompt_stream=usage.prompt_stream,
    )


def _result(scores: Scores) -> CreateResult:
    usage = RequestUsage(prompt_tokens=scores.usage.prompt_tokens, completion_tokens=0)
    return CreateResult(content=scores.best, usage=usage, finish_reason="stop", cached=False)
