"""Have the chat completions of an OpenAI client observed, in its HTTP client.

Below OpenAI's client every request passes: those of ``create``, ``stream`` and ``parse``, of copies
of the client, and of frameworks that were given it. Each attempt of a retried request counts as a
request of its own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeAlias, cast
from weakref import WeakSet

from flashmoa.linking.observed_call import CallObserver
from flashmoa.openai._answers import report_whole
from flashmoa.openai._watched_stream import is_event_stream, watch
from flashmoa.openai_requests import as_stream, read_chat_body, with_body
from flashmoa.openai_tap import TappedRequest, UnusableStream

logger = logging.getLogger(__name__)

# Those of httpx or of httpx2, on which OpenAI's client 3 is built. They share no types.
Request: TypeAlias = Any
_Response: TypeAlias = Any
_Send = Callable[..., Awaitable[_Response]]
FindObserver = Callable[[Request, Mapping[str, Any]], CallObserver | None]

_observed: WeakSet[Any] = WeakSet()


def observe_completions(http: Any, find_observer: FindObserver) -> None:
    """Have the chat completions of an HTTP client observed. Repeating this is harmless.

    Args:
        http: an ``AsyncClient`` of httpx or httpx2.
        find_observer: returns the observer of a request, given the request and its body; ``None``
            if it is to be sent unchanged.
    """
    if http in _observed:
        return
    _observed.add(http)
    earlier_send: _Send | None = cast("dict[str, Any]", vars(http)).get("send")
    client_class = cast("Any", type(http))

    async def send(request: Request, **options: Any) -> _Response:
        # Looked up at each call, so that a patch of the class still takes effect.
        send_plainly: _Send = earlier_send or partial(client_class.send, http)
        body = read_chat_body(request)
        observer = find_observer(request, body) if body is not None else None
        if body is None or observer is None:
            return await send_plainly(request, **options)
        try:
            _report_prompt(observer, body)
            return await _send_observed(send_plainly, request, body, options, observer)
        except BaseException as error:
            observer.on_failure(error)
            raise

    http.send = send


def _report_prompt(observer: CallObserver, body: Mapping[str, Any]) -> None:
    try:
        observer.on_prompt(body)
    except Exception:
        # The server decides what is wrong with a request.
        logger.exception("A prompt could not be reported; the request is sent all the same")


async def _send_observed(
    send: _Send,
    request: Request,
    body: Mapping[str, Any],
    options: Mapping[str, Any],
    observer: CallObserver,
) -> _Response:
    if observer.prompt_stream_id is not None:
        # Only an engine with the plugin has given an id, so it knows these fields.
        fields: dict[str, Any] = {"prompt_stream_id": observer.prompt_stream_id}
        if observer.expected_output_tokens is not None:
            fields["expected_output_tokens"] = observer.expected_output_tokens
        request = with_body(request, {**fields, **body})
    # A server may format tool calls in a stream in another way, so such an answer is not tapped.
    is_tapped = not options.get("stream") and not body.get("tools")
    streaming = as_stream(request) if is_tapped else None
    if streaming is not None:
        return await _send_tapped(send, request, streaming, options, observer)
    response = await send(request, **options)
    if options.get("stream"):
        response.stream = watch(response, observer, _module_of(request))
    else:
        is_stream = is_event_stream(response)
        report_whole(response, response.content, observer, is_stream=is_stream)
    return response


async def _send_tapped(
    send: _Send,
    request: Request,
    streaming: Request,
    options: Mapping[str, Any],
    observer: CallObserver,
) -> _Response:
    """Send a request as the streaming one, and return the response that it would have had."""
    tapped = TappedRequest(request, _module_of(request), observer.on_text)
    try:
        response = await tapped.send(send, streaming, options)
    except UnusableStream:
        logger.exception("A streamed answer could not be put together; it is asked for again")
        response = await send(request, **options)
    report_whole(response, response.content, observer)
    return response


def _module_of(request: Request) -> Any:
    """Return httpx or httpx2, whichever a request is of."""
    return sys.modules[type(request).__module__.partition(".")[0]]
