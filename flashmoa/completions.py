"""Watch OpenAI completions: their text as it arrives, and usage fields that frameworks drop.

An agent framework's client stays as it is, so that it behaves as users know it. A call that
carries a :class:`WatchedBody` as ``extra_body`` is watched here, which changes nothing about its
retries, exceptions and timeouts. Needs ``openai``, which the extras for such frameworks install.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import nullcontext
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


class WatchedBody(dict[str, Any]):
    """An ``extra_body`` that has its call watched.

    Args:
        body: what the request is to carry.
        on_text: gets the answer's text as it arrives, without any reasoning.
        taps: whether it also gets the text of an answer that is asked for as a whole.

    Attributes:
        usage: what the engine says of the call's tokens, once it does.
    """

    def __init__(
        self, body: Mapping[str, Any], on_text: Callable[[str], None], *, taps: bool = False
    ) -> None:
        super().__init__(body)
        self.on_text = on_text
        self.taps = taps
        self.usage: PromptUsage | None = None


def watch_completions(client: AsyncOpenAI) -> None:
    """Make a client's chat completions report to the :class:`WatchedBody` of their call."""
    completions = client.chat.completions
    tap(client._client)  # What all requests go through, each attempt of its own.

    async def create(**request: Any) -> Any:
        try:
            return await watched(request)
        except APIError as error:
            _explain(error, str(client.base_url).rstrip("/").removesuffix("/v1"))
            raise

    async def watched(request: dict[str, Any]) -> Any:
        # Looked up at each call, so that a patch of the class still takes effect.
        send = cast("Callable[..., Awaitable[Any]]", type(completions).create)
        body = request.get("extra_body")
        if not isinstance(body, WatchedBody):
            return await send(completions, **request)
        if request.get("stream"):
            return _WatchedStream(await send(completions, **request), body)
        with heard(body.on_text) if body.taps else nullcontext():
            result = await send(completions, **request)
        body.usage = _usage(result)
        return result

    completions.create = create  # type: ignore[method-assign]


def _explain(error: APIError, url: str) -> None:
    """Add a note to an error that names the engine and says what to do."""
    if isinstance(error, APITimeoutError):
        return
    if isinstance(error, APIConnectionError):
        advice = "cannot be reached. Is the engine running? `flashmoa serve` starts one."
    elif isinstance(error, AuthenticationError):
        advice = "refuses this API key, or needs one; give the client the right api_key=..."
    elif isinstance(error, NotFoundError):
        advice = (
            "is not an engine, or this is not its URL. "
            f"`flashmoa doctor --engine {url}` tells more."
        )
    else:
        return
    error.add_note(f"FlashMoA: {url} {advice}")


class _WatchedStream:
    """A watched stream, used as OpenAI's own: an iterator, and a context that closes it."""

    def __init__(self, chunks: Any, body: WatchedBody) -> None:
        self._chunks = chunks
        self._watched = _watched(chunks, body)

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


async def _watched(chunks: AsyncIterator[Any], body: WatchedBody) -> AsyncGenerator[Any]:
    try:
        async for chunk in chunks:
            if chunk.usage is not None:
                body.usage = _usage(chunk)
            if text := first_text(chunk):
                body.on_text(text)
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
    except (ValueError, AttributeError):  # Another server may report usage otherwise.
        return None
