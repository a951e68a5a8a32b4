"""A scoring call of a model client, reported and linked as its other calls are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from autogen_core import CancellationToken

from flashmoa.engine import PromptUsage
from flashmoa.linking.observed_call import CallResult, ObservedCall
from flashmoa.scoring import Candidate, Scorer, Scores

# Why agents after this one are not sent its answer as it is written.
HELD = "its answer is scored, not written"


async def score(
    call: ObservedCall,
    scorer: Scorer,
    messages: Sequence[Mapping[str, Any]],
    candidates: Sequence[Candidate],
    length_normalised: bool,
    cancellation_token: CancellationToken | None,
) -> Scores:
    """Score candidates within a call; see :meth:`FlashMoAChatCompletionClient.score`."""
    with call:
        asking = asyncio.ensure_future(
            scorer.score(
                messages,
                candidates,
                length_normalised=length_normalised,
                prompt_stream_id=call.prompt_stream_id,
            )
        )
        if cancellation_token is not None:
            cancellation_token.link_future(asking)
        try:
            scores = await asking
        finally:
            asking.cancel()
        call.finish(CallResult(scores.best, _usage(scores), "stop", is_forwarded=False))
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
