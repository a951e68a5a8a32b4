"""Fixtures of the tests of the OpenAI adapter."""

from __future__ import annotations

import pytest

from flashmoa import openai_http, openai_whole
from tests.unit.openai.fake_server import FakeServer, serve


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeServer:
    """Return a server; with ``both_clients`` one for each kind of clients."""
    server = serve(monkeypatch)
    server.is_blocking = getattr(request, "param", False)
    return server


@pytest.fixture(autouse=True)
def no_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what the servers of other tests, which have the same URL, have refused or said."""
    monkeypatch.setattr(openai_http, "_refused", {})
    monkeypatch.setattr(openai_whole, "_servers", {})
