"""Helpers of the tests on real engines."""

import json
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from flashmoa_cpu.tiny_model import SHAPES
from flashmoa_sglang.sglang.releases import RELEASE, Release0512

from flashmoa.engine import EngineClient, KvState, PromptUsage, StreamState
from flashmoa.engine.local import LocalEngine, LocalEngines, wait_for_costs
from tests.integration.engine_costs import known_costs, remember_costs

# ``words(count, seed)`` returns a text of ``count`` single-token words.
Words = Callable[[int, int], str]
Body = dict[str, Any]
# Cores of two engines. Parallel test processes start their first engines on different cores.
FIRST_CORE, SECOND_CORE = (1, 0) if os.environ.get("PYTEST_XDIST_WORKER") == "gw1" else (0, 1)
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
# A model with experts in all of its five layers.
EXPERTS = replace(SHAPES["moe"], layers=5)
# Makes a leak that SGLang finds in an idle engine's memory a crash.
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}
# An engine that takes the time of this GPU lets tokens of streams ride along with decode steps. On
# a CPU it depends on the measured costs.
RIDING = {
    "FLASHMOA_DEVICE": "h200_sxm",
    "FLASHMOA_DEVICE_MODEL": "Qwen/Qwen3-32B",
}
IS_0_5_12 = isinstance(RELEASE, Release0512)
# Binds both ranks of an engine to the second core. They would wait for each other's core otherwise.
BOTH_ON_ONE_CORE = {"SGLANG_CPU_OMP_THREADS_BIND": "1|1"}
# In SGLang 0.5.12 the variable has the cores of a single replica, and all replicas use them.
TWO_REPLICAS = {} if IS_0_5_12 else BOTH_ON_ONE_CORE


def slow(*way: Any) -> Any:
    """Return a parameter, one value or several, whose tests `make test` does not run."""
    return pytest.param(*way, marks=pytest.mark.slow)


def nightly(*way: Any) -> Any:
    """Return a parameter, one value or several, whose tests only `make nightly` runs."""
    return pytest.param(*way, marks=pytest.mark.nightly)


def slow_except(ways: Iterable[Any], *others: Any) -> list[Any]:
    return [way if way in others else slow(way) for way in ways]


def nightly_except(ways: Iterable[Any], *others: Any) -> list[Any]:
    return [way if way in others else nightly(way) for way in ways]


@asynccontextmanager
async def start_special_engine(
    engines: LocalEngines,
    model: Path | str,
    *arguments: str,
    pool: int = 12000,
    has_costs: bool = True,
    measures: bool = False,
    environment: Mapping[str, str] | None = None,
) -> AsyncGenerator[LocalEngine]:
    """Start an engine with further arguments on the second core; it must be alive at the end.

    Args:
        has_costs: whether to wait until it has its costs. Before that, increments have different
            sizes.
        measures: whether it measures its costs itself even if they are known.
    """
    variables = {**STRICT, **(environment or {})}
    if not measures:
        variables |= known_costs(model, arguments, variables)
    engine = await engines.start(
        model,
        core=SECOND_CORE,
        arguments=["--max-total-tokens", str(pool), *arguments],
        environment=variables,
    )
    try:
        if has_costs:
            assert (await wait_for_costs(engine.url)).costs
            if "FLASHMOA_DEVICE" not in (environment or {}):
                await remember_costs(engine, model, arguments)
        yield engine
        assert engine.is_running()
        assert "leak" not in engine.log.read_text()
    finally:
        await engine.stop()


async def generate(
    client: EngineClient, text: str, tokens: int, stream_id: str | None = None
) -> tuple[str, PromptUsage]:
    """Return a greedy answer of ``tokens`` tokens, and how its prompt was computed."""
    sampling = {**GREEDY, "max_new_tokens": tokens}
    parts: list[str] = []
    usage: PromptUsage | None = None
    async with client.generate(text=text, sampling=sampling, prompt_stream_id=stream_id) as deltas:
        async for delta in deltas:
            parts.append(delta.text)
            usage = delta.usage or usage
    assert usage is not None
    return "".join(parts), usage


