"""Test engines that take the time of a GPU: they answer the same, and no sooner than it would."""

import json
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from flashmoa_bench.harness.modelled_gpus import read_device

from flashmoa.engine import EngineClient
from flashmoa.engine.local import LocalEngine, LocalEngines, free_port, wait_for_costs
from tests.integration.support import (
    GREEDY,
    STRICT,
    Words,
    generate,
    start_special_engine,
    wait_until_idle,
)

GPU = {"FLASHMOA_DEVICE": "h200_sxm", "FLASHMOA_DEVICE_MODEL": "Qwen/Qwen3-8B"}
NAME = "modelled h200_sxm (Qwen/Qwen3-8B, TP1)"


@pytest.fixture(scope="module")
async def hashing(engines: LocalEngines, model: Path) -> AsyncGenerator[LocalEngine]:
    async with start_special_engine(engines, f"hash:{model}", environment=GPU) as engine:
        yield engine


@pytest.mark.slow
async def test_time_changes_no_answer(
    engines: LocalEngines, client: EngineClient, model: Path, words: Words
) -> None:
    prompt = words(300, 5000)
    expected, _ = await generate(client, prompt, 30)
    slow = {**GPU, "FLASHMOA_DEVICE_SLOWDOWN": "3"}
    async with (
        start_special_engine(engines, model, environment=slow) as engine,
        EngineClient(engine.url) as modelled,
    ):
        before, started = await read_device(engine.url), time.monotonic()
        assert before["name"] == "modelled h200_sxm (Qwen/Qwen3-8B, TP1, 3 times slower)"
        assert (await generate(modelled, prompt, 30))[0] == expected
        elapsed, after = time.monotonic() - started, await read_device(engine.url)
        taken = after["device_seconds"] - before["device_seconds"]
        # A prefill and 29 decode steps. The overlap schedule may add a step.
        assert after["forwards"] - before["forwards"] >= 30
        assert elapsed > taken * 29 / 31 > 29 * 3 * 0.004


async def test_a_linked_prompt_hashes_like_an_unlinked_one(
    hashing: LocalEngine, words: Words
) -> None:
    """The next word depends on every place of the KV pool, so a wrong one would show."""
    texts = [words(200, 5100 + number) for number in range(8)]
    async with EngineClient(hashing.url) as client:
        expected: dict[str, str] = {}
        answers: dict[str, str] = {}

        async def linked(text: str) -> None:
            stream = await client.open_stream(text=text[:40])
            pieces = [text[at : at + 90] for at in range(40, len(text), 90)]
            for number, piece in enumerate(pieces):
                await client.append(stream.id, number, text=piece)
            answer, usage = await generate(client, text, 40, stream.id)
            assert usage.prompt_stream is not None and usage.prompt_stream.status == "hit"
            answers[text] = answer

        async def unlinked(text: str) -> None:
            expected[text] = (await generate(client, text, 40))[0]

        for ask in (linked, unlinked):
            async with anyio.create_task_group() as group:
                for text in texts:
                    group.start_soon(ask, text)
            await client.flush_cache()
        assert answers == expected and len(set(answers.values())) == len(texts)
        await wait_until_idle(client)


async def test_each_token_of_a_prompt_changes_its_hash(hashing: LocalEngine, words: Words) -> None:
    whole = words(120, 5150).split()
    async with EngineClient(hashing.url) as client:
        answers = {(await generate(client, " ".join(whole), 8))[0]}
        for place in range(0, 120, 10):
            changed = " ".join([*whole[:place], "other", *whole[place + 1 :]])
            answers.add((await generate(client, changed, 8))[0])
    assert len(answers) == 13


async def test_an_answer_within_a_grammar_depends_on_its_prompt(
    hashing: LocalEngine, words: Words
) -> None:
    """The grammar forbids most words of the hash, and the token in their place is certain."""
    sampling = {**GREEDY, "regex": "[0-9]{12}", "max_new_tokens": 20}
    answers: dict[str, set[str]] = {words(20, 5180 + number): set() for number in range(4)}

    async def ask(client: EngineClient, text: str) -> None:
        async with client.generate(text=text, sampling=sampling) as deltas:
            answers[text].add("".join([delta.text async for delta in deltas]))

    async with EngineClient(hashing.url) as client:
        for text in answers:
            await ask(client, text)
        async with anyio.create_task_group() as group:
            for text in answers:
                group.start_soon(ask, client, text)
    assert all(len(same) == 1 for same in answers.values())
    assert len(set.union(*answers.values())) == len(answers)


