"""Record the bodies of requests for answers as the server receives them."""

from typing import Any

import httpx
import pytest


def record_bodies(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the bodies of all requests for answers from now on, in the order of their sending."""
    bodies: list[bytes] = []

    def note(request: httpx.Request) -> None:
        if request.method == "POST" and request.url.path.startswith("/v1/"):
            bodies.append(request.content)

    send, send_blocking = (
        httpx.AsyncHTTPTransport.handle_async_request,
        httpx.HTTPTransport.handle_request,
    )

    async def handle(transport: Any, request: httpx.Request) -> httpx.Response:
        note(request)
        return await send(transport, request)

    def handle_blocking(transport: Any, request: httpx.Request) -> httpx.Response:
        note(request)
        return send_blocking(transport, request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle)
    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", handle_blocking)
    return bodies
