"""Fixtures of the tests of the OpenAI adapter."""

from __future__ import annotations

import pytest

from tests.unit.openai.fake_server import FakeServer, serve


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    return serve(monkeypatch)
