"""Fixtures of the tests of the OpenAI adapter."""

import pytest

from flashmoa.link.learned_runs import Program
from flashmoa.openai import runs
from tests.unit.openai.fake_server import FakeServer, serve


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Program]:
    """Return the programs that are remembered."""
    programs: dict[str, Program] = {}
    monkeypatch.setattr(runs, "_programs", programs)
    runs._warn_of_names.cache_clear()
    return programs


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeServer:
    """Return a server; with ``both_clients`` one for each kind of client."""
    server = serve(monkeypatch)
    server.is_blocking = getattr(request, "param", False)
    return server
