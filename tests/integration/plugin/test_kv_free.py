"""``--flashmoa-kv-cache off`` on a real engine: the same logits, with a single layer's KV."""

from pathlib import Path
from random import Random

import anyio
import pytest

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngines
from flashmoa.errors import RequestRefused
from tests.integration.support import Body, logprobs, post_json, start_special_engine

pytestmark = pytest.mark.nightly

LAYERS = 2
PROMPTS = [Random(seed).choices(range(1000), k=k) for seed, k in enumerate((1, 30, 200, 700))]
NEEDED = ["--disable-radix-cache", "--chunked-prefill-size", "-1"]
# By default SGLang reserves more memory for forwards of whole prompts than a small machine has.
MEMORY = ["--mem-fraction-static", "0.2"]


async def ask(client: EngineClient, prompt: list[int]) -> list[float]:
    """Return the log-probabilities of prompt and answer tokens, and of the likeliest tokens."""
    body: Body = {"input_ids": prompt, "return_logprob": True, "logprob_start_len": 0}
    body |= {"sampling_params": {"max_new_tokens": 1, "temperature": 0}, "top_logprobs_num": 5}
    found = logprobs(await post_json(client._http, "/generate", body))
    assert len(found) == 6 * len(prompt)
    return found


async def test_logits_are_the_same_and_no_kv_is_kept(
    client: EngineClient, engines: LocalEngines, model: Path
) -> None:
    await client.flush_cache()
    expected = [await ask(client, prompt) for prompt in PROMPTS]
    reference_kv = (await client.info()).kv[0]
    flags = ["--flashmoa-kv-cache", "off", *NEEDED, *MEMORY]
    async with (
        start_special_engine(engines, model, *flags) as engine,
        EngineClient(engine.url, timeout=60) as lean,
    ):
        for prompt, right in zip(PROMPTS, expected, strict=True):
            assert await ask(lean, prompt) == pytest.approx(right, abs=1e-4)
        # Every prompt is sent twice more, all at once; none finds KV of an earlier request.
        results: list[list[float]] = [[] for _ in range(2 * len(PROMPTS))]

        async def ask_again(number: int) -> None:
            results[number] = await ask(lean, PROMPTS[number % len(PROMPTS)])

        async with anyio.create_task_group() as group:
            for number in range(len(results)):
                group.start_soon(ask_again, number)
        for right, result in zip(expected * 2, results, strict=True):
            assert result == pytest.approx(right, abs=1e-4)
        info = await lean.info()
        await check_that_requests_for_kv_are_refused(lean)
    (kv,) = info.kv
    assert kv.free == kv.total == reference_kv.total
    assert kv.kv_bytes is not None and reference_kv.kv_bytes is not None
    assert kv.kv_bytes * LAYERS == reference_kv.kv_bytes
    assert kv.peak_bytes is not None and kv.peak_bytes > 0
    assert info.capabilities == ["render", "calls", "scoring"]


async def check_that_requests_for_kv_are_refused(client: EngineClient) -> None:
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}
    reply = await client._http.post("/generate", json=body)
    assert reply.status_code == 400
    assert "max_new_tokens 0 or 1" in reply.text
    with pytest.raises(RequestRefused, match="keeps no KV"):
        await client.prefill_only(input_ids=[1, 2])
    with pytest.raises(RequestRefused, match="keeps no KV"):
        await client.open_stream(input_ids=[1, 2])
