"""Test that a server that runs for long keeps nothing of the questions that are over."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.retention import kept_by
from tests.unit.engine.faulty_engine import listening
from tests.unit.moa.scripted_engine import ScriptedEngine
from tests.unit.moa.serve.served import served

pytestmark = pytest.mark.slow

SCRIPTS = {"plain": ["It is ", "18."], "cut": ["It", ("end", "cut")]}


async def test_a_server_keeps_nothing_of_old_questions(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)  # Records of warnings would be kept.
    async with listening(lambda url: ScriptedEngine(url, SCRIPTS)) as engine:
        plain, cut = ({"engine": engine.url, "model": name} for name in SCRIPTS)
        layers = [{"models": [plain, cut]}, {"models": [plain]}]
        async with served({"layers": layers}) as http:

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
