"""Watch OpenAI completions: their text as it arrives, and usage fields that frameworks drop.

An agent framework's client keeps its own behaviour. A call is watched if it carries a
:class:`WatchedBody` as ``extra_body``; its retries, exceptions and timeouts stay the same. Needs
``openai``, which the extras for such frameworks install.
"""

from __future__ import annotations

import logging
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
from openai.resources.chat.completions import AsyncCompletions

from flashmoa.engine import PromptUsage
from flashmoa.engine.generation import read_content
from flashmoa.openai_tap import tap, text_goes_to

logger = logging.getLogger(__name__)


class WatchedBody(dict[str, Any]):
    """An ``extra_body`` whose call is watched.

    Args:
        body: fields to add to the request's body.
        on_text: the function to call with each piece of the answer's text, without any reasoning.
            If it raises, that is logged and it gets no more text; the call is not affected.
        on_request: the function to call with the body of the request that is about to be sent. If
            it raises, that is logged.
        taps: whether it also gets the text of an answer that is not requested as a stream.

    Attributes:
        usage: the token usage that the engine reported; ``None`` until it has.
    """

    def __init__(
        self,
        body: Mapping[str, Any],
        on_text: Callable[[str], None],
        *,
        on_request: Callable[[Mapping[str, Any]], None] | None = None,
        taps: bool = False,
    ) -> None:
        super().__init__(body)
        self._on_text: Callable[[str], None] | None = on_text
        self._on_request = on_request
        self.taps = taps
        self.usage: PromptUsage | None = None

    def report_request(self, arguments: Mapping[str, Any]) -> None:
        """Pass the body of the request on.

        Args:
            arguments: the keyword arguments of OpenAI's client.
        """
        if self._on_request is not None:
            try:
                self._on_request({**arguments, **self})
            except Exception:
                logger.exception("An observer of a call failed; the call is sent all the same")

    def on_text(self, text: str) -> None:
        """Pass a piece of the answer's text on."""
        if self._on_text is not None:
            try:
                self._on_text(text)
            except Exception:
                self._on_text = None
                logger.exception("An observer of a call failed; it gets no more of the call's text")


def watch_completions(client: AsyncOpenAI) -> None:
    """Make a client's chat completions report to the :class:`WatchedBody` of their call."""
    tap(client._client)  # Below OpenAI's retry loop: every attempt passes through it.
    _watch_method(client, client.chat.completions, "create")
    # AutoGen asks for structured output there; a stream of it is made by ``create``.
    _watch_method(client, client.beta.chat.completions, "parse")
    _watch_method(client, client.beta.chat.completions, "create")


def _watch_method(client: AsyncOpenAI, completions: AsyncCompletions, name: str) -> None:
    """Watch the calls of one method of a client's chat completions."""

    async def call(**request: Any) -> Any:
        try:
            return await call_watched(request)
        except APIError as error:
            _add_advice(error, str(client.base_url).rstrip("/").removesuffix("/v1"))
            raise

    async def call_watched(request: dict[str, Any]) -> Any:
        # Looked up at each call, so that a patch of the class still takes effect.
        send = cast("Callable[..., Awaitable[Any]]", getattr(type(completions), name))
        body = request.get("extra_body")
        if not isinstance(body, WatchedBody):
            return await send(completions, **request)
        body.report_request(request)
        if request.get("stream"):
            return _WatchedStream(await send(completions, **request), body)
        with text_goes_to(body.on_text) if body.taps else nullcontext():
            result = await send(completions, **request)
        body.usage = _read_usage(result)
        return result

    setattr(completions, name, call)


def _add_advice(error: APIError, url: str) -> None:
    """Add a note to an error: which engine it is about and what to do."""
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
    """A watched stream with the interface of OpenAI's: an iterator and a context manager."""

    def __init__(self, chunks: Any, body: WatchedBody) -> None:
        self._chunks = chunks
        self._watched_chunks = _watch(chunks, body)

    @property
    def response(self) -> Any:
        """The HTTP response, which OpenAI's stream of structured output closes."""
        return self._chunks.response

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._watched_chunks

    def __anext__(self) -> Awaitable[Any]:
        # Not `async def`: a coroutine that is cancelled before it starts would close nothing.
        return self._watched_chunks.__anext__()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._watched_chunks.aclose()
        await self._chunks.close()  # A generator that never started closes nothing.


async def _watch(chunks: AsyncIterator[Any], body: WatchedBody) -> AsyncGenerator[Any]:
    try:
        async for chunk in chunks:
            if getattr(chunk, "usage", None) is not None:
                body.usage = _read_usage(chunk)
            if text := _first_text(chunk):
                body.on_text(text)
            yield chunk
    finally:
        # Whoever iterates may not close the response: AutoGen does not when it is cancelled.
        close = getattr(chunks, "close", None) or getattr(chunks, "aclose", None)
        if close is not None:
            await close()


def _first_text(chunk: Any) -> str:
    """Return what a chunk adds to the text of the first choice.

    OpenAI's client checks no chunk: any part may be missing, or null.
    """
    choices: list[Any] = getattr(chunk, "choices", None) or []
    deltas = [getattr(one, "delta", None) for one in choices if not getattr(one, "index", 0)]
    return "".join(read_content(getattr(delta, "content", None)) for delta in deltas)


def _read_usage(result: Any) -> PromptUsage | None:
    usage = getattr(result, "usage", None)
    if usage is None:
        return None
    try:
        return PromptUsage.from_openai(cast("dict[str, Any]", usage.model_dump()))
    except (ValueError, AttributeError):  # Another server may report usage in another format.
        return None
