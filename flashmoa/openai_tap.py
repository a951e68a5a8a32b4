"""Hearing an answer that is asked for as a whole, while it is written.

A tap sits below OpenAI's client, at the ``send`` of its HTTP client: it asks for the answer as a
stream and returns the response that there would have been without it. Whatever breaks, breaks
within OpenAI's own loop of retries, so that retries, exceptions and timeouts are those of a call
that nobody hears.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias, cast
from weakref import WeakSet

import anyio
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from flashmoa.engine.generation import event_data

logger = logging.getLogger(__name__)

Hear = Callable[[str], None]

# OpenAI's client 3 has httpx2 below it, earlier ones httpx: alike, but not of one type.
_Request: TypeAlias = Any
_Response: TypeAlias = Any
_Send = Callable[..., Awaitable[_Response]]

_tapped: WeakSet[Any] = WeakSet()
_hearing: ContextVar[Retelling | None] = ContextVar("flashmoa_hearing", default=None)
# What describes the bytes of a stream, and not those of the whole answer made from it.
_OF_BODY = ("content-type", "content-length", "content-encoding", "transfer-encoding")


class Retelling:
    """Tells a text once, however often it is begun again.

    Where a later attempt says something else than was told already, no more is told.
    """

    def __init__(self, hear: Hear) -> None:
        self._hear = hear
        self._told = ""

    def attempt(self) -> Hear:
        """What the text is to be given to, from its beginning."""
        written = ""

        def hear(piece: str) -> None:
            nonlocal written
            written += piece
            if len(written) > len(self._told) and written.startswith(self._told):
                new, self._told = written[len(self._told) :], written
                self._hear(new)

        return hear


@contextmanager
def heard(hear: Hear) -> Generator[None]:
    """What is asked meanwhile, through a client that is tapped, is told to ``hear``."""
    before = _hearing.get()
    _hearing.set(Retelling(hear))
    try:
        yield
    finally:
        # Not by token: a coroutine that is thrown away is closed in another context.
        _hearing.set(before)


class _Unheard(Exception):
    """An answer arrives, but not as chunks that make a completion."""


@contextmanager
def _unheard() -> Generator[None]:
    try:
        yield
    except Exception as error:
        raise _Unheard from error


def tap(http: Any) -> None:
    """Make an HTTP client, of httpx or httpx2, tell chat completions to who hears them.

    All else that it sends passes as it is; harmless to repeat.
    """
    if http in _tapped:
        return
    _tapped.add(http)
    own: _Send | None = cast("dict[str, Any]", vars(http)).get("send")
    kind = cast("Any", type(http))

    async def send(request: _Request, **options: Any) -> _Response:
        # Looked up at each call, so that whoever patches the class is still obeyed.
        plainly: _Send = own or partial(kind.send, http)
        retelling = _hearing.get()
        streamed = None if retelling is None or options.get("stream") else _streamed(request)
        if retelling is None or streamed is None:
            return await plainly(request, **options)
        errors: Any = sys.modules[type(request).__module__.partition(".")[0]]
        try:
            asking = _Asking(request, errors, retelling.attempt())
            return await asking.whole(plainly, streamed, options)
        except _Unheard:
            logger.exception("A streamed answer could not be put together; it is asked for anew")
            return await plainly(request, **options)

    http.send = send


def _streamed(request: _Request) -> _Request | None:
    """A request for a chat completion, asking for a stream; ``None`` where it is no such one."""
    if request.method != "POST" or not request.url.path.endswith("/chat/completions"):
        return None
    try:
        asked: dict[str, Any] = json.loads(request.content)
    except ValueError:
        return None
    if asked.get("stream"):
        return None
    options: dict[str, Any] = {**(asked.get("stream_options") or {}), "include_usage": True}
    headers = request.headers.copy()
    headers.pop("content-length", None)
    # As OpenAI's client writes it.
    content = json.dumps(
        {**asked, "stream": True, "stream_options": options},
        ensure_ascii=False,
        separators=(",", ":"),
    )
    return type(request)(
        request.method,
        request.url,
        headers=headers,
        content=content.encode(),
        extensions=request.extensions,
    )


class _Asking:
    """One attempt at one request.

    Args:
        errors: the module whose exceptions its HTTP client raises.
        hear: is told the text.
    """

    def __init__(self, request: _Request, errors: Any, hear: Hear) -> None:
        self._request = request
        self._errors = errors
        self._answer = _Answer(hear)
        # When the engine had all of the request; where the HTTP client does not say, as it began.
        self._sent = anyio.current_time()

    async def whole(self, send: _Send, streamed: _Request, options: Mapping[str, Any]) -> _Response:
        """The response that there would have been without a stream.

        Raises: the HTTP client's exceptions; _Unheard.
        """
        extensions: Mapping[str, Mapping[str, float | None]] = self._request.extensions
        patience = extensions.get("timeout", {}).get("read")
        streamed.extensions = {"trace": self._trace, **streamed.extensions}
        response = await send(streamed, **{**options, "stream": True})
        try:
            kind = response.headers.get("content-type", "")
            if response.is_error or not kind.startswith("text/event-stream"):
                await response.aread()
                response.request = self._request
                return response
            # Unstreamed, nothing comes before the answer is complete: that is the read's timeout.
            deadline = float("inf") if patience is None else self._sent + patience
            with anyio.CancelScope(deadline=deadline):
                return await self._read(response)
            raise self._errors.ReadTimeout("", request=self._request)
        finally:
            await response.aclose()

    async def _trace(self, event: str, _: Mapping[str, Any]) -> None:
        if event.endswith("send_request_body.complete"):
            self._sent = anyio.current_time()

    async def _read(self, response: _Response) -> _Response:
        """The whole of a stream. Raises: RemoteProtocolError where it has no end; _Unheard."""
        async with aclosing(event_data(response)) as several:
            async for data in several:
                if data == "[DONE]" and self._answer.is_begun:
                    return await self._made(response, response.status_code, self._answer.whole())
                event = self._parsed(data)
                if event.get("error"):
                    return await self._made(response, *_refusal(event))
                self._answer.take(event)
        raise self._broken("the answer ended before it was complete")

    def _parsed(self, data: str) -> dict[str, Any]:
        try:
            event: Any = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise self._broken(f"not a chunk of a chat completion: {data[:200]!r}")
        return cast("dict[str, Any]", event)

    def _broken(self, what: str) -> Exception:
        return self._errors.RemoteProtocolError(what, request=self._request)

    async def _made(self, response: _Response, status: int, body: Mapping[str, Any]) -> _Response:
        await response.aclose()  # It knows only then how long it took.
        kept = [(n, v) for n, v in response.headers.multi_items() if n.lower() not in _OF_BODY]
        made = type(response)(
            status,
            headers=[*kept, ("content-type", "application/json")],
            content=json.dumps(body).encode(),
            request=self._request,
            history=response.history,
        )
        made.elapsed = response.elapsed
        return made


class _Answer:
    """What the chunks of an answer amount to. Every method raises _Unheard."""

    def __init__(self, hear: Hear) -> None:
        self._hear = hear
        self._state = ChatCompletionStreamState[Any]()
        self.is_begun = False

    def take(self, event: dict[str, Any]) -> None:
        with _unheard():
            chunk = ChatCompletionChunk.construct(**event)
            self._state.handle_chunk(chunk)
            self.is_begun = self.is_begun or bool(chunk.choices)
            if text := first_text(chunk):
                self._hear(text)

    def whole(self) -> dict[str, Any]:
        with _unheard():
            # Not its "final completion", which is an error where the answer was cut at max_tokens.
            whole = self._state.current_completion_snapshot.to_dict(warnings=False)
            for choice in cast("list[dict[str, Any]]", whole["choices"]):
                # Of a server that repeats it in each chunk, there would be several in a row.
                choice["message"]["role"] = "assistant"
            return whole


def first_text(chunk: ChatCompletionChunk) -> str:
    """What a chunk adds to the text of the first choice."""
    return "".join(one.delta.content or "" for one in chunk.choices if one.index == 0)


def _refusal(event: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """What an error in a stream would have been as an answer: its status and its body."""
    error: Any = event["error"]
    said = cast("dict[str, Any]", error) if isinstance(error, dict) else {}
    try:
        status = int(said.get("code") or 500)
    except (ValueError, TypeError):
        status = 500
    # SGLang puts its error into another object only where it is an event.
    return (status if 400 <= status < 600 else 500), said if "object" in said else event
