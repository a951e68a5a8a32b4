"""What the engine tests share."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import httpx
from flashmoa_sglang.tiny_model import SHAPES

from flashmoa.engine import EngineClient, KvState, PromptUsage, StreamState
from flashmoa.engine.local import LocalEngine, LocalEngines

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
# A model with experts in all of its five layers.
EXPERTS = replace(SHAPES["moe"], layers=5)
# SGLang's own check of an idle engine's memory, turned into a crash.
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}


@asynccontextmanager
async def special_engine(
    engines: LocalEngines,
    model: Path,
    *arguments: str,
    pool: int = 12000,
    measures: bool = True,
    environment: Mapping[str, str] | None = None,
) -> AsyncGenerator[LocalEngine]:
    """An engine with arguments of its own, on the second core; it must be alive at the end.

    It has measured its costs, where it ``measures`` them: until then increments are cut otherwise.
    """
    engine = await engines.start(
        model,
        core=1,
        arguments=["--max-total-tokens", str(pool), *arguments],
        environment={**STRICT, **(environment or {})},
    )
    try:
        if measures:
            await measured(engine)
        yield engine
        assert engine.is_running()
        assert "leak" not in engine.log.read_text()
    finally:
        await engine.stop()


async def measured(engine: LocalEngine) -> None:
    """Wait until an engine has measured its costs: what shares a batch with that may round
    otherwise than alone, and where two tokens are nearly as likely, answer otherwise."""
    async with EngineClient(engine.url, timeout=60) as client:
        with anyio.fail_after(60):
            while (await client.info()).costs is None:  # noqa: ASYNC110
                await anyio.sleep(0.05)


async def generate(
    client: EngineClient, text: str, tokens: int, stream_id: str | None = None
) -> tuple[str, PromptUsage]:
    """A greedy answer of ``tokens`` tokens and how its prompt was computed."""
    sampling = {**GREEDY, "max_new_tokens": tokens}
    parts: list[str] = []
    usage: PromptUsage | None = None
    async with client.generate(text=text, sampling=sampling, prompt_stream_id=stream_id) as deltas:
        async for delta in deltas:
            parts.append(delta.text)
            usage = delta.usage or usage
    assert usage is not None
    return "".join(parts), usage


class Opened:
    """The ids of prompt streams that an httpx client opens; an engine lists none."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def note(self, response: httpx.Response) -> None:
        """A response hook of a synchronous client."""
        if self._opens(response):
            response.read()
            self.ids.append(response.json()["id"])

    async def anote(self, response: httpx.Response) -> None:
        """A response hook of an asynchronous client."""
        if self._opens(response):
            await response.aread()
            self.ids.append(response.json()["id"])

    def _opens(self, response: httpx.Response) -> bool:
        request = response.request
        is_open = request.method == "POST" and request.url.path == "/prompt_streams"
        return is_open and response.is_success


async def kv(client: EngineClient) -> KvState:
    return (await client.info()).kv[0]


async def settled(client: EngineClient, streams: int = 0) -> KvState:
    """The KV pool once nothing runs: everything free but cache, nothing locked."""
    with anyio.fail_after(30):
        while True:
            info = await client.info()
            state = info.kv[0]
            unlocked = state.protected == 0 and state.pinned_streams == 0
            idle = state.free + state.evictable == state.total
            if info.prompt_streams == streams and unlocked and idle:
                return state
            await anyio.sleep(0.02)


async def prefilled(client: EngineClient, stream_id: str, tokens: int) -> StreamState:
    """The state of a stream once ``tokens`` of it have their KV."""
    with anyio.fail_after(30):
        while True:
            state = await client.stream_state(stream_id)
            if state.prefilled_tokens >= tokens:
                return state
            await anyio.sleep(0.02)
