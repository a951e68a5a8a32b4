"""Have the chat completions of an OpenAI client observed, in its HTTP client.

Below OpenAI's client every request passes: those of ``create``, ``stream`` and ``parse``, of copies
of the client, and of frameworks that were given it. Each attempt of a retried request counts as a
request of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias
from weakref import WeakSet

from flashmoa.engine.generation import is_event_stream
from flashmoa.linking.calls import CallObserver
from flashmoa.openai._answers import report_whole
from flashmoa.openai._watched_stream import watch
from flashmoa.openai_requests import http_module, read_chat_body
from flashmoa.openai_tap import UntappedClient, send_changed

logger = logging.getLogger(__name__)

# Those of httpx or of httpx2, on which OpenAI's client 3 is built. They share no types.
Request: TypeAlias = Any
_Response: TypeAlias = Any
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
    client = UntappedClient(http)

    async def send(request: Request, **options: Any) -> _Response:
        body = read_chat_body(request)
        observer = find_observer(request, body) if body is not None else None
        if body is None or observer is None:
            return await client.send(request, **options)
        try:
            _report_prompt(observer, body)
            return await _send_observed(client, request, body, options, observer)
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
    client: UntappedClient,
    request: Request,
    body: Mapping[str, Any],
    options: Mapping[str, Any],
    observer: CallObserver,
) -> _Response:
    fields: dict[str, Any] = {}
    if observer.prompt_stream_id is not None:
        fields["prompt_stream_id"] = observer.prompt_stream_id
        if observer.expected_output_tokens is not None:
            fields["expected_output_tokens"] = observer.expected_output_tokens
    # A server may format tool calls in a stream in another way, so such an answer is not tapped.
    on_text = None if body.get("tools") else observer.on_text
    response = await send_changed(client, request, {**fields, **body}, options, on_text)
    if options.get("stream"):
        response.stream = watch(response, observer, http_module(request))
    else:
        is_stream = is_event_stream(response)
        report_whole(response, response.content, observer, is_stream=is_stream)
    return response
