"""Serve a system of a file's tables, and ask it."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from flashmoa.moa.config import read_tables
from flashmoa.moa.serve.application import application
from tests.integration.router.serving import serve
from tests.unit.moa.scripted_engine import Script, ScriptedEngine, scripted_engine


@asynccontextmanager
async def serving(
    scripts: Mapping[str, Script], *layers: list[dict[str, Any]], **tables: Any
) -> AsyncGenerator[tuple[ScriptedEngine, httpx.AsyncClient]]:
    """Serve a system; by default its models are on a scripted engine."""
    async with scripted_engine(scripts) as (engine, _):
        models = [{"models": [{"engine": engine.url, **one} for one in layer]} for layer in layers]
        app = application(read_tables({"layers": models, **tables}))
        async with serve(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
            yield engine, http


async def ask(http: httpx.AsyncClient, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "What is 9 + 9?"}], **more}
    return await http.post("/v1/chat/completions", json=body)
