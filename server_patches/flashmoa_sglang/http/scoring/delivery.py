"""Sends the results of a list as they come, or ends the work on it when its client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect

from flashmoa_sglang.http.errors import ApiError, EngineFailed
from flashmoa_sglang.http.scoring.answers import Form, usage_fields
from flashmoa_sglang.http.scoring.forwards import ItemScores, ListScorer, ScoredPrompt

if TYPE_CHECKING:
    from fastapi import Request

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def stream(
    scorer: ListScorer, prompts: Sequence[ScoredPrompt], form: Form
) -> AsyncGenerator[str]:
    """Yield an event for each result as soon as it is there, and one with the rest at the end."""
    results: asyncio.Queue[ItemScores | None] = asyncio.Queue()
    scorer.on_scores = results.put_nowait
    work = asyncio.create_task(scorer.run(prompts))
    work.add_done_callback(lambda _: results.put_nowait(None))
    try:
        while (scores := await results.get()) is not None:
            yield _event(form.item(scores))
        await work
        yield _event({**form.rest(), "usage": usage_fields(scorer.usage, scorer.stream)})
    except ApiError as error:
        yield _event(error.body())
    except Exception:
        logger.exception("A list of scores has failed")
        yield _event(EngineFailed("The engine has failed; see its log").body())
    finally:
        work.cancel()
        await asyncio.wait([work])
    yield "data: [DONE]\n\n"


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do work for a client, and return its result.

    Raises: ClientDisconnect if the client leaves first; the work is cancelled.
    """

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    done = asyncio.create_task(work)
    tasks: list[asyncio.Task[Any]] = [done, asyncio.create_task(leave())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ClientDisconnect
        return done.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _event(fields: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(fields)}\n\n"
