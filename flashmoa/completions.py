"""Watching OpenAI completions: text as it arrives, and the usage fields that others drop.

An agent framework's client is kept as it is, so that it behaves as users know it. What it sends
passes through here: a call that carries a :class:`WatchedBody` as ``extra_body`` is watched. That
changes nothing about its retries, exceptions and timeouts. Needs ``openai``, which the extras for
such frameworks install.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Self, cast

from openai import (
    APIConnectionError,
    APIError,
    APITimeoutError,
    AsyncOpenAI,
    AuthenticationError,
    NotFoundError,
)

from flashmoa.engine import PromptUsage
from flashmoa.openai_tap import first_text, heard, tap


def _nobody(_text: str) -> None:
    return None


@dataclass(slots=True)
class Watch:
    """One call. ``on_text`` gets the answer's text as it arrives, without any reasoning.

    ``taps``: so does one that is asked for as a whole.
    """

    on_text: Callable[[str], None] = _nobody
    taps: bool = False
    usage: PromptUsage | None = field(default=None, init=False)


class WatchedBody(dict[str, Any]):
    """An ``extra_body`` that knows its call."""

    def __init__(self, body: dict[str, Any], watch: Watch) -> None:
        super().__init__(body)
        self.watch = watch


def watch_completions(client: AsyncOpenAI) -> None:
    """Make a client's chat completions report to the watch of their call."""
    completions = client.chat.completions
    tap(client._client)  # What all requests go through, each attempt of its own.

    async def create(**request: Any) -> Any:
        try:
            return await watched(request)
        except APIError as error:
            _explain(error, str(client.base_url).rstrip("/").removesuffix("/v1"))
            raise

    async def watched(request: dict[str, Any]) -> Any:
        # Looked up at each call, so that whoever patches the class is still obeyed.
        send = cast("Callable[..., Awaitable[Any]]", type(completions).create)
        body = request.get("extra_body")
        if not isinstance(body, WatchedBody):
            return await send(completions, **request)
        if request.get("stream"):
            return _WatchedStream(await send(completions, **request), body.watch)
        with heard(body.watch.on_text) if body.watch.taps else nullcontext():
            result = await send(completions, **request)
        body.watch.usage = _usage(result)
        return result

    completions.create = create  # type: ignore[method-assign]


def _explain(error: APIError, url: str) -> None:
    """Say at the end of its traceback which engine it was, and what may be done."""
    if isinstance(error, APITimeoutError):
        return
    if isinstance(error, APIConnectionError):
        advice = "cannot be reached. Is the engine running? `flashmoa serve` starts one."
    elif isinstance(error, AuthenticationError):
        advice = "takes another API key, or needs one; give the client api_key=..."
    elif isinstance(error, NotFoundError):
        advice = f"is no engine, or not its URL; `flashmoa doctor --engine {url}` looks closer."
    else:
        return
    error.add_note(f"FlashMoA: {url} {advice}")


class _WatchedStream:
    """What OpenAI's own stream is: an iterator, and a context that closes it."""

    def __init__(self, chunks: Any, watch: Watch) -> None:
        self._chunks = chunks
        self._watched = _watched(chunks, watch)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._watched

    def __anext__(self) -> Awaitable[Any]:
        # As it is: a coroutine around it that is cancelled before it begins would close nothing.
        return self._watched.__anext__()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._watched.aclose()
        await self._chunks.close()  # A generator that never began closes nothing.


async def _watched(chunks: AsyncIterator[Any], watch: Watch) -> AsyncGenerator[Any]:
    try:
        async for chunk in chunks:
            if chunk.usage is not None:
                watch.usage = _usage(chunk)
            if text := first_text(chunk):
                watch.on_text(text)
            yield chunk
    finally:
        # AutoGen, for one, leaves the response open when it is cancelled.
        close = getattr(chunks, "close", None) or getattr(chunks, "aclose", None)
        if close is not None:
            await close()


def _usage(result: Any) -> PromptUsage | None:
    usage = getattr(result, "usage", None)
    if usage is None:
        return None
    try:
        return PromptUsage.from_openai(cast("dict[str, Any]", usage.model_dump()))
    except (ValueError, AttributeError):  # Another server's idea of usage.
        return None