@asynccontextmanager
async def decoding(http: httpx.AsyncClient, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
    """Begin an answer, and yield it after its first token. It is updated until the exit."""
    answer: dict[str, Any] = {}
    begun, ends = anyio.Event(), anyio.Event()

    async def read() -> None:
        async with http.stream("POST", "/generate", json={**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    answer.update(json.loads(line.removeprefix("data: ")))
                    begun.set()
                    if ends.is_set():
                        return

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        await begun.wait()
        yield answer
        assert answer["meta_info"]["finish_reason"] is None, "the answer ended before the body"
        ends.set()


async def chat_text(client: EngineClient, messages: list[Body], **parameters: Any) -> str:
    """Return the text of the answer to a chat."""
    async with client.chat(messages, **parameters) as deltas:
        return "".join([delta.text async for delta in deltas])


async def post_json(
    http: httpx.AsyncClient, path: str, body: Body | None = None, /, **fields: Any
) -> Body:
    """Return the JSON answer to a request that must succeed."""
    answer = await http.post(path, json={**(body or {}), **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def logprobs(answer: Body) -> list[float]:
    """Return all log-probabilities of an answer: of its tokens, the likeliest, its prompt's."""
    meta = answer["meta_info"]
    tokens = [*(meta.get("input_token_logprobs") or ()), *(meta.get("output_token_logprobs") or ())]
    tops = [*(meta.get("input_top_logprobs") or ()), *(meta.get("output_top_logprobs") or ())]
    tokens += [token for top in tops for token in top or ()]
    # The first token of a prompt has none.
    return [token[0] for token in tokens if token[0] is not None]


async def fetch_kv_state(client: EngineClient) -> KvState:
    return (await client.info()).kv[0]


async def wait_until_idle(client: EngineClient, streams: int = 0) -> KvState:
    """Wait until nothing runs, and all KV is free or evictable; return the state of the KV."""
    with anyio.fail_after(60):
        while True:
            info = await client.info()
            state = info.kv[0]
            unlocked = state.protected == 0 and state.pinned_streams == 0
            idle = state.free + state.evictable == state.total
            if info.prompt_streams == streams and unlocked and idle:
                return state
            await anyio.sleep(0.02)


async def wait_for_streams(client: EngineClient, count: int = 1) -> None:
    """Wait until the engine has this many prompt streams."""
    with anyio.fail_after(30):
        while (await client.info()).prompt_streams < count:  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def wait_until_held(client: EngineClient) -> None:
    """Wait until the KV of a stream is pinned."""
    with anyio.fail_after(60):
        while not (await fetch_kv_state(client)).pinned_streams:  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def fetch_stream(http: httpx.AsyncClient, stream_id: str) -> Body:
    """Return the state of a stream as the engine sends it, or its error."""
    return (await http.get(f"/prompt_streams/{stream_id}")).json()


async def wait_for_state(
    http: httpx.AsyncClient, stream_id: str, condition: Callable[[Body], object]
) -> Body:
    """Wait until a stream's state fulfils a condition, and return the state."""
    with anyio.fail_after(60):
        while not condition(state := await fetch_stream(http, stream_id)):  # noqa: ASYNC110
            await anyio.sleep(0.005)
    return state


async def wait_until_prefilled(client: EngineClient, stream_id: str, tokens: int) -> StreamState:
    """Wait until ``tokens`` tokens of a stream have their KV, and return the stream's state."""
    state = await client.stream_state(stream_id)
    with anyio.move_on_after(30):
        while state.prefilled_tokens < tokens:
            await anyio.sleep(0.02)
            state = await client.stream_state(stream_id)
    assert state.prefilled_tokens >= tokens, state
    return state


async def complete_stream(client: EngineClient, stream_id: str, seq: int = 0) -> StreamState:
    """End a stream, and wait until all of its tokens have their KV, on an engine with pages of 1.

    Args: seq: the number of the stream's next append.
    """
    await client.append(stream_id, seq, end=True)
    received = (await client.stream_state(stream_id)).received_tokens
    return await wait_until_prefilled(client, stream_id, received)


async def check_final_request(
    client: EngineClient, stream_id: str, text: str, status: str = "hit"
) -> PromptUsage:
    """Check the status of a stream's request, and that its answer is as without a stream."""
    linked, usage = await generate(client, text, 8, stream_id)
    assert usage.prompt_stream is not None and usage.prompt_stream.status == status
    await client.flush_cache()
    assert linked == (await generate(client, text, 8))[0]
    return usage
