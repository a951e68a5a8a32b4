"""Test that a server that runs for long keeps nothing of the questions that are over."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest

from flashmoa.moa.config import read_tables
from flashmoa.moa.serve.application import application
from tests.integration.router.serving import serve
from tests.retention import kept_by
from tests.unit.engine.faulty_engine import listening
from tests.unit.moa.scripted_engine import ScriptedEngine

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SCRIPTS = {"plain": ["It is ", "18."], "cut": ["It", ("end", "cut")]}


async def test_a_server_keeps_nothing_of_questions_that_are_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)  # Records of warnings would be kept.
    async with listening(lambda url: ScriptedEngine(url, SCRIPTS)) as engine:
        plain, cut = ({"engine": engine.url, "model": name} for name in SCRIPTS)
        layers = [{"models": [plain, cut]}, {"models": [plain]}]
        app = application(read_tables({"name": "moa", "layers": layers}))
        async with serve(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:

            async def ask(number: int) -> None:
                body: dict[str, Any] = {
                    "messages": [{"role": "user", "content": f"What is 9 + {number}?"}],
                    "user": f"user {number}",
                }
                # One is answered, one streamed, one left by its client, and one refused.
                ways = [({}, 200), ({"stream": True}, 200), ({"model": f"unknown {number}"}, 404)]
                for more, status in ways:
                    answer = await http.post("/v1/chat/completions", json=body | more)
                    assert answer.status_code == status
                body["stream"] = True
                async with http.stream("POST", "/v1/chat/completions", json=body):
                    pass
                engine.bodies.clear()

            assert await kept_by(ask) < 3