@pytest.mark.nightly
async def test_a_stock_engine_takes_the_same_time(
    engines: LocalEngines, hashing: LocalEngine, model: Path, words: Words
) -> None:
    engine = await engines.start(
        f"hash:{model}",
        core=1,
        arguments=["--flashmoa-device", "h200_sxm", "--flashmoa-device-model", "Qwen/Qwen3-8B"],
        environment={"SGLANG_PLUGINS": "flashmoa_modelled_gpu"},
    )
    try:
        body = {
            "text": words(100, 5200),
            "sampling_params": {"max_new_tokens": 8, "temperature": 0},
        }
        texts: list[str] = []
        for each in (engine, hashing):
            async with httpx.AsyncClient(base_url=each.url, timeout=60) as http:
                texts.append((await http.post("/generate", json=body)).json()["text"])
        assert texts[0] == texts[1]
        stock = await read_device(engine.url)
        assert stock["name"] == NAME and stock["forwards"] >= 8
    finally:
        await engine.stop()


@pytest.mark.slow
async def test_the_kv_pool_has_the_size_that_the_gpu_leaves(
    engines: LocalEngines, model: Path
) -> None:
    engine = await engines.start(f"hash:{model}", core=1, environment=GPU)
    try:
        async with httpx.AsyncClient(base_url=engine.url, timeout=60) as http:
            settings = (await http.get("/server_info")).json()
        # Of 141 GB, SGLang leaves a part for activations, and the weights take 16.4 GB.
        assert 800_000 < settings["max_total_num_tokens"] < 840_000
        assert settings["chunked_prefill_size"] == 8192
        assert not settings["disable_overlap_schedule"]
    finally:
        await engine.stop()


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
async def test_a_pair_of_engines_waits_for_the_link_between_their_gpus(
    engines: LocalEngines, hashing: LocalEngine, model: Path, words: Words, tmp_path: Path
) -> None:
    link = 20e6
    sheet = {"name": "linked", "memory": 10**11, "bandwidth": 4e12, "flops": 1e15, "link": link}
    (tmp_path / "linked.json").write_text(json.dumps(sheet))
    environment = {**GPU, **STRICT, "FLASHMOA_DEVICE": str(tmp_path / "linked.json")}
    common = ["--disaggregation-transfer-backend", "nixl", "--max-total-tokens", "12000"]
    bootstrap = free_port()
    roles = {
        "prefill": ["--disaggregation-bootstrap-port", str(bootstrap)],
        "decode": ["--disaggregation-decode-retraction-backup", "cpu_tensor"],
    }
    # The engines connect to each other for the first request.
    prompts = [words(20, 5300), words(300, 5301)]
    async with AsyncExitStack() as stack:
        pair: dict[str, LocalEngine] = {}
        for role, arguments in roles.items():
            pair[role] = await engines.start(
                f"hash:{model}",
                arguments=[*common, "--disaggregation-mode", role, *arguments],
                environment=environment,
            )
            stack.push_async_callback(pair[role].stop)
        assert (await wait_for_costs(pair["prefill"].url)).costs
        client = await stack.enter_async_context(EngineClient(hashing.url))
        for room, prompt in enumerate(prompts, 1):
            meeting = {"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap}
            started = time.monotonic()
            answer = await ask_pair(pair, prompt, {**meeting, "bootstrap_room": room})
            elapsed = time.monotonic() - started
            assert answer["text"] == (await generate(client, prompt, 6))[0]
    tokens = answer["meta_info"]["prompt_tokens"]
    assert elapsed > tokens * 36 * 2 * 2 * 8 * 128 / link


async def ask_pair(
    pair: dict[str, LocalEngine], prompt: str, meeting: dict[str, Any]
) -> dict[str, Any]:
    """Send a request to both engines of a pair, and return the answer of the decode engine."""
    body = {"text": prompt, "sampling_params": {**GREEDY, "max_new_tokens": 6}, **meeting}
    answers: dict[str, dict[str, Any]] = {}

    async def ask(role: str, url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            answers[role] = (await http.post("/generate", json=body)).json()

    async with anyio.create_task_group() as group:
        for role, engine in pair.items():
            group.start_soon(ask, role, engine.url)
    return answers["decode"]
