"""Read what a client sends, as far as links need it (:class:`SentRequest`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashmoa.engine import engine_url, kv_namespace
from flashmoa.linking.learned_runs import RecordedRequest

# Headers of one connection or body: the client that links use has its own.
_OF_TRANSFER = frozenset(
    """
    accept-encoding connection expect host keep-alive proxy-authenticate proxy-authorization
    proxy-connection te trailer transfer-encoding upgrade
    """.split()  # noqa: SIM905
)
# Headers of one request, which would be wrong for others; a server may even repeat an answer by
# them. OpenAI's client counts retries in ``x-stainless-...``.
_OF_REQUEST = frozenset("idempotency-key traceparent tracestate x-request-id".split())  # noqa: SIM905
_BEGINNINGS = ("content-", "x-stainless-")


@dataclass(frozen=True, slots=True)
class SentRequest(RecordedRequest):
    """A request for a chat completion, and how its server was asked.

    Attributes:
        headers: the headers by which its client asks for anything, with its key. A request that is
            sent again with other ones is the same.
    """

    headers: Mapping[str, str] = field(default_factory=dict[str, str], compare=False, repr=False)


def read_request(request: Any, body: Mapping[str, Any]) -> SentRequest:
    """Return a request of OpenAI's client, given its HTTP request and the body of that.

    Raises: ValueError, LookupError if it is no request for a chat completion.
    """
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return SentRequest(
        url=engine_url(str(request.url).partition("/chat/completions")[0]),
        api_key=key if key and scheme.lower() == "bearer" else None,
        model=body.get("model") or "",
        messages=body["messages"],
        tools=body.get("tools"),
        template_args=body.get("chat_template_kwargs"),
        namespace=kv_namespace(body),
        headers=_headers_of_client(request.headers),
    )


def _headers_of_client(headers: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in headers.items()
        if name not in _OF_TRANSFER | _OF_REQUEST and not name.startswith(_BEGINNINGS)
    }
