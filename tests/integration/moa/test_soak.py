"""Thousands of questions to ``flashmoa moa serve``: it holds no more afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from flashmoa.engine.local import LocalEngine
from tests.integration.baseline import Baseline
from tests.integration.moa.serving import FILE
from tests.integration.router.http_calls import metric
from tests.integration.soak import TIMEOUT, ask_often, serving

pytestmark = [pytest.mark.anyio, pytest.mark.nightly, TIMEOUT]

SYSTEMS = ("three", "stairs", "judged", "failing")
WAYS = ("whole", "stream", "leave", "refused")


async def test_a_server_of_mixtures_holds_no_more_after_thousands_of_questions(
    engine: LocalEngine, tmp_path: Path
) -> None:
    config = tmp_path / "moa.toml"
    config.write_text(FILE.format(url=engine.url, tokens=3))
    async with (
        serving("moa", "serve", str(config)) as (url, process),
        httpx.AsyncClient(base_url=engine.url, timeout=60) as direct,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        base = Baseline(engine, direct)
        await base.take()
        series: list[int] = []

        async def ask(number: int) -> None:
            system, way = SYSTEMS[number % len(SYSTEMS)], WAYS[number // len(SYSTEMS) % len(WAYS)]
            body: dict[str, Any] = {
                "model": f"nobody-{number}" if way == "refused" else system,
                "messages": [{"role": "user", "content": f"{number}: what is in Patan?"}],
                "stream": way != "whole",
                "user": f"user-{number}",
            }
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if way == "leave":
                    return
                await answer.aread()
            if way == "refused":
                assert answer.status_code == 404, answer.text

        async def settle() -> None:
            with anyio.fail_after(20):
                while await metric(http, "flashmoa_moa_running"):  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            await base.wait_until_restored(seconds=45)
            series.append(len((await http.get("/metrics")).text.splitlines()))

        await ask_often(ask, {"moa": process}, settle)
        assert series[-1] == series[0] < 300, series
