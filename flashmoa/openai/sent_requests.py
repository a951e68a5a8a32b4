"""Read the requests of clients for links, and predict the headers of later requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import openai

from flashmoa.engine import EngineSettings, kv_namespace, prompt_fields
from flashmoa.engine.connections import engine_url
from flashmoa.engine.wire import CALL_HEADER, DYNAMO_HEADER
from flashmoa.link.learned_links import SentInPlace
from flashmoa.link.learned_runs import NOT_REMEMBERED, RecordedRequest
from flashmoa.link.prompt import NotForecastable
from flashmoa.link.response_items import Message, read_messages, response_fields
from flashmoa.openai.http import is_response

# Headers of a connection or a body. The client that links use has its own.
_OF_TRANSFER = frozenset(
    """
    accept-encoding connection expect host keep-alive proxy-authenticate proxy-authorization
    proxy-connection te trailer transfer-encoding upgrade
    """.split()  # noqa: SIM905
)
# Headers of a single request. Other requests must not send them: a server may repeat its answer.
# OpenAI's client counts retries in ``x-stainless-...``.
_OF_REQUEST = frozenset("idempotency-key traceparent tracestate x-request-id".split())  # noqa: SIM905
_BEGINNINGS = ("content-", "x-stainless-", CALL_HEADER.lower(), DYNAMO_HEADER.lower())
# Clients send this to servers that need no key.
_NO_KEY = "Bearer EMPTY"
# The clients whose requests are linked.
linked_clients: WeakKeyDictionary[openai.OpenAI | openai.AsyncOpenAI, None] = WeakKeyDictionary()
# Settings by HTTP client, which copies of an OpenAI client share.
settings_by_http: WeakKeyDictionary[Any, EngineSettings] = WeakKeyDictionary()


def read_request(request: Any, body: Mapping[str, Any]) -> RecordedRequest:
    """Return the record of an HTTP request for an answer, given its body.

    Raises: ValueError, LookupError if it is no request for an answer.
    """
    is_of_responses = is_response(request)
    messages, unknown = list[Message](), None
    try:
        messages = read_messages(body) if is_of_responses else body["messages"]
    except NotForecastable as problem:
        unknown = str(problem)
    path = "/responses" if is_of_responses else "/chat/completions"
    return RecordedRequest(
        url=engine_url(str(request.url).partition(path)[0]),
        model=body.get("model") or "",
        messages=messages,
        fields=response_fields(body) if is_of_responses else prompt_fields(body),
        namespace=kv_namespace(body),
        headers=_headers_of_client(request.headers),
        is_response=is_of_responses,
        unknown=unknown,
    )


def headers_now(request: RecordedRequest, sent: SentInPlace) -> dict[str, str]:
    """Return the likely headers of a request of an earlier run in this run.

    A header gets the value that this run last sent to the same server in place of the earlier
    value. Otherwise it keeps the earlier value, if this run has sent that to any server, or if all
    open clients of the server send it with each request. Otherwise it is left out, as the value may
    be another user's.

    Args:
        sent: this run's requests, each after its counterpart in the earlier run, or else after
            itself.

    Raises: NotForecastable if the API key would be left out, or headers of an earlier process are
        not known from this run's requests or open clients.
    """
    if request.headers is NOT_REMEMBERED:
        return _headers_of_server(request.url, sent)
    headers: dict[str, str] = {}
    for name in {*request.headers, *(name for _, now in sent for name in now.headers)}:
        known = _known_values(name, request, sent)
        if known and (value := known[-1]) is not None:
            headers[name] = value
        earlier = request.headers.get(name)
        if name == "authorization" and not known and earlier not in (None, _NO_KEY):
            raise NotForecastable(
                "its key in the run before is none that this run has sent so far, nor that of all "
                "clients that are open, and may be another user's"
            )
    return headers


def _headers_of_server(url: str, sent: SentInPlace) -> dict[str, str]:
    """Return the headers that all requests to a server have, or else all its open clients."""
    found = [now.headers for _, now in sent if now.url == url]
    found = found or [_headers_of_client(each) for each in _headers_of_open_clients(url)]
    if len({headers.get("authorization") for headers in found}) != 1:
        raise NotForecastable(
            "its headers in the process before are not remembered, and no client of its server is "
            "open yet, or clients with different keys"
        )
    first, *others = found
    return {
        name: value
        for name, value in first.items()
        if all(other.get(name) == value for other in others)
    }


def _known_values(name: str, request: RecordedRequest, sent: SentInPlace) -> list[str | None]:
    """Return possible values of a header in this run, the likeliest last.

    The list is empty if nothing is known. The value ``None`` stands for a missing header.
    """
    earlier = request.headers.get(name)
    there = [
        now.headers.get(name)
        for before, now in sent
        if before.url == now.url == request.url and before.headers.get(name) == earlier
    ]
    if there:
        return there
    if any(now.headers.get(name) == earlier for _, now in sent):
        return [earlier]
    of_clients = _headers_of_open_clients(request.url)
    is_of_all = of_clients and all(of.get(name) == earlier for of in of_clients)
    return [earlier] if is_of_all else []


def _headers_of_open_clients(url: str) -> list[Mapping[str, str]]:
    """Return the headers that each open client of a server sends with every request."""
    found: list[Mapping[str, str]] = []
    for client in _open_clients(url):
        # OpenAI's ``Omit`` marks a header to leave out; it counts as false.
        own = {name.lower(): value for name, value in client.default_headers.items() if value}
        found.append({**client._client.headers, **own})
    return found


def settings_for(url: str) -> EngineSettings | None:
    """Return the settings of a server's open client, if one has settings."""
    found = (settings_by_http.get(client._client) for client in _open_clients(url))
    return next(filter(None, found), None)


def _open_clients(url: str) -> list[openai.OpenAI | openai.AsyncOpenAI]:
    # Other threads may add clients meanwhile.
    clients = [reference() for reference in linked_clients.keyrefs()]
    return [
        client
        for client in clients
        if client is not None
        and not client.is_closed()
        and str(client.base_url).startswith(f"{url}/")
    ]


def _headers_of_client(headers: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in headers.items()
        if name not in _OF_TRANSFER | _OF_REQUEST and not name.startswith(_BEGINNINGS)
    }
