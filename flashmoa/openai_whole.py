"""Decide whether a request for a whole answer may be sent as one for a stream (`why_left_whole`).

SGLang parses reasoning and tool calls in streams with other code than in whole answers, and the
texts of both differ. So a request is sent as it was wherever such a parser may read its answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import httpx
from pydantic_core import from_json

from flashmoa.engine.connections import engine_url, verification
from flashmoa.openai_io import Request, UntappedIO

logger = logging.getLogger(__name__)

_TOOLS = "it has tools, and its answer is not requested as a stream"
_PARSES = "its engine separates reasoning, and its answer is not requested as a stream"
_UNKNOWN = (
    "its server does not say whether it separates reasoning, and its answer is not requested as a "
    "stream"
)
# SGLang asks a scheduler to answer the second route. Before 0.5.23, the first one does not suffice.
_ROUTES = ("/model_info", "/server_info")
_ASK_SECONDS = 2.0
_KNOWN_SECONDS = 60.0
# A server that does not answer may be starting.
_RETRY_SECONDS = 10.0
_MAX_SERVERS = 1024
# Beginnings of the headers that belong to the request for an answer alone.
_OF_REQUEST = ("content-", "transfer-", "host", "connection", "idempotency-", "x-stainless-")
# By server, whether it separates reasoning (``None``: it does not say), and until when this is
# taken to hold, by ``time.monotonic()``.
_servers: dict[str, tuple[bool | None, float]] = {}


async def why_left_whole(
    client: UntappedIO, request: Request, body: Mapping[str, Any]
) -> str | None:
    """Return why a request for a whole answer must be sent as it is; ``None`` if a stream will do.

    The server is asked once a minute.

    Args:
        client: the client that will send the request; it sends nothing here.
        request: the request for a chat completion.
        body: its body.
    """
    # SGLang also reads tools in system messages.
    messages: list[Mapping[str, Any]] = body.get("messages") or []
    if any(each.get("tools") for each in (body, *filter(_is_object, messages))):
        return _TOOLS
    separates = await _separates_reasoning(client, request)
    if separates is None:
        return _UNKNOWN
    return _PARSES if separates and body.get("separate_reasoning") is not False else None


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


async def _separates_reasoning(client: UntappedIO, request: Request) -> bool | None:
    server = str(request.url).partition("/chat/completions")[0]
    now = time.monotonic()
    if server in _servers and now < _servers[server][1]:
        return _servers[server][0]
    if server in _servers:  # Calls that come meanwhile need not ask, too.
        _servers[server] = _servers[server][0], now + _RETRY_SECONDS
    kept = {n: value for n, value in request.headers.items() if not n.startswith(_OF_REQUEST)}
    separates, seconds = None, _KNOWN_SECONDS
    try:
        separates = await client.run(partial(_ask, engine_url(server), kept))
    except (httpx.HTTPError, ValueError) as error:
        logger.debug("%s does not say whether it separates reasoning: %r", server, error)
        seconds = _RETRY_SECONDS
    if len(_servers) >= _MAX_SERVERS:
        _servers.pop(next(iter(_servers)), None)
    _servers[server] = separates, time.monotonic() + seconds
    return separates


def _ask(url: str, headers: Mapping[str, str]) -> bool | None:
    """Return whether an SGLang engine separates reasoning; ``None`` for other servers.

    Raises: httpx.HTTPError if there is no answer; ValueError if an answer is not JSON.
    """
    checked = verification(url)
    with httpx.Client(headers=headers, timeout=_ASK_SECONDS, verify=checked) as http:
        for route in _ROUTES:
            response = http.get(url + route)
            told = from_json(response.content) if response.is_success else None
            settings = cast("dict[str, Any]", told) if isinstance(told, dict) else {}
            # The answers of a pair of engines are parsed by the other one.
            if settings.get("disaggregation_mode") == "null" and "reasoning_parser" in settings:
                return settings["reasoning_parser"] is not None
    return None
