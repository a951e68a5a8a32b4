"""Serve a system of a file's tables, and ask it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from flashmoa.moa.config import read_tables
from flashmoa.moa.serve.application import application
from tests.integration.router.serving import serve


@asynccontextmanager
async def served(tables: Mapping[str, Any]) -> AsyncGenerator[httpx.AsyncClient]:
    app = application(read_tables(tables))
    async with serve(app) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        yield http


async def ask(http: httpx.AsyncClient, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "What is 9 + 9?"}], **more}
    return await http.post("/v1/chat/completions", json=body)
