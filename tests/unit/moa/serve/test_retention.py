"""Test that a long-lived server keeps nothing of old questions."""

import logging
from typing import Any

import pytest

from tests.retention import kept_by
from tests.unit.moa.serve.served import serving

pytestmark = pytest.mark.slow

SCRIPTS = {"plain": ["It is ", "18."], "cut": ["It", ("end", "cut")]}


async def test_a_server_keeps_no_old_questions(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # Records of warnings would be kept.
    plain, cut = ({"model": name} for name in SCRIPTS)
    async with serving(SCRIPTS, [plain, cut], [plain]) as (engine, http):

        async def ask(number: int) -> None:
            messages = [{"role": "user", "content": f"What is 9 + {number}?"}]
            body: dict[str, Any] = {"messages": messages, "user": f"user {number}"}
            # A question is answered, one streamed, one refused, and one left by its client.
            ways = [({}, 200), ({"stream": True}, 200), ({"model": f"unknown {number}"}, 404)]
            for more, status in ways:
                answer = await http.post("/v1/chat/completions", json=body | more)
                assert answer.status_code == status
            body["stream"] = True
            async with http.stream("POST", "/v1/chat/completions", json=body):
                pass
            engine.bodies.clear()

        assert await kept_by(ask) < 3
