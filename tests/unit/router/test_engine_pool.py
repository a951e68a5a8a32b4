"""Finding the engine of a prompt stream, without engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from flashmoa.router.engine_pool import EnginePool
from flashmoa.router.engines import RoutedEngine

pytestmark = pytest.mark.anyio
HAS, SILENT = "http://has:1", "http://silent:1"


class Connections:
    """One engine answers at once, and the other one never."""

    async def exchange(self, _method: str, url: str, *_rest: object) -> tuple[Any, bytes]:
        if url.startswith(SILENT):
            await anyio.sleep_forever()
        return SimpleNamespace(status=200, content_type="application/json", close=lambda: None), b""


def make_pool() -> EnginePool:
    engines = {url: RoutedEngine(url, is_up=True) for url in (SILENT, HAS)}
    return EnginePool(Connections(), engines)  # type: ignore[arg-type]


async def test_a_silent_engine_does_not_delay_the_search_for_a_stream() -> None:
    with anyio.fail_after(2):
        assert await make_pool().place_of_stream("abc", {}) == HAS


async def test_a_stream_of_a_rank_that_is_gone_is_looked_for_again() -> None:
    pool = make_pool()
    pool.remember_stream("abc", f"{HAS}#1")
    assert await pool.place_of_stream("abc", {}) == HAS
