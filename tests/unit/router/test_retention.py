"""Test that a router that runs for long keeps nothing of the requests that are over."""

from __future__ import annotations

import pytest

from tests.retention import kept_by
from tests.unit.router.support import FakeEngine, routing

pytestmark = pytest.mark.anyio


async def test_a_router_keeps_nothing_of_requests() -> None:
    engine = FakeEngine("s1", needs_key=False)

    async with routing(engine) as client:

        async def ask(number: int) -> None:
            # Prompts shorter than a block are in no table.
            messages = [{"role": "user", "content": f"Go {number}."}]
            await client.post("/v1/chat/completions", None, messages=messages)
            await client.post("/prompt_streams", None, text=f"{number}")
            for stream in ("s1", f"gone{number}"):
                await client.post("/generate", None, text=f"{number}", prompt_stream_id=stream)
            assert (await client("DELETE", "/prompt_streams/s1"))[0] == 200
            for path in (f"/prompt_streams/gone{number}", f"/nothing/{number}"):
                assert (await client("GET", path))[0] == 404
            engine.requests.clear()

        assert await kept_by(ask) < 3
